"""Runs of numbers, whatever the numbers are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvd.runs import runs_of


@given(st.lists(st.integers(0, 40), unique=True))
def test_runs_are_the_numbers_in_their_order_and_as_few_as_can_be(numbers: list[int]) -> None:
    runs = runs_of(numbers)
    assert [number for first, count in runs for number in range(first, first + count)] == numbers
    assert len(runs) == sum(index == 0 or numbers[index - 1] + 1 != number for index, number in enumerate(numbers))
