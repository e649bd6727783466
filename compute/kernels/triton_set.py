"""The Triton kernels as one session's history calls them.

The rows of a long append are independent query rows of one session: they are dealt out as a batch of places with four
rows each, all with the session's record, and rows that fill up the last place see nothing. Which rows a kernel has
together changes no bit of any of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from compute.kernels.addresses import row_addresses
from compute.kernels.append import append_keys, append_rows
from compute.kernels.attention import SparseAttention
from compute.kernels.descriptors import describe
from compute.kernels.fetch import fetch
from compute.kernels.index_score import index_scores
from compute.kernels.resolve import RoundBuffers, resolve
from compute.kernels.state import GroupCache, PageMap
from compute.kernels.topk import TopK
from protocol.errors import InvalidValue
from protocol.layout import Q8G64, round_up

PLACE_ROWS = 4
"""Query rows that read each key together."""
BLOCK_ROWS = 16
"""Query rows that are scored, and attend, at a time: they have scratch memory for a whole history each."""


class TritonKernels:
    """`kernel_set.KernelSet` of one session on a GPU, or in Triton's interpreter on the CPU; encoding `Q8G64` only.

    Addresses of a `round` are overwritten by the next one with as many query rows. What the reference refuses because
    it looked at the data (NaN, positions outside the map) is not looked at here.
    """

    def __init__(self, page_map: PageMap, caches: Sequence[GroupCache], topk: int) -> None:
        """Raises `InvalidValue` for another encoding, or a ``topk`` that `TopK` refuses."""
        if page_map.format.encoding != Q8G64:
            raise InvalidValue("encoding of the Triton kernels", page_map.format.encoding.name, Q8G64.name)
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

    def append(self, group: int, layer_in_group: int, positions: Tensor, latent: Tensor, rope: Tensor) -> None:
        values = (tensor.contiguous()[None] for tensor in (latent, rope))
        append_rows(self._record(group), self._format, group, layer_in_group, positions[None], *values)

    def append_keys(self, group: int, positions: Tensor, keys: Tensor) -> None:
        append_keys(self._record(group), self._format, group, positions[None], keys.contiguous()[None])

    def select(self, group: int, query: Tensor, weights: Tensor, positions: Tensor) -> Tensor:
        count = positions.shape[0]
        selection = torch.empty((count, self._topk), dtype=torch.int32, device=self._device)
        for start in range(0, count, BLOCK_ROWS):
            part = slice(start, start + BLOCK_ROWS)
            self._select(group, query[part], weights[part], positions[part], selection[part])
        return selection

    def _select(self, group: int, query: Tensor, weights: Tensor, positions: Tensor, selection: Tensor) -> None:
        """Up to `BLOCK_ROWS` query rows."""
        count = positions.shape[0]
        filled = round_up(count, PLACE_ROWS)
        missing = filled - count
        places = (filled // PLACE_ROWS, PLACE_ROWS)
        positions = pad(positions, (0, missing), value=-1)
        query = pad(query.contiguous(), (0, 0, 0, 0, 0, missing)).view(*places, *query.shape[1:])
        weights = pad(weights.contiguous(), (0, 0, 0, missing)).view(*places, -1)
        scores = self._scores[:filled]
        records = self._record(group).repeat(places[0], 1)
        index_scores(
            records, query, weights, positions.view(places), scores.view(*places, -1), maxima=self._selector.maxima
        )
        self._selector.select(scores[:count], positions[:count] + 1, selection, maxima_known=True)

    def in_place(self, group: int, selection: Tensor) -> Tensor:
        addresses = torch.empty(selection.shape, dtype=torch.int64, device=self._device)
        row_addresses(self._record(group), self._format, group, selection.contiguous()[None], addresses[None])
        return addresses

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
        heads = query_latent.shape[1]
        if heads not in self._attention:
            self._attention[heads] = SparseAttention(BLOCK_ROWS, heads, self._topk, self._device)
        attention = self._attention[heads]
        out = torch.empty(query_latent.shape, device=self._device)
        query_latent, query_rope = query_latent.contiguous(), query_rope.contiguous()
        for start in range(0, addresses.shape[0], BLOCK_ROWS):
            part = slice(start, start + BLOCK_ROWS)
            attention.attend(addresses[part], layer_in_group, query_latent[part], query_rope[part], scale, out[part])
        return out

    def _record(self, group: int) -> Tensor:
        return self._records[group : group + 1]
