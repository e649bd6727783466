"""What a node of a test has beside its ranks: a daemon."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

from tests.blackbox.daemon_process import DaemonProcess


def start_daemon(stack: ExitStack, saved: Path) -> DaemonProcess:
    """One that saves in the folder ``saved``; not ready yet."""
    path = Path(tempfile.mkdtemp(prefix="kvd-test-", dir="/tmp"))
    stack.callback(shutil.rmtree, path)
    sizes = {"host_capacity": "64MiB", "host_extent": "4MiB", "vram_capacity": "512MiB"}
    disk = {"disk_state_dir": str(saved), "disk_capacity": "64MiB"}
    return stack.enter_context(DaemonProcess(path, drain_timeout_s="0", **sizes, **disk))
