"""Offloaded and resident decoding through a real daemon: the same bits, whatever the sizes."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compute.histories import HistorySettings, Mode
from compute.history import History
from compute.worker import Worker
from protocol.errors import InvalidValue, OutOfCapacity
from protocol.layout import F32, FP8_DS_MLA, Q8G64, Encoding
from protocol.model import DEMO
from protocol.stats import LeaseStats

pytestmark = pytest.mark.leaks_per_module

CONFIG = replace(DEMO, index_topk=64, num_hidden_layers=4, hidden_size=64, index_n_heads=8, n_routed_experts=4)
"""Three index groups: layers 0, 1, and 2 with 3."""
TOKENS = 256


@pytest.fixture(scope="module")
def worker(module_daemon: Path) -> Iterator[Worker]:
    with Worker(module_daemon, "cpu", CONFIG, Q8G64, seed=3) as opened:
        yield opened


def prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, 256, (length,), generator=generator).tolist()


def run(history: History, worker: Worker, tokens: list[int], count: int, chunk: int = 192) -> tuple[list[int], str]:
    """Greedy tokens, and a hash over the bits of every hidden state of the decoding."""
    bits = hashlib.sha256()
    hidden = worker.prefill(history, worker.prompt_tokens(tokens), chunk)
    output = []
    for _ in range(count):
        bits.update(hidden.numpy().tobytes())
        output.append(int(worker.decoder.logits(hidden[None])[0].argmax()))
        hidden = worker.step(history, output[-1:], cached=True)[-1]
    return output, bits.hexdigest()


@pytest.fixture(scope="module")
def resident(worker: Worker) -> Callable[[int], tuple[list[int], str]]:
    """What resident decoding gives after a prompt of so many tokens: the truth for offloaded decoding."""
    return functools.cache(lambda length: generate(worker, "resident", prompt(length))[:2])


def generate(
    worker: Worker, mode: Mode, tokens: list[int], count: int = TOKENS, *, hot_rows: int = 256, ring_pages: int = 4
) -> tuple[list[int], str, dict[str, int]]:
    settings = HistorySettings(mode, len(tokens) + count + 64, hot_rows, ring_pages, "equality")
    history = worker.history(settings)
    output, bits = run(history, worker, tokens, count)
    counters = history.counters()
    history.barrier()
    history.close()
    worker.client.stat()
    return output, bits, counters


Resident = Callable[[int], tuple[list[int], str]]


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65])
def test_short_prompts_are_bit_equal(worker: Worker, resident: Resident, length: int) -> None:
    assert generate(worker, "offloaded", prompt(length))[:2] == resident(length)
    assert len(set(resident(length)[0])) > 8, "an output of few distinct tokens shows nothing"


@pytest.mark.parametrize("hot_rows", [64, 65, 200])
def test_hot_caches_of_several_sizes_are_bit_equal(worker: Worker, resident: Resident, hot_rows: int) -> None:
    *output, counters = generate(worker, "offloaded", prompt(700), hot_rows=hot_rows)
    assert tuple(output) == resident(700)
    assert counters["hits"] > 0
    assert counters["misses"] > 0


@pytest.mark.parametrize("beside", [-1, 0, 1])
def test_case_10_history_of_as_many_rows_as_hot_slots(worker: Worker, resident: Resident, beside: int) -> None:
    assert generate(worker, "offloaded", prompt(700), hot_rows=700 + beside)[:2] == resident(700)


def test_prompt_of_4097_tokens_is_bit_equal(worker: Worker, resident: Resident) -> None:
    *output, counters = generate(worker, "offloaded", prompt(4097), hot_rows=1024)
    assert tuple(output) == resident(4097)
    assert counters["misses"] > 0
    assert counters["copybacks"] == (4097 + TOKENS) // 64


@pytest.mark.parametrize("encoding", [FP8_DS_MLA, F32], ids=lambda encoding: encoding.name)
def test_other_encodings_are_bit_equal_too(module_daemon: Path, resident: Resident, encoding: Encoding) -> None:
    with Worker(module_daemon, "cpu", CONFIG, encoding, seed=3) as other:
        truth = generate(other, "resident", prompt(700), 40)[:2]
        *output, counters = generate(other, "offloaded", prompt(700), 40)
    assert tuple(output) == truth
    assert counters["misses"] > 0
    assert truth[1] != resident(700)[1], "another encoding gives other bits"


def test_a_corrupted_row_changes_the_bits(worker: Worker) -> None:
    tokens = prompt(700)
    truth = generate(worker, "offloaded", tokens, 32)[1]
    history = worker.history(HistorySettings("offloaded", 1024, 256, 4, "corrupt"))
    history.corrupt_next_fetch()
    _, bits = run(history, worker, tokens, 32)
    history.close()
    assert bits != truth


def test_truncate_and_rewrite_never_reads_an_old_row(worker: Worker) -> None:
    tokens = prompt(700)
    history = worker.history(HistorySettings("offloaded", 1200, 128, 4, "rewrite"))
    first = run(history, worker, tokens, 64)
    for keep in (699, 640, 333, 1, 0):
        history.truncate(keep)
        other = run(history, worker, tokens[::-1][: 700 - keep], 16)
        assert history.length == 716
        history.truncate(keep)
        assert other[1] != first[1]
        assert run(history, worker, tokens[keep:], 64) == first
    history.close()


def test_chunks_do_not_change_the_bits(worker: Worker) -> None:
    tokens = prompt(500)
    seen = set()
    for chunk in (1, 17, 64, 192):
        history = worker.history(HistorySettings("offloaded", 640, 128, 4, "chunks"))
        seen.add(run(history, worker, tokens[:300], 8, chunk)[1])
        history.close()
    assert len(seen) == 1


def test_stored_session_continues_to_the_same_bits(worker: Worker) -> None:
    tokens = prompt(333)
    truth = generate(worker, "resident", tokens, 96)[0]
    settings = HistorySettings("offloaded", 512, 128, 4, "stored")
    history = worker.history(settings)
    hidden = worker.prefill(history, tokens, 192)
    start = list(worker.decode(history, hidden, 40))
    history.barrier()
    committed = history.length
    history.close(keep=True)
    history = worker.stored_history(settings)
    assert history.length == committed == 333 + 39
    rest = [*tokens, *start][committed:]
    output = [*start, *worker.decode(history, worker.prefill(history, rest, 64), 56)]
    history.close()
    assert output == truth


def test_stat_shows_what_workers_counted_together(worker: Worker) -> None:
    settings = HistorySettings("offloaded", 640, 128, 4, "counted")

    def published() -> dict[str, int]:
        found = next(session for session in worker.client.stat().sessions if session.name == "counted")
        return {name: getattr(found, name) for name in ("selections", "hits", "misses", "ring_hits", "copybacks")}

    history = worker.history(settings)
    run(history, worker, prompt(400), 16)
    history.barrier()
    first = history.counters()
    assert published() == {name: first[name] for name in published()}
    assert first["misses"] > 0
    history.close(keep=True)
    history = worker.stored_history(settings)
    run(history, worker, [1], 8)
    history.barrier()
    second = history.counters()
    assert published() == {name: first[name] + second[name] for name in published()}
    history.close()


def test_the_daemon_hears_of_the_gaps_between_tokens(worker: Worker) -> None:
    def gaps() -> LeaseStats:
        [lease] = [lease for lease in worker.stat().leases if lease.lease == worker.client.lease.number]
        return lease

    before = gaps()
    assert (before.device, before.torch_reserved, before.context) == ("cpu", 0, 0)
    history = worker.history(HistorySettings("resident", 512, name="gaps"))
    hidden = worker.prefill(history, prompt(64), 64)
    started = time.monotonic()
    tokens = list(worker.decode(history, hidden, 20))
    took = time.monotonic() - started
    history.close()
    after = gaps()
    assert after.token_gaps - before.token_gaps == len(tokens) - 1
    assert 0.5 * took < after.token_gap_s - before.token_gap_s < took
    assert 0 < after.gap_p50_s <= after.gap_p99_s
    assert took / 19 <= after.longest_gap_s


def test_ledger_returns_to_where_it_was(worker: Worker) -> None:
    def held() -> list[tuple[str, int, int]]:
        stats = worker.client.stat()
        assert stats.ledger == "balanced"
        return [(tier.tier, tier.requested, tier.committed) for tier in stats.tiers]

    generate(worker, "offloaded", prompt(100), 4)
    before = held()
    generate(worker, "offloaded", prompt(400), 8)
    generate(worker, "resident", prompt(400), 8)
    assert held() == before


def test_refusals_name_value_and_limit(worker: Worker) -> None:
    with pytest.raises(InvalidValue, match="hot rows is 63; allowed: at least 64"):
        worker.history(HistorySettings("offloaded", 512, 63, 4, "small"))
    assert not [session for session in worker.client.stat().sessions if session.name == "small"]
    history = worker.history(HistorySettings("offloaded", 512, 64, 2, "ring"))
    with pytest.raises(InvalidValue, match="rows appended at once is 192; allowed: at most 64"):
        worker.step(history, prompt(192), cached=False)
    with pytest.raises(InvalidValue, match="rows of the history is 513"):
        worker.step(history, prompt(513), cached=False)
    history.close()
    with pytest.raises(OutOfCapacity):
        worker.history(HistorySettings("offloaded", 1 << 20, 1 << 20, 4, "huge"))
    assert not [session for session in worker.client.stat().sessions if session.name == "huge"]
