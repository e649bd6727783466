"""A synthetic hot cache for benches: GLM-5.3's page format, long histories in registered host RAM, exact miss rates.

Sessions share page frames, each in an order of its own, so that 15 histories of 1M tokens span what one would.
Every group row carries its frame and token at both ends, so a wrong copy shows. Selections are drawn together with a
simulation of the cache, so that each round has exactly the misses that it is said to have.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.host_memory import registered
from compute.kernels.descriptors import describe
from compute.kernels.resolve import RoundBuffers
from compute.kernels.state import NO_RING, GroupCache, PageMap
from protocol.layout import PAGE_TOKENS, Q8G64, PageFormat, group_layers

Positions = npt.NDArray[np.signedinteger]

HOST_BYTES = 64 << 30
"""Registered host RAM that the pages spread over."""
HISTORY = 1 << 20
"""Tokens of a session."""
GROUP = 5
"""An index group of four layers, in the middle of the model."""

GLM_FORMAT = PageFormat(Q8G64, group_layers([0, 1, *range(2, 78, 4), 78], range(79)), hidden_size=6144)


@functools.cache
def tagged_pages() -> tuple[Tensor, int]:
    """Host RAM full of pages, and their number; the tag of a row of `GROUP` is 64 × frame + token."""
    host = registered(HOST_BYTES)
    frames = HOST_BYTES // GLM_FORMAT.stride
    first, nbytes = GLM_FORMAT.group_offset(GROUP), GLM_FORMAT.group_row_bytes(GROUP)
    pages = host[: frames * GLM_FORMAT.stride].view(frames, GLM_FORMAT.stride)
    rows = pages[:, first : first + PAGE_TOKENS * nbytes].view(torch.int64).unflatten(1, (PAGE_TOKENS, nbytes // 8))
    tags = torch.arange(frames * PAGE_TOKENS).view(frames, PAGE_TOKENS)
    rows[:, :, 0] = tags
    rows[:, :, -1] = tags
    return host, frames


class Simulation:
    """Which position each slot holds, round by round; the rule is `compute.kernels.reference.resolve`'s.

    Which miss of a round takes which slot is open, so after an eviction of half a round's slots a kernel's cache may
    differ in a few positions: `CacheWorld.check` allows for that.
    """

    def __init__(self, slots: int, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.slot_position: Positions = self.random.permutation(HISTORY)[:slots].astype(np.int32)
        self._cursor = 0
        self._cached = np.zeros(HISTORY, dtype=bool)
        self._cached[self.slot_position] = True

    def select(self, rows: int, k: int, misses: int, *, after_cursor: bool) -> Positions:
        """The selection of one round, int32 [rows, k]; each row has ``misses`` misses.

        Several rows draw from pools twice as large, so that any two of them share half. With ``after_cursor`` the hits
        are the slots that assign meets first.
        """
        spread = 1 if rows == 1 else 2
        around = self._around()
        hits = around if after_cursor else self.random.permutation(around)
        hit_pool = self.slot_position[hits[: spread * (k - misses)]]
        strangers = self.random.integers(0, HISTORY, 4 * spread * misses + 64)
        miss_pool = self.random.permutation(np.unique(strangers[~self._cached[strangers]]))[: spread * misses]
        picked = [
            np.concatenate(
                [self.random.permutation(hit_pool)[: k - misses], self.random.permutation(miss_pool)[:misses]]
            )
            for _ in range(rows)
        ]
        self._assign(np.unique(picked))
        return np.sort(np.stack(picked).astype(np.int32), axis=1)

    def _around(self) -> Positions:
        slots = len(self.slot_position)
        return (self._cursor + np.arange(slots)) % slots

    def _assign(self, selected: Positions) -> None:
        claims = selected[~self._cached[selected]]
        around = self._around()
        stamped = np.isin(self.slot_position, selected, kind="table")
        taken = around[~stamped[around]][: len(claims)]
        self._cached[self.slot_position[taken]] = False
        self._cached[claims] = True
        self.slot_position[taken] = claims
        if len(claims):
            self._cursor = int(taken[-1] + 1) % len(self.slot_position)


class CacheWorld:
    """A batch of sessions with full hot caches, and the selections of ``runs`` rounds, int32 [runs, batch, rows, k]."""

    def __init__(
        self, batch: int, slots: int, rows: int, k: int, misses: int, runs: int, *, after_cursor: bool = False
    ) -> None:
        host, frames = tagged_pages()
        self._host = host.data_ptr()
        self._misses = misses
        self.caches: list[GroupCache] = []
        self.page_maps: list[PageMap] = []
        selections, records = [], []
        for session in range(batch):
            simulation = Simulation(slots, session)
            order = torch.from_numpy(simulation.random.integers(0, frames, HISTORY // PAGE_TOKENS))
            page_map = _page_map((self._host + order * GLM_FORMAT.stride).cuda())
            cache = _full_cache(torch.from_numpy(simulation.slot_position))
            records.append(describe(page_map, GROUP, cache, selected=rows * k))
            drawn = [simulation.select(rows, k, misses, after_cursor=after_cursor) for _ in range(runs)]
            selections.append(torch.from_numpy(np.stack(drawn)))
            self.page_maps.append(page_map)
            self.caches.append(cache)
        self.records = torch.stack(records).cuda()
        self.selections = torch.stack(selections, dim=1).cuda()
        self.buffers = RoundBuffers.empty(batch, rows, k, torch.device("cuda"))
        for cache, page_map in zip(self.caches, self.page_maps, strict=True):
            words = _words(cache)
            words[:, 0] = words[:, -1] = self._tags(cache, page_map)
        self._saved = [[tensor.clone() for tensor in _state(cache)] for cache in self.caches]

    def reset(self) -> None:
        """Put the caches back to where they were before the first round."""
        for cache, saved in zip(self.caches, self._saved, strict=True):
            for tensor, old in zip(_state(cache), saved, strict=True):
                tensor.copy_(old)

    def check(self, *, fetched: bool) -> None:
        """After all rounds: assert the miss rate and, if misses were fetched, that each slot has its position's row."""
        runs, _, rows, k = self.selections.shape
        for cache, page_map in zip(self.caches, self.page_maps, strict=True):
            hits, claims, _, duplicates = cache.counters.tolist()
            assert hits + claims + duplicates == runs * rows * k, (hits, claims, duplicates)
            expected = runs * rows * self._misses
            assert abs(claims + duplicates - expected) <= 2 + 0.02 * expected, (claims, duplicates, expected)
            if fetched:
                words, tags = _words(cache), self._tags(cache, page_map)
                wrong = (words[:, 0] != tags) | (words[:, -1] != tags)
                assert not bool(wrong.any()), f"slot {int(wrong.nonzero()[0])} holds another position's row"

    def _tags(self, cache: GroupCache, page_map: PageMap) -> Tensor:
        position = cache.slot_position.long()
        frame = (page_map.page_address[position // PAGE_TOKENS] - self._host) // GLM_FORMAT.stride
        return frame * PAGE_TOKENS + position % PAGE_TOKENS


def _page_map(page_address: Tensor) -> PageMap:
    return PageMap(
        page_address=page_address,
        key_block_address=torch.zeros((len(GLM_FORMAT.groups), 1), dtype=torch.int64, device="cuda"),
        window=torch.tensor([NO_RING, HISTORY], device="cuda"),
        ring_base=0,
        ring_pages=1,
        format=GLM_FORMAT,
    )


def _full_cache(positions: Tensor) -> GroupCache:
    layers, row_bytes = GLM_FORMAT.groups[GROUP].layers, GLM_FORMAT.encoding.rows.row_bytes
    rows = torch.zeros((len(positions), layers, row_bytes), dtype=torch.uint8, device="cuda")
    cache = GroupCache.empty(rows, HISTORY)
    cache.slot_position.copy_(positions)
    cache.table[cache.slot_position.long()] = torch.arange(cache.slots, dtype=torch.int32, device="cuda")
    return cache


def _words(cache: GroupCache) -> Tensor:
    return cache.rows.view(cache.slots, -1).view(torch.int64)


def _state(cache: GroupCache) -> list[Tensor]:
    return [cache.table, cache.slot_position, cache.slot_round, cache.control, cache.counters, cache.rows]
