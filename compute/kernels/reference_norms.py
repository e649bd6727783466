"""RMS norms and the gate of an MLP, row by row, in float32."""

from __future__ import annotations

from torch import Tensor

from compute.kernels import tiles


def add_rms_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``residual + delta`` and its norm, float32 [M, H]."""
    total = residual if delta is None else residual + delta.float()
    return total, tiles.rms_norm(total, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of [M, 2 I], gate first: float32 [M, I]."""
    gate, up = tiles.pad_rows(gate_up.float()).chunk(2, dim=1)
    return tiles.silu(gate.contiguous()).mul_(up)[: gate_up.shape[0]]
