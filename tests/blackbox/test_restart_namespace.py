"""Restarts where shared memory is scarce: a tmpfs of 1.5 times the pool, in a mount namespace of its own."""

from __future__ import annotations

from pathlib import Path

from tests.blackbox.private_shm import run_with_private_shm

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
    run_with_private_shm(SCRIPT, "48m", run_dir / "run")
