"""What a running daemon holds, as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvd.units import format_bytes
from protocol.stats import NOT_PUBLISHED, BlockStats, LeaseStats, NodeStats, SessionStats, StallStats, TierStats

WIDTH = 180
"""Columns of the tables where the output is not a terminal."""


def print_tables(stats: NodeStats, console: Console) -> None:
    """Everything, for people."""
    console.print(headline(stats), markup=False)
    console.print(tiers_table(stats.tiers))
    if stats.leases:
        console.print(leases_table(stats.leases))
    if stats.sessions:
        console.print(sessions_table(stats.sessions))
    if stats.blocks:
        console.print(blocks_table(stats.blocks, stats.leases))
    for stall in stats.stalls:
        console.print(stall_line(stall), markup=False)


def headline(stats: NodeStats) -> str:
    """The daemon itself, in one line."""
    state = "draining" if stats.draining else "serving"
    return (
        f"kvd {stats.daemon_version}, process {stats.pid}, {state} for {stats.uptime_s:,.0f} s, "
        f"epoch {stats.epoch}, ledger {stats.ledger}"
    )


def gap_text(lease: LeaseStats) -> str:
    """Half of the gaps between its tokens, and 99 % of them, are at most so long."""
    return f"{1e3 * lease.gap_p50_s:,.0f} / {1e3 * lease.gap_p99_s:,.0f} ms" if lease.token_gaps else ""


def stall_line(stall: StallStats) -> str:
    """A stall, and what may have caused it."""
    when = datetime.fromtimestamp(stall.end).isoformat(sep=" ", timespec="milliseconds")
    suspects = ", ".join(stall.suspects) or "nothing that the kernel did to pages"
    return f"stall: {when}, lease {stall.lease}, {1e3 * stall.gap_s:,.0f} ms, suspect: {suspects}"


def tiers_table(tiers: Iterable[TierStats]) -> Table:
    """Rows for each tier: all of it, then by purpose."""
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
        [
            *("pid", "uid", "gid", "age", "sessions", "requested (logical)", "committed (real)"),
            *("torch reserved", "context", "gap p50 / p99", "stalls"),
        ],
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
            *(_told(nbytes) for nbytes in (lease.torch_reserved, lease.context)),
            gap_text(lease),
            f"{lease.stalls:,}" if lease.token_gaps else "",
        )
    return table


def _told(nbytes: int) -> str:
    return "unknown" if nbytes == NOT_PUBLISHED else format_bytes(nbytes)


def blocks_table(spaces: Iterable[BlockStats], leases: Iterable[LeaseStats]) -> Table:
    """A row for each space of blocks, then one for each lease that uses any."""
    table = _table(
        "blocks",
        ["space", "of"],
        [
            *("stored", "on disk", "pinned", "writing", "committed (real)"),
            *("looked up", "found", "loaded", "published", "evicted", "refused"),
        ],
    )
    for space in spaces:
        now = (space.stored, space.on_disk, space.pinned, space.writing)
        since = (space.looked_up, space.found, space.loaded, space.published, space.evicted, space.refused)
        whose = f"uid {space.uid}, {space.fingerprint[:8]}, {format_bytes(space.block_bytes)} each"
        counts = (f"{count:,}" for count in since)
        table.add_row(str(space.space), whose, *(f"{n:,}" for n in now), format_bytes(space.committed), *counts)
    table.add_section()
    for lease in leases:
        did = (lease.blocks_looked_up, lease.blocks_found, lease.blocks_loaded, lease.blocks_published)
        holds = (lease.blocks_pinned, lease.blocks_writing)
        if any((*did, *holds)):
            whose = f"lease {lease.lease}, {escape(lease.client)}"
            table.add_row("", whose, "", "", *(f"{n:,}" for n in holds), "", *(f"{n:,}" for n in did), "", "")
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
