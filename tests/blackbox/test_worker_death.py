"""What becomes of a worker's memory: killed at any point, disconnected, forked, replaced."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from compute.client import Client
from protocol.daemon_block import read_daemon_block
from protocol.errors import KvdError, SessionBusy, UnknownSession
from protocol.messages import Claim, ErrorReply, SessionOpened
from protocol.session_state import unpack_frame
from protocol.stats import NodeStats
from tests.blackbox.daemon_process import DaemonProcess
from tests.blackbox.raw import FINGERPRINT, RawPeer, read_fd
from tests.blackbox.worker_process import COMMIT_BYTES, PAGE_BYTES, TOKEN_CAPACITY, WorkerProcess, publish

RECOVERY_S = 2.0
"""A dead worker's VRAM and grants are back within this."""

POINTS = ["lease", "allocated", "created", "extended", "committed", "extending"]
STORED_POINTS = ["committed", "extending"]


def wait_until(daemon: DaemonProcess, holds: Callable[[NodeStats], bool], within_s: float = RECOVERY_S) -> NodeStats:
    """The first statistics of which ``holds`` is true."""
    deadline = time.monotonic() + within_s
    while not holds(stats := daemon.stat()):
        assert time.monotonic() < deadline, stats
        time.sleep(0.01)
    return stats


def vram(stats: NodeStats) -> tuple[int, int, int]:
    [tier] = [tier for tier in stats.tiers if tier.tier == "vram:cpu"]
    return tier.requested, tier.committed, tier.quarantined


def open_session(client: Client, name: str = "victim") -> SessionOpened:
    return client.open_session(name, fingerprint=FINGERPRINT, encoding="q8g64")


@pytest.mark.parametrize("point", POINTS)
def test_kill_at_any_point(daemon: DaemonProcess, point: str) -> None:
    with RawPeer(daemon.run_dir), WorkerProcess(daemon.run_dir, "committed", session="neighbour") as neighbour:
        baseline = daemon.stat()
        with WorkerProcess(daemon.run_dir, point) as victim:
            if point == "extending":
                time.sleep(0.3)
            victim.kill()
            after = wait_until(daemon, lambda stats: victim.lease not in {lease.lease for lease in stats.leases})
        assert vram(after) == vram(baseline)
        assert after.ledger == "balanced"
        assert [lease.lease for lease in after.leases] == [lease.lease for lease in baseline.leases]
        victims = [session for session in after.sessions if session.name == "victim"]
        assert [session.state for session in victims] == ["stored"] * (point in STORED_POINTS)
        mine = [session for session in after.sessions if session.name == "neighbour"]
        assert mine == [session for session in baseline.sessions if session.name == "neighbour"]
        assert (mine[0].lease, mine[0].state, mine[0].committed_rows) == (neighbour.lease, "held", 150)
        if not victims:
            assert [(tier.tier, tier.requested, tier.committed) for tier in after.tiers] == [
                (tier.tier, tier.requested, tier.committed) for tier in baseline.tiers
            ]


def test_committed_rows_are_read_by_a_new_worker(daemon: DaemonProcess) -> None:
    with WorkerProcess(daemon.run_dir, "committed") as victim:
        victim.kill()
        wait_until(daemon, lambda stats: not stats.leases)
    [stored] = daemon.stat().sessions
    assert (stored.state, stored.lease, stored.generation, stored.tokens) == ("stored", 0, 1, 160)
    assert (stored.pages, stored.logical_rows, stored.committed_rows) == (3, 150, 150)
    with Client(daemon.run_dir) as client:
        opened = open_session(client)
        assert (opened.session, opened.generation, opened.page_count) == (stored.session, 2, 3)
        header, frames = read_daemon_block(read_fd(client.claim(opened.daemon_block), opened.daemon_block.nbytes))
        assert (header.generation, header.holder_pid, header.page_bytes) == (2, os.getpid(), PAGE_BYTES)
        segments = {extent.number: client.claim(extent.memory) for extent in opened.extents}
        for page, frame in enumerate(frames):
            extent, index = unpack_frame(frame)
            content = os.pread(segments[extent], PAGE_BYTES, index * header.page_stride)
            assert content == bytes([page + 1]) * PAGE_BYTES
        for fd in segments.values():
            os.close(fd)
        assert client.extend_session(opened.session, 2, 2).page_count == 5
        client.close_session(opened.session, 2)
        assert not client.stat().sessions


@pytest.mark.parametrize("point", ["created", "extended"])
def test_case_14_name_of_a_session_that_never_committed_is_free(daemon: DaemonProcess, point: str) -> None:
    with WorkerProcess(daemon.run_dir, point) as victim:
        victim.kill()
        wait_until(daemon, lambda stats: not stats.leases)
    assert not daemon.stat().sessions
    with Client(daemon.run_dir) as client:
        with pytest.raises(UnknownSession, match="victim"):
            open_session(client)
        opened = client.create_session(
            "victim", fingerprint=FINGERPRINT, encoding="q8g64", page_bytes=PAGE_BYTES, token_capacity=64
        )
        client.close_session(opened.session, opened.generation)


def test_acknowledged_tokens_alone_keep_a_session(daemon: DaemonProcess) -> None:
    with WorkerProcess(daemon.run_dir, "tokens_only") as victim:
        victim.kill()
        stats = wait_until(daemon, lambda stats: not stats.leases)
    assert [(session.state, session.tokens) for session in stats.sessions] == [("stored", 7)]


def test_living_process_without_connection_is_quarantined(daemon: DaemonProcess) -> None:
    with WorkerProcess(daemon.run_dir, "disconnected") as victim, Client(daemon.run_dir) as client:
        stats = wait_until(daemon, lambda stats: any(lease.state == "quarantined" for lease in stats.leases))
        requested, committed, quarantined = vram(stats)
        assert (requested, committed, quarantined) == ((3 << 20) + 1, (4 + 2 + 6) << 20, (4 + 2 + 6) << 20)
        [host] = [tier for tier in stats.tiers if tier.tier == "host"]
        [session] = stats.sessions
        assert host.quarantined == session.committed > 0
        assert (session.state, session.lease) == ("held", victim.lease)
        with pytest.raises(SessionBusy, match="not known to be dead"):
            open_session(client)
        victim.kill()
        stats = wait_until(daemon, lambda stats: len(stats.leases) == 1)
        assert vram(stats) == (0, 0, 0)
        assert stats.sessions[0].state == "stored"
        client.close_session(*session_key(open_session(client)))


def session_key(opened: SessionOpened) -> tuple[int, int]:
    return opened.session, opened.generation


def test_lease_that_holds_nothing_ends_with_its_connection(daemon: DaemonProcess) -> None:
    with Client(daemon.run_dir) as client:
        memory = client.allocate_device("cpu", 1, "tables")
        client.free_device(memory.handle)
        assert len(daemon.stat().leases) == 1
    wait_until(daemon, lambda stats: not stats.leases)


def test_forked_child_does_not_keep_the_lease(daemon: DaemonProcess) -> None:
    with WorkerProcess(daemon.run_dir, "forked") as victim:
        [child] = psutil.Process(victim.pid).children()
        assert any("socket" in os.readlink(fd) for fd in Path(f"/proc/{child.pid}/fd").iterdir())
        victim.kill()
        stats = wait_until(daemon, lambda stats: not stats.leases)
        assert child.is_running()
        child.kill()
        assert vram(stats) == (0, 0, 0)
        assert [session.state for session in stats.sessions] == ["stored"]


def test_case_01_twenty_kills_return_to_the_baseline(daemon: DaemonProcess) -> None:
    baseline = [(tier.requested, tier.committed) for tier in daemon.stat().tiers]
    with WorkerProcess(daemon.run_dir, "extended*") as victim:
        for round_ in range(20):
            if round_:
                victim.go_on()
                assert victim.read()["lease"] == round_ + 1
            stats = wait_until(daemon, lambda stats: not stats.leases)
            assert [(tier.requested, tier.committed) for tier in stats.tiers] == baseline


def test_case_02_statistics_while_workers_are_killed_extending(daemon: DaemonProcess) -> None:
    for _ in range(3):
        with WorkerProcess(daemon.run_dir, "extending") as victim:
            victim.kill()
            started = time.monotonic()
            daemon.stat()
            assert time.monotonic() - started < 1.0
        wait_until(daemon, lambda stats: stats.sessions[0].state == "stored")
        with Client(daemon.run_dir) as client:
            client.close_session(*session_key(open_session(client)))


def test_grants_of_a_quarantined_lease_are_void(daemon: DaemonProcess) -> None:
    with RawPeer(daemon.run_dir) as peer, Client(daemon.run_dir) as client:
        grant = client.allocate_device("cpu", 1, "tables").grant
        client._handles.close()
        wait_until(daemon, lambda stats: any(lease.state == "quarantined" for lease in stats.leases))
        with pytest.raises(KvdError, match="has no live lease"):
            client.allocate_device("cpu", 1, "tables")
        reply, _ = peer.ask_handle(Claim(grant))
        assert isinstance(reply, ErrorReply)
        assert reply.code == "grant_refused"


def test_detached_session_is_stored_and_opened_again(daemon: DaemonProcess) -> None:
    with Client(daemon.run_dir) as client:
        created = client.create_session(
            "kept",
            fingerprint=FINGERPRINT,
            encoding="q8g64",
            page_bytes=PAGE_BYTES,
            token_capacity=TOKEN_CAPACITY,
            commit_bytes=COMMIT_BYTES,
        )
        client.extend_session(created.session, 1, 1)
        publish(client.claim(created.worker_block), created, tokens=10, rows=10)
        client.detach_session(created.session, 1)
        with pytest.raises(SessionBusy, match="held by no lease"):
            client.extend_session(created.session, 1, 1)
        [session] = client.stat().sessions
        assert (session.state, session.lease, session.committed_rows) == ("stored", 0, 10)
        opened = open_session(client, "kept")
        assert (opened.generation, opened.page_count, opened.extents) == (2, 1, [])
        client.close_session(opened.session, 2)
