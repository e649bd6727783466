"""The block store, as an engine's process uses it: blocks of its own under keys of its own, in the daemon's memory.

A block's bytes are copied once each way, by the engine, between its own memory and the frame that is mapped here. No
library of tensors is needed. What the store promises is in ``protocol/SPEC.md`` ("Blocks"); a chain of keys is made by
`protocol.block_keys`.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self, TypeVar

from compute.block_holds import Blocks
from compute.block_holds import Pinned as Pinned
from compute.block_holds import Reservation as Reservation
from compute.block_memory import BlockMemory
from compute.block_memory import MappedExtent as MappedExtent
from compute.client import Client
from protocol import messages
from protocol.block_messages import FRAME_BYTES, KEY_BYTES, MOST_KEYS, NO_FRAME, NO_LEASE
from protocol.errors import (
    DaemonUnavailable,
    InvalidValue,
    KvdError,
    OutOfCapacity,
    StaleEpoch,
    UnknownBlocks,
    UnknownLease,
)
from protocol.handles import Extent, LeaseRef
from protocol.stats import BlockStats

SLOW_DISK = 64 << 20
"""Bytes/s of a disk that is waited for."""

READ_BACK = 256 << 20
"""Bytes of blocks that `BlockStore.pin` waits for from disk, unless it is told otherwise."""

_ReplyT = TypeVar("_ReplyT", bound=messages.Reply)
_BlocksT = TypeVar("_BlocksT", bound=Blocks)


class BlockStore:
    """A space of a node's block store: this uid's blocks of ``block_bytes`` bytes under one ``fingerprint``.

    Not for use from several threads at once: each has one of its own. A pin may wait longer, for as long as a disk of
    64 MiB/s takes. Raises `DaemonUnavailable` where nothing answers
    at ``run_dir``. Every call waits at most ``timeout_s`` for the daemon, and then raises `DaemonUnavailable`, as does
    every later one at once, until `reconnect`: what was pinned is pinned no more then, and what was reserved is lost.
    """

    def __init__(
        self, run_dir: Path | str, *, fingerprint: bytes, block_bytes: int, name: str = "engine", timeout_s: float = 1.0
    ) -> None:
        self.fingerprint = fingerprint
        self.block_bytes = block_bytes
        self._lost: DaemonUnavailable | None = None
        self._owed: list[LeaseRef] = []
        self._timeout_s = timeout_s
        self._client = Client(run_dir, name=name, timeout_s=timeout_s)
        self._memory = BlockMemory(block_bytes, self._client.claim)
        try:
            self._open(NO_LEASE)
        except BaseException:
            self._client.close()
            raise

    def map_all(self) -> None:
        """Map the memory of all blocks that there are, so that the first copies of them need not wait for that."""
        while extents := self._ask(
            lambda seq: messages.MapBlocks(seq, self._client.lease, self._space), messages.BlocksMapped
        ).extents:
            self._adopt(extents)

    def find(self, keys: Sequence[bytes]) -> int:
        """How many of the first ``keys`` are stored. They count as used, but nothing keeps them."""
        found = 0
        for first in range(0, len(keys), MOST_KEYS):
            part = _few(keys[first : first + MOST_KEYS])
            reply = self._ask(partial(self._find, part), messages.BlocksFound)
            found += reply.count
            if reply.count < len(part) // KEY_BYTES:
                break
        return found

    def pin(self, keys: Sequence[bytes], *, from_disk: int = READ_BACK) -> Pinned:
        """The first ``keys`` that are stored, kept where they are until they are released.

        Of those that are on disk only, at most ``from_disk`` bytes are read back, and waited for; the rest of the chain
        counts as not stored.
        """
        return self._begin_pin(from_disk, keys)()

    def pin_each(self, parts: Iterable[Sequence[bytes]], *, from_disk: int = READ_BACK) -> Iterator[Pinned]:
        """`pin` for the parts of a chain in turn, each released before the next; for a ``for`` loop.

        The daemon is at a part while the one before is copied. What follows a part that is not whole is left out.
        """
        return self._in_turn(parts, partial(self._begin_pin, from_disk))

    def reserve(self, keys: Sequence[bytes]) -> Reservation:
        """Frames to write those of ``keys`` to that are neither stored nor being written by anybody.

        Best given whole chains: what is stored of one counts as used, and its beginning does not go before its end.
        Raises `OutOfCapacity` if not all of them can be had, even when all goes that is not in use.
        """
        return self._begin_reserve(keys)()

    def reserve_each(self, parts: Iterable[Sequence[bytes]]) -> Iterator[Reservation]:
        """`reserve` for the parts of a chain in turn, each ended before the next; for a ``for`` loop.

        The daemon is at a part while the one before is written. `Reservation.publish` without keys does not wait: a
        later turn of the loop, or its end, raises what it would have raised.
        """
        unsettled: deque[Reservation] = deque()

        def settle(but: int) -> None:
            while len(unsettled) > but:
                unsettled.popleft()._settle()

        try:
            for reservation in self._in_turn(parts, self._begin_reserve):
                reservation._waits = False
                yield reservation
                unsettled.append(reservation)
                settle(but=1)
            settle(but=0)
        except KvdError:
            with suppress(KvdError):  # what was published before is stored all the same
                settle(but=0)
            raise

    def stats(self) -> BlockStats:
        """What the daemon counts of this space."""
        node = self._ask(messages.Stat, messages.Stats).stats
        return next(space for space in node.blocks if space.space == self._space)

    def extents(self) -> list[MappedExtent]:
        """What is mapped here of the daemon's memory. Grows; after `reconnect` an extent may be another one."""
        return self._memory.extents()

    def wait_mapped(self) -> None:
        """Return when every page of what is mapped is in this process's page tables, which is done beside it."""
        self._memory.wait_mapped()

    @property
    def is_lost(self) -> bool:
        """Whether the daemon went away or did not answer in time: only `reconnect` is of use."""
        return self._lost is not None

    def reconnect(self) -> None:
        """Have another lease, on the daemon that answers now. Raises `DaemonUnavailable`; it can be tried again.

        No copy to or from what was pinned or reserved may be in flight any more. Views of it may not be used.
        """
        if self._client.lease not in self._owed:
            self._owed.append(self._client.lease)
        self._lost = DaemonUnavailable("the store has to be connected again", socket=str(self._client.run_dir))
        self._client.reconnect()
        while self._owed:  # each is given up by name: the daemon frees nothing of a living process otherwise
            self._open(self._owed[-1])
            self._owed.pop()
        self._lost = None

    def close(self) -> None:
        """End the lease: reservations are given up. No copy may be in flight."""
        self._lost = DaemonUnavailable("the store is closed", socket=str(self._client.run_dir))
        self._client.close()
        self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # Steps

    def _find(self, keys: bytes, seq: int) -> messages.FindBlocks:
        return messages.FindBlocks(seq, self._client.lease, self._space, keys)

    def _open(self, previous: LeaseRef) -> None:
        self._space = self._client.ask(
            lambda seq: messages.OpenBlocks(seq, self._client.lease, self.fingerprint, self.block_bytes, previous),
            messages.BlocksOpened,
        ).space

    def _in_turn(
        self, parts: Iterable[Sequence[bytes]], begin: Callable[[Sequence[bytes]], Callable[[], _BlocksT]]
    ) -> Iterator[_BlocksT]:
        """What ``begin`` has asked for, part by part. The next part is asked for before one is the caller's."""

        def have(keys: Sequence[bytes], answer: Callable[[], _BlocksT], is_first: bool) -> _BlocksT:
            """Asked for again when the part before has ended: that may have been in the way, or lost with a lease."""
            try:
                found = answer()
                if is_first or found.is_whole:
                    return found
                found._end()
            except (OutOfCapacity, UnknownBlocks):
                if is_first:
                    raise
            return begin(keys)()

        left = iter(parts)
        answers = [(keys, begin(keys)) for keys in islice(left, 1)]
        is_first = True
        try:
            while answers:
                found = have(*answers.pop(), is_first)
                is_first = False
                try:
                    answers += [(keys, begin(keys)) for keys in islice(left, 1 if found.is_whole else 0)]
                    yield found
                finally:
                    with suppress(DaemonUnavailable):  # whoever has to know of it is told by what comes next
                        found._end()
        finally:
            for _, answer in answers:
                with suppress(KvdError):  # nobody wants it any more
                    answer()._end()

    def _begin_pin(self, from_disk: int, keys: Sequence[bytes]) -> Callable[[], Pinned]:
        if not keys:
            return lambda: Pinned(self, 0, ())
        data = _few(keys)
        answer = self._begin(
            lambda seq: messages.PinBlocks(seq, self._client.lease, self._space, data, from_disk),
            messages.BlocksPinned,
            self._timeout_s + min(from_disk, len(keys) * self._memory.stride) / SLOW_DISK,
        )

        def pinned() -> Pinned:
            reply = answer()
            self._adopt(reply.extents)
            return Pinned(self, reply.hold, _frames(reply.frames), len(keys))

        return pinned

    def _begin_reserve(self, keys: Sequence[bytes]) -> Callable[[], Reservation]:
        if not keys:
            return lambda: Reservation(self, 0, [], ())
        data = _few(keys)
        answer = self._begin(
            lambda seq: messages.ReserveBlocks(seq, self._client.lease, self._space, data), messages.BlocksReserved
        )

        def reserved() -> Reservation:
            reply = answer()
            self._adopt(reply.extents)
            given, frames = list(keys), _frames(reply.frames)
            if NO_FRAME in frames:
                given = [key for key, frame in zip(keys, frames, strict=True) if frame != NO_FRAME]
                frames = tuple(frame for frame in frames if frame != NO_FRAME)
            return Reservation(self, reply.hold, given, frames)

        return reserved

    def _ask(self, build: Callable[[int], messages.Request], expected: type[_ReplyT]) -> _ReplyT:
        return self._begin(build, expected)()

    def _begin(
        self, build: Callable[[int], messages.Request], expected: type[_ReplyT], timeout_s: float | None = None
    ) -> Callable[[], _ReplyT]:
        """Ask, and return what waits for the reply."""
        if self._lost is not None:
            raise self._lost
        lease, asked = self._client.lease, self._client.begin(build)

        def answer() -> _ReplyT:
            if self._lost is not None:
                raise self._lost
            if lease != self._client.lease:
                raise UnknownBlocks("what was asked for ended when the store was connected again", hold=0)
            try:
                return self._client.wait(asked, expected, timeout_s)
            except (DaemonUnavailable, StaleEpoch, UnknownLease) as error:
                self._lose(error)

        return answer

    def _lose(self, error: KvdError) -> NoReturn:
        self._lost = DaemonUnavailable(error.message, socket=str(self._client.run_dir))
        raise self._lost from error

    def _end(self, hold: int) -> None:
        """Without waiting for the answer: requests are served in order, and a daemon that is gone holds nothing."""
        if self._lost is not None:
            raise self._lost
        self._client.tell(lambda seq: messages.ReleaseBlocks(seq, self._client.lease, hold))

    def _adopt(self, extents: Sequence[Extent]) -> None:
        """Map the extents that came with a hold. The daemon names each once: if one cannot be mapped, all is lost."""
        try:
            self._memory.adopt(extents)
        except KvdError as error:
            self._lose(error)
        except BaseException:
            reason = "the daemon's memory was not mapped"
            self._lost = DaemonUnavailable(reason, socket=str(self._client.run_dir))
            raise


def _frames(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // FRAME_BYTES}Q", data)


def _few(keys: Sequence[bytes]) -> bytes:
    """The keys as a message has them; raises `InvalidValue` for too many or one that is none."""
    if len(keys) > MOST_KEYS:
        raise InvalidValue("number of keys", len(keys), f"at most {MOST_KEYS}")
    data = b"".join(keys)
    if not set(map(len, keys)) <= {KEY_BYTES}:
        raise InvalidValue("bytes of all keys", len(data), f"{KEY_BYTES} for each of {len(keys)}")
    return data
