"""Bytes to messages and back, within limits. msgpack maps with a ``type`` field; unknown fields are refused.

Whatever the bytes, decoding raises nothing but `BadMessage` and `MessageTooLarge`. An error reply can always be sent:
what would not fit or cannot be written is cut or turned to text.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from protocol.errors import BadMessage, Fact, MessageTooLarge
from protocol.messages import ErrorReply, HandleReply, HandleRequest, Reply, Request

CONTROL_LIMIT = 1 << 20
"""Largest control message, in bytes. ZeroMQ drops a peer whose frame header claims more."""

HANDLE_LIMIT = 4096
"""Largest packet on the handle socket, in bytes."""

_REASON_LIMIT = 200
_FACTS_IN_LIST = 16

_T = TypeVar("_T")

_ENCODER = msgspec.msgpack.Encoder()
_REQUEST: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_REPLY: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_HANDLE_REQUEST: msgspec.msgpack.Decoder[HandleRequest] = msgspec.msgpack.Decoder(HandleRequest)
_HANDLE_REPLY: msgspec.msgpack.Decoder[HandleReply] = msgspec.msgpack.Decoder(HandleReply)


def encode(message: Request | Reply, limit: int = CONTROL_LIMIT) -> bytes:
    """The bytes of a control message.

    Raises `MessageTooLarge` above ``limit``, and `BadMessage` for an integer beyond 64 bits or a lone surrogate; never
    for an `ErrorReply`.
    """
    return _encode(message, limit)


def encode_handle(packet: HandleRequest | HandleReply) -> bytes:
    """The bytes of a packet of the handle socket; raises as `encode` does, with `HANDLE_LIMIT`."""
    return _encode(packet, HANDLE_LIMIT)


def decode_request(data: bytes | memoryview) -> Request:
    """A request; raises `BadMessage` or `MessageTooLarge`."""
    return _decode(_REQUEST, data, CONTROL_LIMIT)


def decode_reply(data: bytes | memoryview) -> Reply:
    """A reply; raises `BadMessage` or `MessageTooLarge`."""
    return _decode(_REPLY, data, CONTROL_LIMIT)


def decode_handle_request(data: bytes) -> HandleRequest:
    """What a client sent on the handle socket; raises `BadMessage` or `MessageTooLarge`."""
    return _decode(_HANDLE_REQUEST, data, HANDLE_LIMIT)


def decode_handle_reply(data: bytes) -> HandleReply:
    """What the daemon sent on the handle socket; raises `BadMessage` or `MessageTooLarge`."""
    return _decode(_HANDLE_REPLY, data, HANDLE_LIMIT)


def _encode(message: Request | Reply | HandleRequest | HandleReply, limit: int) -> bytes:
    try:
        return _encode_exactly(message, limit)
    except (BadMessage, MessageTooLarge):
        if not isinstance(message, ErrorReply):
            raise
        return _encode_exactly(_shortened(message, limit), limit)


def _encode_exactly(message: Request | Reply | HandleRequest | HandleReply, limit: int) -> bytes:
    try:
        data = _ENCODER.encode(message)
    except (OverflowError, UnicodeEncodeError) as error:
        raise BadMessage(f"a {type(message).__name__} cannot be written: {_reason(error)}") from None
    if len(data) > limit:
        raise MessageTooLarge(len(data), limit)
    return data


def _shortened(reply: ErrorReply, limit: int) -> ErrorReply:
    """``reply`` with its message in a quarter of ``limit`` and each of its facts in a sixteenth."""

    def fact(value: Fact) -> Fact:
        if isinstance(value, str):
            return _cut(value, limit // 16)
        if isinstance(value, list):
            return [_cut(item, limit // 16 // _FACTS_IN_LIST) for item in value[:_FACTS_IN_LIST]]
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
            return _cut(hex(value), limit // 16)
        return value

    facts = {name: fact(value) for name, value in reply.facts.items()}
    return ErrorReply(reply.seq, reply.code, _cut(reply.message, limit // 4), facts)


def _cut(text: str, nbytes: int) -> str:
    return text.encode("utf-8", "backslashreplace")[:nbytes].decode("utf-8", "ignore")


def _reason(error: Exception) -> str:
    """What went wrong, cut: a parser's message repeats the sender's words."""
    return str(error)[:_REASON_LIMIT]


def _decode(decoder: msgspec.msgpack.Decoder[_T], data: bytes | memoryview, limit: int) -> _T:
    if len(data) > limit:
        raise MessageTooLarge(len(data), limit)
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadMessage(f"not a message of this protocol: {_reason(error)}") from None
