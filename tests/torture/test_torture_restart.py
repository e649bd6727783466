"""Two hundred deaths of daemons."""

from __future__ import annotations

import pytest

from tests.torture.restart import run_rounds

ROUNDS = 200


@pytest.mark.torture
@pytest.mark.timeout(0)
def test_daemons_killed_at_any_point_under_a_worker() -> None:
    outcome = run_rounds(ROUNDS, seed=1)
    outcome.show("restart")
    assert not outcome.failures
    assert outcome.trials >= ROUNDS
