"""A daemon that is killed and started again: what it takes up, what it drops, and what every verb says of before."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from compute.client import Client
from protocol import messages
from protocol.daemon_block import read_daemon_block
from protocol.errors import DaemonUnavailable, KvdError, SessionBusy
from protocol.handles import LeaseRef
from protocol.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    AllocateDevice,
    CloseSession,
    CreateSession,
    DetachSession,
    ErrorReply,
    ExtendSession,
    FetchPages,
    FindPrefix,
    ForkSession,
    FreeDevice,
    Hello,
    LeaseRequest,
    OpenSession,
    ReattachSession,
    Request,
    SessionOpened,
    TruncateSession,
    ViewSession,
    Welcome,
)
from tests.blackbox.daemon_process import DaemonProcess
from tests.blackbox.raw import FINGERPRINT, RawPeer, read_fd
from tests.blackbox.test_worker_death import open_session, wait_until
from tests.blackbox.worker_process import PAGE_BYTES, TOKEN_CAPACITY, WorkerProcess, publish
from tests.leaks import orphans_expected
from tests.torture.restart import run_rounds


@pytest.fixture(autouse=True)
def _kills_daemons() -> Iterator[None]:
    with orphans_expected():
        yield


@pytest.fixture
def restart(run_dir: Path) -> Iterator[Callable[[], DaemonProcess]]:
    """A function that kills the daemon, if there is one, and starts another."""
    started: list[DaemonProcess] = []

    def start() -> DaemonProcess:
        if started:
            started[-1].process.kill()
            started[-1].process.wait()
        started.append(DaemonProcess(run_dir, drain_timeout_s="0"))
        return started[-1].wait_ready()

    yield start
    assert started[-1].stat().ledger == "balanced"
    assert started[-1].stop() == 0
    started[-1].__exit__(None, None, None)


Restart = Callable[[], DaemonProcess]


def test_case_15_a_dead_workers_session_outlives_ten_daemons(run_dir: Path, restart: Restart) -> None:
    daemon = restart()
    with WorkerProcess(run_dir, "committed") as worker:
        worker.kill()
        [before] = wait_until(daemon, lambda stats: not stats.leases).sessions
    host = [tier for tier in daemon.stat().tiers if tier.tier == "host"]
    for _ in range(10):
        daemon = restart()
        [session] = daemon.stat().sessions
        assert session == before
        assert len(daemon.segments) == 16 + 2
        [tier] = [tier for tier in daemon.stat().tiers if tier.tier == "host"]
        assert (tier.requested, tier.committed) == (host[0].requested, host[0].committed)
        assert sorted(Path("/dev/shm", name) for name in names_like(daemon)) == [Path(name) for name in daemon.segments]
    with Client(run_dir) as client:
        opened = open_session(client)
        header, frames = read_daemon_block(read_fd(client.claim(opened.daemon_block), opened.daemon_block.nbytes))
        assert (header.epoch, header.generation, len(frames)) == (client.welcome.epoch, before.generation + 1, 3)
        segments = {extent.number: client.claim(extent.memory) for extent in opened.extents}
        for page, frame in enumerate(frames):
            content = os.pread(segments[frame >> 32], PAGE_BYTES, (frame & 0xFFFFFFFF) * header.page_stride)
            assert content == bytes([page + 1]) * PAGE_BYTES
        for fd in segments.values():
            os.close(fd)
        client.close_session(opened.session, opened.generation)
    assert len(daemon.segments) == 16


def names_like(daemon: DaemonProcess) -> list[str]:
    """All names in /dev/shm that begin as this daemon's do."""
    prefix = Path(daemon.segments[0]).name.rsplit("-e", 1)[0]
    return [name for name in os.listdir("/dev/shm") if name.startswith(prefix)]


def test_living_holder_keeps_its_session_until_it_dies(run_dir: Path, restart: Restart) -> None:
    restart()
    with WorkerProcess(run_dir, "committed") as worker:
        daemon = restart()
        [session], [lease] = daemon.stat().sessions, daemon.stat().leases
        assert (session.state, session.lease, session.committed_rows) == ("held", lease.lease, 150)
        assert (lease.state, lease.pid) == ("quarantined", worker.pid)
        with Client(run_dir) as client:
            with pytest.raises(SessionBusy, match="not known to be dead"):
                open_session(client)
            with pytest.raises(SessionBusy, match="is not one that process"):
                client.reattach_session("victim")
        worker.kill()
        stats = wait_until(daemon, lambda stats: not stats.leases)
        assert [session.state for session in stats.sessions] == ["stored"]


def test_living_worker_takes_its_session_back_and_hands_its_memory_over(run_dir: Path, restart: Restart) -> None:
    restart()
    client = Client(run_dir)
    opened = client.create_session(
        "mine",
        fingerprint=FINGERPRINT,
        encoding="q8g64",
        page_bytes=PAGE_BYTES,
        token_capacity=TOKEN_CAPACITY,
        commit_bytes=16,
    )
    client.extend_session(opened.session, 1, 2)
    publish(client.claim(opened.worker_block), opened, tokens=70, rows=64)
    memory = client.allocate_device("cpu", 3 << 20, "ring", opened.session)
    fd = client.claim(memory)
    daemon = restart()
    with pytest.raises(DaemonUnavailable):
        client.extend_session(opened.session, 1, 1)
    client.reconnect()
    again = client.reattach_session("mine")
    assert (again.session, again.generation, again.page_count) == (opened.session, 1, 2)
    handle = client.hand_over(fd, "cpu", memory.requested, memory.committed, "ring", opened.session)
    with pytest.raises(KvdError, match="descriptor of device memory"):
        client.hand_over(os.open("/dev/null", os.O_RDONLY), "cpu", 1, 2 << 20, "ring")
    stats = wait_until(daemon, lambda stats: len(stats.leases) == 1)
    assert [(session.state, session.lease) for session in stats.sessions] == [("held", client.lease.number)]
    [vram] = [tier for tier in stats.tiers if tier.tier == "vram:cpu"]
    assert (vram.requested, vram.committed, vram.quarantined) == (3 << 20, 4 << 20, 0)
    assert client.extend_session(again.session, 1, 1).page_count == 3
    client.free_device(handle)
    os.close(fd)
    client.close_session(again.session, 1)
    client.close()
    stats = daemon.stat()
    assert not stats.sessions
    assert all(tier.requested == 0 for tier in stats.tiers)


def test_shared_pages_stay_shared(run_dir: Path, restart: Restart) -> None:
    daemon = restart()
    with WorkerProcess(run_dir, "committed") as worker:
        worker.kill()
        wait_until(daemon, lambda stats: not stats.leases)
    with Client(run_dir) as client:
        opened = open_session(client)
        fork = client.fork_session(opened.session, opened.generation, 128, "fork")
        publish(client.claim(fork.worker_block), fork, tokens=1, rows=0)
        client.detach_session(fork.session, fork.generation)
        client.detach_session(opened.session, opened.generation)
        before = host_pages(daemon)
    daemon = restart()
    assert host_pages(daemon) == before
    with Client(run_dir) as client:
        left = open_session(client)
        client.close_session(left.session, left.generation)
        assert 0 < host_pages(daemon)[1] < before[1], "the fork's pages stay"
        left = open_session(client, "fork")
        client.close_session(left.session, left.generation)
        assert host_pages(daemon) == (0, 0)


def host_pages(daemon: DaemonProcess) -> tuple[int, int]:
    """Bytes of pages in host RAM, those of several sessions once: requested and committed."""
    [host] = [tier for tier in daemon.stat().tiers if tier.tier == "host"]
    pages = [purpose for purpose in host.purposes if "pages" in purpose.purpose]
    return sum(purpose.requested for purpose in pages), sum(purpose.committed for purpose in pages)


def test_what_cannot_be_verified_is_dropped(run_dir: Path, restart: Restart) -> None:
    daemon = restart()
    with WorkerProcess(run_dir, "committed") as worker:
        worker.kill()
        wait_until(daemon, lambda stats: not stats.leases)
    [block] = [name for name in daemon.segments if name.endswith("-daemon")]
    daemon.process.kill()
    daemon.process.wait()
    with Path(block).open("r+b") as opened:
        data = bytearray(opened.read())
        sequence = int.from_bytes(data[64:72], "little")
        half = (len(data) - 4096) // 2
        opened.seek(4096 + (sequence & 1) * half + 4096)
        opened.write(b"\xff")
    daemon = restart()
    assert not daemon.stat().sessions
    assert len(daemon.segments) == len(names_like(daemon)) == 16
    assert "session of an earlier run dropped" in daemon.log
    assert "checksum" in daemon.log


def test_state_of_another_version_is_refused_and_left(run_dir: Path, restart: Restart) -> None:
    daemon = restart()
    with WorkerProcess(run_dir, "committed") as worker:
        worker.kill()
        wait_until(daemon, lambda stats: not stats.leases)
    names = daemon.segments
    [block] = [name for name in names if name.endswith("-daemon")]
    daemon.process.kill()
    daemon.process.wait()
    with Path(block).open("r+b") as opened:
        opened.seek(8)
        opened.write(b"\x01")
    with DaemonProcess(run_dir) as refused:
        assert refused.wait() == 78
        assert "kvd drain --save" in refused.log
    assert all(Path(name).exists() for name in names)
    with Path(block).open("r+b") as opened:
        opened.seek(8)
        opened.write(b"\x02")
    assert [session.state for session in restart().stat().sessions] == ["stored"]


@pytest.mark.parametrize(
    ("changed", "kept", "reason"),
    [
        ({"host_capacity": "32MiB"}, ["first", "second"], ""),
        ({"host_extent": "8MiB"}, [], "extents have 4194304 bytes, not 8388608"),
        ({"host_capacity": "4MiB"}, ["first"], "extent 1, where a page of it lies, is not there"),
        ({"host_state_capacity": "1MiB"}, ["first"], "host: "),
    ],
    ids=["fits", "extent", "capacity", "state capacity"],
)
def test_sessions_that_changed_settings_have_no_place_for_are_dropped_by_name(
    run_dir: Path, changed: dict[str, str], kept: list[str], reason: str
) -> None:
    """One has pages in the first extent, the other in the first two, and state of some 650 KiB each."""
    with DaemonProcess(run_dir, drain_timeout_s="0") as daemon:
        daemon.wait_ready()
        with Client(run_dir) as client:
            for name, pages in (("first", 100), ("second", 1000)):
                opened = client.create_session(
                    name,
                    fingerprint=FINGERPRINT,
                    encoding="q8g64",
                    page_bytes=4096,
                    token_capacity=150_000,
                    commit_bytes=16,
                )
                client.extend_session(opened.session, 1, pages)
                publish(client.claim(opened.worker_block), opened, tokens=70, rows=64, token_capacity=150_000)
                client.detach_session(opened.session, 1)
        daemon.process.kill()
        daemon.process.wait()
    with DaemonProcess(run_dir, drain_timeout_s="0", **changed) as daemon:
        daemon.wait_ready()
        stats = daemon.stat()
        assert ([session.name for session in stats.sessions], stats.ledger) == (kept, "balanced")
        dropped = [line for line in daemon.log.splitlines() if "session of an earlier run dropped" in line]
        assert len(dropped) == 2 - len(kept)
        assert all(reason in line for line in dropped)
        assert sorted(names_like(daemon)) == sorted(Path(name).name for name in daemon.segments), "no byte is left"
        assert daemon.stop() == 0


def requests(lease: LeaseRef, generation: int) -> list[Request]:
    """One of every verb that names a lease, for session 1."""
    return [
        CreateSession(0, lease, "new", FINGERPRINT, "q8g64", 5000, 64, 0),
        OpenSession(0, lease, "victim", FINGERPRINT, "q8g64"),
        ReattachSession(0, lease, "victim"),
        ForkSession(0, lease, 1, generation, 64, "fork"),
        ExtendSession(0, lease, 1, generation, 1),
        TruncateSession(0, lease, 1, generation, 0),
        DetachSession(0, lease, 1, generation),
        CloseSession(0, lease, 1, generation),
        FetchPages(0, lease, 1, generation, 0, 1),
        ViewSession(0, lease, 1, generation),
        FindPrefix(0, lease, FINGERPRINT, "q8g64", [bytes(32)]),
        AllocateDevice(0, lease, "cpu", 1, "ring", 0),
        FreeDevice(0, lease, 1),
        messages.OpenBlocks(0, lease, bytes(32), 4096, LeaseRef(0, 0)),
        messages.MapBlocks(0, lease, 1),
        messages.FindBlocks(0, lease, 1, bytes(32)),
        messages.PinBlocks(0, lease, 1, bytes(32), 0),
        messages.ReserveBlocks(0, lease, 1, bytes(32)),
        messages.PublishBlocks(0, lease, 1, b""),
        messages.ReleaseBlocks(0, lease, 1),
    ]


def test_every_verb_that_names_a_lease_is_among_the_requests() -> None:
    assert {type(request) for request in requests(LeaseRef(1, 1), 1)} == set(get_args(LeaseRequest))


def test_every_verb_refuses_a_stale_epoch_and_an_unknown_lease(run_dir: Path, restart: Restart) -> None:
    restart()
    with RawPeer(run_dir) as before:
        stale = before.lease
    restart()
    with RawPeer(run_dir) as peer:
        for lease, code in ((stale, "stale_epoch"), (LeaseRef(peer.lease.epoch, 99), "unknown_lease")):
            for request in requests(lease, 1):
                reply = peer.ask(msgspec.structs.replace(request, seq=peer.next_seq()))
                assert isinstance(reply, ErrorReply), request
                assert reply.code == code, request


def test_every_verb_with_a_generation_refuses_a_stale_one(run_dir: Path, restart: Restart) -> None:
    restart()
    with RawPeer(run_dir) as peer:
        create, *_ = requests(peer.lease, 1)
        opened = peer.ask(msgspec.structs.replace(create, seq=peer.next_seq()))
        assert isinstance(opened, SessionOpened)
        for request in requests(peer.lease, opened.generation + 1):
            if hasattr(request, "generation"):
                reply = peer.ask(msgspec.structs.replace(request, seq=peer.next_seq()))
                assert isinstance(reply, ErrorReply), request
                assert reply.code == "stale_generation", request
        closed = CloseSession(peer.next_seq(), peer.lease, opened.session, opened.generation)
        assert not isinstance(peer.ask(closed), ErrorReply)


def test_a_client_of_one_minor_version_less_is_served(run_dir: Path, restart: Restart) -> None:
    restart()
    with RawPeer(run_dir, greet=False) as peer:
        reply = peer.ask(Hello(peer.next_seq(), PROTOCOL_MAJOR, PROTOCOL_MINOR - 1, "older"))
        assert isinstance(reply, Welcome)
        assert (reply.major, reply.minor) == (PROTOCOL_MAJOR, PROTOCOL_MINOR - 1)


def test_extents_are_taken_as_they_are(run_dir: Path, restart: Restart) -> None:
    """Extents that are there are taken as they are, whoever's bytes they have: none is made anew before it is used."""
    daemon = restart()
    inodes = {name: Path(name).stat().st_ino for name in daemon.segments}
    daemon = restart()
    assert {name: Path(name).stat().st_ino for name in daemon.segments} == inodes


@pytest.mark.slow
def test_daemons_killed_at_any_point_under_a_worker() -> None:
    """``make torture`` runs many more rounds of the same."""
    outcome = run_rounds(8, seed=4)
    assert not outcome.failures
    assert outcome.trials >= 8
