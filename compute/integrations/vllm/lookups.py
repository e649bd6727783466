"""The scheduler's question: how much of a chain is stored. It waits for an answer once, and not for long.

A space is asked within ``lookup_timeout_s``, and the next one only before that is over: all of them together take about
twice as long at most, and four times where the daemon has to be connected to.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from compute.block_store import BlockStore
from compute.integrations.outage import Outage
from compute.integrations.vllm.plan import Space
from compute.integrations.vllm.settings import Settings
from protocol.errors import DaemonUnavailable

_log = logging.getLogger("vllm.kvd")


class Lookups:
    """Looks in the spaces of all workers: a block is stored when each of them can load its part.

    ``count`` and ``took`` are told of lookups and of seconds.
    """

    def __init__(
        self,
        spaces: Sequence[Space],
        settings: Settings,
        count: Callable[[str, float], None],
        took: Callable[[str, float], None],
    ) -> None:
        # Workers with a copy of the same cache have one space.
        self._spaces = list({space.fingerprint: space for space in spaces}.values())
        self._settings = settings
        self._count = count
        self._took = took
        self._outage = Outage(settings.retry_s, settings.longest_retry_s)
        self._stores: list[BlockStore] = []

    def find(self, keys: Sequence[bytes]) -> int | None:
        """How many of the first keys are stored everywhere; None where that is not known."""
        self._count("lookups", 1)
        if not self._outage.is_over:
            self._count("failed_lookups", 1)
            return None
        begin = time.monotonic()
        try:
            try:
                found = self._ask(keys, begin)
            except DaemonUnavailable:
                if time.monotonic() - begin > self._settings.lookup_timeout_s / 2:
                    raise
                # Its end was seen at once: one that was started again may be there already.
                found = self._ask(keys, begin)
        except Exception as error:  # noqa: BLE001 - the engine goes on, whatever it is that answers there
            if not self._outage.lasts:
                _log.warning("kvd is not asked for a while: %s", error)
            self._outage.failed()
            self._count("failed_lookups", 1)
            return None
        finally:
            self._took("lookup_seconds", time.monotonic() - begin)
        self._outage.answered()
        return found

    def _ask(self, keys: Sequence[bytes], begin: float) -> int:
        self._connect(begin)
        found = len(keys)
        for store in self._stores:
            self._require_time(begin)
            found = store.find(keys[:found]) if found else 0
        return found

    def _require_time(self, begin: float) -> None:
        if time.monotonic() - begin > self._settings.lookup_timeout_s:
            raise DaemonUnavailable("it answers, but too slowly", socket=str(self._settings.run_dir))

    def close(self) -> None:
        for store in self._stores:
            store.close()
        self._stores = []

    def _connect(self, begin: float) -> None:
        for store in self._stores:
            if store.is_lost:
                self._require_time(begin)
                store.reconnect()
        for space in self._spaces[len(self._stores) :]:
            self._require_time(begin)
            self._stores.append(
                BlockStore(
                    self._settings.run_dir,
                    fingerprint=space.fingerprint,
                    block_bytes=space.block_bytes,
                    name="vllm-scheduler",
                    timeout_s=self._settings.lookup_timeout_s,
                )
            )
