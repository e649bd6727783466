"""A worker in a container: pid, mount, ipc and user namespaces of its own, and only the socket directory bound in.

Memory comes by descriptor, so neither /dev/shm nor process numbers are shared with the daemon.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.blackbox.daemon_process import DaemonProcess
from tests.blackbox.test_worker_death import wait_until

PROJECT = Path(__file__).resolve().parents[2]
UNSHARE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount", "--ipc", "--kill-child")

ROOM = """
set -e
mount -t tmpfs tmpfs /dev/shm
mount -t proc proc /proc
mkdir -p "$INSIDE"
mount --bind -o ro "$RUN_DIR" "$INSIDE"
mount -t tmpfs tmpfs "$OUTSIDE"
exec "$PYTHON" -c "$SCRIPT" "$INSIDE"
"""

SCRIPT = """
import json, os, sys
from pathlib import Path
from compute.worker import Worker
from protocol.layout import Q8G64
from tests.blackbox.test_generation import CONFIG, generate, prompt

run_dir = Path(sys.argv[1])
with Worker(run_dir, "cpu", CONFIG, Q8G64, seed=3) as worker:
    offloaded, resident = (generate(worker, mode, prompt(300), 40)[:2] for mode in ("offloaded", "resident"))
    facts = {
        "pid": os.getpid(),
        "processes": sum(name.isdecimal() for name in os.listdir("/proc")),
        "shm": os.listdir("/dev/shm"),
        "sockets": sorted(os.listdir(run_dir)),
        "equal": offloaded == resident,
        "distinct": len(set(offloaded[0])),
        "lease": worker.client.lease.number,
    }
    print(json.dumps(facts), flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder that the container sees empty; the socket directory is in it."""
    if shutil.which("unshare") is None or subprocess.run([*UNSHARE, "true"], capture_output=True).returncode:
        pytest.skip("namespaces of its own are not permitted here")
    return tmp_path / "outside"


@pytest.fixture
def daemon(outside: Path) -> Iterator[DaemonProcess]:
    outside.mkdir()
    sizes = {"host_capacity": "256MiB", "host_extent": "16MiB", "vram_capacity": "256MiB"}
    with DaemonProcess(outside / "run", drain_timeout_s="0", **sizes) as process:
        yield process.wait_ready()
        assert process.stat().ledger == "balanced"
        assert process.stop() == 0


@contextmanager
def container(daemon: DaemonProcess, inside: Path) -> Iterator[subprocess.Popen[str]]:
    environment = {
        **os.environ,
        "RUN_DIR": str(daemon.run_dir),
        "OUTSIDE": str(daemon.run_dir.parent),
        "INSIDE": str(inside),
        "PYTHON": sys.executable,
        "SCRIPT": SCRIPT,
    }
    command = [*UNSHARE, "sh", "-c", ROOM]
    with subprocess.Popen(
        command, cwd=PROJECT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_container_decodes_with_nothing_but_the_socket_directory(daemon: DaemonProcess, tmp_path: Path) -> None:
    with container(daemon, tmp_path / "inside") as process:
        assert process.stdout is not None
        facts = json.loads(process.stdout.readline())
        assert facts["pid"] == 1
        assert facts["processes"] == 1, "or the daemon's processes were in sight"
        assert facts["shm"] == []
        assert {"kvd.sock", "handles.sock"} <= set(facts["sockets"])
        assert facts["equal"]
        assert facts["distinct"] > 8, "an output of few distinct tokens shows nothing"

        [lease] = [lease for lease in daemon.stat().leases if lease.lease == facts["lease"]]
        status = Path(f"/proc/{lease.pid}/status").read_text()
        assert f"NSpid:\t{lease.pid}\t1\n" in status, "the daemon knows the worker by its own number for it"
    wait_until(daemon, lambda stats: not stats.leases)
    assert sum(tier.requested for tier in daemon.stat().tiers) == 0
