"""``kvd-stat``: what a running daemon holds, once, as tables or as JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvd import __version__
from kvd.arguments import Parser
from kvd.config import KEYS
from kvd.control import ask_stats
from kvd.units import format_bytes
from protocol.errors import KvdError
from protocol.stats import LeaseStats, NodeStats, SessionStats, TierStats

_EPILOG = """requested (logical) is what was asked for, committed (real) what the system or the driver gave for it,
capacity the limit. docs/operate.md explains every field. Exit status: 69 if no daemon answers.

examples:
  kvd-stat
  kvd-stat --run-dir /tmp/kvd --json | jq '.tiers[] | {tier, committed, capacity}'
"""
WIDTH = 180
"""Columns of the tables where the output is not a terminal."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command ``kvd-stat``; returns its exit status."""
    default = KEYS["run_dir"].default
    parser = Parser(prog="kvd-stat", description="Show what a running daemon holds.", epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"kvd-stat {__version__}")
    parser.add_argument(
        "--run-dir", type=Path, default=Path(default), metavar="DIR", help=f"the daemon's run directory ({default})"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, whose schema has a version")
    parsed = parser.parse_args(arguments)
    try:
        stats = ask_stats(parsed.run_dir)
    except KvdError as error:
        print(f"kvd-stat: {error.message}", file=sys.stderr)
        return error.exit_status
    if parsed.json:
        print(msgspec.json.encode(stats).decode())
    else:
        print_tables(stats, Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False))
    return 0


def print_tables(stats: NodeStats, console: Console) -> None:
    """Everything, for people."""
    state = "draining" if stats.draining else "serving"
    console.print(
        f"kvd {stats.daemon_version}, process {stats.pid}, {state} for {stats.uptime_s:,.0f} s, "
        f"epoch {stats.epoch}, ledger {stats.ledger}",
        markup=False,
    )
    console.print(_tiers(stats.tiers))
    if stats.leases:
        console.print(_leases(stats.leases))
    if stats.sessions:
        console.print(_sessions(stats.sessions))


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


def _leases(leases: Iterable[LeaseStats]) -> Table:
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


def _sessions(sessions: Iterable[SessionStats]) -> Table:
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
