"""What this process's CUDA context takes of a GPU, measured with NVML (`protocol.nvml`).

A context grows while kernels are loaded that run for the first time. So its size is measured when it is made and again
when the work has warmed up, and not whenever somebody looks: what a process takes later that is neither torch's nor the
daemon's would else be taken for its context. What the driver keeps for it, and for host RAM that is registered with
it, is measured around the calls that make it so.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from protocol.errors import OsFailure
from protocol.nvml import Nvml

MOST_FOR_CONTEXT = 16 << 20
"""Bytes that the driver may keep for a context; what is above is another process's that came at the same moment."""

TABLE_SHARE = 512
"""Registered bytes for each byte of the GPU's tables: 8 for a page of 4 KiB."""


class ContextBytes:
    """To be made before this process has a context. `measured` is None where nothing can be said: without
    ``nvidia-ml-py``, or where NVML does not know this process by its pid (a pid namespace of its own).
    """

    def __init__(self) -> None:
        self.measured: int | None = None
        self._nvml = Nvml.load()
        self._kept = 0
        self._before = {uuid: self._kept_of(uuid) for uuid in self._nvml.devices()} if self._nvml else {}
        self._uuid = ""

    def made(self, uuid: str) -> None:
        """The context is there, on the GPU ``uuid``; nothing else of this process is yet."""
        self._uuid = uuid
        if uuid in self._before:
            self._kept = _within(self._kept_of(uuid) - self._before[uuid], MOST_FOR_CONTEXT)
        self.measure(0)

    def measure(self, torch_reserved: int) -> None:
        """Take what this process has now, beside ``torch_reserved``, for its context."""
        try:
            found = self._nvml.of_process(self._uuid, os.getpid()) if self._nvml else None
        except OsFailure:
            found = None
        self.measured = None if found is None else found - torch_reserved + self._kept

    @contextmanager
    def registering(self, nbytes: int) -> Iterator[None]:
        """Count what the driver comes to keep for the ``nbytes`` of host RAM that are registered meanwhile."""
        if not nbytes:
            yield
            return
        before = self._kept_of(self._uuid)
        yield
        grown = _within(self._kept_of(self._uuid) - before, nbytes // TABLE_SHARE + (4 << 20))
        self._kept += grown
        if self.measured is not None:
            self.measured += grown

    def _kept_of(self, uuid: str) -> int:
        try:
            return self._nvml.kept(uuid) if self._nvml else 0
        except OsFailure:
            return 0


def _within(nbytes: int, most: int) -> int:
    return min(max(nbytes, 0), most)
