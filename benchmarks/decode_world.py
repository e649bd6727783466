"""Histories for ``kvd-bench decode``: synthetic rows and keys of GLM-5.3, of many sessions in VRAM, one in host RAM."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from benchmarks.step_world import FORMAT, GROUPS, RING_PAGES, SLOTS, Pages
from compute.decode.step import DecodeStep
from compute.kernels.state import NO_RING, GroupCache, PageMap
from compute.step import AttentionStep
from protocol.layout import PAGE_TOKENS, Q8G64

_DEVICE = torch.device("cuda")
ROOM = 256
"""Positions behind a history that steps may append."""


@dataclass
class Session:
    """A history of ``length`` rows with room for `ROOM` more."""

    map: PageMap
    length: int
    caches: list[GroupCache] = field(default_factory=list)
    ring: torch.Tensor | None = None

    def join(self, step: DecodeStep, place: int, token: int) -> None:
        """Put it, at its first length and with empty caches, into a place of ``step``."""
        for cache in self.caches:
            cache.table.fill_(-1)
            cache.slot_position.fill_(-1)
            for tensor in (cache.slot_round, cache.control, cache.counters):
                tensor.zero_()
        assert isinstance(step.attention, AttentionStep), "not on a GPU"
        step.attention.join(place, self.map, self.caches, self.length)
        step.tokens[place] = token

    def counters(self) -> tuple[int, int]:
        """Missed, and looked up, entries of selections."""
        total = torch.stack([cache.counters for cache in self.caches]).sum(0).tolist()
        return total[1] + total[3], sum(total)


def resident(pages: Pages, tokens: int, place: int) -> Session:
    """Session number ``place`` of those that share ``pages`` out among them."""
    count = tokens // PAGE_TOKENS
    frames = _frames(pages, count, place)
    return Session(_map(pages, frames, pages.vram, NO_RING, tokens - ROOM), tokens - ROOM)


def offloaded(pages: Pages, tokens: int) -> Session:
    """The same history as resident session 0, at home in host RAM, with its newest pages in a ring."""
    frames, length = _frames(pages, tokens // PAGE_TOKENS, 0), tokens - ROOM
    first_page = len(frames) - RING_PAGES
    ring = torch.empty((RING_PAGES, FORMAT.stride), dtype=torch.uint8, device=_DEVICE)
    for page in range(first_page, len(frames)):
        ring[page % RING_PAGES] = pages.vram[frames[page]]
    page_map = _map(pages, frames, pages.host, first_page * PAGE_TOKENS, length)
    page_map.ring_base, page_map.ring_pages = ring.data_ptr(), RING_PAGES
    shapes = [(SLOTS, group.layers, Q8G64.rows.row_bytes) for group in FORMAT.groups]
    rows = [torch.zeros(shape, dtype=torch.uint8, device=_DEVICE) for shape in shapes]
    return Session(page_map, length, [GroupCache.empty(slots, tokens) for slots in rows], ring)


def _frames(pages: Pages, count: int, place: int) -> torch.Tensor:
    order = torch.randperm(pages.count, generator=torch.Generator().manual_seed(1))
    return order[place * count : (place + 1) * count].to(_DEVICE)


def _map(pages: Pages, frames: torch.Tensor, home: torch.Tensor, ring_first: int, length: int) -> PageMap:
    blocks = torch.arange(GROUPS, device=_DEVICE)[:, None] * pages.count + frames
    return PageMap(
        page_address=home.data_ptr() + frames * FORMAT.stride,
        key_block_address=pages.key_blocks.data_ptr() + blocks * Q8G64.keys.block_bytes,
        window=torch.tensor([ring_first, length], device=_DEVICE),
        ring_base=0,
        ring_pages=1,
        format=FORMAT,
    )
