"""What ``kvd-bench pairs`` drafts: the recorded output, with seeded mistakes, so that drafts stay as often as they do
with a trained model.

A published run of the real model kept 665 drafts of three within 1,024 tokens of output, 62 % of those that were made.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

KEPT, OF_TOKENS = 665, 1_024
RIGHT = 0.7775
"""Chance of a draft to be right: q + q**2 + q**3 of three stay, in the mean 1.85."""
_SEEDS = 4_000


def scripted_drafts(output: Sequence[int], depth: int, seed: int, *, vocabulary: int) -> list[int]:
    """A draft for each token of ``output``, of which ``depth`` a step keeps as many as the published run did.

    From ``seed`` on, the first set of mistakes that comes nearest is taken.
    """
    wanted = round(KEPT * len(output) / OF_TOKENS)
    candidates = (_right(len(output), seed + attempt) for attempt in range(_SEEDS))
    nearest, distance = _right(len(output), seed), len(output)
    for right in candidates:
        away = abs(kept_drafts(right, depth) - wanted)
        if away < distance:
            nearest, distance = right, away
        if not away:
            break
    return [token if right else (token + 1) % vocabulary for token, right in zip(output, nearest, strict=True)]


def kept_drafts(right: Sequence[bool], depth: int) -> int:
    """How many drafts stay, until all tokens are there. The first step has none."""
    produced, kept = 2, 0
    while produced < len(right):
        matching = 0
        while matching < depth and produced + matching < len(right) and right[produced + matching]:
            matching += 1
        given = min(matching + 1, len(right) - produced)
        produced, kept = produced + given, kept + given - 1
    return kept


def _right(count: int, seed: int) -> list[bool]:
    numbers = random.Random(seed)
    return [numbers.random() < RIGHT for _ in range(count)]
