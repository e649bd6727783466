"""The selection's second part: the k best of a row's candidates, written in order of position.

How the parts fit together is in `compute.kernels.topk`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compute.kernels.topk_collect import BINS, CLASSES, GRANULE, NO_SCORE, share_of
from compute.kernels.triton_support import await_kernel_before

MAX_K = (1 << 15) - 1
"""Largest k: it and the number of a bin are packed into one int32."""

_CLASSES = tl.constexpr(CLASSES)
_NO_SCORE = tl.constexpr(NO_SCORE)
_BINS = tl.constexpr(BINS)
_GRANULE = tl.constexpr(GRANULE)
_K_RANGE = tl.constexpr(MAX_K + 1)
_HIGHEST = tl.constexpr(2**31 - 1)


@triton.jit
def _ranks(chosen):  # type: ignore[no-untyped-def]
    """For each of ``chosen`` [n, 8]: how many before it, row after row, are chosen."""
    chosen = chosen.to(tl.int32)
    of_row = tl.sum(chosen, 1)
    return (tl.cumsum(of_row, 0) - of_row)[:, None] + tl.cumsum(chosen, 1) - chosen


@triton.jit
def _total(mask):  # type: ignore[no-untyped-def]
    return tl.sum(tl.sum(mask.to(tl.int32), 1), 0)


@triton.jit
def select_kernel(  # type: ignore[no-untyped-def]
    lengths,
    maxima,
    keys,
    places,
    counts,
    histogram,
    bounds,
    selection,
    capacity,
    k,
    PARTS: tl.constexpr,
    PART_BITS: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    await_kernel_before(OVERLAPPED)
    part = tl.arange(0, PARTS)
    of_bin = tl.arange(0, _BINS)
    length = tl.load(lengths + row).to(tl.int32)
    base = tl.load(bounds + row * 2).to(tl.int64)
    shift = tl.load(bounds + row * 2 + 1).to(tl.int64)
    granules = tl.load(counts + row * PARTS + part) // _GRANULE
    in_bin = tl.load(histogram + row * _BINS + of_bin)
    tl.store(maxima + row * _CLASSES + tl.arange(0, _CLASSES), tl.full([_CLASSES], _NO_SCORE, tl.int32))
    keys += row * capacity
    places += row * capacity
    selection += row * k

    # Candidates in order of position: granule j is in the part whose end is the first beyond j.
    ends = tl.cumsum(granules, 0)
    total = tl.sum(granules, 0) * _GRANULE
    gap = part * share_of(length, PARTS) - (ends - granules) * _GRANULE
    granule = tl.arange(0, TILE // _GRANULE)
    lane = granule[:, None] * _GRANULE + tl.arange(0, _GRANULE)[None, :]
    key = tl.full([TILE // _GRANULE, _GRANULE], _NO_SCORE, tl.int32)
    place = tl.zeros([TILE // _GRANULE, _GRANULE], tl.int32)
    first = 0
    while first < total:
        number = first // _GRANULE + granule
        owner = tl.zeros([TILE // _GRANULE], tl.int32)
        for level in tl.static_range(PART_BITS):
            half = tl.gather(ends, owner + ((PARTS >> (level + 1)) - 1), 0)
            owner += tl.where(half <= number, PARTS >> (level + 1), 0)
        at = tl.gather(gap, owner, 0)[:, None] + first + lane
        key = tl.load(keys + at, mask=first + lane < total, other=_NO_SCORE)
        place = tl.load(places + at, mask=first + lane < total, other=0)
        if total > TILE:  # too many to keep: move them together, which never overtakes what is still to be moved
            tl.debug_barrier()
            tl.store(keys + first + lane, key, mask=first + lane < total)
            tl.store(places + first + lane, place, mask=first + lane < total)
        first += TILE
    before_last = first - TILE
    if total > TILE:
        tl.debug_barrier()

    # The bin of the k-th candidate: the first up to which there are k. One maximum gives its number and what is above.
    up_to = tl.cumsum(in_bin, 0)
    packed = tl.max(tl.where(up_to < k, (of_bin + 1) * _K_RANGE + up_to, 0), 0)
    above = packed % _K_RANGE
    kth = packed // _K_RANGE
    tl.store(histogram + row * _BINS + of_bin, tl.zeros([_BINS], tl.int32))
    reach = above + tl.sum(tl.where(of_bin == kth, in_bin, 0), 0)
    low = base + ((kth ^ (_BINS - 1)).to(tl.int64) << shift)
    high = tl.where(kth == 0, _HIGHEST, tl.minimum(low + (tl.full([], 1, tl.int64) << shift), _HIGHEST))
    if kth == _BINS:  # fewer than k in all
        low = tl.full([], _NO_SCORE + 1, tl.int64)
    while (reach > k) & (high - 1 > low):
        middle = (low + high) >> 1
        at_least = middle.to(tl.int32)
        reached = _total(key >= at_least)
        first = 0
        while first < before_last:
            reached += _total(tl.load(keys + first + lane) >= at_least)
            first += TILE
        if reached >= k:
            low = middle
            reach = reached
        else:
            high = middle
            above = reached

    least = low.to(tl.int32)
    ties = k - above  # of those equal to ``least``, if there are more than fit
    written = 0
    first = 0
    while (first < total) & (written < k):
        if total > TILE:
            key = tl.load(keys + first + lane, mask=first + lane < total, other=_NO_SCORE)
            place = tl.load(places + first + lane, mask=first + lane < total, other=0)
        chosen = key >= least
        if reach > k:
            tie = key == least
            chosen = chosen & ((key > least) | (_ranks(tie) < ties))
            ties -= _total(tie)
        tl.store(selection + written + _ranks(chosen), place, mask=chosen)
        if total > TILE:
            written += _total(chosen)
        first += TILE
