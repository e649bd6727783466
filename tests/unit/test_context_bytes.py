"""What a context takes of a GPU, by an NVML that stands in for the real one; tests/blackbox/test_cuda.py has a GPU."""

from __future__ import annotations

import os
import sys

import pytest

from compute.context_bytes import ContextBytes
from protocol.nvml import Nvml
from tests.unit.test_driver_cuda import GPU, MIB, StandInNvml


class Processes(StandInNvml):
    """This process, with ``own`` bytes, None before it has a context."""

    own: int | None = None

    def nvmlDeviceGetComputeRunningProcesses(self, handle):  # noqa: N802
        found = super().nvmlDeviceGetComputeRunningProcesses(handle)
        found[1].pid, found[1].usedGpuMemory = os.getpid(), self.own
        return found

    def nvmlDeviceGetMemoryInfo(self, handle, version=1):  # noqa: N802
        info = super().nvmlDeviceGetMemoryInfo(handle, version)
        info.used += self.own or 0
        return info


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Processes:
    stand_in = Processes()
    monkeypatch.setitem(sys.modules, "pynvml", stand_in)
    return stand_in


def test_the_terms_of_a_device(nvml: Processes) -> None:
    loaded = Nvml.load()
    assert loaded is not None
    memory = loaded.memory(GPU)
    assert (memory.in_use, memory.driver, dict(memory.processes), memory.kept) == (
        40 * MIB,
        MIB,
        {5: 9 * MIB},
        30 * MIB,
    )


def test_a_context_is_what_its_process_has_and_what_is_kept_for_it(nvml: Processes) -> None:
    context = ContextBytes()
    nvml.own, nvml.kept = 518 * MIB, nvml.kept + 5 * MIB
    context.made(GPU)
    assert context.measured == 523 * MIB
    nvml.own = 718 * MIB  # torch has 100, kernels were loaded, and somebody has taken 64
    assert context.measured == 523 * MIB, "nobody has said that it has warmed up"
    context.measure(100 * MIB)
    assert context.measured == 623 * MIB
    with context.registering(1 << 30):
        nvml.kept += 2 * MIB
    assert context.measured == 625 * MIB
    with context.registering(1 << 30):
        nvml.kept += 900 * MIB  # another's, at the same moment
    assert context.measured == 631 * MIB


def test_a_process_that_nvml_does_not_know(nvml: Processes) -> None:
    context = ContextBytes()
    context.made(GPU)
    assert context.measured is None
    with context.registering(1 << 30):
        pass
    assert context.measured is None
    nvml.failing.add("nvmlDeviceGetMemoryInfo")
    context.measure(0)
    assert context.measured is None


def test_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    context = ContextBytes()
    context.made(GPU)
    with context.registering(1 << 30):
        pass
    assert context.measured is None
