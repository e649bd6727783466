"""A thousand deaths of workers."""

from __future__ import annotations

import pytest

from tests.torture.takeover import RECLAIM_LIMIT_S, run_rounds

ROUNDS = 1000


@pytest.mark.torture
@pytest.mark.timeout(0)
def test_workers_killed_at_any_point_lose_nothing() -> None:
    outcome = run_rounds(ROUNDS, seed=1)
    outcome.show("takeover")
    assert not outcome.failures
    assert outcome.trials >= ROUNDS
    assert outcome.reclaim_p99_s <= RECLAIM_LIMIT_S
