"""Mapping the daemon's shared memory into this process."""

from __future__ import annotations

import mmap
import os

import numpy

from protocol.errors import OsFailure

REGISTER_CHUNK = 64 << 30
"""Most bytes registered with a GPU in one call: recent drivers fail on registrations of half a TiB."""


def address_of(mapped: mmap.mmap) -> int:
    """Where it is mapped, read-only or not."""
    return int(numpy.frombuffer(mapped, numpy.uint8).ctypes.data)


def map_segment(fd: int, nbytes: int, *, read_only: bool = False) -> mmap.mmap:
    """Map ``nbytes`` of a shared memory file and close ``fd``, whatever happens. Raises `OsFailure` where that fails.

    A forked child does not inherit the pages, and a core dump does not hold them: they are somebody's conversation.
    """
    try:
        mapped = mmap.mmap(fd, nbytes, access=mmap.ACCESS_READ if read_only else mmap.ACCESS_WRITE)
    except (OSError, ValueError) as error:
        raise OsFailure(f"cannot map {nbytes} bytes of shared memory: {error}", nbytes=nbytes) from None
    finally:
        os.close(fd)
    mapped.madvise(mmap.MADV_DONTFORK)
    mapped.madvise(mmap.MADV_DONTDUMP)
    return mapped
