"""The stall watch on a ``/proc/vmstat`` of our own."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvd.metrics.stall_watch import EVENTS, REMEMBERED_BURSTS, VMSTAT, StallWatch
from protocol.errors import OsFailure


def write(path: Path, **counters: int) -> None:
    path.write_text("".join(f"{name} {count}\n" for name, count in {"nr_free_pages": 5, **counters}.items()))


def test_what_happened_since_the_start_is_counted(tmp_path: Path) -> None:
    vmstat = tmp_path / "vmstat"
    write(vmstat, compact_stall=100, numa_pages_migrated=7, thp_split_page=0)
    watch = StallWatch(vmstat)
    assert watch.counts() == {
        ("compaction", "compact_stall"): 0,
        ("numa_migration", "numa_pages_migrated"): 0,
        ("thp_split", "thp_split_page"): 0,
    }
    write(vmstat, compact_stall=103, numa_pages_migrated=7, thp_split_page=0)
    watch.look()
    write(vmstat, compact_stall=104, numa_pages_migrated=17, thp_split_page=0)
    watch.look()
    watch.look()
    assert watch.counts() == {
        ("compaction", "compact_stall"): 4,
        ("numa_migration", "numa_pages_migrated"): 10,
        ("thp_split", "thp_split_page"): 0,
    }
    assert [(burst.kind, burst.events) for burst in watch.bursts] == [
        ("compaction", 3),
        ("compaction", 1),
        ("numa_migration", 10),
    ]
    assert sorted(burst.time for burst in watch.bursts) == [burst.time for burst in watch.bursts]


def test_only_the_latest_bursts_are_remembered(tmp_path: Path) -> None:
    vmstat = tmp_path / "vmstat"
    write(vmstat, compact_stall=0)
    watch = StallWatch(vmstat)
    for count in range(1, REMEMBERED_BURSTS + 10):
        write(vmstat, compact_stall=count)
        watch.look()
    assert len(watch.bursts) == REMEMBERED_BURSTS
    assert watch.counts() == {("compaction", "compact_stall"): REMEMBERED_BURSTS + 9}


def test_this_kernel_has_each_kind_of_event_that_it_was_built_with() -> None:
    known = {line.split()[0] for line in VMSTAT.read_text().splitlines()}
    counts = StallWatch().counts()
    assert {event for _, event in counts} == {name for names in EVENTS.values() for name in names} & known
    assert set(counts.values()) == {0}


def test_no_vmstat(tmp_path: Path) -> None:
    with pytest.raises(OsFailure, match=r"reading .*vmstat: No such file"):
        StallWatch(tmp_path / "vmstat")
