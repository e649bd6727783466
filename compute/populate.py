"""Filling this process's page tables for a mapping, by several threads at once.

Registering memory with a GPU faults it in page by page otherwise, which takes several times as long.
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor

from protocol.errors import OsFailure

_POPULATE_READ, _POPULATE_WRITE = 22, 23  # since Linux 5.14; the module mmap does not have them
_CHUNK = 128 << 20
_THREADS = 16

# A call through ctypes lets other threads run, which mmap.madvise does not.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def populate(address: int, nbytes: int, *, read_only: bool = False) -> None:
    """Map every page of the mapping at ``address``, which is writable unless ``read_only``.

    Raises `OsFailure` where a page cannot be had.
    """
    advice = _POPULATE_READ if read_only else _POPULATE_WRITE

    def part(start: int) -> None:
        if _libc.madvise(address + start, min(_CHUNK, nbytes - start), advice):
            reason = os.strerror(ctypes.get_errno())
            raise OsFailure(f"cannot populate {nbytes} bytes of mapped memory: {reason}", nbytes=nbytes)

    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
        list(threads.map(part, range(0, nbytes, _CHUNK)))
