"""A worker dies, another goes on: no acknowledged token is lost, and none is other than it would have been.

``make torture`` runs many more rounds of the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compute.histories import HistorySettings
from compute.history import History
from compute.worker import Worker
from protocol.errors import CopybackLag, SessionDamaged
from protocol.layout import Q8G64
from tests.torture.decoding_process import CONFIG, SEED, prompt_tokens
from tests.torture.takeover import RECLAIM_LIMIT_S, run_rounds

pytestmark = pytest.mark.leaks_per_module


@pytest.fixture(scope="module")
def worker(module_daemon: Path) -> Iterator[Worker]:
    with Worker(module_daemon, "cpu", CONFIG, Q8G64, seed=SEED) as opened:
        yield opened


def settings(name: str) -> HistorySettings:
    return HistorySettings("offloaded", 512, 64, 3, name)


def begin(worker: Worker, name: str, prompt: list[int]) -> tuple[History, torch.Tensor]:
    history = worker.history(settings(name))
    assert history.session is not None
    history.session.state.append_tokens(prompt)
    return history, worker.prefill(history, prompt, 96)


@pytest.mark.slow
def test_workers_killed_at_any_point_lose_nothing() -> None:
    outcome = run_rounds(24, seed=3)
    assert not outcome.failures
    assert outcome.trials >= 24
    assert outcome.reclaim_p99_s <= RECLAIM_LIMIT_S


@pytest.mark.parametrize("reaches_its_barrier", [False, True])
def test_whoever_takes_over_may_be_at_its_barrier_at_once(worker: Worker, reaches_its_barrier: bool) -> None:
    """The rows that a holder before had beyond the committed ones are nobody's: what is left of them are tokens."""
    prompt = prompt_tokens(150)
    history, hidden = begin(worker, "early", prompt)
    truth = list(worker.decode(history, hidden, 8))
    assert history.session is not None
    if reaches_its_barrier:
        history.barrier()
    assert (history.session.committed_rows >= 157) == reaches_its_barrier
    history.close(keep=True)
    history, tokens = worker.take_over(settings("early"))
    history.barrier()
    assert history.session is not None
    assert history.session.committed_rows == history.length
    assert tokens == [*prompt, *truth]
    worker.prefill(history, tokens[history.length :], 96)
    history.close()


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 128, 130])
def test_every_count_of_committed_rows_is_gone_on_from(worker: Worker, rows: int) -> None:
    """As many rows committed as there are tokens: the last one's hidden is not stored, and is computed again."""
    prompt = prompt_tokens(rows)
    history, hidden = begin(worker, "whole", prompt)
    history.barrier(hidden)
    truth = list(worker.decode(history, hidden, 20))
    history.truncate(rows)
    assert history.session is not None
    assert history.session.state.tokens() == prompt
    assert history.session.committed_rows == rows
    history.close(keep=True)
    history, tokens = worker.take_over(settings("whole"))
    assert (history.length, tokens) == (rows - 1, prompt)
    assert history.session is not None
    assert (history.session.committed_rows, history.session.state.token_count) == (rows, rows), "nothing was given up"
    hidden = worker.prefill(history, tokens[history.length :], 96)
    assert list(worker.decode(history, hidden, 20)) == truth
    history.close()


def test_rows_without_tokens_are_not_taken_over(worker: Worker) -> None:
    history, _ = begin(worker, "odd", prompt_tokens(70))
    history.barrier()
    assert history.session is not None
    history.session.state.truncate_tokens(69)
    history.close(keep=True)
    with pytest.raises(SessionDamaged, match="70 committed rows and 69 tokens"):
        worker.take_over(settings("odd"))
    worker.stored_history(settings("odd")).close()


def test_a_commit_of_a_later_generation_is_refused(worker: Worker) -> None:
    history, _ = begin(worker, "later", prompt_tokens(70))
    history.barrier()
    assert history.session is not None
    history.session.state.publish_commit(history.session.generation + 1, 64)
    history.close(keep=True)
    with pytest.raises(SessionDamaged, match="commit record of 64 rows at generation 2"):
        worker.take_over(settings("later"))
    worker.stored_history(settings("later")).close()


def test_a_barrier_names_what_is_not_committed(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    history, hidden = begin(worker, "lag", prompt_tokens(100))
    history.barrier(hidden)
    assert history.session is not None
    assert (history.session.committed_rows, history.session.state.logical_rows) == (100, 100)
    with monkeypatch.context() as patch:
        patch.setattr(history.copyback, "submit", lambda *_: None)
        hidden = worker.prefill(history, prompt_tokens(30), 96)
    with pytest.raises(CopybackLag, match="has 130 rows, of which 64 are committed: 66 behind") as caught:
        history.barrier(hidden)
    assert caught.value.facts == {"session": "lag", "logical": 130, "committed": 64}
    assert history.session.committed_rows == 100
    history.close()


def test_truncation_keeps_the_payload_of_a_record_that_stays(worker: Worker) -> None:
    history, hidden = begin(worker, "payload", prompt_tokens(100))
    history.barrier(hidden)
    assert history.session is not None
    payload = hidden.numpy().tobytes()
    list(worker.decode(history, hidden, 5))
    history.truncate(100)
    assert history.session.commit.payload == payload
    history.truncate(99)
    assert (history.session.commit.rows, history.session.commit.payload) == (99, b"")
    history.close()


def test_case_13_a_copy_in_flight_when_its_session_is_closed(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing waits for the copies: a session of the same size made at once has not one byte of them."""
    start = worker.device.start_copy
    late: list[torch.Tensor] = []

    class Delayed:
        def __init__(self, destination: torch.Tensor, source: torch.Tensor) -> None:
            self._copy = destination, source.clone()
            late.append(destination)

        def done(self) -> bool:
            return False

        def wait(self) -> None:
            if late:
                late.pop()
                start(*self._copy).wait()

    for _ in range(20):
        history, _ = begin(worker, "first", prompt_tokens(60))
        with monkeypatch.context() as patch:
            patch.setattr(worker.device, "start_copy", Delayed)
            worker.prefill(history, prompt_tokens(10), 96)
            assert late
            history.close()
        assert not late
        other = worker.history(replace(settings("second"), max_tokens=512))
        assert other.session is not None
        other.session.extend(8)
        pages = [other.session.page(page) for page in range(8)]
        for page in pages:
            with torch.inference_mode():
                page.fill_(0x5A)
        worker.device.start_copy(pages[0].clone(), pages[0]).wait()
        assert all(bool((page == 0x5A).all()) for page in pages)
        other.close()
