"""``kvd support-bundle``: what somebody who is to help needs to see, in one archive, and nothing secret."""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import msgspec

from kvd import __version__
from kvd.config import KEYS, Config
from kvd.control import ask_stats
from kvd.doctor.cli import examine, running_stats
from kvd.doctor.host import Host, Roots
from kvd.stat.explain import explain
from protocol.errors import KvdError, OsFailure

LOG_BYTES = 1 << 20
"""Of a log, no more than its last bytes."""

_EPILOG = """Settings with where each came from, the statistics of the daemon if one runs, where memory is, what the
doctor finds, and the end of a log. No token, no page of a session and no environment is in it. Names of sessions,
numbers of users and paths are: look before you pass it on.

examples:
  kvd support-bundle kvd.tar.gz --log /var/log/kvd.log
  journalctl -u kvd -n 1000 -o cat | kvd support-bundle kvd.tar.gz --log -
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the command ``support-bundle``."""
    parser = commands.add_parser(
        "support-bundle",
        help="put what help needs to see into an archive",
        description="Put what help needs to see into an archive.",
        epilog=_EPILOG,
    )
    parser.add_argument("file", type=Path, metavar="FILE.tar.gz", help="the archive, which must not be there yet")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="the daemon's settings, instead of those in /etc/kvd"
    )
    parser.add_argument("--log", metavar="FILE", help="a log of the daemon; - for standard input")
    return parser


def run(parsed: argparse.Namespace, config: Config) -> int:
    """The command. Raises `OsFailure` if the archive cannot be made; what cannot be had says so in its place."""
    try:
        fd = os.open(parsed.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            for name, content in _members(config, parsed.log):
                member = tarfile.TarInfo(f"kvd-support/{name}")
                member.size, member.mtime, member.mode = len(content), int(time.time()), 0o600
                archive.addfile(member, io.BytesIO(content))
                print(f"{len(content):>10,} {name}")
    except OSError as error:
        raise OsFailure(f"{parsed.file}: {error.strerror}", path=str(parsed.file)) from error
    return 0


def _members(config: Config, log: str | None) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file, in order."""
    run_dir = Path(config.run_dir)
    state_dir = Path(config.disk.state_dir) if config.disk.state_dir else None
    yield "versions.json", _json({"kvd": __version__, "python": sys.version, "system": list(platform.uname())})
    yield "settings.json", _json(settings_document(config))
    yield "stats.json", _attempt(lambda: msgspec.json.encode(ask_stats(run_dir)))
    yield "explain.json", _attempt(lambda: msgspec.json.encode(explain(ask_stats(run_dir), run_dir, state_dir)))
    findings = examine(Host(config, running_stats(config), Roots()))
    yield "doctor.json", _json([asdict(finding) for finding in findings])
    if log is not None:
        yield "log.txt", _attempt(lambda: _end_of(log))


def settings_document(config: Config) -> dict[str, dict[str, object]]:
    """Every setting: its value and where that came from."""
    return {dotted: {"value": key.value_in(config), "origin": config.origins[dotted]} for dotted, key in KEYS.items()}


def _attempt(get: Callable[[], bytes]) -> bytes:
    try:
        return get()
    except (KvdError, OSError) as error:
        return _json({"not there": str(error)})


def _end_of(log: str) -> bytes:
    """The last whole lines of a file or of standard input."""
    if log == "-":
        end = sys.stdin.buffer.read()[-LOG_BYTES - 1 :]
    else:
        with open(log, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES - 1))
            end = file.read()
    return end if len(end) <= LOG_BYTES else end.partition(b"\n")[2]


def _json(document: object) -> bytes:
    return json.dumps(document, indent=2).encode() + b"\n"
