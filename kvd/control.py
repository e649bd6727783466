"""A question to a running daemon, for the commands of this package. Workers use ``compute.client``."""

from __future__ import annotations

import socket
from pathlib import Path

import zmq

from kvd.config import CONTROL_SOCKET
from protocol import codec, messages
from protocol.errors import BadMessage, DaemonUnavailable, PermissionRefused, error_from
from protocol.messages import PROTOCOL_MAJOR, PROTOCOL_MINOR, ErrorReply, Hello, Reply, Request, Stat
from protocol.stats import NodeStats


def ask_stats(run_dir: Path, timeout_s: float = 5.0) -> NodeStats:
    """The statistics of the daemon in ``run_dir``.

    Raises `DaemonUnavailable` if none answers in time, `PermissionRefused` if this process may not ask it, or the typed
    error that it answers with.
    """
    path = run_dir / CONTROL_SOCKET
    _require_listener(path)
    with zmq.Context() as context, context.socket(zmq.DEALER) as connection:
        connection.setsockopt(zmq.LINGER, 0)
        connection.connect(f"ipc://{path}")
        connection.setsockopt(zmq.RCVTIMEO, round(timeout_s * 1000))
        _ask(connection, Hello(1, PROTOCOL_MAJOR, PROTOCOL_MINOR, "kvd-stat"), path)
        reply = _ask(connection, Stat(2), path)
    if not isinstance(reply, messages.Stats):
        raise BadMessage(f"the daemon answered a stat request with {type(reply).__name__}")
    return reply.stats


def _require_listener(path: Path) -> None:
    """Raise unless somebody listens at ``path``: ZeroMQ would go on trying for ever."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except PermissionError as error:
            raise PermissionRefused(f"{path}: {error.strerror}", socket=str(path)) from None
        except OSError as error:
            raise DaemonUnavailable(f"no daemon at {path}: {error.strerror or error}", socket=str(path)) from None


def _ask(connection: zmq.Socket[bytes], request: Request, path: Path) -> Reply:
    connection.send(codec.encode(request))
    try:
        reply = codec.decode_reply(connection.recv())
    except zmq.Again:
        raise DaemonUnavailable(f"no answer from {path} in time", socket=str(path)) from None
    if isinstance(reply, ErrorReply):
        raise error_from(reply.code, reply.message, reply.facts)
    return reply
