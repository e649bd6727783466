"""The host's memory limits, read from described hosts, and from this one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvd.hostcheck import HostRoots, SmallSizes, memory_limits, require_memory, tightest_limit
from protocol.errors import OsFailure, OutOfCapacity

GIB = 1024**3


class Host:
    """Files as the kernel shows them; no control group limits unless a test adds some."""

    def __init__(self, root: Path) -> None:
        self.roots = HostRoots(shm=root / "shm", proc=root / "proc", cgroup=root / "cgroup")
        self.roots.shm.mkdir()
        (self.roots.proc / "self").mkdir(parents=True)
        (self.roots.proc / "meminfo").write_text(
            f"MemTotal:       {2048 * GIB // 1024} kB\nMemFree: 5 kB\nMemAvailable:   {1800 * GIB // 1024} kB\n"
        )
        self.belongs_to("0::/")

    def belongs_to(self, *lines: str) -> None:
        (self.roots.proc / "self/cgroup").write_text("".join(f"{line}\n" for line in lines))

    def group(self, path: str, **files: object) -> None:
        directory = self.roots.cgroup / path
        directory.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (directory / name.replace("__", ".")).write_text(f"{value}\n")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    mount = os.statvfs_result((4096, 4096, GIB, GIB, GIB, 0, 0, 0, 0, 255))  # 4 TiB
    monkeypatch.setattr(os, "statvfs", lambda path: mount)
    return Host(tmp_path)


def test_without_control_group_limits_available_memory_decides(host: Host) -> None:
    limit = tightest_limit(host.roots)
    assert (limit.name, limit.capacity, limit.free) == (
        f"MemAvailable of {host.roots.proc}/meminfo",
        2048 * GIB,
        1800 * GIB,
    )
    require_memory(1800 * GIB, host.roots)
    with pytest.raises(OutOfCapacity, match="MemAvailable"):
        require_memory(1800 * GIB + 1, host.roots)


def test_case_21_a_control_group_limit_below_available_memory_is_named(host: Host) -> None:
    host.belongs_to("0::/system.slice/kvd.service")
    host.group("system.slice/kvd.service", memory__max="max", memory__high="max")
    host.group("system.slice", memory__max=100 * GIB, memory__current=10 * GIB, memory__stat="anon 5\ninactive_file 0")
    with pytest.raises(OutOfCapacity) as caught:
        require_memory(91 * GIB, host.roots)
    facts = caught.value.facts
    assert facts["tier"] == f"control group limit {host.roots.cgroup}/system.slice/memory.max"
    assert (facts["asked"], facts["free"], facts["capacity"]) == (91 * GIB, 90 * GIB, 100 * GIB)
    require_memory(90 * GIB, host.roots)


@pytest.mark.parametrize("where", ["system.slice/kvd.service", "system.slice", ""])
@pytest.mark.parametrize("limit", ["memory__max", "memory__high"])
def test_every_group_up_to_the_root_counts(host: Host, where: str, limit: str) -> None:
    host.belongs_to("0::/system.slice/kvd.service")
    host.group("system.slice/kvd.service")
    host.group(where, **{limit: 8 * GIB}, memory__current=0, memory__stat="inactive_file 0")
    assert tightest_limit(host.roots).free == 8 * GIB


def test_file_cache_that_the_kernel_can_drop_is_free(host: Host) -> None:
    host.belongs_to("0::/a")
    stat = f"anon {GIB}\nfile {6 * GIB}\nshmem {3 * GIB}\ninactive_file {2 * GIB}\nactive_file {GIB}"
    host.group("a", memory__max=8 * GIB, memory__current=7 * GIB, memory__stat=stat)
    assert tightest_limit(host.roots).free == 4 * GIB


def test_a_group_above_its_limit_has_nothing_free(host: Host) -> None:
    host.belongs_to("0::/a")
    host.group("a", memory__max=8 * GIB, memory__current=9 * GIB, memory__stat="inactive_file 0")
    assert tightest_limit(host.roots).free == 0


def test_version_1_groups_count_with_their_children(host: Host) -> None:
    host.belongs_to("9:name=systemd:/", "4:cpu,memory:/docker/1", "0::/")
    stat = f"inactive_file 7\nactive_file 7\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}"
    host.group("memory/docker/1", memory__limit_in_bytes=9 * GIB, memory__usage_in_bytes=5 * GIB, memory__stat=stat)
    limit = tightest_limit(host.roots)
    assert limit.name == f"control group limit {host.roots.cgroup}/memory/docker/1/memory.limit_in_bytes"
    assert limit.free == 6 * GIB


def test_a_group_outside_our_namespace_leaves_the_root_to_look_at(host: Host) -> None:
    host.belongs_to("0::/../../other")
    host.group("", memory__max=8 * GIB, memory__current=0, memory__stat="inactive_file 0")
    assert [limit.free for limit in memory_limits(host.roots) if limit.name.startswith("control")] == [8 * GIB]


def test_the_mount_of_shared_memory_counts(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    full = os.statvfs_result((4096, 4096, 2048, 16, 8, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(OutOfCapacity, match="shared memory mount") as caught:
        require_memory(32769, host.roots)
    assert (caught.value.facts["free"], caught.value.facts["capacity"]) == (32768, 8 * 1024**2)
    unlimited = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: unlimited)
    require_memory(1800 * GIB, host.roots)


def test_a_host_that_cannot_be_read_is_a_typed_error(host: Host) -> None:
    (host.roots.proc / "meminfo").unlink()
    with pytest.raises(OsFailure, match="meminfo"):
        memory_limits(host.roots)


def test_this_host_can_be_read() -> None:
    limits = memory_limits()
    assert all(0 <= limit.free <= limit.capacity for limit in limits)
    assert limits[0].name.startswith("MemAvailable")


def test_small_sizes_are_looked_up_again_before_they_add_up(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo = host.roots.proc / "meminfo"

    def available(nbytes: int) -> None:
        meminfo.write_text(f"MemTotal: {2048 * GIB // 1024} kB\nMemAvailable: {nbytes // 1024} kB\n")

    clock = [100.0]
    monkeypatch.setattr("kvd.hostcheck.time.monotonic", lambda: clock[0])
    available(3 * GIB)
    sizes = SmallSizes(host.roots)
    sizes.require(GIB // 2)
    available(GIB)
    sizes.require(GIB)  # not looked up: there was plenty just now
    with pytest.raises(OutOfCapacity, match="MemAvailable"):
        sizes.require(GIB + 1)  # there would not be, so it is
    available(8 * GIB)
    sizes.require(GIB)
    available(GIB)
    clock[0] += 0.4
    sizes.require(2 * GIB)
    clock[0] += 0.2
    with pytest.raises(OutOfCapacity):
        sizes.require(2 * GIB)
