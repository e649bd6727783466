"""What a worker can do to the memory it was given, and what the daemon does then."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from compute.client import Client
from protocol.errors import KvdError, SessionDamaged
from protocol.messages import SessionOpened
from protocol.stats import SessionStats
from tests.blackbox.daemon_process import DaemonProcess
from tests.blackbox.raw import FINGERPRINT
from tests.blackbox.worker_process import COMMIT_BYTES, PAGE_BYTES, TOKEN_CAPACITY, WorkerProcess, publish


class Holder:
    """A lease with one session of ``pages`` pages, its descriptors claimed."""

    def __init__(self, daemon: DaemonProcess, name: str, pages: int) -> None:
        self.client = Client(daemon.run_dir)
        self.opened: SessionOpened = self.client.create_session(
            name,
            fingerprint=FINGERPRINT,
            encoding="q8g64",
            page_bytes=PAGE_BYTES,
            token_capacity=TOKEN_CAPACITY,
            commit_bytes=COMMIT_BYTES,
        )
        self.daemon_block = self.client.claim(self.opened.daemon_block)
        self.worker_block = self.client.claim(self.opened.worker_block)
        publish(os.dup(self.worker_block), self.opened, tokens=70, rows=64)
        changed = self.client.extend_session(self.opened.session, 1, pages)
        self.extents = [self.client.claim(extent.memory) for extent in changed.extents]

    def extend(self, pages: int = 1) -> None:
        self.client.extend_session(self.opened.session, 1, pages)

    def stats(self) -> SessionStats:
        [mine] = [session for session in self.client.stat().sessions if session.session == self.opened.session]
        return mine

    def close(self) -> None:
        for fd in (self.daemon_block, self.worker_block, *self.extents):
            os.close(fd)
        self.client.close()


@pytest.fixture
def holders(daemon: DaemonProcess) -> Iterator[tuple[Holder, Holder]]:
    """Two leases whose sessions lie in extents of their own: the first fills one."""
    with ExitStack() as cleanup:
        pair = []
        for name in ("victim", "neighbour"):
            holder = Holder(daemon, name, pages=512)
            cleanup.callback(holder.close)
            pair.append(holder)
        yield pair[0], pair[1]


def cut_worker_block(holder: Holder) -> None:
    os.ftruncate(holder.worker_block, 4096)


def empty_worker_block(holder: Holder) -> None:
    os.ftruncate(holder.worker_block, 0)


def punch_worker_block(holder: Holder) -> None:
    size = os.fstat(holder.worker_block).st_size
    os.ftruncate(holder.worker_block, 8192)
    os.ftruncate(holder.worker_block, size)


def overwrite_header(holder: Holder) -> None:
    os.pwrite(holder.worker_block, b"\xff" * 64, 0)


def claim_absurd_counts(holder: Holder) -> None:
    os.pwrite(holder.worker_block, b"\xff" * 8, 512)


def claim_absent_commit(holder: Holder) -> None:
    os.pwrite(holder.worker_block, (12345).to_bytes(8, "little"), 576)


def cut_extent(holder: Holder) -> None:
    os.ftruncate(holder.extents[0], 4096)


def grow_extent(holder: Holder) -> None:
    os.ftruncate(holder.extents[0], (4 << 20) + 4096)


DAMAGES = [
    cut_worker_block,
    empty_worker_block,
    punch_worker_block,
    overwrite_header,
    claim_absurd_counts,
    claim_absent_commit,
    cut_extent,
    grow_extent,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_case_25_cut_or_scribbled_memory(daemon: DaemonProcess, holders: tuple[Holder, Holder], damage) -> None:
    victim, neighbour = holders
    damage(victim)
    assert victim.stats().state == "damaged"
    with pytest.raises(SessionDamaged, match=f"session {victim.opened.session}"):
        victim.extend()
    with pytest.raises(SessionDamaged):
        victim.client.truncate_session(victim.opened.session, 1, 0)
    with pytest.raises(SessionDamaged):
        victim.client.detach_session(victim.opened.session, 1)
    neighbour.extend()
    mine = neighbour.stats()
    assert (mine.state, mine.committed_rows, mine.pages) == ("held", 64, 513)
    victim.client.close_session(victim.opened.session, 1)
    neighbour.client.close_session(neighbour.opened.session, 1)
    stats = daemon.stat()
    assert (stats.ledger, stats.sessions) == ("balanced", [])
    assert '"event": "session damaged"' in daemon.log


def test_damaged_session_of_a_dead_worker_can_be_closed(daemon: DaemonProcess) -> None:
    with WorkerProcess(daemon.run_dir, "cut") as worker:
        worker.kill()
    with Client(daemon.run_dir) as client:
        while client.stat().sessions[0].lease:
            pass
        with pytest.raises(SessionDamaged) as refused:
            client.open_session("victim", fingerprint=FINGERPRINT, encoding="q8g64")
        [stored] = client.stat().sessions
        assert (stored.state, stored.lease) == ("damaged", 0)
        assert refused.value.facts == {"session": stored.session, "generation": stored.generation}
        client.close_session(stored.session, stored.generation)
        assert client.stat().sessions == []


def test_daemon_block_cannot_be_written_or_cut(daemon: DaemonProcess, holders: tuple[Holder, Holder]) -> None:
    victim, _ = holders
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(victim.daemon_block, b"x", 0)
    with pytest.raises(OSError, match=r"Invalid argument|Bad file descriptor"):
        os.ftruncate(victim.daemon_block, 0)


def test_stored_session_is_not_closed_by_who_does_not_hold_it(daemon: DaemonProcess) -> None:
    with WorkerProcess(daemon.run_dir, "committed") as worker, Client(daemon.run_dir) as client:
        [session] = client.stat().sessions
        with pytest.raises(KvdError, match=f"held by lease {worker.lease}"):
            client.close_session(session.session, session.generation)
        worker.kill()
        while client.stat().sessions[0].lease:
            pass
        with pytest.raises(KvdError, match="held by no lease"):
            client.close_session(session.session, session.generation)
