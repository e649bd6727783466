"""What this process has mapped of the daemon's memory: extents of host RAM, and VRAM.

An extent is mapped (and registered with the GPU) once per process, whatever the number of sessions with pages in it.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

import torch

from compute.client import Client
from compute.device import Device, Mapping
from compute.kernels.memory import Memory
from protocol.errors import NoDevice
from protocol.handles import DevicePurpose, Extent


class DeviceBuffer:
    """VRAM on the books of the daemon: ``tensor`` is uint8 [committed bytes], zero when new."""

    def __init__(self, attachment: Attachment, handle: int, mapping: Mapping) -> None:
        self._attachment = attachment
        self._mapping = mapping
        self.handle = handle
        self.tensor: torch.Tensor = mapping.tensor
        self.address = mapping.address

    def free(self) -> None:
        """Unmap it and give it back. No kernel or copy that uses it may be in flight."""
        self._attachment.free(self)

    def unmap(self) -> None:
        """Unmap it; it stays on the books until the lease ends."""
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self._mapping.close()


class Attachment:
    """The mappings of one lease on one compute device. ``close`` undoes all of them, not the lease."""

    def __init__(self, client: Client, device: Device) -> None:
        known = [info.device for info in client.welcome.devices]
        if device.uuid not in known:
            raise NoDevice(
                f"the daemon gives no memory of {device.uuid}; it has {', '.join(known)}", device=device.uuid
            )
        self.client = client
        self.device = device
        self.memory = Memory()
        """Every range that is mapped."""
        self.attach_seconds = 0.0
        """Time spent mapping and registering host RAM."""
        self.attached_bytes = 0
        """Host RAM mapped and registered."""
        self._extents: dict[int, Mapping] = {}
        self._buffers: dict[int, DeviceBuffer] = {}

    def allocate(self, nbytes: int, purpose: DevicePurpose, session: int = 0) -> DeviceBuffer:
        """Take at least ``nbytes`` of the device's VRAM and map it."""
        memory = self.client.allocate_device(self.device.uuid, nbytes, purpose, session)
        try:
            mapping = self.device.map_device(self.client.claim(memory), memory.committed)
        except BaseException:
            self.client.free_device(memory.handle)
            raise
        buffer = DeviceBuffer(self, memory.handle, mapping)
        self._buffers[memory.handle] = buffer
        self.memory.add(buffer.tensor, buffer.address)
        return buffer

    def free(self, buffer: DeviceBuffer) -> None:
        """Unmap ``buffer`` and give it back."""
        del self._buffers[buffer.handle]
        self.memory.remove(buffer.address)
        buffer.unmap()
        self.client.free_device(buffer.handle)

    def adopt(self, extents: list[Extent]) -> None:
        """Map the extents that a reply brought. The daemon names each extent once per lease."""
        for extent in extents:
            start = time.perf_counter()
            fd = self.client.claim(extent.memory)
            mapping = self.device.map_shared(fd, extent.memory.nbytes)
            self._extents[extent.number] = mapping
            self.memory.add(mapping.tensor, mapping.address)
            self.attach_seconds += time.perf_counter() - start
            self.attached_bytes += extent.memory.nbytes

    def extent(self, number: int) -> Mapping:
        """The mapping of an extent that `adopt` has mapped."""
        return self._extents[number]

    def close(self) -> None:
        """Unmap everything. No kernel or copy may be in flight."""
        self.device.synchronize()
        self.memory = Memory()
        for buffer in self._buffers.values():
            buffer.unmap()
        self._buffers.clear()
        for mapping in self._extents.values():
            mapping.close()
        self._extents.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
