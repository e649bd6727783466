"""``kvd-stat``: what a running daemon holds, once or live, whether it is well, and where memory is."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from kvd import __version__, config
from kvd.config import KEYS
from kvd.console import output_console
from kvd.control import Control, ask_stats
from kvd.stat.check import Thresholds, check, unknown
from kvd.stat.explain import explain
from kvd.stat.explain_text import explanation_lines
from kvd.stat.live import watch
from kvd.stat.tables import WIDTH, print_tables
from kvd.units import parse_bytes
from protocol.command_line import Parser, run_command
from protocol.errors import InvalidValue, KvdError

_EPILOG = """requested (logical) is what was asked for, committed (real) what the system or the driver gave for it,
capacity the limit. docs/operate.md explains every field. Exit status: 69 if no daemon answers; of --check: 0 all is
well, 1 warning, 2 critical, 3 no daemon answers.

examples:
  kvd-stat
  kvd-stat 1                                  # live, every second
  kvd-stat explain                            # every byte of VRAM and host RAM, measured
  kvd-stat --check --warn-host 80% --crit-quarantine 16GiB
  kvd-stat --run-dir /tmp/kvd --json | jq '.tiers[] | {tier, committed, capacity}'
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command ``kvd-stat``; returns its exit status."""

    def act() -> int:
        parsed = parser().parse_args(arguments)
        return _command(parsed)(parsed)

    return run_command("kvd-stat", act)


def parser() -> argparse.ArgumentParser:
    """What the command takes, for it and for its manual page."""
    default = KEYS["run_dir"].default
    top: argparse.ArgumentParser = Parser(
        prog="kvd-stat", description="Show what a running daemon holds.", epilog=_EPILOG
    )
    top.add_argument("--version", action="version", version=f"kvd-stat {__version__}")
    top.add_argument(
        "what", nargs="?", type=_what, metavar="SECONDS | explain", help="live at this interval; or where memory is"
    )
    top.add_argument(
        "--run-dir", type=Path, default=Path(default), metavar="DIR", help=f"the daemon's run directory ({default})"
    )
    top.add_argument("--json", action="store_true", help="print one JSON object, whose schema has a version")
    top.add_argument(
        "--watch", nargs="?", type=_seconds, const=2.0, metavar="SECONDS", help="live, at this interval (2)"
    )
    top.add_argument(
        "--state-dir", type=Path, metavar="DIR", help="explain: of the saved sessions (disk.state_dir of /etc/kvd)"
    )
    top.add_argument("--check", action="store_true", help="one line for monitoring, and an exit status of 0 to 3")
    for level, words, percent in (("warn", "warning", 90.0), ("crit", "critical", 97.0)):
        for tier in ("host", "vram"):
            told = f"--check: {words} when {tier} is so full ({percent:g}%%)"
            top.add_argument(f"--{level}-{tier}", type=_percent, default=percent, metavar="PERCENT", help=told)
    for level, words, size in (("warn", "warning", "1GiB"), ("crit", "critical", "16GiB")):
        top.add_argument(
            f"--{level}-quarantine",
            type=_size,
            default=_size(size),
            metavar="BYTES",
            help=f"--check: {words} when so much is quarantined ({size})",
        )
    return top


def _command(parsed: argparse.Namespace) -> Callable[[argparse.Namespace], int]:
    if parsed.check:
        return _check
    if parsed.what == "explain":
        return _explain
    return _once if parsed.watch is None and parsed.what is None else _watch


def _once(parsed: argparse.Namespace) -> int:
    stats = ask_stats(parsed.run_dir)
    if parsed.json:
        print(msgspec.json.encode(stats).decode())
    else:
        print_tables(stats, output_console(WIDTH))
    return 0


def _watch(parsed: argparse.Namespace) -> int:
    interval = parsed.what if parsed.watch is None else parsed.watch
    with Control(parsed.run_dir, "kvd-stat") as control, suppress(KeyboardInterrupt):
        watch(control.stats, interval, output_console(WIDTH))
    return 0


def _check(parsed: argparse.Namespace) -> int:
    limits = Thresholds(
        warn_host=parsed.warn_host,
        crit_host=parsed.crit_host,
        warn_vram=parsed.warn_vram,
        crit_vram=parsed.crit_vram,
        warn_quarantine=parsed.warn_quarantine,
        crit_quarantine=parsed.crit_quarantine,
    )
    try:
        verdict, line = check(ask_stats(parsed.run_dir), limits)
    except KvdError as error:
        verdict, line = unknown(error.message)
    print(line)
    return verdict


def _explain(parsed: argparse.Namespace) -> int:
    state_dir = parsed.state_dir
    if state_dir is None:
        configured = config.load({}, {}).disk.state_dir
        state_dir = Path(configured) if configured else None
    explanation = explain(ask_stats(parsed.run_dir), parsed.run_dir, state_dir)
    if parsed.json:
        print(msgspec.json.encode(explanation).decode())
    else:
        print("\n".join(explanation_lines(explanation)))
    return 0


def _what(text: str) -> float | str:
    return text if text == "explain" else _seconds(text)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.1 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"{text} seconds; allowed: 0.1 to 86400")
    return seconds


def _percent(text: str) -> float:
    percent = float(text.removesuffix("%"))
    if percent < 0 or not math.isfinite(percent):
        raise argparse.ArgumentTypeError(f"{text}; allowed: a percentage such as 90%")
    return percent


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except InvalidValue as error:
        raise argparse.ArgumentTypeError(error.message) from None
