"""A device made of host memory: memfd blocks with the granularity of VRAM, for machines without a GPU.

What is promised of VRAM holds here too: a block is there in full when it is given (a worker that touches it cannot be
killed by SIGBUS), reads zero, cannot be cut or grown by those it is passed to, and never shows in the file system.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os

from kvd.alloc.sizes import require_size
from kvd.tiers.driver import DeviceBlock, DeviceInfo, vram_tier
from protocol.errors import InvalidValue, NoDevice, OsFailure, OutOfCapacity
from protocol.layout import round_up

GRANULARITY = 2 * 1024 * 1024
"""Bytes: that of `cuMemCreate`."""

DEVICE = "cpu"
"""What the only device is called."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class CpuDriver:
    """A `DeviceDriver` with one device, ``cpu``, of ``capacity`` bytes."""

    def __init__(self, capacity: int) -> None:
        self._capacity = require_size("capacity of the cpu device", capacity)
        self._blocks: dict[int, DeviceBlock] = {}
        self._handles = itertools.count(1)

    def devices(self) -> list[DeviceInfo]:
        return [DeviceInfo(DEVICE, "host memory", self._capacity)]

    def granularity(self, device: str) -> int:
        self._require(device)
        return GRANULARITY

    def create(self, device: str, nbytes: int) -> DeviceBlock:
        self._require(device)
        size = round_up(require_size("bytes of a block", nbytes), GRANULARITY)
        free = self._capacity - sum(block.nbytes for block in self._blocks.values())
        if size > free:
            raise OutOfCapacity(vram_tier(device), size, free, self._capacity)
        try:
            fd = _create_memfd(size)
        except OSError as error:
            if error.errno in (errno.ENOMEM, errno.ENOSPC):
                raise OutOfCapacity("host memory", size, 0, self._capacity, [os.strerror(error.errno)]) from error
            raise OsFailure(f"memfd of {size} bytes: {error.strerror}", nbytes=size) from error
        block = DeviceBlock(fd, size, device, next(self._handles))
        self._blocks[block.handle] = block
        return block

    def adopt(self, device: str, fd: int, nbytes: int) -> DeviceBlock:
        self._require(device)
        status = os.fstat(fd)
        try:
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) == _SEALS
        except OSError:
            sealed = False  # it is no memfd
        if not sealed or nbytes % GRANULARITY or status.st_size != nbytes or status.st_blocks * 512 != nbytes:
            raise InvalidValue("descriptor of device memory", fd, f"one that was given for {nbytes} bytes")
        block = DeviceBlock(os.dup(fd), nbytes, device, next(self._handles))
        self._blocks[block.handle] = block
        return block

    def release(self, block: DeviceBlock) -> None:
        if self._blocks.pop(block.handle, None) is None:
            raise OsFailure(f"block {block.handle} of {block.device} is not there to release", handle=block.handle)
        os.close(block.fd)

    def held_bytes(self, block: DeviceBlock) -> int:
        """The sealed size: unlike the pages behind it, which a worker can punch out, it is out of a worker's reach."""
        return os.fstat(block.fd).st_size

    def own_bytes(self, device: str) -> int:
        self._require(device)
        return 0

    def bytes_in_use(self, device: str) -> int:
        self._require(device)
        return sum(os.fstat(block.fd).st_blocks * 512 for block in self._blocks.values())

    def _require(self, device: str) -> None:
        if device != DEVICE:
            raise NoDevice(f"there is no device {device!r}; there is {DEVICE!r}", device=device)


def _create_memfd(nbytes: int) -> int:
    """A sealed memfd of ``nbytes``, every page of it there. Raises OSError and leaves nothing."""
    fd = os.memfd_create("kvd-device", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd
