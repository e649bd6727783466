"""The CPU as a compute device: VRAM is stood in for by memfd, copies run in a thread of their own."""

from __future__ import annotations

import ctypes
import mmap
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import torch

from compute.device import Copy, Mapping, OwnMemory
from compute.mapping import address_of, map_segment


class SharedMapping:
    """A shared mapping of a file descriptor, which is closed. A forked child does not inherit the pages."""

    def __init__(self, fd: int, nbytes: int, *, read_only: bool = False) -> None:
        self._map = map_segment(fd, nbytes, read_only=read_only)
        self.tensor = readable_tensor(self._map) if read_only else torch.frombuffer(self._map, dtype=torch.uint8)
        self.address = self.tensor.data_ptr()

    def close(self) -> None:
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self._map.close()


def readable_tensor(mapped: mmap.mmap) -> torch.Tensor:
    """uint8 [nbytes] over a read-only mapping, which must outlive it: torch has no tensors that cannot be written."""
    return torch.frombuffer((ctypes.c_char * len(mapped)).from_address(address_of(mapped)), dtype=torch.uint8)


class ThreadCopy:
    """A copy that a thread makes."""

    def __init__(self, future: Future[object]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()


_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h


def keep_freed_memory() -> None:
    """Have malloc keep what a step frees for the next step: page faults took half the time of an index score.

    Process-wide, up to 256 MiB. A C library without ``mallopt`` is left as it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, 256 << 20)
        mallopt(_M_MMAP_THRESHOLD, 128 << 20)
        mallopt(_M_TOP_PAD, 64 << 20)


class CpuDevice:
    """The reference device. Work is done when a call returns, but for copies, which really run beside it."""

    torch_device = torch.device("cpu")
    uuid = "cpu"

    def __init__(self) -> None:
        keep_freed_memory()
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="kvd-copyback")

    def map_shared(self, fd: int, nbytes: int, *, read_only: bool = False) -> Mapping:
        return SharedMapping(fd, nbytes, read_only=read_only)

    def registering(self, nbytes: int) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()

    def map_device(self, fd: int, nbytes: int) -> Mapping:
        return SharedMapping(fd, nbytes)

    def start_copy(self, destination: torch.Tensor, source: torch.Tensor) -> Copy:
        def copy() -> None:
            ctypes.memmove(destination.data_ptr(), source.data_ptr(), source.numel())

        return ThreadCopy(self._copier.submit(copy))

    def own_memory(self) -> OwnMemory:
        """Nothing: VRAM is stood in for by the daemon's memory alone."""
        return OwnMemory(0, 0)

    def warmed_up(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        self._copier.shutdown(wait=True)
