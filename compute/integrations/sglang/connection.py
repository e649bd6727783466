"""A storage thread's way to the daemon, which may be absent, killed, stopped or full: then there is no answer.

All connections of a backend share what is known of the daemon, so that it is left alone, and complained of, once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from compute.block_store import BlockStore
from compute.integrations.outage import Outage
from compute.integrations.sglang.settings import Settings
from protocol.errors import DaemonUnavailable

SILENCE_S = 10.0
"""How long nothing more is logged of what the daemon refuses."""

_log = logging.getLogger("sglang.kvd")
_AnswerT = TypeVar("_AnswerT")


class Availability:
    """Whether the daemon may be tried now. For use from several threads. ``clock`` counts seconds."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._outage = Outage(settings.retry_s, settings.longest_retry_s, clock)
        self._lock = threading.Lock()
        self._silent_until = clock()

    def may_be_tried(self) -> bool:
        with self._lock:
            return self._outage.is_over

    def failed(self, error: Exception) -> None:
        """It did not answer, or what it answered is of no use."""
        with self._lock:
            if not self._outage.is_over:
                return  # another thread has said so meanwhile
            if not self._outage.lasts:
                _log.warning("kvd is left alone for a while: %s", error)
            self._outage.failed()

    def answered(self) -> None:
        with self._lock:
            if self._outage.lasts and self._outage.is_over:
                _log.info("kvd is used again")
                self._outage.answered()

    def refused(self, error: Exception) -> None:
        """It answers, but not this; the same may be true of every page for hours."""
        with self._lock:
            if self.clock() >= self._silent_until:
                self._silent_until = self.clock() + SILENCE_S
                _log.warning("kvd: pages are not loaded or not stored: %s", error)


class Connection:
    """A lease on one space for one kind of call. For use from several threads, of which one is served at a time."""

    def __init__(self, open_store: Callable[[], BlockStore], availability: Availability, timeout_s: float) -> None:
        self._open_store = open_store
        self._availability = availability
        self._soon_s = timeout_s / 2
        self._lock = threading.Lock()
        self._store: BlockStore | None = None
        self._closed = False

    def call(self, use: Callable[[BlockStore], _AnswerT]) -> _AnswerT | None:
        """What ``use`` of the store comes to; None where the daemon does not answer, or refuses. Never raises.

        ``use`` may be called a second time, after the store was connected again.
        """
        with self._lock:
            begin = self._availability.clock()
            for is_second in (False, True):
                if self._closed or not self._availability.may_be_tried():
                    return None
                try:
                    answer = use(self._connected())
                except DaemonUnavailable as error:
                    if is_second or self._store is None or self._availability.clock() - begin > self._soon_s:
                        self._availability.failed(error)
                        return None
                    # Its end was seen at once: one that was started since may be there already.
                except Exception as error:  # noqa: BLE001 - the engine goes on, whatever it is that failed
                    if self._store is None or self._store.is_lost:
                        self._availability.failed(error)
                    else:
                        self._availability.refused(error)
                    return None
                else:
                    self._availability.answered()
                    return answer
        return None

    def close(self) -> None:
        """End the lease; later calls have no answer."""
        with self._lock:
            self._closed = True
            if self._store is not None:
                self._store.close()

    def _connected(self) -> BlockStore:
        if self._store is None:
            self._store = self._open_store()
        elif self._store.is_lost:
            self._store.reconnect()
        return self._store
