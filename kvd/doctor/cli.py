"""``kvd doctor``: the checks, in order, as text or JSON; changes and their undoing; rates."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvd.config import Config
from kvd.control import ask_stats
from kvd.doctor import devices, kernel, limits
from kvd.doctor.bench import Rate, host_rates
from kvd.doctor.bench_cuda import cuda_rates
from kvd.doctor.changes import STATE_DIRECTORY, Changes, Outcome
from kvd.doctor.host import Finding, Host, Roots
from kvd.doctor.settings import changeable
from protocol.errors import DaemonUnavailable, InvalidValue, OsFailure, PermissionRefused
from protocol.stats import NodeStats

SCHEMA = 1
"""Version of what ``--json`` prints; raised whenever a field changes its meaning or goes away."""

CHECKS: tuple[Callable[[Host], Iterator[Finding]], ...] = (
    limits.memory,
    kernel.huge_pages,
    kernel.numa_balancing,
    kernel.compaction,
    kernel.swap,
    limits.locked_memory,
    limits.open_files,
    limits.logind,
    devices.driver,
    devices.pcie,
    devices.iommu,
    devices.numa_distance,
)

_EPILOG = """--apply writes the original values to a record in the state directory, on disk, before it changes anything;
--restore puts them back, also after an interruption, and leaves what somebody else has set since. What --apply changes
lasts until the next boot.

exit status: 0 nothing found, 1 something should change, 2 something keeps the daemon from its work or a rate is low;
64 wrong arguments, 69 no device to measure, 71 refused by the system, 77 no permission, 78 wrong setting

examples:
  kvd doctor
  sudo kvd doctor --apply          # NUMA balancing, compaction, huge pages of /dev/shm
  sudo kvd doctor --restore
  kvd doctor --bench cuda          # copies and gathers between host RAM and every GPU
"""
ROOTS = Roots()
_MARKS = {"ok": "ok", "advice": "advice", "problem": "PROBLEM", "unknown": "unknown"}


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the command ``doctor``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="look at the host for what hurts, and change what may be changed",
        description="Look at the host for what keeps the daemon from running well.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="the daemon's settings, instead of those in /etc/kvd"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--apply", action="store_true", help="record original values, then change what is advised")
    what.add_argument("--restore", action="store_true", help="put the recorded values back")
    what.add_argument(
        "--bench",
        nargs="?",
        choices=("host", "cuda"),
        const="host",
        help="measure copies within host RAM, or also between it and every GPU; takes a few seconds",
    )
    parser.add_argument(
        "--state-dir", type=Path, default=STATE_DIRECTORY, metavar="DIR", help=f"of the record ({STATE_DIRECTORY})"
    )
    return parser


def run(parsed: argparse.Namespace, config: Config, roots: Roots = ROOTS) -> int:
    """The command; returns its exit status. Raises what changing and measuring raise."""
    changes = Changes(changeable(roots), parsed.state_dir)
    if parsed.restore:
        return _print_outcomes(changes.restore(), parsed.json)
    if parsed.bench:
        return _print_rates(host_rates() + (cuda_rates() if parsed.bench == "cuda" else []), parsed.json)
    findings = examine(Host(config, running_stats(config), roots))
    if parsed.apply:
        return _print_outcomes(changes.apply(dict(found.change for found in findings if found.change)), parsed.json)
    return _print_findings(findings, changes, parsed.json)


def examine(host: Host, checks: Sequence[Callable[[Host], Iterator[Finding]]] = CHECKS) -> list[Finding]:
    """What all checks find. One that cannot read what it needs finds ``unknown``."""
    findings: list[Finding] = []
    for check in checks:
        try:
            findings += check(host)
        except (OSError, OsFailure, InvalidValue) as error:
            findings.append(Finding(check.__name__.replace("_", " "), "unknown", str(error)))
    return findings


def running_stats(config: Config) -> NodeStats | None:
    """What the daemon holds, if one runs that may be asked."""
    try:
        return ask_stats(Path(config.run_dir), timeout_s=2)
    except (DaemonUnavailable, PermissionRefused):
        return None


def _print_findings(findings: Sequence[Finding], changes: Changes, as_json: bool) -> int:
    worst = max(({"advice": 1, "problem": 2}.get(finding.level, 0) for finding in findings), default=0)
    recorded = changes.recorded()
    if as_json:
        rows = [{**asdict(finding), "change": dict([finding.change] if finding.change else [])} for finding in findings]
        print(
            json.dumps({"schema": SCHEMA, "findings": rows, "recorded": {n: e.original for n, e in recorded.items()}})
        )
        return worst
    for finding in findings:
        print(f"{_MARKS[finding.level]:>8}  {finding.check}: {finding.found}")
        for line in filter(None, (finding.why, finding.remedy and f"→ {finding.remedy}")):
            print(f"{'':>8}  {line}")
    for name, entry in recorded.items():
        print(f"{'changed':>8}  {name} was {entry.original}; --restore puts it back")
    return worst


def _print_outcomes(outcomes: Sequence[Outcome], as_json: bool) -> int:
    failed = any(outcome.done == "failed" for outcome in outcomes)
    if as_json:
        print(json.dumps({"schema": SCHEMA, "changes": [asdict(outcome) for outcome in outcomes]}))
        return 2 if failed else 0
    for outcome in outcomes:
        print(f"{outcome.done:>8}  {outcome.setting}: {outcome.detail}")
    if not outcomes:
        print("nothing to change")
    return 2 if failed else 0


def _print_rates(rates: Sequence[Rate], as_json: bool) -> int:
    low = any(rate.fits is False for rate in rates)
    if as_json:
        rows = [{"case": rate.case, "value": rate.value, "unit": "B/s", **_judgement(rate)} for rate in rates]
        print(json.dumps({"schema": SCHEMA, "bench": rows}))
        return 2 if low else 0
    for rate in rates:
        mark = {True: "fits", False: "LOW", None: ""}[rate.fits]
        print(f"{rate.value / 1e9:8.1f} GB/s  {rate.case}  ({rate.note}) {mark}".rstrip())
    return 2 if low else 0


def _judgement(rate: Rate) -> dict[str, Any]:
    return {"floor": rate.floor, "fits": rate.fits, "note": rate.note}
