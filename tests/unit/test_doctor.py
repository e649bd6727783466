"""``kvd doctor`` on hosts that are described in a folder: each check, and the command."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvd import cli
from kvd.config import Config, HostConfig, LimitsConfig, VramConfig
from kvd.doctor import cli as doctor
from kvd.doctor import devices, kernel, limits
from kvd.doctor.bench_cuda import link_rate
from kvd.doctor.host import Finding, Host, Roots
from kvd.doctor.settings import COMPACTION, NUMA_BALANCING, SHM_HUGE
from kvd.tiers.driver import DeviceBlock, DeviceInfo
from protocol.errors import NoDevice
from protocol.stats import NodeStats, TierStats

GIB = 1 << 30
CPU = dataclasses.replace(Config(), device="cpu")
MOUNT = "36 23 0:31 / /dev/shm rw,nosuid - tmpfs tmpfs rw,size=8388608k"
LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max core file size        0                    0                    bytes
Max open files            1024                 {files}               files
Max locked memory         8388608              {locked}            bytes
"""
QUIET = {
    "proc/self/mountinfo": f"{MOUNT},huge=advise\n",
    "proc/self/limits": LIMITS.format(files="524288", locked="unlimited"),
    "proc/self/cgroup": "0::/\n",
    "proc/meminfo": "MemTotal:  67108864 kB\nMemAvailable: 62914560 kB\n",
    "proc/swaps": "Filename Type Size Used Priority\n",
    "proc/sys/kernel/numa_balancing": "0\n",
    "proc/sys/vm/compaction_proactiveness": "0\n",
    "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size advise [never] deny force\n",
    "sys/devices/system/node/node0/distance": "10 21\n",
}
GPU = "sys/bus/pci/devices/0000:65:00.0"
GPU_FILES = {
    f"{GPU}/vendor": "0x10de\n",
    f"{GPU}/class": "0x030200\n",
    f"{GPU}/current_link_speed": "32.0 GT/s PCIe\n",
    f"{GPU}/max_link_speed": "32.0 GT/s PCIe\n",
    f"{GPU}/current_link_width": "16\n",
    f"{GPU}/max_link_width": "16\n",
    f"{GPU}/numa_node": "1\n",
    "sys/bus/pci/devices/0000:00:01.0/vendor": "0x8086\n",
    "sys/bus/pci/devices/0000:00:01.0/class": "0x060400\n",
}
TWO_NODES = {"sys/devices/system/node/node1/distance": "21 10\n"}


@pytest.fixture
def describe(tmp_path: Path) -> Callable[..., Host]:
    """A function that makes a host of files: a quiet one, with the given files and settings beside."""

    def host(files: dict[str, str] | None = None, config: Config = CPU, daemon: NodeStats | None = None) -> Host:
        for name, text in {**QUIET, **(files or {})}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        roots = {name: tmp_path / name for name in ("proc", "sys", "etc", "run", "usr", "dev")}
        return Host(config, daemon, Roots(shm=Path("/"), cgroup=tmp_path / "cgroup", **roots))

    return host


def levels(findings: Iterator[Finding]) -> list[str]:
    return [finding.level for finding in findings]


def test_a_quiet_host_has_nothing_to_change(describe: Callable[..., Host]) -> None:
    host = describe()
    found = doctor.examine(dataclasses.replace(host, roots=dataclasses.replace(host.roots, shm=Path("/dev/shm"))))
    assert [finding for finding in found if finding.level != "ok" and "shm" not in finding.check] == []
    assert not any(finding.change for finding in found)


@pytest.mark.parametrize(
    ("check", "files", "level", "words", "change"),
    [
        (kernel.numa_balancing, {"proc/sys/kernel/numa_balancing": "1"}, "ok", "one node only", None),
        (
            kernel.numa_balancing,
            {"proc/sys/kernel/numa_balancing": "1", **TWO_NODES},
            "advice",
            "kernel.numa_balancing = 1 on 2 nodes",
            (NUMA_BALANCING, "0"),
        ),
        (
            kernel.compaction,
            {"proc/sys/vm/compaction_proactiveness": "20"},
            "advice",
            "vm.compaction_proactiveness = 20",
            (COMPACTION, "0"),
        ),
        (
            kernel.huge_pages,
            {"proc/self/mountinfo": f"{MOUNT},huge=always\n{MOUNT}\n"},
            "advice",
            "huge=never",
            (SHM_HUGE, "advise"),
        ),
        (
            kernel.huge_pages,
            {"proc/self/mountinfo": "36 23 0:31 / / rw - ext4 /dev/vda rw\n"},
            "problem",
            "nothing",
            None,
        ),
        (kernel.swap, {"proc/swaps": "Filename Type\n/swapfile file 1 0 -2\n"}, "advice", "/swapfile", None),
        (
            kernel.swap,
            {
                "proc/swaps": "Filename Type\n/swapfile file 1 0 -2\n",
                "proc/self/cgroup": "0::/system.slice/kvd.service\n",
                "cgroup/system.slice/kvd.service/memory.swap.max": "0\n",
            },
            "ok",
            "may use none",
            None,
        ),
        (limits.locked_memory, {"proc/self/limits": LIMITS.format(files=1, locked=8388608)}, "advice", "8 MiB", None),
        (limits.open_files, {"proc/self/limits": LIMITS.format(files=4096, locked=1)}, "problem", "4096 allowed", None),
        (limits.open_files, {"proc/self/limits": LIMITS.format(files=9473, locked=1)}, "ok", "9473 needed", None),
        (devices.iommu, {"sys/class/iommu/dmar0": "", **GPU_FILES}, "unknown", "does not say", None),
        (
            devices.iommu,
            {"sys/class/iommu/dmar0": "", **GPU_FILES, f"{GPU}/iommu_group/type": "DMA-FQ\n"},
            "advice",
            "translates (DMA-FQ)",
            None,
        ),
        (
            devices.iommu,
            {"sys/class/iommu/dmar0": "", **GPU_FILES, f"{GPU}/iommu_group/type": "identity\n"},
            "ok",
            "identity",
            None,
        ),
        (devices.pcie, GPU_FILES, "ok", "32.0 GT/s PCIe, x16", None),
        (devices.pcie, {**GPU_FILES, f"{GPU}/current_link_width": "8\n"}, "problem", "8 of 16 lanes", None),
        (
            devices.pcie,
            {**GPU_FILES, f"{GPU}/current_link_speed": "2.5 GT/s PCIe\n"},
            "advice",
            "2.5 GT/s PCIe of 32.0 GT/s PCIe",
            None,
        ),
        (devices.pcie, {f"{GPU}/vendor": "0x10de\n", f"{GPU}/class": "0x030200\n"}, "unknown", "does not say", None),
        (devices.numa_distance, {**TWO_NODES, **GPU_FILES}, "advice", "65:00.0 on node 1", None),
        (devices.numa_distance, {**TWO_NODES, **GPU_FILES, f"{GPU}/numa_node": "-1\n"}, "unknown", "2 nodes", None),
        (devices.driver, {}, "ok", "device = cpu needs none", None),
    ],
)
def test_each_check(
    describe: Callable[..., Host],
    check: Callable[[Host], Iterator[Finding]],
    files: dict[str, str],
    level: str,
    words: str,
    change: tuple[str, str] | None,
) -> None:
    [finding] = check(describe(files))
    assert finding.level == level
    assert words in finding.found
    assert finding.change == change
    assert (finding.why != "") == (level in ("advice", "problem")), "it says what it does to decoding"


def test_shared_memory_that_the_kernel_denies_huge_pages(describe: Callable[..., Host]) -> None:
    files = {"sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size advise never [deny] force"}
    denied, mount = kernel.huge_pages(describe(files))
    assert (denied.level, denied.change) == ("advice", ("transparent_hugepage/shmem_enabled", "advise"))
    assert mount.level == "ok"


@pytest.mark.parametrize(("node", "level", "words"), [(1, "ok", "= 1"), (0, "advice", "node 1 at distance 21")])
def test_numa_node_of_the_settings(describe: Callable[..., Host], node: int, level: str, words: str) -> None:
    config = dataclasses.replace(CPU, host=HostConfig(numa_node=node))
    [finding] = devices.numa_distance(describe({**TWO_NODES, **GPU_FILES}, config))
    assert (finding.level, words in finding.found) == (level, True)


def test_sizes_are_compared_with_every_limit(describe: Callable[..., Host]) -> None:
    files = {
        "proc/self/cgroup": "0::/kvd\n",
        "cgroup/kvd/memory.max": str(8 * GIB),
        "cgroup/kvd/memory.current": str(GIB),
        "cgroup/kvd/memory.stat": "active_file 0\n",
    }
    config = dataclasses.replace(CPU, host=HostConfig(capacity=7 * GIB, state_capacity=GIB))
    group = [finding for finding in limits.memory(describe(files, config)) if "control group" in finding.check]
    assert levels(iter(group)) == ["problem"]
    assert group[0].found.startswith("7 GiB free of 8 GiB; host.capacity and host.state_capacity are 8 GiB")
    # A daemon that runs has what it needs, and it is no longer free.
    running = describe({"proc/7/cgroup": "0::/kvd\n", **files}, config, node_stats(pid=7))
    assert "problem" not in levels(finding for finding in limits.memory(running) if "control group" in finding.check)


def test_logind(describe: Callable[..., Host], monkeypatch: pytest.MonkeyPatch) -> None:
    host = describe()
    (host.roots.run / "systemd/system").mkdir(parents=True)
    monkeypatch.setattr(limits, "_daemon_uid", lambda _: 1000)
    assert levels(limits.logind(host)) == ["problem"]
    describe({"etc/systemd/logind.conf": "[Login]\n#RemoveIPC=yes\nRemoveIPC=no\n"})
    assert levels(limits.logind(host)) == ["ok"]
    describe({"usr/lib/systemd/logind.conf.d/a.conf": "RemoveIPC=yes\n"})
    assert levels(limits.logind(host)) == ["problem"]
    describe({"etc/systemd/logind.conf.d/a.conf": "RemoveIPC=no\n"})
    assert levels(limits.logind(host)) == ["ok"], "the administrator's file takes the place of the vendor's"
    monkeypatch.setattr(limits, "_daemon_uid", lambda _: 999)
    describe({"etc/systemd/logind.conf.d/a.conf": "RemoveIPC=yes\n"})
    assert levels(limits.logind(host)) == ["ok"]


class FakeDriver:
    """A device of 80 GiB, of which ``taken`` are in use."""

    def __init__(self, taken: int | None) -> None:
        self._taken = taken

    def devices(self) -> list[DeviceInfo]:
        return [DeviceInfo("GPU-1", "Some GPU", 80 * GIB)]

    def granularity(self, device: str) -> int:
        return 2 << 20

    def create(self, device: str, nbytes: int) -> DeviceBlock:
        raise AssertionError

    def adopt(self, device: str, fd: int, nbytes: int) -> DeviceBlock:
        raise AssertionError("not called")

    def release(self, block: DeviceBlock) -> None:
        raise AssertionError

    def held_bytes(self, block: DeviceBlock) -> int:
        raise AssertionError

    def own_bytes(self, device: str) -> int:
        return 0

    def bytes_in_use(self, device: str) -> int | None:
        return self._taken


def node_stats(pid: int, *tiers: TierStats) -> NodeStats:
    values: dict[str, Any] = dict.fromkeys(NodeStats.__struct_fields__, 0)
    return NodeStats(**{**values, "pid": pid, "ledger": "balanced", "tiers": list(tiers), "leases": [], "sessions": []})


@pytest.mark.parametrize(
    ("taken", "ours", "level", "words"),
    [
        (30 * GIB, 0, "problem", "30 GiB of 80 GiB held by others; vram.capacity is 60 GiB"),
        (30 * GIB, 20 * GIB, "ok", "10 GiB of 80 GiB held by others"),
        (20 * GIB, 0, "ok", "fits"),
        (None, 0, "unknown", "nvidia-ml-py is missing"),
    ],
)
def test_free_vram(describe: Callable[..., Host], taken: int | None, ours: int, level: str, words: str) -> None:
    config = dataclasses.replace(Config(), vram=VramConfig(capacity=60 * GIB))
    tier = TierStats("vram:GPU-1", ours, ours, 60 * GIB, ours, ours, 0, 0, [])
    host = describe({"proc/driver/nvidia/version": "NVRM version: x  580.95.05  y\n"}, config, node_stats(7, tier))
    driver, vram = devices.driver(host, lambda: FakeDriver(taken))
    assert driver.found == "kernel module 580.95.05; 1 of Some GPU"
    assert (vram.level, words in vram.found) == (level, True)


def test_no_driver_is_a_problem_that_names_the_next_step(describe: Callable[..., Host]) -> None:
    def refuse() -> FakeDriver:
        raise NoDevice("cuInit: CUDA_ERROR_NO_DEVICE")

    [finding] = devices.driver(describe({}, Config()), refuse)
    assert finding.level == "problem"
    assert "no kernel module; cuInit: CUDA_ERROR_NO_DEVICE" in finding.found
    assert finding.remedy.startswith("install the NVIDIA driver")
    [finding] = devices.driver(describe({"proc/driver/nvidia/version": "NVRM 580.1.2 x"}, Config()), refuse)
    assert finding.remedy.startswith("nvidia-modprobe -c0 -u")


def test_the_documentation_explains_every_check(describe: Callable[..., Host]) -> None:
    files = {"sys/class/iommu/dmar0": "", **GPU_FILES, "proc/self/cgroup": "0::/kvd\n"}
    files |= {"cgroup/kvd/memory.max": str(GIB), "cgroup/kvd/memory.current": "0", "cgroup/kvd/memory.stat": ""}
    host = describe(files)
    found = {finding.check for finding in doctor.examine(host)} | {finding.check for finding in vram_findings(host)}
    text = (Path(__file__).parents[2] / "docs/troubleshooting.md").read_text()
    names = re.findall(r"`([^`]+)`", "".join(re.findall(r"^\| (`.+?`) \| [^|]+ \| [^|]+ \|$", text, re.MULTILINE)))
    assert {check for check in found if not any(check.startswith(name) for name in names)} == set()


def vram_findings(host: Host) -> list[Finding]:
    config = dataclasses.replace(Config(), vram=VramConfig(capacity=GIB))
    return list(devices.driver(dataclasses.replace(host, config=config), lambda: FakeDriver(0)))


def test_a_check_that_cannot_look_says_so(describe: Callable[..., Host]) -> None:
    host = describe()
    (host.roots.proc / "self/limits").unlink()
    [finding] = doctor.examine(host, [limits.open_files])
    assert (finding.check, finding.level) == ("open files", "unknown")
    assert "No such file" in finding.found


def run(host: Host, *arguments: str) -> int:
    return doctor.run(cli.parser().parse_args(["doctor", *arguments]), host.config, host.roots)


def test_the_command_finds_changes_and_restores(
    describe: Callable[..., Host], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = dataclasses.replace(CPU, run_dir=str(tmp_path), host=HostConfig(capacity=2 << 20, state_capacity=2 << 20))
    host = describe({"proc/sys/vm/compaction_proactiveness": "20\n"}, config)
    state = ("--state-dir", str(tmp_path / "state"))
    assert run(host, *state) == 1
    text = capsys.readouterr().out
    assert "  advice  compaction: vm.compaction_proactiveness = 20\n" in text
    assert run(host, "--json", *state) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == doctor.SCHEMA
    assert [row["change"] for row in document["findings"] if row["change"]] == [{COMPACTION: "0"}]
    assert not (tmp_path / "state").exists(), "looking changes nothing"

    assert run(host, "--apply", *state) == 0
    assert capsys.readouterr().out == " changed  vm.compaction_proactiveness: 20 → 0\n"
    assert (host.roots.proc / "sys/vm/compaction_proactiveness").read_text() == "0"
    assert run(host, *state) == 0
    assert "changed  vm.compaction_proactiveness was 20; --restore puts it back" in capsys.readouterr().out
    assert run(host, "--restore", "--json", *state) == 0
    [change] = json.loads(capsys.readouterr().out)["changes"]
    assert (change["done"], change["detail"]) == ("restored", "0 → 20")
    assert run(host, "--restore", *state) == 0
    assert capsys.readouterr().out == "nothing to change\n"


def test_a_problem_is_the_exit_status(describe: Callable[..., Host], tmp_path: Path) -> None:
    config = dataclasses.replace(CPU, run_dir=str(tmp_path), limits=LimitsConfig(max_handles=1 << 16))
    assert run(describe({"proc/self/limits": LIMITS.format(files=4096, locked="unlimited")}, config)) == 2


@pytest.mark.parametrize("arguments", [("--apply", "--restore"), ("--bench", "disk"), ("--apply", "--bench")])
def test_wrong_arguments(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.parser().parse_args(["doctor", *arguments])
    assert ended.value.code == 64


def test_bench_of_the_host(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    done = cli.parser().parse_args(["doctor", "--bench", "--json"])
    assert doctor.run(done, CPU) == 0
    rows = json.loads(capsys.readouterr().out)["bench"]
    assert [row["case"].split(",")[0] for row in rows] == [
        "first touch of shared memory",
        "copy within host RAM",
        "copy within host RAM",
    ]
    assert all(row["value"] > 1e7 and row["unit"] == "B/s" and row["fits"] is None for row in rows)


def test_rates_of_links() -> None:
    """By the PCI Express base specification: 32 GT/s on 16 lanes in 128b/130b are 63.0 GB/s."""
    assert round(link_rate(5, 16) / 1e9, 1) == 63.0
    assert round(link_rate(4, 8) / 1e9, 2) == 15.75
    assert link_rate(2, 16) == 8e9
