"""What ranks do in tests that need no daemon and no model; as `tests.parallel.scenarios` has it."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch.distributed.distributed_c10d import _get_default_store

from compute.parallel.grid import Grid, Place
from tests.parallel.scenarios import Say, refusal


def limits(rank: int, say: Say) -> list[float]:
    """How long a rank waits for others, in seconds, whatever it waits for."""
    with Grid(Place.of_environment(1, 2, os.environ), device="cpu", timeout_s=7.0) as grid:
        groups = [peers._group._get_backend(torch.device("cpu")) for peers in (grid.control, grid.shards, grid.stages)]
        store: Any = _get_default_store()
        found = [store.timeout, *(group.options._timeout for group in groups)]
    return [limit.total_seconds() for limit in found]


def ends_unseen(rank: int, say: Say, *, timeout_s: float) -> str:
    """Rank 1 is gone by its lifeline alone, as where gloo or NCCL have not seen it; what rank 0 waits for then."""
    with Grid(Place.of_environment(1, 2, os.environ), device="cpu", timeout_s=timeout_s) as grid:
        grid.control.exchange(b"")
        if rank:
            grid._lifeline.close()
            time.sleep(2 * timeout_s)
            raise AssertionError("rank 0 is to be done before")
        step = refusal(lambda: grid.wait_for_step(lambda: False))
        with torch.inference_mode():
            control = refusal(lambda: grid.control.exchange(b""))
        say([step, control])
    return ""


def steps_end(rank: int, say: Say) -> list[str]:
    """A step that is done, and one that is not, with nobody lost."""
    with Grid(Place.of_environment(1, 2, os.environ), device="cpu", timeout_s=0.5) as grid:
        done = iter([False, False, True, True])
        found = [refusal(lambda: grid.wait_for_step(lambda: next(done))), refusal(lambda: grid.wait_for_step(bool))]
        grid.control.exchange(b"")
    return found
