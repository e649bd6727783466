"""Replacement policies of a hot cache, simulated: the product's, and those that it is compared with.

A policy is asked which slots to give up at the end of a step's look-up. Slots that the step itself selected are pinned:
attention reads them. Everything is vectorised over the slots, so that caches of a real size can be simulated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
NEVER = np.iinfo(np.int64).max


class Policy(Protocol):
    """Chooses slots of a cache. All arrays are over slots."""

    def victims(self, count: int, pinned: NDArray[np.bool_]) -> Integers:
        """``count`` slots of which none is pinned; there are enough."""

    def used(self, slots: Integers, step: int, next_use: Integers) -> None:
        """``slots`` were selected in ``step`` and will be again in steps ``next_use``; called for filled ones too."""


class Circular:
    """The next slots after a cursor, past those that are pinned: what `compute.kernels.assign` does on a GPU."""

    def __init__(self, slots: int) -> None:
        self._slots, self._cursor = slots, 0

    def victims(self, count: int, pinned: NDArray[np.bool_]) -> Integers:
        order = (np.arange(self._slots) + self._cursor) % self._slots
        chosen = order[~pinned[order]][:count]
        self._cursor = int(chosen[-1] + 1) % self._slots
        return chosen

    def used(self, slots: Integers, step: int, next_use: Integers) -> None:
        del slots, step, next_use


class Clock:
    """Circular, with a second chance: a hand passes slots used since it came by, and takes their mark away."""

    def __init__(self, slots: int) -> None:
        self._slots, self._hand = slots, 0
        self._marked = np.zeros(slots, dtype=np.bool_)

    def victims(self, count: int, pinned: NDArray[np.bool_]) -> Integers:
        order = (np.arange(self._slots) + self._hand) % self._slots
        free = ~pinned[order]
        unmarked = order[free & ~self._marked[order]]
        if len(unmarked) >= count:
            chosen = unmarked[:count]
            passed = order[: int(np.flatnonzero(order == chosen[-1])[0])]
            self._marked[passed] = False
        else:  # once around and on: everything has lost its mark
            rest = order[free & self._marked[order]][: count - len(unmarked)]
            chosen = np.concatenate((unmarked, rest))
            self._marked[:] = False
        self._hand = int(chosen[-1] + 1) % self._slots
        return chosen

    def used(self, slots: Integers, step: int, next_use: Integers) -> None:
        del step, next_use
        self._marked[slots] = True


class LeastRecentlyUsed:
    """The slots that were not selected for longest."""

    def __init__(self, slots: int) -> None:
        self._last = np.full(slots, -1, dtype=np.int64)

    def victims(self, count: int, pinned: NDArray[np.bool_]) -> Integers:
        return _smallest(np.where(pinned, NEVER, self._last), count)

    def used(self, slots: Integers, step: int, next_use: Integers) -> None:
        del next_use
        self._last[slots] = step


class Random:
    """Empty slots, then any, from a seed."""

    def __init__(self, slots: int) -> None:
        self._random = np.random.default_rng(0)
        self._filled = np.zeros(slots, dtype=np.bool_)

    def victims(self, count: int, pinned: NDArray[np.bool_]) -> Integers:
        empty = np.flatnonzero(~self._filled)[:count]
        others = np.flatnonzero(self._filled & ~pinned)
        return np.concatenate((empty, self._random.choice(others, count - len(empty), replace=False)))

    def used(self, slots: Integers, step: int, next_use: Integers) -> None:
        del step, next_use
        self._filled[slots] = True


class Optimal:
    """The slots that will not be selected for longest: nobody can do better, nor know that."""

    def __init__(self, slots: int) -> None:
        # An empty slot is never used again.
        self._next = np.full(slots, NEVER, dtype=np.int64)

    def victims(self, count: int, pinned: NDArray[np.bool_]) -> Integers:
        return _smallest(np.where(pinned, 1, -self._next), count)

    def used(self, slots: Integers, step: int, next_use: Integers) -> None:
        del step
        self._next[slots] = next_use


POLICIES: dict[str, Callable[[int], Policy]] = {
    "circular": Circular,
    "clock": Clock,
    "LRU": LeastRecentlyUsed,
    "random": Random,
    "optimal": Optimal,
}


def next_uses(selections: list[Integers]) -> list[Integers]:
    """For each position of each selection the step that selects it next, or `NEVER`."""
    tokens = 1 + max((int(selection.max(initial=-1)) for selection in selections), default=-1)
    seen = np.full(tokens, NEVER, dtype=np.int64)
    found = []
    for step in range(len(selections) - 1, -1, -1):
        found.append(seen[selections[step]])
        seen[selections[step]] = step
    return found[::-1]


def misses(selections: list[Integers], slots: int, policy: Policy, uses: list[Integers]) -> Integers:
    """Positions of each selection that were not cached: int64 [steps]. ``uses`` is `next_uses` of ``selections``.

    No selection may be larger than the cache.
    """
    tokens = 1 + max((int(selection.max(initial=-1)) for selection in selections), default=-1)
    table = np.full(tokens, -1, dtype=np.int64)  # position to slot
    owner = np.full(slots, -1, dtype=np.int64)
    counts = np.zeros(len(selections), dtype=np.int64)
    for step, selection in enumerate(selections):
        missing = selection[table[selection] < 0]
        counts[step] = len(missing)
        if len(missing):
            pinned = np.zeros(slots, dtype=np.bool_)
            pinned[table[selection[table[selection] >= 0]]] = True
            taken = policy.victims(len(missing), pinned)
            evicted = owner[taken]
            table[evicted[evicted >= 0]] = -1
            owner[taken], table[missing] = missing, taken
        policy.used(table[selection], step, uses[step])
    return counts


def _smallest(values: Integers, count: int) -> Integers:
    """Where the ``count`` smallest values are; of equal ones the first."""
    return np.argsort(values, kind="stable")[:count]
