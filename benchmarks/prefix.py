"""``kvd-bench prefix``: the block store of a real daemon beside memcpy into shared memory, on this machine.

A chain of keys is looked up; blocks are put (reserved, copied to, published) and got (pinned, copied from, released) by
one process and by eight at once. The store has room for what is put in one round: the first round takes memory that
nobody used before; then every process maps all of it, as it has after a while, and later rounds evict the blocks of the
round before. The floors are the same copies of the same sizes, in the same run and by as many processes, into shared
memory that was touched before (warm) and that was not (fresh).
"""

from __future__ import annotations

import argparse
import hashlib
import mmap
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path

from benchmarks.daemon_world import daemon
from benchmarks.report import Report, Row, cpu_name
from benchmarks.timing import percentile, timed
from compute.block_store import BlockStore
from kvd.alloc.sizes import require_multiple
from protocol.block_messages import KEY_BYTES

KIB, MIB = 1 << 10, 1 << 20
LOOKUP_GOALS_MS = {1024: 1.0, 16384: 8.0}
BLOCKS = (64 * KIB, 256 * KIB, MIB, 4 * MIB)
CLIENTS = (1, 8)
SHARE = 0.85
"""Of memcpy, the goal."""

BATCH_BYTES = 64 * MIB
"""What is reserved, copied and published, or pinned, copied and released, at a time: 512 tokens of 128 KiB."""
SPAN_BYTES = 16 * MIB
"""Of a client's own memory that is copied from and to, again and again."""

PHASES = {
    "fresh": "memcpy into fresh shared memory",
    "first put": "put, first use of its memory",
    "warm": "memcpy into warm shared memory",
    "put": "put",
    "read": "memcpy from warm shared memory",
    "get": "get",
}
"""What a client does, and its row: the first two once, the others in every round."""
ONCE = 2
BESIDE = {"first put": "fresh", "put": "warm", "get": "read"}
TIMEOUT_S = 300.0
"""Longest that a client waits for the others to begin."""

Timing = tuple[str, int, float, float]
"""Phase, round, begin and end in seconds of the machine's monotonic clock."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mib", type=int, default=256, help="MiB that each client puts and gets in a round (256)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, of which the median counts (3)")
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS, help="numbers of clients (1 8)")
    parser.add_argument("--lookups", type=int, default=1000, help="look-ups of each chain (1000)")


def run(arguments: argparse.Namespace) -> Report:
    """All rows, each against a daemon of its own."""
    require_multiple("MiB of a client in a round", arguments.mib, BATCH_BYTES // MIB)
    settings = {name: getattr(arguments, name) for name in ("mib", "rounds", "clients", "lookups")}
    report = Report("prefix", cpu_name(), settings | {"cores": os.cpu_count(), "load before": os.getloadavg()})
    for measure, cases in _measures(arguments):
        if any(arguments.only in case for case in cases):
            report.rows += [row for row in measure() if arguments.only in row.case]
    report.settings = {**report.settings, "load after": os.getloadavg()}
    return report


def _measures(arguments: argparse.Namespace) -> Iterator[tuple[Callable[[], Iterator[Row]], list[str]]]:
    """What can be measured apart from the rest, and the cases of each."""
    for count in LOOKUP_GOALS_MS:
        yield partial(_lookups, count, arguments.lookups), [_lookup(count, part) for part in ("p50", "p99")]
    for clients in arguments.clients:
        for nbytes in BLOCKS:
            what = f"{nbytes // KIB} KiB blocks, {clients} client{'s' if clients > 1 else ''}"
            measure = partial(_copies, what, clients, nbytes, arguments.mib * MIB, arguments.rounds)
            yield measure, [f"{case}, {what}" for case in PHASES.values()]


@contextmanager
def _run_dir(nbytes: int) -> Iterator[Path]:
    """Of a daemon that is ready and has as much host RAM."""
    sizes = {"host-capacity": f"{nbytes // MIB}MiB", "host-extent": "64MiB", "vram-capacity": "2MiB"}
    with daemon(**sizes) as running:
        running.client().close()
        yield running.run_dir


def _lookup(count: int, part: str) -> str:
    return f"look-up of a chain of {count:,} blocks, {part}"


def _lookups(count: int, repeats: int) -> Iterator[Row]:
    with (
        _run_dir(BATCH_BYTES) as run_dir,
        BlockStore(run_dir, fingerprint=bytes(32), block_bytes=4096, timeout_s=60) as store,
    ):
        keys = [os.urandom(KEY_BYTES) for _ in range(count)]
        with store.reserve(keys) as reservation:
            reservation.publish()
        times = [timed(partial(store.find, keys)) for _ in range(repeats)]
    yield Row(_lookup(count, "p50"), 1e3 * statistics.median(times), "ms")
    yield Row(_lookup(count, "p99"), 1e3 * percentile(times, 99), "ms", goal=LOOKUP_GOALS_MS[count])


def _copies(what: str, clients: int, nbytes: int, total: int, rounds: int) -> Iterator[Row]:
    """Put and get beside memcpy. GB/s of all clients together, by the wall time of the slowest."""
    print(what, file=sys.stderr, flush=True)
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(clients, timeout=TIMEOUT_S)
    timings: list[Timing] = []
    with (
        _run_dir(clients * total) as run_dir,
        ProcessPoolExecutor(clients, context, initializer=_begin_together, initargs=(barrier,)) as pool,
    ):
        work = [pool.submit(_client, run_dir, nbytes, total, rounds, number, clients) for number in range(clients)]
        for one in work:
            timings += one.result()
    speed = {}
    for phase in PHASES:
        spans: dict[int, list[float]] = {}
        for name, number, begin, end in timings:
            if name == phase:
                spans.setdefault(number, []).extend((begin, end))
        wall = statistics.median(max(span) - min(span) for span in spans.values())
        speed[phase] = clients * total / wall / 1e9
    for phase, case in PHASES.items():
        floor = speed.get(BESIDE.get(phase, ""))
        goal = SHARE * floor if floor and phase != "first put" else None
        yield Row(f"{case}, {what}", speed[phase], "GB/s", floor=floor, goal=goal)


_together: Barrier


def _begin_together(barrier: Barrier) -> None:
    global _together
    _together = barrier


def _client(run_dir: Path, nbytes: int, total: int, rounds: int, client: int, clients: int) -> list[Timing]:
    """One client of several: the phases of every round, each begun by all of them together."""
    source = memoryview(bytearray(os.urandom(MIB) * (SPAN_BYTES // MIB)))
    sink = memoryview(bytearray(SPAN_BYTES))
    plain = _shared_memory(total)
    timings: list[Timing] = []
    with BlockStore(run_dir, fingerprint=bytes(32), block_bytes=nbytes, timeout_s=60) as store:
        for number in range(rounds + 1):
            keys = _batches(client, number, nbytes, total)
            copy_in = partial(_copy_in, plain, source, nbytes, total)
            put = partial(_put, store, keys, source, nbytes)
            steps: dict[str, Callable[[], None]] = {
                "fresh": copy_in,
                "first put": put,
                "warm": copy_in,
                "put": put,
                "read": partial(_copy_out, plain, sink, nbytes, total),
                "get": partial(_get, store, keys, sink, nbytes),
            }
            for name in list(PHASES)[ONCE:] if number else list(PHASES)[:ONCE]:
                store.wait_mapped()
                _together.wait()
                begin = time.monotonic()
                steps[name]()
                timings.append((name, number, begin, time.monotonic()))
            if not number:
                _together.wait()
                for batch in (batch for each in range(clients) for batch in _batches(each, 0, nbytes, total)):
                    with store.pin(batch):
                        pass
    return timings


def _batches(client: int, number: int, nbytes: int, total: int) -> list[list[bytes]]:
    """The keys that ``client`` puts in a round, as they are put at a time."""
    names = [f"{client} {number} {index}".encode() for index in range(total // nbytes)]
    keys = [hashlib.sha256(name).digest() for name in names]
    each = BATCH_BYTES // nbytes
    return [keys[first : first + each] for first in range(0, len(keys), each)]


def _shared_memory(nbytes: int) -> memoryview:
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(nbytes)
        return memoryview(mmap.mmap(file.fileno(), nbytes))


def _copy_in(target: memoryview, source: memoryview, nbytes: int, total: int) -> None:
    for at in range(0, total, nbytes):
        start = at % SPAN_BYTES
        target[at : at + nbytes] = source[start : start + nbytes]


def _copy_out(source: memoryview, sink: memoryview, nbytes: int, total: int) -> None:
    for at in range(0, total, nbytes):
        start = at % SPAN_BYTES
        sink[start : start + nbytes] = source[at : at + nbytes]


def _put(store: BlockStore, batches: list[list[bytes]], source: memoryview, nbytes: int) -> None:
    for reservation in store.reserve_each(batches):
        for index, view in enumerate(reservation.views):
            start = index * nbytes % SPAN_BYTES
            view[:] = source[start : start + nbytes]
        reservation.publish()


def _get(store: BlockStore, batches: list[list[bytes]], sink: memoryview, nbytes: int) -> None:
    for pinned in store.pin_each(batches):
        assert pinned.is_whole, "of what was put nothing may be missing, or it was no get"
        for index, view in enumerate(pinned.views):
            start = index * nbytes % SPAN_BYTES
            sink[start : start + nbytes] = view
