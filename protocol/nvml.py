"""What NVML says of a GPU's memory. Both sides measure with this, so that their terms are of one sum:

    in use = the driver's own + what processes have + what is kept for no process

No process has what the daemon gives out: it makes memory without a context. Beside that the driver keeps a little for
each process that uses it, and tables for host RAM that is registered. Needs the package ``nvidia-ml-py``.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from protocol.errors import OsFailure

SAMPLES = 3
"""Readings of which the median counts: others allocate between two calls."""


@dataclass(frozen=True)
class GpuMemory:
    """Bytes: all that is in use, ``driver`` of it the driver's own; by pid, what processes with a context have."""

    in_use: int
    driver: int
    processes: Mapping[int, int]

    @property
    def kept(self) -> int:
        """What is in use and neither the driver's nor any process's."""
        return self.in_use - self.driver - sum(self.processes.values())


class Nvml:
    """NVML, initialised until the process ends. Made by `load`."""

    def __init__(self, library: Any) -> None:
        self._library = library

    @classmethod
    def load(cls) -> Nvml | None:
        """None where the package or the library is missing."""
        try:
            import pynvml
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return None
        return cls(pynvml)

    def devices(self) -> list[str]:
        """The UUIDs of all GPUs; none where they cannot be listed."""
        library = self._library
        try:
            handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]
            return [library.nvmlDeviceGetUUID(handle) for handle in handles]
        except library.NVMLError:
            return []

    def memory(self, uuid: str) -> GpuMemory:
        """The GPU's memory now; raises `OsFailure`."""
        library = self._library
        try:
            handle = library.nvmlDeviceGetHandleByUUID(uuid)
            total = library.nvmlDeviceGetMemoryInfo(handle, version=library.nvmlMemory_v2)
            found = library.nvmlDeviceGetComputeRunningProcesses(handle)
        except library.NVMLError as error:
            raise OsFailure(f"NVML memory information of {uuid}: {error}", device=uuid) from error
        processes = {each.pid: each.usedGpuMemory for each in found if each.usedGpuMemory is not None}
        return GpuMemory(total.used + total.reserved, total.reserved, processes)

    def kept(self, uuid: str) -> int:
        """`GpuMemory.kept`, the median of several readings. Raises `OsFailure`."""
        return int(statistics.median(self.memory(uuid).kept for _ in range(SAMPLES)))

    def of_process(self, uuid: str, pid: int) -> int | None:
        """What a process has of the GPU; None where NVML does not know it by this pid. Raises `OsFailure`."""
        found = [self.memory(uuid).processes.get(pid) for _ in range(SAMPLES)]
        known = [nbytes for nbytes in found if nbytes is not None]
        return int(statistics.median(known)) if known else None
