"""The attention side of a decode step: every index group and layer of a model, recorded as one CUDA graph.

Per index group: append the index keys, score, select, find the selected rows; per layer: append the row, attend. What
lies between (projections, experts) writes `StepInputs` and reads the outputs. Lengths, page tables, windows and counts
are device data, so a graph is recorded once per batch size and replayed while histories grow, their pages fill and
leave the ring, and sessions come and go. Between replays the host makes pages ready, advances the ring
(`compute.history.History.begin`) and copies full pages back (``finish``); it reads nothing that a step waits for.

Where the selected rows are found is all that resident and offloaded sessions differ in. Offloaded, the first layer of a
group reads what the hot cache lacks at home, in registered host RAM, while a branch of the graph runs the cache's round
and fetches the misses for the group's other layers; so the round is off the step's critical path.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from compute.kernels import descriptors as field
from compute.kernels.addresses import row_addresses
from compute.kernels.append import append_keys, append_rows
from compute.kernels.attention import SparseAttention
from compute.kernels.descriptors import describe
from compute.kernels.fetch import fetch
from compute.kernels.index_score import index_scores
from compute.kernels.positions import begin_step
from compute.kernels.resolve import RoundBuffers, resolve
from compute.kernels.state import GroupCache, PageMap
from compute.kernels.topk import TopK
from compute.kernels.triton_support import whole_edges
from protocol.errors import InvalidValue
from protocol.layout import INDEX_DIM, LATENT_DIM, PAGE_TOKENS, ROPE_DIM, PageFormat, round_up

BATCH_SIZES = (1, 2, 4, 8, 16)
"""Sessions of a recorded step; a batch in between is filled up with idle places."""

Overlap = Literal["serial", "branch"]
OVERLAPS: tuple[Overlap, ...] = ("serial", "branch")
"""How the round of a group goes: before its first layer, which is better where much is missed; or beside it."""

Choose = Callable[[int, Tensor], None]
"""Called with a group and its selection int32 [batch, rows, k]; enqueues what replaces it, for benches and tests."""


@dataclass(frozen=True)
class StepShape:
    """What a step's buffers are made for: ``places`` sessions at most, each with ``rows`` query rows."""

    places: int
    rows: int
    topk: int
    heads: int
    index_heads: int
    softmax_scale: float
    max_tokens: int


@dataclass(frozen=True)
class StepInputs:
    """What the model computes for a step, in place: recorded graphs keep these addresses."""

    index_keys: Tensor
    """bfloat16 [groups, places, rows, 128]"""
    index_query: Tensor
    """bfloat16 [groups, places, rows, index heads, 128]"""
    index_weights: Tensor
    """float32 [groups, places, rows, index heads], index heads ** -0.5 included"""
    latent: Tensor
    """bfloat16 [layers, places, rows, 512]"""
    rope: Tensor
    """bfloat16 [layers, places, rows, 64]"""
    query_latent: Tensor
    """bfloat16 [layers, places, rows, heads, 512]"""
    query_rope: Tensor
    """bfloat16 [layers, places, rows, heads, 64]"""

    @classmethod
    def zeros(cls, page_format: PageFormat, shape: StepShape, device: torch.device) -> StepInputs:
        groups, layers, rows = len(page_format.groups), page_format.layer_count, (shape.places, shape.rows)

        def zeros(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.zeros(sizes, dtype=dtype, device=device)

        return cls(
            index_keys=zeros(groups, *rows, INDEX_DIM),
            index_query=zeros(groups, *rows, shape.index_heads, INDEX_DIM),
            index_weights=zeros(groups, *rows, shape.index_heads, dtype=torch.float32),
            latent=zeros(layers, *rows, LATENT_DIM),
            rope=zeros(layers, *rows, ROPE_DIM),
            query_latent=zeros(layers, *rows, shape.heads, LATENT_DIM),
            query_rope=zeros(layers, *rows, shape.heads, ROPE_DIM),
        )


class AttentionStep:
    """The step over a page format's layers; ``cached`` for offloaded sessions, which then must have hot caches.

    A step appends the rows of positions ``length`` … ``length + rows - 1`` of each session, where ``length`` is what
    the step before began with plus ``accepted``: the rows of that step that the sampler kept. Raises `InvalidValue`
    for shapes that a kernel refuses.
    """

    def __init__(
        self,
        page_format: PageFormat,
        shape: StepShape,
        device: torch.device,
        *,
        cached: bool,
        overlap: Overlap = "branch",
        choose: Choose | None = None,
    ) -> None:
        if not 1 <= shape.places <= BATCH_SIZES[-1]:
            raise InvalidValue("sessions of a step", shape.places, f"1 to {BATCH_SIZES[-1]}")
        self.format, self.shape = page_format, shape
        self.inputs = StepInputs.zeros(page_format, shape, device)
        self._cached, self._overlap, self._choose = cached, overlap, choose
        places, rows, k = shape.places, shape.rows, shape.topk
        self.out = torch.zeros((page_format.layer_count, places, rows, shape.heads, LATENT_DIM), device=device)
        """float32 [layers, places, rows, heads, 512]"""
        self.accepted = torch.zeros(places, dtype=torch.int64, device=device)
        """int64 [places]: rows of the last step that stay; the sampler's to write."""
        self.lengths = torch.zeros_like(self.accepted)
        """int64 [places]: rows of each session before those of the last step."""
        self._records = torch.zeros((len(page_format.groups), places, field.FIELDS), dtype=torch.int64, device=device)
        self._idle = torch.zeros_like(self._records)
        self._positions = torch.zeros((places, rows), dtype=torch.int64, device=device)
        self._seen = torch.zeros_like(self._positions)
        self._scores = torch.zeros((places, rows, round_up(shape.max_tokens, PAGE_TOKENS)), device=device)
        self._topk = TopK(places * rows, shape.max_tokens, k, device)
        self._selection = torch.zeros((places, rows, k), dtype=torch.int32, device=device)
        self._addresses = torch.zeros((places, rows, k), dtype=torch.int64, device=device)
        self._buffers = RoundBuffers.empty(places, rows, k, device)
        self._attention = SparseAttention(places * rows, shape.heads, k, device)
        on_gpu = device.type == "cuda"
        self._main = torch.cuda.Stream(device) if on_gpu else None
        self._side = torch.cuda.Stream(device) if on_gpu and overlap != "serial" else None
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._sessions: dict[int, tuple[PageMap, list[GroupCache]]] = {}

    def join(self, place: int, page_map: PageMap, caches: list[GroupCache], length: int) -> None:
        """Put a session of ``length`` rows into ``place``. Raises `InvalidValue` if its caches or map do not fit."""
        if page_map.max_tokens > self._scores.shape[2]:
            raise InvalidValue("positions of a session", page_map.max_tokens, f"at most {self._scores.shape[2]}")
        if self._cached != bool(caches):
            raise InvalidValue("hot caches of a session", len(caches), "one per group, if and only if offloaded")
        selected = self.shape.rows * self.shape.topk
        for group in range(len(self.format.groups)):
            cache = caches[group] if caches else None
            self._records[group, place] = describe(page_map, group, cache, selected=selected).to(self._records.device)
        self.lengths[place] = length
        self.accepted[place] = 0
        self._sessions[place] = (page_map, caches)  # the records hold addresses of their tensors

    def leave(self, place: int) -> None:
        """Make ``place`` idle."""
        self._records[:, place] = 0
        self._sessions.pop(place, None)

    def replay(self) -> None:
        """Enqueue one step of all sessions, after what the current stream holds.

        The batch is filled up to one of `BATCH_SIZES`, past the last session. The first replay of a batch size compiles
        and records, and waits. Without a GPU the step runs at once. Raises `InvalidValue` without a session.
        """
        if not self._sessions:
            raise InvalidValue("sessions of a step", 0, "at least 1")
        wanted = max(self._sessions) + 1
        size = min(next(size for size in BATCH_SIZES if size >= wanted), self.shape.places)
        if self._main is None:
            self._run(self._records, size)
            return
        if size not in self._graphs:
            self._graphs[size] = self._record(size)
        self._graphs[size].replay()

    def _record(self, batch: int) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize()
        with torch.cuda.stream(self._main):
            self._run(self._idle, batch)  # compiles what the capture may not, and changes no session
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._main):
            self._run(self._records, batch)
        return graph

    def _run(self, records: Tensor, batch: int) -> None:
        begin_step(
            records[0, :batch], self.accepted[:batch], self.lengths[:batch], self._positions[:batch], self._seen[:batch]
        )
        for group in range(len(self.format.groups)):
            self._run_group(group, records[group, :batch], batch)

    def _run_group(self, group: int, records: Tensor, batch: int) -> None:
        positions, selection = self._positions[:batch], self._selection[:batch]
        first_layer, layers = self.format.groups[group].first_layer, self.format.groups[group].layers
        joined = group > 0 and self.format.groups[group - 1].layers == 1
        with self._edges(after_branch=joined):
            append_keys(records, self.format, group, positions, self.inputs.index_keys[group, :batch])
        self._append(records, group, 0)
        self._select(records, group, selection)
        anchor, others = self._find(records, group, selection)
        self._attend(first_layer, 0, anchor)
        self._end_branch()
        for layer in range(1, layers):
            with self._edges(after_branch=layer == 1):
                self._append(records, group, layer)
            self._attend(first_layer + layer, layer, others)

    def _select(self, records: Tensor, group: int, selection: Tensor) -> None:
        batch = len(records)
        positions, scores = self._positions[:batch], self._scores[:batch]
        query, weights = self.inputs.index_query[group, :batch], self.inputs.index_weights[group, :batch]
        index_scores(records, query, weights, positions, scores, maxima=self._topk.maxima)
        seen = self._seen[:batch].view(-1)
        self._topk.select(scores.flatten(0, 1), seen, selection.flatten(0, 1), maxima_known=True)
        if self._choose is not None:
            self._choose(group, selection)

    def _find(self, records: Tensor, group: int, selection: Tensor) -> tuple[Tensor, Tensor]:
        """Addresses of the selected group rows for the group's first layer, and for the others."""
        batch = len(records)
        addresses = self._addresses[:batch]
        if not self._cached:
            row_addresses(records, self.format, group, selection, addresses)
            return addresses, addresses
        buffers = RoundBuffers(*(getattr(self._buffers, item.name)[:batch] for item in fields(RoundBuffers)))
        if self._overlap == "serial":
            self._round(records, group, selection, buffers)
            return buffers.addresses, buffers.addresses
        # Looked up before the round begins: what is evicted by it is none of these rows.
        row_addresses(records, self.format, group, selection, addresses, cached=True)
        if self._side is None:
            self._round(records, group, selection, buffers)
        else:
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                self._round(records, group, selection, buffers)
        return addresses, buffers.addresses

    def _round(self, records: Tensor, group: int, selection: Tensor, buffers: RoundBuffers) -> None:
        with self._edges(after_branch=True):
            resolve(records, self.format, group, selection, buffers)
        fetch(buffers, self.format.group_row_bytes(group))

    def _end_branch(self) -> None:
        if self._side is not None and self._cached:
            torch.cuda.current_stream().wait_stream(self._side)

    def _edges(self, *, after_branch: bool) -> AbstractContextManager[None]:
        """Around the first launch after a fork or join: a programmatic edge is for the kernel before on the stream."""
        branched = after_branch and self._cached and self._overlap == "branch"
        return whole_edges() if branched else nullcontext()

    def _append(self, records: Tensor, group: int, layer_in_group: int) -> None:
        batch, layer = len(records), self.format.groups[group].first_layer + layer_in_group
        latent, rope = self.inputs.latent[layer, :batch], self.inputs.rope[layer, :batch]
        append_rows(records, self.format, group, layer_in_group, self._positions[:batch], latent, rope)

    def _attend(self, layer: int, layer_in_group: int, addresses: Tensor) -> None:
        batch = len(addresses)
        latent, rope = self.inputs.query_latent[layer, :batch], self.inputs.query_rope[layer, :batch]
        self._attention.attend(
            addresses.flatten(0, 1),
            layer_in_group,
            latent.flatten(0, 1),
            rope.flatten(0, 1),
            self.shape.softmax_scale,
            self.out[layer, :batch].flatten(0, 1),
        )
