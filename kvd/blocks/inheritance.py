"""Blocks of an earlier run of the daemon, taken up at the start: what of its table holds, and nothing else.

Published blocks are stored again. What a process that lives was writing stays its own, and whatever was pinned stays
pinned until every process that used blocks of that uid has said that it uses them no more, or is dead: whose pins they
were nobody knows. A damaged slot or record is dropped; the log says how many there were.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence

from kvd.alloc.ledger import Account, Ledger
from kvd.blocks.model import STORED, Holder, Space
from kvd.blocks.spaces import Spaces
from kvd.blocks.store import SMALLEST_BLOCK, Blocks
from kvd.blocks.table import MOST_HOLDERS, MOST_SPACES, BlockTable, table_name
from kvd.leases import Lease
from kvd.logs import Log
from kvd.runs import runs_of
from kvd.tiers.extent import frame_extent
from kvd.tiers.host_ram import HostRam
from kvd.tiers.segment import Segment, existing_names
from protocol.errors import KvdError

LivingHolder = Callable[[int, int, int], Lease | None]
"""The inherited lease of a process by uid, pid and start; None if it is dead."""

_LATEST = 1 << 62
"""No tick comes near it."""


def take_up(
    prefix: str,
    extents: Collection[int],
    ledger: Ledger,
    host: HostRam,
    spaces: Spaces,
    blocks: Blocks,
    living: LivingHolder,
    log: Log,
) -> None:
    """Have the blocks that lie under ``prefix``, after the sessions: a frame that one of them has is no block's.

    ``extents`` are those that the earlier run left whole.
    """
    if table_name(prefix) not in existing_names(prefix):
        return
    segment = Segment.existing(table_name(prefix))
    try:
        table = BlockTable.existing(segment, ledger)
    except KvdError as error:
        log.warning("blocks of an earlier run dropped", reason=error.message)
        segment.destroy()
        return
    spaces.take_up(table)
    dropped = _Heir(table, extents, host, spaces, blocks, living).take_up()
    log.info("blocks of an earlier run taken up", stored=spaces.blocks, holders=len(spaces.holders))
    if dropped:
        log.warning("blocks of an earlier run dropped", blocks=dropped, reason="their slots or frames do not hold")


class _Heir:
    def __init__(
        self,
        table: BlockTable,
        extents: Collection[int],
        host: HostRam,
        spaces: Spaces,
        blocks: Blocks,
        living: LivingHolder,
    ) -> None:
        self._extents = extents
        self._table = table
        self._host = host
        self._spaces = spaces
        self._blocks = blocks
        self._living = living

    def take_up(self) -> int:
        """Returns how many slots do not hold."""
        self._take_up_spaces()
        holders = self._take_up_holders()
        table = self._table
        by_space = {space.number: space for space in self._spaces}
        published: defaultdict[int, list[int]] = defaultdict(list)
        reserved: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        dropped = 0
        table.live[: table.slots] = memoryview(bytes(2 * table.slots)).cast("H")
        for slot, word in enumerate(table.words[: table.slots].tolist()):
            if not word:
                continue
            state, number = table.verified(slot), table.spaces[slot]
            if state is None or number not in by_space:
                dropped += 1
            elif state < 0:
                published[number].append(slot)
            elif state in holders:
                reserved[number, state].append(slot)
        kept: list[int] = []
        for number, slots in published.items():
            kept += (taken := self._take_up_published(by_space[number], slots))
            dropped += len(slots) - len(taken)
        for (number, index), slots in reserved.items():
            kept += (taken := self._take_up_reserved(by_space[number], holders[index], slots))
            dropped += len(slots) - len(taken)
        self._clear_others(set(kept))
        self._spaces.room.placed(runs_of(kept))
        self._grant()
        self._restore_order(kept)
        return dropped

    def _take_up_spaces(self) -> None:
        for number in range(MOST_SPACES):
            found = self._table.read_space(number)
            if found is None or not number or not SMALLEST_BLOCK <= found[1] <= self._host.extent_bytes:
                self._table.erase_space(number)
                continue
            self._spaces.add(number, found[0], found[2], found[1])

    def _take_up_holders(self) -> dict[int, Holder]:
        """Those whose processes live, by their index."""
        holders = {}
        for index in range(MOST_HOLDERS):
            found = self._table.read_holder(index)
            if found is None:
                self._table.erase_holder(index)
                continue
            epoch, number, uid, pid, start = found
            lease = None if (epoch, number) in self._spaces.holders else self._living(uid, pid, start)
            if lease is None:
                self._table.erase_holder(index)
            else:
                holders[index] = self._spaces.add_holder(epoch, number, lease, index)
        return holders

    def _take_up_published(self, space: Space, slots: Sequence[int]) -> list[int]:
        table, taken = self._table, []
        pinned = []
        for slot in self._adopt(space, slots, STORED):
            table.live[slot] = space.number
            space.stored[table.key(slot)] = slot
            taken.append(slot)
            if table.pins[slot]:
                table.pins[slot] = 0
                pinned.append(slot)
            if not 0 < table.used[slot] < _LATEST:
                table.used[slot] = 1
        space.kind.stored += len(taken)
        owners = {holder for holder in self._spaces.holders.values() if holder.lease.peer.uid == space.uid}
        if pinned and owners:
            self._blocks.inherit_pins(space, owners, runs_of(pinned))
        return taken

    def _take_up_reserved(self, space: Space, holder: Holder, slots: Sequence[int]) -> list[int]:
        taken = list(self._adopt(space, slots, holder.account))
        space.writing.update((self._table.key(slot), slot) for slot in taken)
        space.kind.reserved += len(taken)
        if taken:
            self._blocks.inherit_reservation(space, holder, {self._table.key(slot): slot for slot in taken})
        return taken

    def _adopt(self, space: Space, slots: Sequence[int], account: Account) -> Iterator[int]:
        """Those of ``slots`` whose keys are the only ones and whose frames could be had."""
        table = self._table
        by_extent: defaultdict[int, list[int]] = defaultdict(list)
        keys = set(space.stored) | set(space.writing)
        for slot in slots:
            if (key := table.key(slot)) not in keys:
                keys.add(key)
                by_extent[frame_extent(table.frames[slot])].append(slot)
        for extent, chosen in by_extent.items():
            if extent not in self._extents:
                continue
            if self._have(space, chosen, account):
                yield from chosen
            else:  # of one bad frame all are refused
                yield from (slot for slot in chosen if self._have(space, [slot], account))

    def _have(self, space: Space, slots: Sequence[int], account: Account) -> bool:
        frames = [self._table.frames[slot] for slot in slots]
        try:
            self._host.adopt_frames(account, space.uid, space.kind.stride, frames, space.block_bytes)
        except KvdError:
            return False
        return True

    def _clear_others(self, kept: set[int]) -> None:
        table = self._table
        others = [slot for slot in range(table.slots - 1, -1, -1) if slot not in kept]
        table.clear([(slot, 1) for slot in others if table.words[slot]])
        table.give(others)

    def _grant(self) -> None:
        """Whoever lives may have mapped every extent with blocks of its uid."""
        for holder in self._spaces.holders.values():
            for extent in self._spaces.room.extents_of(holder.lease.peer.uid):
                self._host.granted(extent, holder.lease.number)

    def _restore_order(self, kept: Sequence[int]) -> None:
        """The order in which blocks were used is as it was."""
        table = self._table
        latest = 0
        for kind in self._spaces.room.kinds.values():
            numbers = {space.number for space in self._spaces if space.kind is kind}
            ticks: defaultdict[int, list[int]] = defaultdict(list)
            for slot in kept:
                if table.live[slot] in numbers:
                    ticks[table.used[slot]].append(slot)
            for tick in sorted(ticks):
                kind.recency.restore(runs_of(ticks[tick]), tick)
                latest = max(latest, tick)
        self._spaces.go_on_from(latest)
