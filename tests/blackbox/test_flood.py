"""Floods of connections: case 24, its second half. libzmq would end the daemon at the first that gets no descriptor."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from compute.client import Client
from kvd.control import Control, ask_stats
from protocol.errors import DaemonUnavailable
from tests.blackbox.daemon_process import DaemonProcess
from tests.blackbox.test_worker_death import wait_until
from tests.blackbox.worker_process import WorkerProcess

ATTEMPTS = 10_000
FILES = 2048

FLOOD = f"""
import os, resource, socket, sys, time
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
path, (kind, uid, wanted) = sys.argv[1], map(int, sys.argv[2:])
if uid:
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
held = []
attempts, end = 0, time.monotonic() + 60
while attempts < {ATTEMPTS} or (len(held) < wanted and time.monotonic() < end):
    attempts += 1
    connection = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK)
    try:
        connection.connect(path)
    except OSError as error:
        connection.close()
        os.sched_yield()
    else:
        held.append(connection)
print(len(held), flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def daemon(run_dir: Path) -> Iterator[DaemonProcess]:
    """One that may open few files, whose limits leave some of these for connections."""
    run_dir.chmod(0o755)
    command = ("prlimit", f"--nofile={FILES}:{FILES}", sys.executable, "-m", "kvd")
    with DaemonProcess(
        run_dir,
        command,
        limits_max_leases="8",
        limits_max_sessions="8",
        limits_max_handles="16",
        drain_timeout_s="0",
    ) as process:
        yield process.wait_ready()
        assert process.process.poll() is None
        assert process.stat().ledger == "balanced"
        assert process.stop() == 0


@contextmanager
def flood(path: Path, kind: int, uid: int = 0, wanted: int = 0) -> Iterator[int]:
    """Ten thousand attempts, and more until ``wanted`` are connected, over when this is entered.

    Those that were connected stay so. Gives their number.
    """
    arguments = [sys.executable, "-c", FLOOD, str(path), *map(str, (kind, uid, wanted))]
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_case_24_flood_of_the_control_socket(daemon: DaemonProcess) -> None:
    with WorkerProcess(daemon.run_dir, "committed") as worker, Control(daemon.run_dir, "before") as before:
        for _ in range(2):
            with flood(daemon.run_dir / "kvd.sock", 1, wanted=FILES + 1) as held:
                assert held > FILES, "or it was no flood"
                assert daemon.process.poll() is None
                stats = before.stats()
                assert (stats.ledger, [lease.lease for lease in stats.leases]) == ("balanced", [worker.lease])
        assert ask_stats(daemon.run_dir, timeout_s=30).sessions[0].committed_rows == 150
    assert "connections are turned away" in daemon.log


def test_flood_of_the_handle_socket(daemon: DaemonProcess) -> None:
    with Client(daemon.run_dir) as client:
        memory = client.allocate_device("cpu", 1, "tables")
        with flood(daemon.run_dir / "handles.sock", 5):
            assert client.stat().ledger == "balanced"
            os.close(client.claim(memory))
        client.free_device(memory.handle)
    wait_until(daemon, lambda stats: not stats.leases)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be of another uid")
def test_flood_of_a_uid_that_may_not_connect(daemon: DaemonProcess) -> None:
    with flood(daemon.run_dir / "kvd.sock", 1, uid=65534) as held:
        assert held == 0
        assert daemon.stat().ledger == "balanced"


def test_a_connection_that_never_says_what_it_is_ends(daemon: DaemonProcess) -> None:
    with flood(daemon.run_dir / "kvd.sock", 1):
        try:
            ask_stats(daemon.run_dir, timeout_s=20)
        except DaemonUnavailable:
            pytest.fail("connections that say nothing keep everybody out")
