"""The mixture of experts on a GPU for few rows: two launches, and every expert's weight is read once.

The definition is `compute.kernels.reference_experts`; how products are summed, `compute.kernels.triton_products`. All
rows are computed with each expert that any of them chose, as a matrix instruction has that many columns anyway, and
only those that chose it are kept. The shared expert is one more. `compute.kernels.triton_many_experts` does many rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compute.kernels import strips
from compute.kernels.matrix import BLOCK, Matrix
from compute.kernels.ptx import PTX
from compute.kernels.triton_products import (
    Scratch,
    Tiling,
    few_row_tile,
    from_operand_order,
    halves,
    join_splits,
    operand_places,
    prefetch_rows,
    prefetched_lines,
    split_columns,
    sum_products,
    take_ticket,
)
from compute.kernels.triton_support import INTERPRETED, await_kernel_before, launch_options

_BLOCK = tl.constexpr(BLOCK)


def tilings(hidden: int, e4m3: bool) -> tuple[Tiling, Tiling]:
    """Of gate_up and down, by the weights' shapes and type alone."""
    most = max(1, hidden // 512)
    if e4m3:
        return Tiling(min(4, most), 128, 4, 128, 3), Tiling(1, 128, 8, 128, 4)
    return Tiling(min(2, most), 64, 4, 128, 4), Tiling(1, 64, 4, 128, 4)


def few_rows(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Matrix,
    down: Matrix,
    shared: tuple[Matrix, Matrix] | None,
    out: Tensor,
    scratch: Scratch,
) -> bool:
    """As `compute.kernels.experts.experts`, for at most `FEW_ROWS` rows and a shared expert of the others' shape.

    Returns False, and has done nothing, if ``scratch`` is too small for that many rows and experts.
    """
    rows, hidden = x.shape
    choices = chosen.shape[1]
    count, inner = gate_up.shape[0], down.shape[2]
    e4m3, nbytes = gate_up.scales is not None, gate_up.values.element_size()
    first, second = tilings(hidden, e4m3)
    row_tile = few_row_tile(rows)
    base = 0 if shared is None else 1
    slots = base + min(count, rows * choices)
    split, splits = split_columns(hidden, first.splits)
    tiles = triton.cdiv(inner, first.tile // 2)
    down_split, down_splits = split_columns(inner, second.splits)
    down_tiles = triton.cdiv(hidden, second.tile)

    gated_floats = triton.cdiv(slots * rows * inner, 8) * 4
    floats = max(
        slots * tiles * splits * first.tile * row_tile,
        down_splits * rows * (1 + choices) * hidden,
    )
    if not scratch.holds(gated_floats + floats, max(slots * tiles, down_tiles)):
        return False
    gated = scratch.memory[:gated_floats].view(torch.bfloat16)
    partial = scratch.memory[gated_floats:]
    if strips.fits_strips(x, gate_up, 2 * first.splits) and inner % BLOCK == 0 and count <= strips.MOST_EXPERTS:
        few = gated[: slots * rows * inner]
        left = Scratch(partial, scratch.tickets)
        strips.experts(x, chosen, weights, gate_up, down, shared, out, few, first.splits, left)
        return True
    shared_gate_up, shared_down = shared or (gate_up, down)
    common = {
        "CHOICES": choices,
        "CHOICES_TILE": triton.next_power_of_2(choices),
        "SHARED": base == 1,
        "LISTED": count <= rows * choices,
        "EXPERTS": triton.next_power_of_2(count),
        "ROWS": row_tile,
        "ORDERED": e4m3 and inner % BLOCK == 0,
        "PTX": PTX,
        "INTERPRETED": INTERPRETED,
        **launch_options(),
    }
    _gate_up_kernel[(tiles, splits, slots)](
        x,
        chosen,
        *weight_pointers(gate_up),
        *weight_pointers(shared_gate_up),
        gated,
        partial,
        scratch.tickets,
        rows,
        inner,
        hidden,
        split,
        SPLITS=splits,
        TILE=first.tile,
        STEP=first.step,
        STAGES=first.stages,
        LINES=prefetched_lines(tiles * splits * slots, first.tile, (hidden - (splits - 1) * split) * nbytes),
        WHOLE=hidden % (BLOCK if e4m3 else first.step) == 0,
        num_warps=first.warps_for(row_tile),
        **common,
    )
    _down_kernel[(down_tiles, down_splits, slots)](
        gated,
        chosen,
        weights,
        *weight_pointers(down),
        *weight_pointers(shared_down),
        out,
        partial,
        scratch.tickets,
        rows,
        hidden,
        inner,
        down_split,
        SPLITS=down_splits,
        TILE=second.tile,
        STEP=second.step,
        STAGES=second.stages,
        LINES=prefetched_lines(
            down_tiles * down_splits * slots, second.tile, (inner - (down_splits - 1) * down_split) * nbytes
        ),
        WHOLE=inner % (BLOCK if e4m3 else second.step) == 0,
        num_warps=second.warps_for(row_tile),
        **common,
    )
    return True


def weight_pointers(matrix: Matrix) -> tuple[Tensor, Tensor]:
    """Values and scales as kernels take them: e4m3 as uint8, and for the scales of bfloat16 anything."""
    if matrix.scales is None:
        return matrix.values, matrix.values
    return matrix.values.view(torch.uint8), matrix.scales


@triton.jit
def _expert_of_slot(  # type: ignore[no-untyped-def]
    chosen, slot, m, M,
    CHOICES: tl.constexpr, CHOICES_TILE: tl.constexpr, SHARED: tl.constexpr, LISTED: tl.constexpr,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The expert's number, and for each row 1 + its place among the row's choices, or 0 where it is not among them.

    Slot 0 is the shared expert's, if there is one; what is returned of it means nothing. The others are all experts'
    (``LISTED``), or those' that any row chose, by number; the number is ``EXPERTS`` where there are no more.
    """
    choice = tl.arange(0, CHOICES_TILE)
    real = (m < M)[:, None] & (choice < CHOICES)[None, :]
    numbers = tl.load(chosen + m[:, None] * CHOICES + choice[None, :], mask=real, other=-1)
    if SHARED:
        slot -= 1
    if LISTED:
        number = slot
    else:
        flat = tl.reshape(numbers, [ROWS * CHOICES_TILE])
        used = tl.histogram(tl.where(flat >= 0, flat, EXPERTS), 2 * EXPERTS) > 0
        every = tl.arange(0, 2 * EXPERTS)
        used = used & (every < EXPERTS)
        rank = tl.cumsum(used.to(tl.int32), 0) - 1
        number = tl.min(tl.where(used & (rank == slot), every, EXPERTS), 0)
    place = tl.sum(tl.where(numbers == number, 1 + choice[None, :], 0), 1)
    return number, place


@triton.jit
def weight_of(values, scales, shared_values, shared_scales, number, of_shared, N, K):  # type: ignore[no-untyped-def]
    """Where the [N, K] weight of expert ``number``, or the shared one, begins, and its scales."""
    if of_shared:
        values = shared_values
        scales = shared_scales
    else:
        values += number.to(tl.int64) * N * K
        if values.dtype.element_ty == tl.uint8:
            scales += number.to(tl.int64) * (tl.cdiv(N, _BLOCK) * tl.cdiv(K, _BLOCK))
    return tl.multiple_of(values, 16), scales


@triton.jit
def gated_rows(total, TILE: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """``silu(gate) * up``, bfloat16 [ROWS, TILE / 2], of a tile whose halves are rows of gate and of up."""
    gate, up = halves(total, TILE, ROWS)
    return tl.trans(gate / (1.0 + tl.exp(-gate)) * up).to(tl.bfloat16)


@triton.jit
def gate_up_rows(tile, INNER, E4M3: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The rows of gate_up in a tile: half of them gate's, and the same of up. Operand order has them take turns."""
    n = tl.arange(0, TILE)
    if E4M3:  # put in operand order once loaded
        half = n // (TILE // 2)
        column = n % (TILE // 2)
    else:
        half = n // 8 % 2
        column = n // 16 * 8 + n % 8
    return half * INNER + tl.minimum(tile * (TILE // 2) + column, INNER - 1)


@triton.jit(do_not_specialize=["M"])
def _gate_up_kernel(  # type: ignore[no-untyped-def]
    x, chosen, values, scales, shared_values, shared_scales, gated, partial, tickets,
    M, INNER, HIDDEN, SPLIT,
    CHOICES: tl.constexpr, CHOICES_TILE: tl.constexpr, SHARED: tl.constexpr, LISTED: tl.constexpr,
    EXPERTS: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr, LINES: tl.constexpr, WHOLE: tl.constexpr, ORDERED: tl.constexpr, PTX: tl.constexpr,
    INTERPRETED: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """``gated[slot, m] = silu(gate(x)) * up(x)``: half a tile of gate rows and the same rows of up, a split of it."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    slot = tl.program_id(2)
    E4M3: tl.constexpr = values.dtype.element_ty == tl.uint8
    HALF: tl.constexpr = TILE // 2
    at_weight = gate_up_rows(tile, INNER, E4M3, TILE).to(tl.int64) * HIDDEN
    m = tl.arange(0, ROWS)
    if SHARED and slot == 0:
        prefetch_rows(shared_values, at_weight + split * SPLIT, LINES, PTX)
    elif LISTED:
        own = (slot - 1 if SHARED else slot).to(tl.int64) * (2 * INNER * HIDDEN)
        prefetch_rows(values, own + at_weight + split * SPLIT, LINES, PTX)
    await_kernel_before(OVERLAPPED)
    number, place = _expert_of_slot(chosen, slot, m, M, CHOICES, CHOICES_TILE, SHARED, LISTED, EXPERTS, ROWS)
    of_shared = SHARED and slot == 0
    if of_shared or tl.max(place, 0) > 0:
        scale_columns = tl.cdiv(HIDDEN, _BLOCK)
        expert_values, expert_scales = weight_of(
            values, scales, shared_values, shared_scales, number, of_shared, 2 * INNER, HIDDEN
        )
        gate_scales = expert_scales
        up_scales = expert_scales
        if E4M3:
            gate_scales += tile * HALF // _BLOCK * scale_columns
            up_scales += (INNER + tile * HALF) // _BLOCK * scale_columns
        at_row = tl.minimum(m, M - 1) * HIDDEN
        total = sum_products(
            x, at_row, m < M, expert_values, at_weight, gate_scales, up_scales, split, SPLIT, HIDDEN,
            1, TILE, ROWS, STEP, STAGES, WHOLE, True, False, PTX, INTERPRETED,
        )  # fmt: skip
        last = True
        if SPLITS > 1:
            of_all = slot * tl.num_programs(0) + tile
            partial += of_all.to(tl.int64) * (SPLITS * TILE * ROWS)
            total, last = join_splits(total, partial, tickets + of_all, m < M, split, SPLITS, TILE, ROWS)
        if last:
            inner = tile * HALF + tl.arange(0, HALF)
            to = operand_places(inner) if ORDERED else inner
            at = (slot * M + m)[:, None].to(tl.int64) * INNER + to[None, :]
            tl.store(gated + at, gated_rows(total, TILE, ROWS), mask=(m < M)[:, None] & (inner < INNER)[None, :])


@triton.jit(do_not_specialize=["M"])
def _down_kernel(  # type: ignore[no-untyped-def]
    gated, chosen, weights, values, scales, shared_values, shared_scales, out, partial, tickets,
    M, HIDDEN, INNER, SPLIT,
    CHOICES: tl.constexpr, CHOICES_TILE: tl.constexpr, SHARED: tl.constexpr, LISTED: tl.constexpr,
    EXPERTS: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr, LINES: tl.constexpr, WHOLE: tl.constexpr, ORDERED: tl.constexpr, PTX: tl.constexpr,
    INTERPRETED: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """A split of a tile of an expert's output, kept as [split, row, place, HIDDEN]. A tile's last program adds."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    slot = tl.program_id(2)
    E4M3: tl.constexpr = values.dtype.element_ty == tl.uint8
    n = tile * TILE + tl.arange(0, TILE)
    at_weight = tl.minimum(n, HIDDEN - 1).to(tl.int64) * INNER
    m = tl.arange(0, ROWS)
    if SHARED and slot == 0:
        prefetch_rows(shared_values, at_weight + split * SPLIT, LINES, PTX)
    elif LISTED:
        own = (slot - 1 if SHARED else slot).to(tl.int64) * (HIDDEN * INNER)
        prefetch_rows(values, own + at_weight + split * SPLIT, LINES, PTX)
    await_kernel_before(OVERLAPPED)
    number, place = _expert_of_slot(chosen, slot, m, M, CHOICES, CHOICES_TILE, SHARED, LISTED, EXPERTS, ROWS)
    of_shared = SHARED and slot == 0
    mine = place > 0
    if of_shared:
        mine = m < M
        place = tl.zeros([ROWS], tl.int32)
    if tl.max(mine.to(tl.int32), 0) > 0:
        expert_values, expert_scales = weight_of(
            values, scales, shared_values, shared_scales, number, of_shared, HIDDEN, INNER
        )
        if E4M3:
            expert_scales += tile * TILE // _BLOCK * tl.cdiv(INNER, _BLOCK)
        at_row = (slot * M + tl.minimum(m, M - 1)) * INNER
        total = sum_products(
            gated, at_row, m < M, expert_values, at_weight, expert_scales, expert_scales, split, SPLIT, INNER,
            1, TILE, ROWS, STEP, STAGES, WHOLE, False, ORDERED, PTX, INTERPRETED,
        )  # fmt: skip
        if E4M3:
            total = from_operand_order(total, TILE, ROWS)
        at = ((split * M + m) * (1 + CHOICES) + place)[None, :] * HIDDEN + n[:, None]
        tl.store(partial + at, total, mask=mine[None, :] & (n < HIDDEN)[:, None])
    if take_ticket(tickets + tile, tl.num_programs(1) * tl.num_programs(2)):
        present = (m < M)[:, None] & (n < HIDDEN)[None, :]
        result = tl.zeros([ROWS, TILE], tl.float32)
        for choice in tl.static_range(0 if SHARED else 1, 1 + CHOICES):
            output = tl.zeros([ROWS, TILE], tl.float32)
            for part in tl.static_range(SPLITS):
                at = ((part * M + m) * (1 + CHOICES) + choice)[:, None] * HIDDEN + n[None, :]
                output += tl.load(partial + at, mask=present, other=0.0)
            if choice == 0:
                result += output
            else:
                weight = tl.load(weights + m * CHOICES + choice - 1, mask=m < M, other=0.0)
                result = tl.fma(output, tl.zeros([ROWS, TILE], tl.float32) + weight[:, None], result)
        tl.store(out + m[:, None] * HIDDEN + n[None, :], result, mask=present)
