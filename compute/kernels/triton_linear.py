"""Projections on a GPU: any number of rows, and the same bits for a row whatever their number.

The definition is `compute.kernels.reference_linear`; how products are summed, `compute.kernels.triton_products`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compute.kernels import panels, strips
from compute.kernels.matrix import BLOCK, Matrix
from compute.kernels.ptx import PTX
from compute.kernels.triton_products import (
    FEW_ROWS,
    Scratch,
    Tiling,
    few_row_tile,
    from_operand_order,
    join_splits,
    near_tiles,
    operand_columns,
    prefetch_rows,
    prefetched_lines,
    product,
    split_columns,
    sum_products,
)
from compute.kernels.triton_support import INTERPRETED, await_kernel_before, launch_options
from protocol.errors import InvalidValue

_BLOCK = tl.constexpr(BLOCK)

MANY_ROW_TILE = 128
"""Rows of a tile where there are many."""
MANY_TILING = {False: Tiling(0, 128, 8, 64, 4), True: Tiling(0, 128, 8, 128, 3)}
"""How the weight is cut then, of bfloat16 and of e4m3; its splits are those of few rows."""
_HEAD_TILING = Tiling(0, 256, 8, 64, 3)
"""That of many heads' bfloat16 weights: a multiprocessor's program does tile after tile, so that it loads for the next
one while it stores."""
_SPLIT_TILING = Tiling(0, 64, 4, 64, 4)
_SPLIT_ROW_TILE = 64
_FEW_TILES = 64
"""Where no more tiles than these would leave most of an H200 idle, splits of many rows have programs of their own too.
Their tiles are smaller, so that the last program of each has less to add up.
"""
_PROGRAMS = 192
"""Programs of few rows that a bfloat16 weight is cut for, if it has no more tiles than that."""
_ORDERED = 2048
"""Columns that one program puts in operand order."""
_ROUND = 264
"""Programs of an e4m3 weight that an H200 runs at a time: two on a multiprocessor."""


def tiling(n: int, k: int, heads: int, e4m3: bool) -> Tiling:
    """Of a weight's shape and type alone.

    A product of bfloat16 waits for memory; one of e4m3 is nearly as long converting, so that its programs should be
    whole rounds of those that run at a time.
    """
    tiles = -(-n // 128) * heads
    if not e4m3:
        most = k // (1024 if tiles > 8 else 512)
        return Tiling(max(1, min(_PROGRAMS // tiles, most)), 128, 8, 64, 4)

    def cost(splits: int) -> float:
        programs = tiles * split_columns(k, splits)[1]
        return -(-programs // _ROUND) * _ROUND / programs + splits / 100

    return Tiling(min(range(1, max(2, k // 512 + 1)), key=cost), 128, 8, 128, 4)


def linear(x: Tensor, weight: Matrix, out: Tensor, scratch: Scratch) -> None:
    """``x`` [M, H, K] by ``weight`` [H, N, K], or [N, K] for one head, into ``out`` [M, H, N]."""
    rows, heads, k = x.shape
    if rows == 0:
        return
    n = out.shape[2]
    e4m3 = weight.scales is not None
    cut = tiling(n, k, heads, e4m3)
    if e4m3 and k % 16:
        raise InvalidValue("columns of an e4m3 weight", k, "a multiple of 16, which are loaded at a time")
    if heads == 1 and strips.fits_strips(x[:, 0], weight, cut.splits):
        strips.linear(x[:, 0], weight, out[:, 0], cut.splits, scratch)
        return
    split, splits = split_columns(k, cut.splits)
    few = rows <= FEW_ROWS
    if heads == 1 and not few and panels.fits_panels(weight) and panels.fits_output(out[:, 0]):
        panels.linear(x[:, 0], weight, out[:, 0], splits)
        return
    if heads > 1 and not few and not e4m3 and splits == 1:
        _many_rows_of_heads(x, weight, out)
        return
    ordered = e4m3 and not few and k % BLOCK == 0
    if ordered:
        x = in_operand_order(x)
    apart, lines = few, 0
    if few:
        row_tile, tiles = few_row_tile(rows), triton.cdiv(n, cut.tile)
        row_bytes = (k - (splits - 1) * split) * weight.values.element_size()
        lines = prefetched_lines(tiles * splits * heads, cut.tile, row_bytes)
        if splits > 1:
            scratch.check(tiles * splits * heads * cut.tile * row_tile, tiles * heads)
    else:
        cut, row_tile = MANY_TILING[e4m3], MANY_ROW_TILE
        tiles = triton.cdiv(n, cut.tile) * triton.cdiv(rows, row_tile)
        if not e4m3 and splits > 1 and tiles * heads <= _FEW_TILES:
            small = triton.cdiv(n, _SPLIT_TILING.tile) * triton.cdiv(rows, _SPLIT_ROW_TILE)
            floats = small * heads * splits * _SPLIT_TILING.tile * _SPLIT_ROW_TILE
            if scratch.holds(floats, small * heads):
                cut, row_tile, tiles, apart = _SPLIT_TILING, _SPLIT_ROW_TILE, small, True
    grid = (tiles, splits if apart else 1, heads)
    _linear_kernel[grid](
        x,
        weight.values.view(torch.uint8) if e4m3 else weight.values,
        weight.scales,
        out,
        scratch.memory,
        scratch.tickets,
        rows,
        n,
        k,
        split,
        x.stride(0),
        x.stride(1),
        out.stride(0),
        out.stride(1),
        SPLITS=splits,
        APART=apart,
        FEW=few,
        TILE=cut.tile,
        ROWS=row_tile,
        STEP=cut.step,
        STAGES=cut.stages,
        LINES=lines,
        ORDERED=ordered,
        WHOLE=k % (BLOCK if e4m3 else cut.step) == 0,
        PTX=PTX,
        INTERPRETED=INTERPRETED,
        num_warps=cut.warps,
        **launch_options(),
    )


def _many_rows_of_heads(x: Tensor, weight: Matrix, out: Tensor) -> None:
    rows, heads, k = x.shape
    n, cut = out.shape[2], _HEAD_TILING
    tile = max(128, min(cut.tile, triton.next_power_of_2(n)))
    tiles = triton.cdiv(n, tile) * triton.cdiv(rows, MANY_ROW_TILE) * heads
    at_a_time = 3  # in the interpreter, so that one of them has several tiles there too
    if x.is_cuda:
        at_a_time = torch.cuda.get_device_properties(x.device).multi_processor_count * (256 // tile)
    _heads_kernel[(min(tiles, at_a_time),)](
        x,
        weight.values,
        out,
        rows,
        n,
        k,
        heads,
        x.stride(0),
        x.stride(1),
        out.stride(0),
        out.stride(1),
        TILE=tile,
        ROWS=MANY_ROW_TILE,
        STEP=cut.step,
        STAGES=cut.stages,
        WHOLE=k % cut.step == 0,
        INTERPRETED=INTERPRETED,
        num_warps=cut.warps,
        **launch_options(),
    )


def in_operand_order(x: Tensor) -> Tensor:
    """``x`` [M, H, K] as contiguous bfloat16, each block's columns in operand order."""
    rows, heads, k = x.shape
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    _order_kernel[(rows, heads, triton.cdiv(k, _ORDERED))](
        x,
        out,
        k,
        x.stride(0),
        x.stride(1),
        out.stride(0),
        out.stride(1),
        COLUMNS=_ORDERED,
        num_warps=4,
        **launch_options(),
    )
    return out


@triton.jit
def _order_kernel(x, out, k, x_row, x_head, out_row, out_head, COLUMNS: tl.constexpr, OVERLAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    first = tl.program_id(2) * COLUMNS
    column = first + operand_columns(COLUMNS)
    place = first + tl.arange(0, COLUMNS)
    await_kernel_before(OVERLAPPED)
    values = tl.load(x + row * x_row + head * x_head + column, mask=column < k, other=0.0)
    tl.store(out + row * out_row + head * out_head + place, values.to(tl.bfloat16), mask=place < k)


@triton.jit(do_not_specialize=["M"])
def _linear_kernel(  # type: ignore[no-untyped-def]
    x, values, scales, out, partial, tickets,
    M, N, K, SPLIT, x_row, x_head, out_row, out_head,
    SPLITS: tl.constexpr, APART: tl.constexpr, FEW: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    STEP: tl.constexpr, STAGES: tl.constexpr, LINES: tl.constexpr, WHOLE: tl.constexpr, ORDERED: tl.constexpr,
    PTX: tl.constexpr, INTERPRETED: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """A tile of weight rows times a tile of rows of x, the only one if ``FEW``; a split of it if ``APART``, else all.
    ``SPLIT`` columns make a split. The first ``LINES`` cache lines of each weight row are asked for before the kernel
    before has ended.
    """
    tiles = tl.cdiv(N, TILE)
    head = tl.program_id(2).to(tl.int64)
    if FEW:
        tile = tl.program_id(0)
        row_tile = 0
    else:
        tile, row_tile = near_tiles(tl.program_id(0), tiles, tl.cdiv(M, ROWS))
    split = tl.program_id(1) if APART else 0
    E4M3: tl.constexpr = values.dtype.element_ty == tl.uint8
    n = tile * TILE + tl.arange(0, TILE)
    m = row_tile * ROWS + tl.arange(0, ROWS)
    at_weight = (head * N + tl.minimum(n, N - 1)) * K
    at_row = tl.minimum(m, M - 1).to(tl.int64) * x_row + head * x_head
    prefetch_rows(values, at_weight + split * SPLIT, LINES, PTX)
    await_kernel_before(OVERLAPPED)
    if E4M3:
        scales += (head * tl.cdiv(N, _BLOCK) + tile * TILE // _BLOCK) * tl.cdiv(K, _BLOCK)
    total = sum_products(
        x, at_row, m < M, values, at_weight, scales, scales, split, SPLIT, K,
        1 if APART else SPLITS, TILE, ROWS, STEP, STAGES, WHOLE, False, ORDERED, PTX, INTERPRETED,
    )  # fmt: skip
    last = True
    if APART and SPLITS > 1:
        of_all = head * tiles + tile if FEW else head * tl.num_programs(0) + tl.program_id(0)
        partial += of_all * (SPLITS * TILE * ROWS)
        total, last = join_splits(total, partial, tickets + of_all, m < M, split, SPLITS, TILE, ROWS)
    if last:
        if E4M3:
            total = from_operand_order(total, TILE, ROWS)
        at_out = m.to(tl.int64)[:, None] * out_row + head * out_head + n[None, :]
        tl.store(out + at_out, tl.trans(total).to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["M"])
def _heads_kernel(  # type: ignore[no-untyped-def]
    x, values, out, M, N, K, heads, x_row, x_head, out_row, out_head,
    TILE: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr,
    INTERPRETED: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Of each head's bfloat16 weight, in one split. The tiles of a program are one loop, which Triton makes load ahead
    from one into the next.
    """
    tiles, row_tiles, steps = tl.cdiv(N, TILE), tl.cdiv(M, ROWS), tl.cdiv(K, STEP)
    of_head = tiles * row_tiles
    count = tl.cdiv(of_head * heads - tl.program_id(0), tl.num_programs(0))
    k = tl.arange(0, STEP)
    acc = tl.zeros([TILE, ROWS], tl.float32)
    await_kernel_before(OVERLAPPED)
    for i in tl.range(0, count * steps, num_stages=STAGES):
        number = tl.program_id(0) + i // steps * tl.num_programs(0)
        head = (number // of_head).to(tl.int64)
        tile, row_tile = near_tiles(number % of_head, tiles, row_tiles)
        n = tile * TILE + tl.arange(0, TILE)
        m = row_tile * ROWS + tl.arange(0, ROWS)
        column = (i % steps * STEP + k)[None, :]
        along = values + ((head * N + tl.minimum(n, N - 1)) * K)[:, None] + column
        across = x + (tl.minimum(m, M - 1).to(tl.int64) * x_row + head * x_head)[:, None] + column
        if WHOLE:
            w = tl.load(along)
            rows = tl.load(across)
        else:
            w = tl.load(along, mask=column < K, other=0.0)
            rows = tl.load(across, mask=column < K, other=0.0)
        acc = product(w, tl.trans(rows.to(tl.bfloat16)), acc, INTERPRETED)
        if i % steps == steps - 1:
            at_out = m.to(tl.int64)[:, None] * out_row + head * out_head + n[None, :]
            total = tl.trans(tl.zeros([TILE, ROWS], tl.float32) + acc)
            tl.store(out + at_out, total.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])
            acc = tl.zeros([TILE, ROWS], tl.float32)
