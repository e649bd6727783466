"""Index scores: every key of a history against the query rows of its session, each key read once for all of them.

The definition is `compute.kernels.reference.index_scores`. Keys are e4m3 and are multiplied as float16, which holds
them exactly; a query row's heads are scaled by powers of two into the range of float16, which holds a bfloat16 query
exactly (to 2**-40 of the head's largest value), and the weights take the powers back. So what is left of rounding is
that of float32 sums.

A key block goes from memory straight into the registers that the matrix unit reads. For that the 64 keys and the 128
dimensions are taken in another order than they lie in: thread by thread, 16 bytes of a row at a time. The query's
dimensions are put into the same order once, and a score is stored where its key belongs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from compute.kernels import descriptors as field
from compute.kernels.ptx import PTX, halves_of_e4m3, prefetch_lines
from compute.kernels.topk_collect import CLASSES, NO_SCORE, order_key
from compute.kernels.triton_support import await_kernel_before, launch_options, load_pointer
from protocol.errors import InvalidValue
from protocol.layout import INDEX_DIM, PAGE_TOKENS, Q8G64, round_up

MAX_COLUMNS = 256
"""Query rows (padded to a power of two) times heads of one session: the columns of one matrix instruction."""

_LONG = 1 << 16
"""Keys from which on a program of 128 columns has so many blocks that two at a time pay."""

_BLOCK_CLASSES = CLASSES // PAGE_TOKENS
"""Key blocks after which the classes of the maxima repeat. ``PROGRAMS`` is a multiple of it, so that all blocks that a
program has at one of its ``BLOCKS`` places are of the same classes."""

_CLASSES = tl.constexpr(CLASSES)
_NO_SCORE = tl.constexpr(NO_SCORE)
_FIELDS = tl.constexpr(field.FIELDS)
_SCALES_OFFSET = tl.constexpr(Q8G64.keys.scales_offset)
_SCALE = tl.constexpr(INDEX_DIM**-0.5)


def index_scores(
    records: Tensor, query: Tensor, weights: Tensor, positions: Tensor, scores: Tensor, maxima: Tensor | None = None
) -> None:
    """Write the scores of keys 0 … ``positions[b, r]`` to ``scores[b, r]``, and -inf up to the session's last position.

    ``records`` int64 [batch, FIELDS] (`compute.kernels.descriptors`), keys encoded as `Q8G64`; ``query`` bfloat16
    [batch, rows, heads, 128]; ``weights`` float32 [batch, rows, heads]; ``positions`` int64 [batch, rows], -1 for a row
    that sees nothing; ``scores`` float32 [batch, rows, capacity], untouched beyond the last position. ``maxima`` is
    `TopK.maxima` of the same rows, in which case `TopK.select` need not look for them.

    Raises `InvalidValue` for shapes that do not fit. A position beyond the session's map is cut to the map.
    """
    batch, rows, heads, _ = query.shape
    padded_rows = triton.next_power_of_2(rows)
    columns = padded_rows * heads
    if heads != triton.next_power_of_2(heads) or not 16 <= columns <= MAX_COLUMNS:
        raise InvalidValue(
            "query rows and index heads", (rows, heads), f"a power of two of heads, 16 to {MAX_COLUMNS} in all"
        )
    if query.dtype != torch.bfloat16 or query.shape[3] != INDEX_DIM or not query.is_contiguous():
        raise InvalidValue("index query", f"{query.dtype} {tuple(query.shape)}", "contiguous bfloat16 [b, r, h, 128]")
    if weights.shape != query.shape[:3] or positions.shape != (batch, rows) or records.shape != (batch, field.FIELDS):
        raise InvalidValue(
            "weights, positions, records", (weights.shape, positions.shape, records.shape), "one per row"
        )
    if scores.shape[:2] != (batch, rows) or scores.stride(0) != rows * scores.stride(1) or scores.stride(2) != 1:
        raise InvalidValue("scores", tuple(scores.shape), f"[{batch}, {rows}, capacity], rows at one distance")
    programs, blocks, prefetch, options = _shape_of(columns, batch, scores.shape[2])
    _score_kernel[(programs, batch)](
        records,
        query,
        weights,
        positions,
        scores,
        scores if maxima is None else maxima,
        scores.stride(1),
        rows,
        ROWS=padded_rows,
        HEADS=heads,
        PROGRAMS=programs,
        BLOCKS=blocks,
        MAXIMA=maxima is not None,
        PREFETCH=prefetch,
        PTX=PTX,
        num_warps=4,
        **options,
        **launch_options(),
    )


def _shape_of(columns: int, batch: int, capacity: int) -> tuple[int, int, bool, dict[str, Any]]:
    """Programs of a session, key blocks that a program has in flight, whether it asks for the next ones, and options:
    what the registers allow, and what is fastest on an H200.

    None of it changes a bit of a score.
    """
    programs, blocks = (768, 2) if columns <= 32 else (512, 2) if columns <= 64 else (384, 1)
    if columns == 128 and capacity * batch > _LONG:
        blocks = 2
    programs = min(programs // batch, round_up(capacity // PAGE_TOKENS // blocks, _BLOCK_CLASSES))
    options = {"maxnreg": 168} if columns == 128 and PTX else {}
    return max(_BLOCK_CLASSES, programs // _BLOCK_CLASSES * _BLOCK_CLASSES), blocks, blocks == 1, options


@triton.jit
def _key_operand(half, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bytes [64 keys, 64 dims] as float16, keys and dims in operand order: no value leaves its thread."""
    half = tl.permute(tl.reshape(half, [2, 4, 8, 4, 8, 2]), [1, 0, 2, 4, 3, 5])
    return halves_of_e4m3(tl.reshape(half, [64, 64]), PTX)


@triton.jit
def _query_operand(half, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Float16 [N, 64 dims] as [64, N], dims in operand order."""
    half = tl.permute(tl.reshape(half, [N, 4, 8, 2]), [0, 2, 1, 3])
    return tl.trans(tl.reshape(half, [N, 64]))


@triton.jit
def _power_of_two(exponent):  # type: ignore[no-untyped-def]
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _score_kernel(  # type: ignore[no-untyped-def]
    records,
    query,
    weights,
    positions,
    scores,
    maxima,
    stride,
    rows,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCKS: tl.constexpr,
    MAXIMA: tl.constexpr,
    PREFETCH: tl.constexpr,
    PTX: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    N: tl.constexpr = ROWS * HEADS
    place = tl.program_id(0) * BLOCKS
    session = tl.program_id(1).to(tl.int64)
    operand_row = tl.arange(0, 64)
    key = operand_row // 16 * 8 + operand_row // 8 % 2 * 32 + operand_row % 8
    dim = tl.arange(0, 64)
    in_block = tl.arange(0, 64)[:, None] * 128 + dim[None, :]
    row = tl.arange(0, ROWS)
    out_row = session * rows + row
    await_kernel_before(OVERLAPPED)
    record = records + session * _FIELDS
    tokens = tl.load(record + field.MAP_TOKENS)
    table = load_pointer(record, field.KEY_BLOCK_ADDRESS, tl.int64)
    position = tl.load(positions + out_row, mask=row < rows, other=-1)
    position = tl.minimum(position, tokens - 1).to(tl.int32)
    last = tl.max(position, 0)
    blocks = (last + 64) // 64
    if place >= blocks:
        return

    n = tl.arange(0, N)
    present = n < rows * HEADS
    q = query + (session * rows * HEADS + n)[:, None] * 128 + dim[None, :]
    low = tl.load(q, mask=present[:, None], other=0.0).to(tl.float32)
    high = tl.load(q + 64, mask=present[:, None], other=0.0).to(tl.float32)
    largest = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1)
    exponent = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - 127 - 14, -100)  # into [2**14, 2**15)
    weight = tl.load(weights + session * rows * HEADS + n, mask=present, other=0.0)
    weight *= _power_of_two(exponent) * _SCALE
    down = _power_of_two(-exponent)[:, None]
    query_low = _query_operand((low * down).to(tl.float16), N)
    query_high = _query_operand((high * down).to(tl.float16), N)

    best = tl.tuple(())
    ahead = tl.tuple(())
    for b in tl.static_range(BLOCKS):
        best += (tl.full([64, ROWS], _NO_SCORE, tl.int32),)
        ahead += (tl.load(table + tl.minimum(place + b, blocks - 1)),)
    line = tl.minimum(tl.arange(0, 128), (_SCALES_OFFSET + 255) // 128) * 128
    first = place
    while first < blocks:
        keys = tl.tuple(())
        scales = tl.tuple(())
        coming = tl.tuple(())
        for b in tl.static_range(BLOCKS):
            block = tl.multiple_of(ahead[b].to(tl.pointer_type(tl.uint8)) + in_block, [1, 16])
            keys += (tl.load(block, eviction_policy="evict_first"),)
            block = tl.multiple_of(block + 64, [1, 16])
            keys += (tl.load(block, eviction_policy="evict_first"),)
            scales += (tl.load((ahead[b] + _SCALES_OFFSET).to(tl.pointer_type(tl.float32)) + key),)
            coming += (tl.load(table + tl.minimum(first + PROGRAMS * BLOCKS + b, blocks - 1)),)
        if PREFETCH:
            for b in tl.static_range(BLOCKS):
                prefetch_lines(coming[b] + line, PTX)
        ahead = coming
        better = tl.tuple(())
        for b in tl.static_range(BLOCKS):
            token = (first + b) * 64 + key
            dots = tl.dot(_key_operand(keys[2 * b], PTX), query_low)
            dots = tl.dot(_key_operand(keys[2 * b + 1], PTX), query_high, dots)
            by_head = tl.reshape(tl.maximum(dots, 0.0) * weight[None, :], [64, ROWS, HEADS])
            score = tl.sum(by_head, 2) * scales[b][:, None]
            score = tl.where(token[:, None] <= position[None, :], score, -float("inf"))
            out = scores + out_row[None, :] * stride + token[:, None]
            tl.store(out, score, mask=(token[:, None] <= last) & (row[None, :] < rows))
            better += (tl.maximum(best[b], order_key(score)),)
        best = better
        first += PROGRAMS * BLOCKS
    if MAXIMA:
        for b in tl.static_range(BLOCKS):
            of_class = (place + b) % (_CLASSES // 64) * 64 + key
            out = maxima + out_row[None, :] * _CLASSES + of_class[:, None]
            tl.atomic_max(out, best[b], mask=(best[b] > _NO_SCORE) & (row[None, :] < rows), sem="relaxed")
