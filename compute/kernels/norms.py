"""RMS norms and the gate of an MLP, into tensors of the caller. `compute.kernels.reference_norms` defines them.

A row's result depends on nothing but its own inputs. ``kernels`` chooses the implementation by name; by default it is
that of the device (`compute.kernels.choice.default_kernels`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from compute.kernels import reference_norms
from compute.kernels.choice import KernelsName, default_kernels
from protocol.errors import InvalidValue

_FLOATS = (torch.float32, torch.bfloat16)


def add_rms_norm(
    residual: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    normed: Tensor,
    *,
    kernels: KernelsName | None = None,
) -> None:
    """Add ``delta`` to ``residual`` in place, and write the sum's RMS norm times ``weight`` to ``normed``.

    ``residual`` is float32 [M, H], ``delta`` float32 or bfloat16 [M, H] or None, ``weight`` float32 [H], ``normed``
    bfloat16 or float32 [M, H]; all contiguous. Raises `InvalidValue` for shapes or dtypes that do not fit.
    """
    _check("residual", residual, residual.shape, (torch.float32,))
    _check("norm's weight", weight, residual.shape[1:], (torch.float32,))
    _check("normed", normed, residual.shape, _FLOATS)
    if delta is not None:
        _check("delta", delta, residual.shape, _FLOATS)
    if (kernels or default_kernels(residual.device.type)) == "reference":
        total, result = reference_norms.add_rms_norm(residual, delta, weight, eps)
        residual.copy_(total)
        normed.copy_(result)
        return
    from compute.kernels import triton_norms  # where it is used: a CPU worker needs no triton

    triton_norms.add_rms_norm(residual, delta, weight, eps, normed)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor, *, kernels: KernelsName | None = None) -> None:
    """Write the RMS norm of each row of ``x`` times ``weight`` to ``out``.

    ``x`` is float32 or bfloat16 [M, K] and ``out`` bfloat16 or float32 [M, K], each with contiguous rows at any stride;
    ``weight`` is float32 [K]. Raises `InvalidValue` for shapes or dtypes that do not fit.
    """
    _check_rows("x", x, x.shape)
    _check("norm's weight", weight, x.shape[1:], (torch.float32,))
    _check_rows("out", out, x.shape)
    if (kernels or default_kernels(x.device.type)) == "reference":
        out.copy_(reference_norms.add_rms_norm(x.float(), None, weight, eps)[1])
        return
    from compute.kernels import triton_norms

    triton_norms.rms_norm(x, weight, eps, out)


def silu_mul(gate_up: Tensor, out: Tensor, *, kernels: KernelsName | None = None) -> None:
    """Write ``silu(gate) * up`` to ``out`` bfloat16 [M, I]; ``gate_up`` is float32 or bfloat16 [M, 2 I], gate first.

    Both are contiguous. Raises `InvalidValue` for shapes or dtypes that do not fit.
    """
    _check("gate_up", gate_up, gate_up.shape, _FLOATS)
    _check("out", out, torch.Size((gate_up.shape[0], gate_up.shape[1] // 2)), (torch.bfloat16,))
    if (kernels or default_kernels(gate_up.device.type)) == "reference":
        out.copy_(reference_norms.silu_mul(gate_up))
        return
    from compute.kernels import triton_norms

    triton_norms.silu_mul(gate_up, out)


def _check(name: str, tensor: Tensor, shape: torch.Size, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.shape != shape or tensor.dtype not in dtypes or not tensor.is_contiguous():
        needed = f"contiguous {' or '.join(map(str, dtypes))} {tuple(shape)}"
        raise InvalidValue(name, f"{tensor.dtype} {tuple(tensor.shape)}", needed)


def _check_rows(name: str, tensor: Tensor, shape: torch.Size) -> None:
    if tensor.shape != shape or tensor.dim() != 2 or tensor.dtype not in _FLOATS or tensor.stride(1) != 1:
        needed = f"float32 or bfloat16 rows {tuple(shape)}"
        raise InvalidValue(name, f"{tensor.dtype} {tuple(tensor.shape)}", needed)
