"""Forks through a real daemon: each goes on as though alone, whoever writes, truncates or closes what is shared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compute.histories import HistorySettings
from compute.history import History
from compute.worker import Worker
from protocol.errors import StaleGeneration, UnknownSession
from protocol.layout import Q8G64
from protocol.model import DEMO

pytestmark = pytest.mark.leaks_per_module

CONFIG = replace(DEMO, index_topk=64, num_hidden_layers=2, hidden_size=64, index_n_heads=8, n_routed_experts=4)
SETTINGS = HistorySettings("offloaded", 512, 128, 4, "source")


@pytest.fixture(scope="module")
def worker(module_daemon: Path) -> Iterator[Worker]:
    with Worker(module_daemon, "cpu", CONFIG, Q8G64, seed=3) as opened:
        yield opened


def named(name: str) -> HistorySettings:
    return replace(SETTINGS, name=name)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(length + 1000 * seed)).tolist()


def append(worker: Worker, history: History, tokens: list[int]) -> torch.Tensor:
    """Log and prefill, as a service would."""
    if history.session:
        history.session.state.append_tokens(tokens)
    return worker.prefill(history, tokens, 64)


def alone(worker: Worker, tokens: list[int], count: int = 24) -> list[int]:
    """What a history of its own gives after ``tokens``."""
    history = worker.history(replace(SETTINGS, mode="resident"))
    output = list(worker.decode(history, worker.prefill(history, tokens, 64), count))
    history.close()
    return output


def decode(worker: Worker, history: History, hidden: torch.Tensor, count: int = 24) -> list[int]:
    return list(worker.decode(history, hidden, count))


@pytest.fixture
def source(worker: Worker) -> Iterator[History]:
    history = worker.history(SETTINGS)
    history.barrier(append(worker, history, prompt(300)))
    yield history
    if worker.client.stat().sessions:
        history.close()
    stats = worker.client.stat()
    assert (stats.ledger, stats.sessions) == ("balanced", [])


@pytest.mark.parametrize("rows", [1, 64, 192, 193, 299])
def test_a_fork_goes_on_as_though_it_were_alone(worker: Worker, source: History, rows: int) -> None:
    more = prompt(40, seed=1)
    fork = worker.fork(source, named("fork"), rows)
    assert fork.length == rows
    assert decode(worker, fork, append(worker, fork, more)) == alone(worker, prompt(300)[:rows] + more)
    fork.close()


def test_case_06_two_sessions_diverge_and_neither_reads_the_others_rows(worker: Worker, source: History) -> None:
    """Turn by turn, past the page that both began in, with hot caches too small for either."""
    fork = worker.fork(source, named("fork"))
    ours, theirs = prompt(70, seed=1), prompt(70, seed=2)
    hidden = []
    for history, more in ((source, ours), (fork, theirs)):
        hidden.append(append(worker, history, more))
    outputs = [decode(worker, history, last) for history, last in zip((source, fork), hidden, strict=True)]
    assert outputs == [alone(worker, prompt(300) + ours), alone(worker, prompt(300) + theirs)]
    assert outputs[0] != outputs[1]
    fork.close()


def test_what_a_fork_has_survives_its_source(worker: Worker, source: History) -> None:
    more = prompt(30, seed=3)
    fork = worker.fork(source, named("fork"))
    source.truncate(100)
    source.barrier(append(worker, source, prompt(150, seed=4)))
    again = worker.fork(fork, named("again"), 250)
    assert decode(worker, fork, append(worker, fork, more)) == alone(worker, prompt(300) + more)
    fork.truncate(65)
    append(worker, fork, prompt(200, seed=5))
    fork.close()
    assert decode(worker, again, append(worker, again, more)) == alone(worker, prompt(300)[:250] + more)
    again.close()
    rest = prompt(20, seed=6)
    expected = alone(worker, prompt(300)[:100] + prompt(150, seed=4) + rest)
    assert decode(worker, source, append(worker, source, rest)) == expected


def test_a_prefix_is_found_by_its_tokens_and_reused(worker: Worker, source: History) -> None:
    tokens = prompt(300)[:260] + prompt(60, seed=7)
    found = worker.fork_prefix(named("found"), tokens)
    assert found is not None
    assert found.length == 256, "four pages of the source have the same tokens"
    assert decode(worker, found, append(worker, found, tokens[256:])) == alone(worker, tokens)
    found.close()
    assert worker.fork_prefix(named("found"), prompt(100, seed=8)) is None
    whole = worker.fork_prefix(named("found"), prompt(300)[:256])
    assert whole is not None
    assert whole.length == 192, "one token is left to be appended"
    whole.close()


def test_a_prefix_with_too_little_room_is_not_restored(
    worker: Worker, source: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is taken to the device, and nothing of it is left."""
    before = worker.stat()
    with monkeypatch.context() as patched:
        patched.setattr(History, "restore", lambda *_: pytest.fail("restored to be closed"))
        too_many = source.max_tokens + 1
        assert worker.fork_prefix(named("found"), prompt(300), least_tokens=too_many) is None
    after = worker.stat()
    assert [session.name for session in after.sessions] == [session.name for session in before.sessions]
    assert [tier.requested for tier in after.tiers] == [tier.requested for tier in before.tiers]
    found = worker.fork_prefix(named("found"), prompt(300), least_tokens=source.max_tokens)
    assert found is not None
    found.close()


def test_case_03_a_fork_is_closed_once(worker: Worker, source: History) -> None:
    assert source.session is not None
    fork = worker.client.fork_session(source.session.number, source.session.generation, 300, "fork")
    worker.client.close_session(fork.session, fork.generation)
    with pytest.raises(UnknownSession):
        worker.client.close_session(fork.session, fork.generation)
    with pytest.raises(StaleGeneration):
        worker.client.fork_session(source.session.number, source.session.generation + 1, 300, "fork")
    more = prompt(10, seed=9)
    assert decode(worker, source, append(worker, source, more)) == alone(worker, prompt(300) + more)
