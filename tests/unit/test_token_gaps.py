"""What workers report of the time between tokens: the block, the totals, and the suspects of a stall."""

from __future__ import annotations

import os
import random
import struct
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvd.metrics.stall_watch import StallWatch
from kvd.metrics.token_gaps import TokenGaps, gap_quantile_s
from kvd.report_block import ReportBlock
from protocol.lease_report import (
    GAP_BOUNDS_MS,
    GAPS_BEFORE_STALLS,
    REPORT_BYTES,
    STALLS_KEPT,
    LeaseReport,
    ReportWriter,
    pack_report_header,
    unpack_report,
)

MS = 1_000_000


def new_block() -> bytearray:
    data = bytearray(REPORT_BYTES)
    data[:16] = pack_report_header()
    return data


def test_a_new_block_says_nothing() -> None:
    assert unpack_report(bytes(new_block())) == LeaseReport()


def test_memory_is_known_or_not() -> None:
    data = new_block()
    writer = ReportWriter(memoryview(data))
    writer.memory("cpu", 0, None)
    report = unpack_report(bytes(data))
    assert (report.device, report.torch_reserved, report.context) == ("cpu", 0, None)
    writer.memory("cpu", 5, 0)
    report = unpack_report(bytes(data))
    assert (report.torch_reserved, report.context) == (5, 0)


def test_gaps_are_counted_by_their_length() -> None:
    data = new_block()
    writer = ReportWriter(memoryview(data))
    lengths = [MS, MS + 1, 2 * MS, 5000 * MS, 5000 * MS + 1, 0]
    for length in lengths:
        writer.gap(length)
    report = unpack_report(bytes(data))
    assert report.buckets == (2, 2, *[0] * 9, 1, 1)
    assert (report.gaps, report.gap_sum_ns, report.gap_longest_ns) == (6, sum(lengths), 5000 * MS + 1)
    assert gap_quantile_s(report, 0.5) == 0.002
    assert gap_quantile_s(report, 0.99) == 5.000000001
    assert gap_quantile_s(LeaseReport(), 0.5) == 0.0


def test_a_stall_is_a_gap_much_longer_than_usual() -> None:
    data = new_block()
    writer = ReportWriter(memoryview(data))
    lengths = random.Random(1)
    for _ in range(GAPS_BEFORE_STALLS):
        writer.gap(1000 * MS)  # at first nobody knows what is usual
    for _ in range(400):
        writer.gap(lengths.randrange(8 * MS, 16 * MS))
    assert unpack_report(bytes(data)).stalls == 0, "what is usual falls as it must, and no stall is seen in it"
    before = time.time_ns()
    writer.gap(200 * MS)
    [stall] = unpack_report(bytes(data)).latest
    assert stall.gap_ns == 200 * MS
    assert before <= stall.end_ns <= time.time_ns()
    writer.gap(12 * MS)
    assert unpack_report(bytes(data)).stalls == 1


def test_the_latest_stalls_are_kept() -> None:
    data = new_block()
    writer = ReportWriter(memoryview(data))
    for _ in range(500):
        writer.gap(10 * MS)
    for number in range(STALLS_KEPT + 6):
        writer.gap((1000 + number) * MS)
        for _ in range(3):
            writer.gap(10 * MS)
    report = unpack_report(bytes(data))
    assert report.stalls == STALLS_KEPT + 6
    assert [stall.gap_ns // MS for stall in report.latest] == [1006 + number for number in range(STALLS_KEPT)]


def test_whatever_a_worker_writes_is_read() -> None:
    noise = random.Random(2)
    for _ in range(500):
        data = bytearray(noise.randbytes(REPORT_BYTES))
        if noise.random() < 0.7:
            data[:16] = pack_report_header()
        unpack_report(bytes(data))
    assert unpack_report(b"") == LeaseReport()
    data = new_block()
    struct.pack_into("<Q", data, 192, 1 << 63)
    assert unpack_report(bytes(data)) == LeaseReport()
    data = new_block()
    data[64:67] = b"a\x1bb"
    assert unpack_report(bytes(data)) == LeaseReport()


def test_the_block_cannot_be_cut_or_grown() -> None:
    block = ReportBlock()
    fd = block.open()
    try:
        for size in (0, REPORT_BYTES - 1, REPORT_BYTES + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        os.pwrite(fd, b"x" * REPORT_BYTES, 0)
        assert block.read() == LeaseReport()
    finally:
        os.close(fd)
        block.close()


class Reporter:
    """A lease with a block, and its worker."""

    def __init__(self, number: int) -> None:
        self.data = new_block()
        self.writer = ReportWriter(memoryview(self.data))
        self.lease: Any = SimpleNamespace(
            number=number, report=SimpleNamespace(read=lambda: unpack_report(bytes(self.data)))
        )

    def usual(self) -> None:
        for _ in range(50):
            self.writer.gap(10 * MS)


def test_totals_keep_the_shares_of_leases_that_ended() -> None:
    gaps, one, two = TokenGaps(), Reporter(1), Reporter(2)
    silent: Any = SimpleNamespace(number=3, report=None)
    one.writer.gap(3 * MS)
    two.writer.gap(3 * MS)
    two.writer.gap(30 * MS)
    gaps.look([one.lease, two.lease, silent])
    counts, seconds = gaps.totals()
    assert dict(zip(GAP_BOUNDS_MS, counts, strict=False)) | {5: 2, 50: 1} == dict(
        zip(GAP_BOUNDS_MS, counts, strict=False)
    )
    assert sum(counts) == 3
    assert seconds == pytest.approx(0.036)
    two.writer.gap(30 * MS)
    gaps.lease_ended(two.lease)  # with what it wrote since the last look
    gaps.lease_ended(silent)
    assert gaps.report(2) == LeaseReport()
    counts, seconds = gaps.totals()
    assert sum(counts) == 4
    assert seconds == pytest.approx(0.066)


def test_a_stall_waits_for_the_watch_and_has_the_kinds_that_overlap_it(tmp_path: Path) -> None:
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("compact_stall 0\nthp_split_page 0\n")
    gaps, worker = TokenGaps(), Reporter(7)
    gaps.watch = watch = StallWatch(vmstat)
    worker.usual()
    worker.writer.gap(500 * MS)
    gaps.look([worker.lease])
    assert not gaps.recent, "nobody has looked since it ended"
    vmstat.write_text("compact_stall 5\nthp_split_page 0\n")
    watch.look()
    gaps.look([worker.lease])
    [stall] = gaps.recent
    assert (stall.lease, stall.gap_s, stall.suspects) == (7, 0.5, ["compaction"])
    time.sleep(0.02)
    worker.writer.gap(100 * MS)  # its gap, as it says, begins before the compaction was over
    watch.look()
    gaps.look([worker.lease])
    assert gaps.recent[-1].suspects == ["compaction"]
    time.sleep(0.2)
    watch.look()
    worker.writer.gap(60 * MS)
    watch.look()
    gaps.look([worker.lease])
    assert gaps.recent[-1].suspects == []
    assert +gaps.stalls == {"compaction": 2, "none": 1}


def test_without_a_watch_nobody_knows() -> None:
    gaps, worker = TokenGaps(), Reporter(7)
    worker.usual()
    worker.writer.gap(500 * MS)
    gaps.look([worker.lease])
    gaps.look([worker.lease])
    assert [stall.suspects for stall in gaps.recent] == [["unwatched"]]
