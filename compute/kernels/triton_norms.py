"""RMS norms, the gate of an MLP and the router's choice on a GPU: one program for each row.

The definitions are `compute.kernels.reference_norms` and `compute.kernels.reference_experts`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from compute.kernels.triton_support import await_kernel_before, launch_options
from protocol.model import ModelConfig

_COLUMNS = 1024
"""Columns of the gate that one program computes."""


def add_rms_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, normed: Tensor) -> None:
    """As `compute.kernels.norms.add_rms_norm`."""
    rows, columns = residual.shape
    if rows:
        _norm_kernel[(rows,)](
            residual,
            delta,
            weight,
            normed,
            eps,
            columns,
            columns,
            columns,
            ADDED=delta is not None,
            TILE=triton.next_power_of_2(columns),
            num_warps=_warps(columns),
            **launch_options(),
        )


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """As `compute.kernels.norms.rms_norm`."""
    rows, columns = x.shape
    if rows:
        _norm_kernel[(rows,)](
            x,
            None,
            weight,
            out,
            eps,
            columns,
            x.stride(0),
            out.stride(0),
            ADDED=False,
            TILE=triton.next_power_of_2(columns),
            num_warps=_warps(columns),
            **launch_options(),
        )


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """As `compute.kernels.norms.silu_mul`."""
    rows, columns = out.shape
    if rows:
        grid = (rows, triton.cdiv(columns, _COLUMNS))
        _silu_kernel[grid](gate_up, out, columns, TILE=_COLUMNS, num_warps=4, **launch_options())


def route(logits: Tensor, bias: Tensor, config: ModelConfig, chosen: Tensor, weights: Tensor) -> None:
    """As `compute.kernels.experts.route`."""
    rows, count = logits.shape
    if rows:
        _route_kernel[(rows,)](
            logits,
            bias,
            chosen,
            weights,
            config.routed_scaling_factor,
            COUNT=count,
            TILE=triton.next_power_of_2(count),
            GROUPS=config.n_group,
            GROUPS_KEPT=config.topk_group,
            CHOICES=config.num_experts_per_tok,
            CHOICES_TILE=triton.next_power_of_2(config.num_experts_per_tok),
            NORMALISED=config.norm_topk_prob,
            num_warps=1,
            **launch_options(),
        )


def _warps(columns: int) -> int:
    return max(1, min(16, int(triton.next_power_of_2(columns)) // 512))


@triton.jit
def _norm_kernel(  # type: ignore[no-untyped-def]
    x, delta, weight, out, eps, columns, x_row, out_row,
    ADDED: tl.constexpr, TILE: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    inside = column < columns
    scale = tl.load(weight + column, mask=inside, other=0.0)
    await_kernel_before(OVERLAPPED)
    values = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        values += tl.load(delta + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(x + row * x_row + column, values, mask=inside)
    mean = tl.sum(values * values, 0) / columns
    result = values * tl.rsqrt(mean + eps) * scale
    tl.store(out + row * out_row + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _silu_kernel(gate_up, out, columns, TILE: tl.constexpr, OVERLAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < columns
    await_kernel_before(OVERLAPPED)
    gate = tl.load(gate_up + row * (2 * columns) + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * columns) + columns + column, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * columns + column, result.to(tl.bfloat16), mask=inside)


@triton.jit
def _route_kernel(  # type: ignore[no-untyped-def]
    logits, bias, chosen, weights, factor,
    COUNT: tl.constexpr, TILE: tl.constexpr, GROUPS: tl.constexpr, GROUPS_KEPT: tl.constexpr, CHOICES: tl.constexpr,
    CHOICES_TILE: tl.constexpr, NORMALISED: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, TILE)
    real = expert < COUNT
    offset = tl.load(bias + expert, mask=real, other=0.0)
    await_kernel_before(OVERLAPPED)
    score = 1.0 / (1.0 + tl.exp(-tl.load(logits + row * COUNT + expert, mask=real, other=0.0)))
    eligible = tl.where(real, score + offset, -float("inf"))
    if GROUPS > 1:
        group = expert // (COUNT // GROUPS)
        best = tl.zeros([TILE], tl.float32)
        for number in tl.static_range(GROUPS):
            mine = tl.where(group == number, eligible, -float("inf"))
            first = tl.max(mine, 0)
            others = tl.where(expert == tl.argmax(mine, 0), -float("inf"), mine)
            best = tl.where(group == number, first + tl.max(others, 0), best)
        before = tl.zeros([TILE], tl.int32)  # groups that come before an expert's own
        for number in tl.static_range(GROUPS):
            of_number = tl.max(tl.where(group == number, best, -float("inf")), 0)
            before += ((of_number > best) | ((of_number == best) & (number < group))).to(tl.int32)
        eligible = tl.where(real & (before < GROUPS_KEPT), eligible, -float("inf"))
    # One after the other: the largest, and among equal ones the lowest number.
    taken = tl.zeros([TILE], tl.int32)
    rest = eligible
    for _ in tl.static_range(CHOICES):
        largest = tl.max(rest, 0)
        number = tl.min(tl.where((rest == largest) & (taken == 0), expert, TILE), 0)
        taken = tl.where(expert == number, 1, taken)
        rest = tl.where(expert == number, -float("inf"), rest)
    place = tl.cumsum(taken, 0) - 1
    kept = taken == 1
    share = score
    if NORMALISED:
        choice = tl.arange(0, CHOICES_TILE)
        ordered = tl.sum(tl.where(kept[None, :] & (place[None, :] == choice[:, None]), score[None, :], 0.0), 1)
        share = score / (tl.sum(ordered, 0) + 1e-20)
    tl.store(chosen + row * CHOICES + place, expert, mask=kept)
    tl.store(weights + row * CHOICES + place, share * factor, mask=kept)
