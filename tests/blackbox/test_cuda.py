"""A daemon that gives the VRAM of a real GPU, without a context of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from compute.client import Client
from protocol.stats import NodeStats
from tests.blackbox.daemon_process import DaemonProcess
from tests.leaks import orphans_expected

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.fixture
def cuda_daemon(run_dir: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(
        run_dir, device="cuda", host_capacity="8GiB", host_extent="1GiB", vram_capacity="32GiB", drain_timeout_s="0"
    ) as process:
        yield process.wait_ready()
        assert process.stat().ledger == "balanced"
        assert process.stop() == 0


def used_bytes(uuid: str) -> int:
    """VRAM in use, as the driver reports it."""
    import pynvml

    pynvml.nvmlInit()
    memory = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(uuid))
    return int(memory.used)


def test_committed_bytes_are_what_the_driver_reports(cuda_daemon: DaemonProcess) -> None:
    sizes = [20 * MIB + MIB // 2, 40_000, 2 * MIB, 2 * MIB + 1, 512 * MIB, 3 * 1024 * MIB]
    with Client(cuda_daemon.run_dir, name="books") as client:
        uuid = client.welcome.devices[0].device
        before = used_bytes(uuid)
        handles = [client.allocate_device(uuid, size, "ring").handle for size in sizes]
        tier = next(tier for tier in client.stat().tiers if tier.tier == f"vram:{uuid}")
        assert used_bytes(uuid) - before == tier.committed
        assert tier.requested == sum(sizes)
        assert tier.committed == sum(-(-size // (2 * MIB)) * 2 * MIB for size in sizes)
        for handle in handles:
            client.free_device(handle)
        assert used_bytes(uuid) == before
        assert next(tier for tier in client.stat().tiers if tier.tier == f"vram:{uuid}").committed == 0


def test_daemon_has_no_context(cuda_daemon: DaemonProcess) -> None:
    with Client(cuda_daemon.run_dir, name="context") as client:
        client.allocate_device(client.welcome.devices[0].device, 64 * MIB, "ring")
        command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
        pids = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        assert str(cuda_daemon.process.pid) not in pids


def test_killed_worker_gives_vram_back(cuda_daemon: DaemonProcess) -> None:
    uuid = next(tier.tier for tier in cuda_daemon.stat().tiers if tier.tier.startswith("vram:")).removeprefix("vram:")
    before = used_bytes(uuid)
    arguments = ["generate", "--run-dir", str(cuda_daemon.run_dir), "--device", "cuda", "--tokens", "100000"]
    worker = subprocess.Popen([sys.executable, "-m", "compute.cli", *arguments], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not any(session.logical_rows > 64 for session in cuda_daemon.stat().sessions):
            assert worker.poll() is None, "the worker ended by itself"
            assert time.monotonic() < deadline, "the worker decoded nothing"
            time.sleep(0.05)
    finally:
        worker.kill()
        worker.wait()
    killed = time.monotonic()
    # The driver keeps some KiB for itself after a machine's first context; a handle is never less than 2 MiB.
    while used_bytes(uuid) - before >= MIB:
        assert time.monotonic() - killed < 2, f"{used_bytes(uuid) - before} bytes more than before"
        time.sleep(0.02)
    tier = next(tier for tier in cuda_daemon.stat().tiers if tier.tier == f"vram:{uuid}")
    assert (tier.requested, tier.committed, tier.quarantined) == (0, 0, 0)
    assert [session.state for session in cuda_daemon.stat().sessions] == ["stored"]


def test_a_living_worker_hands_its_vram_to_the_next_daemon(run_dir: Path) -> None:
    """The daemon is killed under a worker that decodes by recorded steps; the next one has all of it on its books."""
    settings = {"device": "cuda", "host_capacity": "1GiB", "host_extent": "64MiB", "vram_capacity": "8GiB"}
    arguments = ["generate", "--run-dir", str(run_dir), "--device", "cuda", "--tokens", "100000"]
    arguments += ["--on-daemon-loss", "wait", "--daemon-timeout", "60"]
    with orphans_expected(), ExitStack() as stack:
        first = stack.enter_context(DaemonProcess(run_dir, drain_timeout_s="0", **settings)).wait_ready()
        worker = subprocess.Popen([sys.executable, "-m", "compute.cli", *arguments], stderr=subprocess.DEVNULL)
        stack.callback(worker.wait)
        stack.callback(worker.kill)
        wait_for(first, lambda stats: any(session.logical_rows > 64 for session in stats.sessions), worker)
        before = first.stat()
        first.process.kill()
        first.process.wait()
        second = stack.enter_context(DaemonProcess(run_dir, drain_timeout_s="0", **settings)).wait_ready()
        pages = before.sessions[0].pages

        def goes_on(stats: NodeStats) -> bool:
            return bool(stats.sessions) and stats.sessions[0].pages > pages and stats.sessions[0].lease > 0

        wait_for(second, goes_on, worker)
        after = second.stat()
        assert after.ledger == "balanced"
        assert after.sessions[0].session == before.sessions[0].session
        kept = [vram_purposes(stats) for stats in (before, after)]
        assert {name: kept[1].get(name) for name in ("hot_cache", "ring", "tables")} == {
            name: kept[0].get(name) for name in ("hot_cache", "ring", "tables")
        }
        assert kept[1]["index_keys"] >= kept[0]["index_keys"] > 0
        worker.kill()
        worker.wait()
        wait_for(second, lambda stats: not stats.leases and not sum(vram_purposes(stats).values()))
        assert [session.state for session in second.stat().sessions] == ["stored"]
        assert second.stat().ledger == "balanced"


def vram_purposes(stats: NodeStats) -> dict[str, int]:
    """Committed bytes of VRAM by purpose."""
    [tier] = [tier for tier in stats.tiers if tier.tier.startswith("vram:")]
    return {purpose.purpose: purpose.committed for purpose in tier.purposes}


def wait_for(
    daemon: DaemonProcess, is_so: Callable[[NodeStats], bool], worker: subprocess.Popen[bytes] | None = None
) -> None:
    """Until the daemon says so; fails after a minute, or when the worker ends."""
    deadline = time.monotonic() + 60
    while not is_so(daemon.stat()):
        assert worker is None or worker.poll() is None, "the worker ended by itself"
        assert time.monotonic() < deadline, daemon.stat()
        time.sleep(0.05)
