"""Ranks and daemons, shared by a module's tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.blackbox.daemon_process import DaemonProcess
from tests.parallel.launcher import Launcher
from tests.parallel.nodes import start_daemon


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher() as started:
        yield started


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[DaemonProcess]]:
    """Two nodes'."""
    with ExitStack() as stack:
        found = [start_daemon(stack, tmp_path_factory.mktemp("saved") / "state") for _ in range(2)]
        for daemon in found:
            daemon.wait_ready()
        yield found
        for daemon in found:
            assert daemon.stat().ledger == "balanced"


@pytest.fixture(scope="module")
def daemon(daemons: list[DaemonProcess]) -> DaemonProcess:
    """That of a node."""
    return daemons[0]
