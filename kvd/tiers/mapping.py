"""Mapping shared memory, advising on it, placing it and populating it: the system calls, with typed errors.

By ctypes, because a call through it lets other threads run, which `mmap.madvise` does not.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from types import TracebackType
from typing import Self

from kvd.hostcheck import tightest_limit
from protocol.errors import InvalidValue, KvdError, OsFailure, OutOfCapacity

_MADV_POPULATE_WRITE = 23  # linux/mman.h, since Linux 5.14; the module mmap does not have it
_MPOL_BIND = 2
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}
_NO_ROOM = (errno.EFAULT, errno.ENOMEM, errno.ENOSPC)

LARGEST_NUMA_NODE = 1023

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.syscall.restype = ctypes.c_long
_MAP_FAILED = ctypes.c_void_p(-1).value


class SharedMapping:
    """A writable mapping of the whole of a shared memory file, until it is closed. It is never read or written here.

    A core dump does not hold it: it is somebody's conversation.

    ``address`` is where it begins.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self._nbytes = nbytes
        address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        if address == _MAP_FAILED:
            raise _failure(f"mapping {nbytes} bytes of shared memory", nbytes)
        self.address: int = address
        try:
            self._advise(0, nbytes, mmap.MADV_DONTDUMP, "keeping shared memory out of core dumps")
        except KvdError:
            self.close()
            raise

    def advise_huge_pages(self) -> None:
        """Ask for transparent huge pages. A kernel may be built without them: that is no error.

        A file in /dev/shm gets them only if that mount says ``huge=advise``.
        """
        self._advise(0, self._nbytes, mmap.MADV_HUGEPAGE, "advising huge pages", accepted=errno.EINVAL)

    def populate(self, offset: int, nbytes: int) -> None:
        """Have every page of the range allocated.

        Raises `OutOfCapacity` where there is no room (the kernel then says EFAULT or ENOMEM, and sends no signal).
        """
        self._advise(offset, nbytes, _MADV_POPULATE_WRITE, "populating shared memory (Linux 5.14 or later)")

    def bind(self, numa_node: int) -> None:
        """Allocate pages from one NUMA node only, whoever touches them; must precede `populate`.

        Raises `OsFailure` where the kernel or the machine does not do that, `InvalidValue` for a number that is none.
        """
        if not 0 <= numa_node <= LARGEST_NUMA_NODE:
            raise InvalidValue("NUMA node", numa_node, f"0 to {LARGEST_NUMA_NODE}")
        number = _SYS_MBIND.get(platform.machine())
        if number is None:
            raise OsFailure(f"binding memory to a NUMA node is not known for {platform.machine()}")
        mask = (1 << numa_node).to_bytes((LARGEST_NUMA_NODE + 1) // 8, "little")
        address, length = ctypes.c_void_p(self.address), ctypes.c_size_t(self._nbytes)
        # The kernel counts one bit less than it is told.
        bits = ctypes.c_ulong(LARGEST_NUMA_NODE + 2)
        if _libc.syscall(ctypes.c_long(number), address, length, _MPOL_BIND, mask, bits, 0):
            raise _failure(f"binding memory to NUMA node {numa_node}", self._nbytes)

    def close(self) -> None:
        """Unmap. The memory stays with its file."""
        if self.address and _libc.munmap(self.address, self._nbytes):
            raise _failure("unmapping shared memory", self._nbytes)
        self.address = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _advise(self, offset: int, nbytes: int, advice: int, what: str, accepted: int = 0) -> None:
        if _libc.madvise(self.address + offset, nbytes, advice) and ctypes.get_errno() != accepted:
            raise _failure(what, nbytes)


def _failure(what: str, nbytes: int) -> KvdError:
    """The error that the last call in this thread ended with."""
    return allocation_failure(what, nbytes, ctypes.get_errno())


def allocation_failure(what: str, nbytes: int, number: int) -> KvdError:
    """What errno ``number`` means where shared memory was to be had: `OutOfCapacity` or `OsFailure`."""
    if number not in _NO_ROOM:
        return OsFailure(f"{what}: {os.strerror(number)}", nbytes=nbytes, errno=number)
    limit = tightest_limit()
    return OutOfCapacity(limit.name, nbytes, limit.free, limit.capacity, [f"others ({os.strerror(number)})"])
