"""Cold blocks on disk: written before room is needed, dropped from host RAM when it is, and read back for a pin.

Nothing waits for the disk but the pin that asks for what is there. A block that was not written in time, or for which
the disk has no room, is evicted like any other.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from typing import Any

from kvd.alloc.ledger import Ledger
from kvd.blocks.model import STORED, Kind, Space, blocks_of
from kvd.blocks.spaces import Spaces
from kvd.blocks.spill_file import Place, SpillFile
from kvd.logs import Log
from kvd.runs import Run, runs_of
from kvd.saved.jobs import Job, Jobs, Step
from kvd.sessions.session import HOST_TIER
from kvd.tiers.disk import StateDirectory
from kvd.tiers.extent import frame_extent
from kvd.tiers.host_ram import UNASSIGNED, HostRam
from protocol.block_keys import KEY_BYTES
from protocol.errors import KvdError, OutOfCapacity, SavedRefused
from protocol.messages import BlocksPinned, Done

BATCH_BYTES = 32 << 20
"""What is written at a time, unless a block is larger."""

BEGIN = 0.8
"""Spilling begins when so much of what blocks may have is in use."""

COLDEST = 4096
"""So many of the blocks of a kind, the coldest ones, or a quarter of them, are to be on disk then."""

LOOK_S = 0.1
"""Seconds between two looks for such blocks, at least."""

RETRY_S = 30.0
"""How long nothing is tried after the disk has refused."""

Steps = Generator[Step, Any, None]


class BlockSpilling:
    """Files of blocks in ``directory``, of at most `capacity` bytes; without a directory nothing is spilled."""

    def __init__(
        self,
        directory: StateDirectory | None,
        spaces: Spaces,
        ledger: Ledger,
        host: HostRam,
        jobs: Jobs,
        log: Log,
    ) -> None:
        self._directory = directory
        self._ledger = ledger
        self._spaces = spaces
        self._host = host
        self._jobs = jobs
        self._log = log
        self._files: dict[str, SpillFile] = {}
        self._reading: dict[tuple[int, bytes], Future[None]] = {}
        self._busy = False
        self._not_before = 0.0
        self.capacity = 0

    def open_files(self) -> None:
        """Have what an earlier run left, at the start; what does not hold is removed."""
        for name in self._directory.files_of_blocks() if self._directory else ():
            assert self._directory is not None
            fd = -1
            try:
                fd = self._directory.open_blocks(name)
                file = SpillFile.existing(fd)
                if name != _file_name(file.uid, file.block_bytes, file.fingerprint):
                    raise SavedRefused(name, "it has another space's name")
            except (KvdError, OSError) as error:
                if fd >= 0:
                    os.close(fd)
                self._log.warning("blocks on disk dropped", file=name, reason=str(error))
                self._directory.remove_blocks(name)
                continue
            self._files[name] = file
            self._log.info("blocks on disk taken up", file=name, blocks=len(file.where))

    def limit(self, capacity: int) -> None:
        """Most bytes of disk space from now on; files go, those that were written longest ago first, until it holds."""
        self.capacity = capacity
        for name in list(self._files):
            if self.nbytes <= capacity:
                return
            if not self._files[name].busy:
                self._drop(name)

    @property
    def nbytes(self) -> int:
        """Disk space of all files."""
        return sum(file.nbytes for file in self._files.values())

    def attach(self, space: Space) -> None:
        """Have the space find what is on disk of it."""
        file = self._files.get(_file_name(space.uid, space.block_bytes, space.fingerprint))
        if file is not None and space.file is None:
            space.file = file

    # Writing

    def look(self) -> None:
        """Begin to spill if it is time; for the loop, after blocks were published."""
        now = time.monotonic()
        if self._directory is None or self._busy or not self.capacity or now < self._not_before:
            return
        self._not_before = now + LOOK_S
        if any(self._is_due(space.kind) for space in self._spaces):
            self._busy = True
            self._jobs.start(self._spill_cold(), lambda _: None)

    def hibernate(self) -> Steps:
        """Have on disk as many blocks as it takes, of each space those that were used latest. Failures are logged."""
        if self._directory is None or not self.capacity:
            return
        while self._busy:
            yield partial(time.sleep, LOOK_S)
        self._busy = True
        try:
            for space in self._spaces:
                most = self.capacity // space.kind.stride
                slots = [
                    slot for slot in self._from_coldest(space.kind) if self._spaces.table.live[slot] == space.number
                ]
                yield from self._write_all(space, slots[max(0, len(slots) - most) :])
        except (OSError, KvdError) as error:
            self._log.warning("blocks not spilled", reason=str(error))
        finally:
            self._busy = False

    def _spill_cold(self) -> Job:
        try:
            for space in self._spaces:
                kind = space.kind
                if self._is_due(kind):
                    coldest = islice(self._from_coldest(kind), min(COLDEST, kind.stored // 4))
                    live = self._spaces.table.live
                    yield from self._write_all(space, [slot for slot in coldest if live[slot] == space.number])
        except (OSError, KvdError) as error:
            self._not_before = time.monotonic() + RETRY_S
            self._log.warning("blocks not spilled", reason=str(error))
        finally:
            self._busy = False
        return Done(0)

    def _is_due(self, kind: Kind) -> bool:
        """Whether blocks of the kind may soon have to go."""
        room, limits = self._spaces.room, self._spaces.room.limits
        free = self._ledger.purposes(HOST_TIER)[UNASSIGNED].committed
        return (
            free < (1 - BEGIN) * self._host.capacity_bytes
            or room.nbytes() > BEGIN * limits.total
            or room.nbytes(kind.uid) > BEGIN * limits.per_uid
        )

    def _from_coldest(self, kind: Kind) -> Iterator[int]:
        """Slots of the kind; those of a chain from its end."""
        for runs in kind.recency.from_coldest():
            for first, count in reversed(runs):
                yield from range(first + count - 1, first - 1, -1)

    def _write_all(self, space: Space, slots: Sequence[int]) -> Steps:
        """Have these blocks of the space on disk, a batch at a time, as far as there is room."""
        table = self._spaces.table
        keys = {table.key(slot): slot for slot in slots}
        most = max(1, BATCH_BYTES // space.kind.stride)
        left = list(keys)
        while left:
            batch, left = left[:most], left[most:]
            where = space.file.where if space.file else {}
            # What has gone meanwhile, or is there already, is not written.
            slots = [keys[key] for key in batch if space.stored.get(key) == keys[key] and key not in where]
            if slots and not (yield from self._write(space, slots, keys)):
                return

    def _write(self, space: Space, slots: list[int], keep: Collection[bytes]) -> Generator[Step, Any, bool]:
        """Write these blocks as far as there is room without those of ``keep``; False if there is none."""
        file, table, room = self._file(space), self._spaces.table, self._spaces.room
        targets = self._targets(file, len(slots), keep)
        if not targets:
            return False
        slots = slots[: len(targets)]
        keys = {slot: table.key(slot) for slot in slots}
        room.in_flight.update(slots)
        given_up = list(targets)
        try:
            with _descriptors(self._host, [table.frames[slot] for slot in slots]) as places:
                sums = yield partial(file.write_blocks, targets, places)
            # What was evicted meanwhile may have been another block when it was read.
            held = [
                (slot, target, checksum)
                for slot, target, checksum in zip(slots, targets, sums, strict=True)
                if slot in room.in_flight and checksum is not None
            ]
            entries = [(target, file.have(target, keys[slot], checksum)) for slot, target, checksum in held]
            given_up = [target for target in targets if target not in file.order]
            space.counts.spilled += len(held)
            yield partial(file.write_entries, entries)
            return True
        finally:
            room.in_flight.difference_update(slots)
            file.busy.difference_update(targets)
            file.give(given_up)
            self.limit(self.capacity)  # it may have been lowered meanwhile

    def _targets(self, file: SpillFile, count: int, keep: Collection[bytes]) -> list[int]:
        """Slots of the file to write to."""
        while file.free() < count:
            before, room = file.slots, (self.capacity - self.nbytes) // file.stride
            if room <= 0 and self._drop_unused(file):
                continue
            try:
                file.grow(room)
            except OSError as error:
                self._log.warning("blocks on disk get no more room", reason=str(error))
            if file.slots == before:
                break
        return file.take(count, keep)

    def _file(self, space: Space) -> SpillFile:
        if space.file is None:
            assert self._directory is not None
            name = _file_name(space.uid, space.block_bytes, space.fingerprint)
            fd = self._directory.open_blocks(name)
            try:
                self._files[name] = SpillFile(fd, space.uid, space.block_bytes, space.fingerprint)
            except BaseException:
                os.close(fd)
                self._directory.remove_blocks(name)
                raise
            self.attach(space)
            assert space.file is not None
        return space.file

    def _drop_unused(self, wanted: SpillFile) -> bool:
        """Drop a file of a space that nobody has open."""
        for name, file in self._files.items():
            users = [space for space in self._spaces if space.file is file and space.openers]
            if file is not wanted and not file.busy and not users:
                self._drop(name)
                return True
        return False

    def _drop(self, name: str) -> None:
        assert self._directory is not None
        file = self._files.pop(name)
        for space in self._spaces:
            if space.file is file:
                space.file = None
        self._directory.remove_blocks(name)
        file.close()

    # Reading

    def pinning(self, space: Space, keys: bytes, most: int, pin: Callable[[], BlocksPinned]) -> Job:
        """What ``pin`` returns when at most ``most`` bytes of the chain have been read back."""
        space.reading += 1
        try:
            yield from self._bring(space, keys, most)
        finally:
            space.reading -= 1
        return pin()

    def _bring(self, space: Space, keys: bytes, most: int) -> Steps:
        while True:
            runs = self._spaces.prefix_of(space, keys)
            missing = self.reach(space, keys, runs)[1][: max(0, most) // space.kind.stride]
            if not missing:
                return
            marks = ((space.number, key) for key in missing)
            under_way = next((self._reading[mark] for mark in marks if mark in self._reading), None)
            if under_way is not None:
                yield under_way  # another request reads them
                continue
            most -= len(missing) * space.kind.stride
            try:
                yield from self._read_back(space, runs, missing)
            except (OutOfCapacity, OSError) as error:
                self._log.info("blocks not read back", blocks=len(missing), reason=str(error))
                return

    def reach(self, space: Space, keys: bytes, runs: Sequence[Run]) -> tuple[int, list[bytes]]:
        """How many of the first keys are stored, those on disk included, and the keys of these.

        ``runs`` are the first ones that are in host RAM.
        """
        at, missing = KEY_BYTES * blocks_of(runs), list[bytes]()
        where = space.file.where if space.file else {}
        while where and at < len(keys):
            key = keys[at : at + KEY_BYTES]
            if key not in space.stored:
                if key not in where or key in space.writing:
                    break
                missing.append(key)
            at += KEY_BYTES
        return at // KEY_BYTES, missing

    def _read_back(self, space: Space, runs: Sequence[Run], missing: Sequence[bytes]) -> Steps:
        """Have blocks on disk in host RAM; those that do not hold are forgotten."""
        file, table = space.file, self._spaces.table
        assert file is not None
        missing = list(dict.fromkeys(missing))
        sources = [file.where[key] for key in missing]
        self._spaces.pin(space, runs, 1)  # the chain's beginning is not to go for its end
        marks, done = [(space.number, key) for key in missing], Future[None]()
        self._reading |= dict.fromkeys(marks, done)
        file.busy.update(sources)
        slots: list[int] = []
        frames: list[int] = []
        try:
            slots = self._spaces.room.slots(len(missing))
            frames = self._spaces.room.allocate(space.kind, STORED, len(missing), space.block_bytes)
            space.kind.reserved += len(frames)
            places = [(self._host.fileno(frame_extent(frame)), self._host.offset(frame)) for frame in frames]
            held = yield partial(file.read_blocks, sources, places)
            file.busy.difference_update(sources)
            self._come(space, missing, held, slots, frames)
            slots, frames = [], []
        finally:
            file.busy.difference_update(sources)
            for mark in marks:
                del self._reading[mark]
            done.set_result(None)
            space.kind.reserved -= len(frames)
            self._host.free_frames(frames)
            table.give(slots[::-1])
            self._spaces.pin(space, runs, -1)
            self._spaces.touch(space, runs)
            self.limit(self.capacity)

    def _come(
        self, space: Space, keys: Sequence[bytes], held: Sequence[bool], slots: Sequence[int], frames: Sequence[int]
    ) -> None:
        """What was read is stored, unless somebody has stored or begun to write it meanwhile."""
        file, table = space.file, self._spaces.table
        space.kind.reserved -= len(frames)
        good: list[int] = []
        for index, key in enumerate(keys):
            if held[index] and key not in space.stored and key not in space.writing:
                good.append(index)
            elif not held[index] and file is not None and key in file.where:
                self._log.warning("block on disk does not hold", space=space.number, key=key.hex())
                file.forget(key)
        bad = set(range(len(keys))).difference(good)
        self._host.free_frames([frames[index] for index in bad])
        table.give([slots[index] for index in sorted(bad, reverse=True)])
        chosen = [slots[index] for index in good]
        table.fill(chosen, [keys[index] for index in good], [frames[index] for index in good], space.number, 0)
        runs = runs_of(chosen)
        self._spaces.room.placed(runs)
        table.publish(runs, space.number, 0)
        space.stored.update((keys[index], slots[index]) for index in good)
        space.kind.stored += len(good)
        if file is not None:
            file.touch([keys[index] for index in good if keys[index] in file.where])
        space.counts.returned += len(good)
        self._spaces.touch(space, runs)

    def close(self) -> None:
        """Close the files; they stay."""
        for file in self._files.values():
            file.close()
        self._files.clear()


def _file_name(uid: int, block_bytes: int, fingerprint: bytes) -> str:
    space = hashlib.sha256(fingerprint + block_bytes.to_bytes(8, "little")).hexdigest()
    return f"{uid}-{space[:32]}.blocks"


@contextmanager
def _descriptors(host: HostRam, frames: Sequence[int]) -> Iterator[list[Place]]:
    """Where frames are, by descriptors that stay good when the frames are given up."""
    with ExitStack() as stack:
        own: dict[int, int] = {}
        for extent in {frame_extent(frame) for frame in frames}:
            own[extent] = os.dup(host.fileno(extent))
            stack.callback(os.close, own[extent])
        yield [(own[frame_extent(frame)], host.offset(frame)) for frame in frames]
