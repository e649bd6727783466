"""What the product kernels share: how a tile of a weight times a tile of rows is summed, so that a row's bits depend on
nothing but its own inputs.

The weight is on the matrix instruction's M side and the rows of ``x`` on its N side, whose width does not change how
one column is summed. K is cut into splits that depend on the weight's shape alone; each is summed in order from zero,
and the splits are added in their order. With few rows every split has a program of its own, and the last one of a tile
to finish adds them up; with many rows one program does all, except where there are few tiles.

An e4m3 weight's block of 128 columns is summed by itself and added times the block's scale. Its bytes become bfloat16
exactly, in the order in which the matrix unit's registers want them: K within a block, and the rows of a tile, are in
that order ("operand order"), so that no value changes its thread. In operand order the first and second half of a
tile's rows take turns, eight by eight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from compute.kernels.matrix import BLOCK
from compute.kernels.ptx import bfloat16_of_e4m3, prefetch_lines
from protocol.errors import InvalidValue

FEW_ROWS = 64
"""Most rows whose splits always have programs of their own."""

_BLOCK = tl.constexpr(BLOCK)
_TOGETHER = tl.constexpr(8)
_TICKETS = 1 << 15
_AHEAD_BYTES = 8 << 20
_RESIDENT = 396
"""Programs that an H200 runs at a time, at most."""


@dataclass(frozen=True)
class Tiling:
    """How a product is cut. ``splits`` decides its bits; the rest only its speed.

    ``tile`` rows of the weight, ``step`` columns at a time (e4m3: 128), loaded ``stages`` - 1 steps ahead.
    """

    splits: int
    tile: int = 64
    warps: int = 4
    step: int = 128
    stages: int = 4

    def warps_for(self, row_tile: int) -> int:
        """Wider tiles of rows need more registers; 16 rows of the weight are the least for a warp."""
        return self.warps if row_tile == 16 else max(self.warps, self.tile // 16)


@dataclass(frozen=True)
class Scratch:
    """Memory that products of one stream use in turn: what splits leave, and tickets, 0 between launches."""

    memory: Tensor
    tickets: Tensor

    @classmethod
    def empty(cls, nbytes: int, device: torch.device) -> Scratch:
        return cls(
            torch.empty(nbytes // 16 * 4, dtype=torch.float32, device=device),
            torch.zeros(_TICKETS, dtype=torch.int32, device=device),
        )

    def holds(self, floats: int, tickets: int) -> bool:
        """Whether a product may need that much."""
        return floats <= self.memory.numel() and tickets <= self.tickets.numel()

    def check(self, floats: int, tickets: int) -> None:
        """Raise `InvalidValue` if a product needs more than this."""
        if not self.holds(floats, tickets):
            have = f"at most {self.memory.numel()} and {self.tickets.numel()}"
            raise InvalidValue("a product's scratch floats and tickets", (floats, tickets), have)


def split_columns(k: int, splits: int) -> tuple[int, int]:
    """Columns of a split, whole blocks, and how many splits of them there are."""
    split = triton.cdiv(triton.cdiv(k, BLOCK), splits) * BLOCK
    return split, triton.cdiv(k, split)


def few_row_tile(rows: int) -> int:
    """The tile of rows of a product of at most `FEW_ROWS`."""
    return max(16, int(triton.next_power_of_2(rows)))


def prefetched_lines(programs: int, tile: int, row_bytes: int) -> int:
    """Cache lines of each row to ask for ahead: some 8 MiB in all, what memory gives while a small kernel runs, or what
    the rows have. More would push each other out of the cache.
    """
    lines = min(_AHEAD_BYTES // (min(programs, _RESIDENT) * tile), row_bytes) // 128
    return 1 << (lines.bit_length() - 1) if lines else 0


@triton.jit
def prefetch_rows(values, at_weight, LINES: tl.constexpr, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
    """Ask for the first ``LINES`` cache lines from each place in ``values``; only a hint."""
    if LINES > 0:
        line = tl.arange(0, LINES) * (128 // (values.dtype.element_ty.primitive_bitwidth // 8))
        prefetch_lines((values + at_weight[:, None] + line[None, :]).to(tl.int64), PTX)


@triton.jit
def near_tiles(program, tiles, row_tiles):  # type: ignore[no-untyped-def]
    """A program's tile of weight rows and tile of rows, such that programs of one time share what they read."""
    group = program // (_TOGETHER * tiles)
    together = tl.minimum(row_tiles - group * _TOGETHER, _TOGETHER)
    place = program % (_TOGETHER * tiles)
    return place // together, group * _TOGETHER + place % together


@triton.jit
def halves(total, TILE: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """[TILE, ROWS] in operand order as the first and the second half of the tile's rows, [TILE / 2, ROWS]."""
    total = tl.permute(tl.reshape(total, [TILE // 16, 2, 8, ROWS]), [0, 2, 3, 1])
    first, second = tl.split(total)
    return tl.reshape(first, [TILE // 2, ROWS]), tl.reshape(second, [TILE // 2, ROWS])


@triton.jit
def from_operand_order(total, TILE: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """[TILE, ROWS] with the tile's rows as they were loaded."""
    total = tl.permute(tl.reshape(total, [TILE // 16, 2, 8, ROWS]), [1, 0, 2, 3])
    return tl.reshape(total, [TILE, ROWS])


@triton.jit
def product(a, b, acc, INTERPRETED: tl.constexpr):  # type: ignore[no-untyped-def]
    """``a @ b + acc`` of bfloat16, summed in float32."""
    if INTERPRETED:  # which multiplies bits otherwise
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def _weight_operand(words, TILE: tl.constexpr, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
    """[TILE, 32 words] of e4m3 as bfloat16 [TILE, 128], rows and columns in operand order."""
    b0, b1, b2, b3 = bfloat16_of_e4m3(words, PTX)
    bytes_of_word = tl.join(tl.join(b0, b1), tl.join(b2, b3))  # byte 2 c + e at [..., e, c]
    parts = tl.reshape(bytes_of_word, [2, TILE // 16, 8, 2, 4, 4, 2, 2])
    return tl.reshape(tl.permute(parts, [1, 0, 2, 3, 5, 7, 4, 6]), [TILE, 128])


@triton.jit
def operand_columns(COUNT: tl.constexpr = 128):  # type: ignore[no-untyped-def]
    """The column at each of ``COUNT`` places of operand order, of whole blocks of 128; they stay in pairs."""
    p = tl.arange(0, COUNT)
    column = p // 64 * 64 + p // 2 % 4 * 16 + p // 16 % 4 * 4 + p // 8 % 2 * 2 + p % 2
    return tl.max_contiguous(tl.multiple_of(column, 2), 2)


@triton.jit
def operand_places(column):  # type: ignore[no-untyped-def]
    """Where in operand order a column is; the inverse of `operand_columns`, of every block."""
    return column // 64 * 64 + column // 4 % 4 * 16 + column // 2 % 2 * 8 + column // 16 % 4 * 2 + column % 2


@triton.jit
def _sum_bfloat16(  # type: ignore[no-untyped-def]
    x, at_row, present, values, at_weight, first, end, K,
    TILE: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    k = tl.arange(0, STEP)
    acc = tl.zeros([TILE, ROWS], tl.float32)
    for start in tl.range(first, end, STEP, num_stages=STAGES):
        across = x + at_row[:, None] + (start + k)[None, :]
        if WHOLE:
            w = tl.load(values + at_weight[:, None] + (start + k)[None, :])
            rows = tl.load(across, mask=present[:, None], other=0.0)
        else:
            inside = (start + k < K)[None, :]
            w = tl.load(values + at_weight[:, None] + (start + k)[None, :], mask=inside, other=0.0)
            rows = tl.load(across, mask=present[:, None] & inside, other=0.0)
        acc = product(w, tl.trans(rows.to(tl.bfloat16)), acc, INTERPRETED)
    return acc


@triton.jit
def _sum_e4m3(  # type: ignore[no-untyped-def]
    x, at_row, present, values, at_weight, scales, second_scales, first, end, K,
    TILE: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr, TWO: tl.constexpr,
    ORDERED: tl.constexpr, PTX: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    word = tl.arange(0, 32)
    column = tl.arange(0, 128) if ORDERED else operand_columns()
    in_second = (tl.arange(0, TILE) // 8 % 2 == 1)[:, None]
    acc = tl.zeros([TILE, ROWS], tl.float32)
    for start in tl.range(first, end, _BLOCK, num_stages=STAGES):
        along = (values + at_weight + start).to(tl.pointer_type(tl.int32))[:, None] + word[None, :]
        across = x + at_row[:, None] + (start + column)[None, :]
        if WHOLE:
            words = tl.load(along)
            rows = tl.load(across, mask=present[:, None], other=0.0)
        else:
            words = tl.load(along, mask=(start + word * 4 < K)[None, :], other=0)
            rows = tl.load(across, mask=present[:, None] & (start + column < K)[None, :], other=0.0)
        scale = tl.load(scales + start // _BLOCK)
        if TWO:
            scale = tl.where(in_second, tl.load(second_scales + start // _BLOCK), scale)
        w = _weight_operand(words, TILE, PTX)
        part = product(w, tl.trans(rows.to(tl.bfloat16)), tl.zeros([TILE, ROWS], tl.float32), INTERPRETED)
        acc = tl.fma(part, tl.zeros([TILE, ROWS], tl.float32) + scale, acc)
    return acc


@triton.jit
def sum_products(  # type: ignore[no-untyped-def]
    x, at_row, present, values, at_weight, scales, second_scales, split, SPLIT, K,
    SPLITS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    WHOLE: tl.constexpr, TWO: tl.constexpr, ORDERED: tl.constexpr, PTX: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """float32 [TILE, ROWS]: split number ``split``, of ``SPLIT`` columns, and ``SPLITS`` - 1 more, added in order.

    ``at_row`` [ROWS] and ``at_weight`` [TILE] are where rows of ``x`` and ``values`` begin, in elements; rows that are
    not ``present`` are 0. Of e4m3 (as uint8) ``scales`` is the first of the tile's row of scales, and if ``TWO``,
    ``second_scales`` that of its second half; columns of ``x`` are in operand order already if ``ORDERED``, and rows of
    the result are.
    """
    total = tl.zeros([TILE, ROWS], tl.float32)
    for number in range(SPLITS):
        first = (split + number) * SPLIT
        end = tl.minimum(first + SPLIT, K)
        if values.dtype.element_ty == tl.uint8:
            total += _sum_e4m3(
                x, at_row, present, values, at_weight, scales, second_scales, first, end, K,
                TILE, ROWS, STAGES, WHOLE, TWO, ORDERED, PTX, INTERPRETED,
            )  # fmt: skip
        else:
            total += _sum_bfloat16(
                x, at_row, present, values, at_weight, first, end, K, TILE, ROWS, STEP, STAGES, WHOLE, INTERPRETED
            )
    return total


@triton.jit
def join_splits(total, partial, ticket, present, split, SPLITS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of a tile's splits, first to last, in the program that finishes last; (anything, False) in the others.

    ``partial`` has room for ``SPLITS`` tiles; ``ticket`` is 0 before and after.
    """
    element = tl.arange(0, ROWS)[None, :] * TILE + tl.arange(0, TILE)[:, None]
    tl.store(partial + split * (ROWS * TILE) + element, total, mask=present[None, :])
    last = take_ticket(ticket, SPLITS)
    if last:
        total = tl.zeros([TILE, ROWS], tl.float32)
        for number in tl.static_range(SPLITS):
            total += tl.load(partial + number * (ROWS * TILE) + element, mask=present[None, :], other=0.0)
    return total, last


@triton.jit
def take_ticket(ticket, programs):  # type: ignore[no-untyped-def]
    """Whether this is the last of ``programs`` to come here; then all that they stored before can be read."""
    tl.debug_barrier()  # so that the ticket publishes what all threads of this program wrote
    last = tl.atomic_add(ticket, 1, sem="acq_rel") == programs - 1
    if last:
        tl.store(ticket, 0)
    return last
