"""The client of the node's daemon: one lease, and the verbs that it may speak.

The lease is the connection to the handle socket; it ends when the connection closes or the process dies. What the
verbs mean is in ``protocol/SPEC.md``; how memory behind a handle is mapped is in ``compute.attach``.
"""

from __future__ import annotations

import mmap
import os
import socket
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import zmq

from protocol import codec, messages
from protocol.errors import BadMessage, DaemonUnavailable, InvalidValue, error_from
from protocol.handles import DeviceMemory, DevicePurpose, LeaseRef, SharedMemory
from protocol.lease_report import REPORT_VERSION, ReportWriter
from protocol.stats import NodeStats

CONTROL_SOCKET = "kvd.sock"
HANDLE_SOCKET = "handles.sock"

_ReplyT = TypeVar("_ReplyT", bound=messages.Reply)


class Asked:
    """A request that was sent, and its reply when it has come, which is dropped if nobody has this any more."""

    def __init__(self, request: messages.Request) -> None:
        self.request = request
        self.reply: messages.Reply | None = None


class Client:
    """A lease on the node's daemon. Not for use from several threads at once.

    Raises `DaemonUnavailable` where nothing answers at ``run_dir`` within ``timeout_s``. Every verb raises the typed
    error that the daemon replied with; after `DaemonUnavailable` the client is of no use before `reconnect`.

    ``report`` is where this process tells the daemon of its token gaps and of memory that is not the daemon's; None if
    the daemon takes no reports. Its stores may come from any thread.
    """

    def __init__(self, run_dir: Path | str, *, name: str = "worker", timeout_s: float = 30.0) -> None:
        self.run_dir = Path(run_dir)
        self._name = name
        self._timeout_s = timeout_s
        self._connect()

    def reconnect(self) -> None:
        """Have another lease, on the daemon that answers now. The earlier one is of no more use.

        Raises `DaemonUnavailable` where none answers; it can be tried again.
        """
        self.close()
        self._connect()

    def _connect(self) -> None:
        name = self._name
        self.report: ReportWriter | None = None
        self._seq = 0
        self._awaited: weakref.WeakValueDictionary[int, Asked] = weakref.WeakValueDictionary()
        self._handles = self._connect_handles(self.run_dir / HANDLE_SOCKET)
        _lease_connections.add(self._handles)
        try:
            self.lease: LeaseRef = self._open_lease(name)
            self._context = zmq.Context(io_threads=1)
            self._control = self._context.socket(zmq.DEALER)
        except BaseException:
            self._handles.close()
            raise
        self._control.setsockopt(zmq.LINGER, 0)
        self._control.connect(f"ipc://{self.run_dir / CONTROL_SOCKET}")
        self._poller = zmq.Poller()
        self._poller.register(self._control, zmq.POLLIN)
        self._poller.register(self._handles.fileno(), zmq.POLLIN)  # nothing comes unasked but the end of the lease
        try:
            self.welcome = self.ask(
                lambda seq: messages.Hello(seq, messages.PROTOCOL_MAJOR, messages.PROTOCOL_MINOR, name),
                messages.Welcome,
            )
            self.report = self._open_report() if self.welcome.minor >= 2 else None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the lease. Unmap device memory before: the daemon keeps it in quarantine while this process lives."""
        self.report = None  # and with it its mapping
        self._control.close()
        self._context.term()
        self._handles.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # Verbs

    def stat(self) -> NodeStats:
        """Every tier, lease and session at this moment."""
        return self.ask(lambda seq: messages.Stat(seq), messages.Stats).stats

    def create_session(
        self,
        name: str,
        *,
        fingerprint: bytes,
        encoding: str,
        page_bytes: int,
        token_capacity: int,
        commit_bytes: int = 0,
    ) -> messages.SessionOpened:
        """Make a session without pages, held by this lease."""
        return self.ask(
            lambda seq: messages.CreateSession(
                seq, self.lease, name, fingerprint, encoding, page_bytes, token_capacity, commit_bytes
            ),
            messages.SessionOpened,
        )

    def open_session(
        self, name: str, *, fingerprint: bytes, encoding: str, lazy: bool = False
    ) -> messages.SessionOpened:
        """Take over a stored session of this uid. With ``lazy`` the caller fetches the pages that are absent."""
        return self.ask(
            lambda seq: messages.OpenSession(seq, self.lease, name, fingerprint, encoding, lazy), messages.SessionOpened
        )

    def view_session(self, session: int, generation: int) -> messages.SessionOpened:
        """Have a session that another lease of this uid holds, to be read only."""
        return self.ask(lambda seq: messages.ViewSession(seq, self.lease, session, generation), messages.SessionOpened)

    def fetch_pages(
        self, session: int, generation: int, first_page: int, pages: int, *, timeout_s: float = 600.0
    ) -> None:
        """Return when the bytes of these pages have come from disk and held. Raises `SavedRefused` for one that did
        not; the others are not affected.
        """
        self.ask(
            lambda seq: messages.FetchPages(seq, self.lease, session, generation, first_page, pages),
            messages.Done,
            timeout_s,
        )

    def reattach_session(self, name: str) -> messages.SessionOpened:
        """Hold on to a session of this process, after the daemon was started again."""
        return self.ask(lambda seq: messages.ReattachSession(seq, self.lease, name), messages.SessionOpened)

    def extend_session(self, session: int, generation: int, pages: int) -> messages.PagesChanged:
        """Add pages at the session's end."""
        return self.ask(
            lambda seq: messages.ExtendSession(seq, self.lease, session, generation, pages), messages.PagesChanged
        )

    def truncate_session(self, session: int, generation: int, pages: int) -> messages.PagesChanged:
        """Keep the first ``pages`` pages. No copy to a page that goes may be in flight."""
        return self.ask(
            lambda seq: messages.TruncateSession(seq, self.lease, session, generation, pages), messages.PagesChanged
        )

    def detach_session(self, session: int, generation: int) -> None:
        """Let go of the session; it stays stored."""
        self.ask(lambda seq: messages.DetachSession(seq, self.lease, session, generation), messages.Done)

    def close_session(self, session: int, generation: int) -> None:
        """End the session. No copy to one of its pages may be in flight."""
        self.ask(lambda seq: messages.CloseSession(seq, self.lease, session, generation), messages.Done)

    def fork_session(self, session: int, generation: int, rows: int, name: str) -> messages.SessionOpened:
        """Make a session of the first ``rows`` committed rows of another, held by this lease. They share pages."""
        return self.ask(
            lambda seq: messages.ForkSession(seq, self.lease, session, generation, rows, name), messages.SessionOpened
        )

    def find_prefix(self, *, fingerprint: bytes, encoding: str, digests: list[bytes]) -> messages.PrefixFound:
        """The session of this uid that has most of the pages of a chain of hashes (`protocol.prefix`)."""
        return self.ask(
            lambda seq: messages.FindPrefix(seq, self.lease, fingerprint, encoding, digests), messages.PrefixFound
        )

    def save_session(self, name: str, *, timeout_s: float = 600.0) -> messages.Saved:
        """Write a session of this uid to disk. One that this process holds is at its barrier."""
        return self.ask(lambda seq: messages.SaveSession(seq, name), messages.Saved, timeout_s)

    def restore_session(
        self, name: str, *, fingerprint: bytes, encoding: str, lazy: bool = False, timeout_s: float = 600.0
    ) -> messages.Saved:
        """Make a stored session of a saved one, of the same model and encoding; with ``lazy`` its pages come later."""
        return self.ask(
            lambda seq: messages.RestoreSession(seq, name, fingerprint, encoding, lazy), messages.Saved, timeout_s
        )

    def allocate_device(self, device: str, nbytes: int, purpose: DevicePurpose, session: int = 0) -> DeviceMemory:
        """Take VRAM of ``device`` (a UUID of `Welcome.devices`)."""
        return self.ask(
            lambda seq: messages.AllocateDevice(seq, self.lease, device, nbytes, purpose, session),
            messages.DeviceAllocated,
        ).memory

    def free_device(self, handle: int) -> None:
        """Give VRAM back, after unmapping it."""
        self.ask(lambda seq: messages.FreeDevice(seq, self.lease, handle), messages.Done)

    def claim(self, memory: SharedMemory | DeviceMemory) -> int:
        """Present the grant of ``memory``; returns a file descriptor that the caller owns."""
        self._send_packet(messages.Claim(memory.grant))
        reply, fds = self._receive_packet()
        if not isinstance(reply, messages.Claimed) or reply.handle != memory.handle or len(fds) != 1:
            for fd in fds:
                os.close(fd)
            raise BadMessage(f"the daemon answered a claim of handle {memory.handle} with {reply}")
        return fds[0]

    def hand_over(
        self, fd: int, device: str, requested: int, committed: int, purpose: DevicePurpose, session: int = 0
    ) -> int:
        """Give the daemon VRAM of an earlier run of it, by the descriptor that was claimed; returns its new handle."""
        packet = messages.HandOver(device, requested, committed, purpose, session)
        try:
            socket.send_fds(self._handles, [codec.encode_handle(packet)], [fd])
        except OSError as error:
            raise self._lease_lost(error) from None
        reply, _ = self._receive_packet()
        if not isinstance(reply, messages.HandedOver):
            raise BadMessage(f"the daemon answered the handing over of device memory with {reply}")
        return reply.handle

    # Transport

    def ask(
        self, build: Callable[[int], messages.Request], expected: type[_ReplyT], timeout_s: float | None = None
    ) -> _ReplyT:
        """The reply to the request that ``build`` makes of a sequence number."""
        return self.wait(self.begin(build), expected, timeout_s)

    def begin(self, build: Callable[[int], messages.Request]) -> Asked:
        """Send a request whose reply is waited for later, by `wait`; others may be asked meanwhile."""
        asked = Asked(self.tell(build))
        self._awaited[asked.request.seq] = asked
        return asked

    def wait(self, asked: Asked, expected: type[_ReplyT], timeout_s: float | None = None) -> _ReplyT:
        """The reply to a request, once. Raises `DaemonUnavailable` for one from before `reconnect`."""
        if self._awaited.get(asked.request.seq) is not asked:
            raise self._lease_lost(None)
        try:
            while asked.reply is None:
                self._receive(timeout_s or self._timeout_s)
        finally:
            del self._awaited[asked.request.seq]
        if isinstance(asked.reply, messages.ErrorReply):
            raise error_from(asked.reply.code, asked.reply.message, asked.reply.facts)
        if not isinstance(asked.reply, expected):
            name, reply = type(asked.request).__name__, type(asked.reply).__name__
            raise BadMessage(f"the daemon answered {name} with {reply}")
        return asked.reply

    def tell(self, build: Callable[[int], messages.Request]) -> messages.Request:
        """Send the request that ``build`` makes of a sequence number, and return it; nobody waits for the reply."""
        self._seq += 1
        request = build(self._seq)
        self._control.send(codec.encode(request))
        return request

    def _receive(self, timeout_s: float) -> None:
        """Take a reply in, which is dropped if nobody waits for it."""
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        if self._handles.fileno() in ready and self._control not in ready:
            raise self._lease_lost(None)
        if not ready:
            path = self.run_dir / CONTROL_SOCKET
            raise DaemonUnavailable(f"no answer from {path} within {timeout_s:g} s", socket=str(path))
        reply = codec.decode_reply(self._control.recv())
        asked = self._awaited.get(reply.seq)
        if isinstance(reply, messages.ErrorReply) and (asked is not None or not reply.seq):
            if self._handles.fileno() in ready:  # it is of the next daemon, which ZeroMQ has connected to meanwhile
                raise self._lease_lost(None)
            if asked is None:
                raise error_from(reply.code, reply.message, reply.facts)
        if asked is not None:
            asked.reply = reply

    def _connect_handles(self, path: Path) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(self._timeout_s)
        try:
            connection.connect(str(path))
        except OSError as error:
            connection.close()
            if len(os.fsencode(path)) > 107:
                raise InvalidValue("socket path", str(path), "at most 107 bytes") from None
            raise DaemonUnavailable(f"no daemon at {path}: {error.strerror or error}", socket=str(path)) from None
        return connection

    def _open_lease(self, name: str) -> LeaseRef:
        self._send_packet(messages.LeaseOpen(messages.PROTOCOL_MAJOR, messages.PROTOCOL_MINOR, name))
        reply, _ = self._receive_packet()
        if not isinstance(reply, messages.LeaseOpened):
            raise BadMessage(f"the daemon answered the opening of a lease with {reply}")
        return reply.lease

    def _open_report(self) -> ReportWriter:
        self._send_packet(messages.OpenReport(REPORT_VERSION))
        reply, fds = self._receive_packet()
        try:
            if not isinstance(reply, messages.ReportOpened) or len(fds) != 1:
                raise BadMessage(f"the daemon answered the opening of a report with {reply}")
            mapped = mmap.mmap(fds[0], reply.nbytes)
        finally:
            for fd in fds:
                os.close(fd)
        mapped.madvise(mmap.MADV_DONTFORK)
        return ReportWriter(memoryview(mapped))

    def _send_packet(self, packet: messages.HandleRequest) -> None:
        try:
            self._handles.send(codec.encode_handle(packet))
        except OSError as error:
            raise self._lease_lost(error) from None

    def _receive_packet(self) -> tuple[messages.HandleReply, list[int]]:
        try:
            data, fds, _, _ = socket.recv_fds(self._handles, codec.HANDLE_LIMIT, 1)
        except OSError as error:
            raise self._lease_lost(error) from None
        if not data:
            raise self._lease_lost(None)
        for fd in fds:
            os.set_inheritable(fd, False)
        reply = codec.decode_handle_reply(data)
        if isinstance(reply, messages.ErrorReply):
            raise error_from(reply.code, reply.message, reply.facts)
        return reply, fds

    def _lease_lost(self, error: OSError | None) -> DaemonUnavailable:
        path = self.run_dir / HANDLE_SOCKET
        return DaemonUnavailable(f"the lease's connection to {path} ended: {error or 'closed'}", socket=str(path))


_lease_connections: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_leases() -> None:
    for connection in list(_lease_connections):
        connection.close()


# A forked child must not keep the lease of its parent.
os.register_at_fork(after_in_child=_close_leases)
