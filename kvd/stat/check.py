"""Whether a daemon is well, by thresholds: a line and an exit status as monitoring plugins have them."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from kvd.units import format_bytes
from protocol.stats import NodeStats, TierStats

HOST = "host"
RETURNABLE = ("unassigned", "cached")
"""Purposes of committed memory that a request for more can have at once."""


class Verdict(enum.IntEnum):
    """The exit status."""

    OK = 0
    WARNING = 1
    CRITICAL = 2
    UNKNOWN = 3


@dataclass(frozen=True)
class Thresholds:
    """From which value on there is a warning, and from which it is critical: percent of a tier, quarantined bytes."""

    warn_host: float
    crit_host: float
    warn_vram: float
    crit_vram: float
    warn_quarantine: int
    crit_quarantine: int


@dataclass(frozen=True)
class _Measure:
    """One thing that was looked at: in words, as performance data, and what is to be thought of it."""

    text: str
    data: str
    verdict: Verdict


def check(stats: NodeStats, thresholds: Thresholds) -> tuple[Verdict, str]:
    """The verdict, and the line that says it: ``KVD OK - …| performance data``."""
    measures = list(_measures(stats, thresholds))
    worst = max((measure.verdict for measure in measures), default=Verdict.OK)
    text = ", ".join(measure.text for measure in measures)
    data = " ".join(measure.data for measure in measures if measure.data)
    return worst, f"KVD {worst.name} - {text} | {data}"


def unknown(reason: str) -> tuple[Verdict, str]:
    """The same where no daemon says anything."""
    return Verdict.UNKNOWN, f"KVD {Verdict.UNKNOWN.name} - {_one_line(reason)}"


def _measures(stats: NodeStats, limits: Thresholds) -> Iterator[_Measure]:
    for tier in stats.tiers:
        warn, crit = (limits.warn_host, limits.crit_host) if tier.tier == HOST else (limits.warn_vram, limits.crit_vram)
        full = fullness(tier, _evictable(stats) if tier.tier == HOST else 0)
        data = f"'{tier.tier}'={full:.2f}%;{warn:g};{crit:g};0;100"
        yield _Measure(f"{tier.tier} {full:.1f}% full", data, _judge(full, warn, crit))
    waiting = sum(tier.quarantined for tier in stats.tiers)
    yield _Measure(
        f"quarantined {format_bytes(waiting)}",
        f"quarantined={waiting}B;{limits.warn_quarantine};{limits.crit_quarantine};0",
        _judge(waiting, limits.warn_quarantine, limits.crit_quarantine),
    )
    damaged = sum(session.state == "damaged" for session in stats.sessions)
    yield _Measure(f"damaged sessions {damaged}", f"damaged={damaged};1;;0", _judge(damaged, 1, float("inf")))
    verdict = Verdict.OK if stats.ledger == "balanced" else Verdict.CRITICAL
    yield _Measure(f"ledger {_one_line(stats.ledger)}", "", verdict)
    yield _Measure(f"sessions {len(stats.sessions)}", f"sessions={len(stats.sessions)};;;0", Verdict.OK)
    yield _Measure(f"leases {len(stats.leases)}", f"leases={len(stats.leases)};;;0", Verdict.OK)


def _evictable(stats: NodeStats) -> int:
    """Bytes of blocks that go when anybody else needs their room."""
    return sum(
        space.committed * (space.stored - space.pinned) // max(1, space.stored + space.writing)
        for space in stats.blocks
    )


def fullness(tier: TierStats, evictable: int = 0) -> float:
    """Percent of the tier that nobody else can have; of pages, ``evictable`` bytes are anybody's.

    Of host RAM there are two parts, and no part can take from the other: pages, all of it committed from the start, and
    the state of sessions and blocks. The fuller one counts.
    """
    committed = {part.purpose: part.committed for part in tier.purposes}
    if tier.tier != HOST:
        return 100 * (tier.committed - sum(committed.get(purpose, 0) for purpose in RETURNABLE)) / tier.capacity
    state = committed.get("session_state", 0) + committed.get("block_table", 0)
    pool = tier.committed - state
    pages = pool - committed.get("unassigned", 0) - evictable
    return 100 * max(pages / pool if pool else 0.0, state / max(1, tier.capacity - pool))


def _judge(value: float, warn: float, crit: float) -> Verdict:
    if value >= crit:
        return Verdict.CRITICAL
    return Verdict.WARNING if value >= warn else Verdict.OK


def _one_line(text: str) -> str:
    """A bar begins the performance data, so that none may be in the text."""
    return " ".join(text.replace("|", "/").split())
