"""The Triton kernels as one session's history calls them.

The rows of a long append are independent query rows of one session: they are dealt out as a batch of places with four
rows each, all with the session's record, and rows that fill up the last place see nothing. Which rows a kernel has
together changes no bit of any of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from compute.kernels.addresses import row_addresses
from compute.kernels.append import append_keys, append_rows
from compute.kernels.attention import SparseAttention, hopper_programs
from compute.kernels.descriptors import describe
from compute.kernels.fetch import fetch
from compute.kernels.half_rows import HALF_ROW_DIMS, fill_half_rows
from compute.kernels.index_score import index_scores
from compute.kernels.resolve import RoundBuffers, resolve
from compute.kernels.side_stream import SideStream
from compute.kernels.stage import GROWTH_PAGES, Stage
from compute.kernels.state import GroupCache, PageMap, PageRun
from compute.kernels.topk import TopK
from compute.kernels.triton_support import whole_edges
from protocol.errors import InvalidValue
from protocol.layout import FP8_DS_MLA, PAGE_TOKENS, Q8G64, round_up

PLACE_ROWS = 4
"""Query rows that read each key together."""
BLOCK_ROWS = 16
"""Query rows that are scored, and attend, at a time: they have scratch memory for a whole history each."""
MANY_ROWS = 256
"""Query rows that are scored at a time where there are more than `BLOCK_ROWS`, in memory that is taken for the call."""
MANY_SCORES = 1 << 24
"""Scores of those rows, at most, where that leaves `BLOCK_ROWS`."""
LEAST_REUSE = 2
"""How often a pass selects each row of a history, in the mean, for a layer's rows to be converted for it once."""
MOST_HALF_BYTES = 256 << 20
"""Memory for these rows at most: enough for 233,000 tokens. Longer histories are attended to as they are."""
ATTENDING_ROWS = 256
"""Query rows that attend at a time, likewise: 1 MiB of memory each at 64 heads, and work enough to hide a launch."""


@dataclass(frozen=True)
class _Halved:
    """What a pass selected, and room for the rows of one layer in float16: see `compute.kernels.half_rows`."""

    addresses: Tensor
    selection: Tensor
    record: Tensor
    group: int
    halves: Tensor
    """float16 [length, 576]"""


class TritonKernels:
    """`kernel_set.KernelSet` of one session on a GPU, or in Triton's interpreter on the CPU.

    For encodings whose index keys are e4m3.

    Addresses of a `round` are overwritten by the next one with as many query rows. What the reference refuses because
    it looked at the data (NaN, positions outside the map) is not looked at here.
    """

    def __init__(self, page_map: PageMap, caches: Sequence[GroupCache], topk: int) -> None:
        """Raises `InvalidValue` for another encoding, or a ``topk`` that `TopK` refuses."""
        if page_map.format.encoding.keys != Q8G64.keys:
            served = f"{Q8G64.name} or {FP8_DS_MLA.name}"
            raise InvalidValue("encoding of the Triton kernels", page_map.format.encoding.name, served)
        self._format = page_map.format
        self._device = page_map.window.device
        self._topk = topk
        self._caches = caches
        self._map = page_map  # the records hold addresses of its tensors
        groups = range(len(page_map.format.groups))
        records = [describe(page_map, group, caches[group] if caches else None) for group in groups]
        self._records = torch.stack(records).to(self._device)
        self._selector = TopK(BLOCK_ROWS, page_map.max_tokens, topk, self._device)
        self._scores = torch.empty((BLOCK_ROWS, self._selector.capacity), device=self._device)
        self._rounds: dict[int, RoundBuffers] = {}
        self._attention: dict[int, SparseAttention] = {}
        self._stage: Stage | None = None
        self._side = SideStream(self._device)
        self._halves_fit = self._format.encoding == Q8G64 and hopper_programs(self._device) > 0
        self._halved: _Halved | None = None

    def append(self, group: int, layer_in_group: int, positions: Tensor, latent: Tensor, rope: Tensor) -> None:
        values = (tensor.contiguous()[None] for tensor in (latent, rope))
        append_rows(self._record(group), self._format, group, layer_in_group, positions[None], *values)

    def append_keys(self, group: int, positions: Tensor, keys: Tensor) -> None:
        append_keys(self._record(group), self._format, group, positions[None], keys.contiguous()[None])

    def select(self, group: int, query: Tensor, weights: Tensor, positions: Tensor) -> Tensor:
        count = positions.shape[0]
        selection = torch.empty((count, self._topk), dtype=torch.int32, device=self._device)
        selector, scores = self._selector, self._scores
        if count > BLOCK_ROWS:
            fitting = max(MANY_SCORES // selector.capacity // BLOCK_ROWS * BLOCK_ROWS, BLOCK_ROWS)
            rows = min(fitting, MANY_ROWS, round_up(count, BLOCK_ROWS))
            selector = TopK(rows, self._map.max_tokens, self._topk, self._device)
            scores = torch.empty((rows, selector.capacity), device=self._device)
        for start in range(0, count, selector.rows):
            part = slice(start, start + selector.rows)
            self._select(
                group, query[part], weights[part], positions[part], selection[part], selector=selector, scores=scores
            )
        return selection

    def _select(
        self,
        group: int,
        query: Tensor,
        weights: Tensor,
        positions: Tensor,
        selection: Tensor,
        *,
        selector: TopK,
        scores: Tensor,
    ) -> None:
        """Up to ``selector.rows`` query rows."""
        count = positions.shape[0]
        filled = round_up(count, PLACE_ROWS)
        missing = filled - count
        places = (filled // PLACE_ROWS, PLACE_ROWS)
        positions = pad(positions, (0, missing), value=-1)
        query = pad(query.contiguous(), (0, 0, 0, 0, 0, missing)).view(*places, *query.shape[1:])
        weights = pad(weights.contiguous(), (0, 0, 0, missing)).view(*places, -1)
        scores = scores[:filled]
        records = self._record(group).repeat(places[0], 1)
        index_scores(records, query, weights, positions.view(places), scores.view(*places, -1), maxima=selector.maxima)
        selector.select(scores[:count], positions[:count] + 1, selection, maxima_known=True)

    def in_place(self, group: int, selection: Tensor, *, length: int = 0) -> Tensor:
        return self._addresses(self._record(group), group, selection, length)

    def streamed(self, group: int, selection: Tensor, home: Sequence[PageRun], *, length: int) -> Tensor:
        pages = sum(run.pages for run in home)
        if self._stage is None or self._stage.pages < pages:
            self.release()
            self._stage = Stage(self._map, self._records, round_up(pages, GROWTH_PAGES))
        record = self._stage.record(group, home)
        with whole_edges():
            return self._addresses(record, group, selection, length)

    def _addresses(self, record: Tensor, group: int, selection: Tensor, length: int) -> Tensor:
        addresses = torch.empty(selection.shape, dtype=torch.int64, device=self._device)
        row_addresses(record, self._format, group, selection.contiguous()[None], addresses[None])
        self._halved = None  # whose memory is the next one's
        many = len(selection) > BLOCK_ROWS and selection.numel() >= LEAST_REUSE * length > 0
        if self._halves_fit and many and length * HALF_ROW_DIMS * 2 <= MOST_HALF_BYTES:
            rows = round_up(length, GROWTH_PAGES * PAGE_TOKENS)  # not of another size in each pass
            halves = torch.empty((rows, HALF_ROW_DIMS), dtype=torch.float16, device=self._device)
            self._halved = _Halved(addresses, selection.contiguous(), record[0], group, halves[:length])
        return addresses

    def end_pass(self) -> None:
        self._halved = None

    def release(self) -> None:
        if self._stage is not None:
            self._stage.join()
        self._stage = None

    @contextmanager
    def beside(self) -> Iterator[None]:
        with self._side.beside(), whole_edges():
            yield

    def join(self) -> None:
        self._side.join()

    def round(self, group: int, selection: Tensor) -> Tensor:
        """Raises `InvalidValue` if the selection could pin more slots than there are."""
        rows, k = selection.shape
        if rows * k > self._caches[group].slots:
            raise InvalidValue(
                "selected positions of one round", rows * k, f"at most the {self._caches[group].slots} slots"
            )
        if rows not in self._rounds:
            self._rounds[rows] = RoundBuffers.empty(1, rows, k, self._device)
        buffers = self._rounds[rows]
        resolve(self._record(group), self._format, group, selection.contiguous()[None], buffers)
        fetch(buffers, self._format.group_row_bytes(group))
        return buffers.addresses[0]

    def attend(
        self, addresses: Tensor, layer_in_group: int, query_latent: Tensor, query_rope: Tensor, scale: float
    ) -> Tensor:
        heads, count = query_latent.shape[1], len(addresses)
        if count > BLOCK_ROWS:
            attention = self._new_attention(min(count, ATTENDING_ROWS), heads)
        else:
            if heads not in self._attention:
                self._attention[heads] = self._new_attention(BLOCK_ROWS, heads)
            attention = self._attention[heads]
        out = torch.empty(query_latent.shape, device=self._device)
        query = (query_latent.contiguous(), query_rope.contiguous())
        halved = self._halved
        if halved is not None and addresses is halved.addresses:
            fill_half_rows(halved.record, self._format, halved.group, layer_in_group, halved.halves)
            attention.attend_halves(halved.selection, halved.halves, *query, scale, out)
        else:
            attention.attend(addresses.contiguous(), layer_in_group, *query, scale, out)
        return out

    def _new_attention(self, rows: int, heads: int) -> SparseAttention:
        return SparseAttention(rows, heads, self._topk, self._device, encoding=self._map.format.encoding)

    def _record(self, group: int) -> Tensor:
        return self._records[group : group + 1]
