"""``kvd-stat`` live, checking and explaining, against a real daemon, and the documentation of what it explains."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest

from compute.client import Client
from kvd.stat.explain import DeviceTerms, Explanation, HostTerms, ProcessTerms
from tests.blackbox.daemon_process import DaemonProcess, clean_environment
from tests.blackbox.private_shm import run_with_private_shm
from tests.blackbox.test_stat import command
from tests.blackbox.worker_process import WorkerProcess

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-c", "from kvd.commands.stat import main; raise SystemExit(main())"]

TAKING_DRIVER = """
import os, sys
from kvd import cli
from kvd.tiers import driver_cpu

class TakingDriver(driver_cpu.CpuDriver):
    '''Takes 64 MiB that no books know of, beside the first block.'''

    taken = None

    def create(self, device, nbytes):
        if self.taken is None:
            self.taken = driver_cpu._create_memfd(64 << 20)
        return super().create(device, nbytes)

import kvd.node
kvd.node.CpuDriver = TakingDriver
raise SystemExit(cli.main())
"""


@contextmanager
def watching(daemon: DaemonProcess, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*COMMAND, "--run-dir", str(daemon.run_dir), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def read_blocks(process: subprocess.Popen[str], count: int) -> list[str]:
    """The first blocks; each begins with the line of the daemon."""
    assert process.stdout is not None
    blocks: list[str] = []
    while len(blocks) <= count:
        line = process.stdout.readline()
        assert line, "it has ended"
        if line.startswith("kvd "):
            blocks.append("")
        blocks[-1] += line
    return blocks[:count]


def check_line(run_dir: Path, *arguments: str) -> tuple[int, str]:
    ended = command("kvd.commands.stat", "--run-dir", str(run_dir), "--check", *arguments)
    assert ended.stderr == ""
    assert ended.stdout.count("\n") == 1
    return ended.returncode, ended.stdout


def explanation(daemon: DaemonProcess, *arguments: str) -> Explanation:
    ended = command("kvd.commands.stat", "--run-dir", str(daemon.run_dir), "explain", "--json", *arguments)
    assert (ended.returncode, ended.stderr) == (0, "")
    return msgspec.json.decode(ended.stdout, type=Explanation)


@pytest.mark.parametrize("arguments", [("0.1",), ("--watch", "0.1")])
def test_a_block_for_each_interval_without_a_terminal(daemon: DaemonProcess, arguments: tuple[str, ...]) -> None:
    with WorkerProcess(daemon.run_dir, "committed"), watching(daemon, *arguments) as process:
        first, second = read_blocks(process, 2)
        assert "host" in first
        assert "vram:cpu: requested 3 MiB, committed 12 MiB, capacity 64 MiB\n" + "█" * 2 + "▒" * 6 + "·" * 32 in first
        assert "leases: 1, of which quarantined: 0" in first
        [row] = re.findall(r"^ ?victim.*$", second, re.MULTILINE)
        assert row.split() == ["victim", "held", "victim", "3", "160", "0", "0", "0", "0", "B", "0", "B"]
        process.send_signal(signal.SIGINT)
        _, complaints = process.communicate(timeout=10)
        assert (process.returncode, complaints) == (0, "")


def test_on_a_terminal_it_is_shown_in_place(daemon: DaemonProcess) -> None:
    ours, theirs = pty.openpty()
    command_line = [*COMMAND, "--run-dir", str(daemon.run_dir), "0.1"]
    environment = {**clean_environment(), "TERM": "xterm"}
    process = subprocess.Popen(command_line, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    try:
        shown = b""
        while shown.count(b"vram:cpu: requested 0 B") < 2:
            shown += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        while process.poll() is None:
            shown += os.read(ours, 4096)
    except OSError:  # the terminal's other end is closed
        pass
    finally:
        os.close(ours)
        status = process.wait(10)
    assert (status, b"Traceback" in shown) == (0, False)


def test_it_ends_quietly_when_nobody_reads(daemon: DaemonProcess) -> None:
    with watching(daemon, "0.1") as process:
        read_blocks(process, 1)
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
        assert process.wait(10) == 141


@pytest.mark.parametrize("arguments", [("0",), ("nan",), ("soon",), ("--watch", "-1"), ("--warn-host", "x")])
def test_wrong_arguments(run_dir: Path, arguments: tuple[str, ...]) -> None:
    assert command("kvd.commands.stat", "--run-dir", str(run_dir), *arguments).returncode == 64


def test_check_of_a_daemon_that_is_well(daemon: DaemonProcess) -> None:
    status, line = check_line(daemon.run_dir)
    assert status == 0
    assert line.startswith("KVD OK - vram:cpu 0.0% full, host 0.0% full, quarantined 0 B, damaged sessions 0, ledger b")
    assert "| 'vram:cpu'=0.00%;90;97;0;100 'host'=0.00%;90;97;0;100 quarantined=0B;" in line


def test_check_judges_by_thresholds(daemon: DaemonProcess) -> None:
    with Client(daemon.run_dir) as client:
        memory = client.allocate_device("cpu", 16 * MIB, "ring")  # a quarter of the device
        for arguments, expected in {
            ("--warn-vram", "25.1%"): 0,
            ("--warn-vram", "25%"): 1,
            ("--warn-vram", "10", "--crit-vram", "25"): 2,
        }.items():
            status, line = check_line(daemon.run_dir, *arguments)
            assert (status, "vram:cpu 25.0% full" in line) == (expected, True)
        client.free_device(memory.handle)


def test_check_sees_quarantine_and_damage(daemon: DaemonProcess) -> None:
    with WorkerProcess(daemon.run_dir, "disconnected"):
        status, line = check_line(daemon.run_dir, "--warn-quarantine", "1MiB")
        assert (status, line.startswith("KVD WARNING - ")) == (1, True)
        assert check_line(daemon.run_dir, "--crit-quarantine", "1MiB")[0] == 2
    with WorkerProcess(daemon.run_dir, "cut", session="torn"):
        status, line = check_line(daemon.run_dir)
        assert (status, "damaged sessions 1," in line) == (1, True)


def test_check_without_a_daemon_is_unknown(run_dir: Path) -> None:
    status, line = check_line(run_dir)
    assert (status, line.startswith("KVD UNKNOWN - no daemon at ")) == (3, True)


def test_everything_is_explained(daemon: DaemonProcess) -> None:
    with WorkerProcess(daemon.run_dir, "committed") as worker:
        stats, found = daemon.stat(), explanation(daemon)
        [device] = found.devices
        assert (device.device, device.in_use, device.unexplained) == ("cpu", 12 * MIB, 0)
        host = found.host
        [committed] = [tier.committed for tier in stats.tiers if tier.tier == "host"]
        assert (host.shm, host.committed) == (committed, committed)
        assert host.in_use is not None
        assert host.unexplained == host.in_use - committed >= 0, "other tests have shared memory too"
        assert [(process.lease, process.pid) for process in host.processes] == [
            (0, daemon.process.pid),
            (worker.lease, worker.pid),
        ]
        for process in host.processes:
            status = Path(f"/proc/{process.pid}/status").read_text()
            [tables] = re.findall(r"VmPTE:\s+(\d+) kB", status)
            assert process.page_tables == pytest.approx(1024 * int(tables), abs=MIB)
            assert process.rss_anon is not None
            assert process.rss_anon > MIB
        assert host.page_tables == sum(process.page_tables or 0 for process in host.processes)
        assert host.saved_page_cache == 0


def test_memory_outside_the_books_is_unexplained(run_dir: Path) -> None:
    with DaemonProcess(run_dir, (sys.executable, "-c", TAKING_DRIVER), drain_timeout_s="0") as daemon:
        daemon.wait_ready()
        assert explanation(daemon).devices[0].unexplained == 0
        with Client(run_dir) as client:
            memory = client.allocate_device("cpu", 4 * MIB, "ring")
            [device] = explanation(daemon).devices
            assert device.committed == 4 * MIB
            assert device.unexplained == pytest.approx(64 * MIB, abs=2 * MIB)
            client.free_device(memory.handle)
        assert explanation(daemon).devices[0].unexplained == pytest.approx(64 * MIB, abs=2 * MIB)


PRIVATE_SHM = """
import os, sys
from pathlib import Path
from tests.blackbox.daemon_process import DaemonProcess
from tests.blackbox.test_stat_views import MIB, explanation
from tests.blackbox.worker_process import WorkerProcess

with DaemonProcess(Path(sys.argv[1]), drain_timeout_s="0") as daemon:
    daemon.wait_ready()
    taken = Path("/dev/shm/somebody-elses")
    with WorkerProcess(daemon.run_dir, "committed"):
        for nbytes in (0, 64 * MIB, 0):
            with taken.open("wb") as file:
                file.write(bytes(nbytes))
            host = explanation(daemon).host
            assert host.in_use == host.shm + nbytes, host
            assert abs(host.unexplained - nbytes) <= 2 * MIB, host
    taken.unlink()
    assert daemon.stop() == 0
"""


def test_shared_memory_outside_the_books_is_unexplained(run_dir: Path) -> None:
    """In a /dev/shm of its own: 64 MiB that somebody else takes are unexplained, and nothing else is."""
    run_with_private_shm(PRIVATE_SHM, "1g", run_dir / "run")


def test_page_cache_of_saved_sessions(daemon: DaemonProcess, tmp_path: Path) -> None:
    written = tmp_path / "1000-notes.kvd"
    written.write_bytes(b"x" * (3 * MIB + 1))
    (tmp_path / "other").write_bytes(b"x" * MIB)
    assert explanation(daemon, "--state-dir", str(tmp_path)).host.saved_page_cache == 3 * MIB + 4096
    with written.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert (explanation(daemon, "--state-dir", str(tmp_path)).host.saved_page_cache or 0) < MIB


def test_explanation_for_people(daemon: DaemonProcess) -> None:
    ended = command("kvd.commands.stat", "--run-dir", str(daemon.run_dir), "explain")
    assert ended.returncode == 0
    assert re.search(r"^device cpu: 0 B in use\n  committed by the daemon +0 B$", ended.stdout, re.MULTILINE)
    assert f"process {daemon.process.pid}, the daemon" in ended.stdout


@pytest.mark.parametrize(
    ("section", "cls"),
    [
        ("The explanation", Explanation),
        ("A device", DeviceTerms),
        ("Host RAM", HostTerms),
        ("A process", ProcessTerms),
    ],
)
def test_documentation_has_every_term(section: str, cls: type[msgspec.Struct]) -> None:
    text = (ROOT / "docs/operate.md").read_text()
    [part] = re.findall(rf"^#### {section}\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    documented = re.findall(r"^\| `(\w+)` \| (\w+) \|", part, re.MULTILINE)
    hints: dict[str, Any] = get_type_hints(cls)
    words = {name: str(getattr(hint, "__name__", hint)).removesuffix(" | None") for name, hint in hints.items()}
    assert documented == [(name, "int" if "int" in word else word) for name, word in words.items()]


def test_explanation_is_json_with_a_version(daemon: DaemonProcess) -> None:
    ended = command("kvd.commands.stat", "--run-dir", str(daemon.run_dir), "explain", "--json")
    assert json.loads(ended.stdout)["schema"] == 2
