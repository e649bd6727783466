"""Tokens of messages by a checkpoint's own template, and text of tokens that come one by one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from compute.serve.text import Answer, ByteText, CheckpointText, NumberText, text_of
from protocol.errors import InvalidValue

TEMPLATE = (
    "<bos>{% for message in messages %}<turn>{{ message['role'] }}\n{{ message['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)
SPECIAL = ["<bos>", "<turn>", "<end>"]


def checkpoint(folder: Path, template: str = TEMPLATE) -> CheckpointText:
    """A tokenizer whose other tokens are bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 258]}))
    text = text_of([folder], 259)
    assert isinstance(text, CheckpointText)
    return text


def written(text: CheckpointText | ByteText, tokens: list[int]) -> str:
    decode = text.decoder()
    return "".join(decode(token) for token in tokens)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> CheckpointText:
    return checkpoint(tmp_path_factory.mktemp("checkpoint"))


def test_a_conversation_that_goes_on_is_the_whole_conversation(text: CheckpointText) -> None:
    """First messages, the answer and the next ones, in their turn, are what the template makes of all of them."""
    first, answer = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi ö?"}], "Yes, né."
    following = [{"role": "user", "content": "Why"}]
    end = text.more_text("<end>")
    assert end == [258]
    whole = text.of_messages([*first, {"role": "assistant", "content": answer}, *following])
    begun = text.of_messages(first) + text.more_text(answer)
    assert begun + text.next_messages(following) == whole
    assert text.stop_tokens == {257, 258}
    assert text.next_messages(following)[0] in text.stop_tokens, "an answer that has ended is not ended twice"


def test_text_comes_when_characters_are_whole(text: CheckpointText) -> None:
    for some in (text, ByteText()):
        tokens = some.more_text("aö€😀z")
        decode = some.decoder()
        assert [decode(token) for token in tokens] == ["a", "", "ö", "", "", "€", "", "", "", "😀", "z"]
    assert written(text, [*text.more_text("a"), 258, *text.more_text("b")]) == "ab", "special tokens are not text"
    assert "�" in written(ByteText(), [0xFF, 0x41])


def test_what_is_no_tokenizer_or_no_conversation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=r"a folder with a tokenizer.json, for 259 tokens"):
        text_of([tmp_path], 259)
    assert isinstance(text_of([tmp_path], 256), ByteText)
    with pytest.raises(InvalidValue, match="a folder with a tokenizer"):
        CheckpointText(tmp_path)
    refusing = checkpoint(tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidValue, match="roles must alternate"):
        refusing.of_messages([{"role": "user", "content": "x"}])
    forgetful = checkpoint(tmp_path, "{{ messages[-1]['content'] }}")
    with pytest.raises(InvalidValue, match="one that repeats them"):
        forgetful.next_messages([{"role": "user", "content": "x"}])


def test_text_of_numbers_is_tokens() -> None:
    text = NumberText()
    assert text.of_text("5 17\n154879") == text.more_text("5 17 154879") == [5, 17, 154879]
    assert "".join(map(text.decoder(), [5, 17])) == "5 17 "
    for word in ("x", "-1", "1.5"):
        with pytest.raises(InvalidValue, match="numbers of tokens"):
            text.of_text(f"5 {word}")
    with pytest.raises(InvalidValue, match="no tokenizer"):
        text.of_messages([{"role": "user", "content": "5"}])


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("content", ["{", "[]", '{"eos_token_id": "<end>"}', '{"eos_token_id": [1, null]}'])
def test_settings_of_a_checkpoint_that_cannot_be_right_are_refused(tmp_path: Path, name: str, content: str) -> None:
    checkpoint(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(InvalidValue, match=r"tokenizer|eos_token_id") as caught:
        CheckpointText(tmp_path)
    assert str(tmp_path) in caught.value.message


def test_a_checkpoint_need_not_say_what_ends_a_text(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    assert CheckpointText(tmp_path).stop_tokens == {258}


def answered(pieces: list[str], stops: list[str]) -> tuple[list[str], bool]:
    """What of ``pieces`` is given out after each, and whether a stop came."""
    answer = Answer(lambda token: pieces[token], stops)
    given = []
    for token in range(len(pieces)):
        stopped = answer.take(token)
        given.append(answer.drain())
        if stopped:
            return given, True
    return [*given, answer.drain(last=True)], False


@pytest.mark.parametrize(
    ("pieces", "stops", "given", "stopped"),
    [
        (["ab", "cd"], [], ["ab", "cd", ""], False),
        (["ab", "cd"], ["bc"], ["a", ""], True),
        (["ab", "xcd"], ["bc"], ["a", "bxcd", ""], False),
        (["ab", ""], ["bc"], ["a", "", "b"], False),
        (["aSTOPb"], ["STOP"], ["a"], True),
        (["x", "aab"], ["aab", "ab"], ["x", ""], True),
        (["aa", "b"], ["ab", "aab"], ["", ""], True),
        (["a", "a", "a", "b"], ["aab"], ["", "", "a", ""], True),
    ],
)
def test_text_that_may_be_a_stop_is_held_back(
    pieces: list[str], stops: list[str], given: list[str], stopped: bool
) -> None:
    assert answered(pieces, stops) == (given, stopped)
