"""A live view: tiers as bars, sessions, leases, and rates that are differences of the workers' counters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvd.stat.tables import gap_text, headline, stall_line
from kvd.units import format_bytes
from protocol.layout import ENCODINGS
from protocol.stats import NodeStats, SessionStats, TierStats

SHOWN_STALLS = 3
BAR = 40
"""Columns of a tier's bar."""


@dataclass(frozen=True)
class Rates:
    """One session's counters per second of the daemon's own clock.

    ``copied_back`` is exact, in bytes. ``fetched`` is the least that the misses can have been, in bytes: a miss brings
    the position's row of every layer of its index group, and how many those are only the worker knows. None for an
    encoding that is not known here.
    """

    hits: float
    misses: float
    ring_hits: float
    fetched: float | None
    copied_back: float


def rates(before: NodeStats | None, now: NodeStats) -> dict[int, Rates]:
    """By number, the rates of those sessions that are in both; none between two runs of the daemon."""
    if before is None or before.epoch != now.epoch or now.uptime_s <= before.uptime_s:
        return {}
    seconds = now.uptime_s - before.uptime_s
    earlier = {session.session: session for session in before.sessions}
    return {
        session.session: _rates(earlier[session.session], session, seconds)
        for session in now.sessions
        if session.session in earlier
    }


def _rates(before: SessionStats, now: SessionStats, seconds: float) -> Rates:
    def per_second(counter: str) -> float:
        """Never below 0: of a session that was found damaged meanwhile nothing is counted any more."""
        counted: int = getattr(now, counter) - getattr(before, counter)
        return max(0, counted) / seconds

    encoding = ENCODINGS.get(now.encoding)
    misses = per_second("misses")
    return Rates(
        hits=per_second("hits"),
        misses=misses,
        ring_hits=per_second("ring_hits"),
        fetched=None if encoding is None else misses * encoding.rows.row_bytes,
        copied_back=per_second("copybacks") * now.page_bytes,
    )


def watch(ask: Callable[[], NodeStats], interval_s: float, console: Console) -> None:
    """Show what ``ask`` answers every ``interval_s`` seconds, for ever: in place on a terminal, else block by block."""
    views = _views(ask, interval_s)
    if not console.is_terminal:
        for view in views:
            console.print(view)
            console.file.flush()
        return
    with Live(console=console, auto_refresh=False, screen=True, vertical_overflow="crop") as live:
        for view in views:
            live.update(view, refresh=True)


def _views(ask: Callable[[], NodeStats], interval_s: float) -> Iterator[RenderableType]:
    before: NodeStats | None = None
    due = time.monotonic()
    while True:
        now = ask()
        yield render(now, rates(before, now))
        before = now
        due = max(due + interval_s, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))


def render(stats: NodeStats, found: dict[int, Rates]) -> RenderableType:
    """One look: the daemon, its tiers, its leases, its sessions."""
    quarantined = sum(lease.state == "quarantined" for lease in stats.leases)
    leases = f"leases: {len(stats.leases)}, of which quarantined: {quarantined}"
    parts: list[RenderableType] = [Text(headline(stats)), *map(_tier, stats.tiers), Text(leases)]
    parts += [Text(stall_line(stall)) for stall in stats.stalls[-SHOWN_STALLS:]]
    if stats.sessions:
        parts.append(_sessions(stats, found))
    return Group(*parts)


def _tier(tier: TierStats) -> Text:
    """Its sizes, and below them its bar, which fits any terminal."""
    sizes = ", ".join(f"{name} {format_bytes(getattr(tier, name))}" for name in ("requested", "committed", "capacity"))
    waiting = f", quarantined {format_bytes(tier.quarantined)}" if tier.quarantined else ""
    return Text(f"{tier.tier}: {sizes}{waiting}\n{bar(tier)}")


def bar(tier: TierStats) -> str:
    """Requested ``█``, committed beyond that ``▒``, and the rest of the capacity ``·``."""
    columns = [min(BAR, round(BAR * nbytes / tier.capacity)) for nbytes in (tier.requested, tier.committed)]
    requested, committed = columns[0], max(columns)
    return "█" * requested + "▒" * (committed - requested) + "·" * (BAR - committed)


def _sessions(stats: NodeStats, found: dict[int, Rates]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for word in ("session", "state", "client"):
        table.add_column(word, overflow="fold")
    for number in (
        "pages",
        "tokens",
        "hits/s",
        "misses/s",
        "ring hits/s",
        "hit rate",
        "fetched/s ≥",
        "copied back/s",
        "gap",
    ):
        table.add_column(number, justify="right")
    leases = {lease.lease: lease for lease in stats.leases}
    for session in stats.sessions:
        lease = leases.get(session.lease)
        words = (session.name, session.state, escape(lease.client) if lease else "")
        numbers = (f"{session.pages:,}", f"{session.tokens:,}")
        table.add_row(*words, *numbers, *_cells(session, found), gap_text(lease) if lease else "")
    return table


def _cells(session: SessionStats, found: dict[int, Rates]) -> tuple[str, ...]:
    rate = found.get(session.session)
    if rate is None:
        return ("",) * 6
    looked_up = rate.hits + rate.misses
    return (
        f"{rate.hits:,.0f}",
        f"{rate.misses:,.0f}",
        f"{rate.ring_hits:,.0f}",
        f"{rate.hits / looked_up:.1%}" if looked_up else "",
        "unknown" if rate.fetched is None else format_bytes(round(rate.fetched)),
        format_bytes(round(rate.copied_back)),
    )
