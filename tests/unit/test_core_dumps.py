"""Pages hold what people said: core dumps of the daemon and of workers are without them, and forked children too."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from compute.mapping import map_segment
from kvd.tiers.mapping import SharedMapping
from protocol.errors import OsFailure

NBYTES = 4 * mmap.PAGESIZE


@pytest.fixture
def segment() -> int:
    fd = os.memfd_create("kvd-test-dumps")
    os.ftruncate(fd, NBYTES)
    return fd


def flags() -> set[str]:
    """Of the one mapping of the segment, as the kernel names them (``VmFlags`` in proc_pid_smaps(5))."""
    maps = Path("/proc/self/smaps").read_text().split("kvd-test-dumps", 1)[1]
    return set(maps.split("VmFlags:", 1)[1].splitlines()[0].split())


def test_a_plain_mapping_would_be_dumped(segment: int) -> None:
    with mmap.mmap(segment, NBYTES):
        assert not flags() & {"dd", "dc"}
    os.close(segment)


def test_the_daemon_s_mappings(segment: int) -> None:
    with SharedMapping(segment, NBYTES):
        assert "dd" in flags()
    os.close(segment)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_worker_s_mappings(segment: int, read_only: bool) -> None:
    with map_segment(segment, NBYTES, read_only=read_only):
        assert {"dd", "dc"} <= flags()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(segment)


def test_a_mapping_that_cannot_be_made_closes_the_descriptor(segment: int) -> None:
    with pytest.raises(OsFailure, match=f"cannot map {2 * NBYTES} bytes"):
        map_segment(segment, 2 * NBYTES)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(segment)
