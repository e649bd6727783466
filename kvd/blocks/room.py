"""Room for blocks, and by blocks for sessions: what is evicted, and that nothing is where that would not be enough.

Blocks are a cache. They keep to limits of their own, and whatever a session needs of the host tier they give up, except
what is pinned or being written. They themselves never have a session moved.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

from kvd.alloc.ledger import Account
from kvd.blocks.model import PURPOSE, Kind, Space, blocks_of
from kvd.blocks.table import BlockTable
from kvd.runs import Run, runs_of
from kvd.sessions.session import HOST_TIER
from kvd.tiers.host_ram import HostRam
from protocol.errors import OutOfCapacity

NOBODY = -2
"""The uid of no process, and of no extent's bytes."""


@dataclass
class BlockLimits:
    """Most bytes of frames, in all and for one uid."""

    total: int
    per_uid: int


class Room:
    """Gives frames to the blocks of ``spaces``, by number, and takes them back."""

    def __init__(self, table: BlockTable, host: HostRam, limits: BlockLimits, spaces: Mapping[int, Space]) -> None:
        self.limits = limits
        self._table = table
        self._host = host
        self._spaces = spaces
        self.kinds: dict[tuple[int, int], Kind] = {}
        self._extents: defaultdict[int, set[int]] = defaultdict(set)
        """Slots of published and reserved blocks, by extent."""
        self.in_flight: set[int] = set()
        """Slots that are being written to disk; those that are cleared meanwhile leave it."""

    def nbytes(self, uid: int | None = None) -> int:
        """Bytes of all blocks in host RAM, or of one uid's."""
        return sum(kind.nbytes for kind in self._kinds(uid))

    def placed(self, runs: Sequence[Run]) -> None:
        """Blocks have got frames."""
        for number, slots in self._by_extent(runs):
            self._extents[number].update(slots)

    def extents_of(self, uid: int) -> list[int]:
        """Extents with blocks of the uid."""
        spaces, frames_of = self._table.spaces, self._extents.items()
        return [number for number, slots in frames_of if self._spaces[spaces[next(iter(slots))]].uid == uid]

    def evict(self, runs: Sequence[Run]) -> None:
        """Published blocks that nobody pins are stored no more."""
        for run in runs:
            keys, numbers = self._table.keys(run), self._table.live[run[0] : run[0] + run[1]].tolist()
            for number in set(numbers):
                space = self._spaces[number]
                gone = keys if numbers.count(number) == len(keys) else [*compress(keys, map(number.__eq__, numbers))]
                for key in gone:
                    del space.stored[key]
                space.kind.stored -= len(gone)
                space.counts.evicted += len(gone)
        self.clear(runs)

    def clear(self, runs: Sequence[Run]) -> None:
        """Slots of blocks that are no more are free, and their frames; the last run's are taken first, in order."""
        for number, slots in self._by_extent(runs):
            if self.in_flight:
                self.in_flight.difference_update(slots)
            self._extents[number].difference_update(slots)
            if not self._extents[number]:
                del self._extents[number]
        frames = array("Q")
        for first, count in runs:
            frames += self._frames(first, count)[::-1]
            self._table.give(range(first + count - 1, first - 1, -1))
        self._table.clear(runs)
        self._host.free_frames(frames.tolist())

    def allocate(self, kind: Kind, account: Account, count: int, payload: int) -> list[int]:
        """Frames for ``count`` blocks, for which those that were used longest ago go if need be.

        Raises `OutOfCapacity` where that is not possible.
        """
        self._keep_to_limits(kind, count)

        def allocate() -> list[int]:
            return self._host.allocate_frames(account, kind.uid, kind.stride, count, payload)

        try:
            return allocate()
        except OutOfCapacity as error:
            if not self.give_way(kind.uid, kind.stride, error):
                raise
        return allocate()

    def slots(self, count: int) -> list[int]:
        """Slots for ``count`` blocks, for which those that were used longest ago go if the table may not grow.

        Raises `OutOfCapacity`.
        """
        lacking = count - self._table.spare
        if 0 < lacking <= sum(kind.evictable for kind in self.kinds.values()):
            self._shrink(None, lacking, lambda _: 1)
        return self._table.take(count)

    def give_way(self, uid: int, stride: int, error: OutOfCapacity) -> bool:
        """Make the frames free that a session of ``uid`` lacked when it got ``error``; False if blocks cannot."""
        return error.facts["tier"] == HOST_TIER and self._free(uid, stride, _missing(error, stride))

    def keep_limits(self) -> None:
        """Evict what is beyond limits that were lowered, as far as it is not pinned."""
        for uid in {kind.uid for kind in self.kinds.values()}:
            self._shrink(uid, self.nbytes(uid) - self.limits.per_uid)
        self._shrink(None, self.nbytes() - self.limits.total)

    def vacate(self, count: int) -> None:
        """Have no blocks in ``count`` extents more that no living process has mapped, as far as there are."""
        if count > 0:
            for number in self._extents_to_clear(NOBODY, 0, count):  # nobody's uid could have only what is not mapped
                self.evict(self._slots(number))

    def drop(self, extents: Iterable[int]) -> None:
        """Published blocks in these extents, whose bytes are lost, are stored no more, unless they are pinned."""
        table = self._table
        for number in extents:
            slots = sorted(self._extents.get(number, ()))
            self.evict(runs_of([slot for slot in slots if table.live[slot] and not table.pins[slot]]))

    def _keep_to_limits(self, kind: Kind, count: int) -> None:
        nbytes = count * kind.stride
        self._require_limit(f"blocks of uid {kind.uid}", nbytes, self.limits.per_uid, kind.uid)
        self._require_limit("blocks", nbytes, self.limits.total, None)
        over = self.nbytes(kind.uid) + nbytes - self.limits.per_uid
        if over > 0:
            self._shrink(kind.uid, over)
        over = self.nbytes() + nbytes - self.limits.total
        if over > 0:
            self._shrink(None, over)

    def _kinds(self, uid: int | None) -> list[Kind]:
        return [kind for kind in self.kinds.values() if uid in (None, kind.uid)]

    def _require_limit(self, what: str, nbytes: int, limit: int, uid: int | None) -> None:
        """Raise unless evicting could make room under the limit."""
        kinds = self._kinds(uid)
        kept = sum(kind.stride * (kind.pinned + kind.reserved) for kind in kinds)
        if nbytes + kept > limit:
            pinned = sum(kind.stride * kind.pinned for kind in kinds)
            holders = [f"pinned: {pinned} bytes", f"being written: {kept - pinned} bytes"]
            raise OutOfCapacity(what, nbytes, max(0, limit - kept), limit, holders)

    def _shrink(self, uid: int | None, most: int, size: Callable[[Kind], int] = lambda kind: kind.stride) -> None:
        """Evict the coldest blocks of these kinds until those evicted are of ``most`` in ``size``, bytes if not said
        otherwise, or all.
        """
        kinds = self._kinds(uid)
        while most > 0:
            colds = [(tick, kind) for kind in kinds if (tick := kind.recency.coldest())]
            if not colds:
                return
            tick, kind = min(colds, key=lambda cold: cold[0])
            runs = kind.recency.take(-(-most // size(kind)), tick)
            self.evict(runs)
            most -= blocks_of(runs) * size(kind)

    def _free(self, uid: int, stride: int, frames: int) -> bool:
        """Evict until ``uid`` can have so many frames more; nothing, and False, if that is not to be had."""
        own = self.kinds.get((uid, stride))
        same = 0 if own is None else min(frames, own.evictable)
        each = self._host.extent_bytes // stride
        extents = self._extents_to_clear(uid, stride, -(-(frames - same) // each)) if frames > same else []
        if same + len(extents) * each < frames:
            return False
        if own is not None:
            self.evict(own.recency.take(same))
        for number in extents:
            self.evict(self._slots(number))
        return True

    def _slots(self, extent: int) -> list[Run]:
        """Those with frames in the extent."""
        return runs_of(sorted(self._extents[extent]))

    def _frames(self, first: int, count: int) -> array[int]:
        return array("Q", self._table.frame_bytes([(first, count)]))

    def _by_extent(self, runs: Sequence[Run]) -> Iterator[tuple[int, range]]:
        """The slots of the runs by the extents of their frames, in as few parts as halving finds."""
        left = list(runs)
        while left:
            first, count = left.pop()
            numbers = array("I", self._table.frame_bytes([(first, count)]))[1::2]
            if numbers == numbers[:1] * count:
                yield numbers[0], range(first, first + count)
            else:
                left += [(first, count // 2), (first + count // 2, count - count // 2)]

    def _extents_to_clear(self, uid: int, stride: int, count: int) -> list[int]:
        """Extents of other kinds that ``uid`` could have without their blocks, those with the coldest first."""
        chosen: list[int] = []
        seen: set[int] = set()
        others = [kind for key, kind in self.kinds.items() if key != (uid, stride)]
        batches = sorted((batch for kind in others for batch in kind.recency.batches()), key=lambda b: b[0])
        for _, runs in batches:
            for first, length in reversed(runs):
                frames = self._table.frames[first : first + length].tolist()
                for number in dict.fromkeys(frame >> 32 for frame in reversed(frames)):
                    if number in seen:
                        continue
                    seen.add(number)
                    if self._host.could_have(number, uid) and self._is_only_evictable(number):
                        chosen.append(number)
                    if len(chosen) == count:
                        return chosen
        return chosen

    def _is_only_evictable(self, number: int) -> bool:
        """Whether all frames in use of the extent are of published blocks that may go."""
        slots, table = self._extents[number], self._table
        return all(account.purpose == PURPOSE for account in self._host.accounts(number)) and all(
            table.live[slot] and not table.pins[slot] for slot in slots
        )


def _missing(error: OutOfCapacity, stride: int) -> int:
    """How many frames an allocation lacked."""
    asked, free = error.facts["asked"], error.facts["free"]
    assert isinstance(asked, int)
    assert isinstance(free, int)
    return max(1, -(-(asked - free) // stride))
