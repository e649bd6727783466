"""The fast decoder through a real daemon: recorded steps and passes give the same tokens, resident and offloaded.

On a GPU where there is one, with the Triton kernels and recorded graphs.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compute.decode.decoder import FastDecoder
from compute.decode.step import DecodeStep
from compute.histories import HistorySettings, Mode
from compute.history import History
from compute.step import AttentionStep
from compute.worker import Worker
from protocol.errors import InvalidValue
from protocol.layout import PAGE_TOKENS, Q8G64
from protocol.model import DEMO
from tests.blackbox.daemon_process import DaemonProcess

pytestmark = pytest.mark.leaks_per_module

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG = replace(DEMO, index_topk=64, num_hidden_layers=4, index_n_heads=16, n_routed_experts=4)
"""Three index groups: layers 0, 1, and 2 with 3."""
TOKENS = 100
"""With the prompt of 400: a page fills while they are decoded."""


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    path = Path(tempfile.mkdtemp(prefix="kvd-test-", dir="/tmp"))
    sizes = {"host_capacity": "256MiB", "host_extent": "16MiB", "vram_capacity": "2GiB"}
    with DaemonProcess(path, device=DEVICE, drain_timeout_s="0", **sizes) as daemon:
        daemon.wait_ready()
        with Worker(path, DEVICE, CONFIG, Q8G64, seed=3, dtype="bf16") as opened:
            yield opened
        assert daemon.stat().ledger == "balanced"
    shutil.rmtree(path)


def prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, 256, (length,), generator=generator).tolist()


def opened(worker: Worker, mode: Mode, name: str = "fast", *, hot_rows: int = 256, ring_pages: int = 4) -> History:
    return worker.history(HistorySettings(mode, 1024, hot_rows, ring_pages, name))


def by_passes(worker: Worker, history: History, tokens: list[int], count: int) -> list[int]:
    """Greedy tokens without a recorded step."""
    hidden = worker.prefill(history, tokens, 192)
    output = [int(worker.decoder.logits(hidden[None])[0].argmax())]
    while len(output) < count:
        hidden = worker.step(history, output[-1:], cached=True)[-1]
        output.append(int(worker.decoder.logits(hidden[None])[0].argmax()))
    return output


def by_steps(worker: Worker, history: History, tokens: list[int], count: int, chunk: int = 192) -> list[int]:
    return list(worker.decode(history, worker.prefill(history, tokens, chunk), count))


@pytest.fixture(scope="module")
def truth(worker: Worker) -> list[int]:
    """What resident passes give."""
    history = opened(worker, "resident")
    output = by_passes(worker, history, prompt(400), TOKENS)
    history.close()
    assert len(set(output)) > 8, "an output of few distinct tokens shows nothing"
    return output


@pytest.mark.parametrize(("mode", "chunk"), [("resident", 192), ("offloaded", 192), ("offloaded", 37)])
def test_steps_give_the_tokens_of_passes(worker: Worker, truth: list[int], mode: Mode, chunk: int) -> None:
    history = opened(worker, mode)
    output = by_steps(worker, history, prompt(400), TOKENS, chunk)
    assert output == truth
    assert history.length == 400 + TOKENS - 1
    if history.session:
        counters = history.counters()
        assert min(counters["hits"], counters["misses"], counters["ring_hits"]) > 0
        history.barrier(worker.last_hidden)
        commit = history.session.commit
        assert commit.rows == history.length
        history.rewind()
        again = worker.step(history, output[-2:-1], cached=True)[-1]
        assert commit.payload == again.cpu().numpy().tobytes(), "the hidden of the last row"
    history.close()


@pytest.mark.parametrize("length", [255, 256, 257])
def test_case_10_history_of_as_many_rows_as_hot_slots(worker: Worker, length: int) -> None:
    outputs = []
    for mode in ("resident", "offloaded"):
        history = opened(worker, mode, hot_rows=256)
        outputs.append(by_steps(worker, history, prompt(length), 20))
        history.close()
    assert outputs[0] == outputs[1]


def test_the_hidden_of_a_page_is_stored(worker: Worker) -> None:
    """By a step as by a pass, where the page is written."""
    pages = []
    for way in (by_passes, by_steps):
        history = opened(worker, "resident")
        way(worker, history, prompt(100), 60)
        start = history.format.hidden_offset
        page = history._home.page(1)[start : start + 4 * CONFIG.hidden_size].clone()
        pages.append(page.view(torch.float32))
        history.close()
    assert torch.equal(*pages)
    assert bool(pages[0].any())


def test_a_corrupted_row_changes_the_tokens(worker: Worker, truth: list[int]) -> None:
    history = opened(worker, "offloaded")
    hidden = worker.prefill(history, prompt(400), 192)
    history.corrupt_next_fetch()
    assert list(worker.decode(history, hidden, TOKENS)) != truth
    history.close()


def test_a_reader_that_stops_leaves_nothing_behind(worker: Worker, truth: list[int]) -> None:
    history = opened(worker, "offloaded")
    hidden = worker.prefill(history, prompt(400), 192)
    tokens = worker.decode(history, hidden, TOKENS)
    begun = [next(tokens) for _ in range(60)]
    assert isinstance(tokens, Generator)
    tokens.close()
    assert begun == truth[:60]
    assert history.length == 400 + 59
    hidden = worker.step(history, begun[-1:], cached=True)[-1]
    assert begun + list(worker.decode(history, hidden, TOKENS - 60)) == truth
    history.close()


def test_a_reader_may_end_after_its_history(worker: Worker) -> None:
    """What it had of the history is unmapped by then, and may be another's."""
    history = opened(worker, "offloaded")
    tokens = worker.decode(history, worker.prefill(history, prompt(400), 192), TOKENS)
    for _ in range(10):
        next(tokens)
    history.close()
    history.map = None  # type: ignore[assignment]
    assert isinstance(tokens, Generator)
    tokens.close()


def test_the_next_reader_ends_the_one_before(worker: Worker, truth: list[int]) -> None:
    """They have one place between them: tokens of one must never come to the other."""
    histories = [opened(worker, "offloaded", name) for name in ("first", "second")]
    readers = []
    for history in histories:
        readers.append(worker.decode(history, worker.prefill(history, prompt(400), 192), TOKENS))
        assert [next(readers[-1]) for _ in range(20)] == truth[:20]
    with pytest.raises(InvalidValue, match="reader of a worker's tokens"):
        next(readers[0])
    assert list(readers[1]) == truth[20:]
    assert histories[0].length == 400 + 19
    for history in histories:
        history.close()


def test_what_was_recorded_is_given_up_before_the_worker_ends(daemon: DaemonProcess) -> None:
    given_up: list[str] = []

    class Graph:
        def reset(self) -> None:
            given_up.append("graph")

    with Worker(daemon.run_dir, "cpu", CONFIG, Q8G64, seed=3, dtype="bf16", kernels="triton") as worker:
        step = worker.steps(1, 0, 512)
        assert isinstance(step, DecodeStep)
        assert isinstance(step.attention, AttentionStep)
        step.attention._graphs[1, False] = Graph()  # type: ignore[assignment]
    assert given_up == ["graph"]


def test_a_stored_session_goes_on(worker: Worker, truth: list[int]) -> None:
    settings = HistorySettings("offloaded", 1024, 256, 4, "stored")
    history = worker.history(settings)
    assert history.session is not None
    history.session.state.append_tokens(prompt(400))
    assert by_steps(worker, history, prompt(400), 60) == truth[:60]
    history.barrier(worker.last_hidden)
    history.close(keep=True)
    again, tokens = worker.take_over(settings)
    assert tokens == prompt(400) + truth[:60]
    hidden = worker.prefill(again, tokens[again.length :], 64)
    assert list(worker.decode(again, hidden, TOKENS - 60)) == truth[60:]
    again.close()


@pytest.mark.parametrize("rows", [1, 4])
def test_in_a_batch_as_alone(worker: Worker, truth: list[int], rows: int) -> None:
    """Sessions of several lengths, one place idle; with several rows, all but the first of them are guesses."""
    assert isinstance(worker.decoder, FastDecoder)
    lengths = {0: 400, 1: 61, 3: 128}
    alone = {place: (truth if length == 400 else None) for place, length in lengths.items()}
    histories = {place: opened(worker, "offloaded", f"place-{place}") for place in lengths}
    step = DecodeStep(
        worker.decoder.weights,
        worker.format,
        worker.device.torch_device,
        places=4,
        rows=rows,
        max_tokens=1024,
        cached=True,
    )
    outputs: dict[int, list[int]] = {}
    for place, history in histories.items():
        hidden = worker.prefill(history, prompt(lengths[place]), 64)
        outputs[place] = [int(worker.decoder.logits(hidden[None])[0].argmax())]
        step.join(place, history, outputs[place][0])
    for _ in range(PAGE_TOKENS + 6):
        for history in histories.values():
            history.prepare(rows)
        sampled, accepted = step.replay().wait()
        for place, history in histories.items():
            assert accepted[place] == 1
            history.settle(history.length + 1)
            outputs[place].append(sampled[place][0])
    for place, history in histories.items():
        step.leave(place)
        history.settled()
        expected = alone[place]
        if expected is None:
            single = opened(worker, "resident")
            expected = by_passes(worker, single, prompt(lengths[place]), len(outputs[place]))
            single.close()
        assert outputs[place] == expected[: len(outputs[place])]
        history.close()
