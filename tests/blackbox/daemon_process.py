"""A real daemon process for tests, on a run directory of its own and device ``cpu``."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from kvd.control import ask_stats
from protocol.errors import DaemonUnavailable
from protocol.stats import NodeStats

START_TIMEOUT_S = 100.0


class DaemonProcess:
    """``kvd run`` with ``settings`` (``host_capacity="64MiB"`` becomes a flag), ended with the ``with`` block.

    None leaves one of its small sizes to a file.
    """

    def __init__(
        self, run_dir: Path, command: Sequence[str] = (sys.executable, "-m", "kvd"), /, **settings: str | None
    ):
        self.run_dir = run_dir
        self._log_path = run_dir.parent / f"{run_dir.name}.log"
        sizes = {"device": "cpu", "host_capacity": "64MiB", "host_extent": "4MiB", "vram_capacity": "64MiB"}
        flags = {"run_dir": str(run_dir), "log_format": "json", **sizes, **settings}
        given = {name: value for name, value in flags.items() if value is not None}
        arguments = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)]
        with self._log_path.open("wb") as output:
            self.process = subprocess.Popen([*command, "run", *arguments], stderr=output, env=clean_environment())

    def wait_ready(self) -> Self:
        """Wait until it answers; fails with its log if it ends instead."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                self.stat()
                return self
            except DaemonUnavailable:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(f"no daemon, status {self.process.returncode}: {self.log}") from None
                time.sleep(0.02)

    @property
    def log(self) -> str:
        """What it has logged so far."""
        return self._log_path.read_text()

    @property
    def segments(self) -> list[str]:
        """Names in /dev/shm of segments that it has open."""
        targets = set()
        for link in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed since it was listed
                targets.add(os.readlink(link))
        return sorted(target for target in targets if target.startswith("/dev/shm/kvd"))

    @staticmethod
    def segments_left(names: list[str]) -> list[str]:
        """Those of ``names`` that are still there."""
        return [name for name in names if Path(name).exists()]

    def stat(self) -> NodeStats:
        return ask_stats(self.run_dir)

    def stop(self, timeout_s: float = 20.0) -> int:
        """SIGTERM; returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def wait(self, timeout_s: float = 20.0) -> int:
        """The exit status of a daemon that ends by itself."""
        return self.process.wait(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if error is not None and self._log_path.exists():
            sys.stderr.write(self.log)
        self._log_path.unlink(missing_ok=True)  # the next one in the same directory has the same


def clean_environment() -> dict[str, str]:
    """This environment without settings of the daemon."""
    return {name: value for name, value in os.environ.items() if not name.startswith("KVD_")}
