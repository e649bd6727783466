"""What the daemon costs: round trips, sessions, memory, its start, a scrape.

Runs against daemons of its own on the device ``cpu``, on the cores that it shares with them. The floor of a round trip
is that of messages of the same sizes between two processes over ZeroMQ, asked for in the same way; that of a start is
populating as much memory in the same way, in this process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator

from benchmarks.daemon_world import Askers, Echo, daemon
from benchmarks.report import Report, Row, cpu_name
from benchmarks.timing import percentile
from compute.client import Client
from kvd.tiers.segment import create_segments
from protocol.layout import Q8G64
from protocol.model import GLM_5_3

GIB = 1 << 30
CLIENTS = 64
SESSIONS = 1000
PRINT = bytes(32)
PAGE_BYTES = GLM_5_3.page_format(Q8G64, mtp=True).payload_bytes


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``kvd-bench daemon``."""
    parser.add_argument("--gib", type=int, default=16, help="GiB of host RAM that a start takes (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of asking for statistics (default %(default)s)")


def run(arguments: argparse.Namespace) -> Report:
    """All cases, or those that ``--only`` names."""
    rows: list[Row] = []
    cases: dict[str, Callable[[], Iterator[Row]]] = {
        "stat": lambda: _stats(arguments.seconds),
        "session": _sessions,
        "memory scrape": _many_sessions,
        "start": lambda: _start(arguments.gib),
    }
    for names, measure in cases.items():
        if arguments.only in names:
            rows += measure()
    settings = {
        "gib": arguments.gib,
        "seconds": arguments.seconds,
        "clients": CLIENTS,
        "sessions": SESSIONS,
        "cpus": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "real_time_priority": os.sched_getparam(0).sched_priority,
    }
    return Report("daemon", cpu_name(), settings, rows)


def _stats(seconds: float) -> Iterator[Row]:
    with daemon(**_small()) as running:
        running.client().close()
        askers = Askers(running.run_dir, CLIENTS)
        with Echo(askers.reply_bytes) as echo:
            times, floors = _ask_in_turns(askers, echo, seconds)
        for words, value, floor, goal in (
            ("p50", statistics.median(times), statistics.median(floors), None),
            ("p99", percentile(times, 99), percentile(floors, 99), 300.0),
        ):
            case = f"stat, {CLIENTS} clients, each 10 a second, {words}"
            yield Row(case, 1e6 * value, "µs", floor=1e6 * floor, goal=goal)
        burst: list[float] = []
        rounds = 100
        started, before = time.perf_counter(), running.cpu_seconds()
        for _ in range(rounds):
            begun = time.perf_counter()
            for index in range(CLIENTS):
                askers.ask(index)
            for index in range(CLIENTS):
                askers.sockets[index].recv()
                burst.append(time.perf_counter() - begun)
        took = time.perf_counter() - started
        yield Row(f"stat, all {CLIENTS} at the same moment, p99", 1e6 * percentile(burst, 99), "µs")
        cpu = (running.cpu_seconds() - before) / (rounds * CLIENTS)
        yield Row(f"stat, all {CLIENTS} at the same moment, rate", rounds * CLIENTS / took, "1/s")
        yield Row("stat, CPU time of the daemon", 1e6 * cpu, "µs")
        askers.close()


def _ask_in_turns(askers: Askers, echo: Echo, seconds: float) -> tuple[list[float], list[float]]:
    """Seconds of round trips, ten a second for each client, and of as many echoes between them."""
    times: list[float] = []
    floors: list[float] = []
    pause = 1 / (20 * CLIENTS)
    due = time.perf_counter()
    end = due + seconds
    while due < end:
        for ask, into in ((lambda: askers.round_trip(len(times) % CLIENTS), times), (echo.round_trip, floors)):
            time.sleep(max(0.0, due - time.perf_counter()))
            into.append(ask())
            due = max(due + pause, time.perf_counter())
    return times, floors


def _sessions() -> Iterator[Row]:
    """Create, extend by 16 pages, close."""
    for tokens, words, goals in ((50_000, "50K", (2.0, 1000.0)), (1 << 20, "1M", (None, None))):
        with daemon(**_small()) as running, running.client() as client:
            times = [_one_session(client, f"s{number}", tokens) for number in range(50)]
            times = []
            started, before = time.perf_counter(), running.cpu_seconds()
            while len(times) < 3000 and time.perf_counter() - started < 10:
                times.append(_one_session(client, f"t{len(times)}", tokens))
            took = time.perf_counter() - started
            cpu = (running.cpu_seconds() - before) / len(times)
        case = f"create, extend and close a session of {words} tokens"
        yield Row(f"{case}, p50", 1e3 * statistics.median(times), "ms")
        yield Row(f"{case}, p99", 1e3 * percentile(times, 99), "ms", goal=goals[0])
        yield Row(f"{case}, rate", len(times) / took, "1/s", goal=goals[1])
        yield Row(f"{case}, CPU time of the daemon", 1e3 * cpu, "ms")


def _one_session(client: Client, name: str, tokens: int) -> float:
    started = time.perf_counter()
    opened = client.create_session(
        name, fingerprint=PRINT, encoding="q8g64", page_bytes=PAGE_BYTES, token_capacity=tokens, commit_bytes=24_576
    )
    client.extend_session(opened.session, opened.generation, 16)
    client.close_session(opened.session, opened.generation)
    return time.perf_counter() - started


def _many_sessions() -> Iterator[Row]:
    """Resident memory and scrapes with a thousand sessions, of 16 pages each, held by one worker."""
    with daemon(**_small() | {"host-state-capacity": "1GiB"}) as running, running.client() as client:
        empty = running.resident_bytes()
        for number in range(SESSIONS):
            opened = client.create_session(
                f"chat-{number}",
                fingerprint=PRINT,
                encoding="q8g64",
                page_bytes=4096,
                token_capacity=50_000,
                commit_bytes=24_576,
            )
            client.extend_session(opened.session, opened.generation, 16)
            os.close(client.claim(opened.worker_block))
        client.stat()
        scrapes = []
        for _ in range(20):
            time.sleep(1.05)  # a younger snapshot is served again
            taken, nbytes = running.scrape()
            scrapes.append(taken)
        again = statistics.median(running.scrape()[0] for _ in range(20))
        yield Row("daemon without sessions, RssAnon + RssFile", empty / (1 << 20), "MiB")
        yield Row(
            f"daemon with {SESSIONS:,} sessions, RssAnon + RssFile",
            running.resident_bytes() / (1 << 20),
            "MiB",
            goal=150.0,
        )
        yield Row(f"scrape with {SESSIONS:,} sessions, median", 1e3 * statistics.median(scrapes), "ms")
        yield Row(f"scrape with {SESSIONS:,} sessions, worst of 20", 1e3 * max(scrapes), "ms", goal=50.0)
        yield Row(f"scrape with {SESSIONS:,} sessions, snapshot still fresh", 1e3 * again, "ms")
        yield Row("scrape, size", nbytes / 1024, "KiB")


def _start(gib: int) -> Iterator[Row]:
    """Start to ready, beside populating as many extents in this process; the two in turns."""
    floors, starts = [], []
    for _ in range(2):
        began = time.perf_counter()
        segments = create_segments(
            [f"/kvd-bench-{os.getpid()}-e{number}" for number in range(gib)], GIB, threads=len(os.sched_getaffinity(0))
        )
        floors.append(time.perf_counter() - began)
        for segment in segments:
            segment.destroy()
        with daemon(**{"host-capacity": f"{gib}GiB", "host-extent": "1GiB"}) as running:
            running.client().close()
            starts.append(time.perf_counter() - running.started)
    floor = min(floors)
    yield Row(f"start to ready with {gib} GiB of host RAM", min(starts), "s", floor=floor, goal=floor + 1)
    yield Row(f"start, first touch of {gib} GiB, rate", gib * GIB / floor / 1e9, "GB/s")


def _small() -> dict[str, str]:
    return {"host-capacity": "256MiB", "host-extent": "64MiB", "vram-capacity": "64MiB"}
