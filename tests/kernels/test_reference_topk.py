"""The selection against Python's ``sorted``: chosen by score, then position; emitted in ascending position."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compute.kernels import reference
from protocol.errors import InvalidValue
from tests.kernels.pages import DEVICE

INT64 = torch.iinfo(torch.int64)


def chosen_by_sorting(scores: list[float], length: int, k: int) -> list[int]:
    eligible = [position for position in range(max(0, min(length, len(scores)))) if scores[position] != -math.inf]
    best = sorted(eligible, key=lambda position: (-scores[position], position))[:k]
    return sorted(best) + [-1] * (k - len(best))


def select(scores: Tensor, lengths: list[int], k: int) -> list[list[int]]:
    selection = reference.select_topk(scores.to(DEVICE), torch.tensor(lengths, device=DEVICE), k)
    assert selection.dtype == torch.int32
    chosen: list[list[int]] = selection.tolist()
    return chosen


# Few distinct values, so that most cutoffs fall among equals; both zeros, denormals, infinities.
SCORES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 3e38, math.inf, -math.inf, 0.5])


@given(
    rows=st.lists(st.lists(SCORES, min_size=1, max_size=40), min_size=1, max_size=5),
    k=st.integers(1, 45),
    cut=st.integers(-2, 42),
)
def test_equals_a_sort_with_many_ties(rows: list[list[float]], k: int, cut: int) -> None:
    width = max(map(len, rows))
    lengths = [min(len(row), cut) for row in rows]
    scores = torch.tensor([row + [math.inf] * (width - len(row)) for row in rows])
    assert select(scores, lengths, k) == [
        chosen_by_sorting(row, length, k) for row, length in zip(rows, lengths, strict=True)
    ]


def test_equals_a_sort_at_length() -> None:
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(6, 5000, generator=generator).relu() * torch.randn(6, 1, generator=generator)
    scores[4] = 0.0
    lengths = [5000, 4999, 2048, 2047, 5000, 1]
    assert select(scores, lengths, 2048) == [
        chosen_by_sorting(row, length, 2048) for row, length in zip(scores.tolist(), lengths, strict=True)
    ]


def test_a_row_chooses_the_same_alone_and_in_a_batch() -> None:
    scores = torch.randn(16, 700, generator=torch.Generator().manual_seed(1)).mul(4).round()
    lengths = list(range(700, 684, -1))
    together = select(scores, lengths, 64)
    for row in range(16):
        assert select(scores[row : row + 1], lengths[row : row + 1], 64) == together[row : row + 1]
        assert select(scores[row : row + 1, : lengths[row]], lengths[row : row + 1], 64) == together[row : row + 1]


def test_case_09_a_history_of_five_rows_fills_the_rest_with_minus_one() -> None:
    scores = torch.full((1, 64), 123456.0)
    scores[0, :5] = torch.tensor([0.0, 0.0, -1.0, 7.0, 0.0])
    assert select(scores, [5], 2048) == [[0, 1, 2, 3, 4] + [-1] * 2043]
    assert select(scores[:, :5], [5], 2048) == [[0, 1, 2, 3, 4] + [-1] * 2043]


def test_scores_beyond_the_length_are_not_looked_at() -> None:
    scores = torch.full((4, 8), torch.nan)
    scores[:, :3] = torch.tensor([1.0, 3.0, 2.0])
    assert select(scores, [3, 2, 0, INT64.min], 2) == [[1, 2], [0, 1], [-1, -1], [-1, -1]]


def test_a_length_beyond_the_scores_means_all_of_them() -> None:
    assert select(torch.tensor([[1.0, 2.0]]), [INT64.max], 3) == [[0, 1, -1]]


def test_minus_infinity_is_never_chosen() -> None:
    assert select(torch.tensor([[-math.inf, 5.0, -math.inf]]), [3], 2) == [[1, -1]]


def test_nan_within_the_length_is_refused() -> None:
    with pytest.raises(InvalidValue, match="NaN"):
        select(torch.tensor([[1.0, 2.0, 3.0], [1.0, math.nan, 0.0]]), [3, 2], 1)


def test_no_rows_and_no_scores() -> None:
    assert select(torch.empty(0, 5), [], 3) == []
    assert select(torch.empty(2, 0), [0, 0], 3) == [[-1, -1, -1]] * 2
