"""Frames that are nearly messages, by a generator that knows the protocol, and a peer that sends them to a daemon."""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from protocol import codec
from protocol.errors import KvdError
from protocol.messages import OperatorRequest, ReportOpened
from tests.blackbox.raw import RawPeer

GOLDEN: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "unit" / "golden" / "messages.json").read_text()
)
_PACK = msgspec.msgpack.Encoder().encode
PEERS = 8
"""Connections, each with one frame under way: replies that a peer is slow to fetch may be dropped."""

EDGES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, -(1 << 63), (1 << 63) - 1, (1 << 64) - 1, 0.5, float("nan"), float("inf")),
    *("", "\x00", "x" * 65, "../../etc/passwd", "\N{SNOWMAN}" * 300, b"", bytes(32), b"\xff" * 4000),
    *([], [[]], {}, {"": ""}, [0] * 500, msgspec.msgpack.Ext(5, b"x"), {"epoch": -1, "number": 1}),
)
"""Values that are wrong nearly everywhere."""


class Generator:
    """Malformed frames for either socket, the same for the same ``seed``."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def frames(self, socket_name: str, count: int) -> Iterator[bytes]:
        """``count`` frames made of the messages that ``socket_name`` carries, none of which an operator's request."""
        messages = [
            ({"type": tag, **entry["fields"]}, bytes.fromhex(entry["hex"]))
            for tag, entry in GOLDEN.items()
            if entry["socket"] == socket_name
        ]
        changes = (self._field, self._shape, self._flip, self._cut, self._splice, self._noise)
        made = 0
        while made < count:
            fields, data = self._random.choice(messages)
            frame = self._random.choice(changes)(dict(fields), data)
            if len(frame) <= codec.HANDLE_LIMIT and not _is_operators(frame):
                made += 1
                yield frame

    def _field(self, fields: dict[str, Any], _: bytes) -> bytes:
        """One or two values that do not belong there."""
        for _again in range(self._random.randint(1, 2)):
            fields[self._random.choice(list(fields))] = self._random.choice(EDGES)
        return _PACK(fields)

    def _shape(self, fields: dict[str, Any], _: bytes) -> bytes:
        """A field too few, too many, twice, or everything in a list."""
        name = self._random.choice(list(fields))
        match self._random.randrange(4):
            case 0:
                del fields[name]
            case 1:
                fields[name + "_"] = self._random.choice(EDGES)
            case 2:
                twice = [part for item in [*fields.items(), (name, 7)] for part in item]
                return bytes([0x80 | min(15, len(fields) + 1)]) + b"".join(_PACK(part) for part in twice)
            case 3:
                return _PACK([fields] * self._random.randint(0, 3))
        return _PACK(fields)

    def _flip(self, _: dict[str, Any], data: bytes) -> bytes:
        changed = bytearray(data)
        for _again in range(self._random.randint(1, 4)):
            changed[self._random.randrange(len(changed))] ^= 1 << self._random.randrange(8)
        return bytes(changed)

    def _cut(self, _: dict[str, Any], data: bytes) -> bytes:
        return data[: self._random.randrange(len(data))]

    def _splice(self, _: dict[str, Any], data: bytes) -> bytes:
        """Lengths that lie: a header of a string, a list or a map amid the message."""
        at = self._random.randrange(len(data))
        header = self._random.choice(
            (b"\xdb\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdf\x7f\xff\xff\xff", b"\xc9")
        )
        return data[:at] + header + data[at:]

    def _noise(self, _: dict[str, Any], data: bytes) -> bytes:
        nested = self._random.choice((b"\x91", b"\x81", b"\xc1"))
        return self._random.choice((self._random.randbytes(len(data)), nested * self._random.randint(1, 4000)))


def bombard(run_dir: Path, seed: int, count: int) -> int:
    """Send ``count`` malformed frames, a quarter of them to the handle socket; returns how many were refused.

    Every one is answered, and by an answer that can be read.
    """
    generator = Generator(seed)
    refused = 0
    with ExitStack() as stack:
        peers = [stack.enter_context(RawPeer(run_dir)) for _ in range(PEERS)]
        frames = generator.frames("control_request", count - count // 4)
        while asked := [(peer, frame) for peer, frame in zip(peers, frames, strict=False)]:
            for peer, frame in asked:
                peer.control.send(frame)
            for peer, _ in asked:
                refused += _is_refusal(codec.decode_reply(peer.control.recv()))
        peer = peers[0]
        for frame in generator.frames("handle_request", count // 4):
            if not frame:
                refused += 1  # an empty packet reads as the end of the connection, and is not sent
                continue
            peer.handles.send(frame)
            reply, descriptors, _, _ = socket.recv_fds(peer.handles, codec.HANDLE_LIMIT, 1)
            for descriptor in descriptors:
                os.close(descriptor)
            answer = codec.decode_handle_reply(reply)
            # One that was changed into a whole request for the report block is answered with it.
            assert len(descriptors) == isinstance(answer, ReportOpened)
            refused += _is_refusal(answer)
    return refused


def _is_refusal(reply: object) -> bool:
    return type(reply).__name__ == "ErrorReply"


def _is_operators(frame: bytes) -> bool:
    """Whether the frame is, after all, a request that could end the daemon: tests run as root."""
    try:
        return isinstance(codec.decode_request(frame), OperatorRequest)
    except KvdError:
        return False
