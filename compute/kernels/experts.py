"""The mixture of experts, into tensors of the caller. `compute.kernels.reference_experts` defines it.

A row's result depends on nothing but its own inputs: not on the number of rows, nor on which experts others chose.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compute.kernels import reference_experts
from compute.kernels.choice import KernelsName, default_kernels
from compute.kernels.linear import Workspace
from compute.kernels.matrix import Matrix
from protocol.errors import InvalidValue
from protocol.model import ModelConfig

_GATED_COLUMNS = 64
"""Rows of up, or of gate, in one tile of the Triton kernels: they share a scale."""


@dataclass(frozen=True)
class Experts:
    """Gated MLPs ``down(silu(gate(x)) * up(x))``: ``gate_up`` is [E, 2 I, H], gate first, and ``down`` [E, H, I]."""

    gate_up: Matrix
    down: Matrix

    def __post_init__(self) -> None:
        count, inner2, hidden = self.gate_up.shape
        if self.down.shape != (count, hidden, inner2 // 2):
            raise InvalidValue("experts' down", tuple(self.down.shape), f"[{count}, {hidden}, {inner2 // 2}]")

    @property
    def count(self) -> int:
        return self.gate_up.shape[0]


def route(
    logits: Tensor,
    bias: Tensor,
    config: ModelConfig,
    out: tuple[Tensor, Tensor] | None = None,
    *,
    kernels: KernelsName | None = None,
) -> tuple[Tensor, Tensor]:
    """Numbers, ascending, int32 [M, k], and weights, float32 [M, k], of each row's k experts, new or in ``out``.

    ``logits`` is float32 [M, E] and ``bias`` float32 [E]. Raises `InvalidValue` for shapes or dtypes that do not fit.
    """
    rows, count = logits.shape
    if logits.dtype != torch.float32 or bias.shape != (count,) or bias.dtype != torch.float32:
        found = f"{logits.dtype} {tuple(logits.shape)}, {bias.dtype} {tuple(bias.shape)}"
        raise InvalidValue("router's logits and bias", found, f"float32 [M, {count}] and float32 [{count}]")
    if count % config.n_group or count // config.n_group * config.topk_group < config.num_experts_per_tok:
        raise InvalidValue("experts", count, f"enough for {config.num_experts_per_tok} from {config.topk_group} groups")
    shape = (rows, config.num_experts_per_tok)
    chosen, weights = out or (logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape))
    if (kernels or default_kernels(logits.device.type)) == "reference":
        numbers, shares = reference_experts.route(logits, bias, config)
        chosen.copy_(numbers)
        weights.copy_(shares)
        return chosen, weights
    from compute.kernels import triton_norms  # where it is used: a CPU worker needs no triton

    triton_norms.route(logits, bias, config, chosen, weights)
    return chosen, weights


def experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    experts: Experts,
    shared: tuple[Matrix, Matrix] | None,
    out: Tensor,
    workspace: Workspace,
) -> None:
    """Write the shared expert's output plus each chosen one's times its weight to ``out``, added by expert number.

    ``x`` is bfloat16 [M, H], ``chosen`` int32 [M, k] ascending in each row, ``weights`` float32 [M, k], ``shared`` the
    gate_up [2 I', H] and down [H, I'] of an expert that every row uses with weight 1, ``out`` float32 [M, H]; all
    contiguous. The Triton kernels want a shared expert of the others' shape and dtype, and of e4m3 an I that is a
    multiple of 64. Raises `InvalidValue` for shapes or dtypes that do not fit.
    """
    rows, hidden = x.shape
    for name, tensor, shape, dtype in (
        ("x", x, (rows, experts.gate_up.shape[2]), torch.bfloat16),
        ("chosen", chosen, (rows, chosen.shape[1]), torch.int32),
        ("weights", weights, (rows, chosen.shape[1]), torch.float32),
        ("out", out, (rows, hidden), torch.float32),
    ):
        if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise InvalidValue(name, f"{tensor.dtype} {tuple(tensor.shape)}", f"contiguous {dtype} {shape}")
    if workspace.kernels == "reference":
        out.copy_(reference_experts.experts(x, chosen, weights, experts.gate_up, experts.down, shared))
        return
    for name, matrix, of_experts in (
        ("shared expert's gate_up", shared and shared[0], experts.gate_up),
        ("shared expert's down", shared and shared[1], experts.down),
    ):
        if matrix is not None and (matrix.shape, matrix.values.dtype) != (
            of_experts.shape[1:],
            of_experts.values.dtype,
        ):
            needed = f"{of_experts.values.dtype} {tuple(of_experts.shape[1:])}, as the other experts"
            raise InvalidValue(name, f"{matrix.values.dtype} {tuple(matrix.shape)}", needed)
    inner = experts.down.shape[2]
    if experts.down.scales is not None and inner % _GATED_COLUMNS:
        raise InvalidValue("inner size of e4m3 experts", inner, f"a multiple of {_GATED_COLUMNS}")
    from compute.kernels.triton_experts import few_rows  # where it is used: a CPU worker needs no triton
    from compute.kernels.triton_many_experts import many_rows
    from compute.kernels.triton_products import FEW_ROWS

    if not rows:
        return
    arguments = (x, chosen, weights, experts.gate_up, experts.down, shared, out, workspace.scratch)
    if rows > FEW_ROWS or not few_rows(*arguments):
        many_rows(*arguments)
