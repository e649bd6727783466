"""Saved sessions for tests: written to a file in memory, damaged in many ways, and read by a second reader.

The second reader and `resealed` follow the table of SPEC.md, section 14, and share nothing with the daemon's code.
"""

from __future__ import annotations

import os
import random
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import xxhash

from kvd.saved.file import Place, SavedFile, SavedHeader, write
from kvd.sessions.content import SessionContent

FIELDS = struct.Struct("<10Q16s32s128s")
STRIDE = 8192


@contextmanager
def in_memory(data: bytes = b"") -> Iterator[int]:
    """A descriptor of a file that is only there, with ``data`` in it."""
    fd = os.memfd_create("saved")
    try:
        os.write(fd, data)
        yield fd
    finally:
        os.close(fd)


def make(rows: int = 300, tokens: int = 310, *, seed: int = 0, name: str = "s", pool: ThreadPoolExecutor) -> bytes:
    """A whole saved session with random content, as the daemon writes it."""
    source = random.Random(seed)
    state = SessionContent(
        rows, tokens, source.randbytes(4 * tokens), source.randbytes(64 if rows else 0), source.randbytes(24)
    )
    header = SavedHeader(
        0, 5000, 4096, 64, 3, rows, tokens, len(state.commit), len(state.sampler), 0, "q8g64", bytes(range(32)), name
    )
    header = replace(header, file_bytes=header.size)
    pages = source.randbytes(header.page_count * STRIDE)
    with in_memory(pages) as memory, in_memory() as fd:
        places: list[Place] = [(memory, page * STRIDE) for page in range(header.page_count)]
        write(fd, header, state, places, pool, threading.Event(), lambda _done, _total: None)
        return os.pread(fd, header.size + 1, 0)


def read(data: bytes, pool: ThreadPoolExecutor) -> tuple[SavedHeader, SessionContent, bytes]:
    """What the daemon makes of the file; raises what it raises."""
    with in_memory(data) as fd, in_memory() as memory:
        saved = SavedFile(fd, "file")
        stride = saved.header.page_stride
        places: list[Place] = [(memory, page * stride) for page in range(saved.header.page_count)]
        saved.read_pages(places, pool, threading.Event(), lambda _done, _total: None)
        return saved.header, saved.content, os.pread(memory, saved.header.page_count * stride + 1, 0)


def read_page_by_page(data: bytes, pool: ThreadPoolExecutor, step: int = 2) -> list[bytes]:
    """What a lazy restore makes of a file's pages: bytes 0xEE for those that are refused. Raises what it raises."""
    with in_memory(data) as fd, in_memory() as memory:
        saved = SavedFile(fd, "file")
        count, stride = saved.header.page_count, saved.header.page_stride
        os.pwrite(memory, b"\xee" * (count * stride), 0)
        bad: list[int] = []
        for first in range(0, count, step):
            places: list[Place] = [(memory, page * stride) for page in range(first, min(first + step, count))]
            bad += saved.read_some(first, places, pool, threading.Event())
        pages = [os.pread(memory, stride, page * stride) for page in range(count)]
        assert bad == [page for page in range(count) if pages[page] == b"\xee" * stride], "a refused page was written"
        return pages


class Parts:
    """Where things are in a file, by its own header."""

    def __init__(self, data: bytes) -> None:
        fields = FIELDS.unpack_from(data, 24)
        self.page_bytes, self.rows, self.tokens, self.commit, self.sampler = fields[1], *fields[5:9]
        self.pages = -(-self.rows // 64)
        self.stride = -(-self.page_bytes // 4096) * 4096
        self.pages_at = 4096 + -(-(4 * self.tokens + self.commit + self.sampler) // 4096) * 4096
        self.sums_at = self.pages_at + self.pages * self.stride
        self.trailer_at = self.sums_at + 8 * self.pages
        self.end = self.trailer_at + 32

    def content(self, data: bytes) -> tuple[bytes, bytes, bytes, bytes]:
        """Tokens, commit payload, sampler's state, pages."""
        ends = 4096, 4096 + 4 * self.tokens, 4096 + 4 * self.tokens + self.commit
        sampler = data[ends[2] : ends[2] + self.sampler]
        return data[ends[0] : ends[1]], data[ends[1] : ends[2]], sampler, data[self.pages_at : self.sums_at]


def resealed(data: bytes) -> bytes:
    """``data`` with every checksum and the size recomputed, as far as its own header makes sense."""
    if len(data) < 4096:
        return data
    sealed = bytearray(data)
    struct.pack_into("<Q", sealed, 96, len(sealed))
    struct.pack_into("<Q", sealed, 16, xxhash.xxh3_64_intdigest(bytes(sealed[24:4096])))
    parts = Parts(bytes(sealed))
    if parts.end != len(sealed):
        return bytes(sealed)
    for page in range(parts.pages):
        start = parts.pages_at + page * parts.stride
        digest = xxhash.xxh3_64_intdigest(bytes(sealed[start : start + parts.stride]), seed=page)
        struct.pack_into("<Q", sealed, parts.sums_at + 8 * page, digest)
    covered = bytes(sealed[: parts.pages_at] + sealed[parts.sums_at : parts.trailer_at])
    sealed[parts.trailer_at :] = b"KVDTRAIL" + xxhash.xxh3_128(covered).digest() + struct.pack("<Q", len(sealed))
    return bytes(sealed)


def mutated(data: bytes, other: bytes, choice: random.Random) -> tuple[str, bytes]:
    """One way to damage ``data``; ``other`` is another session's file of the same shape."""
    parts = Parts(data)
    damaged = bytearray(data)
    kind = choice.choice(["bit", "byte", "field", "cut", "longer", "hole", "swap", "foreign page", "foreign block"])
    at = choice.randrange(len(data))
    if kind == "bit":
        damaged[at] ^= 1 << choice.randrange(8)
    elif kind == "byte":
        damaged[choice.choice([at, choice.randrange(280), parts.sums_at + at % (len(data) - parts.sums_at)])] ^= 0xFF
    elif kind == "field":
        value = choice.choice([0, 1, 63, 64, 65, 1 << 31, 1 << 40, (1 << 64) - 1, choice.getrandbits(16)])
        struct.pack_into("<Q", damaged, choice.randrange(8, 280, 8), value)
    elif kind == "cut":
        del damaged[at:]
    elif kind == "longer":
        damaged += choice.randbytes(choice.choice([1, 8, 4096]))
    elif kind == "hole":
        size = choice.choice([1, 512, 4096])
        damaged[at : at + size] = bytes(len(damaged[at : at + size]))
    elif kind == "swap":
        first, second = (parts.pages_at + page * parts.stride for page in choice.sample(range(parts.pages), 2))
        damaged[first : first + parts.stride] = data[second : second + parts.stride]
        damaged[second : second + parts.stride] = data[first : first + parts.stride]
    elif kind == "foreign page":
        start = parts.pages_at + choice.randrange(parts.pages) * parts.stride
        damaged[start : start + parts.stride] = other[start : start + parts.stride]
    else:
        start = at // 512 * 512
        damaged[start : start + 512] = other[start : start + 512]
    return kind, bytes(damaged)
