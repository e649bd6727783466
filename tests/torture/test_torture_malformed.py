"""Ten million malformed frames."""

from __future__ import annotations

import pytest

from tests.blackbox.daemon_process import DaemonProcess
from tests.fuzz.test_malformed import bombard_and_compare, daemon

__all__ = ["daemon"]
ROUNDS = 100


@pytest.mark.torture
@pytest.mark.timeout(0)
def test_ten_million_malformed_frames(daemon: DaemonProcess) -> None:
    for seed in range(ROUNDS):
        bombard_and_compare(daemon, 1000 + 2 * seed, 100_000)
