"""A CUDA GPU as a compute device: registered host RAM, and VRAM imported from the daemon's descriptors."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any

import torch

from compute.context_bytes import ContextBytes
from compute.device import Copy, Mapping, OwnMemory
from compute.mapping import REGISTER_CHUNK, address_of, map_segment
from compute.populate import populate
from protocol.errors import NoDevice, OsFailure


class _Foreign:
    """Memory of another allocator, as ``torch.as_tensor`` takes it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class CudaDevice:
    """One GPU of this process. Raises `NoDevice` where it, its driver or ``cuda-bindings`` is missing."""

    def __init__(self, ordinal: int = 0) -> None:
        self._context = ContextBytes()
        if not torch.cuda.is_available():
            raise NoDevice("no usable CUDA GPU: torch.cuda.is_available() is false", device="cuda")
        if ordinal >= torch.cuda.device_count():
            raise NoDevice(f"no CUDA GPU {ordinal}; there are {torch.cuda.device_count()}", device=f"cuda:{ordinal}")
        try:
            from cuda.bindings import driver
        except ImportError:
            raise NoDevice("the package cuda-bindings is missing: install kvd-tier[cuda]", device="cuda") from None
        torch.cuda.set_device(ordinal)
        torch.cuda.init()
        # Row invariance: tf32 would make a row's bits depend on the kernel that the library picks.
        torch.backends.cuda.matmul.allow_tf32 = False
        self.uuid = f"GPU-{torch.cuda.get_device_properties(ordinal).uuid}"
        torch.cuda.synchronize()  # makes the context
        self._context.made(self.uuid)
        torch.empty(1, device="cuda")  # has the context current in this thread, as the driver's calls below need it
        self.torch_device = torch.device("cuda", ordinal)
        self._driver = driver
        self._ordinal = ordinal
        self._copies = torch.cuda.Stream(self.torch_device)

    def map_shared(self, fd: int, nbytes: int, *, read_only: bool = False) -> Mapping:
        return _RegisteredMapping(self, fd, nbytes, read_only)

    def registering(self, nbytes: int) -> AbstractContextManager[None]:
        return self._context.registering(nbytes)

    def map_device(self, fd: int, nbytes: int) -> Mapping:
        return _ImportedMapping(self, fd, nbytes)

    def start_copy(self, destination: torch.Tensor, source: torch.Tensor) -> Copy:
        before = torch.cuda.current_stream(self.torch_device).record_event()
        self._copies.wait_event(before)
        with torch.cuda.stream(self._copies):
            # Both addresses are known to the driver (registered host RAM, VRAM): the copy engine does it in one DMA.
            self.call(
                "cuMemcpyAsync", destination.data_ptr(), source.data_ptr(), source.numel(), self._copies.cuda_stream
            )
            event = torch.cuda.Event()
            event.record(self._copies)
        return _EventCopy(event)

    def own_memory(self) -> OwnMemory:
        return OwnMemory(torch.cuda.memory_reserved(self._ordinal), self._context.measured)

    def warmed_up(self) -> None:
        self._context.measure(torch.cuda.memory_reserved(self._ordinal))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def close(self) -> None:
        self._copies.synchronize()

    def tensor_at(self, address: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] over foreign memory that the GPU can reach."""
        return torch.as_tensor(_Foreign(address, nbytes), device=self.torch_device)

    def call(self, name: str, *arguments: Any) -> Any:
        """A driver call; raises `OsFailure` with the driver's own name of the error. Returns its one result, if any."""
        status, *results = getattr(self._driver, name)(*arguments)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise OsFailure(f"{name} failed: {status.name}", call=name, status=status.name)
        return results[0] if results else None

    def access(self) -> Any:
        """Read-write access for this GPU, as ``cuMemSetAccess`` takes it."""
        descriptor = self._driver.CUmemAccessDesc()
        descriptor.location.type = self._driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        descriptor.location.id = self._ordinal
        descriptor.flags = self._driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return descriptor

    def registration_flags(self, read_only: bool) -> int:
        """For ``cuMemHostRegister``. Raises `NoDevice` where the GPU takes no memory that its process only reads."""
        flags = self._driver.CU_MEMHOSTREGISTER_PORTABLE | self._driver.CU_MEMHOSTREGISTER_DEVICEMAP
        if not read_only:
            return int(flags)
        attribute = self._driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED
        if not self.call("cuDeviceGetAttribute", attribute, self._ordinal):
            raise NoDevice(f"{self.uuid} and its driver cannot register read-only host memory", device=self.uuid)
        return int(flags | self._driver.CU_MEMHOSTREGISTER_READ_ONLY)

    @property
    def posix_descriptor(self) -> Any:
        """The handle type that the daemon exports."""
        return self._driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class _EventCopy:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


class _RegisteredMapping:
    """Shared memory mapped here and registered with the GPU, in chunks; all of it or none."""

    def __init__(self, device: CudaDevice, fd: int, nbytes: int, read_only: bool) -> None:
        self._device = device
        self._map = map_segment(fd, nbytes, read_only=read_only)
        self.address = address_of(self._map)
        populate(self.address, nbytes, read_only=read_only)
        flags = device.registration_flags(read_only)
        self._chunks: list[int] = []
        try:
            for start in range(0, nbytes, REGISTER_CHUNK):
                size = min(REGISTER_CHUNK, nbytes - start)
                device.call("cuMemHostRegister", self.address + start, size, flags)
                self._chunks.append(self.address + start)
        except OsFailure:
            self._release()
            raise
        self.tensor = device.tensor_at(self.address, nbytes)

    def close(self) -> None:
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self._release()

    def _release(self) -> None:
        while self._chunks:
            self._device.call("cuMemHostUnregister", self._chunks.pop())
        self._map.close()


class _ImportedMapping:
    """VRAM that another process made, mapped whole: part of a handle cannot be mapped."""

    def __init__(self, device: CudaDevice, fd: int, nbytes: int) -> None:
        self._device, self._nbytes = device, nbytes
        try:
            handle = device.call("cuMemImportFromShareableHandle", fd, device.posix_descriptor)
        finally:
            os.close(fd)
        self.address = 0
        try:
            self.address = int(device.call("cuMemAddressReserve", nbytes, 0, 0, 0))
            device.call("cuMemMap", self.address, nbytes, 0, handle, 0)
            device.call("cuMemSetAccess", self.address, nbytes, [device.access()], 1)
        except OsFailure:
            if self.address:
                device.call("cuMemAddressFree", self.address, nbytes)
            raise
        finally:
            # The mapping keeps the memory; the handle itself is of no more use.
            device.call("cuMemRelease", handle)
        self.tensor = device.tensor_at(self.address, nbytes)

    def close(self) -> None:
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self._device.call("cuMemUnmap", self.address, self._nbytes)
        self._device.call("cuMemAddressFree", self.address, self._nbytes)
