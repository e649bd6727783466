"""What every test gets: no leaks, no warnings, a private run directory, and the interpreter where there is no GPU."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.leaks import Holdings


def _cuda_is_usable() -> bool:
    if not Path("/dev/nvidiactl").exists() or importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


CUDA = _cuda_is_usable()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

# How long an example takes says nothing on a shared machine; a failure has to be found again by the next run.
settings.register_profile("kvd", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvd")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if CUDA:
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; there is none here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def _cuda_context() -> None:
    """Made before any test, so that what the driver opens for itself is not taken for a leak."""
    if CUDA:
        import torch

        for index in range(torch.cuda.device_count()):  # the first one reaches the others from here on
            torch.zeros(1, device="cuda:0").add_(1).to(f"cuda:{index}").cpu()


@pytest.fixture(scope="module", autouse=True)
def _no_leaks_of_module(_cuda_context: None) -> Iterator[None]:
    """What ``_no_leaks`` looks for, after the module's own daemons and workers have ended."""
    yield from _check_leaks()


@pytest.fixture(autouse=True)
def _no_leaks(request: pytest.FixtureRequest, _cuda_context: None) -> Iterator[None]:
    """Fail a test that leaves open files, shared memory, threads or child processes behind.

    In a module marked ``leaks_per_module``, where tests share a worker that opens things as it goes, this is looked at
    after the module only.
    """
    if request.node.get_closest_marker("leaks_per_module"):
        yield
    else:
        yield from _check_leaks()


def _check_leaks() -> Iterator[None]:
    before = Holdings.now()
    yield
    if left := before.left_behind():
        pytest.fail("left behind: " + "; ".join(left), pytrace=False)


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A new private directory whose path leaves room for the names of sockets (at most 80 characters)."""
    path = Path(tempfile.mkdtemp(prefix="kvd-test-", dir="/tmp"))
    yield path
    shutil.rmtree(path)
