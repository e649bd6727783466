"""The verbs of the block store. The lifecycle of a block is described in ``protocol/SPEC.md``.

Invariants: a key of a space is stored, being written, or neither, and has one frame at most. What `find` and `pin` see
was published, whole. Frames of blocks that are pinned or being written are given to nobody, whatever becomes of their
lease, before its process is dead or has said that it uses them no more.

All of it is in the table (`kvd.blocks.table`); dictionaries here are its index. Whatever a verb does for each of up to
16,384 keys it does in few steps: the loop serves decoding workers too.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Sequence
from itertools import repeat

from kvd.alloc.sizes import require_size
from kvd.blocks.model import STORED, Hold, Holder, Space, blocks_of
from kvd.blocks.spaces import Spaces
from kvd.blocks.spilling import BlockSpilling
from kvd.blocks.table import split_keys
from kvd.leases import Lease
from kvd.runs import Run, runs_of
from kvd.saved.jobs import Job
from kvd.shared_memory import SharedMemoryGranter
from kvd.tiers.host_ram import HostRam
from protocol.block_keys import FINGERPRINT_BYTES, KEY_BYTES
from protocol.block_messages import (
    FRAME_BYTES,
    MOST_KEYS,
    NO_FRAME,
    BlocksFound,
    BlocksMapped,
    BlocksOpened,
    BlocksPinned,
    BlocksReserved,
    FindBlocks,
    MapBlocks,
    OpenBlocks,
    PinBlocks,
    PublishBlocks,
    ReleaseBlocks,
    ReserveBlocks,
)
from protocol.errors import InvalidValue, UnknownBlocks
from protocol.handles import Extent
from protocol.layout import PAGE_ALIGNMENT
from protocol.messages import Done

SMALLEST_BLOCK = PAGE_ALIGNMENT
MOST_MAPPED = 4096
"""Of one answer, which has to fit into a message."""


class Blocks:
    """All blocks of the node, in ``spaces``.

    ``quit`` is called with a lease of which, by its process's own word, no block is used any more.
    """

    def __init__(self, spaces: Spaces, spilling: BlockSpilling, host: HostRam, granter: SharedMemoryGranter) -> None:
        self.spaces = spaces
        self.spilling = spilling
        self._host = host
        self._granter = granter
        self._hold_numbers = itertools.count(1)
        self._holds: dict[int, Hold] = {}
        self.quit: Callable[[Lease], None] = lambda _: None

    # Verbs

    def open(self, lease: Lease, request: OpenBlocks) -> BlocksOpened:
        """The space of ``lease``'s uid that has this fingerprint and size of blocks."""
        if len(request.fingerprint) != FINGERPRINT_BYTES:
            raise InvalidValue("bytes of the fingerprint", len(request.fingerprint), f"{FINGERPRINT_BYTES}")
        if not SMALLEST_BLOCK <= request.block_bytes <= self._host.extent_bytes:
            raise InvalidValue(
                "block_bytes", request.block_bytes, f"{SMALLEST_BLOCK} to {self._host.extent_bytes}, an extent"
            )
        previous = self.spaces.holders.get((request.previous.epoch, request.previous.number))
        if previous is not None and _is_same_process(previous.lease, lease) and previous.lease is not lease:
            self._succeed(previous, lease)
        space = self.spaces.open(lease, request.fingerprint, request.block_bytes)
        return BlocksOpened(request.seq, space.number, space.kind.stride)

    def map(self, lease: Lease, request: MapBlocks) -> BlocksMapped:
        """Memory that blocks of the space's uid are in, and the lease has not been given."""
        space, _ = self.spaces.named(lease, request.space)
        unknown = (each for each in self.spaces.room.extents_of(space.uid) if (each, False) not in lease.extents)
        return BlocksMapped(request.seq, self._granter.extents(itertools.islice(unknown, MOST_MAPPED), lease))

    def find(self, lease: Lease, request: FindBlocks) -> BlocksFound:
        """How many of the first keys are stored; they count as used."""
        space, holder = self.spaces.named(lease, request.space)
        keys = _require_keys(request.keys)
        runs = self.spaces.prefix_of(space, keys)
        self.spaces.touch(space, runs)
        count, missing = self.spilling.reach(space, keys, runs)
        if missing and space.file is not None:
            space.file.touch(missing)
        for counts in (space.counts, holder.counts):
            counts.looked_up += len(keys) // KEY_BYTES
            counts.found += count
        return BlocksFound(request.seq, count, len(missing))

    def pin(self, lease: Lease, request: PinBlocks, again: Callable[[], Lease]) -> BlocksPinned | Job:
        """Keep the first blocks that are stored, read back from disk first.

        ``again`` returns the lease, or raises, when that has taken a while.
        """
        space, _ = self.spaces.named(lease, request.space)
        keys = _require_keys(request.keys)
        require_size("from_disk", request.from_disk, least=0)
        if request.from_disk and self.spilling.reach(space, keys, self.spaces.prefix_of(space, keys))[1]:
            return self.spilling.pinning(space, keys, request.from_disk, lambda: self._pin_now(again(), request))
        return self._pin_now(lease, request)

    def _pin_now(self, lease: Lease, request: PinBlocks) -> BlocksPinned:
        space, holder = self.spaces.named(lease, request.space)
        runs = self.spaces.prefix_of(space, request.keys)
        if not runs:
            return BlocksPinned(request.seq, 0, b"", [])
        hold = self._hold(space, {holder})
        hold.runs = runs
        self.spaces.pin(space, runs, 1)
        frames = self.spaces.table.frame_bytes(runs)
        for counts in (space.counts, holder.counts):
            counts.loaded += len(frames) // FRAME_BYTES
        return BlocksPinned(request.seq, hold.number, frames, self._extents(frames, lease))

    def reserve(self, lease: Lease, request: ReserveBlocks) -> BlocksReserved:
        """Frames for those keys that have none."""
        space, holder = self.spaces.named(lease, request.space)
        data = _require_keys(request.keys)
        runs = self.spaces.prefix_of(space, data)
        have = blocks_of(runs)
        chain = split_keys(data)
        rest = chain[have:]
        keys = dict.fromkeys(rest)
        behind = [slot for slot in map(space.stored.get, keys) if slot is not None]
        wanted = [key for key in keys if key not in space.stored and key not in space.writing]
        stored = runs + runs_of(behind)
        no_frame = NO_FRAME.to_bytes(8, "little")
        if not wanted:
            self.spaces.touch(space, stored)
            return BlocksReserved(request.seq, 0, no_frame * len(chain), [])
        self.spaces.pin(space, stored, 1)  # of the chain itself nothing is to go
        try:
            slots, frames = self._place(space, holder, wanted)
        finally:
            self.spaces.pin(space, stored, -1)
            self.spaces.touch(space, stored)
        hold = self._hold(space, {holder})
        hold.keys, hold.chain = dict(zip(wanted, slots, strict=True)), chain
        space.writing.update(hold.keys)
        frame_bytes = found = array("Q", frames).tobytes()
        if len(wanted) < len(rest):
            given = dict(zip(wanted, frames, strict=True))
            found = array("Q", map(given.pop, rest, repeat(NO_FRAME))).tobytes()
        return BlocksReserved(request.seq, hold.number, no_frame * have + found, self._extents(frame_bytes, lease))

    def publish(self, lease: Lease, request: PublishBlocks) -> Done:
        """Blocks of a reservation are stored from now on."""
        hold, holder = self._held(lease, request.hold)
        keys = split_keys(_require_keys(request.keys)) if request.keys else tuple(hold.keys)
        if request.keys and (len(set(keys)) != len(keys) or not hold.keys.keys() >= set(keys)):
            raise UnknownBlocks(f"hold {hold.number} has not reserved all of these {len(keys)} keys", hold=hold.number)
        space, table = hold.space, self.spaces.table
        slots = list(map(hold.keys.pop, keys))
        runs = runs_of(slots)
        self._host.move_frames(array("Q", table.frame_bytes(runs)).tolist(), STORED)
        table.publish(runs, space.number, holder.index)
        for key in keys:
            del space.writing[key]
        space.stored.update(zip(keys, slots, strict=True))
        space.kind.reserved -= len(slots)
        space.kind.stored += len(slots)
        for counts in (space.counts, holder.counts):
            counts.published += len(slots)
        if not hold.keys and keys != hold.chain:  # the whole chain is as warm as its end
            runs = runs_of([slot for slot in map(space.stored.get, hold.chain) if slot is not None])
        self.spaces.touch(space, runs)
        if not hold.keys:
            self._forget(hold)
        self.spilling.look()
        return Done(request.seq)

    def release(self, lease: Lease, request: ReleaseBlocks) -> Done:
        """End a hold."""
        hold, _ = self._held(lease, request.hold)
        self._end(hold)
        return Done(request.seq)

    # What happens to leases, limits and the tier

    def lease_ended(self, lease: Lease) -> None:
        """The process of ``lease`` is dead: what it was writing is nothing, and it pins nothing."""
        for holder in self.spaces.holders_of(lease):
            self._drop(holder)

    # For what an earlier run of the daemon left (`kvd.blocks.inheritance`)

    def inherit_pins(self, space: Space, owners: set[Holder], runs: list[Run]) -> None:
        """Blocks that some of ``owners`` had pinned."""
        self._hold(space, owners).runs = runs
        self.spaces.pin(space, runs, 1)

    def inherit_reservation(self, space: Space, holder: Holder, keys: dict[bytes, int]) -> None:
        """Blocks, by their slots, that ``holder`` was writing."""
        self._hold(space, {holder}).keys = keys

    def close(self) -> None:
        """Give everything back."""
        for holder in list(self.spaces.holders.values()):
            self._drop(holder)
        for space in self.spaces:
            self.spaces.room.evict(runs_of(sorted(space.stored.values())))
        self.spaces.close()

    # Steps

    def _held(self, lease: Lease, number: int) -> tuple[Hold, Holder]:
        """The hold of this number, if it is of ``lease``; raises `UnknownBlocks`."""
        hold = self._holds.get(number)
        owner = next((owner for owner in hold.owners if owner.lease is lease), None) if hold else None
        if hold is None or owner is None:
            raise UnknownBlocks(f"lease {lease.number} has no hold {number} on blocks", hold=number)
        return hold, owner

    def _hold(self, space: Space, owners: set[Holder]) -> Hold:
        hold = Hold(next(self._hold_numbers), space, owners)
        self._holds[hold.number] = hold
        for owner in owners:
            owner.holds[hold.number] = hold
        return hold

    def _place(self, space: Space, holder: Holder, keys: Sequence[bytes]) -> tuple[list[int], list[int]]:
        """Reserved slots, with frames, for ``keys``."""
        kind, table = space.kind, self.spaces.table
        slots = self.spaces.room.slots(len(keys))
        try:
            frames = self.spaces.room.allocate(kind, holder.account, len(keys), space.block_bytes)
        except BaseException as error:
            table.give(slots[::-1])
            space.counts.refused += 1
            holder.counts.refused += 1
            raise error
        table.fill(slots, keys, frames, space.number, holder.index)
        self.spaces.room.placed(runs_of(slots))
        kind.reserved += len(slots)
        return slots, frames

    def _extents(self, frames: bytes, lease: Lease) -> list[Extent]:
        return self._granter.extents(set(array("I", frames)[1::2]), lease)

    def _end(self, hold: Hold) -> None:
        """Nobody has the hold any more."""
        space = hold.space
        if hold.runs:
            self.spaces.pin(space, hold.runs, -1)
            self.spaces.touch(space, hold.runs)
        if hold.keys:
            for key in hold.keys:
                del space.writing[key]
            self.spaces.room.clear(runs_of(list(hold.keys.values())))
            space.kind.reserved -= len(hold.keys)
            for counts in (space.counts, *(owner.counts for owner in hold.owners)):
                counts.abandoned += len(hold.keys)
        self._forget(hold)

    def _forget(self, hold: Hold) -> None:
        del self._holds[hold.number]
        for owner in hold.owners:
            del owner.holds[hold.number]

    def _drop(self, holder: Holder) -> None:
        """The holder is gone."""
        for hold in list(holder.holds.values()):
            if len(hold.owners) > 1:
                hold.owners.remove(holder)
            else:
                self._end(hold)
        self.spaces.forget_holder(holder)

    def _succeed(self, previous: Holder, lease: Lease) -> None:
        """What ``previous`` had is not used any more. What its process has mapped stays its own under ``lease``."""
        old = previous.lease
        self._drop(previous)
        self._host.pass_on(old.number, lease.number)
        self.quit(old)


def _require_keys(keys: bytes) -> bytes:
    """``keys``, which must be whole and not too many; raises `InvalidValue` otherwise."""
    count, rest = divmod(len(keys), KEY_BYTES)
    if rest or not 1 <= count <= MOST_KEYS:
        allowed = f"1 to {MOST_KEYS} times {KEY_BYTES}"
        raise InvalidValue("bytes of keys", len(keys), allowed)
    return keys


def _is_same_process(one: Lease, other: Lease) -> bool:
    return (one.peer.uid, one.peer.pid, one.process.start) == (other.peer.uid, other.peer.pid, other.process.start)
