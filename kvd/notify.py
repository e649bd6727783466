"""Messages to the service manager (the protocol of ``sd_notify``). Without ``NOTIFY_SOCKET`` they go nowhere."""

from __future__ import annotations

import os
import socket
import time

from protocol.errors import OsFailure


class Notifier:
    """Tells the service manager of readiness and progress. Takes ``NOTIFY_SOCKET`` out of the environment."""

    def __init__(self) -> None:
        self._address = os.environ.pop("NOTIFY_SOCKET", "")

    def extend_timeout(self, seconds: float, *lines: str) -> None:
        """Ask for ``seconds`` from now to finish starting or stopping, instead of what the unit says."""
        self.send(f"EXTEND_TIMEOUT_USEC={round(seconds * 1e6)}", *lines)

    def reloading(self) -> None:
        """Say that a reload has begun; it ends with ``READY=1``."""
        self.send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def send(self, *lines: str) -> None:
        """Send assignments such as ``READY=1``. Raises `OsFailure` if they cannot be sent."""
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            try:
                sender.sendto("\n".join(lines).encode(), address)
            except OSError as error:
                raise OsFailure(f"NOTIFY_SOCKET {self._address!r}: {error.strerror or error}") from error
