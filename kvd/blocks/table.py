"""The table of all blocks: which key lies in which frame, reserved or published, in shared memory.

Only the daemon maps it. A daemon that is killed leaves it, and the next one believes of it what holds (`verified`):

    header      4,096 bytes: magic, version, number of slots and its complement
    spaces      256 × 64 bytes: checksum, uid, bytes of a block, fingerprint
    holders     2,048 × 64 bytes: checksum, epoch and number of a lease, its uid, pid and start
    arrays      one after the other, an element for each slot: keys (32 bytes), frames (u64), words (u64), used (u64),
                pins (u32), spaces (u16), live (u16)

A slot's **word** is what makes it count: 0 for none, otherwise a hash of its key, seeded with frame and space, combined
with a constant that says whether the block is published, or reserved and by which holder. It is the last that is stored
when a slot is filled and the first when it is cleared, so a slot is as before or as after whenever the daemon is
killed; a word that was half written then says nothing, and its slot is dropped.

The arrays are the store's own memory too. Chains of keys mostly lie in few runs, and what is done for a run is one
comparison or one copy. The arrays are as large as the most blocks there may be, but only the parts that are in use have
memory.
"""

from __future__ import annotations

import mmap
import os
import struct
from array import array
from collections.abc import Sequence
from typing import Any, Literal

import xxhash

from kvd.alloc.ledger import Account, Ledger
from kvd.hostcheck import SmallSizes
from kvd.runs import Run, runs_of
from kvd.sessions.session import HOST_TIER
from kvd.tiers.mapping import allocation_failure
from kvd.tiers.segment import Segment
from protocol.block_keys import KEY_BYTES
from protocol.errors import OutOfCapacity, SessionDamaged

MOST_BLOCKS = 1 << 24
MOST_SPACES = 256
MOST_HOLDERS = 2048
STEP = 4096
"""Slots that get memory at a time: the arrays grow by whole pages."""

ACCOUNT = Account(HOST_TIER, 0, 0, "block_table")

PUBLISHED = 0x9D2C5680A7F1E34B
RESERVED = 0x5BF03635C4E1D287
"""What the hash of a slot is combined with: far apart, so that no few damaged bits make one of the other."""

_MAGIC = b"KVDBLOCK"
_VERSION = 2
_START = struct.Struct("<8sI4xQQ")
_SPACE = struct.Struct("<QQQ32s8x")
_HOLDER = struct.Struct("<QQQQQQ16x")
_ALL = (1 << 64) - 1
_SPACES, _HOLDERS = 4096, 4096 + 64 * MOST_SPACES
_ARRAYS = _HOLDERS + 64 * MOST_HOLDERS
_WIDTHS = {"keys": KEY_BYTES, "frames": 8, "words": 8, "used": 8, "pins": 4, "spaces": 2, "live": 2}
SLOT_BYTES = sum(_WIDTHS.values())

_SIZES = SmallSizes()


def _offsets() -> dict[str, int]:
    found, at = {}, _ARRAYS
    for name, width in _WIDTHS.items():
        found[name] = at
        at += width * MOST_BLOCKS
    return found


_AT = _offsets()
TABLE_BYTES = _ARRAYS + SLOT_BYTES * MOST_BLOCKS


def table_name(prefix: str) -> str:
    """The name of the table's segment."""
    return f"{prefix}-blocks"


class BlockTable:
    """The table in ``segment``, which has ``slots`` slots; `create` makes a new one.

    ``frames``, ``words``, ``used`` and ``pins`` are its arrays. Of a reserved slot ``pins`` has the holder's index. Of
    a published one ``live`` has the space, of all others 0.
    """

    def __init__(self, segment: Segment, ledger: Ledger, slots: int) -> None:
        self.segment = segment
        self._ledger = ledger
        self._held = 0
        self._account()
        self._memory = mmap.mmap(segment.fileno(), TABLE_BYTES)
        self._memory.madvise(mmap.MADV_DONTDUMP)
        self._whole = memoryview(self._memory)
        self.frames, self.words, self.used = (self._array(name, "Q") for name in ("frames", "words", "used"))
        self.pins = self._array("pins", "I")
        self.spaces, self.live = (self._array(name, "H") for name in ("spaces", "live"))
        self.slots = slots
        self.most_bytes = TABLE_BYTES
        self._free: list[int] = []

    @classmethod
    def create(cls, prefix: str, ledger: Ledger) -> BlockTable:
        """A table without slots. Raises `OutOfCapacity`, `OsFailure`; then none is left."""
        segment = Segment(table_name(prefix), TABLE_BYTES)
        try:
            _SIZES.require(_ARRAYS)
            _allocate(segment, 0, _ARRAYS)
            table = cls(segment, ledger, 0)
        except BaseException:
            segment.destroy()
            raise
        table._write_header()
        return table

    @classmethod
    def existing(cls, segment: Segment, ledger: Ledger) -> BlockTable:
        """The table that an earlier run left. Raises `SessionDamaged` if it is none, `OutOfCapacity`."""
        if segment.nbytes != TABLE_BYTES:
            raise SessionDamaged(f"it has {segment.nbytes} bytes, not {TABLE_BYTES}")
        magic, version, slots, complement = _START.unpack(os.pread(segment.fileno(), _START.size, 0))
        if (magic, version) != (_MAGIC, _VERSION):
            raise SessionDamaged(f"it has magic {magic!r} and version {version}; version {_VERSION} is read here")
        if slots ^ complement != _ALL or slots > MOST_BLOCKS or slots % STEP:
            raise SessionDamaged(f"it is said to have {slots} slots")
        _allocate(segment, 0, _ARRAYS)  # what was punched out of it reads as zeros: nothing is stored there
        for name, width in _WIDTHS.items() if slots else ():
            _allocate(segment, _AT[name], width * slots)
        return cls(segment, ledger, slots)

    def taken_bytes(self) -> int:
        """What the system says that it takes."""
        return self.segment.committed

    # Slots

    def take(self, count: int) -> list[int]:
        """Free slots, in runs as long as there are. Raises `OutOfCapacity` if the table may not grow so far."""
        missing = count - len(self._free)
        if missing > 0:
            self._grow(-(-missing // STEP) * STEP)
        taken = self._free[: -count - 1 : -1]
        del self._free[-count:]
        return taken

    @property
    def spare(self) -> int:
        """Slots that are free, or that it may still get."""
        steps = max(0, self.most_bytes - self._held) // (SLOT_BYTES * STEP)
        return len(self._free) + min(STEP * steps, MOST_BLOCKS - self.slots)

    def give(self, slots: Sequence[int]) -> None:
        """These slots are free again; the last of them is taken first."""
        self._free += slots

    def fill(self, slots: Sequence[int], keys: Sequence[bytes], frames: Sequence[int], space: int, holder: int) -> None:
        """Reserve the slots for ``holder``."""
        digests = map(xxhash.xxh3_64_intdigest, keys, [frame + (space << 48) for frame in frames])
        words = _combined(array("Q", digests).tobytes(), RESERVED ^ holder)
        at = 0
        for first, count in runs_of(slots):
            part = slice(at, at + count)
            self._copy("keys", first, b"".join(keys[part]))
            self._copy("frames", first, array("Q", frames[part]).tobytes())
            self._copy("spaces", first, space.to_bytes(2, "little") * count)
            self._copy("pins", first, holder.to_bytes(4, "little") * count)
            self._copy("words", first, words[8 * at : 8 * (at + count)])
            at += count

    def publish(self, runs: Sequence[Run], space: int, holder: int) -> None:
        """What the holder has reserved is published, and pinned by nobody."""
        change = RESERVED ^ holder ^ PUBLISHED
        for first, count in runs:
            self._copy("words", first, _combined(self._bytes("words", first, count), change))
            self._copy("pins", first, bytes(4 * count))
            self._copy("live", first, space.to_bytes(2, "little") * count)

    def clear(self, runs: Sequence[Run]) -> None:
        """Nothing is in these slots any more; they are not free yet."""
        for first, count in runs:
            for name in ("words", "live", "used", "pins"):
                self._copy(name, first, bytes(_WIDTHS[name] * count))

    def key(self, slot: int) -> bytes:
        return self._bytes("keys", slot, 1)

    def keys(self, run: Run) -> tuple[bytes, ...]:
        """Those of all slots of the run."""
        return split_keys(self._bytes("keys", *run))

    # Runs

    def match(self, keys: bytes, index: int, slot: int, space: int) -> int:
        """How many of ``keys``, from number ``index`` on, are those of published blocks of ``space`` in the slots from
        ``slot`` on, which is the first's. At least 1."""
        memory, keys_at, live_at = self._memory, _AT["keys"], _AT["live"]
        most = min(len(keys) // KEY_BYTES - index, self.slots - slot)
        mark = space.to_bytes(2, "little")
        found = step = 1
        grows = True
        while step:
            end = found + step
            if end <= most:
                at, live = keys_at + KEY_BYTES * (slot + found), live_at + 2 * (slot + found)
                start = KEY_BYTES * (index + found)
                if (
                    memory[live : live + 2 * step] == mark * step
                    and keys[start : start + KEY_BYTES * step] == memory[at : at + KEY_BYTES * step]
                ):
                    found = end
                    step = step * 2 if grows else step // 2
                    continue
            grows = False
            step //= 2
        return found

    def touch(self, runs: Sequence[Run], tick: int) -> None:
        """The blocks were used at ``tick``."""
        word = tick.to_bytes(8, "little")
        for first, count in runs:
            self._copy("used", first, word * count)

    def is_used_at(self, run: Run, tick: int) -> bool:
        """Whether all of the run was last used at ``tick``."""
        return self._bytes("used", *run) == tick.to_bytes(8, "little") * run[1]

    def is_pinned(self, run: Run) -> bool:
        """Whether any of the run is pinned."""
        return self._bytes("pins", *run) != bytes(4 * run[1])

    def frame_bytes(self, runs: Sequence[Run]) -> bytes:
        """The frames of the runs, as messages have them."""
        return b"".join(self._bytes("frames", first, count) for first, count in runs)

    def add_pins(self, runs: Sequence[Run], change: int) -> int:
        """Pin once more, or once less; returns how many blocks have become pinned, or are not any more."""
        changed, start, pins = 0, _AT["pins"], self.pins
        before, after = (0, 1) if change > 0 else (1, 0)
        for first, count in runs:
            at = slice(start + 4 * first, start + 4 * (first + count))
            if self._memory[at] == before.to_bytes(4, "little") * count:
                self._memory[at] = after.to_bytes(4, "little") * count
                changed += count
                continue
            for slot in range(first, first + count):
                changed += pins[slot] == before
                pins[slot] += change
        return changed

    # Spaces and holders

    def write_space(self, number: int, uid: int, block_bytes: int, fingerprint: bytes) -> None:
        """A space of this number, below `MOST_SPACES`."""
        self._write_record(_SPACES + 64 * number, _SPACE, uid, block_bytes, fingerprint)

    def write_holder(self, index: int, epoch: int, number: int, uid: int, pid: int, start: int) -> None:
        """A holder of this index, below `MOST_HOLDERS`: the process of a lease that reserves or pins blocks."""
        self._write_record(_HOLDERS + 64 * index, _HOLDER, epoch, number, uid, pid, start)

    def erase_space(self, number: int) -> None:
        self._memory[_SPACES + 64 * number : _SPACES + 64 * number + 8] = bytes(8)

    def erase_holder(self, index: int) -> None:
        self._memory[_HOLDERS + 64 * index : _HOLDERS + 64 * index + 8] = bytes(8)

    def read_space(self, number: int) -> tuple[int, int, bytes] | None:
        """Uid, bytes of a block and fingerprint; None if there is none that holds."""
        found = self._read_record(_SPACES + 64 * number, _SPACE)
        return found and (found[0], found[1], found[2])

    def read_holder(self, index: int) -> tuple[int, int, int, int, int] | None:
        """Epoch, number, uid, pid and start; None if there is none that holds."""
        found = self._read_record(_HOLDERS + 64 * index, _HOLDER)
        return found and (found[0], found[1], found[2], found[3], found[4])

    def verified(self, slot: int) -> int | None:
        """What an earlier run left in the slot: -1 if it is published, the holder's index if it is reserved, None if
        there is nothing, or nothing that holds."""
        word = self.words[slot]
        if not word:
            return None
        seed = self.frames[slot] + (self.spaces[slot] << 48) & _ALL
        state = word ^ xxhash.xxh3_64_intdigest(self.key(slot), seed)
        if state == PUBLISHED:
            return -1
        holder = state ^ RESERVED
        return holder if holder < MOST_HOLDERS and holder == self.pins[slot] else None

    # Memory

    def close(self) -> None:
        """Let go of it; it stays under its name."""
        for view in (self.frames, self.words, self.used, self.pins, self.spaces, self.live, self._whole):
            view.release()
        self._memory.close()
        self.segment.close()

    def destroy(self) -> None:
        """Give its memory back."""
        self.segment.unlink()
        self.close()
        self._ledger.release(ACCOUNT, self._held, self._held)

    def _grow(self, slots: int) -> None:
        nbytes = SLOT_BYTES * slots
        room = min(max(0, self.most_bytes - self._held), SLOT_BYTES * (MOST_BLOCKS - self.slots))
        if nbytes > room:
            raise OutOfCapacity("table of blocks", nbytes, room, self.most_bytes)
        _SIZES.require(nbytes)
        with self._ledger.reserve(ACCOUNT, nbytes, nbytes):
            pass  # it has room for them
        try:
            for name, width in _WIDTHS.items():
                _allocate(self.segment, _AT[name] + width * self.slots, width * slots)
        finally:
            self._account()
        self._free[:0] = range(self.slots + slots - 1, self.slots - 1, -1)
        self.slots += slots
        self._write_header()

    def _account(self) -> None:
        """Have the memory that it has on the books, also what a growth that failed has left."""
        nbytes = self.segment.committed - self._held
        with self._ledger.reserve(ACCOUNT, nbytes, nbytes) as reservation:
            reservation.commit(nbytes)
        self._held += nbytes

    def _write_header(self) -> None:
        self._memory[: _START.size] = _START.pack(_MAGIC, _VERSION, self.slots, self.slots ^ _ALL)

    def _array(self, name: str, kind: Literal["Q", "I", "H"]) -> memoryview:
        return self._whole[_AT[name] : _AT[name] + _WIDTHS[name] * MOST_BLOCKS].cast(kind)

    def _bytes(self, name: str, first: int, count: int) -> bytes:
        at = _AT[name] + _WIDTHS[name] * first
        return self._memory[at : at + _WIDTHS[name] * count]

    def _copy(self, name: str, first: int, data: bytes) -> None:
        at = _AT[name] + _WIDTHS[name] * first
        self._memory[at : at + len(data)] = data

    def _write_record(self, at: int, form: struct.Struct, *fields: int | bytes) -> None:
        data = form.pack(0, *fields)[8:]
        self._memory[at + 8 : at + form.size] = data
        self._memory[at : at + 8] = _checksum(at, data)

    def _read_record(self, at: int, form: struct.Struct) -> tuple[Any, ...] | None:
        data = self._memory[at : at + form.size]
        if data[:8] == bytes(8) or data[:8] != _checksum(at, data[8:]):
            return None
        return form.unpack(data)[1:]


def split_keys(data: bytes) -> tuple[bytes, ...]:
    """Keys that lie one behind the other."""
    form = struct.Struct(f"{KEY_BYTES}s" * (len(data) // KEY_BYTES))  # not of the module's cache: it may be large
    return form.unpack(data)


def _combined(words: bytes, change: int) -> bytes:
    """Every word, exclusive or ``change``."""
    changes = change.to_bytes(8, "little") * (len(words) // 8)
    return (int.from_bytes(words, "little") ^ int.from_bytes(changes, "little")).to_bytes(len(words), "little")


def _checksum(at: int, data: bytes) -> bytes:
    """Never zeros: that is what no record has."""
    return (xxhash.xxh3_64_intdigest(data, seed=at) | 1).to_bytes(8, "little")


def _allocate(segment: Segment, offset: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(segment.fileno(), offset, nbytes)
    except OSError as error:
        raise allocation_failure(f"allocating shared memory {segment.name}", nbytes, error.errno or 0) from error
