"""The control socket's listener, which takes no more connections than there are file descriptors for.

libzmq accepts on a thread of its own, and ends the process when it finds no descriptor free; to unbind it would end the
connections that there are. So it gets a duplicate of a listening socket that is kept here. Before descriptors run out
that duplicate is made to stand for a socket that nobody can connect to, where libzmq finds nothing to accept, and who
connects meanwhile is turned away from here. Connections that there are go on.
"""

from __future__ import annotations

import os
import resource
import socket
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvd.logs import Log
from kvd.loop import Loop
from protocol.errors import OsFailure

BACKLOG = 128
HANDSHAKE_LIMIT_MS = 5000
"""How long a connection may take to say in ZMTP who it is."""

LOOK_AFTER = 16
"""Connections that come or go between two counts of descriptors."""

COUNT_INTERVAL_S = 1.0


class ControlListener:
    """Listens at ``path``, a path that is free, for the ROUTER ``router``; raises `OsFailure`.

    ``files_needed`` descriptors are the daemon's own: of those that the limit leaves beside them, connections get half.
    The other half is for those that libzmq accepts before its duplicate is changed.
    """

    def __init__(self, router: zmq.Socket[bytes], path: Path, files_needed: int, loop: Loop, log: Log) -> None:
        self._router = router
        self.files_needed = files_needed
        self._loop = loop
        self._log = log
        self._changes = 0
        self.is_open = True
        self._nobody = _bound(path)
        path.unlink()  # before it listens: nobody can ever connect to it
        self._nobody.listen()
        self._socket = _bound(path)
        self._socket.listen(BACKLOG)
        self._duplicate = os.dup(self._socket.fileno())
        try:
            router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_LIMIT_MS)
            router.setsockopt(zmq.USE_FD, self._duplicate)
            self._events = router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
            router.bind(f"ipc://{path}")
        except zmq.ZMQError as error:
            for listening in (self._socket, self._nobody):
                listening.close()
            raise OsFailure(f"control socket {path}: {error.strerror}", path=str(path)) from error
        loop.watch(self._events, self._look)
        loop.every(COUNT_INTERVAL_S, self._count)

    @property
    def most_files(self) -> int:
        """Open descriptors of this process above which no connection is accepted."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return soft - max(0, soft - self.files_needed) // 2

    def close(self) -> None:
        """Listen no more. The ROUTER is closed afterwards, and with it the duplicate."""
        self._loop.forget(self._events)
        if not self.is_open:
            self._open()  # libzmq asks the kernel to forget the very socket that it was given
        self._router.disable_monitor()
        self._events.close()
        self._socket.close()
        self._nobody.close()

    def _look(self) -> None:
        """Read what has happened to connections, and count whenever enough has: more may come than can be read."""
        for _ in range(BACKLOG):
            try:
                event = recv_monitor_message(self._events, zmq.NOBLOCK)["event"]
            except zmq.Again:
                return
            self._changes += 1
            if self._changes >= LOOK_AFTER and (event == zmq.EVENT_ACCEPTED) == self.is_open:
                self._count()

    def _count(self) -> None:
        """Count this process's descriptors, and close or open the door."""
        self._changes = 0
        files, most = len(os.listdir("/proc/self/fd")), self.most_files
        if self.is_open and files > most:
            os.dup2(self._nobody.fileno(), self._duplicate, inheritable=False)
            self.is_open = False
            self._loop.watch(self._socket.fileno(), self._turn_away)
            self._log.warning("connections are turned away until some have gone", files=files, limit=most)
        elif not self.is_open and files <= most - LOOK_AFTER:
            self._open()
            self._log.info("connections are accepted again", files=files, limit=most)

    def _open(self) -> None:
        self._loop.forget(self._socket.fileno())
        os.dup2(self._socket.fileno(), self._duplicate, inheritable=False)
        self.is_open = True

    def _turn_away(self) -> None:
        """End what waits to be accepted."""
        for _ in range(BACKLOG):
            try:
                accepted, _address = self._socket.accept()
            except BlockingIOError:
                return
            accepted.close()


def _bound(path: Path) -> socket.socket:
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        bound.bind(str(path))
    except OSError as error:
        bound.close()
        raise OsFailure(f"control socket {path}: {error.strerror}", path=str(path)) from error
    return bound
