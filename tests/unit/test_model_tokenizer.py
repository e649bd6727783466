"""Tokens that are bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compute.model import tokenizer
from protocol.errors import InvalidValue


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_text_comes_back(text: str) -> None:
    tokens = tokenizer.encode(text)
    assert bytes(tokens) == text.encode()
    assert tokenizer.decode(tokens) == text


@given(st.binary())
def test_bytes_are_their_own_tokens_and_what_is_not_text_is_marked(data: bytes) -> None:
    tokens = tokenizer.encode(data)
    assert tokens == list(data)
    assert tokenizer.decode(tokens) == data.decode(errors="replace")


@pytest.mark.parametrize("token", [-1, 256, 2**63])
def test_an_id_that_is_no_byte_is_refused(token: int) -> None:
    with pytest.raises(InvalidValue, match=str(token)):
        tokenizer.decode([65, token])
