"""Tells the daemon what this process has of its device beside the daemon's memory: torch's, and the context's.

From a thread of its own, once a second, by stores into the report block: nothing waits for the device, and no token for
this.
"""

from __future__ import annotations

import threading

from compute.client import Client
from compute.device import Device

INTERVAL_S = 1.0


class MemoryReporter:
    """Publishes until `close`."""

    def __init__(self, client: Client, device: Device) -> None:
        self._client = client
        self._device = device
        self._ended = threading.Event()
        self._warmed_up = False
        self.publish()
        self._thread = threading.Thread(target=self._run, name="kvd-report", daemon=True)
        self._thread.start()

    def publish(self) -> None:
        """What it is now. After a reconnection the block is another one, which knows nothing yet."""
        report = self._client.report
        if report is not None:
            own = self._device.own_memory()
            report.memory(self._device.uuid, own.torch_reserved, own.context)

    def warmed_up(self) -> None:
        """Have the context measured anew, soon, in the thread: what it grows by from then on is not taken for it."""
        self._warmed_up = True

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            if self._warmed_up:
                self._warmed_up = False
                self._device.warmed_up()
            self.publish()
