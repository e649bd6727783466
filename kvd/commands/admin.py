"""``kvd admin``: what operators may do about tiers, and about leases and sessions of any uid."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path

from kvd.config import KEYS, RESIZABLE
from kvd.console import output_console
from kvd.control import Control
from kvd.stat.tables import WIDTH, leases_table, sessions_table, tiers_table
from kvd.units import format_bytes, parse_bytes
from protocol.command_line import Parser
from protocol.errors import InvalidValue
from protocol.messages import Done, EndSession, ReloadReport, ReloadReported, Resize, Resized, RevokeLease

_EPILOG = """Only root, the daemon's own user and members of the group socket.admin_group may do more than list.

examples:
  kvd admin leases list
  kvd admin leases revoke 17                  # what it holds is reused once its process is dead
  kvd admin sessions close chat-1 --uid 1001  # one that no lease holds
  kvd admin tiers resize host.capacity 768GiB # refused while what would go is in use; says who uses it
  kvd admin reload-report                     # what the latest `systemctl reload kvd` changed and refused
"""

RESIZE_TIMEOUT_S = 3600.0
"""How long the memory of a tier may take to be populated."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``admin``."""
    admin = commands.add_parser(
        "admin",
        help="revoke leases, end sessions, resize tiers",
        description="See to tiers, and to leases and sessions of any user.",
        epilog=_EPILOG,
    )
    default = KEYS["run_dir"].default
    admin.add_argument(
        "--run-dir", type=Path, default=Path(default), metavar="DIR", help=f"the daemon's run directory ({default})"
    )
    kinds = admin.add_subparsers(dest="kind", metavar="KIND", required=True, parser_class=Parser)
    tiers = kinds.add_parser("tiers", help="list tiers or give one another limit").add_subparsers(
        dest="action", metavar="ACTION", required=True, parser_class=Parser
    )
    tiers.add_parser("list", help="list tiers")
    resize = tiers.add_parser(
        "resize",
        help="grow or shrink a tier until the daemon is stopped",
        description="Grow or shrink a tier, in full or not at all, until the daemon is stopped or the setting changes.",
    )
    resize.add_argument("key", choices=RESIZABLE, metavar="KEY", help=f"its setting: {', '.join(RESIZABLE)}")
    resize.add_argument("size", type=_size, metavar="SIZE", help="the limit, such as 64GiB")
    kinds.add_parser("reload-report", help="what the latest reload changed and refused").set_defaults(action="show")
    for kind in ("leases", "sessions"):
        actions = kinds.add_parser(kind, help=f"list {kind} or end one").add_subparsers(
            dest="action", metavar="ACTION", required=True, parser_class=Parser
        )
        actions.add_parser("list", help=f"list {kind} of all users")
        if kind == "leases":
            revoke = actions.add_parser("revoke", help="end a lease's connection")
            revoke.add_argument("lease", type=int, metavar="LEASE", help="its number")
        else:
            close = actions.add_parser("close", help="end a session that no lease holds, for good")
            close.add_argument("name", metavar="NAME", help="the session's")
            close.add_argument("--uid", type=int, default=os.getuid(), help="whose it is (default: yours)")


def run(parsed: argparse.Namespace) -> int:
    """The command; raises what the daemon answers."""
    with Control(parsed.run_dir, "kvd admin") as control:
        _ACTIONS[parsed.kind, parsed.action](control, parsed)
    return 0


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except InvalidValue as error:
        raise argparse.ArgumentTypeError(error.message) from None


def _list_leases(control: Control, _: argparse.Namespace) -> None:
    output_console(WIDTH).print(leases_table(control.stats().leases))


def _list_sessions(control: Control, _: argparse.Namespace) -> None:
    output_console(WIDTH).print(sessions_table(control.stats().sessions))


def _list_tiers(control: Control, _: argparse.Namespace) -> None:
    output_console(WIDTH).print(tiers_table(control.stats().tiers))


def _resize(control: Control, parsed: argparse.Namespace) -> None:
    done = control.ask(lambda seq: Resize(seq, parsed.key, parsed.size), Resized, RESIZE_TIMEOUT_S)
    print(f"{done.key}: {format_bytes(done.before)} → {format_bytes(done.after)}")


def _show_reload(control: Control, _: argparse.Namespace) -> None:
    report = control.ask(ReloadReport, ReloadReported)
    if not report.time_s:
        print("the settings were read at the start only")
        return
    when = datetime.fromtimestamp(report.time_s).isoformat(sep=" ", timespec="seconds")
    if report.error:
        print(f"{when}: nothing changed: {report.error}")
        return
    print(f"{when}: {'nothing was different' if not report.changes else ''}".rstrip())
    for change in report.changes:
        outcome = f"refused: {change.refused}" if change.refused else "changed"
        print(f"  {change.key}: {change.before} → {change.after}, {outcome}")


def _revoke(control: Control, parsed: argparse.Namespace) -> None:
    control.ask(partial(RevokeLease, number=parsed.lease), Done)
    left = [lease for lease in control.stats().leases if lease.lease == parsed.lease]
    for lease in left:
        print(f"lease {lease.lease} is {lease.state}: end process {lease.pid} to have its {lease.committed} bytes back")
    if not left:
        print(f"lease {parsed.lease} held nothing and has ended")


def _close(control: Control, parsed: argparse.Namespace) -> None:
    control.ask(partial(EndSession, uid=parsed.uid, name=parsed.name), Done)


_ACTIONS: dict[tuple[str, str], Callable[[Control, argparse.Namespace], None]] = {
    ("leases", "list"): _list_leases,
    ("leases", "revoke"): _revoke,
    ("sessions", "list"): _list_sessions,
    ("sessions", "close"): _close,
    ("tiers", "list"): _list_tiers,
    ("tiers", "resize"): _resize,
    ("reload-report", "show"): _show_reload,
}
