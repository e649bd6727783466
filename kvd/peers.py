"""Who is at the other end of a socket, as the kernel says it: what a message says of its sender counts for nothing."""

from __future__ import annotations

import os
import select
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import PermissionRefused

_SO_PEERPIDFD = 77
"""Linux 6.5 and later: the process that connected, even if its pid is another's by now."""

_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True)
class Peer:
    """A process, as it was when it connected."""

    uid: int
    gid: int
    pid: int

    def __str__(self) -> str:
        return f"process {self.pid} of uid {self.uid}"


def peer_of_address(address: str) -> Peer:
    """The peer of a ZeroMQ ipc message, from its ``Peer-Address``: ``host:uid:gid:pid``, filled in by the kernel."""
    _, uid, gid, pid = address.rsplit(":", 3)
    return Peer(int(uid), int(gid), int(pid))


def peer_of_socket(connection: socket.socket) -> Peer:
    """The peer of a UNIX socket."""
    size = _CREDENTIALS.size
    pid, uid, gid = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return Peer(uid, gid, pid)


class Process:
    """A process that cannot be mistaken for a later one with its pid. ``start`` is in clock ticks since boot.

    Raises `PermissionRefused` if the process is gone already or not visible from here. Close it after use.
    """

    def __init__(self, connection: socket.socket, peer: Peer) -> None:
        if peer.pid <= 0:
            raise PermissionRefused(
                f"the peer, of uid {peer.uid}, is in a pid namespace that cannot be seen from here", uid=peer.uid
            )
        self.pidfd = _open_pidfd(connection, peer)
        try:
            self.start = _start_time(peer)
            if self.is_dead():
                raise _gone(peer)
        except PermissionRefused:
            self.close()
            raise

    @classmethod
    def _living(cls, pid: int, start: int) -> Process | None:
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return None
        process = cls.__new__(cls)
        process.pidfd = pidfd
        process.start = start
        try:
            if _start_time(Peer(-1, -1, pid)) == start and not process.is_dead():
                return process
        except PermissionRefused:
            pass  # it ended just now
        process.close()
        return None

    def is_dead(self) -> bool:
        """Whether the process has ended; it may still be a zombie, which holds no memory."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        os.close(self.pidfd)


def living_process(uid: int, pid: int, start: int) -> tuple[Peer, Process] | None:
    """The process of this pid that started then, as a peer of this uid; None if it has ended. The caller closes it."""
    process = Process._living(pid, start)
    if process is None:
        return None
    try:
        return Peer(uid, Path(f"/proc/{pid}").stat().st_gid, pid), process
    except OSError:  # it ended just now
        process.close()
        return None


def _open_pidfd(connection: socket.socket, peer: Peer) -> int:
    try:
        pidfd = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        # An older kernel. A pid that was reused between connect and this call would be taken for the peer.
        try:
            return os.pidfd_open(peer.pid)
        except OSError:
            raise _gone(peer) from None
    os.set_inheritable(pidfd, False)
    return pidfd


def _start_time(peer: Peer) -> int:
    """Field 22 of ``/proc/<pid>/stat``; the command's name before it ends at the last ``)``, whatever is in it."""
    try:
        stat = Path(f"/proc/{peer.pid}/stat").read_text(errors="replace")
    except OSError:
        raise _gone(peer) from None
    return int(stat.rpartition(")")[2].split()[19])


def _gone(peer: Peer) -> PermissionRefused:
    return PermissionRefused(f"{peer} has ended already", pid=peer.pid, uid=peer.uid)
