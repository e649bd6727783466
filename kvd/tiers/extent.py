"""One extent of host RAM: a segment cut into frames of one size, which belong to one uid while any is in use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvd.alloc.ledger import Account, Reservation
from kvd.tiers.segment import Segment
from protocol.errors import UnknownHandle

UNKNOWN_UID = -1
"""Whose bytes a segment has that an earlier run left: nobody's who asks, so it is made anew before it is used."""


def frame_extent(frame: int) -> int:
    """The number of the extent that the frame is in."""
    return frame >> 32


def frame_index(frame: int) -> int:
    """The frame's index in its extent."""
    return frame & 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Holding:
    """Who holds a frame, and how many of its bytes they asked for."""

    account: Account
    payload: int


class Extent:
    """The state of one extent. `kvd.tiers.host_ram.HostRam` decides what is done with it.

    ``uid`` is whose bytes may be in the segment, None if it is as the kernel made it, `UNKNOWN_UID` if nobody knows.
    ``stride`` is the size of its frames, 0 while the extent is unassigned. ``grants`` are the leases whose processes
    may have the segment mapped. A retired one is no part of the tier: its number is free for a later one. ``place`` is
    what the ledger keeps for a segment that is still to be made.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.stride = 0
        self.grants: set[int] = set()
        self.is_retired = False
        self.place: Reservation | None = None
        self._holdings: list[Holding | None] = []
        self._free: list[int] = []
        self.replace(None)

    def replace(self, segment: Segment | None) -> None:
        """Stand on a new segment, or on none because it could not be made."""
        self.segment = segment
        self.uid: int | None = None
        self.was_granted = False
        self.is_damaged = False

    def give_up_place(self) -> None:
        """No segment is made for it."""
        if self.place is not None:
            self.place.roll_back()
            self.place = None

    def take_place(self, segment: Segment) -> None:
        """Stand on the segment that a place was kept for."""
        assert self.place is not None
        self.place.commit(segment.nbytes)
        self.place = None
        self.replace(segment)

    def adopt(self, segment: Segment) -> None:
        """Stand on a segment that an earlier run left: it may have anybody's bytes, and anybody may have it mapped."""
        self.replace(segment)
        self.uid = UNKNOWN_UID
        self.was_granted = True

    def is_intact(self) -> bool:
        """Whether all of the segment is there. Once it was not, it never is again: bytes are lost."""
        self.is_damaged = self.is_damaged or self.segment is None or not self.segment.is_intact()
        return not self.is_damaged

    def is_usable(self, uid: int | None) -> bool:
        """Whether ``uid`` may have the segment as it is: it is clean, or has old bytes of the same uid only."""
        return self.uid in (None, uid) and self.is_intact()

    def held_bytes(self) -> int:
        """What the operating system has allocated for it.

        As it was made, once it was granted: from then on a worker can change what is allocated, and `is_intact` tells.
        """
        if self.segment is None:
            return 0
        return self.segment.nbytes if self.was_granted else self.segment.committed

    @property
    def free_frames(self) -> int:
        return len(self._free)

    @property
    def used_frames(self) -> int:
        return len(self._holdings) - len(self._free)

    @property
    def is_unused(self) -> bool:
        return len(self._free) == len(self._holdings)

    def assign(self, uid: int, stride: int, frames: int) -> None:
        """Cut into ``frames`` frames for ``uid``."""
        self.uid = uid
        self.stride = stride
        self._holdings = [None] * frames
        self._free = list(range(frames - 1, -1, -1))

    def unassign(self) -> None:
        """No frame is in use any more."""
        self.stride = 0
        self._holdings = []
        self._free = []

    def take(self, count: int, holding: Holding) -> list[int]:
        """Give ``count`` free frames, at most `free_frames`, to a holder; returns their indices."""
        keep = len(self._free) - count
        taken = self._free[keep:][::-1]
        del self._free[keep:]
        self.hold(taken, holding)
        return taken

    def claim(self, indices: Iterable[int], holding: Holding) -> None:
        """Give these very frames, all free, to a holder."""
        taken = set(indices)
        self._free = [index for index in self._free if index not in taken]
        self.hold(taken, holding)

    def hold(self, indices: Iterable[int], holding: Holding) -> None:
        """Frames in use change hands."""
        holdings = self._holdings
        for index in indices:
            holdings[index] = holding

    def give_back(self, indices: Iterable[int]) -> None:
        """Frames in use are free again; the last of them is taken first."""
        holdings = self._holdings
        for index in indices:
            holdings[index] = None
        self._free += indices

    def holding(self, index: int) -> Holding | None:
        """Who holds the frame: None for one that is free or not there."""
        return self._holdings[index] if 0 <= index < len(self._holdings) else None

    def by_holding(self, indices: list[int]) -> list[tuple[Holding, list[int]]]:
        """``indices`` in runs of one holder. Raises `UnknownHandle` for one that is not in use or given twice."""
        count = len(self._holdings)
        if max(indices) < count and len(set(indices)) == len(indices):  # one holder of all: the common case
            holdings = [self._holdings[index] for index in indices]
            first = holdings[0]
            if first is not None and holdings.count(first) == len(indices):
                return [(first, indices)]
        groups: list[tuple[Holding, list[int]]] = []
        seen = set[int]()
        last: Holding | None = None
        for index in indices:
            holding = self._holdings[index] if index < count else None
            if holding is None or index in seen:
                frame = self.number << 32 | index
                raise UnknownHandle(f"frame {frame} (extent {self.number}, index {index}) is not in use", handle=frame)
            seen.add(index)
            if holding is not last:
                last = holding
                groups.append((holding, []))
                append = groups[-1][1].append
            append(index)
        return groups

    def holdings(self) -> Iterator[Holding]:
        """Of each frame in use."""
        return (holding for holding in self._holdings if holding is not None)


def still_mapped(extents: Iterable[Extent]) -> list[str]:
    """Who keeps unassigned extents from being used, in words: nothing if nobody does."""
    waiting = [extent for extent in extents if extent.grants]
    leases = sorted(set().union(*(extent.grants for extent in waiting)))
    return [f"{len(waiting)} unassigned extents that leases {leases} may still map"] if waiting else []
