"""Resident histories stored as sessions, and sessions taken up into VRAM: the rows are the same everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compute.histories import HistorySettings, Mode
from compute.worker import Worker
from protocol.errors import OutOfCapacity, UnknownSession
from protocol.layout import PAGE_TOKENS, Q8G64
from protocol.model import DEMO

pytestmark = pytest.mark.leaks_per_module

CONFIG = replace(DEMO, index_topk=64, num_hidden_layers=3, hidden_size=64, index_n_heads=8, n_routed_experts=2)
STORED, COUNT = 2 * PAGE_TOKENS + 30, 40


@pytest.fixture(scope="module")
def worker(module_daemon: Path) -> Iterator[Worker]:
    with Worker(module_daemon, "cpu", CONFIG, Q8G64, seed=3, dtype="bf16") as opened:
        yield opened


def prompt() -> list[int]:
    return torch.randint(0, 256, (STORED + 20,), generator=torch.Generator().manual_seed(1)).tolist()


def settings(mode: Mode, name: str = "copied", tokens: int = 512) -> HistorySettings:
    return HistorySettings(mode, tokens, 128, 4, name)


def test_a_resident_history_is_stored_and_taken_up_in_both_modes(worker: Worker) -> None:
    tokens = prompt()
    first = worker.history(settings("resident"))
    hidden = worker.prefill(first, tokens[:STORED], 64)
    worker.store(first, settings("offloaded"), tokens[:STORED], hidden)
    outputs = []
    for take_up in (
        lambda: first,  # it goes on as it was
        lambda: worker.resident_copy(settings("resident")),
        lambda: worker.take_over(settings("offloaded"))[0],
    ):
        history = take_up()
        if history.session:
            assert history.session.state.tokens() == tokens[:STORED]
            history.session.state.append_tokens(tokens[STORED:])
        assert history.length in (STORED, STORED - 1)  # a takeover computes the last row again
        hidden = worker.prefill(history, tokens[history.length :], 64)
        outputs.append(list(worker.decode(history, hidden, COUNT)))
        history.close()
    assert outputs[0] == outputs[1] == outputs[2]
    assert len(set(outputs[0])) > 8
    with pytest.raises(UnknownSession):
        worker.resident_copy(settings("resident"))  # closed by the last of them


def test_what_there_is_no_room_for_is_not_stored(worker: Worker) -> None:
    before = worker.stat().tiers
    history = worker.history(settings("resident", tokens=64 * 4096))
    hidden = worker.prefill(history, prompt(), 64)
    taker = worker.history(settings("offloaded", "taker", 64 * 4096))
    with suppress(OutOfCapacity):
        for pages in range(1, 4096):
            taker.reserve(pages * PAGE_TOKENS)
    with pytest.raises(OutOfCapacity):
        worker.store(history, settings("offloaded"), prompt(), hidden)
    taker.close()
    history.close()
    with pytest.raises(UnknownSession):
        worker.resident_copy(settings("resident"))
    after = worker.stat().tiers
    assert [(tier.tier, tier.committed) for tier in after] == [(tier.tier, tier.committed) for tier in before]
