"""Malformed, forged, replayed and unreasonable input: a typed error, the books as before, the daemon alive."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from protocol.codec import CONTROL_LIMIT, HANDLE_LIMIT
from protocol.handles import LeaseRef
from protocol.messages import (
    AllocateDevice,
    Claim,
    CloseSession,
    CreateSession,
    DeviceAllocated,
    Done,
    ErrorReply,
    ExtendSession,
    FreeDevice,
    Hello,
    LeaseOpen,
    LeaseOpened,
    OpenSession,
    Request,
    SessionOpened,
    Stat,
    Stats,
    TruncateSession,
)
from tests.blackbox.daemon_process import DaemonProcess
from tests.blackbox.raw import FINGERPRINT, RawPeer, books, read_fd
from tests.blackbox.worker_process import WorkerProcess

MIB = 1 << 20


@pytest.fixture(scope="module")
def daemon(shared_daemon: DaemonProcess) -> DaemonProcess:
    """One daemon for all of them: whatever one test sends, the next must find it as it was."""
    return shared_daemon


@pytest.fixture
def peer(daemon: DaemonProcess) -> Iterator[RawPeer]:
    with RawPeer(daemon.run_dir) as raw:
        yield raw
        for session in daemon.stat().sessions:
            raw.ask(CloseSession(raw.next_seq(), raw.lease, session.session, session.generation))


def refuse(daemon: DaemonProcess, act: Callable[[], object], code: str) -> ErrorReply:
    """``act`` must be answered with this error, and change nothing."""
    before = books(daemon.stat())
    reply = act()
    assert isinstance(reply, ErrorReply), reply
    assert reply.code == code, reply
    assert books(daemon.stat()) == before
    return reply


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "bad_message"),
        (b"\xc1", "bad_message"),
        (b"not msgpack at all", "bad_message"),
        (msgspec.msgpack.encode({"type": "no_such_message", "seq": 9}), "bad_message"),
        (msgspec.msgpack.encode({"type": "stat"}), "bad_message"),
        (msgspec.msgpack.encode({"type": "stat", "seq": 9, "extra": 1}), "bad_message"),
        (msgspec.msgpack.encode({"type": "stat", "seq": "9"}), "bad_message"),
        (msgspec.msgpack.encode({"type": "stat", "seq": 9}) + b"\x00", "bad_message"),
        (b"\x81" * 100_000, "bad_message"),
    ],
)
def test_malformed_messages(daemon: DaemonProcess, peer: RawPeer, data: bytes, code: str) -> None:
    reply = refuse(daemon, lambda: peer.send(data), code)
    assert reply.seq == 0
    assert isinstance(peer.ask(Stat(peer.next_seq())), Stats), "the connection goes on"


def test_several_frames_are_refused(daemon: DaemonProcess, peer: RawPeer) -> None:
    refuse(daemon, lambda: peer.send(b"a", b"b"), "bad_message")


def test_hello_comes_first_and_in_a_known_version(daemon: DaemonProcess) -> None:
    with RawPeer(daemon.run_dir, greet=False) as raw:
        assert refuse(daemon, lambda: raw.ask(Stat(1)), "unsupported_version").facts["supported"] == "1.0 to 1.3"
        reply = refuse(daemon, lambda: raw.ask(Hello(1, 99, 0, "future")), "unsupported_version")
        assert reply.facts == {"asked": "99.0", "supported": "1.0 to 1.3"}
        refuse(daemon, lambda: raw.ask(Stat(2)), "unsupported_version")
        refuse(daemon, lambda: raw.ask_handle(LeaseOpen(2, 0, "future"))[0], "unsupported_version")
        refuse(daemon, lambda: raw.ask_handle(LeaseOpen(1, 0, "a\nb"))[0], "invalid_value")
        refuse(daemon, lambda: raw.ask_handle(LeaseOpen(1, 0, "x" * 65))[0], "invalid_value")
        assert isinstance(raw.ask_handle(LeaseOpen(1, 7, "newer minor"))[0], LeaseOpened)


@pytest.mark.parametrize("seq", [-1, 0, 1, 2])
def test_replayed_messages(daemon: DaemonProcess, peer: RawPeer, seq: int) -> None:
    peer.seq = 2
    assert isinstance(peer.ask(Stat(2)), Stats)
    assert refuse(daemon, lambda: peer.ask(Stat(seq)), "replayed").facts == {"sequence": seq, "last": 2}


def test_replayed_creation_is_not_executed(daemon: DaemonProcess, peer: RawPeer) -> None:
    request = CreateSession(peer.next_seq(), peer.lease, "once", FINGERPRINT, "q8g64", 4096, 64, 0)
    assert isinstance(peer.ask(request), SessionOpened)
    refuse(daemon, lambda: peer.ask(request), "replayed")


def _creation(**changes: object) -> Callable[[RawPeer], Request]:
    fields: dict[str, object] = {
        "name": "s",
        "fingerprint": FINGERPRINT,
        "encoding": "q8g64",
        "page_bytes": 5000,
        "token_capacity": 640,
        "commit_bytes": 0,
    }

    def build(peer: RawPeer) -> Request:
        return CreateSession(peer.next_seq(), peer.lease, **(fields | changes))  # type: ignore[arg-type]

    return build


def _allocation(**changes: object) -> Callable[[RawPeer], Request]:
    fields: dict[str, object] = {"device": "cpu", "nbytes": MIB, "purpose": "ring", "session": 0}

    def build(peer: RawPeer) -> Request:
        return AllocateDevice(peer.next_seq(), peer.lease, **(fields | changes))  # type: ignore[arg-type]

    return build


REFUSED_REQUESTS = {
    "no name": (_creation(name=""), "invalid_value"),
    "name with a slash": (_creation(name="../etc/passwd"), "invalid_value"),
    "name with a newline": (_creation(name="a\n"), "invalid_value"),
    "long name": (_creation(name="n" * 65), "invalid_value"),
    "short fingerprint": (_creation(fingerprint=b"x"), "invalid_value"),
    "no encoding": (_creation(encoding=""), "invalid_value"),
    "long encoding": (_creation(encoding="e" * 17), "invalid_value"),
    "pages of no bytes": (_creation(page_bytes=0), "invalid_value"),
    "pages of negative size": (_creation(page_bytes=-1), "invalid_value"),
    "pages beyond an extent": (_creation(page_bytes=4 * MIB + 1), "invalid_value"),
    "pages of 2^63 bytes": (_creation(page_bytes=2**63), "invalid_value"),
    "no tokens": (_creation(token_capacity=0), "invalid_value"),
    "negative tokens": (_creation(token_capacity=-5), "invalid_value"),
    "tokens beyond the format": (_creation(token_capacity=2**31), "invalid_value"),
    "tokens beyond the tier": (_creation(token_capacity=2**31 - 1), "out_of_capacity"),
    "negative commit payload": (_creation(commit_bytes=-1), "invalid_value"),
    "huge commit payload": (_creation(commit_bytes=2**24 + 1), "invalid_value"),
    "no VRAM": (_allocation(nbytes=0), "invalid_value"),
    "negative VRAM": (_allocation(nbytes=-4096), "invalid_value"),
    "VRAM beyond capacity": (_allocation(nbytes=64 * MIB + 1), "out_of_capacity"),
    "VRAM of 2^64 - 1 bytes": (_allocation(nbytes=2**64 - 1), "invalid_value"),
    "VRAM of an exbibyte": (_allocation(nbytes=2**60), "out_of_capacity"),
    "unknown device": (_allocation(device="GPU-0"), "no_device"),
    "unknown purpose": (_allocation(purpose="mining"), "bad_message"),
    "VRAM for an unknown session": (_allocation(session=77), "unknown_session"),
    "temporary beyond capacity": (_allocation(nbytes=65 * MIB, purpose="temporary"), "out_of_capacity"),
    "unknown session": (lambda peer: ExtendSession(peer.next_seq(), peer.lease, 77, 1, 1), "unknown_session"),
    "negative session": (lambda peer: CloseSession(peer.next_seq(), peer.lease, -1, 1), "unknown_session"),
    "unknown name": (lambda peer: OpenSession(peer.next_seq(), peer.lease, "?", b"", ""), "unknown_session"),
    "unknown handle": (lambda peer: FreeDevice(peer.next_seq(), peer.lease, 1), "unknown_handle"),
    "unknown lease": (
        lambda peer: FreeDevice(peer.next_seq(), LeaseRef(peer.lease.epoch, 10**6), 1),
        "unknown_lease",
    ),
    "stale epoch": (lambda peer: FreeDevice(peer.next_seq(), LeaseRef(1, peer.lease.number), 1), "stale_epoch"),
}


@pytest.mark.parametrize("what", REFUSED_REQUESTS)
def test_refused_requests(daemon: DaemonProcess, peer: RawPeer, what: str) -> None:
    build, code = REFUSED_REQUESTS[what]
    refuse(daemon, lambda: peer.ask(build(peer)), code)


def test_pages_beyond_what_there_is(daemon: DaemonProcess, peer: RawPeer) -> None:
    opened = peer.ask(CreateSession(peer.next_seq(), peer.lease, "large", FINGERPRINT, "x", 3 * MIB, 64 * 20, 0))
    assert isinstance(opened, SessionOpened)
    number = opened.session

    def extend(pages: int) -> Callable[[], object]:
        return lambda: peer.ask(ExtendSession(peer.next_seq(), peer.lease, number, 1, pages))

    for pages in (0, -1, 21, 2**63):
        assert "1 to 20" in refuse(daemon, extend(pages), "invalid_value").message
    facts = refuse(daemon, extend(17), "out_of_capacity").facts  # an extent of 4 MiB holds one page of 3 MiB
    assert (facts["tier"], facts["asked"], facts["free"]) == ("host", 17 * 3 * MIB, 16 * 3 * MIB)
    assert not isinstance(peer.ask(ExtendSession(peer.next_seq(), peer.lease, number, 1, 16)), ErrorReply)
    facts = refuse(daemon, extend(1), "out_of_capacity").facts
    assert facts["free"] == 0
    assert f"lease {peer.lease.number} session {number} pages: {16 * 3 * MIB} bytes" in str(facts["holders"])
    for pages in (-1, 17):
        request = TruncateSession(peer.next_seq(), peer.lease, number, 1, pages)
        refuse(daemon, lambda request=request: peer.ask(request), "invalid_value")  # type: ignore[misc]
    stale = TruncateSession(peer.next_seq(), peer.lease, number, 2, 1)
    reply = refuse(daemon, lambda: peer.ask(stale), "stale_generation")
    assert reply.facts == {"session": "large", "given": 2, "current": 1}
    assert peer.ask(CloseSession(peer.next_seq(), peer.lease, number, 1)) == Done(peer.seq)
    assert peer.ask(CloseSession(peer.next_seq(), peer.lease, number, 1)).code == "unknown_session"  # type: ignore[union-attr]


def test_a_name_is_taken_once(daemon: DaemonProcess, peer: RawPeer) -> None:
    assert isinstance(peer.ask(_creation()(peer)), SessionOpened)
    refuse(daemon, lambda: peer.ask(_creation()(peer)), "session_exists")


def test_another_process_cannot_speak_for_a_lease(daemon: DaemonProcess, peer: RawPeer) -> None:
    with WorkerProcess(daemon.run_dir, "lease") as worker:
        foreign = LeaseRef(peer.lease.epoch, worker.lease)
        refuse(daemon, lambda: peer.ask(FreeDevice(peer.next_seq(), foreign, 1)), "unknown_lease")


def test_forged_used_and_foreign_grants(daemon: DaemonProcess, peer: RawPeer) -> None:
    opened = peer.ask(_creation()(peer))
    assert isinstance(opened, SessionOpened)
    grant = opened.daemon_block.grant
    with RawPeer(daemon.run_dir) as other:
        refuse(daemon, lambda: other.ask_handle(Claim(grant))[0], "grant_refused")
    for forged in (0, 1, -1, grant ^ 1, 2**64 - 1):
        refuse(daemon, lambda forged=forged: peer.ask_handle(Claim(forged))[0], "grant_refused")  # type: ignore[misc]
    assert read_fd(peer.claim(grant), 8) == b"KVDSESSN"
    refuse(daemon, lambda: peer.ask_handle(Claim(grant))[0], "grant_refused")
    assert read_fd(peer.claim(opened.worker_block.grant), 8) == b"KVDWORKR", "the connection goes on"


def test_grants_of_closed_and_freed_memory_are_void(daemon: DaemonProcess, peer: RawPeer) -> None:
    opened = peer.ask(_creation()(peer))
    assert isinstance(opened, SessionOpened)
    peer.ask(TruncateSession(peer.next_seq(), peer.lease, opened.session, 1, 0))
    refuse(daemon, lambda: peer.ask_handle(Claim(opened.worker_block.grant))[0], "grant_refused")
    allocated = peer.ask(_allocation()(peer))
    assert isinstance(allocated, DeviceAllocated)
    peer.ask(FreeDevice(peer.next_seq(), peer.lease, allocated.memory.handle))
    refuse(daemon, lambda: peer.ask_handle(Claim(allocated.memory.grant))[0], "grant_refused")


@pytest.mark.parametrize("data", [b"\xc1", b"\x00" * HANDLE_LIMIT, b"\x00" * (HANDLE_LIMIT + 1), b"\x80"])
def test_malformed_packets(daemon: DaemonProcess, peer: RawPeer, data: bytes) -> None:
    refuse(
        daemon,
        lambda: peer.send_packet(data)[0],
        "message_too_large" if len(data) > HANDLE_LIMIT else "bad_message",
    )
    refuse(daemon, lambda: peer.ask_handle(LeaseOpen(1, 0, "again"))[0], "bad_message")
    refuse(daemon, lambda: peer.ask_handle(Claim(1))[0], "grant_refused")


def test_descriptors_sent_to_the_daemon_are_not_kept(daemon: DaemonProcess, peer: RawPeer) -> None:
    descriptors = Path(f"/proc/{daemon.process.pid}/fd")
    before = len(list(descriptors.iterdir()))
    for _ in range(20):
        socket.send_fds(peer.handles, [b"\xc1"], [0, 1, 2])
        peer.handles.recv(HANDLE_LIMIT)
    assert len(list(descriptors.iterdir())) == before


def test_a_claim_before_the_lease_is_refused(daemon: DaemonProcess) -> None:
    with RawPeer(daemon.run_dir, greet=False) as raw:
        refuse(daemon, lambda: raw.ask_handle(Claim(1))[0], "bad_message")


def test_a_client_that_reads_nothing_is_dropped(daemon: DaemonProcess, peer: RawPeer) -> None:
    with RawPeer(daemon.run_dir) as deaf:
        deaf.handles.settimeout(0.2)
        with pytest.raises(OSError, match=r"timed out|Broken pipe|reset"):
            _send_for_ever(deaf.handles)
        assert isinstance(peer.ask(Stat(peer.next_seq())), Stats)


def test_case_24_frame_that_claims_4_gib_ends_its_connection(daemon: DaemonProcess, peer: RawPeer) -> None:
    resident = _resident_bytes(daemon.process.pid)
    for claimed in (CONTROL_LIMIT + 1, 4 << 30, (1 << 63) - 1):
        with _zmtp_connection(daemon.run_dir) as connection:
            connection.sendall(b"\x02" + struct.pack(">Q", claimed) + b"x" * 100)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(64) == b""
    assert isinstance(peer.ask(Stat(peer.next_seq())), Stats)
    assert _resident_bytes(daemon.process.pid) - resident < 64 * MIB


def test_frames_that_end_early_and_other_protocols(daemon: DaemonProcess, peer: RawPeer) -> None:
    with _zmtp_connection(daemon.run_dir) as connection:
        connection.sendall(b"\x02" + struct.pack(">Q", CONTROL_LIMIT) + b"half")
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x00"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(daemon.run_dir / "kvd.sock"))
            connection.sendall(data)
    assert isinstance(peer.ask(Stat(peer.next_seq())), Stats)


def test_an_identity_in_use_cannot_be_taken_over(daemon: DaemonProcess) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as first, context.socket(zmq.DEALER) as second:
        for connection in (first, second):
            connection.setsockopt(zmq.LINGER, 0)
            connection.setsockopt(zmq.ROUTING_ID, b"same")
            connection.setsockopt(zmq.RCVTIMEO, 500)
        first.connect(f"ipc://{daemon.run_dir}/kvd.sock")
        first.send(msgspec.msgpack.encode(Hello(1, 1, 0, "first")))
        assert first.recv()
        second.connect(f"ipc://{daemon.run_dir}/kvd.sock")
        second.send(msgspec.msgpack.encode(Hello(1, 1, 0, "second")))
        with pytest.raises(zmq.Again):
            second.recv()
        first.send(msgspec.msgpack.encode(Stat(2)))
        assert b"stats" in first.recv()


def _zmtp_connection(run_dir: Path) -> socket.socket:
    """A stream that has shaken hands as a DEALER of ZMTP 3.0, without libzmq."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(10)
    connection.connect(str(run_dir / "kvd.sock"))
    connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    connection.sendall(b"\x04" + bytes([len(ready)]) + ready)
    received = b""
    while not received.endswith(b"Identity" + bytes(4)):
        received += connection.recv(256)
    return connection


def _send_for_ever(connection: socket.socket) -> None:
    while True:
        connection.send(b"\xc1")


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def test_no_answer_to_a_quick_client_is_lost(daemon: DaemonProcess) -> None:
    """Each request comes soon after the one before is answered, as many as fill every queue."""
    for attempt in range(60):
        with RawPeer(daemon.run_dir) as peer:
            for _ in range(40):
                reply = peer.ask(FreeDevice(peer.next_seq(), LeaseRef(peer.lease.epoch, 10**6), 1))
                assert isinstance(reply, ErrorReply)
                assert reply.code == "unknown_lease"
                pause = time.perf_counter() + (attempt % 30) * 5e-6
                while time.perf_counter() < pause:
                    pass
