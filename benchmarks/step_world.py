"""A long history of GLM-5.3 twice over, in VRAM and in registered host RAM, and the selections that steps make of it.

Synthetic: rows are random bytes with finite scales, and selections are drawn, not scored (see `benchmarks.locality`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.host_memory import registered
from benchmarks.locality import Locality
from compute.kernels.state import NO_RING, GroupCache, PageMap
from protocol.layout import PAGE_TOKENS, Q8G64, PageFormat
from protocol.model import GLM_5_3

FORMAT = PageFormat(Q8G64, GLM_5_3.index_groups(), GLM_5_3.hidden_size)
GROUPS = len(FORMAT.groups)
TOPK = GLM_5_3.index_topk
SLOTS = 32_768
WORKING_SET = 16_384
STEPS = 64
"""Steps whose selections are prepared; their misses fit the history once."""
RING_PAGES = 8
LOCALITY = Locality(GROUPS, TOPK, SLOTS, WORKING_SET, STEPS)

_DEVICE = torch.device("cuda")
_COPIED = 512  # pages
_KEY_BLOCK = Q8G64.keys.block_bytes


class Pages:
    """``count`` pages of random rows in VRAM, the same in host RAM, and as many blocks of index keys per group."""

    def __init__(self, count: int, *, on_host: bool = True) -> None:
        self.count = count
        self.vram = torch.empty((count, FORMAT.stride), dtype=torch.uint8, device=_DEVICE)
        torch.manual_seed(0)
        self.vram.view(torch.int64).random_()
        layout = Q8G64.rows
        rows = self.vram.view(torch.int32)[:, : FORMAT.rows_bytes // 4].unflatten(1, (-1, layout.row_bytes // 4))
        scales = rows[..., layout.scales_offset // 4 : layout.rope_offset // 4]
        scales.bitwise_and_(0x007F007F).bitwise_or_(0x3C003C00)  # pairs of bfloat16 in [2**-7, 2**-6)
        rope = rows[..., layout.rope_offset // 4 :]
        rope.bitwise_and_(0x807F807F - (1 << 32)).bitwise_or_(0x3F003F00)  # ±[0.5, 1)
        self.key_blocks = torch.empty((GROUPS * count, _KEY_BLOCK), dtype=torch.uint8, device=_DEVICE)
        self.key_blocks.view(torch.int64).random_()
        words = self.key_blocks.view(torch.int32)
        words[:, : Q8G64.keys.scales_offset // 4].bitwise_and_(0xBFBFBFBF - (1 << 32))  # e4m3 below 2
        words.view(torch.float32)[:, Q8G64.keys.scales_offset // 4 :].uniform_(0.005, 0.015)
        if not on_host:
            return
        self.host = registered(count * FORMAT.stride).view(count, FORMAT.stride)
        for first in range(0, count, _COPIED):
            part = slice(first, first + _COPIED)
            self.host[part].copy_(self.vram[part], non_blocking=True)
        torch.cuda.synchronize()


class History:
    """A history of all but the last page of ``max_tokens``, as a resident session and as an offloaded one."""

    def __init__(self, pages: Pages, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.length = max_tokens - PAGE_TOKENS
        count = max_tokens // PAGE_TOKENS
        self._vram = pages.vram
        self._frames = torch.randperm(pages.count, generator=torch.Generator().manual_seed(1))[:count].to(_DEVICE)
        first_page = count - RING_PAGES
        self.ring_first = first_page * PAGE_TOKENS
        self.ring = torch.empty((RING_PAGES, FORMAT.stride), dtype=torch.uint8, device=_DEVICE)
        for page in range(first_page, count):
            self.ring[page % RING_PAGES] = pages.vram[self._frames[page]]
        blocks = torch.arange(GROUPS, device=_DEVICE)[:, None] * pages.count + self._frames
        key_block_address = pages.key_blocks.data_ptr() + blocks * _KEY_BLOCK
        self.resident, self.offloaded = (
            PageMap(
                page_address=home.data_ptr() + self._frames * FORMAT.stride,
                key_block_address=key_block_address,
                window=torch.tensor([ring_first, self.length], device=_DEVICE),
                ring_base=self.ring.data_ptr(),
                ring_pages=RING_PAGES,
                format=FORMAT,
            )
            for home, ring_first in ((pages.vram, NO_RING), (pages.host, self.ring_first))
        )
        self.caches = [
            GroupCache.empty(
                torch.zeros((SLOTS, group.layers, Q8G64.rows.row_bytes), dtype=torch.uint8, device=_DEVICE), max_tokens
            )
            for group in FORMAT.groups
        ]
        self._saved: list[list[Tensor]] = []

    def fill_caches(self, cached: Tensor) -> None:
        """Let slot s of group g hold position ``cached[g, s]``, and remember this state for `reset`."""
        for group, cache in enumerate(self.caches):
            positions = cached[group]
            cache.table.fill_(-1)
            cache.table[positions] = torch.arange(SLOTS, dtype=torch.int32, device=_DEVICE)
            cache.slot_position.copy_(positions)
            for tensor in (cache.slot_round, cache.control, cache.counters):
                tensor.zero_()
            first, words = FORMAT.group_offset(group) // 8, FORMAT.group_row_bytes(group) // 8
            rows = self._vram.view(torch.int64)[:, first : first + PAGE_TOKENS * words].unflatten(1, (-1, words))
            taken = rows[self._frames[positions // PAGE_TOKENS], positions % PAGE_TOKENS]
            cache.rows.view(SLOTS, -1).view(torch.int64).copy_(taken)
        self._saved = [[tensor.clone() for tensor in _state(cache)] for cache in self.caches]

    def reset(self) -> None:
        """Put the caches back to where they were before the first step."""
        for cache, saved in zip(self.caches, self._saved, strict=True):
            for tensor, old in zip(_state(cache), saved, strict=True):
                tensor.copy_(old)

    def counters(self) -> tuple[int, int]:
        """Misses, duplicates included, and entries looked up, since `reset`."""
        hits, misses, ring_hits, duplicates = torch.stack([cache.counters for cache in self.caches]).sum(0).tolist()
        return misses + duplicates, hits + misses + ring_hits + duplicates


def _state(cache: GroupCache) -> list[Tensor]:
    return [cache.table, cache.slot_position, cache.slot_round, cache.control, cache.counters, cache.rows]
