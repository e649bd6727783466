"""How many bytes the sessions of a model take in each tier: arithmetic only; no daemon is asked.

It is about one node, or one stage of a pipeline. A session has one copy of its pages in host RAM, and each replica (a
GPU that decodes all of these layers) has its own caches in VRAM. What weights and activations take is not in it; that
and more nodes are `kvd.planning.fleet`'s. ``kvd plan`` prints it.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from functools import cached_property, lru_cache

from protocol.daemon_block import FIRST_COPY
from protocol.errors import InvalidValue
from protocol.layout import MOST_SLAB_BYTES, PAGE_TOKENS, Encoding, PageFormat, next_slab_bytes, round_up
from protocol.model import ModelConfig
from protocol.session_state import PAGE_TABLE_OFFSET, WorkerBlockLayout

VRAM_GRANULARITY = 2 << 20
"""Bytes: the driver gives multiples of it."""

_TABLE_ENTRY = 4  # a slot, a position or a round: int32
_ADDRESS = 8  # int64
_GROUP_STATE = 4 * 4 + 4 * 8  # cursor, round and miss count as int32; four counters as int64
_STATE_ALIGNMENT = 4096


@dataclass(frozen=True)
class Part:
    """What one session, on one replica where the tier is VRAM, takes for ``purpose``, in bytes.

    ``layer_bytes`` is one layer's share (one indexer's, for index keys); None for what is not divided by layers.
    """

    tier: str
    purpose: str
    layer_bytes: int | None
    requested_bytes: int
    committed_bytes: int


@dataclass(frozen=True)
class Slabs:
    """Allocations of VRAM that blocks of index keys are cut from."""

    count: int
    nbytes: int


@lru_cache
def slabs_of(blocks: int, block_bytes: int) -> Slabs:
    """What a worker that takes ``blocks`` blocks, one after the other, has for them."""
    count = nbytes = 0
    while blocks > 0:
        slab = next_slab_bytes(nbytes)
        alike = -(-blocks // (slab // block_bytes)) if slab == MOST_SLAB_BYTES else 1  # they grow no more
        blocks -= alike * (slab // block_bytes)
        count, nbytes = count + alike, nbytes + alike * slab
    return Slabs(count, nbytes)


@dataclass(frozen=True)
class Footprint:
    """Sessions of ``tokens`` tokens, each with ``hot_rows`` cached rows per layer and ``drafts`` MTP drafts per step.

    ``layers`` are those of one stage of a pipeline, whole index groups; by default all. The MTP layer is with the last.

    Raises `InvalidValue` for more tokens than the model's context, for drafts of a model without an MTP layer, and for
    a hot cache that cannot hold the rows that one round selects.
    """

    model: ModelConfig
    encoding: Encoding
    tokens: int
    hot_rows: int
    drafts: int
    ring_pages: int
    layers: range | None = None

    def __post_init__(self) -> None:
        context = self.model.max_position_embeddings
        if not 1 <= self.tokens <= context:
            raise InvalidValue("tokens", self.tokens, f"1 to {context}, the model's context")
        if self.drafts < 0 or (self.drafts and not self.model.num_nextn_predict_layers):
            raise InvalidValue("MTP drafts", self.drafts, "0, or more where the model has an MTP layer")
        query_rows, topk = 1 + self.drafts, self.model.index_topk
        if self.hot_rows < query_rows * topk:
            raise InvalidValue(
                "hot rows",
                self.hot_rows,
                f"at least {query_rows * topk}: {query_rows} query rows of {topk} selected rows each",
            )
        if self.ring_pages < 1:
            raise InvalidValue("ring pages", self.ring_pages, "at least 1")

    @cached_property
    def page_format(self) -> PageFormat:
        if self.layers is None or len(self.layers) == self.model.num_hidden_layers:
            return self.model.page_format(self.encoding, mtp=self.drafts > 0)
        last = self.layers.stop == self.model.num_hidden_layers
        end = self.layers.stop + (self.model.num_nextn_predict_layers if last and self.drafts else 0)
        groups = self.model.index_groups(self.layers.start, end)
        return PageFormat(self.encoding, groups, self.model.hidden_size if last else 0)

    @property
    def pages(self) -> int:
        """Pages of one session, the last one perhaps not full."""
        return round_up(self.tokens, PAGE_TOKENS) // PAGE_TOKENS

    @property
    def position_table_bytes(self) -> int:
        """Position → slot, for every index group. Of the tables, it and the addresses grow with the history."""
        return _TABLE_ENTRY * self.pages * PAGE_TOKENS * len(self.page_format.groups)

    @property
    def slot_table_bytes(self) -> int:
        """Slot → position, slot → round, and a few words of state, for every index group."""
        return len(self.page_format.groups) * (2 * _TABLE_ENTRY * self.hot_rows + _GROUP_STATE)

    @property
    def address_table_bytes(self) -> int:
        """Where each page lies, and each of its blocks of index keys."""
        return _ADDRESS * self.pages * (1 + len(self.page_format.groups))

    @property
    def session_state_bytes(self) -> int:
        """The two state blocks of one session: page table; token log and commit records with the last hidden."""
        daemon_block = FIRST_COPY + 2 * round_up(PAGE_TABLE_OFFSET + _ADDRESS * self.pages, _STATE_ALIGNMENT)
        return daemon_block + WorkerBlockLayout(self.tokens, 4 * self.model.hidden_size).block_bytes

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """What one session takes, tier by tier."""
        page = self.page_format
        row_bytes, block_bytes = self.encoding.rows.row_bytes, self.encoding.keys.block_bytes
        history, state = self.pages * page.stride, self.session_state_bytes
        hot_layer = self.hot_rows * row_bytes
        tables = (self.position_table_bytes + self.slot_table_bytes, self.address_table_bytes)
        keys_layer = self.pages * block_bytes
        return (
            Part("host", "pages", self.pages * PAGE_TOKENS * row_bytes, history, history),
            Part("host", "session_state", None, state, state),
            _in_vram("hot_cache", hot_layer, (hot_layer * page.layer_count,)),
            _in_vram("tables", None, tables),
            _in_vram("ring", None, (self.ring_pages * page.stride,)),
            Part("vram", "index_keys", keys_layer, keys_layer * len(page.groups), self.key_slabs(1).nbytes),
        )

    def key_slabs(self, sessions: int) -> Slabs:
        """Slabs that hold the index keys of ``sessions`` sessions on one replica; sessions share slabs."""
        return slabs_of(sessions * self.pages * len(self.page_format.groups), self.encoding.keys.block_bytes)

    def host_bytes(self, sessions: int) -> int:
        """Host RAM that ``sessions`` sessions commit, however many replicas read them."""
        return sessions * sum(part.committed_bytes for part in self.parts if part.tier == "host")

    def vram_bytes(self, sessions: int) -> int:
        """VRAM that ``sessions`` sessions commit on the GPU of one replica."""
        own = sum(part.committed_bytes for part in self.parts if part.tier == "vram" and part.purpose != "index_keys")
        return sessions * own + self.key_slabs(sessions).nbytes

    def sessions_in_host(self, limit: int) -> int:
        """The most sessions that fit into ``limit`` bytes of host RAM."""
        return limit // self.host_bytes(1)

    def sessions_in_vram(self, limit: int) -> int:
        """The most sessions that fit into ``limit`` bytes of VRAM on one GPU."""
        at_most = limit // VRAM_GRANULARITY  # a session takes more than one granule
        return bisect.bisect_right(range(at_most + 1), limit, key=self.vram_bytes) - 1


def _in_vram(purpose: str, layer_bytes: int | None, allocations: tuple[int, ...]) -> Part:
    committed = sum(round_up(nbytes, VRAM_GRANULARITY) for nbytes in allocations)
    return Part("vram", purpose, layer_bytes, sum(allocations), committed)
