"""How much of a file is in the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

_WINDOW = 1 << 30
"""Bytes that are looked at together: a mapping takes address space only, and a byte for each of its pages."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
_MAP_FAILED = ctypes.c_void_p(-1).value


def cached_bytes(path: Path) -> int:
    """Bytes of the pages of ``path`` that are in memory, which reads none of them. Raises OSError.

    The kernel tells it to the file's owner and to those who may write to it; to others all pages look cached.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        size = os.fstat(fd).st_size
        return sum(_resident(fd, start, min(_WINDOW, size - start)) for start in range(0, size, _WINDOW))
    finally:
        os.close(fd)


def _resident(fd: int, start: int, nbytes: int) -> int:
    address = _libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, start)
    if address == _MAP_FAILED:
        raise _last_error()
    try:
        pages = ctypes.create_string_buffer(-(-nbytes // mmap.PAGESIZE))
        if _libc.mincore(address, nbytes, pages):
            raise _last_error()
    finally:
        _libc.munmap(address, nbytes)
    return mmap.PAGESIZE * sum(state & 1 for state in pages.raw)


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
