"""A saved session as bytes of a file: written, read and verified page by page, by several threads.

    header      4,096 bytes: magic, version, sizes and counts, who the session is; with a checksum of its own
    state       token log (int32 each), payload of the commit record, sampler's state; padded to 4,096
    pages       as they are in host RAM, one stride each
    checksums   uint64 per page: XXH3-64 of its bytes, the page's number being the seed, so that none can change places
    trailer     magic, XXH3-128 of header, state and checksums, size of the file

Everything read from a file is untrusted: nothing of it is believed before its checksum and its limits hold. Numbers
are little-endian. Only committed rows and their pages are in the file, and every acknowledged token.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass

import xxhash

from kvd.sessions.content import SessionContent
from kvd.sessions.limits import ENCODING_PATTERN, LARGEST_COMMIT, LARGEST_TOKEN_CAPACITY, NAME_PATTERN
from protocol.errors import SavedRefused
from protocol.layout import PAGE_ALIGNMENT, PAGE_TOKENS, round_up
from protocol.session_state import SAMPLER_BYTES

SAVED_VERSION = 1
HEADER_BYTES = 4096
CHUNK_BYTES = 4 << 20
"""What one thread reads, hashes and writes at a time, unless a page is larger."""

_MAGIC = b"KVDSAVED"
_TRAILER_MAGIC = b"KVDTRAIL"
_libc = ctypes.CDLL(None)
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h
_START = struct.Struct("<8sIIQ")
_FIELDS = struct.Struct("<QQQQQQQQQQ16s32s128s")
_TRAILER = struct.Struct("<8s16sQ")

Progress = Callable[[int, int], None]
"""Called with the bytes of pages done and all of them, in any thread."""
Place = tuple[int, int]
"""Where a page is in memory: a descriptor, and the offset behind it."""


class Cancelled(Exception):
    """The daemon stops before the file is done."""


@dataclass(frozen=True)
class SavedHeader:
    """Who a saved session is, and how much of it there is; its fields in the order of their bytes.

    ``commit_size`` and ``sampler_size`` are bytes of the payload and of the sampler's state.
    """

    uid: int
    page_bytes: int
    token_capacity: int
    commit_bytes: int
    generation: int
    rows: int
    tokens: int
    commit_size: int
    sampler_size: int
    file_bytes: int
    encoding: str
    fingerprint: bytes
    name: str

    @property
    def page_count(self) -> int:
        return -(-self.rows // PAGE_TOKENS)

    @property
    def page_stride(self) -> int:
        return round_up(self.page_bytes, PAGE_ALIGNMENT)

    @property
    def state_bytes(self) -> int:
        return 4 * self.tokens + self.commit_size + self.sampler_size

    @property
    def pages_offset(self) -> int:
        return HEADER_BYTES + round_up(self.state_bytes, PAGE_ALIGNMENT)

    @property
    def checksums_offset(self) -> int:
        return self.pages_offset + self.page_count * self.page_stride

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self.checksums_offset + 8 * self.page_count + _TRAILER.size

    def pack(self) -> bytes:
        """The header's 4,096 bytes."""
        *numbers, encoding, fingerprint, name = astuple(self)
        fields = _FIELDS.pack(*numbers, encoding.encode(), fingerprint, name.encode()).ljust(HEADER_BYTES, b"\0")
        fields = fields[: HEADER_BYTES - _START.size]
        return _START.pack(_MAGIC, SAVED_VERSION, HEADER_BYTES, xxhash.xxh3_64_intdigest(fields)) + fields


def write(
    fd: int,
    header: SavedHeader,
    content: SessionContent,
    pages: Sequence[Place],
    pool: ThreadPoolExecutor,
    cancelled: threading.Event,
    progress: Progress,
) -> None:
    """Write a whole file, each page from where ``pages`` says. Raises `OSError`, `SavedRefused`, `Cancelled`."""
    stride = header.page_stride

    def copy(buffer: memoryview, first: int, count: int) -> list[int]:
        for index, (source, offset) in enumerate(pages[first : first + count]):
            page = buffer[index * stride : (index + 1) * stride]
            if os.preadv(source, [page], offset) != stride:
                raise SavedRefused(header.name, f"page {first + index} has been cut in memory")
        offset = header.pages_offset + first * stride
        _write(fd, buffer, offset)
        _start_writing_back(fd, offset, len(buffer))
        return _checksums(buffer, stride, first)

    packed = header.pack()
    body = (content.tokens + content.commit + content.sampler).ljust(header.pages_offset - HEADER_BYTES, b"\0")
    _write(fd, memoryview(packed + body), 0)
    checksums = struct.pack(f"<{header.page_count}Q", *_in_chunks(header, copy, pool, cancelled, progress))
    digest = xxhash.xxh3_128_digest(packed + body + checksums)
    trailer = _TRAILER.pack(_TRAILER_MAGIC, digest, header.size)
    _write(fd, memoryview(checksums + trailer), header.checksums_offset)


class SavedFile:
    """An open saved file whose header, state and checksums hold; its pages are still to be read.

    ``name`` is what errors call it. Raises `SavedRefused` saying what is wrong with it, `OSError`.
    """

    def __init__(self, fd: int, name: str) -> None:
        self._fd = fd
        self._name = name
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # several threads take turns, but in order
        packed = _read(fd, HEADER_BYTES, 0)
        self.header = _unpack_header(packed, name)
        size = os.fstat(fd).st_size
        if not self.header.size == self.header.file_bytes == size:
            raise SavedRefused(name, f"it has {size} bytes, not the {self.header.size} that its header stands for")
        body = _read(fd, self.header.pages_offset - HEADER_BYTES, HEADER_BYTES)
        count = self.header.page_count
        end = _read(fd, 8 * count + _TRAILER.size, self.header.checksums_offset)
        checksums = end[: 8 * count]
        digest = xxhash.xxh3_128_digest(packed + body + checksums)
        self.digest = digest
        if end[8 * count :] != _TRAILER.pack(_TRAILER_MAGIC, digest, size):
            raise SavedRefused(name, "its trailer does not match its header, state and checksums")
        self._checksums: tuple[int, ...] = struct.unpack(f"<{count}Q", checksums)
        sizes = 4 * self.header.tokens, self.header.commit_size, self.header.sampler_size
        tokens, commit, sampler = itertools.accumulate(sizes)
        self.content = SessionContent(
            self.header.rows, self.header.tokens, body[:tokens], body[tokens:commit], body[commit:sampler]
        )

    def read_pages(
        self, pages: Sequence[Place] | None, pool: ThreadPoolExecutor, cancelled: threading.Event, progress: Progress
    ) -> None:
        """Verify every page, and write those that hold to where ``pages`` says, if it does.

        Raises `SavedRefused` naming the page that does not hold, `OSError`, `Cancelled`; then some pages are written.
        """

        def copy(buffer: memoryview, first: int, count: int) -> list[int]:
            bad = self._read_chunk(buffer, first, None if pages is None else pages[first : first + count])
            if bad:
                raise self.page_refused(bad[0])
            return []

        _in_chunks(self.header, copy, pool, cancelled, progress)

    def read_some(
        self, first: int, pages: Sequence[Place], pool: ThreadPoolExecutor, cancelled: threading.Event
    ) -> list[int]:
        """Verify as many pages as there are ``pages``, from ``first`` on, and write those that hold to there.

        Returns the others. Raises `OSError`, `Cancelled`; then some pages are written.
        """

        def copy(buffer: memoryview, start: int, count: int) -> list[int]:
            return self._read_chunk(buffer, start, pages[start - first : start - first + count])

        span = range(first, first + len(pages))
        return _in_chunks(self.header, copy, pool, cancelled, lambda _done, _total: None, span)

    def page_refused(self, page: int) -> SavedRefused:
        """The error of a page that does not hold."""
        return SavedRefused(self._name, f"page {page} does not match its checksum")

    def _read_chunk(self, buffer: memoryview, first: int, pages: Sequence[Place] | None) -> list[int]:
        """Read pages from ``first`` on into ``buffer``, and write those that hold to ``pages``; returns the others."""
        stride = self.header.page_stride
        _read_into(self._fd, buffer, self.header.pages_offset + first * stride)
        bad = []
        for index, found in enumerate(_checksums(buffer, stride, first)):
            if found != self._checksums[first + index]:
                bad.append(first + index)
            elif pages is not None:
                target, offset = pages[index]
                _write(target, buffer[index * stride : (index + 1) * stride], offset)
        return bad


def _in_chunks(
    header: SavedHeader,
    copy: Callable[[memoryview, int, int], list[int]],
    pool: ThreadPoolExecutor,
    cancelled: threading.Event,
    progress: Progress,
    span: range | None = None,
) -> list[int]:
    """Call ``copy`` with a buffer, a first page and a count for all pages, or those of ``span``.

    Returns what it returned, in the pages' order.

    When one call fails, those that have not begun are given up.
    """
    stride, span = header.page_stride, span or range(header.page_count)
    step = max(1, CHUNK_BYTES // stride)
    buffers = threading.local()
    done = 0
    lock = threading.Lock()

    def chunk(first: int) -> list[int]:
        nonlocal done
        if cancelled.is_set():
            raise Cancelled
        if not hasattr(buffers, "whole"):
            buffers.whole = memoryview(bytearray(step * stride))
        pages = min(step, span.stop - first)
        result = copy(buffers.whole[: pages * stride], first, pages)
        with lock:
            done += pages * stride
            progress(done, len(span) * stride)
        return result

    futures = [pool.submit(chunk, first) for first in span[::step]]
    try:
        return [checksum for future in futures for checksum in future.result()]
    finally:
        for future in futures:
            future.cancel()
        for future in futures:  # none may still be at it when the caller closes the descriptors
            if not future.cancelled():
                future.exception()


def _unpack_header(packed: bytes, name: str) -> SavedHeader:
    """The header, checked as far as it can be by itself."""
    magic, version, header_bytes, checksum = _START.unpack_from(packed.ljust(HEADER_BYTES, b"\0"))
    if magic != _MAGIC or len(packed) != HEADER_BYTES:
        raise SavedRefused(name, "it is not a saved session")
    if version != SAVED_VERSION:
        raise SavedRefused(name, f"it has version {version}; version {SAVED_VERSION} is read here")
    fields = packed[_START.size :]
    if header_bytes != HEADER_BYTES or checksum != xxhash.xxh3_64_intdigest(fields):
        raise SavedRefused(name, "its header does not match its checksum")
    *numbers, encoding, fingerprint, session = _FIELDS.unpack_from(fields)
    try:
        texts = [encoding.rstrip(b"\0").decode("ascii"), fingerprint, session.rstrip(b"\0").decode("ascii")]
    except UnicodeDecodeError:
        raise SavedRefused(name, "its encoding or name is not text") from None
    header = SavedHeader(*numbers, *texts)
    holds = (
        header.uid < 1 << 32
        and 1 <= header.token_capacity <= LARGEST_TOKEN_CAPACITY
        and max(header.rows, header.tokens) <= header.token_capacity
        and 1 <= header.page_bytes < 1 << 48
        and header.commit_size <= header.commit_bytes <= LARGEST_COMMIT
        and header.sampler_size <= SAMPLER_BYTES
        and header.generation >= 1
        and ENCODING_PATTERN.fullmatch(header.encoding)
        and NAME_PATTERN.fullmatch(header.name)
    )
    if not holds or header.pack() != packed:
        raise SavedRefused(name, "its header has values outside their limits")
    return header


def _checksums(buffer: memoryview, stride: int, first: int) -> list[int]:
    count = len(buffer) // stride
    return [xxhash.xxh3_64_intdigest(buffer[i * stride : (i + 1) * stride], seed=first + i) for i in range(count)]


def _write(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def _start_writing_back(fd: int, offset: int, nbytes: int) -> None:
    """Have the disk begin with these bytes, so that the sync at the end finds little left.

    Where the system cannot do that, it does nothing.
    """
    _libc.sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(nbytes), _SYNC_FILE_RANGE_WRITE)


def _read(fd: int, nbytes: int, offset: int) -> bytes:
    """At most ``nbytes``: what there is."""
    buffer = bytearray(nbytes)
    return bytes(buffer[: _read_into(fd, memoryview(buffer), offset)])


def _read_into(fd: int, buffer: memoryview, offset: int) -> int:
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if not count:
            break
        done += count
    return done
