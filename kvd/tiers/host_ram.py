"""The host tier: shared memory in equal extents, handed out as page frames of any size class.

All of the memory is taken when the daemon starts, so that a frame which is given is there. An extent belongs to one
uid and one frame size while any of its frames is in use. It goes to another uid only as a new segment, zeroed by the
kernel, and not before every process that may have mapped the old one is known dead. Nothing here reads or writes the
memory: how pages are laid out and who may see which is decided elsewhere.

A frame is named by one integer, ``extent << 32 | index``; it lies at ``index × stride`` in its extent.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvd.alloc.ledger import Account, Ledger, Reservation
from kvd.alloc.sizes import require_multiple, require_size
from kvd.tiers.extent import Extent, Holding, frame_extent, frame_index, still_mapped
from kvd.tiers.segment import Progress, Segment, create_segments, require_name
from protocol.errors import InvalidValue, OutOfCapacity, TierInUse, UnknownHandle
from protocol.layout import PAGE_ALIGNMENT

EXTENT_ALIGNMENT = 2 * 1024 * 1024
"""Extents are multiples of a huge page, so that the kernel gives exactly their size."""

MOST_EXTENTS = 65536
"""Each extent costs the daemon, and every worker that maps it, a file descriptor."""

STATE_PURPOSES = ("session_state", "block_table")
"""Purposes of bytes of the tier that are in no extent."""

UNASSIGNED = "unassigned"
"""The purpose of bytes of the tier that are in no frame in use; nobody requested them."""


class HostRam:
    """``capacity_bytes`` of host RAM under the ledger's tier ``tier``, in extents of ``extent_bytes``.

    Segments are named ``prefix-e<number>``. With ``numa_node`` all memory comes from that node. ``progress`` is called
    whenever memory is populated, in the calling thread. Raises `OutOfCapacity` naming the limit that is in the way,
    `InvalidValue` or `OsFailure`; then no new segment and no tier is left. ``left`` are extents of an earlier run, by
    number, that are taken as they are: whole segments of ``extent_bytes``. Their numbers are below ``slots``, which is
    more than there are extents where that run had given some up.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        capacity_bytes: int,
        extent_bytes: int,
        prefix: str,
        numa_node: int | None = None,
        progress: Progress | None = None,
        tier: str = "host",
        left: Mapping[int, Segment] | None = None,
        slots: int = 0,
    ) -> None:
        self._extent_bytes = require_multiple("extent bytes", extent_bytes, EXTENT_ALIGNMENT)
        count = require_multiple("capacity of host RAM", capacity_bytes, extent_bytes) // extent_bytes
        require_size("number of extents", count, most=MOST_EXTENTS)
        self._ledger = ledger
        self._prefix = require_name(prefix)
        self._numa_node = numa_node
        self._threads = len(os.sched_getaffinity(0))
        self._progress = progress
        self._tier = tier
        self._unassigned = Account(tier, 0, 0, UNASSIGNED)
        left = left or {}
        require_size("extents of an earlier run", len(left), least=0, most=count)
        self._extents = [Extent(number) for number in range(max(count, slots))]
        spare = [extent for extent in self._extents if extent.number not in left]
        for extent in spare[count - len(left) :]:
            extent.is_retired = True
        self._partly_used: defaultdict[tuple[int | None, int], set[Extent]] = defaultdict(set)
        self._granted: defaultdict[int, set[Extent]] = defaultdict(set)
        ledger.add_tier(tier, capacity_bytes)
        with ledger.reserve(self._unassigned, 0, len(left) * extent_bytes) as reservation:
            reservation.commit(len(left) * extent_bytes)
        for number, segment in left.items():
            self._extents[number].adopt(segment)
        try:
            self._create([extent for extent in self._extents if extent.segment is None and not extent.is_retired])
        except BaseException:
            for extent in self._extents:
                extent.give_up_place()
            for segment in left.values():
                ledger.release(self._unassigned, 0, extent_bytes)
                segment.close()
            ledger.remove_tier(tier)
            raise
        ledger.add_auditor(tier, self.held_bytes)

    @property
    def extent_bytes(self) -> int:
        return self._extent_bytes

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all extents."""
        return self._extent_bytes * sum(not extent.is_retired for extent in self._extents)

    @property
    def slots(self) -> int:
        """Numbers of extents, those that were given up included."""
        return len(self._extents)

    def allocate_frames(self, account: Account, uid: int, stride: int, count: int, payload: int) -> list[int]:
        """``count`` frames of ``stride`` bytes for ``account``, ``payload`` bytes of each being asked for. All or none.

        Fills extents that the uid already uses before it takes another. A frame has zeros or old bytes of the same
        uid. Raises `OutOfCapacity` (whose ``free`` counts only what this uid could have), `InvalidValue`, `OsFailure`.
        """
        require_multiple("stride of frames", stride, PAGE_ALIGNMENT, most=self._extent_bytes)
        require_size("payload of a frame", payload, most=stride)
        require_size("number of frames", count)
        require_size("uid", uid, least=0)
        if account.tier != self._tier:
            raise InvalidValue("tier of the account", account.tier, self._tier)
        chosen: list[Extent] = []
        found = 0
        for extent in self._candidates(uid, stride):
            chosen.append(extent)
            found += extent.free_frames if extent.stride else self._extent_bytes // stride
            if found >= count:
                break
        else:
            raise self._out_of_capacity(uid, stride, count, found)
        self._create([extent for extent in chosen if not extent.stride and not extent.is_usable(uid)])
        self._ledger.transfer(self._unassigned, account, count * payload, count * stride, requested_before=0)
        holding = Holding(account, payload)
        frames: list[int] = []
        for extent in chosen:
            if not extent.stride:
                extent.assign(uid, stride, self._extent_bytes // stride)
            taken = extent.take(min(count - len(frames), extent.free_frames), holding)
            base = extent.number << 32
            frames += [base | index for index in taken]
            self._file(extent)
        return frames

    def adopt_frames(self, account: Account, uid: int, stride: int, frames: Sequence[int], payload: int) -> None:
        """Frames that an earlier run gave, and that no other session has, for ``account``. All or none.

        Raises `UnknownHandle` for a frame that is not there or not free, or in an extent of another uid or stride.
        """
        require_multiple("stride of frames", stride, PAGE_ALIGNMENT, most=self._extent_bytes)
        indices: defaultdict[int, set[int]] = defaultdict(set)
        for frame in frames:
            indices[frame_extent(frame)].add(frame_index(frame))
        limit = self._extent_bytes // stride
        for number, wanted in indices.items():
            extent = self._extent(number)
            is_same = not extent.stride or (extent.uid, extent.stride) == (uid, stride)
            taken = [index for index in wanted if index >= limit or extent.holding(index)]
            if not (is_same and extent.is_intact()) or taken:
                raise UnknownHandle(
                    f"extent {number} does not have the frames that are said to be in it", handle=number
                )
        if len(frames) != sum(map(len, indices.values())):
            raise UnknownHandle("a frame comes twice in a page table", handle=0)
        count = len(frames)
        self._ledger.transfer(self._unassigned, account, count * payload, count * stride, requested_before=0)
        for number, wanted in indices.items():
            extent = self._extents[number]
            if not extent.stride:
                extent.assign(uid, stride, limit)
            extent.claim(wanted, Holding(account, payload))
            self._file(extent)

    def free_frames(self, frames: Iterable[int]) -> None:
        """Give frames back. Raises `UnknownHandle`, and frees none, if one is not in use or is given twice."""
        by_extent = self._look_up(frames)
        for (extent, holding), indices in by_extent.items():
            count = len(indices)
            before = count * holding.payload
            self._ledger.transfer(holding.account, self._unassigned, 0, count * extent.stride, requested_before=before)
        for (extent, _), indices in by_extent.items():
            extent.give_back(indices)
            self._file(extent)

    def move_frames(self, frames: Iterable[int], account: Account) -> None:
        """Frames change hands, their bytes as they are. Raises `UnknownHandle`, and moves none, like `free_frames`."""
        for (extent, holding), indices in self._look_up(frames).items():
            count = len(indices)
            self._ledger.transfer(holding.account, account, count * holding.payload, count * extent.stride)
            extent.hold(indices, Holding(account, holding.payload))

    def is_in_use(self, frame: int) -> bool:
        """Whether somebody holds the frame."""
        return self._extent(frame_extent(frame)).holding(frame_index(frame)) is not None

    def offset(self, frame: int) -> int:
        """The frame's first byte in its extent. Raises `UnknownHandle` if it is not in use."""
        [(extent, _)] = self._look_up([frame])
        return frame_index(frame) * extent.stride

    def open_fd(self, extent: int, *, read_only: bool) -> int:
        """A close-on-exec descriptor of the extent's segment to pass on; the caller closes it."""
        segment = self._extent(extent).segment
        if segment is None:
            raise UnknownHandle(f"extent {extent} has no memory at present", handle=extent)
        return segment.open_fd(read_only=read_only)

    def fileno(self, extent: int) -> int:
        """The descriptor of the extent's segment, open while any frame of it is in use. Raises `UnknownHandle`."""
        segment = self._extent(extent).segment
        if segment is None:
            raise UnknownHandle(f"extent {extent} has no memory at present", handle=extent)
        return segment.fileno()

    def granted(self, extent: int, lease: int) -> None:
        """The lease's process may map the extent from now on. Raises `UnknownHandle` if no frame of it is in use."""
        known = self._extent(extent)
        if not known.stride:
            raise UnknownHandle(f"extent {extent} has no frame in use", handle=extent)
        require_size("lease", lease)
        known.grants.add(lease)
        known.was_granted = True
        self._granted[lease].add(known)

    def used_bytes(self, uid: int) -> int:
        """Bytes of the frames that are in use for ``uid``."""
        return sum(each.used_frames * each.stride for each in self._extents if each.stride and each.uid == uid)

    def lease_gone(self, lease: int) -> None:
        """The lease's process is known dead, and with it whatever it had mapped."""
        for extent in self._granted.pop(lease, set()):
            extent.grants.discard(lease)

    def damaged_extents(self) -> list[int]:
        """Extents that somebody they were granted to has cut, grown or punched. They are not used again as they are."""
        return [extent.number for extent in self._extents if extent.segment is not None and not extent.is_intact()]

    def accounts(self, extent: int) -> set[Account]:
        """Who holds frames of the extent."""
        return {holding.account for holding in self._extent(extent).holdings()}

    def has_mapped(self, lease: int) -> bool:
        """Whether the lease's process may have an extent mapped."""
        return bool(self._granted.get(lease))

    def pass_on(self, lease: int, successor: int) -> None:
        """What the lease's process may have mapped it has mapped for another lease of it from now on."""
        for extent in self._granted.pop(lease, set()):
            extent.grants = (extent.grants - {lease}) | {successor}
            self._granted[successor].add(extent)

    def could_have(self, extent: int, uid: int) -> bool:
        """Whether ``uid`` could have the extent if no frame of it were in use."""
        return not self._extent(extent).grants or self._extent(extent).is_usable(uid)

    def renew(self, most: int) -> int:
        """Make new segments for at most ``most`` unassigned extents with somebody's old bytes, or damage.

        To be called when there is time: an allocation that finds no clean extent does it itself. Returns how many.
        """
        old = [extent for extent in self._unassigned_extents() if not (extent.grants or extent.is_usable(None))]
        self._create(old[:most])
        return len(old[:most])

    # Growing and shrinking (`kvd.resizing`)

    def begin_growth(self, count: int) -> tuple[list[str], Reservation]:
        """Names for the segments of ``count`` extents more, and their bytes set aside. The ledger has the capacity."""
        numbers = self._free_numbers(count)
        names = [f"{self._prefix}-e{number}" for number in numbers]
        return names, self._ledger.reserve(self._unassigned, 0, count * self._extent_bytes)

    def end_growth(self, segments: Sequence[Segment], reservation: Reservation) -> None:
        """The segments are there: extents that can be used from now on."""
        numbers = self._free_numbers(len(segments))
        self._extents += [Extent(number) for number in range(len(self._extents), max(numbers) + 1)]
        reservation.commit(len(segments) * self._extent_bytes)
        for number, segment in zip(numbers, segments, strict=True):
            self._extents[number].replace(segment)
            self._extents[number].is_retired = False

    @property
    def vacant(self) -> list[Extent]:
        """The extents that `retire` could take now."""
        return [extent for extent in self._unassigned_extents() if not extent.grants]

    def retire(self, count: int) -> list[Extent]:
        """Give ``count`` extents no more to anybody, those of the highest numbers first; `forget` ends it.

        Raises `TierInUse` if fewer are in nobody's use and mapped by no living process; then nothing has changed.
        """
        free = self.vacant
        if len(free) < count:
            least = self.capacity_bytes - len(free) * self._extent_bytes
            holders = self._ledger.largest_holders(self._tier, beside=STATE_PURPOSES)
            holders += still_mapped(self._unassigned_extents())
            raise TierInUse(self._tier, self.capacity_bytes - count * self._extent_bytes, least, holders)
        leaving = free[len(free) - count :]
        for extent in leaving:
            extent.is_retired = True
            extent.was_granted = True  # on the books in full until `forget`, whatever is left of it
        return leaving

    def forget(self, extents: Iterable[Extent]) -> None:
        """The memory of retired extents has been given back."""
        for extent in extents:
            if extent.segment is not None:
                extent.segment.destroy()
                self._ledger.release(self._unassigned, 0, self._extent_bytes)
            extent.give_up_place()
            extent.replace(None)

    def _free_numbers(self, count: int) -> list[int]:
        """The lowest numbers that no extent has."""
        free = [extent.number for extent in self._extents if extent.is_retired and extent.segment is None]
        return [*free, *range(len(self._extents), len(self._extents) + count)][:count]

    def held_bytes(self) -> int:
        """What the operating system has allocated: the ledger's auditor."""
        return sum(extent.held_bytes() for extent in self._extents)

    def close(self) -> None:
        """Unlink everything and forget the tier, whoever holds frames. Processes that map extents keep the memory."""
        for extent in self._extents:
            frames = Counter(extent.holdings())
            for holding, count in frames.items():
                self._ledger.release(holding.account, count * holding.payload, count * extent.stride)
            if extent.segment is not None:
                self._ledger.release(self._unassigned, 0, self._extent_bytes - frames.total() * extent.stride)
                extent.segment.destroy()
            extent.give_up_place()
        self._extents = []
        self._ledger.remove_tier(self._tier)

    def _create(self, extents: list[Extent]) -> None:
        """New segments for unassigned extents. If that fails they have none, and their place is kept for a retry."""
        for extent in extents:
            if extent.segment is not None:
                extent.segment.destroy()
                extent.replace(None)
                self._ledger.release(self._unassigned, 0, self._extent_bytes)
            if extent.place is None:
                extent.place = self._ledger.reserve(self._unassigned, 0, self._extent_bytes)
        if not extents:
            return
        names = [f"{self._prefix}-e{extent.number}" for extent in extents]
        segments = create_segments(
            names, self._extent_bytes, threads=self._threads, numa_node=self._numa_node, progress=self._progress
        )
        for extent, segment in zip(extents, segments, strict=True):
            extent.take_place(segment)

    def _candidates(self, uid: int, stride: int) -> Iterator[Extent]:
        """Extents that can give frames, best first: the fullest in use, the uid's own, clean ones, those to renew."""
        partly_used = self._partly_used.get((uid, stride), set())
        for extent in sorted(partly_used, key=lambda extent: (extent.free_frames, extent.number)):
            if extent.is_intact():
                yield extent
        unassigned = self._unassigned_extents()
        usable = {extent for extent in unassigned if extent.is_usable(uid)}
        yield from sorted(usable, key=lambda extent: (extent.uid is None, extent.number))
        yield from (extent for extent in unassigned if extent not in usable and not extent.grants)

    def _unassigned_extents(self) -> list[Extent]:
        return [extent for extent in self._extents if not extent.stride and not extent.is_retired]

    def _file(self, extent: Extent) -> None:
        """Put the extent where its frames in use say that it belongs."""
        kind = (extent.uid, extent.stride)
        if extent.free_frames and not extent.is_unused:
            self._partly_used[kind].add(extent)
            return
        self._partly_used[kind].discard(extent)
        if not self._partly_used[kind]:
            del self._partly_used[kind]
        if extent.is_unused:
            extent.unassign()

    def _look_up(self, frames: Iterable[int]) -> dict[tuple[Extent, Holding], list[int]]:
        """Indices of frames in use, by extent and holder. Raises `UnknownHandle` for one not in use or given twice."""
        by_extent: defaultdict[int, list[int]] = defaultdict(list)
        for frame in frames:  # a session may have 16,384: what is done for each is as little as can be
            by_extent[frame >> 32].append(frame & 0xFFFFFFFF)
        found: dict[tuple[Extent, Holding], list[int]] = {}
        for number, indices in by_extent.items():
            if not 0 <= number < len(self._extents):
                frame = number << 32 | indices[0]
                raise UnknownHandle(f"frame {frame} (extent {number}) is not in use", handle=frame)
            extent = self._extents[number]
            for holding, chosen in extent.by_holding(indices):
                found.setdefault((extent, holding), []).extend(chosen)
        return found

    def _extent(self, number: int) -> Extent:
        if not 0 <= number < len(self._extents):
            raise UnknownHandle(f"extent {number} is not one of {len(self._extents)}", handle=number)
        return self._extents[number]

    def _out_of_capacity(self, uid: int, stride: int, count: int, found: int) -> OutOfCapacity:
        holders = self._ledger.largest_holders(self._tier)
        holders += still_mapped(extent for extent in self._unassigned_extents() if not extent.is_usable(uid))
        return OutOfCapacity(self._tier, count * stride, found * stride, self._ledger.capacity(self._tier), holders)
