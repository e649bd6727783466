"""Draws are of the model's distribution, and depend on nothing but logits, seed and position."""

from __future__ import annotations

import math

import pytest
import torch

from compute.decode.sampler import GREEDY, Sampler, Sampling, choose, choose_one, uniform
from protocol.errors import InvalidValue

VOCABULARY, DRAWS = 40, 60_000


def logits(seed: int = 1, rows: int = 1) -> torch.Tensor:
    return 2 * torch.randn((rows, VOCABULARY), generator=torch.Generator().manual_seed(seed))


def draws(temperature: float, top_p: float, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One token for each of ``seeds`` and ``positions`` [n], all of the same logits."""
    count = len(seeds)
    return choose(
        logits().expand(count, -1), positions, torch.full((count,), temperature), torch.full((count,), top_p), seeds
    )


def probabilities(temperature: float, top_p: float) -> torch.Tensor:
    """What top-p leaves of the softmax, by its definition."""
    whole = torch.softmax(logits()[0].double() / temperature, 0)
    order = whole.argsort(descending=True)
    before = whole[order].cumsum(0) - whole[order]
    kept = torch.zeros(VOCABULARY, dtype=torch.bool)
    kept[order[before < top_p]] = True
    left = torch.where(kept, whole, 0)
    return left / left.sum()


def far_off(tokens: torch.Tensor, expected: torch.Tensor) -> float:
    """Chi-square over the tokens that can be drawn, in standard deviations above its mean."""
    counts = torch.bincount(tokens, minlength=len(expected)).double()
    possible = expected > 0
    assert not counts[~possible].any(), "a token outside of top-p was drawn"
    wanted = expected[possible] * len(tokens)
    square = float(((counts[possible] - wanted) ** 2 / wanted).sum())
    freedom = int(possible.sum()) - 1
    return (square - freedom) / math.sqrt(2 * freedom) if freedom else square


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.5, 0.8), (1.0, 0.3), (0.3, 0.95)])
@pytest.mark.parametrize("over", ["seeds", "positions"])
def test_tokens_are_drawn_as_the_model_says(temperature: float, top_p: float, over: str) -> None:
    many, one = torch.arange(DRAWS), torch.full((DRAWS,), 12345)
    tokens = draws(temperature, top_p, *((many, one) if over == "seeds" else (one, many)))
    expected = probabilities(temperature, top_p)
    assert far_off(tokens, expected) < 5
    assert far_off(tokens, probabilities(temperature * 1.2, 1.0)) > 5 or top_p < 1, "the test must be able to fail"


def test_draws_of_positions_that_follow_are_independent() -> None:
    """Pairs of tokens, of two positions and one seed, and of one position and two seeds."""
    seeds, here = torch.arange(DRAWS), torch.zeros(DRAWS, dtype=torch.int64)
    alone = probabilities(1.0, 0.6)
    expected = (alone[:, None] * alone[None]).flatten()
    first = draws(1.0, 0.6, seeds, here)
    for second in (draws(1.0, 0.6, seeds, here + 1), draws(1.0, 0.6, seeds + 1, here)):
        assert far_off(first * VOCABULARY + second, expected) < 5


def test_drafts_kept_where_they_are_what_is_drawn_is_the_rejection_rule() -> None:
    """A draft is kept with its probability, and what is drawn instead is the rest of the distribution."""
    tokens, expected = draws(1.0, 1.0, torch.arange(DRAWS), torch.full((DRAWS,), 3)), probabilities(1.0, 1.0)
    for draft in (int(expected.argmax()), int(expected.argsort()[-5])):
        kept = int((tokens == draft).sum())
        chance = float(expected[draft])
        assert abs(kept - DRAWS * chance) < 5 * math.sqrt(DRAWS * chance * (1 - chance))
        rest = expected.clone()
        rest[draft] = 0
        assert far_off(tokens[tokens != draft], rest / rest.sum()) < 5


def test_a_draw_does_not_depend_on_the_batch() -> None:
    rows, settings = 24, [Sampling(0.8, 0.9, seed) if seed % 3 else GREEDY for seed in range(6)]
    table = logits(5, rows).view(6, 4, VOCABULARY)
    positions = torch.arange(rows).view(6, 4) * 7
    sampler = Sampler(8, torch.device("cpu"))
    for place, sampling in enumerate(settings):
        sampler.set(place, sampling)
    together = sampler.choose(table, positions)
    for place, sampling in enumerate(settings):
        for row in range(4):
            token = choose_one(table[place, row], int(positions[place, row]), sampling)
            assert token == together[place, row]
            if sampling is GREEDY:
                assert token == int(table[place, row].argmax())


def test_extreme_settings_and_logits() -> None:
    wild = torch.tensor([1e30, -1e30, float("-inf"), 1e30 - 1e24, 0.0])
    assert {choose_one(wild, position, Sampling(1.0, 1.0, 1)) for position in range(50)} == {0}
    assert {choose_one(logits()[0], position, Sampling(1e-6, 1.0, 1)) for position in range(50)} == {
        int(logits()[0].argmax())
    }
    assert {choose_one(logits()[0], position, Sampling(2.0, 1e-9, 1)) for position in range(50)} == {
        int(logits()[0].argmax())
    }
    equal = torch.zeros(VOCABULARY)
    assert len({choose_one(equal, position, Sampling(1.0, 1.0, 1)) for position in range(500)}) == VOCABULARY
    assert Sampling(1.0, 1.0, -1).seed == Sampling(1.0, 1.0, (1 << 63) - 1).seed
    numbers = uniform(torch.tensor([0, 1, -1, (1 << 63) - 1]), torch.tensor([0, 1 << 40, -1, 5]))
    assert len(set(numbers.tolist())) == 4
    assert ((numbers >= 0) & (numbers < 1)).all()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((-0.1, 1.0), "temperature is -0.1"),
        ((2.1, 1.0), "temperature is 2.1"),
        ((math.nan, 1.0), "temperature is nan"),
        ((1.0, 0.0), "top_p is 0"),
        ((1.0, 1.1), "top_p is 1.1"),
    ],
)
def test_settings_outside_their_limits_are_refused(values: tuple[float, float], words: str) -> None:
    with pytest.raises(InvalidValue, match=words):
        Sampling(*values)
