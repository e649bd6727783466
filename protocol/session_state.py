"""A session's state in shared memory: what outlives the worker that holds it.

Two segments per session. The *daemon block* is written by the daemon alone and mapped read-only by workers: who the
session is, and its page table. The *worker block* is written by the worker that holds the session: the log of
acknowledged tokens, the sampler's state, counters, and two commit records that are used in turn, the valid one being
named by one aligned word that is written last.

The daemon reads a worker block with ``pread`` only: a worker can cut the segment at any time, and a mapping of it would
then be SIGBUS. All numbers are little-endian; offsets are in bytes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from protocol.errors import InvalidValue, SessionDamaged
from protocol.layout import PAGE_TOKENS, round_up

STATE_VERSION = 1
_ALIGNMENT = 4096

# Daemon block: header, then the page table
DAEMON_MAGIC = b"KVDSESSN"
PAGE_TABLE_OFFSET = 4096
_DAEMON_HEADER = struct.Struct("<8sIIQQQQIIQQQQQQQQ16s32s128s")
_CHECKSUM_AT = slice(16, 24)

# Worker block: header, words on cache lines of their own, two commit records, the token log
WORKER_MAGIC = b"KVDWORKR"
_WORKER_HEADER = struct.Struct("<8sIIQQQQQ")
_TOKEN_COUNT = 512
_COMMIT_SEQUENCE = 576
_LOGICAL_ROWS = 640
_COUNTERS = 704
_SAMPLER = 1024
SAMPLER_BYTES = 1020
_RECORDS = 4096
_RECORD_HEADER = struct.Struct("<QQQQQ")

COUNTER_NAMES = ("selections", "hits", "misses", "ring_hits", "copybacks", "duplicate_misses")
"""The counters that a worker publishes, in the order of their words."""


@dataclass(frozen=True)
class SessionHeader:
    """The daemon block's header. ``holder_start`` is the holder's start time in clock ticks since boot (pids recur)."""

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
    def block_bytes(self) -> int:
        """Size of the daemon block's segment."""
        return round_up(PAGE_TABLE_OFFSET + 8 * self.page_capacity, _ALIGNMENT)


def pack_frame(extent: int, index: int) -> int:
    """A page table entry: frame ``index`` of extent ``extent``."""
    return extent << 32 | index


def unpack_frame(entry: int) -> tuple[int, int]:
    """The extent and the frame index of a page table entry."""
    return entry >> 32, entry & 0xFFFFFFFF


def pack_daemon_block(header: SessionHeader, frames: Sequence[int]) -> bytes:
    """Header and page table, checksum included; ``frames`` are `pack_frame` entries, one per page."""
    if len(frames) != header.page_count:
        raise InvalidValue("page table entries", len(frames), f"{header.page_count}, the page count")
    fixed = bytearray(PAGE_TABLE_OFFSET)
    _DAEMON_HEADER.pack_into(
        fixed,
        0,
        DAEMON_MAGIC,
        STATE_VERSION,
        PAGE_TABLE_OFFSET,
        0,
        header.epoch,
        header.session,
        header.generation,
        header.uid,
        header.holder_pid,
        header.holder_start,
        header.page_bytes,
        header.page_stride,
        header.extent_bytes,
        header.token_capacity,
        header.page_capacity,
        header.page_count,
        header.commit_bytes,
        header.encoding.encode(),
        header.fingerprint,
        header.name.encode(),
    )
    table = struct.pack(f"<{len(frames)}Q", *frames)
    fixed[_CHECKSUM_AT] = _checksum(fixed, table)
    return bytes(fixed) + table


def unpack_daemon_block(data: bytes | memoryview) -> tuple[SessionHeader, tuple[int, ...]]:
    """Header and page table entries; raises `SessionDamaged` unless magic, version, sizes and checksum agree."""
    if len(data) < PAGE_TABLE_OFFSET:
        raise SessionDamaged(f"daemon block of {len(data)} bytes; at least {PAGE_TABLE_OFFSET} needed", size=len(data))
    values = _DAEMON_HEADER.unpack_from(data)
    (
        magic,
        version,
        _,
        _,
        epoch,
        session,
        generation,
        uid,
        holder_pid,
        holder_start,
        page_bytes,
        page_stride,
        extent_bytes,
        token_capacity,
        page_capacity,
        page_count,
        commit_bytes,
        encoding,
        fingerprint,
        name,
    ) = values
    if magic != DAEMON_MAGIC or version != STATE_VERSION:
        raise SessionDamaged(f"daemon block has magic {magic!r}, version {version}", version=version)
    end = PAGE_TABLE_OFFSET + 8 * page_count
    if page_count > page_capacity or end > len(data):
        raise SessionDamaged(f"daemon block claims {page_count} pages of {page_capacity}", pages=page_count)
    fixed, table = bytearray(data[:PAGE_TABLE_OFFSET]), bytes(data[PAGE_TABLE_OFFSET:end])
    stored = bytes(fixed[_CHECKSUM_AT])
    fixed[_CHECKSUM_AT] = bytes(8)
    if stored != _checksum(fixed, table):
        raise SessionDamaged("daemon block's checksum does not match its bytes")
    header = SessionHeader(
        epoch=epoch,
        session=session,
        generation=generation,
        uid=uid,
        holder_pid=holder_pid,
        holder_start=holder_start,
        page_bytes=page_bytes,
        page_stride=page_stride,
        extent_bytes=extent_bytes,
        token_capacity=token_capacity,
        page_count=page_count,
        commit_bytes=commit_bytes,
        encoding=encoding.rstrip(b"\0").decode(),
        fingerprint=fingerprint,
        name=name.rstrip(b"\0").decode(),
    )
    return header, struct.unpack(f"<{page_count}Q", table)


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
        return round_up(_RECORDS + 2 * self.record_stride, _ALIGNMENT)

    @property
    def block_bytes(self) -> int:
        """Size of the worker block's segment."""
        return round_up(self.log_offset + 4 * self.token_capacity, _ALIGNMENT)

    def pack_header(self, session: int) -> bytes:
        """The header that the daemon writes once, before any worker sees the block."""
        fields = (session, self.token_capacity, self.commit_bytes, self.log_offset)
        fixed = bytearray(_WORKER_HEADER.pack(WORKER_MAGIC, STATE_VERSION, _WORKER_HEADER.size, 0, *fields))
        fixed[_CHECKSUM_AT] = _checksum(fixed)
        return bytes(fixed)


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
        self._words = buffer[:_RECORDS].cast("Q")
        self._log = buffer[layout.log_offset : layout.log_offset + 4 * layout.token_capacity].cast("i")

    @property
    def token_count(self) -> int:
        """Acknowledged tokens."""
        return self._words[_TOKEN_COUNT // 8]

    def tokens(self, start: int = 0, end: int | None = None) -> list[int]:
        """Acknowledged token ids ``start`` to ``end``, all by default."""
        count = self.token_count
        return self._log[start : count if end is None else min(end, count)].tolist()

    def append_tokens(self, ids: Sequence[int]) -> None:
        """Log ``ids``, then publish the new count. Raises `InvalidValue` past the session's token capacity."""
        count = self.token_count
        if count + len(ids) > self.layout.token_capacity:
            raise InvalidValue("tokens of the session", count + len(ids), f"at most {self.layout.token_capacity}")
        for offset, token in enumerate(ids):
            self._log[count + offset] = token
        self._words[_TOKEN_COUNT // 8] = count + len(ids)

    def truncate_tokens(self, count: int) -> None:
        """Forget tokens from ``count`` on."""
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
        return _read_record(sequence, bytes(self._bytes[at : at + self.layout.record_stride]), self.layout)

    def publish_commit(self, generation: int, rows: int, payload: bytes = b"") -> None:
        """Write the record that is not in force, then switch to it. Call only when the rows are in host RAM."""
        if len(payload) > self.layout.commit_bytes:
            raise InvalidValue("commit payload", len(payload), f"at most {self.layout.commit_bytes} bytes")
        sequence = self._words[_COMMIT_SEQUENCE // 8] + 1
        at = self._record_at(sequence)
        record = _pack_record(Commit(sequence, generation, rows, payload))
        self._bytes[at : at + len(record)] = record
        self._words[_COMMIT_SEQUENCE // 8] = sequence

    def publish_counters(self, values: Sequence[int]) -> None:
        """The totals of `COUNTER_NAMES`, in their order."""
        for index, value in enumerate(values):
            self._words[_COUNTERS // 8 + index] = value

    @property
    def sampler_state(self) -> bytes:
        """Opaque bytes of the worker's sampler."""
        (size,) = struct.unpack_from("<I", self._bytes, _SAMPLER)
        return bytes(self._bytes[_SAMPLER + 4 : _SAMPLER + 4 + min(size, SAMPLER_BYTES)])

    @sampler_state.setter
    def sampler_state(self, state: bytes) -> None:
        if len(state) > SAMPLER_BYTES:
            raise InvalidValue("sampler state", len(state), f"at most {SAMPLER_BYTES} bytes")
        self._bytes[_SAMPLER + 4 : _SAMPLER + 4 + len(state)] = state
        struct.pack_into("<I", self._bytes, _SAMPLER, len(state))

    def release(self) -> None:
        """Let go of the mapping, so that it can be closed."""
        self._words.release()
        self._log.release()
        self._bytes.release()

    def _record_at(self, sequence: int) -> int:
        return _RECORDS + (sequence & 1) * self.layout.record_stride


@dataclass(frozen=True)
class WorkerState:
    """What the daemon reads of a worker block."""

    tokens: int
    logical_rows: int
    commit: Commit
    counters: dict[str, int]


def read_worker_state(fd: int, layout: WorkerBlockLayout, session: int) -> WorkerState:
    """Read a worker block with ``pread``; raises `SessionDamaged` if it is cut short or does not make sense."""
    fixed = os.pread(fd, _RECORDS, 0)
    header = layout.pack_header(session)
    if len(fixed) < _RECORDS or fixed[: len(header)] != header or os.fstat(fd).st_size < layout.block_bytes:
        raise SessionDamaged(f"worker block of session {session} is cut short or overwritten", session=session)
    word = struct.Struct("<Q").unpack_from
    (tokens,), (sequence,), (rows,) = word(fixed, _TOKEN_COUNT), word(fixed, _COMMIT_SEQUENCE), word(fixed, _LOGICAL_ROWS)
    if tokens > layout.token_capacity or rows > layout.token_capacity:
        raise SessionDamaged(
            f"session {session} claims {tokens} tokens and {rows} rows of {layout.token_capacity}", session=session
        )
    record = os.pread(fd, layout.record_stride, _RECORDS + (sequence & 1) * layout.record_stride)
    counters = {name: word(fixed, _COUNTERS + 8 * index)[0] for index, name in enumerate(COUNTER_NAMES)}
    return WorkerState(tokens, rows, _read_record(sequence, record, layout), counters)


def _pack_record(commit: Commit) -> bytes:
    fields = (commit.sequence, commit.generation, commit.rows, len(commit.payload))
    digest = xxhash.xxh3_64_intdigest(struct.pack("<QQQQ", *fields) + commit.payload)
    return _RECORD_HEADER.pack(*fields, digest) + commit.payload


def _read_record(sequence: int, data: bytes, layout: WorkerBlockLayout) -> Commit:
    if sequence == 0:
        return NO_COMMIT
    if len(data) == layout.record_stride:
        stored, generation, rows, size, _ = _RECORD_HEADER.unpack_from(data)
        if stored == sequence and size <= layout.commit_bytes and rows <= layout.token_capacity:
            payload = data[_RECORD_HEADER.size : _RECORD_HEADER.size + size]
            commit = Commit(sequence, generation, rows, payload)
            if data.startswith(_pack_record(commit)):
                return commit
    raise SessionDamaged(f"commit record {sequence} does not match its checksum", sequence=sequence)


def _checksum(*parts: bytes | bytearray) -> bytes:
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(bytes(part))
    return digest.intdigest().to_bytes(8, "little")
