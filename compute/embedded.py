"""A daemon of one's own, for as long as a ``with`` block: for demos, notebooks, and programs on a node without one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from compute.client import Client
from protocol.errors import DaemonUnavailable
from protocol.stats import NodeStats

START_TIMEOUT_S = 60.0
"""Beside what it takes to populate the host RAM."""
POPULATE_BYTES_PER_S = 1 << 29
"""The slowest that is waited for."""
STOP_TIMEOUT_S = 30.0


class EmbeddedDaemon:
    """``kvd run`` in a private run directory, ended with the block. Sessions that it holds go with it.

    Sizes are in bytes; ``host_bytes`` is a multiple of ``extent_bytes``, which is one of 2 MiB. Raises
    `DaemonUnavailable` with what the daemon said if it does not start.
    """

    def __init__(self, device: str, *, host_bytes: int, extent_bytes: int, vram_bytes: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvd-")
        self.run_dir = Path(self._folder.name) / "run"
        self.run_dir.mkdir(mode=0o700)
        self._log = self.run_dir.parent / "kvd.log"
        self._start_timeout_s = START_TIMEOUT_S + host_bytes / POPULATE_BYTES_PER_S
        sizes = {"host-capacity": host_bytes, "host-extent": extent_bytes, "vram-capacity": vram_bytes}
        # Its settings are these alone, whatever the node's daemon has.
        command = [sys.executable, "-m", "kvd", "run", "--config", os.devnull, "--run-dir", str(self.run_dir)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVD_")}
        command += ["--device", device]
        # Nobody is left to drain for: whoever used it has closed what it had.
        command += ["--drain-timeout-s", "0", *(word for name in sizes for word in (f"--{name}", str(sizes[name])))]
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)

    def stat(self) -> NodeStats:
        with Client(self.run_dir, name="embedded") as client:
            return client.stat()

    def close(self) -> None:
        """Stop it, and give its memory back."""
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            self._folder.cleanup()

    def __enter__(self) -> Self:
        deadline = time.monotonic() + self._start_timeout_s
        while True:
            try:
                self.stat()
                return self
            except DaemonUnavailable:
                status = self._process.poll()
                if status is not None or time.monotonic() > deadline:
                    said = self._log.read_text(errors="replace").strip()
                    self.close()
                    error = DaemonUnavailable(f"the daemon did not start (exit status {status}):\n{said}")
                    raise error from None
                time.sleep(0.05)
            except BaseException:
                self.close()
                raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
