"""How fast this host really copies, in a few seconds: ``kvd doctor --bench``. GPUs: `kvd.doctor.bench_cuda`."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from kvd.tiers.segment import create_segments
from protocol.layout import round_up

_PART = 128 << 20
"""Bytes that each thread copies at once: more than its share of any cache."""
_REPEATS = 5
_MOST_THREADS = 32
_HUGE_PAGE = 2 << 20


@dataclass(frozen=True)
class Rate:
    """One measured rate, in bytes per second.

    ``floor`` is what the hardware could give, None where that is not known; ``fits`` whether the rate is as near to it
    as on a sound machine.
    """

    case: str
    value: float
    note: str
    floor: float | None = None
    fits: bool | None = None


def host_rates() -> list[Rate]:
    """First touch of shared memory, and copies within it by one thread and by all.

    Takes 256 MiB for each processor, at most 8 GiB, for a second or two. Raises `OutOfCapacity` without that much.
    """
    threads = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
    nbytes = 2 * _PART * threads
    begin = time.perf_counter()
    with host_memory(nbytes, threads) as address:
        touch = nbytes / (time.perf_counter() - begin)
        alone = max(_copy(address, 1) for _ in range(_REPEATS))
        together = max(_copy(address, threads) for _ in range(_REPEATS))
    return [
        Rate(f"first touch of shared memory, {threads} threads", touch, "what a start of the daemon takes"),
        Rate("copy within host RAM, 1 thread", alone, "each byte is read and written"),
        Rate(f"copy within host RAM, {threads} threads", together, "each byte is read and written"),
    ]


@contextmanager
def host_memory(nbytes: int, threads: int) -> Iterator[int]:
    """The address of ``nbytes`` of shared memory, made just as the daemon makes its own; it goes afterwards."""
    size = round_up(nbytes, _HUGE_PAGE)
    [segment] = create_segments([f"/kvd-doctor-{os.getpid()}"], size, threads=threads)
    try:
        with segment.map() as mapping:
            yield mapping.address
    finally:
        segment.destroy()


def _copy(address: int, threads: int) -> float:
    """Bytes per second of ``threads`` threads, each copying a part of its own to another."""

    def copy(part: int) -> None:
        start = address + 2 * part * _PART
        ctypes.memmove(start + _PART, start, _PART)

    with ThreadPoolExecutor(threads, thread_name_prefix="bench") as workers:
        list(workers.map(time.sleep, [0.001] * threads))  # all of them are there before the clock starts
        begin = time.perf_counter()
        list(workers.map(copy, range(threads)))
        return threads * _PART / (time.perf_counter() - begin)
