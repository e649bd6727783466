"""The deterministic simulation: the real daemon, workers and faults from a seed, held against a plain model."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.simulation.audit import SimulationFailure
from tests.simulation.run import simulate
from tests.simulation.world import World
from tests.trials import report

SHORT, LONG, OF_ONE_WORLD = 3_000, 1_000_000, 20_000
SOON = (
    *("create done", "open_stored done", "extend done", "truncate done", "detach done", "close done", "fork done"),
    *("find_prefix done", "save done", "restore done", "append done", "die done", "spilled", "came back"),
)
IN_TIME = (
    *("allocate done", "reattached", "handed over", "grant refused", "reconnect done", "revoke done", "scribble done"),
    *("extend out_of_capacity", "extend os_failure", "fork os_failure", "save os_failure", "fork killed"),
)
"""What a run that shows anything has come across."""


@pytest.mark.parametrize(
    "operations",
    [SHORT, pytest.param(LONG, marks=[pytest.mark.torture, pytest.mark.timeout(0)])],
    ids=["short", "long"],
)
def test_the_daemon_is_as_the_model_has_it(operations: int) -> None:
    done: Counter[str] = Counter()
    seeds, starts, made = random.Random(7), 0, 0
    while made < operations:
        world = simulate(seeds.randrange(1 << 32), min(OF_ONE_WORLD, operations))
        done.update(world.done)
        starts += world.daemon_starts
        made = sum(count for what, count in done.items() if not what.endswith(" nothing"))
    killed = sum(count for what, count in done.items() if what.endswith(" killed"))
    failed = sum(count for what, count in done.items() if what.endswith(("os_failure", "out_of_capacity")))
    report("simulated operations", made, daemon_starts=starts, killed_amid=killed, failed_by_system=failed)
    missing = [what for what in (SOON if operations == SHORT else SOON + IN_TIME) if not done[what]]
    assert not missing, missing
    assert starts
    assert killed
    assert failed


def test_a_seed_gives_the_same_run_again() -> None:
    first, second, other = simulate(3, 600), simulate(3, 600), simulate(4, 600)
    assert first.trace.hexdigest() == second.trace.hexdigest() != other.trace.hexdigest()
    assert first.done == second.done


def test_a_byte_that_is_not_the_models_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(world: World) -> None:
        for session in world.model.memory.values():
            if session.rows:
                session.pages[0].head = b"another"
        deep(world)

    deep = World.check_deep
    monkeypatch.setattr(World, "check_deep", wrong)
    with pytest.raises(SimulationFailure, match="pages"):
        simulate(3, 600)
