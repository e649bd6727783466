"""``kvd-stat`` and ``kvd`` as commands, against a real daemon, and the documentation of what they print."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest

from kvd import __version__
from protocol.stats import STATS_SCHEMA, LeaseStats, NodeStats, PurposeStats, SessionStats, StallStats, TierStats
from tests.blackbox.daemon_process import DaemonProcess, clean_environment
from tests.blackbox.worker_process import WorkerProcess

ROOT = Path(__file__).resolve().parents[2]
SECTIONS: dict[str, type[msgspec.Struct]] = {
    "The node": NodeStats,
    "Tiers": TierStats,
    "Purposes": PurposeStats,
    "Leases": LeaseStats,
    "Sessions": SessionStats,
    "Stalls": StallStats,
}


def command(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = f"from {module} import main; raise SystemExit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=clean_environment(), check=False
    )


@pytest.fixture(scope="module")
def worker(shared_daemon: DaemonProcess) -> Iterator[WorkerProcess]:
    with WorkerProcess(shared_daemon.run_dir, "committed") as process:
        yield process


def test_json_is_the_statistics(shared_daemon: DaemonProcess, worker: WorkerProcess) -> None:
    ended = command("kvd.commands.stat", "--run-dir", str(shared_daemon.run_dir), "--json")
    assert ended.returncode == 0
    assert len(ended.stdout.splitlines()) == 1
    document = json.loads(ended.stdout)
    stats = msgspec.convert(document, NodeStats)
    assert (stats.schema, stats.daemon_version, stats.ledger) == (STATS_SCHEMA, __version__, "balanced")
    [session], [lease] = stats.sessions, stats.leases
    assert (session.name, session.logical_rows, session.committed_rows, session.tokens) == ("victim", 150, 150, 160)
    assert (lease.lease, lease.pid, lease.state) == (worker.lease, worker.pid, "live")
    tiers = {tier.tier: tier for tier in stats.tiers}
    host = tiers["host"]
    assert host.capacity == (64 + 256) << 20
    assert host.committed == sum(part.committed for part in host.purposes)
    purposes = {part.purpose: part for part in host.purposes}
    assert (purposes["pages"].requested, purposes["pages"].committed) == (3 * 5000, 3 * 8192)
    assert purposes["unassigned"].committed == (64 << 20) - 3 * 8192
    vram = {part.purpose: (part.requested, part.committed) for part in tiers["vram:cpu"].purposes}
    assert vram.pop("temporary") == (0, 0), "given back, kept for reuse"
    assert vram == {"ring": (3 << 20, 4 << 20), "tables": (1, 2 << 20), "cached": (0, 6 << 20)}
    assert lease.committed == session.committed + (12 << 20)


def test_tables_have_both_words_and_every_number(shared_daemon: DaemonProcess, worker: WorkerProcess) -> None:
    ended = command("kvd.commands.stat", "--run-dir", str(shared_daemon.run_dir))
    assert ended.returncode == 0
    for heading in ("requested (logical)", "committed (real)", "capacity", "peak committed", "quarantined"):
        assert heading in ended.stdout
    assert re.search(r"vram:cpu +all +3 MiB +12 MiB +64 MiB +8 MiB +12 MiB +0 B +0 B", ended.stdout)
    assert re.search(r"ring +3 MiB +4 MiB +3 MiB +4 MiB", ended.stdout)
    assert re.search(rf"{worker.lease} +victim +live +{worker.pid}", ended.stdout)
    assert re.search(r"victim +held +\d+ +3 +150 +150 +160 ", ended.stdout)
    assert "ledger balanced" in ended.stdout


def test_no_daemon(run_dir: Path) -> None:
    ended = command("kvd.commands.stat", "--run-dir", str(run_dir))
    assert (ended.returncode, ended.stdout) == (69, "")
    assert ended.stderr == f"kvd-stat: no daemon at {run_dir}/kvd.sock: No such file or directory\n"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(f"{run_dir}/kvd.sock")
    assert command("kvd.commands.stat", "--run-dir", str(run_dir)).stderr.endswith("kvd.sock: Connection refused\n")
    assert command("kvd.commands.stat", "--run-dir", f"/tmp/{'d' * 120}").returncode == 69
    assert command("kvd.commands.stat", "--frobnicate").returncode == 64


@pytest.mark.parametrize("section", SECTIONS)
def test_documentation_has_every_field(section: str) -> None:
    text = (ROOT / "docs/operate.md").read_text()
    [part] = re.findall(rf"^### {section}\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    documented = re.findall(r"^\| `(\w+)` \| (\w+) \|", part, re.MULTILINE)
    hints: dict[str, Any] = get_type_hints(SECTIONS[section])
    program = [
        (field.name, "list" if "list" in str(hints[field.name]) else hints[field.name].__name__)
        for field in msgspec.structs.fields(SECTIONS[section])
    ]
    assert documented == program


def test_help_and_version() -> None:
    assert command("kvd.cli", "--version").stdout == f"kvd {__version__}\n"
    assert command("kvd.commands.stat", "--version").stdout == f"kvd-stat {__version__}\n"
    shown = command("kvd.cli", "--help").stdout
    for name in ("run", "check-config", "print-config", "plan", "examples:", "exit status:"):
        assert name in shown
    assert "--host-capacity" in command("kvd.cli", "run", "--help").stdout
    assert command("kvd.cli", "plan", "--table").returncode == 0


def test_the_commands_import_neither_the_compute_side_nor_torch() -> None:
    code = (
        "import sys, kvd.cli, kvd.commands.stat; print({'compute', 'torch'} & {m.split('.')[0] for m in sys.modules})"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "set()\n"
