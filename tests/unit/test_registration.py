"""Registering host RAM with a GPU, with a driver that fails where it is told to."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compute import device_cuda
from compute.device_cuda import CudaDevice
from protocol.errors import OsFailure

CHUNK = 256 << 10
CHUNKS = 4
NBYTES = CHUNKS * CHUNK - 4096


class Driver:
    """Counts what is registered; its ``failing``-th registration fails, once."""

    CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP = 1, 2
    CUresult = SimpleNamespace(CUDA_SUCCESS=SimpleNamespace(name="CUDA_SUCCESS"))

    def __init__(self, failing: int = 0) -> None:
        self.registered: dict[int, int] = {}
        self._calls, self._failing = 0, failing

    def cuMemHostRegister(self, address: int, nbytes: int, flags: int) -> tuple[Any, ...]:  # noqa: N802
        assert flags == 3
        self._calls += 1
        if self._calls == self._failing:
            return (SimpleNamespace(name="CUDA_ERROR_OUT_OF_MEMORY"),)
        self.registered[address] = nbytes
        return (self.CUresult.CUDA_SUCCESS,)

    def cuMemHostUnregister(self, address: int) -> tuple[Any, ...]:  # noqa: N802
        del self.registered[address]
        return (self.CUresult.CUDA_SUCCESS,)


@pytest.fixture
def segment() -> int:
    fd = os.memfd_create("kvd-test-registered")
    os.ftruncate(fd, NBYTES)
    return fd


def device(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    """A device without a GPU behind it: what its constructor asks of torch is left out."""
    monkeypatch.setattr(device_cuda, "REGISTER_CHUNK", CHUNK)
    made = CudaDevice.__new__(CudaDevice)
    made._driver = driver
    monkeypatch.setattr(made, "tensor_at", lambda address, nbytes: torch.empty(0, dtype=torch.uint8))
    return made


def is_mapped() -> bool:
    with open("/proc/self/maps") as maps:
        return "kvd-test-registered" in maps.read()


def test_all_of_it_is_registered_in_chunks(segment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    mapping = device(driver, monkeypatch).map_shared(segment, NBYTES)
    expected = {mapping.address + at * CHUNK: CHUNK for at in range(CHUNKS)}
    expected[mapping.address + (CHUNKS - 1) * CHUNK] -= 4096
    assert driver.registered == expected
    mapping.close()
    assert not driver.registered
    assert not is_mapped()


@pytest.mark.parametrize("failing", range(1, CHUNKS + 1))
def test_case_16_a_chunk_that_fails_unregisters_those_before_it(
    segment: int, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    driver = Driver(failing)
    registering = device(driver, monkeypatch)
    again = os.dup(segment)
    with pytest.raises(OsFailure, match="cuMemHostRegister failed: CUDA_ERROR_OUT_OF_MEMORY"):
        registering.map_shared(segment, NBYTES)
    assert not driver.registered
    assert not is_mapped()
    # The failure is over with: the next attempt is judged by its own calls.
    mapping = registering.map_shared(again, NBYTES)
    assert len(driver.registered) == CHUNKS
    mapping.close()
