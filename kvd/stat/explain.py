"""Where memory is: what the books say beside what the system says, each term measured on its own.

The terms of a device come from NVML and from what workers report, or for the device ``cpu`` from the daemon's
descriptors; those of host RAM from the daemon's /dev/shm and /proc. What may not be read is None: unknown, and not 0.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from kvd.run_dir import shm_prefix
from kvd.stat.page_cache import cached_bytes
from kvd.tiers.segment import SHM_DIRECTORY
from protocol.nvml import Nvml
from protocol.stats import NOT_PUBLISHED, NodeStats, TierStats, reports_of_processes

EXPLAIN_SCHEMA = 2
"""Version of what ``kvd-stat explain --json`` prints; raised when a field changes its meaning or goes away."""

_MEMFD = "/memfd:kvd-device"
_KIB = re.compile(r"^(VmPTE|RssAnon|RssFile|RssShmem):\s+(\d+) kB$", re.MULTILINE)


class DeviceTerms(msgspec.Struct, frozen=True):
    """One device. ``unexplained`` is ``in_use`` less all terms up to it; ``others`` is part of it.

    ``silent`` counts the leases that do not report what they have beside the daemon's memory.
    """

    device: str
    in_use: int | None
    driver: int
    daemon: int
    committed: int
    torch_reserved: int
    contexts: int
    unexplained: int | None
    others: int
    silent: int


class ProcessTerms(msgspec.Struct, frozen=True):
    """One process that may map kvd's memory: the daemon (``lease`` 0), or the holder of a lease."""

    lease: int
    pid: int
    client: str
    page_tables: int | None
    rss_anon: int | None
    rss_file: int | None
    rss_shmem: int | None


class HostTerms(msgspec.Struct, frozen=True):
    """Host RAM. ``in_use`` is of the daemon's /dev/shm, by anybody; ``unexplained`` is that less ``committed``."""

    in_use: int | None
    shm: int | None
    committed: int
    unexplained: int | None
    saved_page_cache: int | None
    page_tables: int | None
    processes: list[ProcessTerms]


class Explanation(msgspec.Struct, frozen=True):
    """Everything at one moment."""

    schema: int
    devices: list[DeviceTerms]
    host: HostTerms


def explain(stats: NodeStats, run_dir: Path, state_dir: Path | None) -> Explanation:
    """Measure every term. ``state_dir`` has the saved sessions, if there are any."""
    devices = [_device(tier, stats) for tier in stats.tiers if tier.tier.startswith("vram:")]
    [host] = [tier for tier in stats.tiers if tier.tier == "host"]
    return Explanation(EXPLAIN_SCHEMA, devices, _host(stats, host, run_dir, state_dir))


def _device(tier: TierStats, stats: NodeStats) -> DeviceTerms:
    device = tier.tier.removeprefix("vram:")
    in_use, driver, processes = _memfd_bytes(stats.pid), 0, dict[int, int]()
    if device != "cpu":
        in_use, driver, processes = _gpu_memory(device)
    reports = [lease for lease in reports_of_processes(stats.leases) if lease.device == device]
    reserved = sum(max(0, lease.torch_reserved) for lease in reports)
    contexts = sum(max(0, lease.context) for lease in reports)
    ours = {stats.pid, *(lease.pid for lease in stats.leases)}
    return DeviceTerms(
        device=device,
        in_use=in_use,
        driver=driver,
        daemon=tier.own,
        committed=tier.committed,
        torch_reserved=reserved,
        contexts=contexts,
        unexplained=None if in_use is None else in_use - driver - tier.own - tier.committed - reserved - contexts,
        others=sum(nbytes for pid, nbytes in processes.items() if pid not in ours),
        silent=sum(not lease.device or (lease in reports and lease.context == NOT_PUBLISHED) for lease in stats.leases),
    )


def _memfd_bytes(pid: int) -> int | None:
    """Bytes that the system has allocated for the daemon's stand-ins for VRAM, each counted once."""
    found: dict[int, int] = {}
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if _is_memfd(link):
                status = link.stat()
                found[status.st_ino] = status.st_blocks * 512
    except PermissionError:
        return None
    return sum(found.values())


def _is_memfd(link: Path) -> bool:
    try:
        return os.readlink(link).startswith(_MEMFD)
    except FileNotFoundError:  # closed meanwhile
        return False


def _gpu_memory(device: str) -> tuple[int | None, int, dict[int, int]]:
    """What anybody has of the GPU, the driver's own part of it, and what processes have; None where nobody can say."""
    nvml = Nvml.load()
    if nvml is None:
        return None, 0, {}
    memory = nvml.memory(device)
    return memory.in_use, memory.driver, dict(memory.processes)


def _host(stats: NodeStats, tier: TierStats, run_dir: Path, state_dir: Path | None) -> HostTerms:
    directory = Path(f"/proc/{stats.pid}/root") / SHM_DIRECTORY.relative_to("/")
    in_use = _or_unknown(lambda: _mount_bytes(directory))
    holders = [(lease.lease, lease.pid, lease.client) for lease in stats.leases]
    processes = [_process(*holder) for holder in [(0, stats.pid, "the daemon"), *holders]]
    by_pid = {process.pid: process.page_tables for process in processes}
    tables = [nbytes for nbytes in by_pid.values() if nbytes is not None]
    return HostTerms(
        in_use=in_use,
        shm=_or_unknown(lambda: sum(_shm_bytes(directory, run_dir))),
        committed=tier.committed,
        unexplained=None if in_use is None else in_use - tier.committed,
        saved_page_cache=0 if state_dir is None else _or_unknown(lambda: _saved_bytes(state_dir)),
        page_tables=sum(tables) if len(tables) == len(by_pid) else None,
        processes=processes,
    )


def _mount_bytes(directory: Path) -> int:
    """Bytes that anybody's files have of the file system."""
    status = os.statvfs(directory)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def _shm_bytes(directory: Path, run_dir: Path) -> Iterator[int]:
    """Bytes that the system has allocated for each segment of the daemon in ``run_dir``."""
    os.stat(directory)  # a glob passes over what may not be read
    for path in directory.glob(f"{shm_prefix(run_dir)[1:]}-*"):
        try:
            yield path.lstat().st_blocks * 512
        except FileNotFoundError:  # a session ended meanwhile
            continue


def _process(lease: int, pid: int, client: str) -> ProcessTerms:
    """The daemon's view of a process; what cannot be read of it, because it has ended, is unknown."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        text = ""
    kib = {name: int(value) for name, value in _KIB.findall(text)}
    tables, *rss = (kib[name] * 1024 if name in kib else None for name in ("VmPTE", "RssAnon", "RssFile", "RssShmem"))
    return ProcessTerms(lease, pid, client, tables, *rss)


def _saved_bytes(state_dir: Path) -> int:
    with os.scandir(state_dir) as entries:
        return sum(cached_bytes(Path(entry.path)) for entry in entries if entry.name.endswith(".kvd"))


def _or_unknown(measure: Callable[[], int]) -> int | None:
    """None where this user may not look."""
    try:
        return measure()
    except PermissionError:
        return None
