"""How snapshots get from the loop to those who ask, and where metrics may be served."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest

from kvd.blocks.model import Counts
from kvd.metrics import server as metrics_server
from kvd.metrics.counters import Counters
from kvd.metrics.exporter import Snapshot
from kvd.metrics.server import Exchange, Unavailable
from kvd.settings import LocalAddress
from protocol.stats import STATS_SCHEMA, NodeStats

STATS = NodeStats(STATS_SCHEMA, "1", 2, 3, 4.0, False, "balanced", [], [], [])


class Loop:
    """Answers in a thread, as the daemon's loop does, ``delay_s`` after it was woken; counts the snapshots."""

    def __init__(self, exchange: Exchange, delay_s: float) -> None:
        self.taken = 0
        self._exchange = exchange
        self._delay_s = delay_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        exchange.open(self._take)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _take(self) -> Snapshot:
        self.taken += 1
        return Snapshot(STATS, Counters(), {}, {}, {}, [], 0.0, {}, asdict(Counts()), 0.0)

    def _run(self) -> None:
        while not self._stop.wait(self._delay_s):
            try:
                self._exchange.answer()
            except BlockingIOError:
                continue


@pytest.fixture
def exchange() -> Iterator[Exchange]:
    exchange = Exchange()
    yield exchange
    exchange.close()


@pytest.fixture
def loop(exchange: Exchange) -> Iterator[Callable[[float], Loop]]:
    started: list[Loop] = []

    def start(delay_s: float) -> Loop:
        started.append(Loop(exchange, delay_s))
        return started[-1]

    yield start
    for running in started:
        running.close()


def test_before_the_loop_runs_there_is_nothing(exchange: Exchange) -> None:
    with pytest.raises(Unavailable, match="starting"):
        exchange.snapshot()


def test_many_who_ask_at_once_share_a_snapshot(exchange: Exchange, loop: Callable[[float], Loop]) -> None:
    running = loop(0.01)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: exchange.snapshot(), range(200)))
    assert len({id(snapshot) for snapshot in found}) == running.taken <= 2


def test_a_snapshot_grows_old(
    exchange: Exchange, loop: Callable[[float], Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = loop(0.001)
    monkeypatch.setattr(metrics_server, "FRESH_S", 0.2)
    first = exchange.snapshot()
    time.sleep(0.25)
    assert exchange.snapshot() is not first
    assert running.taken == 2


def test_a_loop_that_hangs_is_not_waited_for_for_ever(exchange: Exchange, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "ANSWER_TIMEOUT_S", 0.05)
    exchange.open(lambda: pytest.fail("nobody runs the loop"))
    for _ in range(3):
        with pytest.raises(Unavailable, match=r"no answer for 0\.05 s"):
            exchange.snapshot()


@pytest.mark.parametrize(
    "address", ["", "127.0.0.1:1", "127.9.9.9:65535", "[::1]:9345", "unix:/run/kvd/metrics.sock", "unix:/" + "a" * 106]
)
def test_addresses_of_this_host(address: str) -> None:
    kind = LocalAddress()
    assert kind.parse(address) == address
    assert kind.render(address) == f'"{address}"'


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0:9345",
        "10.0.0.1:9345",
        "[::]:9345",
        "localhost:9345",  # what a name means is another file's business
        "127.0.0.1",
        "127.0.0.1:0",
        "127.0.0.1:65536",
        "127.0.0.1:http",
        ":9345",
        "unix:metrics.sock",
        "unix:/" + "a" * 107,
        9345,
    ],
)
def test_addresses_that_others_could_reach_or_that_are_none(address: object) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the contract of `Kind.parse`
        LocalAddress().parse(address)
