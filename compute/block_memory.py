"""The daemon's memory that blocks lie in, as it is mapped into this process, extent by extent.

A frame is one integer, as the protocol has it: the extent's number in the upper half, an index in the lower.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from compute.mapping import map_segment
from compute.populate import populate
from protocol.errors import OsFailure
from protocol.handles import Extent, SharedMemory
from protocol.layout import PAGE_ALIGNMENT, round_up

_INDEX = 0xFFFFFFFF


@dataclass(frozen=True)
class MappedExtent:
    """``nbytes`` of the daemon's memory at ``address`` of this process: what a CUDA client registers, whole.

    It stays mapped, and its address taken, for as long as anybody has this.
    """

    number: int
    address: int
    nbytes: int
    mapping: object = field(repr=False, compare=False)


class BlockMemory:
    """What is mapped of the extents of blocks of ``block_bytes`` bytes; ``claim`` makes descriptors of their grants."""

    def __init__(self, block_bytes: int, claim: Callable[[SharedMemory], int]) -> None:
        self._block_bytes = block_bytes
        self._claim = claim
        self._extents: dict[int, _Mapping] = {}
        self._populating: list[threading.Thread] = []
        self._closing = threading.Event()
        self.stride = round_up(block_bytes, PAGE_ALIGNMENT)

    def adopt(self, extents: Sequence[Extent]) -> None:
        """Map those of these extents that are not mapped. Their pages get into the page tables beside the caller."""
        new = [mapping for mapping in map(self._map, extents) if mapping is not None]
        if new:
            # Beside the engine: faults one by one would halve the speed of the first copy to each page.
            thread = threading.Thread(target=_populate, args=(new, self._closing), name="populate", daemon=True)
            self._populating = [*filter(threading.Thread.is_alive, self._populating), thread]
            thread.start()

    def wait_mapped(self) -> None:
        """Return when every page of what is mapped is in this process's page tables."""
        for thread in self._populating:
            thread.join()
        self._populating.clear()

    def extents(self) -> list[MappedExtent]:
        """All that is mapped."""
        return [self._mapped(number) for number in self._extents]

    def extents_of(self, frames: Sequence[int]) -> list[MappedExtent]:
        """Those that these frames are in."""
        return [self._mapped(number) for number in {frame >> 32 for frame in frames}]

    def addresses(self, frames: Sequence[int]) -> list[int]:
        """Where the frames begin in this process."""
        bases, stride = {number: mapping.address for number, mapping in self._extents.items()}, self.stride
        return [bases[frame >> 32] + (frame & _INDEX) * stride for frame in frames]

    def views(self, frames: Sequence[int], *, read_only: bool) -> list[memoryview]:
        """The bytes of the blocks in these frames."""
        views = {number: mapping.read_only if read_only else mapping.view for number, mapping in self._extents.items()}
        stride, nbytes = self.stride, self._block_bytes
        return [views[frame >> 32][(at := (frame & _INDEX) * stride) : at + nbytes] for frame in frames]

    def close(self) -> None:
        """Let go of all of it; what anybody still has of it stays mapped."""
        self._closing.set()
        self.wait_mapped()
        self._extents.clear()

    def _map(self, extent: Extent) -> _Mapping | None:
        """The mapping of an extent that is not mapped yet."""
        fd = self._claim(extent.memory)
        status = os.fstat(fd)
        known = self._extents.get(extent.number)
        if known is not None and known.identity == (status.st_dev, status.st_ino):
            os.close(fd)  # after a reconnection: it is the same memory
            return None
        mapping = _Mapping(fd, extent.memory.nbytes, (status.st_dev, status.st_ino))
        self._extents[extent.number] = mapping
        return mapping

    def _mapped(self, number: int) -> MappedExtent:
        mapping = self._extents[number]
        return MappedExtent(number, mapping.address, mapping.nbytes, mapping)


class _Mapping:
    """An extent in this process, for as long as anything refers to it. ``identity`` is the file's."""

    def __init__(self, fd: int, nbytes: int, identity: tuple[int, int]) -> None:
        self._memory = map_segment(fd, nbytes)
        self.identity = identity
        self.nbytes = nbytes
        self.view = memoryview(self._memory)
        self.read_only = self.view.toreadonly()
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))


def _populate(mappings: Sequence[_Mapping], closing: threading.Event) -> None:
    """Put the pages of all of these into this process's page tables."""
    for mapping in mappings:
        if closing.is_set():
            return
        with suppress(OsFailure):  # then its pages are faulted in when they are touched
            populate(mapping.address, mapping.nbytes)
