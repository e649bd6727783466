"""VRAM from the CUDA driver's virtual-memory calls, in a process that never creates a CUDA context.

``cuMemCreate`` makes physical memory and ``cuMemExportToShareableHandle`` a file descriptor for it, 15–75 µs per call
and no context memory; mapping it is the workers' business. The memory lives until the handle is released here and no
process maps it, and it reads zero when it is created again.
"""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvd.alloc.sizes import require_size
from kvd.tiers.driver import DeviceBlock, DeviceInfo, vram_tier
from protocol.errors import InvalidValue, NoDevice, OsFailure, OutOfCapacity
from protocol.layout import round_up
from protocol.nvml import Nvml

MOST_OWN = 16 << 20
"""Bytes that opening a device may take; what is above is another process's that came at the same moment."""


@dataclass(frozen=True)
class _Device:
    info: DeviceInfo
    allocation: Any
    granularity: int
    nvml: Any


class CudaDriver:
    """A `DeviceDriver` for all CUDA devices that this process may see, named by UUID (``GPU-…``).

    Raises `NoDevice` where the package ``cuda-bindings``, the driver or a device is missing, or a device cannot export
    memory as a file descriptor; the message has the driver's own name of the error.
    """

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise NoDevice("device cuda needs the package cuda-bindings, which is not installed") from error
        self._cuda: Any = driver
        nvml = Nvml.load()
        before = _kept(nvml)
        try:
            self._call(NoDevice, driver.cuInit, 0)
        except RuntimeError as error:  # what cuda-bindings raises when there is no libcuda to load
            raise NoDevice(f"the CUDA driver cannot be loaded: {error}") from error
        count = self._call(NoDevice, driver.cuDeviceGetCount)
        if not count:
            raise NoDevice("the CUDA driver has no device")
        self._nvml = _load_nvml()
        self._devices = {device.info.uuid: device for device in map(self._describe, range(count))}
        after = _kept(nvml)
        self._own = {uuid: min(max(0, after[uuid] - before[uuid]), MOST_OWN) for uuid in before.keys() & after.keys()}

    def devices(self) -> list[DeviceInfo]:
        return [device.info for device in self._devices.values()]

    def granularity(self, device: str) -> int:
        return self._device(device).granularity

    def create(self, device: str, nbytes: int) -> DeviceBlock:
        known = self._device(device)
        size = round_up(require_size("bytes of a block", nbytes), known.granularity)
        error, memory = self._cuda.cuMemCreate(size, known.allocation, 0)
        if error == self._cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            total, taken = known.info.total_bytes, self.bytes_in_use(device)
            free = 0 if taken is None else total - taken
            raise OutOfCapacity(vram_tier(device), size, free, total, [f"the device's processes ({error.name})"])
        self._check(OsFailure, "cuMemCreate", error)
        handle = int(memory)
        try:
            fd = self._call(OsFailure, self._cuda.cuMemExportToShareableHandle, handle, self._descriptor_type(), 0)
        except OsFailure:
            self._call(OsFailure, self._cuda.cuMemRelease, handle)
            raise
        os.set_inheritable(fd, False)
        return DeviceBlock(fd, size, device, handle)

    def adopt(self, device: str, fd: int, nbytes: int) -> DeviceBlock:
        """The size is the giver's word: the driver cannot be asked about a handle without a context."""
        known = self._device(device)
        if nbytes < 1 or nbytes % known.granularity:
            raise InvalidValue("bytes of device memory", nbytes, f"a multiple of {known.granularity}")
        error, memory = self._cuda.cuMemImportFromShareableHandle(fd, self._descriptor_type())
        if error != self._cuda.CUresult.CUDA_SUCCESS:
            raise InvalidValue("descriptor of device memory", fd, f"one that the driver exported ({error.name})")
        return DeviceBlock(os.dup(fd), nbytes, device, int(memory))

    def release(self, block: DeviceBlock) -> None:
        self._call(OsFailure, self._cuda.cuMemRelease, block.handle)
        os.close(block.fd)

    def held_bytes(self, block: DeviceBlock) -> int:
        """The size that ``cuMemCreate`` accepted: the driver cannot be asked about a handle without a context."""
        return block.nbytes

    def own_bytes(self, device: str) -> int:
        """As measured when the driver was initialised; 0 where NVML cannot be asked."""
        self._device(device)
        return self._own.get(device, 0)

    def bytes_in_use(self, device: str) -> int | None:
        """From NVML; None without the package ``nvidia-ml-py`` or for a device that NVML does not know."""
        known = self._device(device)
        if known.nvml is None:
            return None
        try:
            return int(self._nvml.nvmlDeviceGetMemoryInfo(known.nvml).used)
        except self._nvml.NVMLError as error:
            raise OsFailure(f"NVML memory information of {device}: {error}", device=device) from error

    def _describe(self, ordinal: int) -> _Device:
        cuda = self._cuda
        device = self._call(NoDevice, cuda.cuDeviceGet, ordinal)
        name = f"GPU-{uuid.UUID(bytes=bytes(self._call(NoDevice, cuda.cuDeviceGetUuid, device).bytes))}"
        model = self._call(NoDevice, cuda.cuDeviceGetName, 256, device).split(b"\0")[0].decode()
        exports = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        if not self._call(NoDevice, cuda.cuDeviceGetAttribute, exports, device):
            raise NoDevice(f"{name} ({model}) cannot export memory as a file descriptor", device=name)
        allocation = cuda.CUmemAllocationProp()
        allocation.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        allocation.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        allocation.location.id = ordinal
        allocation.requestedHandleTypes = self._descriptor_type()
        least = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granularity = self._call(NoDevice, cuda.cuMemGetAllocationGranularity, allocation, least)
        info = DeviceInfo(name, model, self._call(NoDevice, cuda.cuDeviceTotalMem, device))
        return _Device(info, allocation, granularity, self._nvml_handle(name))

    def _nvml_handle(self, name: str) -> Any:
        if self._nvml is None:
            return None
        try:
            return self._nvml.nvmlDeviceGetHandleByUUID(name)
        except self._nvml.NVMLError:
            return None

    def _descriptor_type(self) -> Any:
        return self._cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _device(self, device: str) -> _Device:
        try:
            return self._devices[device]
        except KeyError:
            here = ", ".join(self._devices)
            raise NoDevice(f"there is no device {device!r}; there is {here}", device=device) from None

    def _call(self, failure: type[NoDevice | OsFailure], function: Any, *arguments: Any) -> Any:
        """What the driver returns; raises ``failure`` with the name of its error."""
        error, *values = function(*arguments)
        self._check(failure, function.__name__, error)
        return values[0] if values else None

    def _check(self, failure: type[NoDevice | OsFailure], what: str, error: Any) -> None:
        if error != self._cuda.CUresult.CUDA_SUCCESS:
            raise failure(f"{what}: {error.name}", call=what, error=error.name)


def _kept(nvml: Nvml | None) -> dict[str, int]:
    """By GPU, what it keeps for no process; nothing of those that cannot be asked."""
    found: dict[str, int] = {}
    if nvml is not None:
        for device in nvml.devices():
            with suppress(OsFailure):
                found[device] = nvml.kept(device)
    return found


def _load_nvml() -> Any:
    """NVML, initialised; None where the package or the library is missing."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml
