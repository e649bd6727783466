"""Blocks are evicted and given frames by runs: what must hold when runs are not whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.block_world import World, chain


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path) as made:
        yield made
        made.check()


def test_blocks_of_which_some_went_before_are_evicted_once(world: World) -> None:
    """Of a chain that names a block twice, the second place goes first."""
    user = world.user()
    user.put(keys := chain("a", 4))
    user.find([*keys, keys[1]])
    user.put(others := chain("b", 2044))
    user.put(chain("new", 4))
    world.check()
    assert (user.find(keys), user.find(others)) == (0, 2044)


def test_frames_that_took_the_place_of_others_lie_side_by_side(world: World) -> None:
    """Whoever copies them, or does anything for a run of them, has few parts."""
    user = world.user()
    for name in range(4):  # together all that there is
        user.put(chain(name, 512))
    hold, given = user.reserve(chain("new", 256))
    first = next(iter(given.values()))
    assert list(given.values()) == list(range(first, first + 256))
    user.release(hold)
