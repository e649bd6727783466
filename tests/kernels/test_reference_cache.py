"""The hot cache against a dictionary: every row served is the row that was appended, whatever was selected."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compute.kernels import reference
from compute.kernels.state import CURSOR, LENGTH, MISSES, NO_RING, RING_FIRST, GroupCache
from protocol.errors import InvalidValue
from protocol.layout import F32, LATENT_DIM, Q8G64, ROPE_DIM, Encoding
from tests.kernels.pages import DEVICE, Pages, assert_inverse, format_of

INT32 = torch.iinfo(torch.int32)
GROUP = 1
LAYERS = 4


class Session:
    """One session and its hot cache, where each row holds a stamp of its position and of how often it was written."""

    def __init__(self, pages: int, slots: int, *, encoding: Encoding = Q8G64, length: int | None = None) -> None:
        self.pages = Pages.random(format_of(encoding), pages, length=0, ring_pages=pages)
        self.pages.home.fill_(0xFF)
        self.pages.ring.fill_(0xFF)
        self.cache = self.pages.cache(GROUP, slots)
        self.memory = reference.Memory(self.pages.home, self.pages.ring, self.cache.rows.view(-1))
        self.layout = encoding.rows
        self.versions: dict[int, int] = {}
        self.append(0, pages * 64 if length is None else length)

    def append(self, first: int, end: int) -> None:
        """Write rows as an append does, into the home of their pages."""
        positions = torch.arange(first, end, device=DEVICE)
        self.pages.page_map.window[LENGTH] = end
        reference.forget(self.cache, positions)
        for position in range(first, end):
            self.versions[position] = self.versions.get(position, 0) + 1
        versions = torch.tensor([self.versions[position] for position in range(first, end)], device=DEVICE)
        for layer in range(LAYERS):
            latent = torch.zeros(end - first, LATENT_DIM, device=DEVICE)
            rope = torch.zeros(end - first, ROPE_DIM, device=DEVICE)
            rope[:, 0], rope[:, 1], rope[:, 2] = positions, versions, layer  # all exact in bfloat16
            reference.append_rows(self.pages.memory, self.pages.page_map, GROUP, layer, positions, latent, rope)

    def stamp(self, position: int) -> tuple[int, int]:
        return position, self.versions[position]

    def truncate(self, length: int) -> None:
        self.pages.page_map.window[LENGTH] = length

    def round(self, selection: Tensor) -> reference.Round:
        decided = reference.resolve(self.cache, self.pages.page_map, GROUP, selection.to(DEVICE))
        reference.fetch(self.memory, self.cache, self.pages.page_map, GROUP, decided)
        return decided

    def served(self, addresses: Tensor) -> list[list[tuple[int, int] | None]]:
        """The stamp found at each address, the same in all layers; None where the address is 0."""
        found = []
        for layer in range(LAYERS):
            first = (addresses + layer * self.layout.row_bytes).where(addresses != 0, 0)
            _, rope = reference.decode_rows(self.memory.read(first, self.layout.row_bytes), self.layout)
            assert bool(((rope[..., 2] == layer) | (addresses == 0)).all())
            found.append(rope[..., :2].long().masked_fill((addresses == 0)[..., None], -1))
        assert all(torch.equal(found[0], other) for other in found)
        return [[None if stamp[0] < 0 else (stamp[0], stamp[1]) for stamp in row] for row in found[0].tolist()]


class Model:
    """What a hot cache must do, as a dictionary: position to slot, slots taken around a ring past the pinned ones."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.slot_of: OrderedDict[int, int] = OrderedDict()
        self.cursor = 0
        self.counters = [0, 0, 0, 0]

    def round(self, wanted: list[int]) -> list[int]:
        """Update for the valid entries outside the ring; returns the misses in ascending order."""
        pinned = {self.slot_of[position] for position in wanted if position in self.slot_of}
        missed = [position for position in wanted if position not in self.slot_of]
        misses = sorted(set(missed))
        self.counters[0] += len(wanted) - len(missed)
        self.counters[1] += len(misses)
        self.counters[3] += len(missed) - len(misses)
        for position in misses:
            while self.cursor in pinned:
                self.cursor = (self.cursor + 1) % self.slots
            for owner in [owner for owner, slot in self.slot_of.items() if slot == self.cursor]:
                del self.slot_of[owner]
            self.slot_of[position] = self.cursor
            pinned.add(self.cursor)
            self.cursor = (self.cursor + 1) % self.slots
        return misses

    def forget(self, positions: range) -> None:
        for position in positions:
            self.slot_of.pop(position, None)


PAGES, SLOTS, ROWS, K = 2, 24, 3, 8
POSITIONS = st.one_of(
    st.integers(0, 30),  # few positions: hits, and duplicates between rows
    st.integers(0, PAGES * 64 - 1),
    st.sampled_from([-1, -2, INT32.min, INT32.max, PAGES * 64]),
)
STEPS = st.one_of(
    st.tuples(st.just("round"), st.lists(st.lists(POSITIONS, min_size=K, max_size=K), min_size=1, max_size=ROWS)),
    st.tuples(st.just("rewrite"), st.integers(0, PAGES * 64 - 1)),
    st.tuples(st.just("ring"), st.integers(0, PAGES * 64)),
)


@given(steps=st.lists(STEPS, min_size=1, max_size=12))
def test_serves_the_row_that_was_appended_and_agrees_with_a_dictionary(steps: list[tuple[str, object]]) -> None:
    session, model = Session(PAGES, SLOTS), Model(SLOTS)
    ring_first = NO_RING
    for kind, argument in steps:
        if kind == "rewrite":  # truncate, then write other rows at the same positions
            assert isinstance(argument, int)
            ring_first = NO_RING
            session.pages.page_map.window[RING_FIRST] = ring_first
            session.truncate(argument)
            session.append(argument, PAGES * 64)
            model.forget(range(argument, PAGES * 64))
        elif kind == "ring":  # the newest pages are read in the ring from here on
            assert isinstance(argument, int)
            ring_first = argument // 64 * 64
            session.pages.ring.copy_(in_order_of_pages(session))
            session.pages.page_map.window[RING_FIRST] = ring_first
        else:
            assert isinstance(argument, list)
            check_round(session, model, argument, ring_first)
        assert_inverse(session.cache)


def in_order_of_pages(session: Session) -> Tensor:
    stride = session.pages.page_map.format.stride
    homes = session.pages.page_map.page_address - session.pages.home.data_ptr()
    return torch.cat([session.pages.home[home : home + stride] for home in homes.tolist()])


def check_round(session: Session, model: Model, rows: list[list[int]], ring_first: int) -> None:
    flat = [position for row in rows for position in row]
    valid = [position for position in flat if 0 <= position < PAGES * 64]
    cached = [position for position in valid if position < ring_first]
    misses = model.round(cached)
    model.counters[2] += len(valid) - len(cached)
    decided = session.round(torch.tensor(rows, dtype=torch.int32))

    expected = [[session.stamp(p) if 0 <= p < PAGES * 64 else None for p in row] for row in rows]
    assert session.served(decided.addresses) == expected
    assert decided.miss_position.tolist() == misses
    assert dict(model.slot_of) == {p: s for p, s in enumerate(session.cache.table.tolist()) if s >= 0}
    assert session.cache.counters.tolist() == model.counters
    assert int(session.cache.control[CURSOR]) == model.cursor
    assert int(session.cache.control[MISSES]) == len(misses)


def test_a_slot_filled_in_a_round_is_a_hit_from_the_next_round_on() -> None:
    session = Session(2, 16)
    selection = torch.tensor([[3, 4, 5, -1], [3, 4, 9, 10]], dtype=torch.int32)
    first = session.round(selection)
    assert first.miss_position.tolist() == [3, 4, 5, 9, 10]
    assert session.cache.counters.tolist() == [0, 5, 0, 2]
    second = session.round(selection)
    assert second.miss_position.tolist() == []
    assert session.cache.counters.tolist() == [7, 5, 0, 2]
    assert torch.equal(first.addresses, second.addresses)


def test_a_slot_stamped_in_the_round_is_never_evicted() -> None:
    session = Session(2, 8)
    session.round(torch.arange(8).int()[None])
    kept = [0, 2, 5, 7]  # under the cursor, and all around it
    decided = session.round(torch.tensor([[*kept, 100, 101, 102, 103]], dtype=torch.int32))
    assert sorted(decided.miss_slot.tolist()) == [1, 3, 4, 6]
    assert session.cache.table[kept].tolist() == kept
    assert session.served(decided.addresses) == [[session.stamp(p) for p in (*kept, 100, 101, 102, 103)]]


def test_a_selection_that_could_pin_more_than_there_is_changes_nothing() -> None:
    session = Session(2, 15)
    session.round(torch.arange(12).int()[None])
    names = ("table", "slot_position", "slot_round", "control", "counters", "rows")
    before = [getattr(session.cache, name).clone() for name in names]
    with pytest.raises(InvalidValue, match="at most the 15 slots"):
        reference.resolve(session.cache, session.pages.page_map, GROUP, torch.zeros(2, 8, dtype=torch.int32))
    assert all(torch.equal(getattr(session.cache, name), old) for name, old in zip(names, before, strict=True))


def test_forgetting_leaves_other_positions_and_refuses_those_outside() -> None:
    session = Session(2, 8)
    session.round(torch.arange(8).int()[None])
    reference.forget(session.cache, torch.tensor([1, 100, 6], device=DEVICE))
    assert (session.cache.table >= 0).nonzero().flatten().tolist() == [0, 2, 3, 4, 5, 7]
    assert_inverse(session.cache)
    before = session.cache.table.clone()
    for bad in (-1, 128, 2**62):
        with pytest.raises(InvalidValue, match=str(bad)):
            reference.forget(session.cache, torch.tensor([0, bad], device=DEVICE))
    reference.forget(session.cache, torch.empty(0, dtype=torch.int64, device=DEVICE))
    assert torch.equal(session.cache.table, before)


def test_slots_of_a_cache_must_be_contiguous_bytes() -> None:
    for rows in (torch.zeros(4, 2, 656), torch.zeros(4, 656, dtype=torch.uint8), torch.zeros(2, 4, 656).byte().mT):
        with pytest.raises(InvalidValue, match="slots of a hot cache"):
            GroupCache.empty(rows, 64)


def test_case_07_the_counters_say_exactly_what_happened() -> None:
    session = Session(4, 64)
    for first in range(0, 112, 16):
        session.round(torch.arange(first, first + 16).int().view(2, 8))
    assert session.cache.counters.tolist() == [0, 112, 0, 0]
    # Evicted rows are restored from their pages: seven of them, and four new ones, beside seven hits.
    evicted, hits = list(range(7)), list(range(90, 97))
    assert session.cache.table[evicted].tolist() == [-1] * 7
    decided = session.round(torch.tensor([[*evicted, *hits, 200, 201, 202, 203]], dtype=torch.int32))
    assert decided.miss_position.tolist() == [*evicted, 200, 201, 202, 203]
    assert session.cache.counters.tolist() == [7, 123, 0, 0]
    assert int(session.cache.control[MISSES]) == 11


@pytest.mark.parametrize(
    ("encoding", "slots", "k", "history"),
    [(encoding, 64, 32, length) for encoding in (Q8G64, F32) for length in (63, 64, 65)]
    + [(Q8G64, 4096, 2048, length) for length in (4095, 4096, 4097)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_case_10_histories_about_as_long_as_the_cache(encoding: Encoding, slots: int, k: int, history: int) -> None:
    generator = torch.Generator().manual_seed(history)
    pages = Pages.random(format_of(encoding), -(-history // 64), length=history)
    positions = torch.arange(history, device=DEVICE)
    rows = [torch.randn(history, size, generator=generator).to(DEVICE) for size in (LATENT_DIM, ROPE_DIM)]
    reference.append_rows(pages.memory, pages.page_map, GROUP, 3, positions, *rows)
    cache = pages.cache(GROUP, slots)
    memory = reference.Memory(pages.home, cache.rows.view(-1))
    query = [torch.randn(1, 4, size, generator=generator).to(DEVICE) for size in (LATENT_DIM, ROPE_DIM)]
    for _ in range(5):
        selection = torch.randperm(history, generator=generator)[:k].sort().values.int()[None].to(DEVICE)
        decided = reference.resolve(cache, pages.page_map, GROUP, selection)
        reference.fetch(memory, cache, pages.page_map, GROUP, decided)
        in_place = reference.row_addresses(pages.page_map, GROUP, selection)
        resident, offloaded = (
            reference.attend(memory, addresses, 3, encoding.rows, query[0], query[1], 0.06)
            for addresses in (in_place, decided.addresses)
        )
        assert torch.equal(resident, offloaded)
        assert_inverse(cache)
