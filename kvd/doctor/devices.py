"""The GPUs: whether they can be used, how they are connected, and what of their memory is free."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from kvd.doctor.host import Finding, Host, read_word
from kvd.tiers.driver import DeviceDriver, vram_tier
from kvd.tiers.driver_cuda import CudaDriver
from kvd.units import format_bytes
from protocol.errors import KvdError, NoDevice

_NVIDIA = "0x10de"
_DISPLAY_CLASS = "0x03"


def driver(host: Host, make: Callable[[], DeviceDriver] = CudaDriver) -> Iterator[Finding]:
    """The driver, through the same calls that the daemon makes; then the free memory of each device."""
    if host.config.device != "cuda":
        yield Finding("driver", "ok", f"device = {host.config.device} needs none")
        return
    version = re.search(r"(\d+\.\d+(?:\.\d+)?)", read_word(host.roots.proc / "driver/nvidia/version") or "")
    kernel = f"kernel module {version[1]}" if version else "no kernel module"
    try:
        cuda = make()
    except NoDevice as error:
        yield Finding(
            "driver",
            "problem",
            f"{kernel}; {error.message}",
            "device = cuda has no fallback: the daemon exits with 69.",
            _driver_remedy(host, bool(version)),
        )
        return
    devices = cuda.devices()
    yield Finding("driver", "ok", f"{kernel}; {len(devices)} of {devices[0].name}")
    for device in devices:
        yield _free_vram(host, cuda, device.uuid, device.total_bytes)


def pcie(host: Host) -> Iterator[Finding]:
    """Generation and width that each GPU has negotiated, against what it can."""
    for gpu in gpus(host):
        speed, fastest = read_word(gpu / "current_link_speed"), read_word(gpu / "max_link_speed")
        width, widest = read_word(gpu / "current_link_width"), read_word(gpu / "max_link_width")
        name = f"PCIe of {gpu.name}"
        if not (speed and width and fastest and widest):
            yield Finding(
                name, "unknown", "the system does not say (a virtual machine?)", "", "kvd doctor --bench cuda"
            )
        elif int(width) < int(widest):
            yield Finding(
                name,
                "problem",
                f"{width} of {widest} lanes",
                "Misses and copybacks go over this link: they take as many times longer.",
                "reseat the card, or look for a slot or a riser with fewer lanes",
            )
        elif speed != fastest:
            yield Finding(
                name,
                "advice",
                f"{speed} of {fastest}, x{width}",
                "An idle GPU saves power by a slower link, which is well; under load it would be slow.",
                "kvd doctor --bench cuda measures it under load",
            )
        else:
            yield Finding(name, "ok", f"{speed}, x{width}")


def iommu(host: Host) -> Iterator[Finding]:
    """Whether an IOMMU translates what the GPUs read."""
    units = list((host.roots.sys / "class/iommu").glob("*"))
    if not units:
        yield Finding("IOMMU", "ok", "none is in use")
        return
    for gpu in gpus(host):
        mode = read_word(gpu / "iommu_group/type")
        if mode == "identity":
            yield Finding(f"IOMMU of {gpu.name}", "ok", "passes through (identity)")
        elif mode is None:
            yield Finding(f"IOMMU of {gpu.name}", "unknown", "the system does not say which mode")
        else:
            yield Finding(
                f"IOMMU of {gpu.name}",
                "advice",
                f"translates ({mode})",
                "Every read of host RAM is looked up in its tables: single rows from a long history become slower.",
                "boot with iommu=pt; kvd doctor --bench cuda before and after says what it costs",
            )


def numa_distance(host: Host) -> Iterator[Finding]:
    """Whether host RAM is on the GPUs' side of the machine."""
    nodes = sorted(int(path.name[4:]) for path in (host.roots.sys / "devices/system/node").glob("node[0-9]*"))
    if len(nodes) < 2:
        yield Finding("NUMA distance", "ok", "one node")
        return
    chosen = host.config.host.numa_node
    near = {gpu.name: int(read_word(gpu / "numa_node") or -1) for gpu in gpus(host)}
    known = {node for node in near.values() if node >= 0}
    placed = ", ".join(f"{name} on node {node}" for name, node in near.items())
    if not known:
        yield Finding("NUMA distance", "unknown", f"{len(nodes)} nodes; {placed or 'no GPU'}")
    elif chosen < 0 and len(known) == 1:
        yield Finding(
            "NUMA distance",
            "advice",
            f"{placed}; host.numa_node = -1 leaves host RAM to the kernel",
            "Reads from the other socket's RAM are slower, and share the link between the sockets.",
            f"host.numa_node = {min(known)}, if that node has enough RAM",
        )
    elif chosen >= 0 and known != {chosen}:
        far = ", ".join(f"{node} at distance {_distance(host, chosen, node)}" for node in sorted(known - {chosen}))
        yield Finding(
            "NUMA distance",
            "advice",
            f"host RAM on node {chosen}; {placed}; node {far} (10 is local)",
            "Reads from the other socket's RAM are slower, and share the link between the sockets.",
            "measure with kvd doctor --bench cuda; one daemon for each node is the other way",
        )
    else:
        yield Finding("NUMA distance", "ok", f"host.numa_node = {chosen}; {placed}")


def gpus(host: Host) -> list[Path]:
    """The folders of all NVIDIA GPUs under ``/sys/bus/pci/devices``."""
    folders = sorted((host.roots.sys / "bus/pci/devices").glob("*"))
    return [
        folder
        for folder in folders
        if read_word(folder / "vendor") == _NVIDIA and (read_word(folder / "class") or "").startswith(_DISPLAY_CLASS)
    ]


def _free_vram(host: Host, cuda: DeviceDriver, device: str, total: int) -> Finding:
    """What is left for kvd beside others; a worker's own context and torch's memory count as others."""
    name = f"VRAM of {device}"
    wanted = host.config.vram.capacity
    try:
        taken = cuda.bytes_in_use(device)
    except KvdError as error:
        return Finding(name, "unknown", error.message)
    if taken is None:
        return Finding(name, "unknown", "the package nvidia-ml-py is missing")
    ours = sum(tier.committed for tier in host.daemon.tiers if tier.tier == vram_tier(device)) if host.daemon else 0
    others = max(0, taken - ours)
    found = f"{format_bytes(others)} of {format_bytes(total)} held by others"
    if total - others >= wanted:
        return Finding(name, "ok", f"{found}; vram.capacity {format_bytes(wanted)} fits")
    return Finding(
        name,
        "problem",
        f"{found}; vram.capacity is {format_bytes(wanted)}",
        "VRAM is taken when a session needs it: sessions will be refused before the capacity is reached.",
        "end the other processes (nvidia-smi lists them), or lower vram.capacity",
    )


def _driver_remedy(host: Host, has_module: bool) -> str:
    if not has_module:
        return "install the NVIDIA driver, or device = cpu to try kvd out without a GPU"
    if not (host.roots.dev / "nvidia-uvm").exists():
        return "nvidia-modprobe -c0 -u as root makes /dev/nvidia-uvm; nvidia-persistenced does so at boot"
    return "nvidia-smi as the user kvd; libcuda.so.1 must be of the kernel module's version"


def _distance(host: Host, here: int, there: int) -> str:
    row = (read_word(host.roots.sys / f"devices/system/node/node{here}/distance") or "").split()
    return row[there] if there < len(row) else "unknown"
