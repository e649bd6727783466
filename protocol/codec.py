"""Bytes to messages and back, within limits. msgpack maps with a ``type`` field; unknown fields are refused."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from protocol.errors import BadMessage, MessageTooLarge
from protocol.messages import HandleReply, HandleRequest, Reply, Request

CONTROL_LIMIT = 1 << 20
"""Largest control message, in bytes. ZeroMQ drops a peer whose frame header claims more."""

HANDLE_LIMIT = 4096
"""Largest packet on the handle socket, in bytes."""

_T = TypeVar("_T")

_ENCODER = msgspec.msgpack.Encoder()
_REQUEST: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_REPLY: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_HANDLE_REQUEST: msgspec.msgpack.Decoder[HandleRequest] = msgspec.msgpack.Decoder(HandleRequest)
_HANDLE_REPLY: msgspec.msgpack.Decoder[HandleReply] = msgspec.msgpack.Decoder(HandleReply)


def encode(message: Request | Reply, limit: int = CONTROL_LIMIT) -> bytes:
    """The bytes of a control message; raises `MessageTooLarge` above ``limit``."""
    return _encode(message, limit)


def encode_handle(packet: HandleRequest | HandleReply) -> bytes:
    """The bytes of a packet of the handle socket; raises `MessageTooLarge` above `HANDLE_LIMIT`."""
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


def _encode(message: Any, limit: int) -> bytes:
    data = _ENCODER.encode(message)
    if len(data) > limit:
        raise MessageTooLarge(len(data), limit)
    return data


def _decode(decoder: msgspec.msgpack.Decoder[_T], data: bytes | memoryview, limit: int) -> _T:
    if len(data) > limit:
        raise MessageTooLarge(len(data), limit)
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadMessage(f"not a message of this protocol: {error}") from None
