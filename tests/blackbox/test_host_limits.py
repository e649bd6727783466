"""A /dev/shm that is too small, in a mount namespace of the daemon's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from compute.client import Client
from protocol.errors import OutOfCapacity
from tests.blackbox.daemon_process import DaemonProcess
from tests.blackbox.raw import FINGERPRINT, books


def _may_mount() -> bool:
    command = ["unshare", "-m", "mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", "/dev/shm"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


pytestmark = pytest.mark.skipif(os.geteuid() != 0 or not _may_mount(), reason="needs root and a mount namespace")

MIB = 1 << 20


def small_shm(nbytes: int) -> tuple[str, ...]:
    """A command prefix that runs kvd with a /dev/shm of ``nbytes``."""
    script = f'mount -t tmpfs -o size={nbytes} tmpfs /dev/shm && exec {sys.executable} -m kvd "$@"'
    return "unshare", "-m", "sh", "-c", script, "kvd"


def test_case_26_tier_larger_than_the_mount(run_dir: Path) -> None:
    with DaemonProcess(run_dir, small_shm(8 * MIB)) as process:
        assert process.wait() == 71
        assert '"code": "out_of_capacity"' in process.log
        assert "shared memory mount /dev/shm" in process.log


def test_case_26_session_larger_than_what_is_left_of_the_mount(run_dir: Path) -> None:
    settings = {"host_capacity": "4MiB", "drain_timeout_s": "0"}
    with DaemonProcess(run_dir, small_shm(8 * MIB), **settings) as process:
        process.wait_ready()
        with Client(run_dir) as client:
            before = books(client.stat())
            create = {"fingerprint": FINGERPRINT, "encoding": "x", "page_bytes": 1}
            with pytest.raises(OutOfCapacity) as refused:
                client.create_session("large", token_capacity=2 * MIB, **create)  # type: ignore[arg-type]
            assert "/dev/shm" in str(refused.value)
            assert books(client.stat()) == before
            opened = client.create_session("small", token_capacity=MIB // 2, **create)  # type: ignore[arg-type]
            client.extend_session(opened.session, 1, 10)
            client.close_session(opened.session, 1)
        assert process.stop() == 0
