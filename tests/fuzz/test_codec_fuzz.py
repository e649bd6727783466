"""Bytes from anyone: decoding raises `BadMessage` or `MessageTooLarge`, or gives a message, and nothing else."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protocol import codec, messages
from protocol.codec import CONTROL_LIMIT, HANDLE_LIMIT
from protocol.errors import BadMessage, Fact, MessageTooLarge, error_from
from protocol.stats import NodeStats, StallStats

GOLDEN = json.loads((Path(__file__).parents[1] / "unit" / "golden" / "messages.json").read_text())
VALID = [bytes.fromhex(entry["hex"]) for entry in GOLDEN.values()]

DECODERS: dict[str, tuple[Callable[[bytes], Any], Callable[[Any], bytes], Any, int]] = {
    "control_request": (codec.decode_request, codec.encode, messages.Request, CONTROL_LIMIT),
    "control_reply": (codec.decode_reply, codec.encode, messages.Reply, CONTROL_LIMIT),
    "handle_request": (codec.decode_handle_request, codec.encode_handle, messages.HandleRequest, HANDLE_LIMIT),
    "handle_reply": (codec.decode_handle_reply, codec.encode_handle, messages.HandleReply, HANDLE_LIMIT),
}
INT_MIN, INT_MAX = -(1 << 63), (1 << 64) - 1

# A msgpack encoder that, unlike the codec's, writes anything: wrong types, any keys, extension types.
_PACK = msgspec.msgpack.Encoder().encode


def decode_everywhere(data: bytes) -> None:
    """Every decoder takes ``data``; what one accepts comes back the same from its own bytes."""
    for decode, encode, union, _ in DECODERS.values():
        try:
            message = decode(data)
        except (BadMessage, MessageTooLarge) as error:
            # What is refused can be said so on either socket, whatever the sender put into it.
            refusal = messages.ErrorReply(0, error.code, error.message, error.facts)
            assert codec.decode_handle_reply(codec.encode_handle(refusal)) == refusal
        else:
            assert type(message) in get_args(union)
            # Bytes, not values: a NaN among the facts is not equal to itself.
            again = encode(message)
            assert encode(decode(again)) == again


@given(st.binary(max_size=200))
def test_random_bytes(data):
    decode_everywhere(data)


@given(st.sampled_from(VALID), st.data())
def test_mutated_messages(valid, data):
    mutated = bytearray(valid)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(mutated)))
        match data.draw(st.sampled_from(["flip", "insert", "delete", "cut"])):
            case "flip" if at < len(mutated):
                mutated[at] ^= data.draw(st.integers(1, 255))
            case "insert":
                mutated[at:at] = data.draw(st.binary(min_size=1, max_size=9))
            case "delete":
                del mutated[at : at + data.draw(st.integers(1, 8))]
            case "cut":
                del mutated[at:]
    decode_everywhere(bytes(mutated))


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(INT_MIN, INT_MAX), st.floats(), st.text(max_size=5), st.binary(max_size=5)
)
ANYTHING = st.recursive(
    st.one_of(SCALARS, st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=5))),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)


@given(st.sampled_from(list(GOLDEN.items())), st.data())
def test_fields_of_wrong_types_missing_and_unknown(entry, data):
    tag, fields = entry[0], dict(entry[1]["fields"])
    if "fingerprint" in fields:
        fields["fingerprint"] = bytes(32)
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from([*fields, "type", "kind", "extra"]))
        if data.draw(st.booleans()):
            fields[name] = data.draw(ANYTHING)
        else:
            fields.pop(name, None)
    items = list({"type": tag, **fields}.items())
    decode_everywhere(_PACK(dict(data.draw(st.permutations(items)))))


HEADS = [bytes([code]) for code in range(256)]
HEADS += [
    bytes([code]) + claim for code in (0xC6, 0xC9, 0xDB, 0xDD, 0xDF) for claim in (b"\xff" * 4, b"\x7f\xff\xff\xff")
]


@pytest.mark.parametrize(
    "before",
    [
        b"",
        b"\x81",
        b"\x82\xa3seq",
        b"\x82\xa4type\xa4stat\xa3seq",
        b"\x82\xa4type\xa7welcome\xa7devices",
        b"\x82\xa4type\xa5error\xa5facts",
        b"\x82\xa4type\xa5error\xa5facts\x81\xa1a",
    ],
    ids=bytes.hex,
)
def test_claimed_lengths_beyond_the_data(before):
    for head in HEADS:
        decode_everywhere(before + head)
        decode_everywhere(before + head + b"\0" * 16)


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a", b"\xdc\x00\x01", b"\xdd\x00\x00\x00\x01"], ids=bytes.hex)
@pytest.mark.parametrize(
    "before",
    [
        b"",
        b"\x81",
        b"\x82\xa3seq",
        b"\x82\xa4type\xa4stat\xa3seq",
        b"\x82\xa4type\xa4stat\xa1x",
        b"\x82\xa4type\xa5error\xa5facts\x81\xa1a",
        b"\x82\xa4type\xa5stats\xa5stats\x81\xa1x",
    ],
    ids=bytes.hex,
)
def test_deep_nesting(before, opening):
    for room in (HANDLE_LIMIT, CONTROL_LIMIT):
        decode_everywhere(before + opening * ((room - len(before)) // len(opening)))


@pytest.mark.parametrize(("decode", "limit"), [(entry[0], entry[3]) for entry in DECODERS.values()], ids=DECODERS)
def test_the_limit_of_each_socket(decode, limit):
    with pytest.raises(BadMessage):
        decode(bytes(limit))
    with pytest.raises(MessageTooLarge) as refused:
        decode(bytes(limit + 1))
    assert refused.value.facts == {"size": limit + 1, "limit": limit}


def test_encoding_keeps_the_limits():
    room = CONTROL_LIMIT - len(codec.encode(messages.Hello(1, 1, 0, "x" * 65536))) + 65536
    assert len(codec.encode(messages.Hello(1, 1, 0, "x" * room))) == CONTROL_LIMIT
    with pytest.raises(MessageTooLarge):
        codec.encode(messages.Hello(1, 1, 0, "x" * (room + 1)))
    with pytest.raises(MessageTooLarge):
        codec.encode_handle(messages.LeaseOpen(1, 0, "x" * HANDLE_LIMIT))


@pytest.mark.parametrize(
    "data", [{"type": "x" * 4000}, {"type": "stat", "seq": 1, "é" * 2000: 1}], ids=["type", "field"]
)
def test_a_refusal_does_not_repeat_all_that_was_sent(data):
    with pytest.raises(BadMessage) as refused:
        codec.decode_request(_PACK(data))
    assert len(refused.value.message) < 300


@pytest.mark.parametrize("value", [INT_MIN, -1, 0, INT_MAX])
def test_integers_of_64_bits_pass(value):
    assert codec.decode_request(codec.encode(messages.Stat(value))) == messages.Stat(value)


@pytest.mark.parametrize("value", [INT_MIN - 1, INT_MAX + 1, 1 << 200])
def test_integers_beyond_64_bits_cannot_be_sent(value):
    with pytest.raises(BadMessage, match="Stat"):
        codec.encode(messages.Stat(value))
    with pytest.raises(BadMessage, match="Claim"):
        codec.encode_handle(messages.Claim(value))


def test_a_lone_surrogate_cannot_be_sent():
    with pytest.raises(BadMessage, match="Hello"):
        codec.encode(messages.Hello(1, 1, 0, "\udcff"))


@pytest.mark.parametrize("value", [True, 1.0, "1", None, b"1", [1]])
def test_only_an_integer_is_an_integer(value):
    with pytest.raises(BadMessage, match="seq"):
        codec.decode_request(_PACK({"type": "stat", "seq": value}))


def test_a_field_that_comes_twice():
    assert codec.decode_request(b"\x83\xa4type\xa4stat\xa3seq\x01\xa3seq\x02") == messages.Stat(2)


@pytest.mark.parametrize("socket", DECODERS)
def test_a_message_of_another_socket_is_refused(socket):
    decode, _, union, _ = DECODERS[socket]
    own = {cls.__struct_config__.tag for cls in get_args(union)}
    for tag, entry in GOLDEN.items():
        if tag not in own:
            with pytest.raises(BadMessage, match="type"):
                decode(bytes.fromhex(entry["hex"]))


# Round trips of every type, from the types themselves

st.register_type_strategy(int, st.integers(INT_MIN, INT_MAX))
st.register_type_strategy(float, st.floats(allow_nan=False))
# Its default is not a value but makes one.
st.register_type_strategy(NodeStats, st.builds(NodeStats, stalls=st.lists(st.from_type(StallStats), max_size=3)))


def message_of(union: Any) -> st.SearchStrategy[Any]:
    return st.one_of(*(st.builds(cls) for cls in get_args(union)))


@pytest.mark.parametrize("socket", DECODERS)
def test_round_trip(socket):
    decode, encode, union, _ = DECODERS[socket]

    @given(message_of(union))
    def check(message: Any) -> None:
        data = encode(message)
        assert decode(data) == message
        assert encode(decode(data)) == data

    check()


# Error replies: always sendable

FACTS = st.dictionaries(
    st.sampled_from(["tier", "asked", "free", "capacity", "holders", "value", "allowed", "what"]),
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(INT_MAX, 1 << 4000),
        st.floats(allow_nan=False),
        st.text(st.characters()),
        st.lists(st.text(st.characters()), max_size=40),
        st.integers(1, 100_000).map(lambda size: "é" * size),
        st.integers(1, 2000).map(lambda size: ["長い名前" * 20] * size),
    ),
)


@given(st.integers(0, INT_MAX), st.one_of(st.text(st.characters()), st.integers(1, 600_000).map("é".__mul__)), FACTS)
@example(0, "\ud800" * 500_000, {"value": "\ud800" * 1_000_000, "asked": 1 << 70})
def test_an_error_can_always_be_sent(seq, message, facts):
    reply = messages.ErrorReply(seq, "invalid_value", message, facts)
    for encode, decode, limit in (
        (codec.encode, codec.decode_reply, CONTROL_LIMIT),
        (codec.encode_handle, codec.decode_handle_reply, HANDLE_LIMIT),
    ):
        data = encode(reply)
        assert len(data) <= limit
        sent = decode(data)
        assert isinstance(sent, messages.ErrorReply)
        assert (sent.seq, sent.code, sent.facts.keys()) == (seq, "invalid_value", facts.keys())
        try:
            as_it_is = message.encode()
        except UnicodeEncodeError:
            as_it_is = b""
        if as_it_is and len(as_it_is) <= limit // 4:
            assert sent.message == message
        assert error_from(sent.code, sent.message, sent.facts).exit_status == 64


def test_a_plain_error_is_sent_as_it_is():
    facts: dict[str, Fact] = {"tier": "host", "asked": INT_MAX, "holders": ["notes"] * 40}
    reply = messages.ErrorReply(1, "out_of_capacity", "x" * 1000, facts)
    assert codec.decode_handle_reply(codec.encode_handle(reply)) == reply


def test_a_struct_of_the_wire_is_what_the_fuzz_reads():
    """The packer of this file and the codec write the same bytes, so that a mutation starts from the real thing."""
    assert (
        _PACK({"type": "stat", "seq": 300})
        == codec.encode(messages.Stat(300))
        == b"\x82\xa4type\xa4stat\xa3seq" + (b"\xcd" + struct.pack(">H", 300))
    )
