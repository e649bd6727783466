"""A peer that can send anything: raw bytes on either socket, and typed messages without the checks of a client."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import zmq

from protocol import codec
from protocol.handles import LeaseRef
from protocol.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Claim,
    Claimed,
    ErrorReply,
    HandleReply,
    HandleRequest,
    Hello,
    LeaseOpen,
    LeaseOpened,
    Reply,
    Request,
)
from protocol.stats import NodeStats

TIMEOUT_MS = 10_000
FINGERPRINT = bytes(range(32))


class RawPeer:
    """A connection to each socket. ``greet`` says hello and opens a lease first."""

    def __init__(self, run_dir: Path, *, greet: bool = True) -> None:
        self._context = zmq.Context()
        self.control = self._context.socket(zmq.DEALER)
        self.control.setsockopt(zmq.LINGER, 0)
        self.control.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        self.control.connect(f"ipc://{run_dir}/kvd.sock")
        self.handles = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.handles.settimeout(TIMEOUT_MS / 1000)
        self.handles.connect(f"{run_dir}/handles.sock")
        self.seq = 0
        self.lease = LeaseRef(0, 0)
        if greet:
            reply = self.ask(Hello(self.next_seq(), PROTOCOL_MAJOR, PROTOCOL_MINOR, "raw"))
            assert not isinstance(reply, ErrorReply), reply
            opened, _ = self.ask_handle(LeaseOpen(PROTOCOL_MAJOR, PROTOCOL_MINOR, "raw"))
            assert isinstance(opened, LeaseOpened), opened
            self.lease = opened.lease

    def next_seq(self) -> int:
        self.seq += 1
        return self.seq

    def send(self, *frames: bytes) -> Reply:
        """Send frames as they are; returns the reply."""
        self.control.send_multipart(frames)
        return codec.decode_reply(self.control.recv())

    def ask(self, request: Request) -> Reply:
        return self.send(msgspec.msgpack.encode(request))

    def send_packet(self, data: bytes) -> tuple[HandleReply, list[int]]:
        """Send a packet as it is; returns the reply and the descriptors that came with it."""
        self.handles.send(data)
        reply, fds, _, _ = socket.recv_fds(self.handles, codec.HANDLE_LIMIT, 4)
        assert reply, "the daemon ended the connection"
        return codec.decode_handle_reply(reply), fds

    def ask_handle(self, request: HandleRequest) -> tuple[HandleReply, list[int]]:
        return self.send_packet(msgspec.msgpack.encode(request))

    def claim(self, grant: int) -> int:
        """The descriptor of a grant."""
        reply, fds = self.ask_handle(Claim(grant))
        assert isinstance(reply, Claimed), reply
        assert len(fds) == 1
        return fds[0]

    def is_dropped(self) -> bool:
        """Whether the daemon has ended the handle connection."""
        return self.handles.recv(1) == b""

    def close(self) -> None:
        self.control.close()
        self._context.term()
        self.handles.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def books(stats: NodeStats) -> NodeStats:
    """Everything but what changes by itself: times and, with them, the ages of leases."""
    leases = [msgspec.structs.replace(lease, age_s=0.0) for lease in stats.leases]
    return msgspec.structs.replace(stats, uptime_s=0.0, leases=leases)


def read_fd(fd: int, nbytes: int) -> bytes:
    """The start of what ``fd`` opens; closes it."""
    try:
        return os.pread(fd, nbytes, 0)
    finally:
        os.close(fd)
