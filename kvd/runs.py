"""Runs of consecutive numbers: what is done for a run is one comparison or one copy."""

from __future__ import annotations

from collections.abc import Sequence

Run = tuple[int, int]
"""The first number, and how many there are."""


def runs_of(numbers: Sequence[int]) -> list[Run]:
    """``numbers``, in their order, as runs. None comes twice."""
    runs: list[Run] = []
    at, count = 0, len(numbers)
    while at < count:
        first, end = numbers[at], at + 1
        # Most often it is one run, and comparing its ends tells.
        if numbers[-1] - first == count - 1 - at and list(numbers[at:]) == list(range(first, first + count - at)):
            runs.append((first, count - at))
            break
        while end < count and numbers[end] == first + end - at:
            end += 1
        runs.append((first, end - at))
        at = end
    return runs
