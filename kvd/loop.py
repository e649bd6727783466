"""The daemon's one loop: file descriptors, the control socket, and timers, on one thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from kvd.logs import Log

Callback = Callable[[], None]


class Loop:
    """Calls back what is ready to be read, and what is due. Callbacks must not block.

    File descriptors come before ZeroMQ sockets: when a process has ended and its pid's new owner asks for something at
    the same moment, the end is seen first.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._poller = zmq.Poller()
        self._callbacks: dict[int | zmq.Socket[bytes], Callback] = {}
        self._timers: list[_Timer] = []
        self._running = False

    def watch(self, source: int | zmq.Socket[bytes], callback: Callback) -> None:
        """Call ``callback`` whenever ``source`` can be read."""
        self._poller.register(source, zmq.POLLIN)
        self._callbacks[source] = callback

    def forget(self, source: int | zmq.Socket[bytes]) -> None:
        """Stop watching ``source``. To be called before it is closed."""
        self._poller.unregister(source)
        del self._callbacks[source]

    def every(self, seconds: float, callback: Callback) -> None:
        """Call ``callback`` every so many seconds."""
        self._timers.append(_Timer(seconds, callback, time.monotonic() + seconds))

    def run(self) -> None:
        """Go on until `stop`."""
        self._running = True
        while self._running:
            due = min((timer.due for timer in self._timers), default=time.monotonic() + 60)
            wait_ms = max(0, round((due - time.monotonic()) * 1000) + 1)
            ready = [source for source, _ in self._poller.poll(wait_ms)]
            for source in sorted(ready, key=lambda source: not isinstance(source, int)):
                callback = self._callbacks.get(source)
                if callback is not None:
                    self._call(callback)
            for timer in self._timers:
                if time.monotonic() >= timer.due:
                    timer.due = time.monotonic() + timer.seconds
                    self._call(timer.callback)

    def stop(self) -> None:
        """End `run` after the callback that calls this."""
        self._running = False

    def _call(self, callback: Callback) -> None:
        try:
            callback()
        except Exception:  # noqa: BLE001 - whatever one message or one client does, the daemon goes on
            self._log.exception("callback failed")


@dataclass
class _Timer:
    seconds: float
    callback: Callback
    due: float
