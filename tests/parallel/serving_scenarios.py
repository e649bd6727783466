"""What ranks that serve do in tests; as `tests.parallel.scenarios` has it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

from compute import cli
from compute.decode.sampler import GREEDY, Sampling, choose_one
from compute.index_keys import KeyTable
from compute.parallel.worker import ParallelWorker
from compute.serve.jobs import SchedulerSettings
from compute.serve.requests import Request
from compute.serve.scheduler import Scheduler
from protocol.errors import OutOfCapacity
from tests.blackbox.scheduling import Client, held
from tests.parallel.scenarios import HOT_ROWS, Say, prompt, rank_of, settings

SETTINGS = SchedulerSettings(
    context=512, hot_rows=4 * HOT_ROWS, ring_pages=4, chunk=64, running=3, depths=(0, 2), idle_s=60.0, default_output=12
)
PATIENCE_S = 120.0


def by_itself(worker: ParallelWorker, tokens: list[int], count: int, sampling: Sampling = GREEDY) -> list[int]:
    """What follows ``tokens`` on these ranks, one pass after the other over a resident history."""
    history = worker.history(settings("alone", "resident"))
    hidden, output = worker.prefill(history, tokens, 64), list[int]()
    for index in range(count):
        output.append(choose_one(worker.decoder.logits(hidden[None])[0], len(tokens) + index, sampling))
        if index + 1 < count:
            hidden = worker.step(history, output[-1:], cached=True)[-1]
    worker.end(history)
    return output


def serves(rank: int, say: Say, *, run_dirs: list[str], seed: int, **shape: Any) -> dict[str, Any]:
    """Rank 0's requests come when they come, some are cancelled or refused; what each has got, and would get alone."""
    chance = random.Random(seed)
    asked = [
        (prompt(length), chance.randint(4, 16), Sampling(0.9, 0.8, length) if length % 2 else GREEDY)
        for length in (1, 64, 65, 130, 40, 191)
    ]
    with rank_of(rank, run_dirs, **shape) as worker:
        expected = [by_itself(worker, tokens, count, sampling) for tokens, count, sampling in asked]
        before = held(worker)
        scheduler = Scheduler(worker, SETTINGS)
        if rank == 1:
            _lack_memory_once()
        found: dict[str, Any] = {"expected": expected}

        def ask() -> None:
            try:
                found.update(_ask(scheduler, asked, chance))
            finally:
                scheduler.stop()

        asking = threading.Thread(target=ask if rank == 0 else lambda: None)
        asking.start()
        scheduler.run()
        asking.join()
        worker.team.exchange(b"", bytes)  # all ranks have let go
        return found | {
            "held as before": held(worker) == before,
            "depths": sorted({d for d, _ in scheduler.steps.cells}),
        }


def _ask(scheduler: Scheduler, asked: list[tuple[list[int], int, Sampling]], chance: random.Random) -> dict[str, Any]:
    lacking = Client()
    scheduler.submit(Request(prompt(10), 4), lacking)
    _wait(lambda: lacking.ended)
    clients = []
    for tokens, count, sampling in asked:
        clients.append(Client())
        scheduler.submit(Request(tokens, count, sampling=sampling), clients[-1])
        time.sleep(chance.random() * 0.1)
    cancelled, stopped, refused = Client(), Client(stop_after=3), Client()
    number = scheduler.submit(Request(prompt(300), 100), cancelled)
    scheduler.submit(Request(prompt(64), 16), stopped)
    scheduler.submit(Request(prompt(500), 100), refused)
    time.sleep(0.3)
    scheduler.cancel(number)
    _wait(lambda: all(client.ended for client in (*clients, cancelled, stopped, refused)))
    again = Client()
    scheduler.submit(Request([*prompt(191), 7, 8], 6), again)
    _wait(lambda: again.ended)
    first, second = Client(), Client()
    scheduler.submit(Request(prompt(40), 8, session="chat"), first)
    _wait(lambda: first.ended)
    scheduler.submit(Request(prompt(20), 4, session="chat"), second)
    _wait(lambda: second.ended)
    scheduler.end_session("chat").result(PATIENCE_S)
    return {
        "got": [client.tokens for client in clients],
        "reasons": [client.reason for client in (*clients, cancelled, stopped)],
        "stopped": stopped.tokens,
        "again": [again.tokens, again.usage.cached],
        "lacking": str(lacking.error),
        "refused": type(refused.error).__name__,
        "chat": [first.tokens, second.tokens],
        "cached": second.usage.cached,
    }


def _lack_memory_once() -> None:
    """On this rank alone: for a history's key blocks, behind its pages, which all ranks have."""
    extend = KeyTable.extend

    def lacking(_: KeyTable, pages: int) -> None:
        KeyTable.extend = extend  # type: ignore[method-assign]
        raise OutOfCapacity("vram:0", pages, 0, 0)

    KeyTable.extend = lacking  # type: ignore[method-assign, assignment]


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "a request has not ended"
        time.sleep(0.01)


def chats(rank: int, say: Say, *, run_dirs: list[str], **shape: Any) -> list[list[int]]:
    """The answers of `serves` to its chat and to what begins as another prompt, of passes over whole histories."""
    with rank_of(rank, run_dirs, **shape) as worker:
        first = by_itself(worker, prompt(40), 8)
        return [
            first,
            by_itself(worker, prompt(40) + first + prompt(20), 4),
            by_itself(worker, [*prompt(191), 7, 8], 6),
        ]


def served(rank: int, say: Say, *, arguments: list[str], **_: Any) -> int:
    """``kvd-worker serve`` on this rank, until it ends."""
    parsed = cli.parser().parse_args(["serve", *arguments])
    status: int = parsed.run(parsed)
    return status
