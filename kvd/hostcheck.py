"""What the host can really give: free shared memory, available memory, and the limits of the control groups above us.

Populating shared memory past any of these ends in the kernel killing somebody, so sizes are refused beforehand. The
roots are arguments so that tests can describe other hosts. Kernel settings that cause stalls are not looked at here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import OsFailure, OutOfCapacity

_RECLAIMABLE = {"inactive_file", "active_file", "total_inactive_file", "total_active_file"}


@dataclass(frozen=True)
class MemoryLimit:
    """One limit on host memory: what it is called, its bytes, and how many of them are free."""

    name: str
    capacity: int
    free: int


@dataclass(frozen=True)
class HostRoots:
    """Where to look."""

    shm: Path = Path("/dev/shm")
    proc: Path = Path("/proc")
    cgroup: Path = Path("/sys/fs/cgroup")


def memory_limits(roots: HostRoots = HostRoots()) -> list[MemoryLimit]:
    """Every limit that shared memory of this process counts against. Raises `OsFailure` if they cannot be read."""
    try:
        limits = [_available(roots.proc / "meminfo"), *_cgroup_limits(roots)]
        mount = os.statvfs(roots.shm)
    except OSError as error:
        raise OsFailure(f"reading the host's memory limits: {error}") from error
    if mount.f_blocks:  # a tmpfs mounted with size=0 has no limit
        total, free = mount.f_blocks * mount.f_frsize, mount.f_bavail * mount.f_frsize
        limits.append(MemoryLimit(f"shared memory mount {roots.shm}", total, free))
    return limits


def tightest_limit(roots: HostRoots = HostRoots()) -> MemoryLimit:
    """The limit that leaves least."""
    return min(memory_limits(roots), key=lambda limit: limit.free)


def require_memory(nbytes: int, roots: HostRoots = HostRoots()) -> None:
    """Raise `OutOfCapacity`, naming the tightest limit, unless every limit leaves ``nbytes`` free."""
    tightest = tightest_limit(roots)
    if nbytes > tightest.free:
        raise OutOfCapacity(tightest.name, nbytes, tightest.free, tightest.capacity)


class SmallSizes:
    """`require_memory` for many small sizes: what the host has is not looked up for each while there is plenty."""

    FRESH_S = 0.5
    PLENTY = 1 << 30
    """Bytes that must be left for a look-up to hold: others take memory meanwhile."""

    def __init__(self, roots: HostRoots = HostRoots()) -> None:
        self._roots = roots
        self._left = 0
        self._looked_at = 0.0

    def require(self, nbytes: int) -> None:
        """Raise `OutOfCapacity`, naming the tightest limit, unless every limit leaves ``nbytes`` free."""
        now = time.monotonic()
        if now - self._looked_at > self.FRESH_S or self._left - nbytes < self.PLENTY:
            require_memory(nbytes, self._roots)
            self._left, self._looked_at = tightest_limit(self._roots).free, now
        self._left -= nbytes


def _available(meminfo: Path) -> MemoryLimit:
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    total, available = (int(fields[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    return MemoryLimit(f"MemAvailable of {meminfo}", total, available)


def _cgroup_limits(roots: HostRoots) -> Iterator[MemoryLimit]:
    """The memory limits of this process's control groups and of all groups above them, version 2 and version 1."""
    for line in (roots.proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _walk(roots.cgroup, path, ("memory.max", "memory.high"), "memory.current")
        elif "memory" in controllers.split(","):
            yield from _walk(roots.cgroup / "memory", path, ("memory.limit_in_bytes",), "memory.usage_in_bytes")


def _walk(mount: Path, path: str, limit_files: tuple[str, ...], usage_file: str) -> Iterator[MemoryLimit]:
    """From the group at ``path`` up to the mount; a container may not see the groups between."""
    group = Path(path.lstrip("/"))
    if ".." in group.parts:  # the group lies outside our control group namespace
        group = Path()
    for directory in (mount / group, *(mount / parent for parent in group.parents)):
        for limit in (directory / name for name in limit_files):
            if not limit.is_file() or (text := limit.read_text().strip()) == "max":
                continue
            taken = int((directory / usage_file).read_text()) - _reclaimable(directory / "memory.stat")
            yield MemoryLimit(f"control group limit {limit}", int(text), max(0, int(text) - taken))


def _reclaimable(stat: Path) -> int:
    """Bytes of file cache that the kernel drops before it kills anybody. Version 1 says ``total_`` with children."""
    fields = dict(line.split() for line in stat.read_text().splitlines())
    values = {key: int(fields[key]) for key in _RECLAIMABLE & fields.keys()}
    hierarchical = [value for key, value in values.items() if key.startswith("total_")]
    return sum(hierarchical or values.values())
