"""Replacement policies, against definitions that are short and slow, and the product's own cache."""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import cache_sim
from benchmarks.cache_policies import NEVER, POLICIES, Circular, Integers, misses, next_uses
from compute.decode.selections import Trace
from compute.kernels.reference_cache import resolve
from compute.kernels.state import NO_RING, GroupCache, PageMap
from protocol.errors import InvalidValue
from protocol.layout import Q8G64
from protocol.model import DEMO


def selections(steps: int = 60, history: int = 40, topk: int = 6, seed: int = 1) -> list[Integers]:
    return cache_sim.synthetic(history, topk, steps, 0.5, seed=seed)


def simulate(name: str, chosen: list[Integers], slots: int) -> list[int]:
    return misses(chosen, slots, POLICIES[name](slots), next_uses(chosen)).tolist()


def slow_lru(chosen: list[Integers], slots: int) -> list[int]:
    cached: dict[int, int] = {}
    counts = []
    for step, selection in enumerate(chosen):
        missing = [position for position in selection.tolist() if position not in cached]
        counts.append(len(missing))
        for position in selection.tolist():
            if position in cached:
                cached[position] = step
        for position in missing:
            if len(cached) == slots:
                del cached[min(cached, key=lambda other: cached[other])]
            cached[position] = step
    return counts


@pytest.mark.parametrize("slots", [6, 9, 17, 40])
def test_least_recently_used(slots: int) -> None:
    # Which of several equally old rows goes is open; counts can differ by that alone.
    fast, slow = simulate("LRU", selections(), slots), slow_lru(selections(), slots)
    assert abs(sum(fast) - sum(slow)) <= 0.05 * sum(slow)
    assert fast[0] == slow[0] == 6


@pytest.mark.parametrize("slots", [6, 7, 16, 33])
def test_circular_is_what_the_product_does(slots: int) -> None:
    page_format = DEMO.page_format(Q8G64)
    rows = torch.zeros((slots, page_format.groups[0].layers, Q8G64.rows.row_bytes), dtype=torch.uint8)
    cache = GroupCache.empty(rows, 64)
    page = torch.zeros(page_format.stride, dtype=torch.uint8)
    page_map = PageMap(
        torch.tensor([page.data_ptr()]),
        torch.zeros((1, 1), dtype=torch.int64),
        torch.tensor([NO_RING, 64]),
        0,
        1,
        page_format,
    )
    expected = []
    for selection in selections():
        resolve(cache, page_map, 0, torch.from_numpy(selection).int()[None])
        expected.append(int(cache.control[2]))
    assert misses(selections(), slots, Circular(slots), next_uses(selections())).tolist() == expected


def test_nobody_beats_the_optimum() -> None:
    """And for a tiny case the optimum is that of all ways there are."""
    for seed in range(5):
        chosen = selections(seed=seed)
        best = sum(simulate("optimal", chosen, 12))
        assert all(sum(simulate(name, chosen, 12)) >= best for name in POLICIES)
    tiny = [np.array(pair) for pair in ([0, 1], [2, 3], [0, 4], [1, 2], [0, 3], [4, 1])]

    def fewest(step: int, cached: frozenset[int]) -> int:
        if step == len(tiny):
            return 0
        wanted = frozenset(tiny[step].tolist())
        missing, others = wanted - cached, cached - wanted
        keep = 3 - len(wanted)
        ways = itertools.combinations(others, min(keep, len(others)))
        return len(missing) + min(fewest(step + 1, wanted | frozenset(way)) for way in ways)

    assert sum(simulate("optimal", tiny, 3)) == fewest(0, frozenset())


def test_a_cache_of_everything_misses_each_position_once() -> None:
    chosen = selections()
    distinct = len(np.unique(np.concatenate(chosen)))
    assert {sum(simulate(name, chosen, 40)) for name in POLICIES} == {distinct}


def test_clock_gives_a_second_chance() -> None:
    """Position 1 is used again before the hand comes to it; the circular cache takes it all the same."""
    chosen = [np.array([position]) for position in (0, 1, 2, 3, 1, 4, 1)]
    assert sum(simulate("clock", chosen, 3)) < sum(simulate("circular", chosen, 3))


def test_next_uses() -> None:
    found = next_uses([np.array([1, 2]), np.array([2]), np.array([1])])
    assert [uses.tolist() for uses in found] == [[2, 1], [NEVER], [NEVER]]


@pytest.mark.parametrize("kept", [0.0, 0.4, 0.9])
def test_synthetic_selections(kept: float) -> None:
    chosen = cache_sim.synthetic(5000, 200, 20, kept, seed=3)
    assert all(len(np.unique(selection)) == 200 for selection in chosen)
    assert all((np.diff(selection) > 0).all() for selection in chosen)
    assert kept <= cache_sim.overlap(chosen) < kept + 0.45 * (1 - kept) + 0.05
    assert np.array_equal(chosen[7], cache_sim.synthetic(5000, 200, 20, kept, seed=3)[7])


def test_a_recorded_trace(tmp_path: Path) -> None:
    rows = torch.full((20, 2, 8), -1, dtype=torch.int32)
    generator = torch.Generator().manual_seed(5)
    for token, group in itertools.product(range(20), range(2)):
        rows[token, group, :7] = torch.randperm(60 + token, generator=generator)[:7].sort().values
    Trace(rows, 60).save(tmp_path / "trace")
    picture = tmp_path / "misses.png"
    # In a process of its own: matplotlib keeps its fonts open.
    command = [sys.executable, "-m", "benchmarks.cli", "cache-sim", "--trace", str(tmp_path / "trace")]
    done = subprocess.run(
        [*command, "--slots", "8,16", "--plot", str(picture)], stdout=subprocess.PIPE, text=True, check=True
    )
    printed = done.stdout
    assert "group 0: circular, 8 slots" in printed
    assert "group 1: optimal, 16 slots" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def arguments(**changed: object) -> argparse.Namespace:
    defaults = {"slots": "16", "policies": "LRU", "trace": None, "history": 40, "topk": 6, "steps": 9, "overlap": 0.5}
    return argparse.Namespace(**defaults | {"seed": 0, "only": "", "plot": None} | changed)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"slots": "4"}, "--slots"),
        ({"slots": "8,x"}, "--slots"),
        ({"slots": "0"}, "--slots"),
        ({"policies": "FIFO"}, "--policies"),
        ({"topk": 41}, "topk"),
        ({"overlap": 1.5}, "overlap"),
        ({"trace": Path("/dev/null")}, "trace"),
    ],
)
def test_bad_arguments(changed: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidValue, match=named):
        cache_sim.run(arguments(**changed))
