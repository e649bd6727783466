"""A session's state in shared memory: what outlives the worker that holds it.

Two segments per session. The *daemon block* is written by the daemon alone and mapped read-only by workers: who the
session is, and its page table, in two copies (`protocol.daemon_block` switches between them). The *worker block* is
written by the worker that holds the session: the log of acknowledged tokens, the sampler's state, counters, and two
commit records that are used in turn, the valid one being named by one aligned word that is written last. SPEC.md has
every offset.

The daemon reads a worker block with ``pread`` only: a worker can cut the segment at any time, and a mapping of it would
then be SIGBUS. All numbers are little-endian; offsets are in bytes.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from operator import attrgetter

import xxhash

from protocol.errors import InvalidValue, SessionDamaged
from protocol.layout import PAGE_TOKENS, round_up

STATE_VERSION = 2
_ALIGNMENT = 4096

# A copy in the daemon block: header, then the page table
DAEMON_MAGIC = b"KVDSESSN"
PAGE_TABLE_OFFSET = 4096
_DAEMON_HEADER = struct.Struct("<8sIIQQQQIIQQQQQQQ16s32s128s")
_CHECKSUM_AT = slice(16, 24)
ENCODING_BYTES = 16
FINGERPRINT_BYTES = 32
NAME_BYTES = 128

# Worker block: header, words on cache lines of their own, two sampler records, two commit records, the token log
WORKER_MAGIC = b"KVDWORKR"
_WORKER_HEADER = struct.Struct("<8sIIQQQQQ")
_TOKEN_COUNT, _COMMIT_SEQUENCE, _LOGICAL_ROWS, _COUNTERS = 512, 576, 640, 704
_SAMPLER = 1024
SAMPLER_BYTES = 1024
RECORDS_OFFSET = 4096
_RECORD_HEADER = struct.Struct("<QQQQQ")
_SAMPLER_STRIDE = round_up(_RECORD_HEADER.size + SAMPLER_BYTES, 64)
_READ_ATTEMPTS = 16

COUNTER_NAMES = ("selections", "hits", "misses", "ring_hits", "copybacks", "duplicate_misses")
"""The counters that a worker publishes, in the order of their words."""


@dataclass(frozen=True)
class SessionHeader:
    """The header of a copy in the daemon block, its fields in the order of their bytes.

    ``holder_start`` is the holder's start time in clock ticks since boot (pids recur).
    """

    epoch: int
    session: int
    generation: int
    uid: int
    holder_pid: int
    holder_start: int
    page_bytes: int
    page_stride: int
    extent_bytes: int
    token_capacity: int
    page_count: int
    commit_bytes: int
    encoding: str
    fingerprint: bytes
    name: str

    @property
    def page_capacity(self) -> int:
        """The most pages that the table has room for."""
        return round_up(self.token_capacity, PAGE_TOKENS) // PAGE_TOKENS

    @property
    def copy_bytes(self) -> int:
        """Size of one copy: header and page table."""
        return round_up(PAGE_TABLE_OFFSET + 8 * self.page_capacity, _ALIGNMENT)


_HEADER_NUMBERS = attrgetter(*[field.name for field in fields(SessionHeader)][:-3])


def pack_frame(extent: int, index: int) -> int:
    """A page table entry: frame ``index`` of extent ``extent``."""
    return extent << 32 | index


def unpack_frame(entry: int) -> tuple[int, int]:
    """The extent and the frame index of a page table entry."""
    return entry >> 32, entry & 0xFFFFFFFF


def pack_daemon_copy(header: SessionHeader, frames: Sequence[int]) -> bytes:
    """Header and page table, checksum included; ``frames`` are `pack_frame` entries, one per page.

    Raises `InvalidValue` for a text or a page count that has no room.
    """
    if len(frames) != header.page_count:
        raise InvalidValue("page table entries", len(frames), f"{header.page_count}, the page count")
    if header.page_count > header.page_capacity:
        raise InvalidValue("pages of the session", header.page_count, f"at most {header.page_capacity}")
    if len(header.fingerprint) != FINGERPRINT_BYTES:
        raise InvalidValue("fingerprint's length", len(header.fingerprint), f"{FINGERPRINT_BYTES} bytes")
    encoding = _text("encoding", header.encoding, ENCODING_BYTES)
    name = _text("session name", header.name, NAME_BYTES)
    fixed = bytearray(PAGE_TABLE_OFFSET)
    numbers = _HEADER_NUMBERS(header)
    texts = (encoding, header.fingerprint, name)
    _DAEMON_HEADER.pack_into(fixed, 0, DAEMON_MAGIC, STATE_VERSION, PAGE_TABLE_OFFSET, 0, *numbers, *texts)
    table = struct.pack(f"<{len(frames)}Q", *frames)
    fixed[_CHECKSUM_AT] = _checksum(fixed, table)
    return bytes(fixed) + table


def unpack_daemon_copy(data: bytes | memoryview) -> tuple[SessionHeader, tuple[int, ...]]:
    """Header and page table entries; raises `SessionDamaged` unless magic, version, sizes and checksum agree.

    ``data`` may be longer than header and table, and is copied before it is checked.
    """
    if len(data) < PAGE_TABLE_OFFSET:
        raise SessionDamaged(f"daemon block of {len(data)} bytes; at least {PAGE_TABLE_OFFSET} needed", size=len(data))
    fixed = bytearray(data[:PAGE_TABLE_OFFSET])
    magic, version, _, _, *numbers, encoding, fingerprint, name = _DAEMON_HEADER.unpack_from(fixed)
    if magic != DAEMON_MAGIC or version != STATE_VERSION:
        raise SessionDamaged(f"daemon block has magic {magic!r}, version {version}", version=version)
    try:
        texts = [encoding.rstrip(b"\0").decode(), fingerprint, name.rstrip(b"\0").decode()]
    except UnicodeDecodeError:
        raise SessionDamaged("daemon block's encoding or name is not UTF-8") from None
    header = SessionHeader(*numbers, *texts)
    pages = header.page_count
    end = PAGE_TABLE_OFFSET + 8 * pages
    if pages > header.page_capacity or end > len(data):
        raise SessionDamaged(f"daemon block claims {pages} pages of {header.page_capacity}", pages=pages)
    table = bytes(data[PAGE_TABLE_OFFSET:end])
    stored = bytes(fixed[_CHECKSUM_AT])
    fixed[_CHECKSUM_AT] = bytes(8)
    if stored != _checksum(fixed, table):
        raise SessionDamaged("daemon block's checksum does not match its bytes")
    return header, struct.unpack(f"<{pages}Q", table)


@dataclass(frozen=True)
class WorkerBlockLayout:
    """Where things lie in a worker block of ``token_capacity`` tokens and ``commit_bytes`` of commit payload."""

    token_capacity: int
    commit_bytes: int

    @property
    def record_stride(self) -> int:
        return round_up(_RECORD_HEADER.size + self.commit_bytes, 64)

    @property
    def log_offset(self) -> int:
        """Offset of the token log, int32 each."""
        return round_up(RECORDS_OFFSET + 2 * self.record_stride, _ALIGNMENT)

    @property
    def block_bytes(self) -> int:
        """Size of the worker block's segment."""
        return round_up(self.log_offset + 4 * self.token_capacity, _ALIGNMENT)

    def pack_header(self, session: int) -> bytes:
        """The header that the daemon writes once, before any worker sees the block."""
        return _pack_worker_header(session, self.token_capacity, self.commit_bytes, self.log_offset)


@dataclass(frozen=True)
class Commit:
    """A commit record: rows below ``rows`` are in host RAM, and ``payload`` belongs to the last of them."""

    sequence: int
    generation: int
    rows: int
    payload: bytes


NO_COMMIT = Commit(0, 0, 0, b"")


class WorkerBlock:
    """A worker's own view of its worker block: a writable mapping of ``layout.block_bytes``.

    Every count is published by one aligned 8-byte store after the data it covers; a process killed between the two
    leaves the old count. Not for the daemon, which uses `read_worker_state`.
    """

    def __init__(self, buffer: memoryview, layout: WorkerBlockLayout, session: int) -> None:
        if len(buffer) < layout.block_bytes or bytes(buffer[: _WORKER_HEADER.size]) != layout.pack_header(session):
            raise SessionDamaged(f"worker block of session {session} has another header than the daemon wrote")
        self.layout = layout
        self._bytes = buffer
        self._words = buffer[:RECORDS_OFFSET].cast("Q")
        self._log = buffer[layout.log_offset : layout.log_offset + 4 * layout.token_capacity].cast("i")

    @property
    def token_count(self) -> int:
        """Acknowledged tokens."""
        return self._words[_TOKEN_COUNT // 8]

    def tokens(self, start: int = 0, end: int | None = None) -> list[int]:
        """Acknowledged token ids ``start`` to ``end``, all by default."""
        count = self.token_count
        return self._log[start : count if end is None else min(end, count)].tolist()

    def append_tokens(self, ids: Sequence[int], sampler_state: bytes = b"") -> None:
        """Log ``ids`` and the sampler's state after them, then publish the new count, which covers both.

        Raises `InvalidValue` past the session's token capacity, or for a state above `SAMPLER_BYTES`.
        """
        count = self.token_count
        end = count + len(ids)
        if end > self.layout.token_capacity:
            raise InvalidValue("tokens of the session", end, f"at most {self.layout.token_capacity}")
        self._log[count:end] = memoryview(array("i", ids))
        self.count_tokens(end, sampler_state)

    def count_tokens(self, count: int, sampler_state: bytes = b"") -> None:
        """Publish that the log has ``count`` tokens, which are written by now, and the sampler's state after them."""
        self._write_sampler(count, sampler_state)
        self._words[_TOKEN_COUNT // 8] = count

    def truncate_tokens(self, count: int) -> None:
        """Forget tokens from ``count`` on, and the sampler's state with them."""
        if not 0 <= count <= self.token_count:
            raise InvalidValue("token count", count, f"0 to {self.token_count}")
        self._words[_TOKEN_COUNT // 8] = count

    @property
    def logical_rows(self) -> int:
        """Rows appended, whether or not they are in host RAM."""
        return self._words[_LOGICAL_ROWS // 8]

    @logical_rows.setter
    def logical_rows(self, rows: int) -> None:
        self._words[_LOGICAL_ROWS // 8] = rows

    @property
    def commit(self) -> Commit:
        """The commit record in force; raises `SessionDamaged` if it does not match its checksum."""
        sequence = self._words[_COMMIT_SEQUENCE // 8]
        at = self._record_at(sequence)
        return _read_commit(sequence, bytes(self._bytes[at : at + self.layout.record_stride]), self.layout)

    def publish_commit(self, generation: int, rows: int, payload: bytes = b"") -> None:
        """Write the record that is not in force, then switch to it. Call only when the rows are in host RAM."""
        if len(payload) > self.layout.commit_bytes:
            raise InvalidValue("commit payload", len(payload), f"at most {self.layout.commit_bytes} bytes")
        if not 0 <= rows <= self.layout.token_capacity:
            raise InvalidValue("committed rows", rows, f"0 to {self.layout.token_capacity}")
        sequence = self._words[_COMMIT_SEQUENCE // 8] + 1
        at = self._record_at(sequence)
        record = _pack_record(Commit(sequence, generation, rows, payload))
        self._bytes[at : at + len(record)] = record
        self._words[_COMMIT_SEQUENCE // 8] = sequence

    @property
    def counters(self) -> dict[str, int]:
        """The totals that were published last; a worker that opens a session counts on from them."""
        return {name: self._words[_COUNTERS // 8 + index] for index, name in enumerate(COUNTER_NAMES)}

    def publish_counters(self, values: Sequence[int]) -> None:
        """The totals of `COUNTER_NAMES`, in their order."""
        for index, value in enumerate(values):
            self._words[_COUNTERS // 8 + index] = value

    @property
    def sampler_state(self) -> bytes:
        """Opaque bytes of the worker's sampler after the last acknowledged token; empty if it is not known."""
        return sampler_state_after(self.token_count, self._bytes)

    def release(self) -> None:
        """Let go of the mapping, so that it can be closed."""
        self._words.release()
        self._log.release()
        self._bytes.release()

    def _record_at(self, sequence: int) -> int:
        return RECORDS_OFFSET + (sequence & 1) * self.layout.record_stride

    def _write_sampler(self, tokens: int, state: bytes) -> None:
        """Overwrite the sampler record that does not belong to the published token count, else the older one."""
        if len(state) > SAMPLER_BYTES:
            raise InvalidValue("sampler state", len(state), f"at most {SAMPLER_BYTES} bytes")
        count = self.token_count
        first, second = _sampler_records(self._bytes)
        slot = int((first.rows == count, first.sequence) > (second.rows == count, second.sequence))
        record = _pack_record(Commit(max(first.sequence, second.sequence) + 1, 0, tokens, state))
        at = _SAMPLER + slot * _SAMPLER_STRIDE
        self._bytes[at : at + len(record)] = record


def sampler_state_after(tokens: int, block: bytes | memoryview) -> bytes:
    """The sampler's state after ``tokens`` tokens, from the start of a worker block; empty if it is not known."""
    matching = [record for record in _sampler_records(block) if record.rows == tokens]
    return max(matching, key=lambda record: record.sequence, default=NO_COMMIT).payload


def _sampler_records(block: bytes | memoryview) -> list[Commit]:
    """Both, `NO_COMMIT` for one that is not intact. ``rows`` is the token count it belongs to."""
    slots = (block[at : at + _SAMPLER_STRIDE] for at in (_SAMPLER, _SAMPLER + _SAMPLER_STRIDE))
    return [_unpack_record(bytes(slot), SAMPLER_BYTES) or NO_COMMIT for slot in slots]


@dataclass(frozen=True)
class WorkerState:
    """What the daemon reads of a worker block."""

    tokens: int
    logical_rows: int
    commit: Commit
    counters: dict[str, int]


def read_worker_state(fd: int, layout: WorkerBlockLayout, session: int) -> WorkerState:
    """Read a worker block with ``pread``; raises `SessionDamaged` if it is cut short or does not make sense.

    Safe beside a live worker: what it replaces during the reading is read again.
    """
    for _ in range(_READ_ATTEMPTS - 1):
        fixed = os.pread(fd, RECORDS_OFFSET, 0)
        try:
            return _read_worker_state(fd, fixed, layout, session)
        except SessionDamaged:
            if os.pread(fd, RECORDS_OFFSET, 0) == fixed:
                raise
    return _read_worker_state(fd, os.pread(fd, RECORDS_OFFSET, 0), layout, session)


def _read_worker_state(fd: int, fixed: bytes, layout: WorkerBlockLayout, session: int) -> WorkerState:
    header = layout.pack_header(session)
    if len(fixed) < RECORDS_OFFSET or fixed[: len(header)] != header or os.fstat(fd).st_size < layout.block_bytes:
        raise SessionDamaged(f"worker block of session {session} is cut short or overwritten", session=session)
    word = struct.Struct("<Q").unpack_from
    tokens, sequence, rows = (word(fixed, at)[0] for at in (_TOKEN_COUNT, _COMMIT_SEQUENCE, _LOGICAL_ROWS))
    if max(tokens, rows) > (limit := layout.token_capacity):
        raise SessionDamaged(f"session {session} claims {tokens} tokens, {rows} rows of {limit}", session=session)
    record = os.pread(fd, layout.record_stride, RECORDS_OFFSET + (sequence & 1) * layout.record_stride)
    counters = {name: word(fixed, _COUNTERS + 8 * index)[0] for index, name in enumerate(COUNTER_NAMES)}
    return WorkerState(tokens, rows, _read_commit(sequence, record, layout), counters)


def _pack_record(commit: Commit) -> bytes:
    fields = (commit.sequence, commit.generation, commit.rows, len(commit.payload))
    digest = xxhash.xxh3_64_intdigest(struct.pack("<QQQQ", *fields) + commit.payload)
    return _RECORD_HEADER.pack(*fields, digest) + commit.payload


def _unpack_record(data: bytes, payload_limit: int) -> Commit | None:
    """The record at the start of ``data``, or None if its size or its checksum is wrong."""
    if len(data) < _RECORD_HEADER.size:
        return None
    sequence, generation, rows, size, _ = _RECORD_HEADER.unpack_from(data)
    if size > payload_limit:
        return None
    record = Commit(sequence, generation, rows, data[_RECORD_HEADER.size : _RECORD_HEADER.size + size])
    return record if data.startswith(_pack_record(record)) else None


def _read_commit(sequence: int, data: bytes, layout: WorkerBlockLayout) -> Commit:
    if sequence == 0:
        return NO_COMMIT
    commit = _unpack_record(data, layout.commit_bytes)
    if commit is None or commit.sequence != sequence or commit.rows > layout.token_capacity:
        raise SessionDamaged(f"commit record {sequence} does not match its checksum", sequence=sequence)
    return commit


@lru_cache(maxsize=2048)
def _pack_worker_header(*numbers: int) -> bytes:
    """Remembered, because the daemon compares each session's once a second."""
    fixed = bytearray(_WORKER_HEADER.pack(WORKER_MAGIC, STATE_VERSION, _WORKER_HEADER.size, 0, *numbers))
    fixed[_CHECKSUM_AT] = _checksum(fixed)
    return bytes(fixed)


def _text(what: str, value: str, limit: int) -> bytes:
    data = value.encode()
    if not data or len(data) > limit or b"\0" in data:
        raise InvalidValue(what, value, f"1 to {limit} bytes of UTF-8 without NUL")
    return data


def _checksum(*parts: bytes | bytearray) -> bytes:
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(bytes(part))
    return digest.intdigest().to_bytes(8, "little")
