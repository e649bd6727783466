"""Ten million malformed frames."""

from __future__ import annotations

import pytest

from tests.blackbox.daemon_process import DaemonProcess
from tests.fuzz.test_malformed import FRAMES, MOST_GROWTH, bombard_and_compare, daemon, resident_bytes
from tests.trials import report

__all__ = ["daemon"]
ROUNDS = 100


@pytest.mark.torture
@pytest.mark.timeout(0)
def test_ten_million_malformed_frames(daemon: DaemonProcess) -> None:
    bombard_and_compare(daemon, 998, 1000)
    before = resident_bytes(daemon.process.pid)
    for seed in range(ROUNDS):
        bombard_and_compare(daemon, 1000 + 2 * seed, FRAMES)
    grown = resident_bytes(daemon.process.pid) - before
    assert grown < MOST_GROWTH, "in all of them together"
    report("malformed frames", ROUNDS * FRAMES, grown_bytes=grown)
