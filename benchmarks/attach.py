"""How long a worker takes to attach to the host tier: map it, fill its page tables, register it with the GPU.

Runs against a daemon of its own, on the device that is asked for. The floor is what populating and registering an
anonymous mapping of the same size takes in the same run.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.report import Report, Row
from compute.attach import Attachment
from compute.client import Client
from compute.device import Device, open_device
from compute.session import HostSession
from protocol.errors import DaemonUnavailable
from protocol.layout import Q8G64
from protocol.model import GLM_5_3

GIB = 1 << 30


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``kvd-bench attach``."""
    parser.add_argument("--device", default="cuda", help="cpu or cuda (default %(default)s)")
    parser.add_argument("--gib", type=int, default=8, help="GiB of host RAM to attach (default %(default)s)")


def run(arguments: argparse.Namespace) -> Report:
    """Attach to a session that fills the host tier."""
    device = open_device(arguments.device)
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as folder:
        run_dir = Path(folder) / "run"
        run_dir.mkdir(mode=0o700)
        command = [sys.executable, "-m", "kvd", "run", "--run-dir", str(run_dir), "--device", arguments.device]
        command += ["--host-capacity", f"{arguments.gib}GiB", "--host-extent", "1GiB", "--vram-capacity", "1GiB"]
        started = time.perf_counter()
        daemon = subprocess.Popen([*command, "--drain-timeout-s", "0", "--log-level", "warning"])
        try:
            client = _client(run_dir, daemon)
            ready_s = time.perf_counter() - started
            attach_s, attached = _attach(client, device)
        finally:
            daemon.terminate()
            daemon.wait()
    floor_s = _register_anonymous(device, attached)
    name = torch.cuda.get_device_name() if arguments.device != "cpu" else platform.processor() or platform.machine()
    rows = [
        Row(f"attach {arguments.gib} GiB of host RAM", attach_s, "s", floor=floor_s),
        Row(f"attach {arguments.gib} GiB of host RAM, rate", attached / attach_s / 1e9, "GB/s"),
        Row(f"daemon with {arguments.gib} GiB of host RAM, start to first answer", ready_s, "s"),
    ]
    return Report("attach", name, {"device": arguments.device, "gib": arguments.gib, "torch": torch.__version__}, rows)


def _client(run_dir: Path, daemon: subprocess.Popen[bytes]) -> Client:
    while True:
        try:
            return Client(run_dir, name="kvd-bench attach")
        except DaemonUnavailable:
            if daemon.poll() is not None:
                raise
            time.sleep(0.01)


def _attach(client: Client, device: Device) -> tuple[float, int]:
    """Seconds, and bytes attached."""
    page_format = GLM_5_3.page_format(Q8G64, mtp=True)
    with client, Attachment(client, device) as attachment:
        pages = sum(tier.capacity for tier in client.stat().tiers if tier.tier == "host") // GIB
        pages *= GIB // page_format.stride
        session = HostSession.create(
            attachment, "attach", page_format, fingerprint=bytes(32), token_capacity=64 * (pages + 1)
        )
        session.extend(pages)
        attached = attachment.attach_seconds, attachment.attached_bytes
        session.close()
    return attached


def _register_anonymous(device: Device, nbytes: int) -> float | None:
    """Seconds to populate and register fresh memory of the same size; None where nothing is registered."""
    if device.torch_device.type == "cpu":
        return None
    from benchmarks.host_memory import registered

    started = time.perf_counter()
    registered(nbytes)
    return time.perf_counter() - started
