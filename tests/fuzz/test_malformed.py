"""A hundred thousand malformed frames: each is answered, nothing is granted, the daemon is as it was."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.blackbox.daemon_process import DaemonProcess
from tests.fuzz.malformed import Generator, bombard

FRAMES = 100_000
STREAMS = 300
MOST_GROWTH = 64 << 20


@pytest.fixture
def daemon(run_dir: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(run_dir, drain_timeout_s="0", log_level="error") as process:
        yield process.wait_ready()
        assert process.stop() == 0
        assert '"exception"' not in process.log


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def bombard_and_compare(daemon: DaemonProcess, seed: int, count: int) -> None:
    """Fails if the daemon ends, faults, grants memory, or grows."""
    bombard(daemon.run_dir, seed, 1000)  # what it allocates at the first errors
    before = resident_bytes(daemon.process.pid)
    refused = bombard(daemon.run_dir, seed + 1, count)
    assert daemon.process.poll() is None
    grown = resident_bytes(daemon.process.pid) - before
    stats = daemon.stat()
    assert (stats.ledger, stats.sessions) == ("balanced", [])
    assert all(tier.tier == "host" or not tier.committed for tier in stats.tiers)
    assert refused > 0.9 * count, "some are messages by chance: a flipped bit of a name is another name"
    assert grown < MOST_GROWTH
    assert '"level": "error"' not in daemon.log


@pytest.mark.slow
def test_malformed_frames(daemon: DaemonProcess) -> None:
    bombard_and_compare(daemon, 1, FRAMES)


def test_streams_that_are_no_zmtp(daemon: DaemonProcess) -> None:
    """Greetings and frame headers that are cut, spoiled, or of another protocol."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    noise = Generator(3).frames("control_request", STREAMS)
    for number, frame in enumerate(noise):
        with socket.socket(socket.AF_UNIX) as stream:
            stream.connect(str(daemon.run_dir / "kvd.sock"))
            begin = greeting if number % 2 else greeting[: number % len(greeting)]
            try:
                stream.sendall(begin + frame)
            except (BrokenPipeError, ConnectionResetError):
                continue  # it was dropped before all was sent
    assert daemon.stat().ledger == "balanced"
