"""``kvd admin``: what operators may do about leases and sessions of any uid."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console

from kvd.arguments import Parser
from kvd.config import KEYS
from kvd.control import Control
from kvd.stat.tables import WIDTH, leases_table, sessions_table
from protocol.messages import Done, EndSession, RevokeLease

_EPILOG = """Only root, the daemon's own user and members of the group socket.admin_group may revoke and close.

examples:
  kvd admin leases list
  kvd admin leases revoke 17                  # what it holds is reused once its process is dead
  kvd admin sessions close chat-1 --uid 1001  # one that no lease holds
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``admin``."""
    admin = commands.add_parser(
        "admin",
        help="revoke leases and end sessions of any user",
        description="See to leases and sessions of any user.",
        epilog=_EPILOG,
    )
    default = KEYS["run_dir"].default
    admin.add_argument(
        "--run-dir", type=Path, default=Path(default), metavar="DIR", help=f"the daemon's run directory ({default})"
    )
    kinds = admin.add_subparsers(dest="kind", metavar="KIND", required=True, parser_class=Parser)
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


def _list_leases(control: Control, _: argparse.Namespace) -> None:
    _console().print(leases_table(control.stats().leases))


def _list_sessions(control: Control, _: argparse.Namespace) -> None:
    _console().print(sessions_table(control.stats().sessions))


def _revoke(control: Control, parsed: argparse.Namespace) -> None:
    control.ask(partial(RevokeLease, number=parsed.lease), Done)
    left = [lease for lease in control.stats().leases if lease.lease == parsed.lease]
    for lease in left:
        print(f"lease {lease.lease} is {lease.state}: end process {lease.pid} to have its {lease.committed} bytes back")
    if not left:
        print(f"lease {parsed.lease} held nothing and has ended")


def _close(control: Control, parsed: argparse.Namespace) -> None:
    control.ask(partial(EndSession, uid=parsed.uid, name=parsed.name), Done)


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=WIDTH, highlight=False)


_ACTIONS: dict[tuple[str, str], Callable[[Control, argparse.Namespace], None]] = {
    ("leases", "list"): _list_leases,
    ("leases", "revoke"): _revoke,
    ("sessions", "list"): _list_sessions,
    ("sessions", "close"): _close,
}
