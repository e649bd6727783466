"""The commands ``kvd save``, ``restore``, ``ls``, ``rm`` and ``drain``, which ask a running daemon, and ``verify``."""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from pathlib import Path
from stat import S_ISREG

from kvd.config import KEYS
from kvd.control import Control, ask_stats
from kvd.saved.file import SavedFile
from kvd.units import format_bytes
from protocol.errors import DaemonUnavailable, OsFailure, SavedRefused
from protocol.messages import Done, Drain, ListSaved, RemoveSaved, RestoreSession, Saved, SavedSessions, SaveSession

TIMEOUT_S = 3600.0
"""How long a session may take to be saved or restored before the command gives up."""


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands to those of ``kvd``."""
    save = _add(commands, "save", "write stored sessions of your uid to disk")
    save.add_argument("names", nargs="*", metavar="NAME", help="a session that no worker holds")
    save.add_argument("--all", action="store_true", help="all that are stored")
    for name, summary in (
        ("restore", "make stored sessions of saved ones"),
        ("rm", "remove saved sessions from disk"),
    ):
        command = _add(commands, name, summary)
        command.add_argument("names", nargs="+", metavar="NAME", help="a saved session")
        if name == "restore":
            command.add_argument("--lazy", action="store_true", help="have it at once; its pages come from disk later")
    _add(commands, "ls", "list the saved sessions of your uid, least recently used first")
    drain = _add(commands, "drain", "have the daemon stop when its leases have ended, and wait for that")
    drain.add_argument("--save", action="store_true", help="write every session to disk before; the next run has them")
    verify = commands.add_parser("verify", help="check a saved session's file", description="Check every byte of it.")
    verify.add_argument("file", type=Path, metavar="FILE")


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, summary: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    default = KEYS["run_dir"].default
    parser.add_argument(
        "--run-dir", type=Path, default=Path(default), metavar="DIR", help=f"the daemon's run directory ({default})"
    )
    return parser


def _save(parsed: argparse.Namespace) -> int:
    with Control(parsed.run_dir, "kvd save", TIMEOUT_S) as control:
        names = list(parsed.names)
        if parsed.all:
            stored = [session for session in control.stats().sessions if session.state == "stored"]
            names += [session.name for session in stored if session.uid == os.getuid()]
        for name in names:
            _report("saved", control.ask(partial(SaveSession, name=name), Saved))
    return 0


def _restore(parsed: argparse.Namespace) -> int:
    with Control(parsed.run_dir, "kvd restore", TIMEOUT_S) as control:
        for name in parsed.names:
            request = partial(RestoreSession, name=name, fingerprint=b"", encoding="", lazy=parsed.lazy)
            _report("restored", control.ask(request, Saved), still_to_come=parsed.lazy)
    return 0


def _list(parsed: argparse.Namespace) -> int:
    with Control(parsed.run_dir, "kvd ls") as control:
        for saved in control.ask(ListSaved, SavedSessions).sessions:
            used = datetime.fromtimestamp(saved.used_s).astimezone().isoformat(timespec="seconds")
            print(f"{saved.nbytes:>16,} {used} {saved.name}{' (spilled)' if saved.spilled else ''}")
    return 0


def _remove(parsed: argparse.Namespace) -> int:
    with Control(parsed.run_dir, "kvd rm") as control:
        for name in parsed.names:
            control.ask(partial(RemoveSaved, name=name), Done)
    return 0


def _drain(parsed: argparse.Namespace) -> int:
    with Control(parsed.run_dir, "kvd drain") as control:
        control.ask(partial(Drain, save=parsed.save), Done)
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            failure = ask_stats(parsed.run_dir).drain_failure
        except DaemonUnavailable:
            return 0
        if failure:
            raise OsFailure(f"the daemon in {parsed.run_dir} goes on, and nothing is lost: {failure}")
        time.sleep(0.1)
    raise OsFailure(f"the daemon in {parsed.run_dir} still runs after {TIMEOUT_S:g} s; its log says why")


def _verify(parsed: argparse.Namespace) -> int:
    path: Path = parsed.file
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise OsFailure(f"{path}: {error.strerror}", path=str(path)) from None
    try:
        if not S_ISREG(os.fstat(fd).st_mode):
            raise SavedRefused(str(path), "it is not a regular file")
        saved = SavedFile(fd, str(path))
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            saved.read_pages(None, pool, threading.Event(), lambda _done, _total: None)
    except OSError as error:
        raise OsFailure(f"{path}: {error.strerror}", path=str(path)) from None
    finally:
        os.close(fd)
    header = saved.header
    print(f"{path}: whole: session {header.name} of uid {header.uid}, {header.rows} rows, {header.tokens} tokens")
    print(f"  {format_bytes(header.size)}, encoding {header.encoding}, model {header.fingerprint.hex()}")
    return 0


def _report(done: str, saved: Saved, *, still_to_come: bool = False) -> None:
    rate = saved.nbytes / max(saved.seconds, 1e-9) / 1e6
    print(
        f"{done} {saved.name}: {saved.rows} rows, {saved.tokens} tokens, {format_bytes(saved.nbytes)} "
        + ("whose pages come from now on" if still_to_come else f"in {saved.seconds:.2f} s, {rate:,.0f} MB/s")
    )


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "save": _save,
    "restore": _restore,
    "ls": _list,
    "rm": _remove,
    "drain": _drain,
    "verify": _verify,
}
