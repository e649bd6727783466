"""The blend of index queries on the device, one launch a group. `compute.kernels.reference_blend` defines it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from compute.kernels import reference_blend
from compute.kernels.choice import KernelsName, default_kernels
from compute.kernels.triton_support import await_kernel_before, launch_options
from protocol.errors import InvalidValue

LANES = 512
"""Values of a query that one program blends, row after row."""


def blend(
    state: Tensor, query: Tensor, weights: Tensor, accepted: Tensor, keep: float, *, kernels: KernelsName | None = None
) -> None:
    """Enqueue `reference_blend.blend`; all tensors are contiguous. Raises `InvalidValue` for shapes that do not fit."""
    batch, rows, heads, size = query.shape
    width = heads * (size + 1)
    tensors = (state, query, weights, accepted)
    shapes = ((batch, rows + 1, width), query.shape, (batch, rows, heads), (batch,))
    if any(tensor.shape != shape or not tensor.is_contiguous() for tensor, shape in zip(tensors, shapes, strict=True)):
        raise InvalidValue("state, queries, weights, accepted", [tuple(t.shape) for t in tensors], f"{shapes}")
    if (kernels or default_kernels(query.device.type)) == "reference":
        reference_blend.blend(state, query, weights, accepted, keep)
        return
    _blend_kernel[(triton.cdiv(width, LANES), batch)](
        state,
        query,
        weights,
        accepted,
        keep,
        (1.0 - keep * keep) ** 0.5,
        ROWS=rows,
        VALUES=heads * size,
        WIDTH=width,
        LANES=LANES,
        num_warps=4,
        **launch_options(),
    )


@triton.jit
def _blend_kernel(  # type: ignore[no-untyped-def]
    state,
    query,
    weights,
    accepted,
    keep,
    fresh,
    ROWS: tl.constexpr,
    VALUES: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    await_kernel_before(OVERLAPPED)
    place = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    is_value = lane < VALUES
    is_weight = (lane >= VALUES) & (lane < WIDTH)
    state += place * (ROWS + 1) * WIDTH + lane
    query += place * ROWS * VALUES + lane
    weights += place * ROWS * (WIDTH - VALUES) + lane - VALUES
    stayed = tl.load(accepted + place)
    before = tl.load(state + stayed * WIDTH, mask=lane < WIDTH, other=0.0)
    before = tl.where(stayed > 0, before, 0.0)
    tl.store(state, before, mask=lane < WIDTH)
    kept, new_part = tl.where(stayed == 0, 0.0, keep), tl.where(stayed == 0, 1.0, fresh)
    for _ in tl.static_range(ROWS):
        value = tl.load(query, mask=is_value, other=0.0).to(tl.float32)
        new = tl.where(is_value, value, tl.load(weights, mask=is_weight, other=0.0))
        before = kept * before + new_part * new
        state += WIDTH
        tl.store(state, before, mask=lane < WIDTH)
        tl.store(query, before.to(tl.bfloat16), mask=is_value)
        tl.store(weights, before, mask=is_weight)
        query += VALUES
        weights += WIDTH - VALUES
        kept, new_part = keep, fresh
