"""The socket that file descriptors travel over. Each of its connections is a lease.

SOCK_SEQPACKET: a packet is a message, so one that is not understood is refused and the next one read. Nothing here
waits for a client: one that does not read its replies loses its connection, as does one that opens no lease in time.
"""

from __future__ import annotations

import os
import socket
import time
from functools import partial
from pathlib import Path

from kvd.leases import Lease
from kvd.logs import Log
from kvd.loop import Loop
from kvd.node import Node
from kvd.peers import Peer, Process, peer_of_socket
from kvd.report_block import require_report_version
from kvd.version import require_version
from protocol import codec
from protocol.errors import BadMessage, KvdError, OsFailure
from protocol.lease_report import REPORT_BYTES
from protocol.messages import (
    Claim,
    Claimed,
    ErrorReply,
    HandleReply,
    HandOver,
    LeaseOpen,
    LeaseOpened,
    OpenReport,
    ReportOpened,
)

BACKLOG = 64
SPARE_CONNECTIONS = 64
"""Connections that may wait without a lease, beside those that have one."""

IDLE_LIMIT_S = 10.0
"""How long a connection may go without opening its lease."""


class HandleSocket:
    """Listens at ``path``, a path that is free. The limit of leases bounds the connections."""

    def __init__(self, path: Path, loop: Loop, node: Node, log: Log) -> None:
        self._loop = loop
        self._node = node
        self._log = log
        self._connections: set[_Connection] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            self._listener.bind(str(path))
            self._listener.listen(BACKLOG)
        except OSError as error:
            self._listener.close()
            raise OsFailure(f"handle socket {path}: {error.strerror}", path=str(path)) from error
        loop.watch(self._listener.fileno(), self._accept)
        node.revoke = self._revoke
        node.retire = self._retire
        self._inherited = [lease for lease in node.leases if lease.is_inherited]
        for lease in self._inherited:
            loop.watch(lease.process.pidfd, partial(self._inherited_ended, lease))

    def drop_idle(self) -> None:
        """End connections that have not become leases in time, and inherited leases that have nothing any more."""
        for lease in list(self._inherited):
            if self._node.is_done(lease):
                self._inherited_ended(lease)
        for connection in list(self._connections):
            if connection.lease is None and time.monotonic() - connection.since > IDLE_LIMIT_S:
                self._drop(connection)

    def close(self) -> None:
        """Stop listening and end all connections. The leases are not touched."""
        self._loop.forget(self._listener.fileno())
        self._listener.close()
        for connection in list(self._connections):
            self._loop.forget(connection.socket.fileno())
            connection.socket.close()
        self._connections.clear()

    def _inherited_ended(self, lease: Lease) -> None:
        """The process is dead, or has taken all its sessions back."""
        self._inherited.remove(lease)
        self._loop.forget(lease.process.pidfd)
        self._node.lease_ended(lease)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            self._log.warning("connection not accepted", reason=error.strerror)
            return
        limit = self._node.leases.limit + SPARE_CONNECTIONS
        if len(self._connections) >= limit:
            self._log.warning("connection refused: too many", limit=limit)
            accepted.close()
            return
        accepted.setblocking(False)
        connection = _Connection(accepted)
        self._connections.add(connection)
        self._loop.watch(accepted.fileno(), lambda: self._readable(connection))

    def _readable(self, connection: _Connection) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(connection.socket, codec.HANDLE_LIMIT + 1, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        if not data:
            self._drop(connection)
            return
        opened: list[int] = []
        try:
            reply, opened = self._answer(connection, data, fds)
        except KvdError as error:
            self._log.info("handle request refused", peer=str(connection.peer), code=error.code, reason=error.message)
            self._node.counters.requests["handle", error.code] += 1
            reply = ErrorReply(0, error.code, error.message, error.facts)
        except Exception as error:  # noqa: BLE001 - whatever one packet does, the daemon goes on
            self._log.exception("handle request failed", peer=str(connection.peer))
            reply = ErrorReply(0, KvdError.code, f"the daemon failed: {type(error).__name__}; its log says more", {})
        finally:
            _close_all(fds)  # before the reply: whoever has read it finds nothing of what was sent still open here
        try:
            self._send(connection, reply, *opened)
        finally:
            _close_all(opened)

    def _answer(self, connection: _Connection, data: bytes, fds: list[int]) -> tuple[HandleReply, list[int]]:
        """The reply, and the descriptors that go with it, which the caller closes."""
        request = codec.decode_handle_request(data)
        lease = connection.lease
        match request:
            case LeaseOpen() if lease is None:
                require_version(request.major, request.minor)
                opened = self._node.open_lease(connection.peer, connection.process(), request.client)
                connection.lease = opened
                self._loop.watch(opened.process.pidfd, lambda: self._process_ended(connection, opened))
                return LeaseOpened(self._node.leases.reference(opened)), []
            case Claim() if lease is not None:
                grant = lease.redeem(request.grant)
                return Claimed(grant.handle), [grant.open()]
            case HandOver() if lease is not None:
                if not fds:
                    raise BadMessage("device memory is handed over with its descriptor; none came")
                if request.session:
                    self._node.sessions.require_holder(lease, request.session)
                return self._node.device_memory.hand_over(lease, request, fds[0]), []
            case OpenReport() if lease is not None:
                require_report_version(request.version)
                return ReportOpened(REPORT_BYTES), [lease.open_report()]
            case LeaseOpen():
                raise BadMessage("this connection is a lease already")
            case Claim() | HandOver() | OpenReport():
                raise BadMessage("a connection's first packet opens its lease")

    def _send(self, connection: _Connection, reply: HandleReply, *fds: int) -> None:
        """Send, or end the connection if the client does not take it. Does nothing after the end."""
        if connection not in self._connections:
            return
        try:
            socket.send_fds(connection.socket, [codec.encode_handle(reply)], list(fds))
        except OSError as error:
            self._log.warning("client takes no replies", peer=str(connection.peer), reason=error.strerror)
            self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        """End the connection, and with it the lease, which stays watched in quarantine if its process lives."""
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        self._loop.forget(connection.socket.fileno())
        connection.socket.close()
        lease = connection.lease
        if lease is not None:
            pidfd = lease.process.pidfd
            if self._node.lease_disconnected(lease):
                self._loop.forget(pidfd)

    def _revoke(self, lease: Lease) -> None:
        """End the lease's connection, if it still has one, as if its client had."""
        for connection in list(self._connections):
            if connection.lease is lease:
                self._log.warning("lease revoked", lease=lease.number, peer=str(lease.peer))
                self._drop(connection)

    def _retire(self, lease: Lease) -> None:
        """The lease, whose connection has ended, holds nothing any more, so it ends although its process lives."""
        if lease in self._inherited:
            self._inherited_ended(lease)
        else:
            self._loop.forget(lease.process.pidfd)
            self._node.lease_ended(lease)

    def _process_ended(self, connection: _Connection, lease: Lease) -> None:
        """The process is dead, whatever else still holds the connection open."""
        self._loop.forget(lease.process.pidfd)
        self._node.lease_ended(lease)
        connection.lease = None
        self._drop(connection)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


class _Connection:
    def __init__(self, accepted: socket.socket) -> None:
        self.socket = accepted
        self.peer: Peer = peer_of_socket(accepted)
        self.since = time.monotonic()
        self.lease: Lease | None = None

    def process(self) -> Process:
        return Process(self.socket, self.peer)
