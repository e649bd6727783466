"""Restarts where shared memory is scarce: a tmpfs of 1.5 times the pool, in a mount namespace of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]

SCRIPT = """
import os, sys
from pathlib import Path
from tests.blackbox.daemon_process import DaemonProcess
from tests.blackbox.worker_process import WorkerProcess

run_dir = Path(sys.argv[1])
for round in range(10):
    with DaemonProcess(run_dir, host_capacity="32MiB", drain_timeout_s="0") as daemon:
        stats = daemon.wait_ready().stat()
        assert [session.state for session in stats.sessions] == ["stored"] * (round > 0), stats
        if not round:
            with WorkerProcess(run_dir, "committed") as worker:
                worker.kill()
                while daemon.stat().leases:
                    pass
        names = sorted("/dev/shm/" + name for name in os.listdir("/dev/shm"))
        assert names == daemon.segments, names
        assert len(names) == 8 + 2
        daemon.process.kill()
        daemon.process.wait()
with DaemonProcess(run_dir, host_capacity="32MiB", drain_timeout_s="0") as daemon:
    assert daemon.wait_ready().stop() == 0
assert not os.listdir("/dev/shm"), os.listdir("/dev/shm")
"""


def test_case_15_ten_kills_on_a_tmpfs_of_one_and_a_half_pools(run_dir: Path) -> None:
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-m", "true"], capture_output=True).returncode:
        pytest.skip("a mount namespace of its own is not permitted here")
    command = f'mount -t tmpfs -o size=48m tmpfs /dev/shm && exec {sys.executable} -c "$SCRIPT" {run_dir / "run"}'
    done = subprocess.run(
        [unshare, "-m", "sh", "-c", command],
        cwd=PROJECT,
        env={**os.environ, "SCRIPT": SCRIPT},
        capture_output=True,
        text=True,
        timeout=100,
    )
    if done.returncode == 32:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr}")
    assert done.returncode == 0, done.stdout + done.stderr
