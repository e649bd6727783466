"""A rank that is gone is seen where the transport does not see it: gloo while it sends, NCCL ever."""

from __future__ import annotations

import time

import pytest

from compute.parallel.lifeline import GRACE_S
from tests.parallel.launcher import PATIENT_S, SEEN_S, Launcher, free_address

pytestmark = [pytest.mark.leaks_per_module, pytest.mark.timeout(600)]


def test_a_rank_that_only_its_lifeline_misses_is_lost(launcher: Launcher) -> None:
    launcher.start("ends_unseen", [0, 1], 2, free_address(), timeout_s=PATIENT_S)
    began = time.monotonic()
    launcher._wait_until(lambda: launcher.ranks[0].said or launcher.ranks[0].ended, SEEN_S + 2 * GRACE_S)
    [[step, message]] = launcher.ranks[0].said
    assert step == "peer_lost: rank 0 lost a peer in a step: rank 1 has ended"
    assert message.startswith("peer_lost: rank 0 lost one of its peers 1 in an all-gather")
    assert message.endswith(f"with a time-out of {PATIENT_S:g} s: rank 1 has ended")
    assert time.monotonic() - began > 2 * GRACE_S, "what is under way has had its time to end by itself"


def test_a_step_ends_or_is_given_up_in_time(launcher: Launcher) -> None:
    launcher.start("steps_end", [0, 1], 2, free_address())
    assert launcher.results() == [
        ["none", f"peer_lost: rank {rank} lost a peer in a step: nothing came within 0.5 s"] for rank in (0, 1)
    ]
