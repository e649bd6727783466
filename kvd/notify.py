"""Messages to the service manager (the protocol of ``sd_notify``). Without ``NOTIFY_SOCKET`` they go nowhere."""

from __future__ import annotations

import os
import socket


class Notifier:
    """Tells the service manager of readiness and progress. Takes ``NOTIFY_SOCKET`` out of the environment."""

    def __init__(self) -> None:
        self._address = os.environ.pop("NOTIFY_SOCKET", "")

    def send(self, *lines: str) -> None:
        """Send assignments such as ``READY=1``."""
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto("\n".join(lines).encode(), address)
