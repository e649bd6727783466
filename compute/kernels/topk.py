"""The selection: the k best positions of each row of scores, exactly, in ascending order.

The definition is `compute.kernels.reference.select_topk`; a NaN is never chosen here, since a kernel cannot raise.
Scores are compared by their *order keys*, int32 in the order of the floats. Three launches, each O(scores) or less:

1. *maxima*: the largest score of each of 4,096 classes of positions (position modulo 4,096). `index_scores` can do this
   on its way.
2. *collect*: every program finds a bound that at least k, and not many more, class maxima reach: then at least k scores
   reach it, and where scores fall into classes like dice, about 1.4 k do, whatever their distribution. Scores that
   reach the bound, the *candidates*, are put aside in order of position, and counted by their distance from the bound.
3. *select*: one program per row finds the k-th candidate from these counts, chooses among equals by position, and
   writes the positions.

Where the maxima are known and rows are not too long, the last two are one launch on a Hopper GPU
(`compute.kernels.topk_cluster`).

If classes are unlike each other there are more candidates, in the worst case all; they always have room, and only time
is lost. All results are exact integers, so nothing depends on the order in which programs run.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from compute.kernels.topk_cluster import fits_cluster, prepare_clusters, select_by_cluster
from compute.kernels.topk_collect import BINS, CLASSES, NO_SCORE, collect_kernel, maxima_kernel
from compute.kernels.topk_select import MAX_K, select_kernel
from compute.kernels.triton_support import launch_options
from protocol.errors import InvalidValue
from protocol.layout import round_up

_PART = 1024
"""Scores that one program of collect should have, roughly."""
_PROGRAMS = 256
"""Programs of collect, shared out over the rows: each finds the bound for itself."""
_MAX_WORDS = 1024


class TopK:
    """Selection of ``k`` for up to ``rows`` rows of up to ``capacity`` scores: scratch memory and the launches.

    Made once: recorded graphs keep its addresses. A selection leaves the scratch as it found it, so one instance serves
    all layers of a stream, one after the other.
    """

    def __init__(self, rows: int, capacity: int, k: int, device: torch.device, *, portable: bool = False) -> None:
        """``portable``: by Triton's kernels alone. Raises `InvalidValue` unless 0 < k <= `MAX_K`, `NoDevice` where a
        kernel cannot be compiled.
        """
        if not 0 < k <= MAX_K:
            raise InvalidValue("k of a selection", k, f"1 to {MAX_K}")
        self.rows, self.k = rows, k
        self.capacity = round_up(capacity, 64)

        def scratch(columns: int, value: int = 0) -> Tensor:
            return torch.full((rows, columns), value, dtype=torch.int32, device=device)

        self.maxima = scratch(CLASSES, NO_SCORE)
        """int32 [rows, CLASSES]: order keys, `NO_SCORE` between selections."""
        self._by_cluster = not portable and fits_cluster(device, self.capacity)
        if self._by_cluster:
            prepare_clusters(device, rows)
        most = min(128, max(32, _PROGRAMS // triton.next_power_of_2(rows)))
        self._parts = max(2, min(most, triton.next_power_of_2(self.capacity // _PART)))
        self._keys, self._places = scratch(self.capacity), scratch(self.capacity)
        self._counts = scratch(self._parts)
        self._histogram = scratch(BINS)
        self._range = scratch(2)

    def select(
        self,
        scores: Tensor,
        lengths: Tensor,
        selection: Tensor,
        *,
        maxima_known: bool = False,
    ) -> None:
        """Write the selection of the first ``lengths[r]`` scores of each row.

        ``scores`` float32 [rows, >= capacity], ``lengths`` int64 [rows], ``selection`` int32 [rows, k], contiguous, -1
        where there are fewer. ``maxima_known``: `index_scores` wrote `maxima` with these scores. Raises `InvalidValue`
        for shapes that do not fit. Lengths are device data and trusted not to exceed the capacity.
        """
        rows = scores.shape[0]
        if rows > self.rows or scores.shape[1] < self.capacity or scores.stride(1) != 1 or scores.stride(0) % 4:
            raise InvalidValue("scores", tuple(scores.shape), f"[<= {self.rows}, >= {self.capacity}], rows 16-aligned")
        if lengths.shape != (rows,) or selection.shape != (rows, self.k) or not selection.is_contiguous():
            raise InvalidValue("lengths, selection", (lengths.shape, selection.shape), f"[{rows}], [{rows}, {self.k}]")
        if self._by_cluster and maxima_known:
            select_by_cluster(scores, lengths, self.maxima, selection)
        else:
            self._select_in_three(scores, lengths, selection, maxima_known)

    def _select_in_three(self, scores: Tensor, lengths: Tensor, selection: Tensor, maxima_known: bool) -> None:
        rows = scores.shape[0]
        scratch = (self._keys, self._places, self._counts, self._histogram, self._range)
        sizes = (scores.stride(0), self.capacity, self.k)
        options = launch_options()
        if not maxima_known:
            tiles = triton.cdiv(self.capacity, CLASSES)
            parts = min(tiles, 32)
            maxima_kernel[(CLASSES // 1024, parts, rows)](
                scores,
                lengths,
                self.maxima,
                scores.stride(0),
                PARTS=parts,
                TILES=1 if tiles <= 32 else 8,
                num_warps=8,
                **options,
            )
        words = triton.next_power_of_2(triton.cdiv(self.capacity, self._parts * 8))
        collect_kernel[(self._parts, rows)](
            scores,
            lengths,
            self.maxima,
            *scratch,
            selection,
            *sizes,
            PARTS=self._parts,
            WORDS=min(words, _MAX_WORDS),
            num_warps=4 if words <= 128 else 8,
            **options,
        )
        select_kernel[(rows,)](
            lengths,
            self.maxima,
            *scratch,
            selection,
            *sizes[1:],
            PARTS=self._parts,
            PART_BITS=self._parts.bit_length() - 1,
            TILE=max(1024, triton.next_power_of_2(self.k + self.k // 2)),
            num_warps=8,
            **options,
        )
