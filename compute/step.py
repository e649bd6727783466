"""The attention side of a decode step: every index group and layer of a model, recorded as one CUDA graph.

Per index group: append the index keys, score, select, find the selected rows; per layer: append the row, attend. What
lies between (projections, experts) is a `Model`: it writes `StepInputs` and reads the outputs. Lengths, page tables,
windows and counts are device data, so a graph is recorded once per batch size and replayed while histories grow, their
pages fill and leave the ring, and sessions come and go. Between replays the host makes pages ready, advances the ring
(`compute.history.History.prepare`) and copies full pages back (``settle``); it reads nothing that a step waits for.

Rows that are appended and queries in the latent space are needed by attention alone. Both go beside a short selection,
and where there is none, the rows beside the queries.

Where the selected rows are found is all that resident and offloaded sessions differ in. Offloaded, the first layer of a
group reads what the hot cache lacks at home, in registered host RAM (or, of much, a copy of its own), while a branch of
the graph runs the cache's round and fetches the misses for the group's other layers; so the round is off the step's
critical path. The branch begins beside the first layer's attention, or where the rest of the layer hides it as well,
right behind that. It ends where its outcome is needed: before the second layer attends, or where a group has one layer,
before the next selection.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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
from compute.kernels.hidden import store_hidden
from compute.kernels.index_score import index_scores
from compute.kernels.positions import begin_step
from compute.kernels.resolve import RoundBuffers, resolve
from compute.kernels.side_stream import SideStream
from compute.kernels.state import GroupCache, PageMap
from compute.kernels.topk import TopK
from compute.kernels.triton_support import whole_edges
from protocol.errors import InvalidValue
from protocol.layout import INDEX_DIM, LATENT_DIM, PAGE_TOKENS, ROPE_DIM, PageFormat, round_up

BATCH_SIZES = (1, 2, 4, 8, 16)
"""Sessions of a recorded step; a batch in between is filled up with idle places."""

SHORT_SELECTION = 13 << 16
"""Positions of a step, of all sessions, up to which its selections leave room for something beside them: 16 sessions of
51,200 tokens do; what scores fifteen histories of a million fills the GPU by itself (docs/decisions/021).
"""

Overlap = Literal["serial", "branch", "late"]
OVERLAPS: tuple[Overlap, ...] = ("serial", "branch", "late")
"""How the round of a group goes: before its first layer attends; beside that; or right behind it, beside a model's rest
of the layer. The last delays the step least, as nothing else is launched between the parts of attention.
"""

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
    """float32 [groups, places, rows, 128]"""
    index_query: Tensor
    """bfloat16 [groups, places, rows, index heads, 128]"""
    index_weights: Tensor
    """float32 [groups, places, rows, index heads], index heads ** -0.5 included"""
    latent: Tensor
    """float32 [layers, places, rows, 512]"""
    rope: Tensor
    """float32 [layers, places, rows, 64]"""
    query_latent: Tensor
    """bfloat16 [layers, places, rows, heads, 512]"""
    query_rope: Tensor
    """bfloat16 [layers, places, rows, heads, 64]"""

    @classmethod
    def zeros(cls, page_format: PageFormat, shape: StepShape, device: torch.device, *, shared: bool) -> StepInputs:
        """With ``shared``, all layers and groups have one place in memory, to be written anew for each of them."""
        groups, layers, rows = len(page_format.groups), page_format.layer_count, (shape.places, shape.rows)

        def zeros(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            first = 1 if shared else sizes[0]
            return torch.zeros((first, *sizes[1:]), dtype=dtype, device=device).expand(sizes)

        return cls(
            index_keys=zeros(groups, *rows, INDEX_DIM, dtype=torch.float32),
            index_query=zeros(groups, *rows, shape.index_heads, INDEX_DIM),
            index_weights=zeros(groups, *rows, shape.index_heads, dtype=torch.float32),
            latent=zeros(layers, *rows, LATENT_DIM, dtype=torch.float32),
            rope=zeros(layers, *rows, ROPE_DIM, dtype=torch.float32),
            query_latent=zeros(layers, *rows, shape.heads, LATENT_DIM),
            query_rope=zeros(layers, *rows, shape.heads, ROPE_DIM),
        )


class Model:
    """What a model computes around the kernels of a step, for the first ``batch`` places. This one computes nothing.

    Each call enqueues on the current stream, the same launches whenever the batch is of one size.
    """

    def begin(self, batch: int) -> None:
        """`AttentionStep.positions` are known."""

    def before(self, layer: int, batch: int) -> None:
        """Write the `StepInputs` of ``layer``, those for the index with its group's first layer: but `queries`."""

    def queries(self, layer: int, batch: int) -> None:
        """Write ``query_latent`` of ``layer``, behind `before`."""

    def after(self, layer: int, batch: int) -> None:
        """`AttentionStep.out` holds the attention output of ``layer``."""

    def end(self, batch: int) -> None:
        """All layers are done; ``accepted`` for the next step may be written."""


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without the cyclic garbage collector: an old graph that it ends makes a capture that is under way invalid."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class AttentionStep:
    """The step over a page format's layers; ``cached`` for offloaded sessions, which then must have hot caches.

    With a ``model``, inputs and outputs of a layer take the place of those of the layer before. ``groups`` are the
    index groups of a step, by default all.

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
        model: Model | None = None,
        groups: range | None = None,
    ) -> None:
        if not 1 <= shape.places <= BATCH_SIZES[-1]:
            raise InvalidValue("sessions of a step", shape.places, f"1 to {BATCH_SIZES[-1]}")
        self.format, self.shape = page_format, shape
        self.inputs = StepInputs.zeros(page_format, shape, device, shared=model is not None)
        self._cached, self._overlap, self._choose = cached, overlap, choose
        self._model = model or Model()
        self._groups = groups or range(len(page_format.groups))
        places, rows, k = shape.places, shape.rows, shape.topk
        layers = page_format.layer_count
        of_layers = (1 if model else layers, places, rows, shape.heads, LATENT_DIM)
        self.out = torch.zeros(of_layers, device=device).expand(layers, *of_layers[1:])
        """float32 [layers, places, rows, heads, 512]"""
        self.accepted = torch.zeros(places, dtype=torch.int64, device=device)
        """int64 [places]: rows of the last step that stay; the sampler's to write."""
        self.lengths = torch.zeros_like(self.accepted)
        """int64 [places]: rows of each session before those of the last step."""
        self._records = torch.zeros((len(page_format.groups), places, field.FIELDS), dtype=torch.int64, device=device)
        self._idle = self._running = torch.zeros_like(self._records)
        self.positions = torch.zeros((places, rows), dtype=torch.int64, device=device)
        """int64 [places, rows]: of the rows of the step under way; -1 in idle places."""
        self._seen = torch.zeros_like(self.positions)
        self._scores = torch.zeros((places, rows, round_up(shape.max_tokens, PAGE_TOKENS)), device=device)
        self._topk = TopK(places * rows, shape.max_tokens, k, device)
        self._selection = torch.zeros((places, rows, k), dtype=torch.int32, device=device)
        self._addresses = torch.zeros((places, rows, k), dtype=torch.int64, device=device)
        self._buffers = RoundBuffers.empty(places, rows, k, device)
        row_bytes = page_format.encoding.rows.row_bytes if cached and overlap != "serial" else 0
        self._staging = torch.zeros((places, rows, k, row_bytes), dtype=torch.uint8, device=device)
        self._attention = SparseAttention(places * rows, shape.heads, k, device, encoding=page_format.encoding)
        self._main = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._aside, self._branch = SideStream(device), SideStream(device, priority=-1)
        self._found = self._addresses
        self.trial = False
        """Whether the run under way is one before a recording, of idle places only."""
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
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

    def store_hidden(self, hidden: Tensor) -> None:
        """Store ``hidden`` float32 [batch, rows, hidden size] of the step's rows that end a page; for `Model.end`."""
        batch = len(hidden)
        store_hidden(self._running[0, :batch], self.format, self.positions[:batch], hidden)

    def replay(self, *, variant: bool = False) -> None:
        """Enqueue one step of all sessions, after what the current stream holds.

        The batch is filled up to one of `BATCH_SIZES`, past the last session. The first replay of a batch size compiles
        and records, and waits; so does that of each ``variant``, where the model launches one thing or another. Without
        a GPU the step runs at once. Raises `InvalidValue` without a session.
        """
        if not self._sessions:
            raise InvalidValue("sessions of a step", 0, "at least 1")
        wanted = max(self._sessions) + 1
        size = min(next(size for size in BATCH_SIZES if size >= wanted), self.shape.places)
        if self._main is None:
            self._run(self._records, size)
            return
        if (size, variant) not in self._graphs:
            self._graphs[size, variant] = self._record(size)
        self._graphs[size, variant].replay()

    def record_all(self, *, variant: bool = False) -> None:
        """Record what `replay` may need of every batch size."""
        for size in sorted({min(size, self.shape.places) for size in BATCH_SIZES}):
            if self._main is not None and (size, variant) not in self._graphs:
                self._graphs[size, variant] = self._record(size)

    def close(self) -> None:
        """Give up what was recorded. (NCCL does not end before no graph has its collectives.)"""
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()

    def run_within(self, step: AttentionStep, batch: int) -> None:
        """Enqueue one step of the first ``batch`` places as a part of ``step``, which is under way."""
        self._run(self._idle if step.trial else self._records, batch)

    def attend_again(self, layer: int, row: Tensor, query: tuple[Tensor, Tensor], out: Tensor) -> None:
        """Attend with one more query of each place, to what row ``row[place]`` of the last group selected.

        ``row`` is int64 [batch], ``query`` bfloat16 [batch, heads, 512] and [batch, heads, 64], ``out`` float32
        [batch, heads, 512]; to be called before another group runs.
        """
        found = self._found[: len(row)]
        addresses = found[torch.arange(len(row), device=found.device), row]
        in_group = layer - self.format.groups[self.format.group_of_layer(layer)].first_layer
        self._attention.attend(addresses, in_group, *query, self.shape.softmax_scale, out)

    def _record(self, batch: int) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize()
        self.trial = True
        with torch.cuda.stream(self._main):
            accepted = self.accepted.clone()
            self._run(self._idle, batch)  # compiles what the capture may not, and changes no session
            self.accepted.copy_(accepted)  # of sessions that decode already: the model took their places for idle
        self.trial = False
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.graph(graph, stream=self._main, capture_error_mode="thread_local"):
            self._run(self._records, batch)  # other threads may go on
        return graph

    def _run(self, records: Tensor, batch: int) -> None:
        self._running = records
        begin_step(
            records[0, :batch], self.accepted[:batch], self.lengths[:batch], self.positions[:batch], self._seen[:batch]
        )
        self._model.begin(batch)
        for group in self._groups:
            self._run_group(group, records[group, :batch], batch)
        self._branch.join()
        self._model.end(batch)

    def _run_group(self, group: int, records: Tensor, batch: int) -> None:
        positions, selection = self.positions[:batch], self._selection[:batch]
        first_layer, layers = self.format.groups[group].first_layer, self.format.groups[group].layers
        self._model.before(first_layer, batch)
        short = batch * self.shape.max_tokens <= SHORT_SELECTION
        with self._aside.beside() if short else nullcontext():
            self._model.queries(first_layer, batch)
            self._append(records, group, 0)
        append_keys(records, self.format, group, positions, self.inputs.index_keys[group, :batch])
        self._select(records, group, selection)
        anchor, self._found = self._find(records, group, selection)
        self._aside.join()
        self._attend(first_layer, 0, anchor, lambda: self._begin_branch("late", records, group, selection))
        self._model.after(first_layer, batch)
        for layer in range(1, layers):
            self._model.before(first_layer + layer, batch)
            with self._aside.beside():
                self._append(records, group, layer)
            self._model.queries(first_layer + layer, batch)
            self._aside.join()
            self._branch.join()
            self._attend(first_layer + layer, layer, self._found)
            self._model.after(first_layer + layer, batch)

    def _select(self, records: Tensor, group: int, selection: Tensor) -> None:
        batch = len(records)
        positions, scores = self.positions[:batch], self._scores[:batch]
        query, weights = self.inputs.index_query[group, :batch], self.inputs.index_weights[group, :batch]
        self._branch.join()
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
        buffers = self._round_buffers(batch)
        if self._overlap == "serial":
            self._round(records, group, selection, buffers)
            return buffers.addresses, buffers.addresses
        # Looked up before the round begins: what is evicted by it is none of these rows.
        staging = self._staging[:batch]
        row_addresses(records, self.format, group, selection, addresses, cached=True, staging=staging)
        self._begin_branch("branch", records, group, selection)
        return addresses, buffers.addresses

    def _begin_branch(self, place: Overlap, records: Tensor, group: int, selection: Tensor) -> None:
        """Run the round of ``group`` beside what comes next, if this is the ``place`` for it."""
        if not self._cached or self._overlap != place:
            return
        buffers = self._round_buffers(len(records))
        with self._branch.beside():
            self._round(records, group, selection, buffers)

    def _round(self, records: Tensor, group: int, selection: Tensor, buffers: RoundBuffers) -> None:
        with whole_edges() if self._overlap != "serial" else nullcontext():
            resolve(records, self.format, group, selection, buffers)
        fetch(buffers, self.format.group_row_bytes(group))

    def _round_buffers(self, batch: int) -> RoundBuffers:
        return RoundBuffers(*(getattr(self._buffers, item.name)[:batch] for item in fields(RoundBuffers)))

    def _append(self, records: Tensor, group: int, layer_in_group: int) -> None:
        batch = len(records)
        layer = self.format.layer_index(self.format.groups[group].first_layer) + layer_in_group
        latent, rope = self.inputs.latent[layer, :batch], self.inputs.rope[layer, :batch]
        append_rows(records, self.format, group, layer_in_group, self.positions[:batch], latent, rope)

    def _attend(
        self, layer: int, layer_in_group: int, addresses: Tensor, meanwhile: Callable[[], object] = lambda: None
    ) -> None:
        batch, place = len(addresses), self.format.layer_index(layer)
        latent, rope = self.inputs.query_latent[place, :batch], self.inputs.query_rope[place, :batch]
        self._attention.attend(
            addresses.flatten(0, 1),
            layer_in_group,
            latent.flatten(0, 1),
            rope.flatten(0, 1),
            self.shape.softmax_scale,
            self.out[place, :batch].flatten(0, 1),
            meanwhile,
        )
