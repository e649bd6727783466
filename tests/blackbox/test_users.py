"""Workers of several uids, on a machine where tests may change their uid."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from compute.client import Client
from protocol.errors import OutOfCapacity, UnknownSession
from tests.blackbox.daemon_process import DaemonProcess
from tests.blackbox.raw import FINGERPRINT
from tests.blackbox.test_worker_death import wait_until
from tests.blackbox.worker_process import WorkerProcess

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to run workers of other uids")

UID = 65534


@pytest.fixture
def open_daemon(run_dir: Path) -> Iterator[DaemonProcess]:
    """A daemon that every uid may connect to."""
    run_dir.chmod(0o755)
    with DaemonProcess(run_dir, socket_mode="0666", drain_timeout_s="0") as process:
        yield process.wait_ready()
        assert process.stat().ledger == "balanced"


def test_names_are_of_one_uid(open_daemon: DaemonProcess) -> None:
    with WorkerProcess(open_daemon.run_dir, "committed", uid=UID) as worker, Client(open_daemon.run_dir) as client:
        [lease] = [lease for lease in client.stat().leases if lease.lease == worker.lease]
        assert (lease.uid, lease.pid) == (UID, worker.pid)
        [session] = client.stat().sessions
        assert session.uid == UID
        with pytest.raises(UnknownSession):
            client.close_session(session.session, session.generation)
        worker.kill()
        wait_until(open_daemon, lambda stats: stats.sessions[0].state == "stored")
        with pytest.raises(UnknownSession):
            client.open_session("victim", fingerprint=FINGERPRINT, encoding="q8g64")
        mine = client.create_session(
            "victim", fingerprint=FINGERPRINT, encoding="q8g64", page_bytes=4096, token_capacity=64
        )
        assert len(client.stat().sessions) == 2
        client.close_session(mine.session, mine.generation)


def test_extents_go_to_another_uid_zeroed_and_only_after_death(open_daemon: DaemonProcess) -> None:
    with WorkerProcess(open_daemon.run_dir, "filled", uid=UID) as worker, Client(open_daemon.run_dir) as client:
        mine = client.create_session(
            "mine", fingerprint=FINGERPRINT, encoding="q8g64", page_bytes=4 << 20, token_capacity=64 * 16
        )
        with pytest.raises(OutOfCapacity) as refused:
            client.extend_session(mine.session, 1, 16)
        assert f"leases [{worker.lease}] may still map" in str(refused.value)
        worker.kill()
        wait_until(open_daemon, lambda stats: worker.lease not in {lease.lease for lease in stats.leases})
        changed = client.extend_session(mine.session, 1, 16)
        assert len(changed.extents) == 16
        for extent in changed.extents:
            fd = client.claim(extent.memory)
            assert not any(os.pread(fd, 4 << 20, 0))
            os.close(fd)
        client.close_session(mine.session, 1)


def test_vram_goes_to_another_uid_zeroed_and_only_after_death(open_daemon: DaemonProcess) -> None:
    """Two pieces: one in use, and a temporary that was given back and is kept for its lease."""
    with WorkerProcess(open_daemon.run_dir, "filled_device", uid=UID) as worker, Client(open_daemon.run_dir) as client:
        with pytest.raises(OutOfCapacity):
            client.allocate_device("cpu", 64 << 20, "arena")
        worker.kill()
        wait_until(open_daemon, lambda stats: worker.lease not in {lease.lease for lease in stats.leases})
        for purpose in ("ring", "temporary"):
            memory = client.allocate_device("cpu", 32 << 20, purpose)
            fd = client.claim(memory)
            assert not any(os.pread(fd, 32 << 20, 0))
            os.close(fd)


def test_daemon_block_cannot_be_opened_for_writing(open_daemon: DaemonProcess) -> None:
    with WorkerProcess(open_daemon.run_dir, "pries_open", uid=UID) as worker:
        assert worker.read() == {"refused": "Permission denied"}


def test_socket_mode_keeps_other_uids_out(run_dir: Path) -> None:
    run_dir.chmod(0o755)
    with DaemonProcess(run_dir, drain_timeout_s="0") as process:
        process.wait_ready()
        with pytest.raises(AssertionError, match="the worker ended with status 1"):
            WorkerProcess(run_dir, "lease", uid=UID)
