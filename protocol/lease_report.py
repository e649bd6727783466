"""The report block: what a worker says of itself that no session's state has. One for each lease.

The daemon makes it, 4 KiB that nobody can cut; the worker maps it and stores words, which costs no call and waits for
no device. The daemon reads it with ``pread`` and believes no number that makes no sense. SPEC.md has every offset.
"""

from __future__ import annotations

import struct
import time
from bisect import bisect_left
from dataclasses import dataclass

REPORT_MAGIC = b"KVDREPRT"
REPORT_VERSION = 1
REPORT_BYTES = 4096
DEVICE_BYTES = 64

GAP_BOUNDS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
"""Upper bounds of the classes of token gaps; one more class has those above."""
STALLS_KEPT = 64

STALL_FACTOR = 5
"""A gap this many times as long as is usual for the worker is a stall."""
GAPS_BEFORE_STALLS = 16
"""Gaps that say what is usual."""

_HEADER = struct.Struct("<8sI4x")
_DEVICE = 64
_MEMORY = 128
_GAP_SUM, _GAP_LONGEST, _STALLS = 192, 200, 208
_BUCKETS = 256
_STALL_RING = 1024
_BUCKET_COUNT = len(GAP_BOUNDS_MS) + 1
_BOUNDS_NS = [1_000_000 * bound for bound in GAP_BOUNDS_MS]
_LARGEST = 1 << 62
"""A number above this is not one that a worker can mean."""


@dataclass(frozen=True)
class Stall:
    """A gap that was much longer than usual: when it ended, in ns since 1970, and its length in ns."""

    end_ns: int
    gap_ns: int


@dataclass(frozen=True)
class LeaseReport:
    """What the block says. Memory is bytes, None where it was not published; gaps are those between tokens, in ns.

    ``buckets`` counts gaps by `GAP_BOUNDS_MS`; ``stalls`` is how many there were, ``latest`` the newest of them,
    oldest first.
    """

    device: str = ""
    torch_reserved: int | None = None
    context: int | None = None
    gap_sum_ns: int = 0
    gap_longest_ns: int = 0
    buckets: tuple[int, ...] = (0,) * _BUCKET_COUNT
    stalls: int = 0
    latest: tuple[Stall, ...] = ()

    @property
    def gaps(self) -> int:
        return sum(self.buckets)


def pack_report_header() -> bytes:
    """What the daemon writes at the start of a new block."""
    return _HEADER.pack(REPORT_MAGIC, REPORT_VERSION)


def unpack_report(data: bytes) -> LeaseReport:
    """What a block says; an empty report if it is not one, or says what cannot be."""
    if len(data) < REPORT_BYTES or data[: _HEADER.size] != pack_report_header():
        return LeaseReport()
    reserved, context = struct.unpack_from("<2Q", data, _MEMORY)
    total, longest, stalls = struct.unpack_from("<3Q", data, _GAP_SUM)
    buckets = struct.unpack_from(f"<{_BUCKET_COUNT}Q", data, _BUCKETS)
    ring = struct.unpack_from(f"<{2 * STALLS_KEPT}Q", data, _STALL_RING)
    device = data[_DEVICE : _DEVICE + DEVICE_BYTES].rstrip(b"\0").decode(errors="replace")
    if max(reserved, context, total, longest, stalls, *buckets, *ring) > _LARGEST or not (device + "x").isprintable():
        return LeaseReport()
    kept = range(max(0, stalls - STALLS_KEPT), stalls)
    latest = tuple(Stall(*ring[2 * (n % STALLS_KEPT) : 2 * (n % STALLS_KEPT) + 2]) for n in kept)
    # Bytes are stored with one added, so that a block nobody has written to says nothing.
    torch_reserved, own = (value - 1 if value else None for value in (reserved, context))
    return LeaseReport(device, torch_reserved, own, total, longest, buckets, stalls, latest)


class ReportWriter:
    """A worker's own view of its block: a writable mapping of `REPORT_BYTES`. One thread calls `gap`."""

    def __init__(self, buffer: memoryview) -> None:
        self._bytes = buffer
        self._words = buffer.cast("Q")
        self._usual_ns = 0.0
        self._gaps = 0

    def memory(self, device: str, torch_reserved: int, context: int | None) -> None:
        """Publish bytes of ``device`` that this process has beside the daemon's: torch's, and its context's."""
        self._bytes[_DEVICE : _DEVICE + DEVICE_BYTES] = device.encode()[:DEVICE_BYTES].ljust(DEVICE_BYTES, b"\0")
        self._words[_MEMORY // 8 + 1] = 0 if context is None else context + 1
        self._words[_MEMORY // 8] = torch_reserved + 1

    def gap(self, nanoseconds: int) -> None:
        """Count the time from one token to the next, and mark it if it is a stall."""
        words = self._words
        words[_GAP_SUM // 8] += nanoseconds
        words[_BUCKETS // 8 + bisect_left(_BOUNDS_NS, nanoseconds)] += 1
        if nanoseconds > words[_GAP_LONGEST // 8]:
            words[_GAP_LONGEST // 8] = nanoseconds
        self._gaps += 1
        if self._gaps > GAPS_BEFORE_STALLS and nanoseconds > STALL_FACTOR * self._usual_ns:
            self._stall(nanoseconds)
        self._learn(nanoseconds)

    def _stall(self, nanoseconds: int) -> None:
        stalls = self._words[_STALLS // 8]
        at = _STALL_RING // 8 + 2 * (stalls % STALLS_KEPT)
        self._words[at] = time.time_ns()
        self._words[at + 1] = nanoseconds
        self._words[_STALLS // 8] = stalls + 1

    def _learn(self, nanoseconds: int) -> None:
        """Move what is usual towards the median: by a step that no single gap, however long, makes larger."""
        if self._gaps <= 1:
            self._usual_ns = float(nanoseconds)
        elif nanoseconds > self._usual_ns:
            self._usual_ns *= 1.05
        else:
            self._usual_ns /= 1.05
