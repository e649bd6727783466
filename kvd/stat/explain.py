"""Where memory is: what the books say beside what the system says, each term measured on its own.

The terms of a device come from NVML, or for the device ``cpu`` from the daemon's descriptors; those of host RAM from
/dev/shm and /proc. What may not be read, or what nobody publishes, is None: unknown, and not 0.
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
from protocol.errors import OsFailure
from protocol.stats import NodeStats, TierStats

EXPLAIN_SCHEMA = 1
"""Version of what ``kvd-stat explain --json`` prints; raised when a field changes its meaning or goes away."""

_MEMFD = "/memfd:kvd-device"
_KIB = re.compile(r"^(VmPTE|RssAnon|RssFile|RssShmem):\s+(\d+) kB$", re.MULTILINE)


class DeviceTerms(msgspec.Struct, frozen=True):
    """One device. ``unexplained`` is ``in_use`` less all terms that are known."""

    device: str
    in_use: int | None
    committed: int
    torch_reserved: int | None
    contexts: int | None
    unexplained: int | None


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
    """Host RAM. ``unexplained`` is ``shm`` less ``committed``."""

    shm: int
    committed: int
    unexplained: int
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
    devices = [_device(tier, stats.pid) for tier in stats.tiers if tier.tier.startswith("vram:")]
    [host] = [tier for tier in stats.tiers if tier.tier == "host"]
    return Explanation(EXPLAIN_SCHEMA, devices, _host(stats, host, run_dir, state_dir))


def _device(tier: TierStats, daemon: int) -> DeviceTerms:
    device = tier.tier.removeprefix("vram:")
    if device == "cpu":
        in_use, contexts, torch_reserved = _memfd_bytes(daemon), 0, 0  # no driver: a process keeps nothing of its own
    else:
        in_use, contexts, torch_reserved = _nvml_in_use(device), None, None
    known = tier.committed + (contexts or 0) + (torch_reserved or 0)
    unexplained = None if in_use is None else in_use - known
    return DeviceTerms(device, in_use, tier.committed, torch_reserved, contexts, unexplained)


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


def _nvml_in_use(device: str) -> int | None:
    """What the driver reports as taken by anybody, itself included; None without the package ``nvidia-ml-py``."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(device)).used)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise OsFailure(f"NVML memory information of {device}: {error}", device=device) from error


def _host(stats: NodeStats, tier: TierStats, run_dir: Path, state_dir: Path | None) -> HostTerms:
    shm = sum(_shm_bytes(run_dir))
    holders = [(lease.lease, lease.pid, lease.client) for lease in stats.leases]
    processes = [_process(*holder) for holder in [(0, stats.pid, "the daemon"), *holders]]
    by_pid = {process.pid: process.page_tables for process in processes}
    tables = [nbytes for nbytes in by_pid.values() if nbytes is not None]
    return HostTerms(
        shm=shm,
        committed=tier.committed,
        unexplained=shm - tier.committed,
        saved_page_cache=0 if state_dir is None else _or_unknown(lambda: _saved_bytes(state_dir)),
        page_tables=sum(tables) if len(tables) == len(by_pid) else None,
        processes=processes,
    )


def _shm_bytes(run_dir: Path) -> Iterator[int]:
    """Bytes that the system has allocated for each segment of the daemon in ``run_dir``."""
    for path in SHM_DIRECTORY.glob(f"{shm_prefix(run_dir)[1:]}-*"):
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
