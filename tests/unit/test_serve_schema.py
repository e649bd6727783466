"""Bodies of requests: what is refused is named, and nothing is left out in silence."""

from __future__ import annotations

import json
from typing import Any

import pytest

from compute.decode.sampler import Sampling
from compute.serve.errors import BadBody
from compute.serve.replies import error_body, status_of
from compute.serve.schema import Body, ChatBody, CompletionBody, decode
from protocol.errors import KvdError

USER = {"role": "user", "content": "Hello"}


def read(body: dict[str, Any] | bytes) -> Body:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    if b'"messages"' not in data:
        return decode(data, CompletionBody)
    chat = decode(data, ChatBody)
    chat.conversation()
    return chat


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": "x", "surprise": 1}, "surprise", "unknown field"),
        ({"messages": [USER, USER | {"surprise": 1}]}, "messages[1].surprise", "unknown field"),
        (
            {"messages": [USER | {"content": [{"type": "text", "text": "x", "more": 1}]}]},
            "messages[0].content[0].more",
            "",
        ),
        ({"messages": [USER | {"content": [{"type": "audio"}]}]}, "messages[0].content[0].type", "'audio'"),
        ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].role", "'tool'"),
        ({"messages": [USER | {"name": "Ann"}]}, "messages[0].name", "'Ann'; allowed: null"),
        ({"messages": [USER | {"tool_calls": [{"id": 1}]}]}, "messages[0].tool_calls", "not served"),
        ({"messages": [{"content": "x"}]}, "messages[0]", "`role`"),
        ({"prompt": "x", "stream_options": {"include": 1}}, "stream_options.include", "unknown field"),
        ({"prompt": "x", "max_tokens": "many"}, "max_tokens", "Expected `int"),
        ({"prompt": "x", "logprobs": 1}, "logprobs", "logprobs is 1; allowed: null: not served"),
        ({"prompt": "x", "best_of": 2}, "best_of", "allowed: 1; others are not served"),
        (b"{", "body", "truncated"),
    ],
)
def test_what_is_wrong_is_named(body: dict[str, Any] | bytes, param: str, words: str) -> None:
    with pytest.raises(KvdError) as caught:
        read(body)
    assert status_of(caught.value) == 400
    error = error_body(caught.value)["error"]
    assert error["param"] == param
    assert param in error["message"]
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("digits", [20, 400, 5000])
@pytest.mark.parametrize("field", ["max_tokens", "seed", "prompt", "n", "temperature", "logit_bias"])
def test_no_number_is_too_long_to_be_refused(field: str, digits: int) -> None:
    """Nobody adds it, prints it or sends it on."""
    number = "9" * digits
    value = {"prompt": f"[{number}]", "logit_bias": f'{{"1": {number}}}'}.get(field, number)
    prompt = "" if field == "prompt" else '"prompt": "x", '
    with pytest.raises(KvdError) as caught:
        read(f'{{{prompt}"{field}": {value}}}'.encode()).sampling(0)
    assert status_of(caught.value) == 400
    json.dumps(error_body(caught.value), allow_nan=False)


def test_lists_in_lists_are_refused() -> None:
    with pytest.raises(BadBody, match="recursion"):
        read(b'{"prompt": "x", "user": ' + b"[" * 100_000)


def test_an_answer_may_be_sent_back_as_it_came() -> None:
    """With the fields that OpenAI's own client writes, which are empty."""
    empty = dict.fromkeys(("name", "refusal", "audio", "function_call", "tool_calls")) | {"annotations": []}
    answer = {"role": "assistant", "content": "Yes."} | empty
    body = {"messages": [USER, answer], "user": "a", "metadata": {"b": "c"}, "stream_options": {"include_usage": True}}
    chat = read(body)
    assert isinstance(chat, ChatBody)
    assert chat.conversation() == [USER, {"role": "assistant", "content": "Yes."}]


def test_a_request_that_says_nothing_is_sampled_as_openais_are() -> None:
    assert read({"prompt": "x"}).sampling(7) == Sampling(1.0, 1.0, 7)
    assert read({"prompt": "x", "temperature": 0, "top_p": 0.5, "seed": 3}).sampling(7) == Sampling(0.0, 0.5, 3)


def test_either_name_limits_a_chats_tokens() -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        chat = read({"messages": [USER], name: 5})
        assert isinstance(chat, ChatBody)
        assert chat.most_tokens == 5
