"""Resolve, assign and fetch against the reference: every selected row is the right one, and the books agree."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compute.kernels import reference
from compute.kernels.descriptors import FIELDS, describe
from compute.kernels.fetch import fetch
from compute.kernels.resolve import MAX_SELECTED, RoundBuffers, resolve
from compute.kernels.state import CURSOR, NO_RING, GroupCache
from protocol.errors import InvalidValue
from protocol.layout import Q8G64, IndexGroup, PageFormat
from tests.kernels.pages import DEVICE, Pages, assert_inverse, format_of

GROUP = 1
STATE = ("table", "slot_position", "slot_round", "control", "counters", "rows")


class Batch:
    """Sessions with a cache each, and a twin of each cache that the reference works on from the same state."""

    def __init__(self, sessions: list[Pages], slots: int, rows: int, k: int, group: int = GROUP) -> None:
        self.sessions, self.group = sessions, group
        self.format = sessions[0].page_map.format
        self.caches = [pages.cache(group, slots) for pages in sessions]
        self.twins = [pages.cache(group, slots) for pages in sessions]
        self.buffers = RoundBuffers.empty(len(sessions), rows, k, DEVICE)
        records = [
            describe(pages.page_map, group, cache, selected=rows * k)
            for pages, cache in zip(sessions, self.caches, strict=True)
        ]
        self.records = torch.stack(records).to(DEVICE)

    def round(self, selection: Tensor) -> None:
        """One round, checked: rows, counters, cursor, maps, list of misses."""
        for cache, twin in zip(self.caches, self.twins, strict=True):
            for name in STATE:
                getattr(twin, name).copy_(getattr(cache, name))
        resolve(self.records, self.format, self.group, selection.int().contiguous().to(DEVICE), self.buffers)
        fetch(self.buffers, self.format.group_row_bytes(self.group))
        for index in range(len(self.sessions)):
            self._check(index, selection[index].int().to(DEVICE))

    def _check(self, index: int, selection: Tensor) -> None:
        pages, cache, twin = self.sessions[index], self.caches[index], self.twins[index]
        decided = reference.resolve(twin, pages.page_map, self.group, selection)
        reference.fetch(pages.memory, twin, pages.page_map, self.group, decided)
        nbytes = cache.group_row_bytes
        # The truth: the rows where the page map has them, with no cache between.
        truth = pages.memory.read(reference.row_addresses(pages.page_map, self.group, selection), nbytes)
        memory = reference.Memory(pages.home, pages.ring, cache.rows.view(-1))
        addresses = self.buffers.addresses[index]
        assert torch.equal(memory.read(addresses, nbytes), truth)
        assert torch.equal(addresses == 0, decided.addresses == 0)
        assert torch.equal(cache.counters, twin.counters)
        assert torch.equal(cache.control, twin.control)
        assert int(self.buffers.misses[index]) == len(decided.miss_slot)
        # The same slots are taken, for the same positions; who takes which is open.
        assert torch.equal(cache.slot_round, twin.slot_round)
        assert torch.equal(cache.table >= 0, twin.table >= 0)
        assert_inverse(cache)
        taken = self.buffers.target[index, : len(decided.miss_slot)]
        assert torch.equal(taken.sort()[0], (cache.rows.data_ptr() + decided.miss_slot.long() * nbytes).sort()[0])
        untouched = torch.ones(cache.slots, dtype=torch.bool, device=DEVICE)
        untouched[decided.miss_slot.long()] = False
        assert torch.equal(cache.rows[untouched], twin.rows[untouched])


def _select(generator: torch.Generator, rows: int, k: int, tokens: int, *, pool: int | None = None) -> Tensor:
    """Ascending, distinct positions for each row; all rows choose from the same ``pool`` of positions."""
    choices = torch.randperm(tokens, generator=generator)[: pool or tokens]
    picked = [choices[torch.randperm(len(choices), generator=generator)[:k]].sort()[0] for _ in range(rows)]
    return torch.stack(picked)


@pytest.mark.parametrize(
    ("rows", "k", "slots"), [(1, 1, 1), (1, 16, 63), (1, 63, 64), (2, 65, 130), (3, 100, 301), (4, 130, 600)]
)
def test_rounds_against_the_reference(rows: int, k: int, slots: int) -> None:
    generator = torch.Generator().manual_seed(rows * k)
    sessions = [
        Pages.random(format_of(), 16, length=length, ring_first=ring_first, seed=length)
        for length, ring_first in ((1024, 15 * 64), (70, 0), (901, NO_RING))
    ]
    batch = Batch(sessions, slots, rows, k)
    for _ in range(4):
        batch.round(torch.stack([_select(generator, rows, k, 1024, pool=2 * k) for _ in sessions]))
    assert sum(int(cache.counters.sum()) for cache in batch.caches) > 0


def test_adversarial_selections() -> None:
    extremes = [-(2**31), -65, -2, -1, 0, 1, 63, 64, 899, 900, 901, 1023, 1024, 1025, 2**31 - 1, 5, 5, 64, 0, 899]
    generator = torch.Generator().manual_seed(1)
    batch = Batch([Pages.random(format_of(), 16, length=900, ring_first=14 * 64)], 128, 4, 32)
    for _ in range(4):
        selection = torch.tensor(extremes)[torch.randint(0, len(extremes), (1, 4, 32), generator=generator)]
        batch.round(selection)


def test_nothing_selected_advances_the_round_and_nothing_else() -> None:
    batch = Batch([Pages.random(format_of(), 4, length=200)], 64, 2, 16)
    batch.round(torch.full((1, 2, 16), -1))
    assert batch.caches[0].control.tolist() == [0, 1, 0, 0]
    assert batch.caches[0].counters.tolist() == [0, 0, 0, 0]


def test_all_miss_then_all_hit_then_all_evicted() -> None:
    batch = Batch([Pages.random(format_of(), 8, length=512)], 128, 1, 128)
    first, second = torch.arange(0, 256, 2), torch.arange(1, 257, 2)
    for selection in (first, first, second, second, first):
        batch.round(selection.view(1, 1, -1))
    assert batch.caches[0].counters.tolist() == [256, 384, 0, 0]


def test_stamped_slots_right_after_the_cursor_are_passed_over() -> None:
    batch = Batch([Pages.random(format_of(), 16, length=1024)], 300, 2, 100)
    pinned = torch.arange(0, 190)
    batch.round(torch.stack([pinned[:100], pinned[90:]])[None])
    for cache in batch.caches:
        cache.control[CURSOR] = 0  # the 190 slots that are about to be hit come first
    misses = torch.arange(1000, 1010)
    batch.round(torch.stack([torch.cat([pinned[:90], misses]), pinned[90:]])[None])
    assert int(batch.caches[0].control[CURSOR]) == 200


def test_rows_of_one_session_share_one_slot_for_the_same_miss() -> None:
    batch = Batch([Pages.random(format_of(), 8, length=512)], 256, 4, 64)
    batch.round(torch.arange(64).repeat(1, 4, 1) * 3)
    assert batch.caches[0].counters.tolist() == [0, 64, 0, 192]
    assert batch.buffers.addresses[0].unique().numel() == 64


def test_an_idle_place_of_the_batch_has_no_rows_and_no_misses() -> None:
    batch = Batch([Pages.random(format_of(), 8, length=512)], 64, 1, 64)
    buffers = RoundBuffers.empty(2, 1, 64, DEVICE)
    buffers.addresses.fill_(123456)
    records = torch.cat([torch.zeros(1, FIELDS, dtype=torch.int64, device=DEVICE), batch.records])
    selection = torch.arange(64, dtype=torch.int32, device=DEVICE).repeat(2, 1, 1)
    resolve(records, batch.format, GROUP, selection, buffers)
    fetch(buffers, batch.format.group_row_bytes(GROUP))
    assert bool((buffers.addresses[0] == 0).all())
    assert buffers.misses.tolist() == [0, 64]


def test_case_05_pages_moved_and_slots_evicted_with_four_query_rows() -> None:
    generator = torch.Generator().manual_seed(5)
    pages = Pages.random(format_of(), 16, length=1024, ring_first=15 * 64)
    batch = Batch([pages], 256, 4, 64)
    for turn in range(4):
        batch.round(_select(generator, 4, 64, 1024, pool=300)[None])
        if turn % 2:  # the pages change places, as after an eviction and a reload
            order = torch.randperm(16, generator=generator).to(DEVICE)
            view = pages.home.view(16, -1)
            view.copy_(view[order].clone())
            where = (pages.page_map.page_address - pages.home.data_ptr()) // pages.page_map.format.stride
            now = torch.empty_like(order)
            now[order] = torch.arange(16, device=DEVICE)
            pages.page_map.page_address.copy_(pages.home.data_ptr() + now[where] * pages.page_map.format.stride)


@pytest.mark.parametrize("length", [4095, 4096, 4097])
def test_case_10_a_history_of_as_many_tokens_as_slots(length: int) -> None:
    batch = Batch([Pages.random(format_of(), 65, length=length, ring_first=64 * 63)], 4096, 1, 2048, group=0)
    newest = torch.arange(length - 2048, length)
    oldest = torch.arange(2048)
    for selection in (oldest, newest, oldest):
        batch.round(selection.view(1, 1, -1))


def test_case_19_a_slot_beyond_two_gib() -> None:
    page_format = PageFormat(Q8G64, (IndexGroup(0, 1),))
    slots, row = 3_273_700, 3_273_604  # row * 656 is just above 2 ** 31
    pages = Pages.random(page_format, 8, length=512)
    cache = GroupCache.empty(torch.empty((slots, 1, 656), dtype=torch.uint8, device=DEVICE), 512)
    cache.control[CURSOR] = row
    buffers = RoundBuffers.empty(1, 1, 16, DEVICE)
    selection = torch.arange(0, 512, 32, dtype=torch.int32, device=DEVICE).view(1, 1, 16)
    resolve(describe(pages.page_map, 0, cache, selected=16)[None].to(DEVICE), page_format, 0, selection, buffers)
    fetch(buffers, 656)
    assert cache.table[selection.view(-1).long()].tolist() == list(range(row, row + 16))
    truth = pages.memory.read(reference.row_addresses(pages.page_map, 0, selection[0]), 656)
    assert torch.equal(cache.rows[row : row + 16, 0], truth[0])


def test_a_cache_that_a_round_could_fill_is_refused() -> None:
    pages = Pages.random(format_of(), 4, length=200)
    with pytest.raises(InvalidValue, match="slots of a hot cache is 127; allowed: at least the 128"):
        describe(pages.page_map, GROUP, pages.cache(GROUP, 127), selected=128)


def test_more_than_a_ticket_counts_is_refused() -> None:
    with pytest.raises(InvalidValue, match=str(MAX_SELECTED)):
        RoundBuffers.empty(1, 8, 2048, DEVICE)


def test_a_selection_of_another_kind_is_refused() -> None:
    batch = Batch([Pages.random(format_of(), 4, length=200)], 64, 1, 16)
    for selection in (torch.zeros(1, 1, 16, dtype=torch.int64), torch.zeros(1, 16, dtype=torch.int32)):
        with pytest.raises(InvalidValue, match="selection"):
            resolve(batch.records, batch.format, GROUP, selection.to(DEVICE), batch.buffers)
