"""Which rank is gone: a connection of every rank to rank 0, whose end is all that it ever says.

The transports do not always tell of a dead process: gloo has been seen to wait with a message for one until the
time-out, and what NCCL has enqueued never ends.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import struct
import time
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


GRACE_S = 5.0
"""What is under way when a rank is lost may still end by itself, well or with a better reason, for so long."""

_KEY = "kvd-lifeline"
_GREETING = struct.Struct("<16sI")
"""What the store told, so that nobody else is taken for a rank, and the rank."""
_LOST = struct.Struct("<I")


class Lifeline:
    """The connections of rank ``rank`` of ``world``, which all find each other through ``store``.

    Raises `OSError` where they do not come within ``timeout_s``.
    """

    def __init__(self, store: Store, rank: int, world: int, timeout_s: float) -> None:
        self.lost: Future[int] = Future()
        """Comes to the first rank that is gone; it may have ended in good order."""
        self._rank = rank
        self._closing = False
        self._watcher = Thread(target=self._watch, name="kvd-lifeline", daemon=True)
        self._ends: dict[socket.socket, int] = {}
        """Who is at the other end of each connection."""
        deadline = time.monotonic() + timeout_s
        try:
            if rank == 0 and world > 1:
                self._accept(store, world, deadline)
            elif rank:
                self._connect(store, deadline)
        except BaseException:
            self.close()
            raise
        if self._ends:
            self._watcher.start()

    def close(self) -> None:
        """The others see that."""
        self._closing = True
        for connection in self._ends:
            with suppress(OSError):  # the other end may be gone
                connection.shutdown(socket.SHUT_RDWR)
        if self._watcher.is_alive():  # it is not woken by the end of what is closed already
            self._watcher.join()
        for connection in self._ends:
            connection.close()

    def _accept(self, store: Store, world: int, deadline: float) -> None:
        secret = secrets.token_bytes(16)
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        with socket.create_server(("", 0), family=family, backlog=world, dualstack_ipv6=dual) as server:
            store.set(_KEY, f"{server.getsockname()[1]} {secret.hex()}")
            while len(self._ends) < world - 1:
                server.settimeout(max(deadline - time.monotonic(), 0.001))
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    missing = sorted(set(range(1, world)) - set(self._ends.values()))
                    ranks, port = ", ".join(map(str, missing)), server.getsockname()[1]
                    raise TimeoutError(f"of ranks {ranks} nothing came to port {port} of rank 0") from None
                connection.settimeout(GRACE_S)
                greeting = b""
                with suppress(OSError), connection.makefile("rb") as stream:
                    greeting = stream.read(_GREETING.size)
                said, rank = _GREETING.unpack(greeting) if len(greeting) == _GREETING.size else (b"", 0)
                if secrets.compare_digest(said, secret) and 0 < rank < world:
                    self._ends[connection] = rank
                else:
                    connection.close()

    def _connect(self, store: Store, deadline: float) -> None:
        port, secret = store.get(_KEY).decode().split()
        host, left_s = os.environ["MASTER_ADDR"], max(deadline - time.monotonic(), 0.001)
        try:
            connection = socket.create_connection((host, int(port)), timeout=left_s)
        except OSError as error:
            raise OSError(f"rank 0 is not reached at {host}, port {port}: {error}") from None
        self._ends[connection] = 0
        connection.sendall(_GREETING.pack(bytes.fromhex(secret), self._rank))

    def _watch(self) -> None:
        """Wait for the first end, and say whose it is: after it the ranks are of no more use to each other."""
        with selectors.DefaultSelector() as ends:
            for connection in self._ends:
                connection.setblocking(False)
                ends.register(connection, selectors.EVENT_READ)
            connection = cast("socket.socket", ends.select()[0][0].fileobj)
        if self._closing:
            return
        lost = self._ends[connection]
        if self._rank == 0:
            for other in self._ends:
                with suppress(OSError):
                    other.send(_LOST.pack(lost))
        else:
            with suppress(OSError, struct.error):  # where nothing is said, rank 0 is the one
                (lost,) = _LOST.unpack(connection.recv(_LOST.size))
        self.lost.set_result(lost)
