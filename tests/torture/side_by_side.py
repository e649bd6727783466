"""Deaths of workers and daemons, in several loops side by side, each with a daemon of its own: for a GPU's short hours.

Run as ``python -m tests.torture.side_by_side SECONDS SETUP LOOPS``: no session is begun after so many seconds, and what
has been shown is printed. The first loop kills daemons, the others workers.
"""

from __future__ import annotations

import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from tests.torture import restart, takeover
from tests.torture.takeover import Outcome


def run_rounds(
    workers: int, daemons: int, loops: int, setup: str, *, until: float = math.inf
) -> tuple[Outcome, Outcome]:
    """At least ``workers`` deaths of workers and ``daemons`` of daemons, or what there is by ``until``."""
    each = -(-workers // (loops - 1))
    with ThreadPoolExecutor(loops) as pool:
        of_daemons = pool.submit(restart.run_rounds, daemons, 1, setup, until=until)
        of_workers = [pool.submit(takeover.run_rounds, each, seed, setup, until=until) for seed in range(loops - 1)]
        return merged([future.result() for future in of_workers]), of_daemons.result()


def merged(outcomes: list[Outcome]) -> Outcome:
    """All of them as one."""
    total = Outcome()
    for outcome in outcomes:
        total.trials += outcome.trials
        total.failures += outcome.failures
        total.reclaim_s += outcome.reclaim_s
        total.deaths += outcome.deaths
        total.restores += outcome.restores
    return total


if __name__ == "__main__":
    ends = time.monotonic() + float(sys.argv[1])
    of_workers, of_daemons = run_rounds(10_000, 10_000, int(sys.argv[3]), sys.argv[2], until=ends)
    of_workers.show(f"deaths of workers on {sys.argv[2]}")
    of_daemons.show(f"deaths of daemons on {sys.argv[2]}")
