"""Questions to a running daemon, for the commands of this package. Workers use ``compute.client``."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import zmq

from kvd.config import CONTROL_SOCKET
from protocol import codec
from protocol.errors import BadMessage, DaemonUnavailable, PermissionRefused, error_from
from protocol.messages import PROTOCOL_MAJOR, PROTOCOL_MINOR, ErrorReply, Hello, Reply, Request, Stat, Stats, Welcome
from protocol.stats import NodeStats

_ReplyT = TypeVar("_ReplyT", bound=Reply)


class Control:
    """A connection to the daemon in ``run_dir``, by which requests that need no lease are asked one at a time.

    Raises `DaemonUnavailable` if none answers in ``timeout_s``, `PermissionRefused` if this process may not ask it, or
    the typed error that it answers with.
    """

    def __init__(self, run_dir: Path, client: str, timeout_s: float = 5.0) -> None:
        self._path = run_dir / CONTROL_SOCKET
        self._timeout_s = timeout_s
        _require_listener(self._path)
        self._seq = 0
        self._context = zmq.Context()
        self._connection = self._context.socket(zmq.DEALER)
        self._connection.setsockopt(zmq.LINGER, 0)
        self._connection.connect(f"ipc://{self._path}")
        try:
            self.ask(lambda seq: Hello(seq, PROTOCOL_MAJOR, PROTOCOL_MINOR, client), Welcome)
        except BaseException:
            self.close()
            raise

    def ask(self, build: Callable[[int], Request], expected: type[_ReplyT], timeout_s: float | None = None) -> _ReplyT:
        """The reply to the request that ``build`` makes of a sequence number."""
        self._connection.setsockopt(zmq.RCVTIMEO, round((timeout_s or self._timeout_s) * 1000))
        self._seq += 1
        request = build(self._seq)
        self._connection.send(codec.encode(request))
        try:
            reply = codec.decode_reply(self._connection.recv())
        except zmq.Again:
            raise DaemonUnavailable(f"no answer from {self._path} in time", socket=str(self._path)) from None
        if isinstance(reply, ErrorReply):
            raise error_from(reply.code, reply.message, reply.facts)
        if not isinstance(reply, expected):
            raise BadMessage(f"the daemon answered {type(request).__name__} with {type(reply).__name__}")
        return reply

    def stats(self) -> NodeStats:
        """What the daemon holds."""
        return self.ask(Stat, Stats).stats

    def close(self) -> None:
        self._connection.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def ask_stats(run_dir: Path, timeout_s: float = 5.0) -> NodeStats:
    """The statistics of the daemon in ``run_dir``; raises what `Control` raises."""
    with Control(run_dir, "kvd-stat", timeout_s) as control:
        return control.stats()


def _require_listener(path: Path) -> None:
    """Raise unless somebody listens at ``path``: ZeroMQ would go on trying for ever."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except PermissionError as error:
            raise PermissionRefused(f"{path}: {error.strerror}", socket=str(path)) from None
        except OSError as error:
            raise DaemonUnavailable(f"no daemon at {path}: {error.strerror or error}", socket=str(path)) from None
