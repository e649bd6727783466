"""Device data of one session: where its pages are, and the hot cache of each index group.

Both are plain tensors, made once and changed in place, so that kernels and recorded graphs can keep their addresses.
All addresses are absolute byte addresses in an int64: a pointer on the CPU, a unified virtual address on a GPU. Every
row address is a multiple of 16, and 0 stands for "no row". What the fields mean to a decode step is in ``reference``;
who moves pages and grows these tensors is in ``compute.history`` and ``compute.hot_cache``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from protocol.errors import InvalidValue
from protocol.layout import PAGE_TOKENS, PageFormat

NO_RING = 2**62
"""``ring_first`` of a session whose pages are all read and written in their homes."""

RING_FIRST, LENGTH = 0, 1
"""Indices into `PageMap.window`."""

CURSOR, ROUND, MISSES = 0, 1, 2
"""Indices into `GroupCache.control`."""

HITS, UNIQUE_MISSES, RING_HITS, DUPLICATE_MISSES = 0, 1, 2, 3
"""Indices into `GroupCache.counters`."""


@dataclass
class PageMap:
    """Where the pages of one session are.

    The rows of a token in all layers of index group ``g`` (its *group row*) begin at
    ``page + format.row_offset(g, position % 64)``, where ``page`` is ``ring_base + (p % ring_pages) * format.stride``
    if ``position >= ring_first``, else ``page_address[p]``, and ``p = position // 64``.
    """

    page_address: Tensor
    """int64 [max_pages]: home of each page, in host RAM (offloaded) or VRAM (resident)."""
    key_block_address: Tensor
    """int64 [groups, max_pages]: block of 64 index keys in VRAM."""
    window: Tensor
    """int64 [2]: (ring_first, length). Positions from ``ring_first`` on are read and written in the ring; resident:
    ``ring_first`` is `NO_RING`."""
    ring_base: int
    """Address of the ring's first page; 0 where there is no ring."""
    ring_pages: int
    """Pages in the ring, at least 1."""
    format: PageFormat

    @property
    def max_tokens(self) -> int:
        """Positions that the map has room for."""
        return self.page_address.shape[0] * PAGE_TOKENS


@dataclass(frozen=True)
class PageRun:
    """Pages at home that lie one behind the other in memory that was mapped together."""

    address: int
    pages: int


@dataclass
class GroupCache:
    """The hot cache of one session and one index group.

    Between rounds ``table`` and ``slot_position`` are inverse to each other: ``table[p] == s >= 0`` if and only if
    ``slot_position[s] == p``. A slot is laid out as a page is: ``rows[slot][layer in group]``.
    """

    table: Tensor
    """int32 [max_tokens]: position to slot, -1 where not cached."""
    slot_position: Tensor
    """int32 [slots]: slot to position, -1 where empty."""
    slot_round: Tensor
    """int32 [slots]: last round that stamped the slot."""
    control: Tensor
    """int32 [4]: cursor, round, miss count of the current round, 0. The cursor is the slot that is looked at first."""
    counters: Tensor
    """int64 [4]: hits, misses (claimed unique rows), ring hits, duplicate misses."""
    rows: Tensor
    """uint8 [slots, layers in group, row bytes], contiguous."""

    @property
    def slots(self) -> int:
        return self.slot_position.shape[0]

    @property
    def group_row_bytes(self) -> int:
        """Bytes of one slot."""
        return self.rows.shape[1] * self.rows.shape[2]

    @classmethod
    def empty(cls, rows: Tensor, max_tokens: int) -> GroupCache:
        """A cache without entries over the slots ``rows``; its tables are new tensors on the device of ``rows``.

        Raises `InvalidValue` if ``rows`` is not contiguous uint8 [slots, layers, row bytes].
        """
        if rows.dtype != torch.uint8 or rows.dim() != 3 or not rows.is_contiguous():
            raise InvalidValue(
                "slots of a hot cache", f"{rows.dtype} {tuple(rows.shape)}", "contiguous uint8 [s, l, b]"
            )

        def filled(count: int, value: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full((count,), value, dtype=dtype, device=rows.device)

        slots = rows.shape[0]
        return cls(
            table=filled(max_tokens, -1),
            slot_position=filled(slots, -1),
            slot_round=filled(slots, 0),
            control=filled(4, 0),
            counters=filled(4, 0, torch.int64),
            rows=rows,
        )
