"""The daemon block: two copies of a session's header and page table, and the word that says which one is in force.

The daemon can be killed amid any write. So it writes the copy that is not in force, and then one aligned word: a reader
finds the block as before or as after. `protocol.session_state` has what a copy contains; SPEC.md has every offset.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence

from protocol.errors import SessionDamaged, StateVersion
from protocol.session_state import (
    DAEMON_MAGIC,
    STATE_VERSION,
    SessionHeader,
    pack_daemon_copy,
    unpack_daemon_copy,
)

FIRST_COPY = 4096
"""Offset of the copy that is in force at even sequence numbers."""
SEQUENCE_OFFSET = 64
SOURCE_OFFSET = 128
SOURCE_BYTES = 16
ABSENT = 1 << 63
"""Set in a page table entry: the frame is the page's, but what belongs there is still in a saved file, the source."""
_SWITCH = struct.Struct("<8sI4xQ")
_SEQUENCE = struct.Struct("<Q")

Write = tuple[int, bytes]
"""An offset in the block, and the bytes that are written there."""


def daemon_block_bytes(header: SessionHeader) -> int:
    """Size of the daemon block's segment."""
    return FIRST_COPY + 2 * header.copy_bytes


def first_writes(header: SessionHeader) -> list[Write]:
    """What is written to a new block before its first copy. Until then nothing is in force."""
    return [(0, _SWITCH.pack(DAEMON_MAGIC, STATE_VERSION, header.copy_bytes))]


def switch_writes(header: SessionHeader, frames: Sequence[int], sequence: int) -> list[Write]:
    """What puts ``header`` and ``frames`` in force as number ``sequence``, one above the last; in this order.

    Raises `InvalidValue` like `pack_daemon_copy`.
    """
    copy = FIRST_COPY + (sequence & 1) * header.copy_bytes
    return [(copy, pack_daemon_copy(header, frames)), (SEQUENCE_OFFSET, _SEQUENCE.pack(sequence))]


def read_daemon_block(data: bytes | memoryview) -> tuple[SessionHeader, tuple[int, ...]]:
    """Header and page table entries in force.

    Raises `StateVersion` for a block of another version, `SessionDamaged` for anything that is not a whole one.
    """
    sequence = daemon_block_sequence(data)
    _, _, copy_bytes = _SWITCH.unpack_from(data)
    start = FIRST_COPY + (sequence & 1) * copy_bytes
    if len(data) < FIRST_COPY + 2 * copy_bytes:
        raise SessionDamaged(f"daemon block of {len(data)} bytes; its copies have {copy_bytes}", size=len(data))
    header, frames = unpack_daemon_copy(data[start : start + copy_bytes])
    if header.copy_bytes != copy_bytes:
        raise SessionDamaged(f"daemon block's copies have {copy_bytes} bytes; {header.copy_bytes} needed")
    return header, frames


def source_write(source: bytes) -> Write:
    """What names the saved file that absent pages are in: the XXH3-128 of its trailer. Written before such entries."""
    return SOURCE_OFFSET, source


def daemon_block_source(data: bytes | memoryview) -> bytes:
    """What `source_write` wrote; zeros if nothing did."""
    return bytes(data[SOURCE_OFFSET : SOURCE_OFFSET + SOURCE_BYTES])


def split_entries(entries: Sequence[int]) -> tuple[tuple[int, ...], set[int]]:
    """Frames of a page table, and the pages that are absent."""
    absent = {page for page, entry in enumerate(entries) if entry & ABSENT}
    return (tuple(entry & ~ABSENT for entry in entries) if absent else tuple(entries)), absent


def join_entries(frames: Sequence[int], absent: Collection[int]) -> Sequence[int]:
    """The reverse of `split_entries`."""
    if not absent:
        return frames
    return [frame | ABSENT if page in absent else frame for page, frame in enumerate(frames)]


def daemon_block_sequence(data: bytes | memoryview) -> int:
    """The number of the copy in force, at least 1. Raises like `read_daemon_block`."""
    if len(data) < FIRST_COPY:
        raise SessionDamaged(f"daemon block of {len(data)} bytes; at least {FIRST_COPY} needed", size=len(data))
    magic, version, _ = _SWITCH.unpack_from(data)
    if magic != DAEMON_MAGIC:
        raise SessionDamaged(f"daemon block has magic {magic!r}")
    if version != STATE_VERSION:
        raise StateVersion(version, STATE_VERSION)
    sequence: int = _SEQUENCE.unpack_from(data, SEQUENCE_OFFSET)[0]
    if not sequence:
        raise SessionDamaged("daemon block has no copy in force: its creation was cut short")
    return sequence
