"""Decoding begins with a warm hot cache, filled beside a prompt's last pass, whatever passes came before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compute import warming
from compute.histories import HistorySettings
from compute.history import History
from compute.worker import Worker
from protocol.layout import PAGE_TOKENS, Q8G64
from protocol.model import DEMO

pytestmark = pytest.mark.leaks_per_module

CONFIG = replace(DEMO, index_topk=64, num_hidden_layers=4, hidden_size=64, index_n_heads=8, n_routed_experts=4)
LENGTH, HOT_ROWS, RING_PAGES = 700, 512, 4


@pytest.fixture(scope="module")
def worker(module_daemon: Path) -> Iterator[Worker]:
    with Worker(module_daemon, "cpu", CONFIG, Q8G64, seed=3) as opened:
        yield opened


@pytest.fixture
def history(worker: Worker) -> Iterator[History]:
    made = worker.history(HistorySettings("offloaded", LENGTH + 64, HOT_ROWS, RING_PAGES, "warm"))
    yield made
    made.close()


def _prompt(length: int) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def _cached(history: History) -> list[set[int]]:
    """Positions that each group has in slots."""
    assert history.caches is not None
    return [set(cache.table.ge(0).nonzero().flatten().tolist()) for cache in history.caches.groups]


def _newest(history: History) -> set[int]:
    end = history._ring_first_page * PAGE_TOKENS
    return set(range(max(end - HOT_ROWS // 2, 0), end))


def test_the_last_pass_leaves_the_cache_warm(worker: Worker, history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the end of the pass itself: its newest rows at home, and all that its last rows selected there."""
    selected: list[set[int]] = []
    select = history.kernels.select

    def watched(group: int, query: Tensor, weights: Tensor, positions: Tensor) -> Tensor:
        found = select(group, query, weights, positions)
        last = found[-warming.ROWS :]
        selected.append(set(last[(last >= 0) & (last < history._ring_first_page * PAGE_TOKENS)].tolist()))
        return found

    monkeypatch.setattr(history.kernels, "select", watched)
    worker.prefill(history, _prompt(LENGTH), 128)
    groups = len(history.format.groups)
    for cached, wanted in zip(_cached(history), selected[-groups:], strict=True):
        assert _newest(history) <= cached
        assert wanted <= cached
    before = history.counters()["misses"]
    worker.step(history, [1], cached=True)
    assert history.counters()["misses"] - before < groups * CONFIG.index_topk // 4


def test_passes_that_others_follow_fetch_nothing(worker: Worker, history: History) -> None:
    for start in range(0, 512, 128):
        worker.step(history, _prompt(512)[start : start + 128], cached=False)
    assert history.counters()["misses"] == 0
    assert _cached(history) == [set()] * len(history.format.groups)
    history.warm()
    assert all(_newest(history) <= cached for cached in _cached(history))


def test_a_truncated_history_forgets_what_it_was_to_be_warmed_with(worker: Worker, history: History) -> None:
    worker.step(history, _prompt(200), cached=False)
    history.truncate(130)
    history.warm()
    assert history.counters()["misses"] == 0


def test_a_prompt_may_go_on_behind_a_warm_cache(worker: Worker, history: History) -> None:
    """What was fetched stays right when the pass that was the last is followed by another one."""
    prompt = _prompt(LENGTH)
    worker.prefill(history, prompt[:400], 128)
    hidden = worker.prefill(history, prompt[400:], 128)
    expected = worker.history(HistorySettings("resident", LENGTH + 64))
    truth = worker.prefill(expected, prompt, 128)
    assert torch.equal(hidden, truth)
    for token in (5, 6, 7):
        ours, theirs = (worker.step(each, [token], cached=True)[-1] for each in (history, expected))
        assert torch.equal(ours, theirs)
    expected.close()
