"""The ledger's sums, limits, peaks and complaints."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.alloc.ledger import Account, Balance, Ledger
from protocol.errors import InvalidValue, LedgerMismatch, OutOfCapacity

HOST = "host"
PAGES = Account(HOST, 0, 7, "pages")
RING = Account(HOST, 3, 7, "ring")


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger()
    ledger.add_tier(HOST, 1000)
    return ledger


def hold(ledger: Ledger, account: Account, requested: int, committed: int) -> None:
    ledger.reserve(account, requested, committed).commit(committed)


def test_three_numbers_and_their_peaks(ledger: Ledger) -> None:
    hold(ledger, PAGES, 90, 100)
    hold(ledger, RING, 250, 300)
    ledger.release(RING, 250, 300)
    assert ledger.total(HOST) == Balance(90, 100, 0, peak_requested=340, peak_committed=400)
    assert ledger.capacity(HOST) == 1000
    assert ledger.free(HOST) == 900
    assert ledger.purposes(HOST)["ring"] == Balance(0, 0, 0, peak_requested=250, peak_committed=300)
    assert [entry.account for entry in ledger.entries()] == [PAGES]
    ledger.check()


def test_a_reservation_counts_until_it_is_settled(ledger: Ledger) -> None:
    reservation = ledger.reserve(PAGES, 400, 600)
    assert ledger.free(HOST) == 400
    assert ledger.total(HOST).committed == 0
    with pytest.raises(OutOfCapacity):
        ledger.reserve(RING, 401, 401)
    ledger.check()
    reservation.commit(500)
    assert ledger.free(HOST) == 500
    assert ledger.total(HOST) == Balance(400, 500, 0, 400, 500)
    with pytest.raises(LedgerMismatch, match="settled already"):
        reservation.roll_back()
    assert ledger.free(HOST) == 500


def test_a_reservation_rolls_back_when_its_block_is_left_without_a_commit(ledger: Ledger) -> None:
    with pytest.raises(ZeroDivisionError), ledger.reserve(PAGES, 400, 600):
        raise ZeroDivisionError
    with ledger.reserve(PAGES, 1, 1):
        pass
    assert ledger.free(HOST) == 1000
    assert list(ledger.entries()) == []
    assert ledger.total(HOST).peak_committed == 0


@pytest.mark.parametrize("committed", [399, 601])
def test_a_commit_outside_what_was_reserved_is_refused(ledger: Ledger, committed: int) -> None:
    refusal = f"committed {committed} is not between requested 400 and reserved 600"
    with pytest.raises(LedgerMismatch, match=refusal), ledger.reserve(PAGES, 400, 600) as reservation:
        reservation.commit(committed)
    assert ledger.free(HOST) == 1000


def test_out_of_capacity_names_asked_free_capacity_and_the_largest_holders(ledger: Ledger) -> None:
    for session in range(1, 9):
        hold(ledger, Account(HOST, 2, session, "pages"), session * 10, session * 10)
    hold(ledger, Account(HOST, 0, 0, "unassigned"), 0, 500)
    with pytest.raises(OutOfCapacity) as caught:
        ledger.reserve(RING, 150, 200)
    facts = caught.value.facts
    assert (facts["tier"], facts["asked"], facts["free"], facts["capacity"]) == (HOST, 200, 140, 1000)
    assert facts["holders"] == [f"lease 2 session {session} pages: {session * 10} bytes" for session in (8, 7, 6, 5, 4)]
    ledger.check()


def test_more_than_is_held_cannot_be_released(ledger: Ledger) -> None:
    hold(ledger, PAGES, 90, 100)
    with pytest.raises(LedgerMismatch, match=r"session 7 pages: requested 90 -90, committed 100 -101"):
        ledger.release(PAGES, 90, 101)
    with pytest.raises(LedgerMismatch):
        ledger.release(RING, 0, 1)
    with pytest.raises(LedgerMismatch):  # would leave 40 bytes requested on 0 committed
        ledger.release(PAGES, 50, 100)
    assert ledger.total(HOST) == Balance(90, 100, 0, 90, 100)
    assert len(list(ledger.entries())) == 1
    ledger.check()


def test_a_transfer_changes_no_total_and_no_peak_of_the_tier(ledger: Ledger) -> None:
    unassigned = Account(HOST, 0, 0, "unassigned")
    hold(ledger, unassigned, 0, 1000)
    ledger.transfer(unassigned, PAGES, 350, 400, requested_before=0)
    ledger.transfer(PAGES, RING, 175, 200)
    assert ledger.total(HOST) == Balance(350, 1000, 0, 350, 1000)
    assert {entry.account: entry.balance.committed for entry in ledger.entries()} == {
        unassigned: 600,
        PAGES: 200,
        RING: 200,
    }
    with pytest.raises(LedgerMismatch):
        ledger.transfer(PAGES, RING, 175, 201)
    ledger.check()


def test_a_transfer_stays_within_its_tier(ledger: Ledger) -> None:
    ledger.add_tier("vram:cpu", 1000)
    hold(ledger, PAGES, 10, 10)
    with pytest.raises(InvalidValue, match="tier of a transfer's target"):
        ledger.transfer(PAGES, Account("vram:cpu", 0, 7, "pages"), 10, 10)
    ledger.check()


def test_a_quarantined_lease_stays_marked_until_it_holds_nothing(ledger: Ledger) -> None:
    hold(ledger, RING, 100, 100)
    hold(ledger, PAGES, 50, 50)
    tables = Account(HOST, 3, 0, "tables")
    pending = ledger.reserve(tables, 10, 10)
    assert ledger.quarantine(3) == 100
    pending.commit(10)
    marked = {entry.account for entry in ledger.entries() if entry.quarantined}
    assert marked == {RING, tables}
    kept = Account(HOST, 3, 0, "cached")
    ledger.transfer(RING, kept, 0, 100, requested_before=100)
    ledger.release(tables, 10, 10)
    assert {entry.account for entry in ledger.entries() if entry.quarantined} == {kept}
    ledger.check()
    ledger.release(kept, 0, 100)
    hold(ledger, RING, 1, 1)
    assert not any(entry.quarantined for entry in ledger.entries())
    ledger.check()


def test_quarantining_a_lease_that_holds_nothing_marks_nothing(ledger: Ledger) -> None:
    assert ledger.quarantine(9) == 0
    hold(ledger, Account(HOST, 9, 0, "ring"), 1, 1)
    assert not any(entry.quarantined for entry in ledger.entries())
    with pytest.raises(InvalidValue):
        ledger.quarantine(0)


def test_auditors_are_compared_with_what_is_committed(ledger: Ledger) -> None:
    found = {"extents": 60, "blocks": 40}
    ledger.add_auditor(HOST, lambda: found["extents"])
    ledger.add_auditor(HOST, lambda: found["blocks"])
    hold(ledger, PAGES, 90, 100)
    ledger.check()
    found["blocks"] = 39
    with pytest.raises(LedgerMismatch, match=r"host: 60 \+ 39 really taken != committed 100"):
        ledger.check()


@pytest.mark.parametrize(
    ("part", "number", "value", "arithmetic"),
    [
        ("total", "committed", 101, "committed of all accounts 100 != committed of the tier 101"),
        ("account", "requested", -1, "negative: requested -1"),
        ("account", "requested", 101, "requested 101 > committed 100"),
        ("account", "peak_committed", 99, "peaks 90, 99 are below"),
        ("purpose", "reserved", 5, "reserved of all purposes 5 != reserved of the tier 0"),
        ("tier", "capacity", 99, r"committed 100 \+ reserved 0 > capacity 99"),
    ],
)
def test_check_finds_damaged_books_and_says_the_arithmetic(
    ledger: Ledger, part: str, number: str, value: int, arithmetic: str
) -> None:
    hold(ledger, PAGES, 90, 100)
    ledger.check()
    tier = ledger._tiers[HOST]
    parts = {"tier": tier, "total": tier.total, "account": tier.accounts[PAGES], "purpose": tier.purposes["pages"]}
    setattr(parts[part], number, value)
    with pytest.raises(LedgerMismatch, match=arithmetic):
        ledger.check()


def test_check_finds_leases_that_are_counted_wrongly(ledger: Ledger) -> None:
    ledger._quarantined.add(4)
    with pytest.raises(LedgerMismatch, match=r"leases \[4\] are quarantined but hold nothing"):
        ledger.check()
    ledger._lease_accounts[4] = 1
    with pytest.raises(LedgerMismatch, match="accounts by lease"):
        ledger.check()


def test_tiers_are_added_once_resized_above_what_is_taken_and_removed_empty(ledger: Ledger) -> None:
    with pytest.raises(InvalidValue, match="new tier is 'host'"):
        ledger.add_tier(HOST, 5)
    hold(ledger, PAGES, 100, 100)
    with ledger.reserve(RING, 0, 50):
        with pytest.raises(InvalidValue, match="150"):
            ledger.resize_tier(HOST, 149)
        ledger.resize_tier(HOST, 150)
        assert ledger.free(HOST) == 0
    with pytest.raises(LedgerMismatch, match="host is removed but held by kvd session 7 pages"):
        ledger.remove_tier(HOST)
    ledger.release(PAGES, 100, 100)
    ledger.remove_tier(HOST)
    assert ledger.tiers() == []
    with pytest.raises(InvalidValue, match="tier is 'host'; allowed: one of none"):
        ledger.reserve(PAGES, 1, 1)


@pytest.mark.parametrize("size", [-1, 2**60 + 1, 1.5, True, "5"])
def test_sizes_that_are_none_are_refused(ledger: Ledger, size: object) -> None:
    for call in (
        lambda: ledger.reserve(PAGES, size, 2**60),  # type: ignore[arg-type]
        lambda: ledger.reserve(PAGES, 0, size),  # type: ignore[arg-type]
        lambda: ledger.release(PAGES, 0, size),  # type: ignore[arg-type]
        lambda: ledger.transfer(PAGES, RING, 0, size),  # type: ignore[arg-type]
        lambda: ledger.add_tier("other", size),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidValue):
            call()
    with pytest.raises(InvalidValue, match="bound of committed bytes is 9"):
        ledger.reserve(PAGES, 10, 9)
    ledger.check()
    assert list(ledger.entries()) == []


accounts = st.builds(Account, st.just(HOST), st.integers(0, 2), st.integers(0, 2), st.sampled_from(["pages", "ring"]))


@given(st.lists(st.tuples(accounts, accounts, st.integers(0, 90), st.integers(0, 30), st.integers(0, 3)), max_size=60))
def test_any_sequence_agrees_with_plain_sums(steps: list[tuple[Account, Account, int, int, int]]) -> None:
    """Against a model that is two dictionaries: items are (requested, committed) and move whole."""
    ledger = Ledger()
    ledger.add_tier(HOST, 400)
    items: defaultdict[Account, list[tuple[int, int]]] = defaultdict(list)
    peak = 0
    for account, other, requested, waste, action in steps:
        taken = sum(committed for held in items.values() for _, committed in held)
        if action == 0 or not items[account]:
            committed = requested + waste
            if committed > 400 - taken:
                with pytest.raises(OutOfCapacity):
                    ledger.reserve(account, requested, committed)
                continue
            hold(ledger, account, requested, committed)
            items[account].append((requested, committed))
        elif action == 1:
            ledger.release(account, *items[account].pop())
        elif action == 2:
            item = items[account].pop()
            ledger.transfer(account, other, *item)
            items[other].append(item)
        else:
            with ledger.reserve(account, 0, 400 - taken):
                assert ledger.free(HOST) == 0
        ledger.check()
        peak = max(peak, sum(committed for held in items.values() for _, committed in held))
        sums = {
            account: (sum(each[0] for each in held), sum(each[1] for each in held))
            for account, held in items.items()
            if any(sum(each) for each in held)
        }
        entries = {entry.account: entry.balance for entry in ledger.entries()}
        assert {account: (balance.requested, balance.committed) for account, balance in entries.items()} == sums
        assert ledger.total(HOST).committed == sum(committed for _, committed in sums.values())
    assert ledger.total(HOST).peak_committed == peak
