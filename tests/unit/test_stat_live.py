"""Rates, bars and verdicts of ``kvd-stat``, from statistics that are written down here."""

from __future__ import annotations

import msgspec
import pytest

from kvd.stat.check import Thresholds, Verdict, check, fullness
from kvd.stat.live import BAR, bar, rates
from protocol.stats import STATS_SCHEMA, NodeStats, PurposeStats, SessionStats, TierStats

LIMITS = Thresholds(90, 97, 90, 97, 1 << 30, 2 << 30)


def session(number: int, **changes: object) -> SessionStats:
    counters = dict.fromkeys(("selections", "hits", "misses", "ring_hits", "copybacks"), 0)
    fixed = {"name": f"s{number}", "uid": 0, "lease": 1, "state": "held", "generation": 1, "encoding": "q8g64"}
    sizes = dict.fromkeys(("pages", "logical_rows", "committed_rows", "tokens", "requested", "committed"), 0)
    fields = {"session": number, **fixed, **sizes, **counters, "page_bytes": 5000, **changes}
    return msgspec.convert(fields, SessionStats)


def tier(name: str, capacity: int, **committed: int) -> TierStats:
    total = sum(committed.values())
    purposes = [PurposeStats(purpose, 0, nbytes, 0, nbytes) for purpose, nbytes in committed.items()]
    return TierStats(name, 0, total, capacity, 0, total, 0, 0, purposes)


def node(uptime_s: float, *sessions: SessionStats, epoch: int = 1, ledger: str = "balanced") -> NodeStats:
    return NodeStats(STATS_SCHEMA, "0", epoch, 1, uptime_s, False, ledger, [], [], list(sessions))


def test_rates_are_differences_over_the_daemons_clock() -> None:
    before = node(10.0, session(1, hits=100, misses=7, ring_hits=1, copybacks=2))
    now = node(12.5, session(1, hits=350, misses=32, ring_hits=6, copybacks=4), session(2, hits=9))
    [(number, found)] = rates(before, now).items()
    assert number == 1
    assert (found.hits, found.misses, found.ring_hits) == (100.0, 10.0, 2.0)
    assert found.copied_back == 2 * 5000 / 2.5
    assert found.fetched == 10 * 656  # a row of q8g64: 512 values, 16 B of scales, 128 B of RoPE


def test_no_rates_of_two_runs_nor_of_one_look() -> None:
    assert rates(None, node(1.0, session(1))) == {}
    assert rates(node(9.0, session(1), epoch=1), node(10.0, session(1), epoch=2)) == {}
    assert rates(node(9.0, session(1)), node(9.0, session(1))) == {}


def test_a_session_that_was_damaged_meanwhile_has_no_negative_rates() -> None:
    [found] = rates(node(1.0, session(1, hits=50)), node(2.0, session(1, state="damaged"))).values()
    assert found.hits == 0


def test_fetched_bytes_of_an_unknown_encoding_are_unknown() -> None:
    [found] = rates(node(1.0, session(1, encoding="other")), node(2.0, session(1, encoding="other", misses=5))).values()
    assert (found.misses, found.fetched) == (5.0, None)


@pytest.mark.parametrize(
    ("requested", "committed", "drawn"),
    [(0, 0, (0, 0)), (50, 100, (20, 20)), (100, 100, (40, 0)), (25, 50, (10, 10)), (100, 150, (40, 0))],
)
def test_bars(requested: int, committed: int, drawn: tuple[int, int]) -> None:
    shown = bar(TierStats("host", requested, committed, 100, 0, 0, 0, 0, []))
    assert len(shown) == BAR
    assert (shown.count("█"), shown.count("▒")) == drawn


def test_what_can_be_had_at_once_does_not_fill_a_tier() -> None:
    assert fullness(tier("vram:cpu", 100, ring=30, cached=50)) == 30
    assert fullness(tier("host", 120, pages=50, shared_pages=10, unassigned=40, session_state=5)) == 60
    assert fullness(tier("host", 120, pages=1, unassigned=99, session_state=18)) == 90, "state has a part of its own"


@pytest.mark.parametrize(
    ("stats", "verdict"),
    [
        (node(1.0), Verdict.OK),
        (node(1.0, session(1, state="damaged")), Verdict.WARNING),
        (node(1.0, ledger="host: 5 | 6"), Verdict.CRITICAL),
        (msgspec.structs.replace(node(1.0), tiers=[tier("host", 100, pages=90, unassigned=10)]), Verdict.WARNING),
        (msgspec.structs.replace(node(1.0), tiers=[tier("vram:cpu", 100, ring=97)]), Verdict.CRITICAL),
    ],
)
def test_verdicts(stats: NodeStats, verdict: Verdict) -> None:
    found, line = check(stats, LIMITS)
    assert found == verdict
    assert line.startswith(f"KVD {verdict.name} - ")
    assert line.count("|") == 1, "what comes after the bar is performance data"
