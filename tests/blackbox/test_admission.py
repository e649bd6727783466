"""Who is admitted when, and who waits: by memory, by limits, and by what prompts take."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

from compute.serve.errors import ContextExceeded, QueueFull, QueueTimeout, ShuttingDown
from compute.serve.requests import Queued, Reading, Request
from compute.serve.scheduler import Scheduler
from compute.serve.sessions import OpenSession
from compute.worker import Worker
from protocol.errors import OutOfCapacity
from tests.blackbox.scheduling import SETTINGS, Client, daemon_with, held, prompt, serve, until, worker_of

pytestmark = pytest.mark.leaks_per_module

HOST_BYTES = 48 << 20


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with daemon_with(HOST_BYTES) as daemon, worker_of(daemon.run_dir) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _nothing_is_left(worker: Worker) -> Iterator[None]:
    before = held(worker)
    yield
    assert held(worker) == before


def test_what_can_never_fit_is_refused_at_once(worker: Worker) -> None:
    scheduler = Scheduler(worker, replace(SETTINGS, context=1 << 17))
    client = Client()
    scheduler.submit(Request(prompt(10), 1 << 16), client)
    scheduler.turn()
    assert isinstance(client.error, OutOfCapacity)
    assert client.error.facts["tier"] == "host"
    assert client.error.facts["asked"] > client.error.facts["free"]  # type: ignore[operator]
    too_long = Client()
    scheduler.submit(Request(prompt(10), 1 << 17), too_long)
    scheduler.turn()
    assert isinstance(too_long.error, ContextExceeded)


@pytest.mark.parametrize("retry_s", [0.0, math.inf])
def test_what_does_not_fit_beside_others_waits_in_its_place(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, retry_s: float
) -> None:
    """Host RAM holds two of the three; idle sessions make room. It is tried again when something is freed, and now and
    then besides.
    """
    monkeypatch.setattr("compute.serve.scheduler.RETRY_S", retry_s)
    third = int(0.4 * HOST_BYTES / worker.format.stride) * 64
    scheduler = Scheduler(worker, replace(SETTINGS, context=1 << 17, queue=8))
    idle, clients = Client(stop_after=1), [Client() for _ in range(3)]
    scheduler.submit(Request(prompt(64), third), idle)
    serve(scheduler, idle)
    assert scheduler.status().idle_sessions == 1
    numbers = [scheduler.submit(Request(prompt(64, index), third), client) for index, client in enumerate(clients)]
    until(scheduler, lambda: bool(clients[1].tokens))
    scheduler.turn()
    queued = clients[2].events[-1]
    assert isinstance(queued, Queued)
    assert queued.place == 1
    assert "host" in queued.reason
    assert "asked" in queued.reason
    tried, opened = [], scheduler.sessions.open

    def counted(request: Request) -> OpenSession:
        tried.append(request)
        return opened(request)

    monkeypatch.setattr(scheduler.sessions, "open", counted)
    for _ in range(5):
        scheduler.turn()
    assert len(tried) == (0 if retry_s else 5)
    assert "host" in scheduler.status().waiting_for
    scheduler.cancel(numbers[0])
    until(scheduler, lambda: bool(clients[2].tokens))
    for number in numbers:
        scheduler.cancel(number)
    serve(scheduler, *clients)
    scheduler.stop()
    scheduler.run()


def test_the_queue_has_limits(worker: Worker) -> None:
    scheduler = Scheduler(worker, replace(SETTINGS, running=1, queue=1, queue_s=0.05))
    clients = [Client(), Client()]
    scheduler.submit(Request(prompt(10), 1000), clients[0])
    scheduler.turn()
    scheduler.submit(Request(prompt(10), 10), clients[1])
    with pytest.raises(QueueFull, match="1 requests wait; the limit is 1"):
        scheduler.submit(Request(prompt(10), 10), Client())
    while not clients[1].ended:
        scheduler.turn()
    assert isinstance(clients[1].error, QueueTimeout)
    scheduler.stop()
    scheduler.run()
    assert isinstance(clients[0].error, ShuttingDown)
    with pytest.raises(ShuttingDown):
        scheduler.submit(Request(prompt(10), 10), Client())


def test_the_next_in_the_queue_is_tried_when_the_first_has_left_it(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compute.serve.scheduler.RETRY_S", math.inf)
    part = int(HOST_BYTES / worker.format.stride) * 64 // 10
    scheduler = Scheduler(worker, replace(SETTINGS, context=1 << 17))
    clients = [Client() for _ in range(3)]
    numbers = [
        scheduler.submit(Request(prompt(10), tenths * part), client)
        for tenths, client in zip((6, 6, 2), clients, strict=True)
    ]
    until(scheduler, lambda: bool(clients[0].tokens))
    scheduler.turn()
    assert [isinstance(client.events[-1], Queued) for client in clients] == [False, True, True]
    scheduler.cancel(numbers[1])
    until(scheduler, lambda: bool(clients[2].tokens))
    scheduler.stop()
    scheduler.run()


def test_one_session_is_opened_in_a_turn(worker: Worker) -> None:
    """Opening takes time in which nobody decodes. Those whose turn comes next are not told that they wait."""
    scheduler = Scheduler(worker, SETTINGS)
    clients = [Client() for _ in range(3)]
    for index, client in enumerate(clients):
        scheduler.submit(Request(prompt(10, index), 100), client)
    waiting = []
    for _ in clients:
        scheduler.turn()
        waiting.append(scheduler.status().queued)
    assert waiting == [2, 1, 0]
    assert not any(isinstance(event, Queued) for client in clients for event in client.events)
    scheduler.stop()
    scheduler.run()


def test_short_prompts_are_not_held_up_by_a_long_one(worker: Worker) -> None:
    scheduler = Scheduler(worker, SETTINGS)
    long, short = Client(), Client()
    scheduler.submit(Request(prompt(800), 2), long)
    scheduler.turn()
    scheduler.submit(Request(prompt(60), 2), short)
    serve(scheduler, short)
    reading = long.events[-1]
    assert isinstance(reading, Reading)
    assert reading.done < reading.total == 800
    serve(scheduler, long)
    scheduler.stop()
    scheduler.run()


def test_the_longest_idle_session_is_let_go_first(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(worker, SETTINGS)
    for name in ("one", "two", "three"):
        client = Client()
        scheduler.submit(Request(prompt(5), 2, session=name), client)
        serve(scheduler, client)
    sessions = scheduler.sessions
    made, full = sessions._open, [OutOfCapacity("host", 2, 1, 4)] * 2

    def opened(request: Request) -> OpenSession:
        if full:
            raise full.pop()
        return made(request)

    monkeypatch.setattr(sessions, "_open", opened)
    client = Client()
    scheduler.submit(Request(prompt(9), 2, session="one"), client)
    serve(scheduler, client)
    assert list(sessions.idle) == ["one"], "it is the longest idle, but needed"
    scheduler.stop()
    scheduler.run()
    for name in ("one", "two", "three"):
        sessions.end(name)
