"""Which spaces of blocks there are, and which leases use them. The table is made with the first space."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from kvd.alloc.ledger import Ledger
from kvd.blocks.model import Counts, Holder, Kind, Space
from kvd.blocks.recency import Recency
from kvd.blocks.room import BlockLimits, Room
from kvd.blocks.table import MOST_HOLDERS, MOST_SPACES, BlockTable
from kvd.leases import Lease
from kvd.runs import Run
from kvd.sessions.session import HOST_TIER
from kvd.tiers.host_ram import HostRam
from protocol.block_keys import KEY_BYTES
from protocol.errors import InvalidValue, OutOfCapacity, UnknownBlocks
from protocol.layout import PAGE_ALIGNMENT, round_up


class Spaces:
    """The spaces of this run of the daemon, which ``epoch`` names; `limit` has the limits of their blocks."""

    def __init__(self, epoch: int, prefix: str, ledger: Ledger, host: HostRam) -> None:
        self._epoch = epoch
        self._prefix = prefix
        self._ledger = ledger
        self._host = host
        self._limits = BlockLimits(0, 0)
        self._tick = 0
        self._most_table_bytes = 0
        self._spaces: dict[int, Space] = {}
        self._forgotten = Counts()
        """What happened in spaces that are no more."""
        self.holders: dict[tuple[int, int], Holder] = {}
        self.attach: Callable[[Space], None] = lambda _: None
        """Has a new space find its blocks on disk."""
        self._table: BlockTable | None = None
        self._room: Room | None = None
        ledger.add_auditor(HOST_TIER, lambda: self._table.taken_bytes() if self._table else 0)

    def __iter__(self) -> Iterator[Space]:
        return iter(list(self._spaces.values()))

    def numbered(self, number: int) -> Space:
        """The space of this number, which there is."""
        return self._spaces[number]

    @property
    def blocks(self) -> int:
        """Blocks that are stored."""
        return sum(len(space.stored) for space in self._spaces.values())

    @property
    def table(self) -> BlockTable:
        """There is one if there is a space."""
        assert self._table is not None, "no space has been opened"
        return self._table

    @property
    def room(self) -> Room:
        """There is one if there is a space."""
        assert self._room is not None, "no space has been opened"
        return self._room

    def limit(self, limits: BlockLimits, most_table_bytes: int) -> None:
        """New limits; what is beyond them goes unless it is pinned or being written."""
        self._limits, self._most_table_bytes = limits, most_table_bytes
        if self._room is not None:
            self.table.most_bytes = most_table_bytes
            self._room.limits = limits
            self._room.keep_limits()

    def nbytes(self, uid: int) -> int:
        """Bytes of frames of the uid's blocks."""
        return self._room.nbytes(uid) if self._room else 0

    def give_way(self, uid: int, stride: int, error: OutOfCapacity) -> bool:
        """`Room.give_way`."""
        return self._room is not None and self._room.give_way(uid, stride, error)

    def vacate(self, count: int) -> None:
        """`Room.vacate`."""
        if self._room is not None:
            self._room.vacate(count)

    def drop(self, extents: Iterable[int]) -> None:
        """`Room.drop`."""
        if self._room is not None:
            self._room.drop(extents)

    def take_up(self, table: BlockTable) -> None:
        """Stand on a table: a new one, or one that an earlier run left."""
        table.most_bytes = self._most_table_bytes
        self._table = table
        self._room = Room(table, self._host, self._limits, self._spaces)

    def open(self, lease: Lease, fingerprint: bytes, block_bytes: int) -> Space:
        """The space of the lease's uid with this fingerprint and size, which the lease may name from now on."""
        uid = lease.peer.uid
        for space in self._spaces.values():
            if (space.uid, space.fingerprint, space.block_bytes) == (uid, fingerprint, block_bytes):
                break
        else:
            number = next((number for number in range(1, MOST_SPACES) if number not in self._spaces), 0)
            number = number or self._forget_empty()
            if self._table is None:
                self.take_up(BlockTable.create(self._prefix, self._ledger))
            self.table.write_space(number, uid, block_bytes, fingerprint)
            space = self.add(number, uid, fingerprint, block_bytes)
        holder = self.holders.get((self._epoch, lease.number))
        space.openers.add(holder or self.add_holder(self._epoch, lease.number, lease))
        return space

    def add(self, number: int, uid: int, fingerprint: bytes, block_bytes: int) -> Space:
        """A space that the table has."""
        kinds, stride = self.room.kinds, round_up(block_bytes, PAGE_ALIGNMENT)
        if (uid, stride) not in kinds:
            kinds[uid, stride] = Kind(uid, stride, Recency(self.table))
        space = self._spaces[number] = Space(number, uid, fingerprint, block_bytes, kinds[uid, stride])
        self.attach(space)
        return space

    def named(self, lease: Lease, number: int) -> tuple[Space, Holder]:
        """The space of this number, and the holder that ``lease`` is, if it has opened it; raises `UnknownBlocks`."""
        space, holder = self._spaces.get(number), self.holders.get((self._epoch, lease.number))
        if space is None or holder not in space.openers:
            raise UnknownBlocks(f"lease {lease.number} has opened no space {number} of blocks", space=number)
        return space, holder

    def add_holder(self, epoch: int, number: int, lease: Lease, index: int | None = None) -> Holder:
        """A holder that goes on in the name of ``lease``; ``index`` is its place in the table if it has one."""
        if index is None:
            taken = {holder.index for holder in self.holders.values()}
            index = next((index for index in range(MOST_HOLDERS) if index not in taken), None)
            if index is None:
                raise InvalidValue("leases that use blocks", MOST_HOLDERS + 1, f"at most {MOST_HOLDERS}")
            peer = lease.peer
            self.table.write_holder(index, epoch, number, peer.uid, peer.pid, lease.process.start)
        holder = self.holders[epoch, number] = Holder(epoch, number, index, lease)
        return holder

    def holders_of(self, lease: Lease) -> list[Holder]:
        """Those that go on in the name of ``lease``: after a restart there may be several."""
        return [holder for holder in self.holders.values() if holder.lease is lease]

    def forget_holder(self, holder: Holder) -> None:
        """It holds nothing, and will not."""
        for space in self._spaces.values():
            space.openers.discard(holder)
        del self.holders[holder.epoch, holder.number]
        self.table.erase_holder(holder.index)

    def totals(self) -> Counts:
        """What has happened in all spaces since the start."""
        totals = Counts()
        for counts in (self._forgotten, *(space.counts for space in self._spaces.values())):
            totals.add(counts)
        return totals

    # What is done with chains

    def prefix_of(self, space: Space, keys: bytes) -> list[Run]:
        """The blocks of the first keys that are in host RAM, in order."""
        runs: list[Run] = []
        index, count, stored = 0, len(keys) // KEY_BYTES, space.stored
        match, number = self.table.match, space.number
        while index < count:
            slot = stored.get(keys[KEY_BYTES * index : KEY_BYTES * (index + 1)])
            if slot is None:
                break
            length = match(keys, index, slot, number)
            runs.append((slot, length))
            index += length
        return runs

    def touch(self, space: Space, runs: Sequence[Run]) -> None:
        """The blocks of a chain are used now."""
        if runs:
            self._tick += 1
            space.kind.recency.touch(runs, self._tick)

    def go_on_from(self, tick: int) -> None:
        """The latest use that the table knows of."""
        self._tick = max(self._tick, tick)

    def pin(self, space: Space, runs: Sequence[Run], change: int) -> None:
        """Have the blocks pinned once more, or once less; then they are to be touched."""
        changed = change * self.table.add_pins(runs, change)
        space.pinned += changed
        space.kind.pinned += changed

    def close(self) -> None:
        """Give the table back. No block may be left."""
        if self._table is not None:
            self._spaces.clear()
            self._table.destroy()
            self._table = self._room = None

    def _forget_empty(self) -> int:
        """The number of a space without blocks that nobody has open, which is gone by that."""
        for number, space in self._spaces.items():
            if not (space.stored or space.writing or space.openers or space.reading):
                self._forgotten.add(space.counts)
                del self._spaces[number]
                self.table.erase_space(number)
                return number
        raise InvalidValue("number of spaces of blocks", MOST_SPACES, f"at most {MOST_SPACES - 1}")
