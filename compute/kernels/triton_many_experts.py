"""The mixture of experts on a GPU for many rows: each expert computes the rows that chose it, in tiles.

Products are those of `compute.kernels.triton_experts` and give a row the same bits. A *pair* is a row and one of its
places: place 0 is the shared expert, if there is one, and the choices follow. Pairs are sorted by expert on the device,
those of an expert by number; how many tiles of rows an expert needs is known there only, so as many programs start as
could be needed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compute.kernels import panels
from compute.kernels.matrix import BLOCK, Matrix
from compute.kernels.ptx import PTX
from compute.kernels.triton_experts import gate_up_rows, gated_rows, tilings, weight_of, weight_pointers
from compute.kernels.triton_linear import MANY_ROW_TILE, MANY_TILING, in_operand_order
from compute.kernels.triton_products import (
    Scratch,
    from_operand_order,
    near_tiles,
    operand_places,
    split_columns,
    sum_products,
)
from compute.kernels.triton_support import INTERPRETED, await_kernel_before, launch_options
from protocol.errors import InvalidValue

_BLOCK = tl.constexpr(BLOCK)
_JOINED_COLUMNS = 1024
_SORTED = 1024
"""Choices that a program puts in order, of one expert."""
_COUNTED = 4096
"""Choices that it counts at a time, to know what comes before them."""


def many_rows(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Matrix,
    down: Matrix,
    shared: tuple[Matrix, Matrix] | None,
    out: Tensor,
    scratch: Scratch,
) -> None:
    """As `compute.kernels.experts.experts`, for a shared expert of the others' shape; in parts that ``scratch`` holds.

    Raises `InvalidValue` if it does not hold one row.
    """
    places = chosen.shape[1] + (shared is not None)
    floats = places * (down.shape[2] // 2 + down.shape[1])  # of a row, between the products
    most = scratch.memory.numel() // floats
    if most < 1:
        raise InvalidValue("a product's scratch floats", scratch.memory.numel(), f"at least {floats}, for one row")
    most = most // 8 * 8 or most  # so that panels have no rows too many
    for start in range(0, x.shape[0], most):
        part = slice(start, start + most)
        _part(x[part], chosen[part], weights[part], gate_up, down, shared, out[part], scratch)


def _part(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Matrix,
    down: Matrix,
    shared: tuple[Matrix, Matrix] | None,
    out: Tensor,
    scratch: Scratch,
) -> None:
    rows, hidden = x.shape
    count, inner = gate_up.shape[0], down.shape[2]
    places = chosen.shape[1] + (shared is not None)
    pairs = rows * places
    order, ends = sorted_pairs(chosen, count, shared is not None)
    shared_gate_up, shared_down = shared or (gate_up, down)
    e4m3 = gate_up.scales is not None
    first, second = tilings(hidden, e4m3)
    gated_floats = panels.panel_rows(pairs) * inner // 2
    fits = gated_floats + pairs * hidden <= scratch.memory.numel() and count <= panels.MOST_EXPERTS
    fits = fits and panels.panel_rows(pairs) <= 2 * pairs  # as rows lie where outputs will, which are twice as wide
    if fits and all(map(panels.fits_panels, (gate_up, down, shared_gate_up, shared_down))):
        gated = scratch.memory[:gated_floats].view(torch.bfloat16)
        outputs = scratch.memory[gated_floats:]
        rows_of_pairs = outputs.view(torch.bfloat16)  # until there are outputs
        panels.fill_panels(x, rows_of_pairs, order, places)
        each = 5 * chosen.numel() // (4 * count)  # of most experts no more
        panels.gate_up(rows_of_pairs, ends, gate_up, shared_gate_up, gated, pairs, each, first.splits)
        panels.down(gated, order, ends, down, shared_down, outputs, each, second.splits)
        _join(outputs, weights, out, shared is not None)
        return
    row_tile, cut = MANY_ROW_TILE, MANY_TILING[e4m3]
    ordered = e4m3 and hidden % BLOCK == 0 and inner % BLOCK == 0
    if ordered:
        x = in_operand_order(x[:, None])
    counts = ends.diff(prepend=ends.new_zeros(1))
    tile_ends = ((counts + row_tile - 1) // row_tile).cumsum(0, dtype=torch.int32)
    row_tiles = triton.cdiv(pairs, row_tile) + count

    gated = scratch.memory[: pairs * inner // 2].view(torch.bfloat16)
    outputs = scratch.memory[pairs * inner // 2 :]
    common = {
        "COUNT": count,
        "EXPERTS": triton.next_power_of_2(count + 1),
        "TILE": cut.tile,
        "ROWS": row_tile,
        "ORDERED": ordered,
        "STEP": cut.step,
        "STAGES": cut.stages,
        "PTX": PTX,
        "INTERPRETED": INTERPRETED,
        "num_warps": cut.warps,
        **launch_options(),
    }
    whole = BLOCK if e4m3 else cut.step
    split, splits = split_columns(hidden, first.splits)
    _many_gate_up_kernel[(row_tiles * triton.cdiv(2 * inner, cut.tile),)](
        x,
        order,
        ends,
        tile_ends,
        *weight_pointers(gate_up),
        *weight_pointers(shared_gate_up),
        gated,
        inner,
        hidden,
        split,
        row_tiles,
        PLACES=places,
        SPLITS=splits,
        WHOLE=hidden % whole == 0,
        **common,
    )
    split, splits = split_columns(inner, second.splits)
    _many_down_kernel[(row_tiles * triton.cdiv(hidden, cut.tile),)](
        gated,
        order,
        ends,
        tile_ends,
        *weight_pointers(down),
        *weight_pointers(shared_down),
        outputs,
        hidden,
        inner,
        split,
        row_tiles,
        SPLITS=splits,
        WHOLE=inner % whole == 0,
        **common,
    )
    _join(outputs, weights, out, shared is not None)


def sorted_pairs(chosen: Tensor, count: int, shared: bool) -> tuple[Tensor, Tensor]:
    """The pairs' numbers by expert, then by number, and where those of each of ``count`` experts, and of the shared one
    behind them, end: int32 [pairs] and [count + 1]. ``chosen`` is contiguous.
    """
    choices = chosen.numel()
    order = chosen.new_empty(choices + chosen.shape[0] * shared)
    ends = chosen.new_empty(count + 1)
    _sort_kernel[(count + 1, triton.cdiv(choices, _SORTED))](
        chosen,
        order,
        ends,
        choices,
        CHOICES=chosen.shape[1],
        SHARED=int(shared),
        TILE=_SORTED,
        COUNTED=_COUNTED,
        num_warps=8,
        **launch_options(),
    )
    return order, ends


def _join(outputs: Tensor, weights: Tensor, out: Tensor, shared: bool) -> None:
    rows, hidden = out.shape
    _many_join_kernel[(rows, triton.cdiv(hidden, _JOINED_COLUMNS))](
        outputs,
        weights,
        out,
        hidden,
        CHOICES=weights.shape[1],
        SHARED=int(shared),
        TILE=_JOINED_COLUMNS,
        num_warps=4,
        **launch_options(),
    )


@triton.jit
def _sort_kernel(  # type: ignore[no-untyped-def]
    chosen, order, ends, choices,
    CHOICES: tl.constexpr, SHARED: tl.constexpr, TILE: tl.constexpr, COUNTED: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """The pairs of an expert in a part of the choices. Each program counts what comes before them; none waits."""
    expert = tl.program_id(0)
    first = tl.program_id(1) * TILE
    choice = first + tl.arange(0, TILE)
    await_kernel_before(OVERLAPPED)
    if expert == tl.num_programs(0) - 1:  # the shared one: all rows
        rows = choices // CHOICES
        end = choices + SHARED * rows
        if SHARED:
            tl.store(order + choices + choice, choice * (CHOICES + 1), mask=choice < rows)
    else:
        before = tl.zeros([COUNTED], tl.int32)
        for start in range(0, choices, COUNTED):
            other = start + tl.arange(0, COUNTED)
            number = tl.load(chosen + other, mask=other < choices, other=2**31 - 1)
            before += ((number < expert) | ((number == expert) & (other < first))).to(tl.int32)
        end = tl.sum(before, 0)
        mine = (tl.load(chosen + choice, mask=choice < choices, other=-1) == expert).to(tl.int32)
        pair = choice + (choice // CHOICES + 1) * SHARED
        tl.store(order + end + tl.cumsum(mine, 0) - 1, pair, mask=mine == 1)
        end += tl.sum(mine, 0)
    if tl.program_id(1) == tl.num_programs(1) - 1:
        tl.store(ends + expert, end)


@triton.jit
def _rows_of_tile(ends, tile_ends, row_tile, EXPERTS: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The expert of a tile of rows (more than ``COUNT``: no tile), and the first and last + 1 of its sorted pairs."""
    expert = tl.arange(0, EXPERTS)
    before = (tl.load(tile_ends + expert, mask=expert <= COUNT, other=2**31 - 1) <= row_tile).to(tl.int32)
    number = tl.sum(before, 0)
    known = number <= COUNT
    pairs_before = tl.load(ends + number - 1, mask=known & (number > 0), other=0)
    tiles_before = tl.load(tile_ends + number - 1, mask=known & (number > 0), other=0)
    first = pairs_before + (row_tile - tiles_before) * ROWS
    end = tl.load(ends + number, mask=known, other=0)
    return number, first, tl.minimum(first + ROWS, end)


@triton.jit(do_not_specialize=["row_tiles"])
def _many_gate_up_kernel(  # type: ignore[no-untyped-def]
    x, order, ends, tile_ends, values, scales, shared_values, shared_scales, gated,
    INNER, HIDDEN, SPLIT, row_tiles,
    COUNT: tl.constexpr, EXPERTS: tl.constexpr, PLACES: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr, ORDERED: tl.constexpr,
    PTX: tl.constexpr, INTERPRETED: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """``gated[i] = silu(gate(x)) * up(x)`` of the i-th of the sorted pairs."""
    await_kernel_before(OVERLAPPED)
    HALF: tl.constexpr = TILE // 2
    tile, row_tile = near_tiles(tl.program_id(0), tl.cdiv(INNER, HALF), row_tiles)
    number, first, end = _rows_of_tile(ends, tile_ends, row_tile, EXPERTS, COUNT, ROWS)
    if first < end:
        E4M3: tl.constexpr = values.dtype.element_ty == tl.uint8
        values, scales = weight_of(
            values, scales, shared_values, shared_scales, number, number == COUNT, 2 * INNER, HIDDEN
        )
        up_scales = scales
        if E4M3:
            scale_columns = tl.cdiv(HIDDEN, _BLOCK)
            up_scales += (INNER + tile * HALF) // _BLOCK * scale_columns
            scales += tile * HALF // _BLOCK * scale_columns
        i = first + tl.arange(0, ROWS)
        row = tl.load(order + tl.minimum(i, end - 1)) // PLACES
        at_weight = gate_up_rows(tile, INNER, E4M3, TILE).to(tl.int64) * HIDDEN
        total = sum_products(
            x, row * HIDDEN, i < end, values, at_weight, scales, up_scales, 0, SPLIT, HIDDEN,
            SPLITS, TILE, ROWS, STEP, STAGES, WHOLE, True, ORDERED, PTX, INTERPRETED,
        )  # fmt: skip
        inner = tile * HALF + tl.arange(0, HALF)
        to = operand_places(inner) if ORDERED else inner
        at = i[:, None].to(tl.int64) * INNER + to[None, :]
        tl.store(gated + at, gated_rows(total, TILE, ROWS), mask=(i < end)[:, None] & (inner < INNER)[None, :])


@triton.jit(do_not_specialize=["row_tiles"])
def _many_down_kernel(  # type: ignore[no-untyped-def]
    gated, order, ends, tile_ends, values, scales, shared_values, shared_scales, outputs,
    HIDDEN, INNER, SPLIT, row_tiles,
    COUNT: tl.constexpr, EXPERTS: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    STEP: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr, ORDERED: tl.constexpr, PTX: tl.constexpr,
    INTERPRETED: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """``outputs[pair]``, float32, of the sorted pairs."""
    await_kernel_before(OVERLAPPED)
    tile, row_tile = near_tiles(tl.program_id(0), tl.cdiv(HIDDEN, TILE), row_tiles)
    number, first, end = _rows_of_tile(ends, tile_ends, row_tile, EXPERTS, COUNT, ROWS)
    if first < end:
        E4M3: tl.constexpr = values.dtype.element_ty == tl.uint8
        values, scales = weight_of(values, scales, shared_values, shared_scales, number, number == COUNT, HIDDEN, INNER)
        if E4M3:
            scales += tile * TILE // _BLOCK * tl.cdiv(INNER, _BLOCK)
        n = tile * TILE + tl.arange(0, TILE)
        i = first + tl.arange(0, ROWS)
        pair = tl.load(order + tl.minimum(i, end - 1))
        at_row = tl.minimum(i, end - 1) * INNER
        at_weight = tl.minimum(n, HIDDEN - 1).to(tl.int64) * INNER
        total = sum_products(
            gated, at_row, i < end, values, at_weight, scales, scales, 0, SPLIT, INNER,
            SPLITS, TILE, ROWS, STEP, STAGES, WHOLE, False, ORDERED, PTX, INTERPRETED,
        )  # fmt: skip
        if E4M3:
            total = from_operand_order(total, TILE, ROWS)
        at = pair[:, None].to(tl.int64) * HIDDEN + n[None, :]
        tl.store(outputs + at, tl.trans(total), mask=(i < end)[:, None] & (n < HIDDEN)[None, :])


@triton.jit
def _many_join_kernel(  # type: ignore[no-untyped-def]
    outputs, weights, out, HIDDEN,
    CHOICES: tl.constexpr, SHARED: tl.constexpr, TILE: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """The sum of a row's outputs, place by place, as `compute.kernels.triton_experts` adds them."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = n < HIDDEN
    await_kernel_before(OVERLAPPED)
    result = tl.zeros([TILE], tl.float32)
    outputs += row * (CHOICES + SHARED) * HIDDEN
    if SHARED:
        result += tl.load(outputs + n, mask=inside, other=0.0)
    for choice in tl.static_range(CHOICES):
        output = tl.load(outputs + (choice + SHARED) * HIDDEN + n, mask=inside, other=0.0)
        weight = tl.load(weights + row * CHOICES + choice)
        result = tl.fma(output, tl.zeros([TILE], tl.float32) + weight, result)
    tl.store(out + row * HIDDEN + n, result, mask=inside)
