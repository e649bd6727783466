"""Sessions without sockets: every verb does all or nothing, also when the system refuses in the middle."""

from __future__ import annotations

import errno
import mmap
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import structlog

from kvd.alloc.ledger import Ledger
from kvd.config import LimitsConfig
from kvd.leases import Lease, Leases
from kvd.peers import Process, peer_of_socket
from kvd.sessions.registry import Sessions
from kvd.sessions.session import HOST_TIER, Session
from kvd.tiers.host_ram import HostRam
from protocol.daemon_block import read_daemon_block
from protocol.errors import (
    FingerprintMismatch,
    InvalidValue,
    OsFailure,
    OutOfCapacity,
    SessionBusy,
    StaleGeneration,
)
from protocol.handles import LeaseRef
from protocol.messages import (
    CloseSession,
    CreateSession,
    DetachSession,
    ExtendSession,
    OpenSession,
    SessionOpened,
    TruncateSession,
)
from protocol.session_state import WorkerBlock, WorkerBlockLayout

MIB = 1 << 20
PREFIX = f"/kvd-unit-{os.getpid()}"
PRINT = bytes(32)
NOBODY = LeaseRef(0, 0)
"""What requests carry here: which lease speaks has been decided before."""


@dataclass
class World:
    """The sessions of a small host tier, and two leases of this process."""

    ledger: Ledger
    host: HostRam
    sessions: Sessions
    leases: Leases
    first: Lease
    second: Lease

    def create(self, name: str = "s", page_bytes: int = 5000, tokens: int = 64 * 100) -> SessionOpened:
        return self.sessions.create(self.first, CreateSession(1, NOBODY, name, PRINT, "q8g64", page_bytes, tokens, 8))

    def open(self, lease: Lease, name: str = "s", fingerprint: bytes = PRINT) -> SessionOpened:
        return self.sessions.open(lease, OpenSession(1, NOBODY, name, fingerprint, "q8g64"))

    def session(self, name: str = "s") -> Session:
        [session] = [session for session in self.sessions if session.name == name]
        return session

    def snapshot(self) -> tuple[object, ...]:
        """Books, session and segments."""
        self.ledger.check()
        entries = {str(entry.account): entry.balance for entry in self.ledger.entries()}
        states = [(session.header, session.frames, session.lease) for session in self.sessions]
        segments = sorted(name for name in os.listdir("/dev/shm") if name.startswith(PREFIX[1:]))
        return entries, states, segments


def open_lease(leases: Leases) -> Lease:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        peer = peer_of_socket(ours)
        return leases.open(peer, Process(ours, peer), "unit")


@pytest.fixture
def world() -> Iterator[World]:
    ledger = Ledger()
    host = HostRam(ledger, capacity_bytes=16 * MIB, extent_bytes=4 * MIB, prefix=PREFIX)
    ledger.resize_tier(HOST_TIER, 17 * MIB)
    leases = Leases(3, 8)
    log = structlog.get_logger()
    sessions = Sessions(3, PREFIX, ledger, host, LimitsConfig(max_sessions=3), log)
    made = World(ledger, host, sessions, leases, open_lease(leases), open_lease(leases))
    yield made
    ledger.check()
    sessions.close_all()
    host.close()
    for lease in leases:
        leases.end(lease)
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(PREFIX[1:])]


def extend(pages: int, generation: int = 1, session: int = 1) -> ExtendSession:
    return ExtendSession(1, NOBODY, session, generation, pages)


def block_of(world: World, opened: SessionOpened):
    """Header and page table, as a worker reads them."""
    fd = world.first.redeem(opened.daemon_block.grant).open()
    try:
        return read_daemon_block(os.pread(fd, opened.daemon_block.nbytes, 0))
    finally:
        os.close(fd)


def test_lifecycle_keeps_block_and_books_in_step(world: World) -> None:
    empty = world.snapshot()
    opened = world.create()
    assert (opened.generation, opened.page_count, opened.extents) == (1, 0, [])
    assert opened.daemon_block.read_only
    assert not opened.worker_block.read_only
    fd = world.first.redeem(opened.daemon_block.grant).open()
    changed = world.sessions.extend(world.first, extend(7))
    assert (changed.generation, changed.page_count, [extent.number for extent in changed.extents]) == (1, 7, [0])
    assert world.sessions.extend(world.first, extend(2)).extents == [], "an extent is granted once"
    header, frames = read_daemon_block(os.pread(fd, 1 << 20, 0))
    assert (header.page_count, header.page_stride, header.holder_pid) == (9, 8192, os.getpid())
    assert frames == world.session().frames
    assert len(set(frames)) == 9
    pages = world.ledger.purposes(HOST_TIER)["pages"]
    assert (pages.requested, pages.committed) == (9 * 5000, 9 * 8192)
    kept = world.session().frames[:4]
    assert world.sessions.truncate(world.first, TruncateSession(1, NOBODY, 1, 1, 4)).generation == 2
    assert read_daemon_block(os.pread(fd, 1 << 20, 0))[1] == kept == world.session().frames
    with pytest.raises(StaleGeneration):
        world.sessions.extend(world.first, extend(1, generation=1))
    world.sessions.detach(world.first, DetachSession(1, NOBODY, 1, 2))
    header, _ = read_daemon_block(os.pread(fd, 1 << 20, 0))
    assert (header.holder_pid, header.holder_start) == (0, 0)
    assert {entry.account.lease for entry in world.ledger.entries()} == {0}
    again = world.open(world.second)
    assert (again.generation, again.page_count, [extent.number for extent in again.extents]) == (3, 4, [0])
    assert {entry.account.lease for entry in world.ledger.entries() if entry.account.session} == {world.second.number}
    world.sessions.close(world.second, CloseSession(1, NOBODY, 1, 3))
    os.close(fd)
    assert world.snapshot()[2] == empty[2]
    assert world.ledger.total(HOST_TIER).committed == 16 * MIB


def test_refusals_change_nothing(world: World) -> None:
    world.create()
    world.sessions.extend(world.first, extend(3))
    before = world.snapshot()
    refusals: list[tuple[type[Exception], Callable[[], object]]] = [
        (SessionBusy, lambda: world.open(world.second)),
        (SessionBusy, lambda: world.open(world.first)),
        (SessionBusy, lambda: world.sessions.extend(world.second, extend(1))),
        (SessionBusy, lambda: world.sessions.close(world.second, CloseSession(1, NOBODY, 1, 1))),
        (StaleGeneration, lambda: world.sessions.close(world.first, CloseSession(1, NOBODY, 1, 2))),
        (InvalidValue, lambda: world.sessions.extend(world.first, extend(98))),
        (OutOfCapacity, lambda: world.create("large", tokens=1 << 20)),
    ]
    for error, act in refusals:
        with pytest.raises(error):
            act()
        assert world.snapshot() == before
    world.sessions.detach(world.first, DetachSession(1, NOBODY, 1, 1))
    stored = world.snapshot()
    with pytest.raises(FingerprintMismatch):
        world.open(world.second, fingerprint=bytes(31) + b"x")
    assert world.snapshot() == stored


def test_truncation_below_the_committed_rows_is_refused(world: World) -> None:
    opened = world.create()
    world.sessions.extend(world.first, extend(3))
    commit(world, opened, rows=65)
    before = world.snapshot()
    with pytest.raises(InvalidValue, match="pages is 1; allowed: at least 2, for the 65 committed rows"):
        world.sessions.truncate(world.first, TruncateSession(1, NOBODY, 1, 1, 1))
    assert world.snapshot() == before
    world.sessions.truncate(world.first, TruncateSession(1, NOBODY, 1, 1, 2))


def commit(world: World, opened: SessionOpened, rows: int) -> None:
    fd = world.first.redeem(opened.worker_block.grant).open()
    mapped = mmap.mmap(fd, opened.worker_block.nbytes)
    os.close(fd)
    block = WorkerBlock(memoryview(mapped), WorkerBlockLayout(64 * 100, 8), opened.session)
    block.publish_commit(opened.generation, rows)
    block.release()
    mapped.close()


def test_limit_of_sessions(world: World) -> None:
    for name in "abc":
        world.create(name)
    with pytest.raises(InvalidValue, match="number of sessions is 4; allowed: 1 to 3"):
        world.create("d")


@pytest.mark.parametrize("failing", [1, 2])
def test_creation_that_fails_in_the_middle_leaves_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """The system has no room for the first block, or for the second one."""
    calls = 0

    def refuse(fd: int, offset: int, nbytes: int) -> None:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(fd, offset, nbytes)

    allocate = os.posix_fallocate

    before = world.snapshot()
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(OutOfCapacity):
            world.create()
    assert calls == failing
    assert world.snapshot() == before
    world.create()


@pytest.mark.parametrize("failing", ["create", "extend", "truncate", "open"])
def test_block_that_cannot_be_written_leaves_everything(
    world: World, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    verbs: dict[str, Callable[[], object]] = {
        "create": lambda: world.create(),
        "extend": lambda: world.sessions.extend(world.first, extend(3)),
        "truncate": lambda: world.sessions.truncate(world.first, TruncateSession(1, NOBODY, 1, 1, 1)),
        "detach": lambda: world.sessions.detach(world.first, DetachSession(1, NOBODY, 1, 2)),
        "open": lambda: world.open(world.second),
    }
    for name, verb in verbs.items():
        if name == failing:
            break
        verb()
    before = world.snapshot()

    def no_space(fd: int, data: bytes, offset: int) -> int:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", no_space)
        with pytest.raises(OsFailure, match="No space left"):
            verbs[failing]()
    assert world.snapshot() == before
    if failing == "create":
        return
    verbs[failing]()


def test_sessions_of_an_ended_lease(world: World) -> None:
    kept = world.create("kept")
    world.create("empty")
    world.sessions.extend(world.first, extend(2, session=2))
    world.sessions.extend(world.first, extend(2))
    commit(world, kept, rows=64)
    world.sessions.lease_ended(world.first)
    assert [(session.name, session.state) for session in world.sessions] == [("kept", "stored")]
    assert {entry.account.lease for entry in world.ledger.entries()} == {0}
    world.ledger.check()
    assert world.open(world.second, "kept").generation == 2
