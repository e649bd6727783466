"""The worker's side: a thread that copies blocks between the engine and the store. No step of the engine waits for it.

Loads go before saves. Whatever goes wrong ends as blocks that are not loaded, which the engine computes, or not saved.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from compute.block_store import BlockStore, MappedExtent, Reservation
from compute.integrations.outage import Outage
from compute.integrations.vllm.copies import Copies
from compute.integrations.vllm.plan import Load, Save
from compute.integrations.vllm.settings import Settings
from protocol.block_messages import MOST_KEYS
from protocol.errors import KvdError

BATCH_BYTES = 64 << 20
"""Bytes under one reservation or pin: a load that comes meanwhile waits for no more, nor for more from disk."""
SILENCE_S = 10.0
"""How long nothing more is logged of what hinders loads and saves."""

_log = logging.getLogger("vllm.kvd")
_ItemT = TypeVar("_ItemT")


@dataclass
class Results:
    """What has ended since the last time that it was asked for."""

    loads: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)
    saves: list[int] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)
    load_seconds: list[float] = field(default_factory=list)
    save_seconds: list[float] = field(default_factory=list)


@dataclass
class _Queued:
    job: Load | Save
    after: object
    since: float


class Transfers:
    """A thread with a lease of its own. ``open_store`` opens the space; ``writes`` is whether saves are this worker's.

    All methods are called by the engine's thread, and none waits for the daemon.
    """

    def __init__(
        self,
        open_store: Callable[[], BlockStore],
        copies: Copies,
        block_bytes: int,
        settings: Settings,
        *,
        writes: bool = True,
    ) -> None:
        self._open_store = open_store
        self._copies = copies
        self._block_bytes = block_bytes
        self._batch = max(1, min(MOST_KEYS, BATCH_BYTES // block_bytes))
        self._settings = settings
        self._writes = writes
        self._outage = Outage(settings.retry_s, settings.longest_retry_s)
        self._store: BlockStore | None = None
        self._ahead: deque[MappedExtent] = deque()
        """Extents that are got ready while there is nothing else to do."""
        self._loads: deque[_Queued] = deque()
        self._saves: deque[_Queued] = deque()
        self._changed = threading.Condition()
        self._under_way = 0
        self._results = Results()
        self._said = -SILENCE_S
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvd-transfers", daemon=True)
        self._thread.start()

    def load(self, load: Load) -> None:
        self._queue(self._loads, load)

    def save(self, save: Save) -> None:
        if not self._writes:  # another worker has the same bytes, and stores them
            with self._changed:
                self._results.saves.append(save.number)
            return
        self._queue(self._saves, save)

    def take_results(self, wait_s: float = 0.0) -> Results:
        """What has ended. Waits ``wait_s`` for something to end, if anything is under way."""
        with self._changed:
            self._give_up_late_loads()
            if wait_s and not self._anything and (self._loads or self._saves or self._under_way):
                self._changed.wait(wait_s)
            results, self._results = self._results, Results()
        return results

    def close(self) -> None:
        """End the thread and the lease; what is queued is dropped."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(4 * self._settings.transfer_timeout_s + 1)

    # The engine's thread

    def _queue(self, queue: deque[_Queued], job: Load | Save) -> None:
        queued = _Queued(job, self._copies.mark(), time.monotonic())
        with self._changed:
            queue.append(queued)
            self._changed.notify_all()

    @property
    def _anything(self) -> bool:
        return bool(self._results.loads or self._results.saves)

    def _give_up_late_loads(self) -> None:
        """Loads whose turn has not come in time. One that is under way ends by itself: it writes to the blocks."""
        latest = time.monotonic() - self._settings.load_timeout_s
        while self._loads and self._loads[0].since < latest:
            self._ended_load(self._loads.popleft(), 0, "late")

    def _ended_load(self, queued: _Queued, good: int, reason: str = "") -> None:
        load = queued.job
        assert isinstance(load, Load)
        results = self._results
        results.loads.add(load.request)
        results.failed_blocks.update(load.blocks[good:])
        results.load_seconds.append(time.monotonic() - queued.since)
        self._count("loaded_blocks", good)
        self._count("loaded_bytes", good * self._block_bytes)
        if good < len(load.blocks):
            self._count("failed_loads", 1)
            self._count("failed_load_blocks", len(load.blocks) - good)
            self._say(f"not loaded, and computed: {len(load.blocks) - good} of {len(load.blocks)} blocks, {reason}")

    def _ended_save(self, queued: _Queued, stored: int, dropped: int) -> None:
        save = queued.job
        assert isinstance(save, Save)
        self._results.saves.append(save.number)
        self._results.save_seconds.append(time.monotonic() - queued.since)
        self._count("saved_blocks", stored)
        self._count("saved_bytes", stored * self._block_bytes)
        self._count("dropped_save_blocks", dropped)

    def _count(self, name: str, by: float) -> None:
        if by:
            self._results.counts[name] = self._results.counts.get(name, 0) + by

    # The thread

    @property
    def _may_retry(self) -> bool:
        """Whether a daemon that did not answer may be tried again."""
        return self._outage.lasts and self._outage.is_over

    def _run(self) -> None:
        self._connected()  # before there is anything to do: the first load need not wait for it
        while True:
            with self._changed:
                while not (self._closing or self._loads or self._saves or self._ahead or self._may_retry):
                    self._changed.wait(self._outage.left_s if self._outage.lasts else None)
                if self._closing:
                    break
                queue = self._loads or self._saves
                queued = queue.popleft() if queue else None
                self._under_way += queued is not None
            if queued is None:
                if self._ahead:
                    self._get_ready(self._ahead.popleft())
                else:
                    self._connected()  # the daemon keeps what was pinned until its clients are back
                continue
            self._do(queued)
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()
        if self._store is not None:
            self._store.close()

    def _do(self, queued: _Queued) -> None:
        try:
            if isinstance(queued.job, Load):
                self._do_load(queued, queued.job)
            else:
                self._do_save(queued, queued.job)
        except Exception as error:  # noqa: BLE001
            # The engine waits for a word on every job: none may be lost, whatever it was that failed.
            _log.exception("kvd: a transfer failed")
            with self._changed:
                if isinstance(queued.job, Load):
                    self._ended_load(queued, 0, str(error))
                else:
                    self._ended_save(queued, 0, len(queued.job.blocks))

    def _do_load(self, queued: _Queued, load: Load) -> None:
        good, reason = 0, "kvd is not there"
        store = self._connected()
        if store is not None:
            begin = time.monotonic()
            good, reason = self._load(store, queued, load)
            soon = time.monotonic() - begin < self._settings.transfer_timeout_s / 2
            if store.is_lost and not good and soon and self._connected() is not None:
                # Its end was seen at once, and there is one again that was started since.
                good, reason = self._load(store, queued, load)
            self._look(store)
        with self._changed:
            self._ended_load(queued, good, reason)

    def _load(self, store: BlockStore, queued: _Queued, load: Load) -> tuple[int, str]:
        """How many of the first blocks are loaded, and why not more."""
        latest = queued.since + self._settings.load_timeout_s
        good = 0
        if time.monotonic() > latest:
            return good, "late"
        try:
            for pinned in store.pin_each(self._parts(load.keys)):
                if pinned.count:
                    self._copies.adopt(store.extents(), pinned.extents)
                    self._copies.load(load.blocks[good : good + pinned.count], pinned.addresses, queued.after)
                good += pinned.count
                if good < len(load.keys) and time.monotonic() > latest:
                    return good, "late"
        except KvdError as error:
            return good, error.message
        return good, "" if good == len(load.keys) else "not stored any more"

    def _do_save(self, queued: _Queued, save: Save) -> None:
        reservations: list[Reservation] = []
        reason = ""
        parts, block_of = self._parts(save.keys), dict(zip(save.keys, save.blocks, strict=True))
        store = self._connected()
        if store is not None:
            try:
                for reservation in store.reserve_each(parts):
                    if reservation.keys:
                        self._copies.adopt(store.extents(), reservation.extents)
                        chosen = [block_of[key] for key in reservation.keys]
                        self._copies.save(chosen, reservation.addresses, queued.after)
                        reservation.publish()
                    reservations.append(reservation)
                    self._let_loads_pass()
            except KvdError as error:
                reason = error.message
            self._look(store)
        done = [(each, keys) for each, keys in zip(reservations, parts, strict=False) if each.is_stored]
        left = len(save.blocks) - sum(len(keys) for _, keys in done)
        if reason:
            self._say(f"not saved: {left} blocks, {reason}")
        with self._changed:
            self._ended_save(queued, sum(len(each.keys) for each, _ in done), left)

    def _parts(self, items: Sequence[_ItemT]) -> list[Sequence[_ItemT]]:
        return [items[first : first + self._batch] for first in range(0, len(items), self._batch)]

    def _let_loads_pass(self) -> None:
        """Between two batches of a save, loads that have come meanwhile."""
        while True:
            with self._changed:
                if self._closing or not self._loads:
                    return
                queued = self._loads.popleft()
            self._do(queued)

    def _connected(self) -> BlockStore | None:
        """The store, if the daemon is there. Tries again no sooner than the outage says."""
        store = self._store
        if store is not None and not store.is_lost:
            return store
        if not self._outage.is_over:
            return None
        try:
            if store is None:
                self._store = self._open_store()
            else:
                store.reconnect()
            assert self._store is not None
            self._store.map_all()  # also before there is anything to do
            self._ahead = deque(self._store.extents())
        except Exception as error:  # noqa: BLE001 - the thread goes on, whatever it is that answers there
            self._outage.failed()
            self._say(f"left alone for a while: {error}")
            return None
        if self._outage.lasts:
            _log.info("kvd is used again")
        self._outage.answered()
        return self._store

    def _get_ready(self, extent: MappedExtent) -> None:
        """Have copies from and to the extent wait for nothing."""
        assert self._store is not None
        known = self._store.extents()
        try:
            self._copies.adopt(known, [extent] if extent in known else [])
        except Exception as error:  # noqa: BLE001 - what needs it will say so again
            self._ahead.clear()
            self._say(f"memory is not got ready: {error}")

    def _say(self, text: str) -> None:
        """Once in a while: the same may be true of every block for hours. The counters have all of it."""
        now = time.monotonic()
        if now - self._said > SILENCE_S:
            self._said = now
            _log.warning("kvd: %s", text)

    def _look(self, store: BlockStore) -> None:
        if store.is_lost and self._outage.is_over:  # else it counts already
            self._outage.failed()
