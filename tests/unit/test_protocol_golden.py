"""Golden bytes: what each message looks like on the wire, and each state block in memory.

The bytes in ``golden/`` are the protocol; a change of one of them is a change of version.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from protocol import codec, messages
from protocol.session_state import SessionHeader, WorkerBlockLayout, pack_daemon_copy, unpack_daemon_copy

GOLDEN = Path(__file__).parent / "golden"
MESSAGES: dict[str, dict[str, Any]] = json.loads((GOLDEN / "messages.json").read_text())
BLOCKS: dict[str, str] = json.loads((GOLDEN / "blocks.json").read_text())

SOCKETS: dict[str, tuple[Any, Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    "control_request": (messages.Request, codec.encode, codec.decode_request),
    "control_reply": (messages.Reply, codec.encode, codec.decode_reply),
    "handle_request": (messages.HandleRequest, codec.encode_handle, codec.decode_handle_request),
    "handle_reply": (messages.HandleReply, codec.encode_handle, codec.decode_handle_reply),
}

HEADER = SessionHeader(
    epoch=7,
    session=5,
    generation=2,
    uid=1000,
    holder_pid=4243,
    holder_start=987654,
    page_bytes=3_527_168,
    page_stride=3_530_752,
    extent_bytes=1 << 30,
    token_capacity=1_048_576,
    page_count=3,
    commit_bytes=24_576,
    encoding="q8g64",
    fingerprint=bytes(range(32)),
    name="notes",
)
FRAMES = (0x0000000200000001, 0x0000000200000000, 0x0000000100000003)


class MessagePack:
    """An independent reader of the part of MessagePack that the protocol uses; keys stay in their order."""

    _SIZED = {
        0xCC: ">B",
        0xCD: ">H",
        0xCE: ">I",
        0xCF: ">Q",
        0xD0: ">b",
        0xD1: ">h",
        0xD2: ">i",
        0xD3: ">q",
        0xCB: ">d",
    }
    _CONSTANT = {0xC0: None, 0xC2: False, 0xC3: True}

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def _take(self, nbytes: int) -> bytes:
        self.at += nbytes
        assert self.at <= len(self.data)
        return self.data[self.at - nbytes : self.at]

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def read(self) -> Any:
        head = self._take(1)[0]
        if head < 0x80:
            return head
        if head < 0x90:
            return {self.read(): self.read() for _ in range(head & 15)}
        if head < 0xA0:
            return [self.read() for _ in range(head & 15)]
        if head < 0xC0:
            return self._take(head & 31).decode()
        if head >= 0xE0:
            return head - 256
        if head in self._CONSTANT:
            return self._CONSTANT[head]
        if head in self._SIZED:
            return self._number(self._SIZED[head])
        if head == 0xC4:
            return base64.b64encode(self._take(self._number(">B"))).decode()
        if head == 0xD9:
            return self._take(self._number(">B")).decode()
        assert head == 0xDE, hex(head)
        return {self.read(): self.read() for _ in range(self._number(">H"))}


def _types(union: Any) -> dict[str, type]:
    return {cls.__struct_config__.tag: cls for cls in get_args(union)}


def test_every_message_type_has_golden_bytes():
    expected = {(socket, tag) for socket, (union, _, _) in SOCKETS.items() for tag in _types(union)}
    # An error looks the same on both sockets and is kept once.
    expected.remove(("handle_reply", "error"))
    assert {(entry["socket"], tag) for tag, entry in MESSAGES.items()} == expected


@pytest.mark.parametrize("tag", MESSAGES)
def test_golden_message(tag):
    entry = MESSAGES[tag]
    union, encode, decode = SOCKETS[entry["socket"]]
    message: Any = msgspec.convert({"type": tag, **entry["fields"]}, _types(union)[tag])
    golden = bytes.fromhex(entry["hex"])
    assert encode(message).hex() == entry["hex"]
    assert decode(golden) == message


@pytest.mark.parametrize("tag", MESSAGES)
def test_golden_bytes_say_what_their_fields_say(tag):
    entry = MESSAGES[tag]
    reader = MessagePack(bytes.fromhex(entry["hex"]))
    value = reader.read()
    assert reader.at == len(reader.data)
    assert value == {"type": tag, **entry["fields"]}
    assert list(value) == ["type", *entry["fields"]]


def test_an_error_is_the_same_on_both_sockets():
    golden = bytes.fromhex(MESSAGES["error"]["hex"])
    error = codec.decode_handle_reply(golden)
    assert error == codec.decode_reply(golden)
    assert isinstance(error, messages.ErrorReply)
    assert codec.encode_handle(error) == golden


def test_golden_daemon_block():
    block = pack_daemon_copy(HEADER, FRAMES)
    golden = bytes.fromhex(BLOCKS["daemon_header"])
    table = bytes.fromhex(BLOCKS["daemon_page_table"])
    assert block[: len(golden)] == golden
    assert not any(block[len(golden) : 4096])
    assert block[4096:] == table
    assert unpack_daemon_copy(golden.ljust(4096, b"\0") + table) == (HEADER, FRAMES)


def test_golden_worker_block_header():
    layout = WorkerBlockLayout(token_capacity=1_048_576, commit_bytes=24_576)
    assert layout.pack_header(session=5).hex() == BLOCKS["worker_header"]
