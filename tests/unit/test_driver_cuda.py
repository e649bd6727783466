"""The CUDA driver's calls and error paths against a stand-in; on a GPU they are tests/kernels/test_vram_cuda.py."""

from __future__ import annotations

import enum
import itertools
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvd.alloc.ledger import Account, Ledger
from kvd.tiers.driver_cuda import CudaDriver
from kvd.tiers.vram import Vram
from protocol.errors import NoDevice, OsFailure, OutOfCapacity

MIB = 1024**2
GRANULARITY = 2 * MIB


class Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_NOT_SUPPORTED = 801


class StandInCuda:
    """The calls of `cuda.bindings.driver` that the CUDA driver makes, on a device of pipes; ``errors`` by call."""

    CUresult = Result
    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED=103)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)

    def __init__(self) -> None:
        self.errors: dict[str, Result] = {}
        self.exports = 1
        self.count = 1
        self.memory: dict[int, int] = {}
        self._handles = itertools.count(77)

    def CUmemAllocationProp(self) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(location=SimpleNamespace())

    def __getattr__(self, call: str) -> Any:
        def answer(*arguments: Any) -> tuple[Any, ...]:
            if call in self.errors:
                return self.errors[call], None
            return Result.CUDA_SUCCESS, *getattr(self, f"_{call}")(*arguments)

        answer.__name__ = call
        return answer

    def _cuInit(self, flags: int) -> tuple[()]:  # noqa: N802
        return ()

    def _cuDeviceGetCount(self) -> tuple[int]:  # noqa: N802
        return (self.count,)

    def _cuDeviceGet(self, ordinal: int) -> tuple[int]:  # noqa: N802
        return (ordinal,)

    def _cuDeviceGetUuid(self, device: int) -> tuple[SimpleNamespace]:  # noqa: N802
        return (SimpleNamespace(bytes=bytes(range(16))),)

    def _cuDeviceGetName(self, length: int, device: int) -> tuple[bytes]:  # noqa: N802
        return (b"Stand-in" + bytes(length - 8),)

    def _cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[int]:  # noqa: N802
        return (self.exports,)

    def _cuDeviceTotalMem(self, device: int) -> tuple[int]:  # noqa: N802
        return (64 * MIB,)

    def _cuMemGetAllocationGranularity(self, prop: Any, flag: int) -> tuple[int]:  # noqa: N802
        assert (prop.type, prop.location.type, prop.location.id, prop.requestedHandleTypes) == (1, 1, 0, 1)
        return (GRANULARITY,)

    def _cuMemCreate(self, nbytes: int, prop: Any, flags: int) -> tuple[int]:  # noqa: N802
        handle = next(self._handles)
        self.memory[handle] = nbytes
        return (handle,)

    def _cuMemExportToShareableHandle(self, handle: int, kind: int, flags: int) -> tuple[int]:  # noqa: N802
        reader, writer = os.pipe()
        os.close(writer)
        os.set_inheritable(reader, True)  # as the driver may give it
        return (reader,)

    def _cuMemRelease(self, handle: int) -> tuple[()]:  # noqa: N802
        del self.memory[handle]
        return ()


GPU = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> StandInCuda:
    stand_in = StandInCuda()
    package = ModuleType("cuda.bindings")
    package.driver = stand_in  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", package)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    return stand_in


def test_cuda_devices_are_named_by_uuid(cuda: StandInCuda) -> None:
    driver = CudaDriver()
    [device] = driver.devices()
    assert (device.uuid, device.name, device.total_bytes) == (GPU, "Stand-in", 64 * MIB)
    assert driver.granularity(GPU) == GRANULARITY
    assert driver.bytes_in_use(GPU) is None
    with pytest.raises(NoDevice, match=f"'cpu'; there is {GPU}"):
        driver.create("cpu", 1)


def test_cuda_memory_is_created_exported_and_released(cuda: StandInCuda) -> None:
    driver = CudaDriver()
    ledger = Ledger()
    vram = Vram(driver, ledger, {GPU: 32 * MIB})
    allocation = vram.allocate(Account(f"vram:{GPU}", 1, 1, "ring"), 3 * MIB, temporary=False)
    assert cuda.memory == {77: 4 * MIB}
    assert allocation.committed == driver.held_bytes(allocation.block) == 4 * MIB
    assert not os.get_inheritable(vram.fd(allocation.handle))
    ledger.check()
    vram.close()
    assert cuda.memory == {}
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(allocation.block.fd)


def test_a_failed_export_releases_the_memory(cuda: StandInCuda) -> None:
    driver = CudaDriver()
    cuda.errors["cuMemExportToShareableHandle"] = Result.CUDA_ERROR_NOT_SUPPORTED
    with pytest.raises(OsFailure, match="cuMemExportToShareableHandle: CUDA_ERROR_NOT_SUPPORTED"):
        driver.create(GPU, 1)
    assert cuda.memory == {}


def test_a_full_device_is_out_of_capacity(cuda: StandInCuda) -> None:
    driver = CudaDriver()
    cuda.errors["cuMemCreate"] = Result.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(OutOfCapacity, match="CUDA_ERROR_OUT_OF_MEMORY") as caught:
        driver.create(GPU, 1)
    assert caught.value.facts["tier"] == f"vram:{GPU}"
    assert caught.value.facts["asked"] == GRANULARITY


def test_other_refusals_carry_the_drivers_name_of_the_error(cuda: StandInCuda) -> None:
    driver = CudaDriver()
    block = driver.create(GPU, 1)
    cuda.errors = dict.fromkeys(("cuMemCreate", "cuMemRelease"), Result.CUDA_ERROR_NOT_SUPPORTED)
    with pytest.raises(OsFailure, match="cuMemCreate: CUDA_ERROR_NOT_SUPPORTED"):
        driver.create(GPU, 1)
    with pytest.raises(OsFailure, match="cuMemRelease: CUDA_ERROR_NOT_SUPPORTED"):
        driver.release(block)
    cuda.errors = {}
    driver.release(block)


@pytest.mark.parametrize(
    "call", ["cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetUuid", "cuDeviceTotalMem", "cuDeviceGetName"]
)
def test_a_driver_that_cannot_be_used_is_no_device(cuda: StandInCuda, call: str) -> None:
    cuda.errors[call] = Result.CUDA_ERROR_NO_DEVICE
    with pytest.raises(NoDevice, match=f"{call}: CUDA_ERROR_NO_DEVICE"):
        CudaDriver()


def test_a_device_that_cannot_export_is_no_device(cuda: StandInCuda) -> None:
    cuda.exports = 0
    with pytest.raises(NoDevice, match="cannot export memory as a file descriptor"):
        CudaDriver()


def test_no_devices_are_no_device(cuda: StandInCuda) -> None:
    cuda.count = 0
    with pytest.raises(NoDevice, match="the CUDA driver has no device"):
        CudaDriver()


def test_a_missing_package_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(NoDevice, match="cuda-bindings, which is not installed"):
        CudaDriver()


def test_a_missing_libcuda_is_no_device(cuda: StandInCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(flags: int) -> tuple[()]:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    monkeypatch.setattr(cuda, "_cuInit", refuse)
    with pytest.raises(NoDevice, match=r"cannot be loaded: Failed to dlopen libcuda\.so\.1"):
        CudaDriver()


class StandInNvml(ModuleType):
    """A GPU of which 40 MiB are in use: one the driver's own, 9 a process's, and 30, or ``kept``, no process's."""

    nvmlMemory_v2 = 2  # noqa: N815

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.failing: set[str] = set()
        self.kept = 30 * MIB

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        self._call("nvmlDeviceGetCount")
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return GPU

    def nvmlDeviceGetUUID(self, handle: str) -> str:  # noqa: N802
        return handle

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:  # noqa: N802
        return [SimpleNamespace(pid=5, usedGpuMemory=9 * MIB), SimpleNamespace(pid=6, usedGpuMemory=None)]

    def _call(self, name: str) -> None:
        if name in self.failing:
            raise self.NVMLError("Unknown Error")

    def nvmlInit(self) -> None:  # noqa: N802
        self._call("nvmlInit")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        self._call("nvmlDeviceGetHandleByUUID")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int = 1) -> SimpleNamespace:  # noqa: N802
        self._call("nvmlDeviceGetMemoryInfo")
        assert handle == GPU
        used = self.kept + 9 * MIB
        return SimpleNamespace(used=used + MIB) if version == 1 else SimpleNamespace(used=used, reserved=MIB)


def test_nvml_says_what_is_in_use(cuda: StandInCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = StandInNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    driver = CudaDriver()
    assert driver.bytes_in_use(GPU) == 40 * MIB
    cuda.errors["cuMemCreate"] = Result.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(OutOfCapacity) as caught:
        driver.create(GPU, 1)
    assert caught.value.facts["free"] == 24 * MIB
    nvml.failing.add("nvmlDeviceGetMemoryInfo")
    with pytest.raises(OsFailure, match="NVML memory information"):
        driver.bytes_in_use(GPU)


@pytest.mark.parametrize(("grown", "own"), [(3 * MIB, 3 * MIB), (500 * MIB, 16 * MIB), (-MIB, 0)])
def test_what_opening_the_device_took_is_the_daemons_own(
    cuda: StandInCuda, monkeypatch: pytest.MonkeyPatch, grown: int, own: int
) -> None:
    nvml = StandInNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)

    def initialise(flags: int) -> tuple[()]:
        nvml.kept += grown
        return ()

    monkeypatch.setattr(cuda, "_cuInit", initialise)
    assert CudaDriver().own_bytes(GPU) == own


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetCount"])
def test_without_nvml_nothing_is_claimed(cuda: StandInCuda, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    nvml = StandInNvml()
    nvml.failing.add(call)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    driver = CudaDriver()
    assert driver.bytes_in_use(GPU) == (40 * MIB if call == "nvmlDeviceGetCount" else None)
    assert driver.own_bytes(GPU) == 0
