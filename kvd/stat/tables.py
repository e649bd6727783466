"""What a running daemon holds, as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvd.units import format_bytes
from protocol.stats import LeaseStats, NodeStats, SessionStats, TierStats

WIDTH = 180
"""Columns of the tables where the output is not a terminal."""


def print_tables(stats: NodeStats, console: Console) -> None:
    """Everything, for people."""
    console.print(headline(stats), markup=False)
    console.print(_tiers(stats.tiers))
    if stats.leases:
        console.print(leases_table(stats.leases))
    if stats.sessions:
        console.print(sessions_table(stats.sessions))


def headline(stats: NodeStats) -> str:
    """The daemon itself, in one line."""
    state = "draining" if stats.draining else "serving"
    return (
        f"kvd {stats.daemon_version}, process {stats.pid}, {state} for {stats.uptime_s:,.0f} s, "
        f"epoch {stats.epoch}, ledger {stats.ledger}"
    )


def _tiers(tiers: Iterable[TierStats]) -> Table:
    table = _table(
        "tiers",
        ["tier", "purpose"],
        [
            "requested (logical)",
            "committed (real)",
            "capacity",
            "peak requested",
            "peak committed",
            "reserved",
            "quarantined",
        ],
    )
    for tier in tiers:
        sizes = (tier.requested, tier.committed, tier.capacity, tier.peak_requested, tier.peak_committed)
        table.add_row(tier.tier, "all", *map(format_bytes, (*sizes, tier.reserved, tier.quarantined)))
        for part in tier.purposes:
            peaks = format_bytes(part.peak_requested), format_bytes(part.peak_committed)
            table.add_row("", part.purpose, format_bytes(part.requested), format_bytes(part.committed), "", *peaks)
        table.add_section()
    return table


def leases_table(leases: Iterable[LeaseStats]) -> Table:
    """A row for each lease."""
    table = _table(
        "leases",
        ["lease", "client", "state"],
        ["pid", "uid", "gid", "age", "sessions", "requested (logical)", "committed (real)"],
    )
    for lease in leases:
        table.add_row(
            str(lease.lease),
            escape(lease.client),
            lease.state,
            str(lease.pid),
            str(lease.uid),
            str(lease.gid),
            f"{lease.age_s:,.0f} s",
            str(lease.sessions),
            format_bytes(lease.requested),
            format_bytes(lease.committed),
        )
    return table


def sessions_table(sessions: Iterable[SessionStats]) -> Table:
    """A row for each session."""
    table = _table(
        "sessions",
        ["session", "name", "state"],
        [
            "lease",
            "pages",
            "rows (logical)",
            "rows committed",
            "tokens",
            "requested (logical)",
            "committed (real)",
            "selections",
            "hits",
            "misses",
            "ring hits",
            "copybacks",
        ],
    )
    for session in sessions:
        counts = (session.pages, session.logical_rows, session.committed_rows, session.tokens)
        counters = (session.selections, session.hits, session.misses, session.ring_hits, session.copybacks)
        table.add_row(
            str(session.session),
            session.name,
            session.state,
            str(session.lease or "none"),
            *(f"{count:,}" for count in counts),
            format_bytes(session.requested),
            format_bytes(session.committed),
            *(f"{count:,}" for count in counters),
        )
    return table


def _table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    """An empty table: columns of words to the left, columns of numbers to the right."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for word in words:
        table.add_column(word, overflow="fold")
    for number in numbers:
        table.add_column(number, justify="right")
    return table
