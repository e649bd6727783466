"""What this process has mapped of the daemon's memory: extents of host RAM, and VRAM.

An extent is mapped (and registered with the GPU) once per process, whatever the number of sessions with pages in it.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self, TypeVar

import torch

from compute.client import Client
from compute.device import Device, Mapping
from compute.kernels.memory import Memory
from compute.memory_report import MemoryReporter
from protocol.errors import DaemonUnavailable, NoDevice
from protocol.handles import DeviceMemory, DevicePurpose, Extent

_T = TypeVar("_T")


class Reattachable(Protocol):
    """A session of this process."""

    def reattach(self) -> set[int]:
        """Hold on to it after the daemon was started again; returns the numbers of the extents of its pages."""


class DeviceBuffer:
    """VRAM on the books of the daemon: ``tensor`` is uint8 [committed bytes], zero when new."""

    def __init__(
        self, attachment: Attachment, memory: DeviceMemory, purpose: DevicePurpose, session: int, fd: int
    ) -> None:
        """Maps ``fd``, and keeps it: an imported handle cannot be exported again, and a restarted daemon wants it."""
        self._attachment = attachment
        self._memory = memory
        self._purpose: DevicePurpose = purpose
        self._session = session
        self._fd = fd
        _kept_descriptors.add(fd)
        try:
            self._mapping: Mapping = attachment.device.map_device(os.dup(fd), memory.committed)
        except BaseException:
            self._close_descriptor()
            raise
        mapping = self._mapping
        self.handle = memory.handle
        self.tensor: torch.Tensor = mapping.tensor
        self.address = mapping.address

    def free(self) -> None:
        """Unmap it and give it back. No kernel or copy that uses it may be in flight."""
        self._attachment.free(self)

    def unmap(self) -> None:
        """Unmap it; it stays on the books until the lease ends."""
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self._mapping.close()
        self._close_descriptor()

    def hand_over(self) -> None:
        """Have it on the books of a daemon that was started again."""
        memory = self._memory
        self.handle = self._attachment.client.hand_over(
            self._fd, memory.device, memory.requested, memory.committed, self._purpose, self._session
        )

    def _close_descriptor(self) -> None:
        _kept_descriptors.discard(self._fd)
        os.close(self._fd)


class Attachment:
    """The mappings of one lease on one compute device. ``close`` undoes all of them, not the lease."""

    def __init__(self, client: Client, device: Device) -> None:
        known = [info.device for info in client.welcome.devices]
        if device.uuid not in known:
            raise NoDevice(
                f"the daemon gives no memory of {device.uuid}; it has {', '.join(known)}", device=device.uuid
            )
        _raise_file_limit()
        self.client = client
        self.device = device
        self.memory = Memory()
        """Every range that is mapped."""
        self.attach_seconds = 0.0
        """Time spent mapping and registering host RAM."""
        self.attached_bytes = 0
        """Host RAM mapped and registered."""
        self.sessions: list[Reattachable] = []
        """The sessions that this process holds."""
        self.on_loss: Callable[[DaemonUnavailable], None] | None = None
        """What is done when the daemon goes away, rather than to raise `DaemonUnavailable`."""
        self._extents: dict[tuple[int, bool], Mapping] = {}
        """By number, and whether read-only."""
        self._buffers: list[DeviceBuffer] = []
        self._reporter = MemoryReporter(client, device)

    def warmed_up(self) -> None:
        """The work has come to use what it will go on to use: the size of the context is reported anew."""
        self._reporter.warmed_up()

    def daemon_lost(self, error: DaemonUnavailable) -> None:
        """Return when another daemon has taken the place of the one that ``error`` is about; raises it otherwise."""
        if self.on_loss is None:
            raise error
        self.on_loss(error)

    def with_daemon(self, act: Callable[[], _T]) -> _T:
        """Do ``act``, and again where the daemon went away meanwhile.

        Raises `DaemonUnavailable` where none has taken its place in time.
        """
        while True:
            try:
                return act()
            except DaemonUnavailable as error:
                self.daemon_lost(error)

    def allocate(self, nbytes: int, purpose: DevicePurpose, session: int = 0) -> DeviceBuffer:
        """Take at least ``nbytes`` of the device's VRAM and map it."""
        return self.with_daemon(lambda: self._allocate(nbytes, purpose, session))

    def _allocate(self, nbytes: int, purpose: DevicePurpose, session: int) -> DeviceBuffer:
        memory = self.client.allocate_device(self.device.uuid, nbytes, purpose, session)
        try:
            buffer = DeviceBuffer(self, memory, purpose, session, self.client.claim(memory))
        except BaseException:
            self.client.free_device(memory.handle)
            raise
        self._buffers.append(buffer)
        self.memory.add(buffer.tensor, buffer.address)
        return buffer

    def free(self, buffer: DeviceBuffer) -> None:
        """Unmap ``buffer`` and give it back."""
        self._buffers.remove(buffer)
        self.memory.remove(buffer.address)
        buffer.unmap()
        try:
            self.client.free_device(buffer.handle)
        except DaemonUnavailable as error:
            self.daemon_lost(error)  # what is not handed over to the next daemon is on nobody's books

    def adopt(self, extents: list[Extent]) -> None:
        """Map the extents that a reply brought. The daemon names each extent once per lease, and once read-only."""
        # When it is reattached, an extent has been mapped since before the daemon was started again.
        new = [extent for extent in extents if (extent.number, extent.memory.read_only) not in self._extents]
        with self.device.registering(sum(extent.memory.nbytes for extent in new)):
            for extent in new:
                start = time.perf_counter()
                fd = self.client.claim(extent.memory)
                mapping = self.device.map_shared(fd, extent.memory.nbytes, read_only=extent.memory.read_only)
                self._extents[extent.number, extent.memory.read_only] = mapping
                self.memory.add(mapping.tensor, mapping.address)
                self.attach_seconds += time.perf_counter() - start
                self.attached_bytes += extent.memory.nbytes

    def extent(self, number: int, *, read_only: bool = False) -> Mapping:
        """The mapping of an extent that `adopt` has mapped."""
        return self._extents[number, read_only]

    def has_extent(self, number: int, *, read_only: bool) -> bool:
        """Whether `adopt` has mapped it so."""
        return (number, read_only) in self._extents

    def hand_over(self, extents: set[int]) -> None:
        """Go on with a daemon that was started again: hand VRAM over, unmap what is not one of ``extents`` any more."""
        for buffer in self._buffers:
            buffer.hand_over()
        for key in [key for key in self._extents if key[0] not in extents]:
            mapping = self._extents.pop(key)
            self.memory.remove(mapping.address)
            mapping.close()

    def close(self) -> None:
        """Unmap everything. No kernel or copy may be in flight."""
        self._reporter.close()
        self.device.synchronize()
        self.memory = Memory()
        for buffer in self._buffers:
            buffer.unmap()
        self._buffers.clear()
        for mapping in self._extents.values():
            mapping.close()
        self._extents.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _raise_file_limit() -> None:
    """Every piece of VRAM keeps its descriptor, and index keys come in pieces of 2 MiB: those of a million tokens are
    more than the usual soft limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


_kept_descriptors: set[int] = set()


def _close_descriptors() -> None:
    for fd in _kept_descriptors:
        os.close(fd)


# A forked child must not keep its parent's VRAM.
os.register_at_fork(after_in_child=_close_descriptors)
