"""The block store, as an engine's process uses it: blocks of its own under keys of its own, in the daemon's memory.

A block's bytes are copied once each way, by the engine, between its own memory and the frame that is mapped here. No
library of tensors is needed. What the store promises is in ``protocol/SPEC.md`` ("Blocks"); a chain of keys is made by
`protocol.block_keys`.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self, TypeVar

from compute.client import Client
from compute.mapping import map_segment
from compute.populate import populate
from protocol import messages
from protocol.block_messages import FRAME_BYTES, KEY_BYTES, MOST_KEYS, NO_FRAME, NO_LEASE
from protocol.errors import (
    DaemonUnavailable,
    InvalidValue,
    KvdError,
    OsFailure,
    StaleEpoch,
    UnknownBlocks,
    UnknownLease,
)
from protocol.handles import Extent, LeaseRef
from protocol.layout import PAGE_ALIGNMENT, round_up
from protocol.stats import BlockStats

SLOW_DISK = 64 << 20
"""Bytes/s of a disk that is waited for."""

READ_BACK = 256 << 20
"""Bytes of blocks that `BlockStore.pin` waits for from disk, unless it is told otherwise."""

_ReplyT = TypeVar("_ReplyT", bound=messages.Reply)


@dataclass(frozen=True)
class MappedExtent:
    """``nbytes`` of the daemon's memory at ``address`` of this process: what a CUDA client registers, whole.

    It stays mapped, and its address taken, for as long as anybody has this.
    """

    number: int
    address: int
    nbytes: int
    mapping: object = field(repr=False, compare=False)


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
        self._extents: dict[int, _Mapping] = {}
        self._stride = round_up(block_bytes, PAGE_ALIGNMENT)
        self._lost: DaemonUnavailable | None = None
        self._owed: list[LeaseRef] = []
        self._populating: list[threading.Thread] = []
        self._closing = threading.Event()
        self._timeout_s = timeout_s
        self._client = Client(run_dir, name=name, timeout_s=timeout_s)
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
        if not keys:
            return Pinned(self, 0, ())
        data = _few(keys)
        reply = self._ask(
            lambda seq: messages.PinBlocks(seq, self._client.lease, self._space, data, from_disk),
            messages.BlocksPinned,
            self._timeout_s + min(from_disk, len(keys) * self._stride) / SLOW_DISK,
        )
        self._adopt(reply.extents)
        return Pinned(self, reply.hold, _frames(reply.frames))

    def reserve(self, keys: Sequence[bytes]) -> Reservation:
        """Frames to write those of ``keys`` to that are neither stored nor being written by anybody.

        Best given whole chains: what is stored of one counts as used, and its beginning does not go before its end.
        Raises `OutOfCapacity` if not all of them can be had, even when all goes that is not in use.
        """
        if not keys:
            return Reservation(self, 0, [], ())
        data = _few(keys)
        reply = self._ask(
            lambda seq: messages.ReserveBlocks(seq, self._client.lease, self._space, data), messages.BlocksReserved
        )
        self._adopt(reply.extents)
        given = [(key, frame) for key, frame in zip(keys, _frames(reply.frames), strict=True) if frame != NO_FRAME]
        return Reservation(self, reply.hold, [key for key, _ in given], [frame for _, frame in given])

    def stats(self) -> BlockStats:
        """What the daemon counts of this space."""
        node = self._ask(messages.Stat, messages.Stats).stats
        return next(space for space in node.blocks if space.space == self._space)

    def extents(self) -> list[MappedExtent]:
        """What is mapped here of the daemon's memory. Grows; after `reconnect` an extent may be another one."""
        return [self._mapped(number) for number in self._extents]

    def wait_mapped(self) -> None:
        """Return when every page of what is mapped is in this process's page tables, which is done beside it."""
        for thread in self._populating:
            thread.join()
        self._populating.clear()

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
        self._closing.set()
        self._lost = DaemonUnavailable("the store is closed", socket=str(self._client.run_dir))
        self._client.close()
        self.wait_mapped()
        self._extents.clear()

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

    def _ask(
        self, build: Callable[[int], messages.Request], expected: type[_ReplyT], timeout_s: float | None = None
    ) -> _ReplyT:
        if self._lost is not None:
            raise self._lost
        try:
            return self._client.ask(build, expected, timeout_s)
        except (DaemonUnavailable, StaleEpoch, UnknownLease) as error:
            self._lose(error)

    def _lose(self, error: KvdError) -> NoReturn:
        self._lost = DaemonUnavailable(error.message, socket=str(self._client.run_dir))
        raise self._lost from error

    def _end(self, hold: int) -> None:
        """Without waiting for the answer: requests are served in order, and a daemon that is gone holds nothing."""
        if self._lost is not None:
            raise self._lost
        self._client.tell(lambda seq: messages.ReleaseBlocks(seq, self._client.lease, hold))

    def _publish(self, hold: int, keys: bytes) -> None:
        self._ask(lambda seq: messages.PublishBlocks(seq, self._client.lease, hold, keys), messages.Done)

    def _adopt(self, extents: Sequence[Extent]) -> None:
        """Map the extents that came with a hold. The daemon names each once: if one cannot be mapped, all is lost."""
        try:
            new = [mapping for mapping in map(self._map, extents) if mapping is not None]
        except KvdError as error:
            self._lose(error)
        except BaseException:
            reason = "the daemon's memory was not mapped"
            self._lost = DaemonUnavailable(reason, socket=str(self._client.run_dir))
            raise
        if new:
            # Beside the engine: faults one by one would halve the speed of the first copy to each page.
            thread = threading.Thread(target=_populate, args=(new, self._closing), name="populate", daemon=True)
            self._populating = [*filter(threading.Thread.is_alive, self._populating), thread]
            thread.start()

    def _map(self, extent: Extent) -> _Mapping | None:
        """The mapping of an extent that is not mapped yet."""
        fd = self._client.claim(extent.memory)
        status = os.fstat(fd)
        known = self._extents.get(extent.number)
        if known is not None and known.identity == (status.st_dev, status.st_ino):
            os.close(fd)  # after a reconnection: it is the same memory
            return None
        mapping = _Mapping(fd, extent.memory.nbytes, (status.st_dev, status.st_ino))
        self._extents[extent.number] = mapping
        return mapping

    def _mapped(self, number: int) -> MappedExtent:
        mapping = self._extents[number]
        return MappedExtent(number, mapping.address, mapping.nbytes, mapping)

    def _at(self, frame: int) -> tuple[_Mapping, int]:
        return self._extents[frame >> 32], (frame & 0xFFFFFFFF) * self._stride


class _Blocks:
    """Some blocks of ``store`` under one hold, by their frames."""

    def __init__(self, store: BlockStore, hold: int, frames: Sequence[int]) -> None:
        self._store = store
        self._hold = hold
        self._frames = frames
        self._lease = store._client.lease

    @property
    def addresses(self) -> list[int]:
        """Where each block begins in this process."""
        return [mapped.address + offset for mapped, offset in map(self._store._at, self._frames)]

    @property
    def extents(self) -> list[MappedExtent]:
        """Those that the blocks are in."""
        return [self._store._mapped(number) for number in {frame >> 32 for frame in self._frames}]

    def _views(self) -> list[memoryview]:
        nbytes = self._store.block_bytes
        return [mapped.view[offset : offset + nbytes] for mapped, offset in map(self._store._at, self._frames)]

    def _end(self) -> None:
        hold, self._hold = self._hold, 0
        if hold and self._is_held:  # otherwise it ended with its lease, and its number may be another hold's
            self._store._end(hold)

    @property
    def _is_held(self) -> bool:
        return self._lease == self._store._client.lease

    def __enter__(self) -> Self:
        return self


class Pinned(_Blocks):
    """The first ``count`` blocks of a chain, which stay as they are until `release`, or the end of the ``with`` block.

    They do so whatever becomes of the daemon, until the store is connected again.
    """

    @property
    def count(self) -> int:
        return len(self._frames)

    @property
    def views(self) -> list[memoryview]:
        """The bytes of each block, read-only."""
        return [view.toreadonly() for view in self._views()]

    def release(self) -> None:
        """They may go. No copy from them may be in flight. Raises `DaemonUnavailable` where the store is lost."""
        self._end()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


class Reservation(_Blocks):
    """Frames for ``keys``, in their order, to be written and then published; nobody finds them before.

    What is not published at the end of the ``with`` block is given up.
    """

    def __init__(self, store: BlockStore, hold: int, keys: list[bytes], frames: Sequence[int]) -> None:
        super().__init__(store, hold, frames)
        self.keys = keys
        self._left = len(keys)

    @property
    def views(self) -> list[memoryview]:
        """The bytes of each block, to be written; what is in them before is undefined."""
        return self._views()

    def publish(self, keys: Iterable[bytes] | None = None) -> None:
        """All bytes of these blocks are written, or of all that are left: they are stored. No copy is in flight.

        Raises `UnknownBlocks` for a key that was not reserved here or is published already, or if the store was
        connected again since; `DaemonUnavailable`.
        """
        if not self._is_held:
            raise UnknownBlocks("the reservation ended when the store was connected again", hold=self._hold)
        if keys is None:
            if self._left:
                self._store._publish(self._hold, b"")
            self._left = self._hold = 0
            return
        chosen = list(keys)
        if not chosen:
            return
        self._store._publish(self._hold, b"".join(chosen))
        self._left -= len(chosen)
        if not self._left:
            self._hold = 0

    def abandon(self) -> None:
        """Give up what is not published. No copy to it may be in flight. Raises as `Pinned.release` does."""
        self._left = 0
        self._end()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.abandon()


class _Mapping:
    """An extent in this process, for as long as anything refers to it. ``identity`` is the file's."""

    def __init__(self, fd: int, nbytes: int, identity: tuple[int, int]) -> None:
        self._memory = map_segment(fd, nbytes)
        self.identity = identity
        self.nbytes = nbytes
        self.view = memoryview(self._memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))


def _populate(mappings: Sequence[_Mapping], closing: threading.Event) -> None:
    """Put the pages of all of these into this process's page tables."""
    for mapping in mappings:
        if closing.is_set():
            return
        with suppress(OsFailure):  # then its pages are faulted in when they are touched
            populate(mapping.address, mapping.nbytes)


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
