"""A scheduler for tests: a small model, requests whose events are kept, and what each of them gets alone."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from compute.decode.sampler import GREEDY, Sampling, choose_one
from compute.histories import HistorySettings
from compute.serve.jobs import SchedulerSettings
from compute.serve.requests import Decoded, Event, Failed, Finished, Usage
from compute.serve.scheduler import Scheduler
from compute.worker import Worker
from protocol.layout import Q8G64
from protocol.model import DEMO
from tests.blackbox.daemon_process import DaemonProcess

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

CONFIG = replace(
    DEMO,
    index_topk=48,
    num_hidden_layers=1,
    first_k_dense_replace=1,
    index_n_heads=16,
    n_routed_experts=4,
    num_nextn_predict_layers=1,
)
SETTINGS = SchedulerSettings(
    context=1024, hot_rows=256, ring_pages=4, chunk=64, running=4, depths=(0, 1, 3), idle_s=60.0, default_output=24
)


@dataclass
class Client:
    """A sink that keeps what it is told. With ``stop_after``, it takes so many tokens."""

    stop_after: int | None = None
    tokens: list[int] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    taken: int = 0

    def take(self, token: int) -> bool:
        self.taken += 1
        return self.taken == self.stop_after

    def emit(self, event: Event) -> None:
        assert not self.ended, f"{event} after the last event"
        self.events.append(event)
        if isinstance(event, Decoded):
            self.tokens += event.tokens

    @property
    def ended(self) -> bool:
        return bool(self.events) and isinstance(self.events[-1], Finished | Failed)

    @property
    def usage(self) -> Usage:
        last = self.events[-1]
        assert isinstance(last, Finished), last
        return last.usage

    @property
    def reason(self) -> str:
        last = self.events[-1]
        assert isinstance(last, Finished), last
        return last.reason

    @property
    def error(self) -> Exception:
        last = self.events[-1]
        assert isinstance(last, Failed), last
        return last.error


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(1000 * seed + length)).tolist()


_ALONE: dict[tuple[tuple[int, ...], int, Sampling], list[int]] = {}


def alone(worker: Worker, tokens: list[int], count: int, sampling: Sampling = GREEDY) -> list[int]:
    """What follows ``tokens``, by one pass after the other over a resident history."""
    key = (tuple(tokens), count, sampling)
    if key not in _ALONE:
        history = worker.history(HistorySettings("resident", len(tokens) + count + 64))
        hidden, output = worker.prefill(history, tokens, 64), []
        for index in range(count):
            logits = worker.decoder.logits(hidden[None])[0]
            output.append(choose_one(logits, len(tokens) + index, sampling))
            if index + 1 < count:
                hidden = worker.step(history, output[-1:], cached=True)[-1]
        history.close()
        _ALONE[key] = output
    return _ALONE[key]


def serve(scheduler: Scheduler, *clients: Client, turns: int = 2000) -> None:
    until(scheduler, lambda: all(client.ended for client in clients), turns)


def until(scheduler: Scheduler, done: Callable[[], bool], turns: int = 2000) -> None:
    for _ in range(turns):
        if done():
            return
        scheduler.turn()
    raise AssertionError(f"not done after {turns} turns: {scheduler.status()}")


@contextmanager
def daemon_with(host_bytes: int) -> Iterator[DaemonProcess]:
    """A daemon for the tests of a module."""
    path = Path(tempfile.mkdtemp(prefix="kvd-test-", dir="/tmp"))
    sizes = {"host_capacity": f"{host_bytes >> 20}MiB", "host_extent": "4MiB", "vram_capacity": "256MiB"}
    with DaemonProcess(path, device=DEVICE, drain_timeout_s="0", **sizes) as process:
        yield process.wait_ready()
        assert process.stat().ledger == "balanced"
    shutil.rmtree(path)


def worker_of(run_dir: Path, daemon_wait_s: float = 0.0) -> Worker:
    """The small model's."""
    return Worker(run_dir, DEVICE, CONFIG, Q8G64, seed=3, dtype="bf16", mtp=3, rows=64, daemon_wait_s=daemon_wait_s)


def held(worker: Worker) -> list[tuple[str, int]]:
    stats = worker.stat()
    assert stats.ledger == "balanced"
    return [(tier.tier, tier.requested) for tier in stats.tiers]
