"""Which blocks were used longest ago, in constant time for each that is used.

Every use of a chain has a number, its tick, which the table keeps for each of its blocks, and is a batch in a queue. A
batch counts for those of its blocks whose tick is still its own; the others are in later ones, or gone. Of one batch
the blocks at the chain's end are the colder ones: without the first blocks of a chain the others cannot be found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from kvd.blocks.table import BlockTable
from kvd.runs import Run, runs_of

_Batch = tuple[int, list[Run]]
_EVER = 1 << 63


class Recency:
    """The order of use of the blocks of one kind, of which ``table`` has the ticks. Ticks only rise."""

    def __init__(self, table: BlockTable) -> None:
        self._table = table
        self._queue: deque[_Batch] = deque()
        self._swept: deque[_Batch] = deque()
        """Batches older than those of the queue, without what does not count."""

    def touch(self, runs: Sequence[Run], tick: int) -> None:
        """The blocks of a chain, in its order, are used."""
        self._table.touch(runs, tick)
        self._queue.append((tick, list(runs)))
        self._sweep(2 * len(runs) + 2)

    def restore(self, runs: Sequence[Run], tick: int) -> None:
        """Blocks of which the table says that they were used at ``tick``, later than any other here."""
        self._queue.append((tick, list(runs)))

    def coldest(self) -> int:
        """The tick of the block that was used longest ago; 0 if there is none. Those that were taken do not count."""
        while batch := self._oldest():
            if live := self._live(batch):
                self._replace_oldest((batch[0], live))
                return batch[0]
            self._drop_oldest()
        return 0

    def take(self, most: int, until: int = _EVER) -> list[Run]:
        """At most ``most`` slots of blocks that were used longest ago, and not after tick ``until``: the coldest run
        first, and in a run the coldest slot last.

        Those that are pinned are passed over: they are touched when they are released. The caller evicts the others.
        """
        found: list[Run] = []
        while most > 0 and 0 < (tick := self.coldest()) <= until:
            batch = self._oldest()
            assert batch is not None
            runs = batch[1]
            while runs and most > 0:
                first, count = runs.pop()
                wanted = min(count, most)
                free = self._free((first + count - wanted, wanted), tick)
                self._table.touch(free, 0)
                found += free
                most -= sum(length for _, length in free)
                if wanted < count:
                    runs.append((first, count - wanted))
            self._replace_oldest((tick, runs))
        return found

    def _free(self, run: Run, tick: int) -> list[Run]:
        """What of the run is not pinned, its end first. What was taken is not there: a chain may name a block twice."""
        if self._table.is_used_at(run, tick) and not self._table.is_pinned(run):
            return [run]
        pins, used = self._table.pins, self._table.used
        return runs_of([slot for slot in range(run[0], run[0] + run[1]) if used[slot] and not pins[slot]])[::-1]

    def from_coldest(self) -> Iterator[list[Run]]:
        """The blocks that were last used together, those that were used longest ago first. Nothing may change
        meanwhile."""
        for queue in (self._swept, self._queue):
            for batch in queue:
                if live := self._live(batch):
                    yield live

    def batches(self) -> Iterator[tuple[int, list[Run]]]:
        """The same with their ticks."""
        return ((self._table.used[runs[0][0]], runs) for runs in self.from_coldest())

    def _live(self, batch: _Batch) -> list[Run]:
        """Those of its blocks that the batch counts for."""
        tick, runs = batch
        live: list[Run] = []
        used = self._table.used
        for run in runs:
            if self._table.is_used_at(run, tick):
                live.append(run)
            else:
                live += runs_of([slot for slot in range(run[0], run[0] + run[1]) if used[slot] == tick])
        return live

    def _oldest(self) -> _Batch | None:
        queue = self._swept or self._queue
        return queue[0] if queue else None

    def _replace_oldest(self, batch: _Batch) -> None:
        (self._swept or self._queue)[0] = batch

    def _drop_oldest(self) -> None:
        (self._swept or self._queue).popleft()

    def _sweep(self, runs: int) -> None:
        """Look at so many runs of the queue: it never has many more than there are of blocks."""
        while runs > 0:
            if not self._queue:
                self._queue, self._swept = self._swept, self._queue
            if not self._queue:
                return
            batch = self._queue.popleft()
            runs -= len(batch[1]) + 1
            if live := self._live(batch):
                self._swept.append((batch[0], live))
