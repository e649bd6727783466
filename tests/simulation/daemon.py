"""The real daemon without its sockets and its process: requests and packets go in, replies come out, in one thread.

Processes are simulated: a pid is alive until the simulation says otherwise, and the daemon hears of it when it is told.
"""

from __future__ import annotations

import itertools
import os
import traceback
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvd.config import Config
from kvd.handle_socket import HandleSocket
from kvd.node import Node
from kvd.peers import Peer
from kvd.server import ControlServer
from protocol import codec
from protocol.errors import KvdError
from protocol.messages import ErrorReply, HandleReply, HandleRequest, Reply, Request
from tests.simulation.system import Killed, StepPool

_numbers = itertools.count(1 << 40)


@dataclass
class SimulatedProcess:
    """A worker's process, as the kernel would know it."""

    peer: Peer
    start: int
    alive: bool = True


class ProcessHandle:
    """Stands in for `kvd.peers.Process`."""

    def __init__(self, process: SimulatedProcess) -> None:
        self._process = process
        self.start = process.start
        self.pidfd = next(_numbers)

    def is_dead(self) -> bool:
        return not self._process.alive

    def close(self) -> None:
        pass


class Processes(dict[int, SimulatedProcess]):
    """All processes by pid."""

    def living(self, uid: int, pid: int, start: int) -> tuple[Peer, ProcessHandle] | None:
        process = self.get(pid)
        if process is None or not process.alive or process.start != start:
            return None
        return Peer(uid, process.peer.gid, pid), ProcessHandle(process)


class Loop:
    """Stands in for `kvd.loop.Loop`: calls back when it is told to."""

    def __init__(self) -> None:
        self._callbacks: dict[Any, Callable[[], None]] = {}

    def watch(self, source: Any, callback: Callable[[], None]) -> None:
        assert source not in self._callbacks, f"{source} is watched twice"
        self._callbacks[source] = callback

    def forget(self, source: Any) -> None:
        del self._callbacks[source]

    def every(self, seconds: float, callback: Callable[[], None]) -> None:
        pass

    def ready(self, source: Any) -> None:
        """Something has happened to ``source``, if anybody wants to know."""
        if callback := self._callbacks.get(source):
            callback()


class Log:
    """Keeps what must never be logged, and counts warnings."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.warnings: Counter[str] = Counter()

    def info(self, *_arguments: Any, **_facts: Any) -> None:
        pass

    def warning(self, event: str, **_facts: Any) -> None:
        self.warnings[event] += 1

    def error(self, event: str, **facts: Any) -> None:
        if event != "session not saved":
            self.failures.append(f"{event}: {facts!r}")
            if isinstance(cause := facts.get("exc_info"), BaseException):
                self.failures += traceback.format_exception(cause)

    def exception(self, event: str, **facts: Any) -> None:
        self.failures.append(f"{event}: {facts!r}")


class Connection:
    """A connection to the handle socket, and the end of it that the daemon has."""

    def __init__(self, process: SimulatedProcess) -> None:
        self._process = process
        self._number = next(_numbers)
        self.socket = self
        self.peer = process.peer
        self.since = 0.0
        self.lease: Any = None
        self.is_closed = False

    def fileno(self) -> int:
        return self._number

    def close(self) -> None:
        self.is_closed = True

    def process(self) -> ProcessHandle:
        return ProcessHandle(self._process)


class _Control(ControlServer):
    """The control server without its socket: what it sends is kept."""

    def __init__(self, node: Node, log: Any) -> None:
        self._node = node
        self._log = log
        self._handle_socket = Path("handles")
        self._connections = OrderedDict()
        self.sent: dict[tuple[bytes, int], Reply] = {}

    def _send(self, identity: bytes, answer: bytes) -> None:
        reply = codec.decode_reply(answer)
        self.sent[identity, reply.seq] = reply


class SimulatedDaemon:
    """One run of the daemon, from its start to `close` or its death.

    Raises what starting raises. ``log.failures`` is what no run may ever log.
    """

    def __init__(self, config: Config, prefix: str) -> None:
        any_log: Any = Log()
        loop: Any = Loop()
        self.log: Log = any_log
        self.loop: Loop = loop
        self.node = Node(config, prefix, any_log, lambda _done, _total: None)
        pool: Any = self.node.jobs._threads
        self.steps: StepPool = pool
        self._control = _Control(self.node, any_log)
        path = config.handle_socket
        path.unlink(missing_ok=True)
        self.handles = HandleSocket(path, loop, self.node, any_log)

    @property
    def epoch(self) -> int:
        return self.node.leases.epoch

    # The control socket

    def ask(self, identity: bytes, peer: Peer, request: Request) -> Reply | None:
        """The reply, or None if a job will give it: see `answers`."""
        data = self._control._answer(identity, peer, [codec.encode(request)])
        self.resume()
        if data is None:
            return self._control.sent.pop((identity, request.seq), None)
        return codec.decode_reply(data)

    def run_step(self, index: int) -> None:
        """Do one step of a job, and all that follows in the loop."""
        self.steps.run_next(index)
        self.resume()

    def resume(self) -> None:
        """Go on with jobs whose steps have ended, or that have what they waited for."""
        while not self.node.jobs._ended.empty():
            self.node.jobs.resume()

    def answers(self) -> Iterator[tuple[tuple[bytes, int], Reply]]:
        """What jobs have answered since: identity and sequence number of the request, and the reply."""
        while self._control.sent:
            key = next(iter(self._control.sent))
            yield key, self._control.sent.pop(key)

    # The handle socket

    def connect(self, connection: Connection) -> None:
        daemon_side: Any = connection
        self.handles._connections.add(daemon_side)
        self.loop.watch(connection.fileno(), lambda: self.handles._drop(daemon_side))

    def send(self, connection: Connection, packet: HandleRequest, fds: list[int]) -> tuple[HandleReply, list[int]]:
        """The reply to a packet, and descriptors that the caller closes."""
        daemon_side: Any = connection
        try:
            return self.handles._answer(daemon_side, codec.encode_handle(packet), fds)
        except KvdError as error:
            return ErrorReply(0, error.code, error.message, error.facts), []

    def hang_up(self, connection: Connection) -> None:
        """The client's end is closed."""
        self.loop.ready(connection.fileno())

    # The end

    def close(self) -> None:
        """As a daemon ends that has drained."""
        self.handles.close()
        self.node.close()


def bury(keep: set[int], daemon: SimulatedDaemon | None) -> None:
    """After a daemon's death, or a start that failed: the kernel closes all descriptors but those in ``keep``."""
    if daemon is not None:
        daemon.handles._listener.detach()
        for job in list(daemon.node.jobs._under_way):  # before their descriptors' numbers are others'
            with suppress(Killed):
                job.close()
    for fd in open_files() - keep:
        os.close(fd)


def open_files() -> set[int]:
    """This process's descriptors, without the one that listed them."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            os.fstat(int(name))
            found.add(int(name))
    return found
