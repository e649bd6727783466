"""Daemons for black-box tests: a small one for each test, and a larger one for a module."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.blackbox.daemon_process import DaemonProcess


@pytest.fixture
def daemon(run_dir: Path) -> Iterator[DaemonProcess]:
    """A daemon that is ready, with 16 extents of 4 MiB; at the end its books must balance."""
    with DaemonProcess(run_dir, drain_timeout_s="0") as process:
        yield process.wait_ready()
        if process.process.poll() is None:
            assert process.stat().ledger == "balanced"
            assert process.stop() == 0
        assert '"exception"' not in process.log


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[DaemonProcess]:
    """A small daemon that all tests of a module share."""
    path = Path(tempfile.mkdtemp(prefix="kvd-test-", dir="/tmp"))
    with DaemonProcess(path, drain_timeout_s="0") as process:
        yield process.wait_ready()
        assert process.stat().ledger == "balanced"
        assert process.stop() == 0
        assert '"exception"' not in process.log
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def module_daemon() -> Iterator[Path]:
    """The run directory of a daemon that all tests of a module share."""
    path = Path(tempfile.mkdtemp(prefix="kvd-test-", dir="/tmp"))
    with DaemonProcess(
        path, host_capacity="256MiB", host_extent="16MiB", vram_capacity="512MiB", drain_timeout_s="0"
    ) as process:
        yield process.wait_ready().run_dir
        assert process.stat().ledger == "balanced"
    shutil.rmtree(path)
