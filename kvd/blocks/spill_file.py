"""Blocks of one space on disk: a file of slots of one size, with an index that says which key is in which.

    header      4,096 bytes: magic, version, uid, bytes of a block, fingerprint, XXH3-64 of that
    index       64 bytes for each of 2^20 slots: key, number of use (u64), XXH3-64 of the block's bytes and of the
                entry, both with the slot as seed
    blocks      a stride each

Index and blocks have disk space as far as slots are in use. An entry is written when its block is, and after it was
made sure that the block was there all the time; what is in the slot is believed when it matches its entry. So neither a
kill nor a loss of power, whatever the disk had written, makes anybody read other bytes than were stored under a key.
Methods that read and write blocks are for threads; all others are for the loop's.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence
from itertools import islice

import xxhash

from protocol.errors import SavedRefused
from protocol.layout import PAGE_ALIGNMENT, round_up

MOST_SLOTS = 1 << 20
STEP_BYTES = 16 << 20
"""Disk space that is taken at a time, unless a block is larger."""

_MAGIC, _VERSION = b"KVDSPILL", 1
_HEADER = struct.Struct("<8sI4xQQ32s")
_ENTRY = struct.Struct("<32sQQQ8x")
_INDEX = 4096
_BLOCKS = _INDEX + _ENTRY.size * MOST_SLOTS

Place = tuple[int, int]
"""A frame: a descriptor, and the offset behind it."""


class SpillFile:
    """The file behind ``fd``, which it owns. A new one is empty; of another what holds is taken.

    ``where`` has the slot of each key, ``order`` the keys by slot, the one that was used longest ago first, and
    ``slots`` is how many have disk space. Slots in ``busy`` are being read or written. Raises `SavedRefused` for what
    is no such file of these values, `OSError`.
    """

    def __init__(self, fd: int, uid: int, block_bytes: int, fingerprint: bytes) -> None:
        self.fd = fd
        self.uid, self.block_bytes, self.fingerprint = uid, block_bytes, fingerprint
        self.stride = round_up(block_bytes, PAGE_ALIGNMENT)
        self.where: dict[bytes, int] = {}
        self.order: OrderedDict[int, bytes] = OrderedDict()
        self.busy: set[int] = set()
        self.slots = 0
        self._sums = array("Q")
        self._free: list[int] = []
        self._uses = 0
        header = _pack_header(uid, block_bytes, fingerprint)
        if os.fstat(fd).st_size == 0:
            os.pwrite(fd, header, 0)
            os.ftruncate(fd, _BLOCKS)
        elif os.pread(fd, len(header), 0) != header:
            raise SavedRefused("blocks", "its header is not that of the space that it is of")
        else:
            self._load()

    @classmethod
    def existing(cls, fd: int) -> SpillFile:
        """The file by its own header. Raises `SavedRefused`, `OSError`."""
        data = os.pread(fd, _HEADER.size, 0)
        if len(data) < _HEADER.size or data[:8] != _MAGIC:
            raise SavedRefused("blocks", "it is not a file of blocks")
        _, _, uid, block_bytes, fingerprint = _HEADER.unpack(data)
        if not PAGE_ALIGNMENT <= block_bytes <= 1 << 40 or uid >= 1 << 32:
            raise SavedRefused("blocks", "its header has values outside their limits")
        return cls(fd, uid, block_bytes, fingerprint)

    @property
    def nbytes(self) -> int:
        """Disk space for blocks."""
        return self.stride * self.slots

    @property
    def step(self) -> int:
        """Slots that get disk space at a time."""
        return max(1, STEP_BYTES // self.stride)

    def free(self) -> int:
        """Slots with disk space that have no block."""
        return len(self._free)

    def grow(self, most: int) -> None:
        """Have disk space for a step more, or ``most`` slots if that is less. Raises `OSError`."""
        count = min(self.step, most, MOST_SLOTS - self.slots)
        if count <= 0:
            return
        os.posix_fallocate(self.fd, _BLOCKS + self.nbytes, count * self.stride)
        self._free[:0] = range(self.slots + count - 1, self.slots - 1, -1)
        self._sums.extend([0] * count)
        self.slots += count

    def take(self, count: int, keep: Collection[bytes]) -> list[int]:
        """Busy slots, at most ``count``: free ones, then those whose blocks were used longest ago and are none of
        ``keep``, which are forgotten."""
        taken = [self._free.pop() for _ in range(min(count, len(self._free)))]
        others = (slot for slot, key in self.order.items() if slot not in self.busy and key not in keep)
        for slot in list(islice(others, count - len(taken))):
            del self.where[self.order.pop(slot)]
            taken.append(slot)
        self.busy.update(taken)
        return taken

    def give(self, slots: Sequence[int]) -> None:
        """Busy slots have no block."""
        self.busy.difference_update(slots)
        self._free += slots

    def have(self, slot: int, key: bytes, checksum: int) -> bytes:
        """A busy slot has the block of ``key``; returns its entry, which is still to be written."""
        self._uses += 1
        self._sums[slot] = checksum
        self.where[key] = slot
        self.order[slot] = key
        return _pack_entry(slot, key, self._uses, checksum)

    def forget(self, key: bytes) -> None:
        """The block cannot be had: its slot is free. It is not busy."""
        slot = self.where.pop(key)
        del self.order[slot]
        self._free.append(slot)

    def touch(self, keys: Sequence[bytes]) -> None:
        """The blocks are used. What is on disk of that order is when they were written."""
        for key in reversed(keys):
            self.order.move_to_end(self.where[key])

    # In threads

    def write_blocks(self, slots: Sequence[int], frames: Sequence[Place]) -> list[int | None]:
        """Copy frames to slots; returns the checksums of what was copied, None for a frame that was cut. Raises
        `OSError`."""
        buffer = memoryview(bytearray(self.stride))
        sums: list[int | None] = []
        for slot, (fd, offset) in zip(slots, frames, strict=True):
            is_whole = _read(fd, buffer, offset)
            sums.append(xxhash.xxh3_64_intdigest(buffer, seed=slot) if is_whole else None)
            if is_whole:
                _write(self.fd, buffer, _BLOCKS + slot * self.stride)
        return sums

    def write_entries(self, entries: Sequence[tuple[int, bytes]]) -> None:
        """Write the entries of slots. Raises `OSError`."""
        for slot, entry in entries:
            _write(self.fd, memoryview(entry), _INDEX + _ENTRY.size * slot)

    def read_blocks(self, slots: Sequence[int], frames: Sequence[Place]) -> list[bool]:
        """Copy slots to frames; returns which held. Raises `OSError`."""
        buffer = memoryview(bytearray(self.stride))
        held = []
        for slot, (fd, offset) in zip(slots, frames, strict=True):
            is_whole = _read(self.fd, buffer, _BLOCKS + slot * self.stride)
            held.append(is_whole and xxhash.xxh3_64_intdigest(buffer, seed=slot) == self._sums[slot])
            if held[-1]:
                _write(fd, buffer, offset)
        return held

    def close(self) -> None:
        os.close(self.fd)

    def _load(self) -> None:
        """Take what the index says, in its order of use; of a key that comes twice, the later."""
        self.slots = min(MOST_SLOTS, max(0, os.fstat(self.fd).st_size - _BLOCKS) // self.stride)
        data = os.pread(self.fd, _ENTRY.size * self.slots, _INDEX).ljust(_ENTRY.size * self.slots, b"\0")
        found = []
        self._sums = array("Q", [0] * self.slots)
        for slot in range(self.slots):
            entry = data[_ENTRY.size * slot : _ENTRY.size * (slot + 1)]
            key, use, checksum, _ = _ENTRY.unpack(entry)
            if use and entry == _pack_entry(slot, key, use, checksum):
                found.append((use, slot, key))
                self._sums[slot] = checksum
        for use, slot, key in sorted(found):
            if key in self.where:
                del self.order[self.where[key]]
            self.where[key] = slot
            self.order[slot] = key
            self._uses = use
        self._free = [slot for slot in range(self.slots - 1, -1, -1) if slot not in self.order]


def _pack_header(uid: int, block_bytes: int, fingerprint: bytes) -> bytes:
    fields = _HEADER.pack(_MAGIC, _VERSION, uid, block_bytes, fingerprint)
    return fields + xxhash.xxh3_64_digest(fields)


def _pack_entry(slot: int, key: bytes, use: int, checksum: int) -> bytes:
    body = struct.pack("<32sQQ", key, use, checksum)
    return _ENTRY.pack(key, use, checksum, xxhash.xxh3_64_intdigest(body, seed=slot))


def _read(fd: int, buffer: memoryview, offset: int) -> bool:
    """Fill the buffer; False if there is not so much."""
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if not count:
            return False
        done += count
    return True


def _write(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
