"""The terms of a GPU, by an NVML that stands in for the real one; tests/blackbox/test_cuda_explain.py has a GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from kvd.stat.explain import DeviceTerms, explain
from kvd.stat.explain_text import explanation_lines
from protocol.stats import LeaseStats, NodeStats, TierStats
from tests.unit.test_driver_cuda import GPU, MIB, StandInNvml


def tier(name: str, committed: int, own: int = 0) -> TierStats:
    return TierStats(name, 0, committed, 64 * MIB, 0, 0, 0, 0, [], own)


def lease(number: int, pid: int, device: str = GPU, torch_reserved: int = 0, context: int = 0) -> LeaseStats:
    return LeaseStats(
        number, "live", 0, 0, pid, "it", 1.0, 0, 0, 0, device=device, torch_reserved=torch_reserved, context=context
    )


def terms(leases: list[LeaseStats]) -> DeviceTerms:
    tiers = [tier(f"vram:{GPU}", 10 * MIB, 3 * MIB), tier("host", 0)]
    stats = NodeStats(1, "0", 1, os.getpid(), 1.0, False, "balanced", tiers, leases, [])
    explanation = explain(stats, Path("/run/kvd"), None)
    assert any(line.split() == ["the", "driver's", "own", "1", "MiB"] for line in explanation_lines(explanation))
    [found] = explanation.devices
    assert found.unexplained is not None
    assert found.in_use == (
        found.driver + found.daemon + found.committed + found.torch_reserved + found.contexts + found.unexplained
    )
    return found


@pytest.fixture(autouse=True)
def nvml(monkeypatch: pytest.MonkeyPatch) -> StandInNvml:
    """40 MiB in use: one the driver's own, 9 of process 5, 30 of no process."""
    stand_in = StandInNvml()
    monkeypatch.setitem(sys.modules, "pynvml", stand_in)
    return stand_in


def test_each_term_is_its_own() -> None:
    found = terms([lease(1, 5, torch_reserved=4 * MIB, context=7 * MIB), lease(2, 6, device="cpu")])
    assert (found.in_use, found.driver, found.daemon, found.committed) == (40 * MIB, MIB, 3 * MIB, 10 * MIB)
    assert (found.torch_reserved, found.contexts, found.unexplained) == (4 * MIB, 7 * MIB, 15 * MIB)
    assert (found.others, found.silent) == (0, 0)


def test_what_other_programs_have_is_part_of_what_is_unexplained() -> None:
    found = terms([])
    assert (found.unexplained, found.others) == (26 * MIB, 9 * MIB)


def test_a_process_with_several_leases_counts_once_by_the_newest() -> None:
    found = terms([lease(4, 5, torch_reserved=4 * MIB), lease(3, 5, torch_reserved=MIB)])
    assert found.torch_reserved == 4 * MIB


def test_leases_that_say_nothing_are_counted() -> None:
    found = terms([lease(1, 5, device="", torch_reserved=-1, context=-1), lease(2, 6, torch_reserved=MIB, context=-1)])
    assert (found.torch_reserved, found.contexts, found.silent) == (MIB, 0, 2)


def test_without_nvml_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    tiers = [tier(f"vram:{GPU}", 10 * MIB), tier("host", 0)]
    stats = NodeStats(1, "0", 1, os.getpid(), 1.0, False, "balanced", tiers, [], [])
    [found] = explain(stats, Path("/run/kvd"), None).devices
    assert (found.in_use, found.unexplained, found.committed) == (None, None, 10 * MIB)
