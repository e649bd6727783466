"""Deaths on a GPU: of workers, most of them amid replays of recorded steps, and of daemons under workers that live."""

from __future__ import annotations

import pytest

from tests.torture.side_by_side import run_rounds
from tests.torture.takeover import RECLAIM_LIMIT_S

WORKERS, DAEMONS, LOOPS = 50, 10, 6


@pytest.mark.gpu
@pytest.mark.torture
@pytest.mark.timeout(0)
def test_workers_and_daemons_killed_on_a_gpu_lose_nothing() -> None:
    workers, daemons = run_rounds(WORKERS, DAEMONS, LOOPS, "cuda")
    workers.show("takeover on a GPU")
    daemons.show("restart under workers on a GPU")
    assert not workers.failures
    assert not daemons.failures
    assert workers.trials >= WORKERS
    assert daemons.trials >= DAEMONS
    assert workers.reclaim_p99_s <= RECLAIM_LIMIT_S
