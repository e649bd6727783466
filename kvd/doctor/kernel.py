"""Settings of the kernel that move pages about: each move goes through the GPU driver's notifiers, and stops it."""

from __future__ import annotations

from collections.abc import Iterator

from kvd.doctor.host import Finding, Host, chosen, read_word, shm_mount
from kvd.doctor.settings import COMPACTION, NUMA_BALANCING, SHM_HUGE, SHMEM_ENABLED

_STALLS = (
    "Pages that the GPU has registered are moved through the driver's notifiers: decoding stops for up to a second."
)


def numa_balancing(host: Host) -> Iterator[Finding]:
    """Automatic NUMA balancing."""
    value = read_word(host.roots.proc / "sys/kernel/numa_balancing")
    nodes = len(list((host.roots.sys / "devices/system/node").glob("node[0-9]*")))
    if value in (None, "0"):
        yield Finding("NUMA balancing", "ok", "off" if value else "the kernel has none")
    elif nodes < 2:
        yield Finding("NUMA balancing", "ok", f"{NUMA_BALANCING} = {value}, but there is one node only")
    else:
        yield Finding(
            "NUMA balancing",
            "advice",
            f"{NUMA_BALANCING} = {value} on {nodes} nodes",
            _STALLS,
            f"sysctl {NUMA_BALANCING}=0, or --apply; for good: /usr/share/kvd/sysctl.d/90-kvd.conf",
            (NUMA_BALANCING, "0"),
        )


def compaction(host: Host) -> Iterator[Finding]:
    """Compaction that nobody asked for."""
    value = read_word(host.roots.proc / "sys/vm/compaction_proactiveness")
    if value in (None, "0"):
        yield Finding("compaction", "ok", "proactive compaction is off" if value else "the kernel has none")
    else:
        yield Finding(
            "compaction",
            "advice",
            f"{COMPACTION} = {value}",
            _STALLS,
            f"sysctl {COMPACTION}=0, or --apply; for good: /usr/share/kvd/sysctl.d/90-kvd.conf",
            (COMPACTION, "0"),
        )


def huge_pages(host: Host) -> Iterator[Finding]:
    """Huge pages for shared memory: the mount's own option decides, unless the kernel denies them to all."""
    words = read_word(host.roots.sys / "kernel/mm/transparent_hugepage/shmem_enabled")
    why = "With pages of 4 KiB, populating and registering host RAM takes about five times as long."
    if words is None:
        yield Finding("huge pages", "unknown", "the kernel is built without transparent huge pages", why)
        return
    if chosen(words) == "deny":
        remedy = "write advise to /sys/kernel/mm/transparent_hugepage/shmem_enabled, or --apply"
        yield Finding("huge pages", "advice", "shmem_enabled = deny", why, remedy, (SHMEM_ENABLED, "advise"))
    mount, ours = shm_mount(host.process), shm_mount(host.roots.proc / "self")
    if mount is None:
        yield Finding("huge pages", "problem", "nothing is mounted at /dev/shm", "Host RAM is taken from there.")
    elif mount.huge in ("advise", "always", "within_size"):
        yield Finding("huge pages", "ok", f"/dev/shm is mounted with huge={mount.huge}")
    else:
        yield Finding(
            "huge pages",
            "advice",
            f"/dev/shm is mounted with huge={mount.huge} (shmem_enabled = {chosen(words)} does not hold for mounts)",
            why,
            "mount -o remount,huge=advise /dev/shm, or --apply; or run-kvdshm.mount for one of kvd's own; restart kvd",
            (SHM_HUGE, "advise") if mount == ours else None,
        )


def swap(host: Host) -> Iterator[Finding]:
    """Swap, which shared memory goes to."""
    areas = (read_word(host.roots.proc / "swaps") or "").splitlines()[1:]
    if not areas:
        yield Finding("swap", "ok", "none")
    elif _may_not_swap(host):
        yield Finding("swap", "ok", f"{len(areas)} areas; the daemon's control group may use none")
    else:
        yield Finding(
            "swap",
            "advice",
            ", ".join(line.split()[0] for line in areas),
            "Pages that no GPU has registered can go there, and a restore then waits for a disk.",
            "MemorySwapMax=0 for the daemon and its workers (kvd.service has it), or swapoff",
        )


def _may_not_swap(host: Host) -> bool:
    """Whether the control group of the process, or one above it, allows no swap (version 2)."""
    lines = (read_word(host.process / "cgroup") or "").splitlines()
    for path in (line.split(":", 2)[2] for line in lines if line.startswith("0::")):
        group = host.roots.cgroup / path.lstrip("/")
        for folder in (group, *group.parents):
            if read_word(folder / "memory.swap.max") == "0":
                return True
            if folder == host.roots.cgroup:
                break
    return False
