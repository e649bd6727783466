"""The selection's first part: class maxima, and the candidates that reach a bound found from them.

How the parts fit together is in `compute.kernels.topk`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compute.kernels.triton_support import await_kernel_before

CLASSES = 4096
"""Classes of positions, consecutive positions in different ones."""
NO_SCORE = -(2**31)
"""Order key of what is never chosen: -inf, NaN, and where nothing is."""
BINS = 1024
"""Counters of candidates by their distance from the bound, the farthest first."""
GRANULE = 8
"""A part's candidates are padded to a multiple of this, so that they can be found that many at a time."""

_CLASSES = tl.constexpr(CLASSES)
_NO_SCORE = tl.constexpr(NO_SCORE)
_BINS = tl.constexpr(BINS)
_BIN_BITS = tl.constexpr(BINS.bit_length() - 1)
_GRANULE = tl.constexpr(GRANULE)
_HIGHEST = tl.constexpr(2**31 - 1)
_LOWEST = tl.constexpr(-0x7F800000)
"""Order key of the most negative finite float."""


@triton.jit
def order_key(score):  # type: ignore[no-untyped-def]
    """float32 to int32 in the same order; -0.0 as 0.0; `NO_SCORE` for -inf and NaN."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return tl.where(score > -float("inf"), bits ^ ((bits >> 31) & 0x7FFFFFFF), _NO_SCORE)


@triton.jit
def _score_of(key):  # type: ignore[no-untyped-def]
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def count(mask):  # type: ignore[no-untyped-def]
    return tl.sum(mask.to(tl.int32), 0)


@triton.jit
def share_of(length, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scores of each part, and room for its candidates: a multiple of `GRANULE`."""
    return (length + _GRANULE * PARTS - 1) // (_GRANULE * PARTS) * _GRANULE


@triton.jit
def maxima_kernel(  # type: ignore[no-untyped-def]
    scores,
    lengths,
    maxima,
    stride,
    PARTS: tl.constexpr,
    TILES: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    of_class = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    first = tl.program_id(1) * _CLASSES
    row = tl.program_id(2).to(tl.int64)
    await_kernel_before(OVERLAPPED)
    length = tl.load(lengths + row).to(tl.int32)
    best = tl.full([1024], -float("inf"), tl.float32)
    while first < length:
        at = first + tl.arange(0, TILES)[:, None] * (_CLASSES * PARTS) + of_class[None, :]
        score = tl.load(scores + row * stride + at, mask=at // 4 * 4 < length, other=-float("inf"))
        best = tl.maximum(best, tl.max(tl.where((at < length) & (score > -float("inf")), score, -float("inf")), 0))
        first += _CLASSES * PARTS * TILES
    key = order_key(best)
    tl.atomic_max(maxima + row * _CLASSES + of_class, key, mask=key > _NO_SCORE, sem="relaxed")


@triton.jit
def _bound(maxima, k):  # type: ignore[no-untyped-def]
    """An order key that at least k of ``maxima`` reach, and at most 1.2 k if the search can tell them apart.

    By false position, which needs two or three steps where maxima are spread smoothly; every fourth step halves the
    range of keys, so that it ends whatever they are. Also returned is how far above it the k-th score should be.
    """
    low = tl.min(maxima, 0)
    reach_low = tl.full([], _CLASSES, tl.int32)
    if low == _NO_SCORE:
        reach_low = count(maxima > _NO_SCORE)
        low = tl.min(tl.where(maxima > _NO_SCORE, maxima, _HIGHEST), 0)
    if reach_low < k:
        low = tl.full([], _LOWEST, tl.int32)
    high = tl.max(maxima, 0) + 1
    reach_high = tl.full([], 0, tl.int32)
    spare = k // 5
    step = 0
    while (reach_low > k + spare) & (high - 1 > low):
        part = (reach_low - k - spare * 0.5) / (reach_low - reach_high)
        guess = order_key(_score_of(low) * (1.0 - part) + _score_of(high - 1) * part)
        halved = (low >> 1) + (high >> 1) + (low & high & 1)
        middle = tl.where(step % 4 == 3, halved, tl.minimum(tl.maximum(guess, low + 1), high - 1))
        reach = count(maxima >= middle)
        if reach >= k:
            low = middle
            reach_low = reach
        else:
            high = middle
            reach_high = reach
        step += 1
    # As many scores as balls were thrown into the classes to fill so many of them; in between evenly spread.
    scores_low = _expected(reach_low)
    share = (scores_low - k) / tl.maximum(scores_low - _expected(reach_high), 1.0)
    share = tl.minimum(tl.maximum(share, 1.0 / 64), 4.0)
    return low, (high.to(tl.float32) - low.to(tl.float32)) * share


@triton.jit
def _expected(classes):  # type: ignore[no-untyped-def]
    """Scores that reach a key, if ``classes`` of the class maxima do."""
    return -_CLASSES * tl.log(1.0 - tl.minimum(classes, _CLASSES - 1).to(tl.float32) / _CLASSES)


@triton.jit
def collect_kernel(  # type: ignore[no-untyped-def]
    scores,
    lengths,
    maxima,
    keys,
    places,
    counts,
    histogram,
    bounds,
    selection,
    stride,
    capacity,
    k,
    PARTS: tl.constexpr,
    WORDS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    await_kernel_before(OVERLAPPED)
    length = tl.load(lengths + row).to(tl.int32)
    of_class = tl.load(maxima + row * _CLASSES + tl.arange(0, _CLASSES))
    share = share_of(length, PARTS)
    first = part * share
    end = tl.minimum(first + share, length)
    word = tl.arange(0, WORDS) * 8
    bit = tl.arange(0, 8)
    lane = word[:, None] + bit[None, :]
    scores += row * stride
    score = tl.load(scores + first + lane, mask=first + lane // 4 * 4 < end, other=-float("inf"))

    low, distance = _bound(of_class, k)
    bound = _score_of(low)
    # A bin is 2**shift keys wide, and the k-th candidate somewhere among them; the first takes in all that is above.
    shift = tl.maximum((tl.maximum(distance * 1.5, 1.0).to(tl.int32, bitcast=True) >> 23) - 127 - (_BIN_BITS - 1), 0)
    if part == 0:
        tl.store(bounds + row * 2, low)
        tl.store(bounds + row * 2 + 1, shift)

    keys += row * capacity + part * share
    places += row * capacity + part * share
    done = 0
    while first < end:
        take = (score >= bound) & (first + lane < end)
        bits = tl.sum(tl.where(take, (1 << bit)[None, :], 0), 1)
        taken = tl.sum(take.to(tl.int32), 1)
        at = done + tl.cumsum(taken, 0) - taken
        rounds = tl.max(taken, 0)
        while rounds > 0:
            some = bits != 0
            lowest = bits & -bits
            place = first + word + (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
            key = order_key(tl.load(scores + place, mask=some, other=0.0))
            tl.store(keys + at, key, mask=some)
            tl.store(places + at, place, mask=some)
            number = ((key - low).to(tl.uint32, bitcast=True) >> shift.to(tl.uint32)).to(tl.int32, bitcast=True)
            number = tl.where((number < 0) | (number >= _BINS), 0, number ^ (_BINS - 1))  # the highest scores first
            tl.atomic_add(histogram + row * _BINS + number, 1, mask=some, sem="relaxed")
            bits ^= lowest
            at += 1
            rounds -= 1
        done += tl.sum(taken, 0)
        first += WORDS * 8
        if first < end:
            score = tl.load(scores + first + lane, mask=first + lane // 4 * 4 < end, other=-float("inf"))
    padded = (done + _GRANULE - 1) // _GRANULE * _GRANULE
    hole = done + tl.arange(0, _GRANULE)
    tl.store(keys + hole, tl.full([_GRANULE], _NO_SCORE, tl.int32), mask=hole < padded)
    tl.store(counts + row * PARTS + part, padded)
    slot = part
    while slot < k:
        several = slot + tl.arange(0, 16) * PARTS
        tl.store(selection + row * k + several, tl.full([16], -1, tl.int32), mask=several < k)
        slot += 16 * PARTS
