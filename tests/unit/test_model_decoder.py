"""The whole decoder: how a text is divided into passes changes no bit, and bad input is refused before any change."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compute.kernels.state import LENGTH
from compute.model.decoder import Decoder
from compute.model.weights import random_weights
from protocol.errors import InvalidValue
from protocol.layout import F32, Q8G64, Encoding
from protocol.model import DEMO
from tests.resident_history import ResidentHistory

CONFIG = replace(DEMO, index_topk=32, n_group=2, topk_group=1)
TOKENS = 300
WEIGHTS = random_weights(CONFIG, 3)


@pytest.fixture(scope="module", params=[Q8G64, F32], ids=lambda encoding: encoding.name)
def encoding(request: pytest.FixtureRequest) -> Encoding:
    chosen: Encoding = request.param
    return chosen


@pytest.fixture(scope="module")
def decoder(encoding: Encoding) -> Decoder:
    return Decoder(CONFIG, WEIGHTS, encoding)


@pytest.fixture(scope="module")
def text() -> Tensor:
    return torch.randint(0, 256, (TOKENS,), generator=torch.Generator().manual_seed(1))


def run(decoder: Decoder, encoding: Encoding, text: Tensor, cuts: list[int]) -> Tensor:
    """Hidden states of ``text``, computed in passes that end at ``cuts``."""
    history = ResidentHistory(CONFIG, encoding, TOKENS)
    parts = [
        decoder.forward(text[start:end], torch.arange(start, end), history)
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)
    ]
    return torch.cat(parts)


@pytest.mark.parametrize(
    "cuts",
    [
        [256],
        [16, 272],
        [1, 2, 6, 22, 278],
        list(range(4, TOKENS, 4)),
        list(range(31, TOKENS, 31)),
        [200, *range(201, 240)],
    ],
    ids=lambda cuts: f"{len(cuts) + 1} passes",
)
def test_every_row_has_the_same_bits_however_the_text_is_divided(
    decoder: Decoder, encoding: Encoding, text: Tensor, cuts: list[int]
) -> None:
    assert torch.equal(run(decoder, encoding, text, cuts), run(decoder, encoding, text, []))


class Recorder(ResidentHistory):
    """Keeps the last selection of each group."""

    def select(self, group: int, query: Tensor, weights: Tensor, positions: Tensor) -> Tensor:
        selection = super().select(group, query, weights, positions)
        self.selected = {**getattr(self, "selected", {}), group: selection}
        return selection


@pytest.mark.parametrize("position", ["selected", "not selected"])
def test_one_wrong_bit_is_noticed_where_it_is_read(
    decoder: Decoder, encoding: Encoding, text: Tensor, position: str
) -> None:
    """A negative control: a bit of a row in one layer changes what follows if, and only if, the row is selected."""
    last, before = torch.tensor([TOKENS - 1]), torch.arange(TOKENS - 1)
    history = Recorder(CONFIG, encoding, TOKENS)
    decoder.forward(text[:-1], before, history)
    right = decoder.forward(text[-1:], last, history)
    group, chosen = 2, set(history.selected[2][0].tolist())
    candidates = [place for place in before.tolist() if (place in chosen) == (position == "selected")]
    place = candidates[len(candidates) // 2]
    offset = history.format.row_offset(group, place % 64, 1)
    address = (history.page_map.page_address[place // 64] + offset)[None]
    row = history.memory.read(address, encoding.rows.row_bytes)
    row[0, 2] ^= 64  # half a mantissa, or 64 of 127 steps
    history.memory.write(address, row)
    assert torch.equal(decoder.forward(text[-1:], last, history), right) == (position == "not selected")


def test_logits_do_not_depend_on_how_many_rows_ask(decoder: Decoder, encoding: Encoding, text: Tensor) -> None:
    hidden = run(decoder, encoding, text, [])
    logits = decoder.logits(hidden)
    assert logits.shape == (TOKENS, 256)
    for row in (0, 15, 16, 299):
        assert torch.equal(decoder.logits(hidden[row : row + 1])[0], logits[row])
    assert logits.argmax(1).unique().numel() > 32


def test_two_sessions_at_once_do_not_see_each_other(decoder: Decoder, encoding: Encoding, text: Tensor) -> None:
    histories = [ResidentHistory(CONFIG, encoding, TOKENS) for _ in range(2)]
    texts = [text, text.flip(0)]
    got: list[list[Tensor]] = [[], []]
    for start in range(0, 96, 32):
        for which in range(2):
            part = slice(start, start + 32)
            got[which].append(decoder.forward(texts[which][part], torch.arange(start, start + 32), histories[which]))
    for which in range(2):
        assert torch.equal(torch.cat(got[which]), run(decoder, encoding, texts[which][:96], []))


@pytest.mark.parametrize(
    ("tokens", "positions", "said"),
    [
        ([0, 256], [0, 1], "token is 256; allowed: 0 to 255"),
        ([-1], [0], "token is -1"),
        ([], [], "tokens and positions"),
        ([1, 2], [0], "tokens and positions"),
    ],
)
def test_bad_input_is_refused_and_nothing_is_appended(
    decoder: Decoder, encoding: Encoding, tokens: list[int], positions: list[int], said: str
) -> None:
    history = ResidentHistory(CONFIG, encoding, 64)
    given = torch.tensor(tokens, dtype=torch.int64), torch.tensor(positions, dtype=torch.int64)
    with pytest.raises(InvalidValue, match=said):
        decoder.forward(*given, history)
    assert int(history.page_map.window[LENGTH]) == 0
