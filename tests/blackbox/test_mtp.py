"""Drafts: the tokens are those of decoding without them, whatever is accepted, wherever the history lies.

On a GPU where there is one, with the Triton kernels and recorded graphs.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compute.decode.decoder import FastDecoder
from compute.decode.draft_layer import DraftLayer
from compute.decode.mtp import Speculation, generate, generate_steps
from compute.decode.sampler import Sampling, choose_one
from compute.device import Copy
from compute.device_cpu import CpuDevice
from compute.histories import HistorySettings, Mode
from compute.history import History
from compute.worker import Worker
from protocol.errors import InvalidValue
from protocol.layout import PAGE_TOKENS, Q8G64
from protocol.model import DEMO
from tests.blackbox.commits import rows_follow_tokens
from tests.blackbox.daemon_process import DaemonProcess
from tests.mtp_reference import draft_states

pytestmark = pytest.mark.leaks_per_module

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG = replace(
    DEMO, index_topk=48, num_hidden_layers=4, index_n_heads=16, n_routed_experts=4, num_nextn_predict_layers=1
)
"""Three index groups, of layers 0, 1, and 2 with 3, and the MTP layer's."""
PROMPT, TOKENS, DEPTH = 180, 80, 3


@pytest.fixture(scope="module")
def daemon() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvd-test-", dir="/tmp"))
    sizes = {"host_capacity": "256MiB", "host_extent": "16MiB", "vram_capacity": "2GiB"}
    state = str(path / "state")
    with DaemonProcess(path, device=DEVICE, drain_timeout_s="0", disk_state_dir=state, **sizes) as process:
        yield process.wait_ready().run_dir
        assert process.stat().ledger == "balanced"
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def worker(daemon: Path) -> Iterator[Worker]:
    with Worker(daemon, DEVICE, CONFIG, Q8G64, seed=3, dtype="bf16", mtp=DEPTH) as opened:
        yield opened


def prompt(length: int) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def opened(worker: Worker, mode: Mode, name: str = "mtp", *, ring_pages: int = 2) -> History:
    return worker.history(HistorySettings(mode, 512, 256, ring_pages, name))


def decoder_of(worker: Worker) -> FastDecoder:
    assert isinstance(worker.decoder, FastDecoder)
    return worker.decoder


def speculation_of(worker: Worker, depth: int, *, cached: bool, places: int = 1) -> Speculation:
    weights, device = decoder_of(worker).weights, worker.device.torch_device
    return Speculation(weights, worker.format, device, places=places, depth=depth, max_tokens=512, cached=cached)


def without_drafts(worker: Worker, length: int, count: int) -> list[int]:
    """Greedy tokens by one pass after the other."""
    history = opened(worker, "resident")
    hidden = worker.prefill(history, prompt(length), 64)
    output = [int(worker.decoder.logits(hidden[None])[0].argmax())]
    while len(output) < count:
        hidden = worker.step(history, output[-1:], cached=True)[-1]
        output.append(int(worker.decoder.logits(hidden[None])[0].argmax()))
    history.close()
    return output


@pytest.fixture(scope="module")
def truth(worker: Worker) -> list[int]:
    output = without_drafts(worker, PROMPT, TOKENS + 8)
    assert len(set(output)) > 8, "an output of few distinct tokens shows nothing"
    return output


def scripted(truth: list[int], first: int, right: float, seed: int) -> torch.Tensor:
    """What to draft at each position: ``truth``, which begins at ``first``, or with 1 - ``right`` another token."""
    script = torch.full((512 + DEPTH + 1,), -1, dtype=torch.int64)
    wrong = torch.rand(len(truth), generator=torch.Generator().manual_seed(seed)) >= right
    tokens = torch.tensor(truth)
    script[first : first + len(truth)] = torch.where(wrong, (tokens + 1) % CONFIG.vocab_size, tokens)
    return script


@pytest.mark.parametrize(
    ("mode", "depth", "right"),
    [
        ("resident", 3, 0.8),
        ("offloaded", 3, 0.8),
        ("offloaded", 3, 1.0),
        ("offloaded", 2, 0.0),
        ("offloaded", 1, 0.7),
    ],
)
def test_the_tokens_are_those_without_drafts(
    worker: Worker, truth: list[int], mode: Mode, depth: int, right: float
) -> None:
    """Rejected rows lie across page boundaries and ring wraps: the ring has two pages, and two pages fill."""
    history = opened(worker, mode)
    hidden = worker.prefill(history, prompt(PROMPT), 64)
    speculation = speculation_of(worker, depth, cached=mode == "offloaded")
    speculation.script[0, : 512 + DEPTH + 1] = scripted(truth, PROMPT, right, 1)[: speculation.script.shape[1]]
    kept = []
    replay = speculation.replay

    def counted():
        output = replay()
        kept.append(output.wait()[1][0])
        return output

    speculation.replay = counted  # type: ignore[method-assign]
    output = [truth[0], *generate(speculation, history, hidden, truth[0], TOKENS - 1)]
    assert output == truth[:TOKENS]
    assert history.length == PROMPT + TOKENS - 1
    # Nothing was drafted for the first step.
    assert set(kept) == ({1} if right == 0 else {1, depth + 1} if right == 1 else set(range(1, depth + 2)))
    if history.session:
        counters = history.counters()
        assert min(counters["hits"], counters["misses"], counters["ring_hits"]) > 0
        history.barrier()
        assert history.session.committed_rows == history.length
    history.close()


def test_sampled_tokens_are_those_without_drafts(worker: Worker) -> None:
    """Drafts are kept where they are what is drawn: with the same seed it is the same text, whatever was drafted."""
    sampling, count = Sampling(0.9, 0.9, 77), 40
    whole = opened(worker, "resident")
    drawn: list[int] = []
    hidden = worker.prefill(whole, prompt(PROMPT), 64)
    while len(drawn) < count + 8:
        logits = worker.decoder.logits(hidden[None])[0]
        drawn.append(choose_one(logits, PROMPT + len(drawn), sampling))
        hidden = worker.step(whole, drawn[-1:], cached=True)[-1]
    whole.close()
    assert len(set(drawn)) > 8
    for depth, right in ((0, 0.0), (1, 1.0), (3, 0.7)):
        history = opened(worker, "offloaded")
        hidden = worker.prefill(history, prompt(PROMPT), 64)
        speculation = speculation_of(worker, depth, cached=True)
        speculation.script[0] = scripted(drawn, PROMPT, right, 3)[: speculation.script.shape[1]]
        speculation.step.sampling = True
        speculation.step.sampler.set(0, sampling)
        steps = list(generate_steps(speculation, history, hidden, drawn[0], count - 1))
        assert [token for step in steps for token in step] == drawn[1:count]
        assert len(steps) == count - 1 if depth == 0 else len(steps) < count - 5
        history.close()


def test_without_drafts_the_mtp_layer_makes_its_rows_and_nothing_else(
    worker: Worker, truth: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its experts are most of its bytes."""

    def feed(*_: object) -> None:
        raise AssertionError("its experts are run for nothing")

    monkeypatch.setattr(DraftLayer, "feed", feed)
    history = opened(worker, "offloaded")
    hidden = worker.prefill(history, prompt(PROMPT), 64)
    speculation = speculation_of(worker, 0, cached=True)
    assert [truth[0], *generate(speculation, history, hidden, truth[0], TOKENS - 1)] == truth[:TOKENS]
    whole = opened(worker, "resident")
    worker.prefill(whole, [*prompt(PROMPT), *truth[: TOKENS - 1]], 64)
    assert torch.equal(mtp_rows(history), mtp_rows(whole))
    history.close()
    whole.close()


@pytest.mark.skipif(DEVICE != "cpu", reason="copies of the CPU device can be held up")
def test_pages_are_copied_back_when_all_their_rows_are_final(
    worker: Worker, truth: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies are late, drafts are rejected meanwhile, the ring has two pages: what is at home has no trace of it."""
    assert isinstance(worker.device, CpuDevice)
    copier, start_copy = worker.device._copier, worker.device.start_copy

    def late(destination: torch.Tensor, source: torch.Tensor) -> Copy:
        copier.submit(time.sleep, 0.2)
        return start_copy(destination, source)

    history = opened(worker, "offloaded")
    hidden = worker.prefill(history, prompt(PROMPT), 64)
    speculation = speculation_of(worker, DEPTH, cached=True)
    speculation.script[0] = scripted(truth, PROMPT, 0.6, 2)[: speculation.script.shape[1]]
    monkeypatch.setattr(worker.device, "start_copy", late)
    assert list(generate(speculation, history, hidden, truth[0], TOKENS - 1)) == truth[1:TOKENS]
    history.barrier()
    assert history.session is not None
    copied = [history.session.page(page).clone() for page in range(history.length // PAGE_TOKENS)]
    history.close()

    whole = opened(worker, "resident")
    worker.prefill(whole, [*prompt(PROMPT), *truth[: TOKENS - 1]], 64)
    assert len(copied) == 4
    empty = whole.format.group_offset(len(whole.format.groups) - 1), whole.format.group_row_bytes(3)
    for page, stored in enumerate(copied):
        expected = whole.page(page).clone()
        if page == 0:
            for side in (stored, expected):
                side[empty[0] : empty[0] + empty[1]] = 0  # the MTP layer has no row 0, and no key
                side[whole.format.keys_offset(3) :][:128] = 0
        payload = whole.format.payload_bytes
        differs = (stored[:payload] != expected[:payload]).nonzero()
        assert not len(differs), f"page {page} differs from byte {int(differs[0])} on"
    whole.close()


@pytest.mark.skipif(DEVICE != "cpu", reason="copies of the CPU device can be waited for where they start")
@pytest.mark.parametrize("taken", [TOKENS, 12, 13, 14])
def test_no_row_is_committed_before_its_token_is_logged(
    worker: Worker, truth: list[int], monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    """Copies are done at once, steps with several tokens fill pages, and decoding ends wherever it likes."""
    speculation = worker.steps(1, DEPTH, 512)
    assert isinstance(speculation, Speculation)
    speculation.script[0] = scripted(truth, PROMPT, 1.0, 1)[: speculation.script.shape[1]]
    monkeypatch.setattr(worker, "_step", speculation)
    committed = rows_follow_tokens(worker, monkeypatch)
    history = opened(worker, "offloaded")
    assert history.session is not None
    history.session.state.append_tokens(prompt(PROMPT))
    tokens = worker.decode(history, worker.prefill(history, prompt(PROMPT), 64), TOKENS)
    assert list(itertools.islice(tokens, taken)) == truth[:taken]
    tokens.close()  # type: ignore[attr-defined]
    assert history.length == PROMPT + taken - 1
    assert history.session.state.tokens() == prompt(PROMPT) + truth[:taken]
    assert committed[-1] == history.length // PAGE_TOKENS * PAGE_TOKENS
    history.barrier()
    history.close()


def test_case_12_sessions_of_a_batch_accept_different_counts(worker: Worker) -> None:
    """Three sessions, one place idle; drafts are right to 0, 50 and 100 %."""
    lengths, right = {0: 61, 1: 100, 3: 128}, {0: 0.0, 1: 0.5, 3: 1.0}
    count, speculation = 32, speculation_of(worker, DEPTH, cached=True, places=4)
    expected = {place: without_drafts(worker, length, count + 8) for place, length in lengths.items()}
    histories = {place: opened(worker, "offloaded", f"place-{place}") for place in lengths}
    outputs = {place: [tokens[0]] for place, tokens in expected.items()}
    for place, history in histories.items():
        hidden = worker.prefill(history, prompt(lengths[place]), 64)
        speculation.join(place, history, hidden, outputs[place][0])
        speculation.script[place] = scripted(expected[place], lengths[place], right[place], place)[: 512 + DEPTH + 1]
    kept: dict[int, set[int]] = {place: set() for place in lengths}
    while min(len(output) for output in outputs.values()) < count:
        for history in histories.values():
            history.prepare(DEPTH + 2)
        sampled, accepted = speculation.replay().wait()
        assert accepted[2] == 0
        for place, history in histories.items():
            length = history.length
            history.settle(length + accepted[place])
            outputs[place] += sampled[place][: accepted[place]]
            kept[place].add(accepted[place])
            if len(outputs[place]) >= count + 4:  # it ends before the others do
                speculation.leave(place)
                history.settled()
                assert history.length == lengths[place] + len(outputs[place]) - 1
                histories = {key: value for key, value in histories.items() if key != place}
                history.close()
    for place, output in outputs.items():
        common = min(len(output), len(expected[place]))
        assert output[:common] == expected[place][:common], f"place {place}"
    assert kept[0] == {1}
    assert kept[3] == {1, DEPTH + 1}
    assert len(kept[1]) > 2
    for place, history in histories.items():
        speculation.leave(place)
        history.settled()
        history.close()


@pytest.mark.skipif(DEVICE != "cpu", reason="the reference is for a CPU")
def test_drafts_are_those_of_the_reference(daemon: Path) -> None:
    """All rows are selected here: with fewer, rounding moves some across the cutoff."""
    config = replace(CONFIG, index_topk=256)
    with Worker(daemon, "cpu", config, Q8G64, seed=3, dtype="bf16", mtp=DEPTH) as worker:
        decoder, tokens = decoder_of(worker), prompt(PROMPT)
        whole = opened(worker, "resident")
        tokens.append(int(decoder.logits(worker.prefill(whole, tokens, 64)[None])[0].argmax()))
        whole.truncate(0)
        states = decoder.forward(torch.tensor(tokens), whole.begin(len(tokens), cached=False), whole)
        whole.close()
        for depth in range(1, DEPTH + 1):
            history, speculation = opened(worker, "resident"), speculation_of(worker, depth, cached=False)
            hidden = worker.prefill(history, tokens[:-1], 64)
            speculation.join(0, history, hidden, tokens[-1])
            history.prepare(depth + 2)
            sampled, accepted = speculation.replay().wait()
            assert accepted == [1], "nothing was drafted before the first step"
            drafts, state = speculation.step.tokens[0, 1:].tolist(), speculation.draft_state[0].clone()
            speculation.leave(0)
            history.settled()
            history.close()
            for following, near in ((sampled[0][0], True), (sampled[0][0] ^ 1, False)):
                expected = draft_states(decoder.weights, [*tokens, following], states, drafts)[-1]
                error = float((state - expected).norm() / expected.norm())
                assert error < 0.05 if near else error > 0.3, f"draft {depth}: error {error}"


@pytest.mark.parametrize("way", ["stored", "saved and restored"])
def test_case_11_a_stored_session_goes_on_with_drafts(worker: Worker, truth: list[int], way: str) -> None:
    """MTP rows and hidden state survive: the drafts behind a takeover are those of an uninterrupted run."""
    settings = HistorySettings("offloaded", 512, 256, 2, "kept")
    history = worker.history(settings)
    assert history.session is not None
    history.session.state.append_tokens(prompt(PROMPT))
    hidden = worker.prefill(history, prompt(PROMPT), 64)
    assert list(worker.decode(history, hidden, 30)) == truth[:30]
    assert list(worker.decode(history, worker.step(history, truth[29:30], cached=True)[-1], 20)) == truth[30:50]
    history.barrier()
    history.close(keep=True)
    if way == "saved and restored":
        client, model = worker.client, worker.fingerprint
        client.save_session("kept")
        stored = client.open_session("kept", fingerprint=model, encoding=Q8G64.name)
        client.close_session(stored.session, stored.generation)
        client.restore_session("kept", fingerprint=model, encoding=Q8G64.name)

    again, tokens = worker.take_over(settings)
    assert tokens == prompt(PROMPT) + truth[:50]
    hidden = worker.prefill(again, tokens[again.length :], 64)
    rows = mtp_rows(again)
    assert list(worker.decode(again, hidden, TOKENS - 50)) == truth[50:TOKENS]
    again.close()

    whole = opened(worker, "resident")
    worker.prefill(whole, tokens, 64)
    assert torch.equal(rows, mtp_rows(whole))
    whole.close()


def mtp_rows(history: History) -> torch.Tensor:
    """The MTP layer's rows 1 to the last, as they are encoded."""
    page_format, group = history.format, len(history.format.groups) - 1
    first, size = page_format.group_offset(group), page_format.group_row_bytes(group)
    pages = [
        history.page(page)[first : first + PAGE_TOKENS * size].view(PAGE_TOKENS, size)
        for page in range(-(-history.length // PAGE_TOKENS))
    ]
    return torch.cat(pages)[1 : history.length].clone()


def test_what_does_not_fit_is_refused(worker: Worker) -> None:
    with pytest.raises(InvalidValue, match="MTP depth is 4"):
        speculation_of(worker, 4, cached=False)
    history = opened(worker, "resident")
    speculation = speculation_of(worker, DEPTH, cached=False)
    with pytest.raises(InvalidValue, match="rows of a session with drafts is 0"):
        speculation.join(0, history, torch.zeros(CONFIG.hidden_size, device=worker.device.torch_device), 1)
    hidden = worker.prefill(history, prompt(480), 192)
    with pytest.raises(InvalidValue, match="drafts included"):
        list(generate(speculation, history, hidden, 1, 30))
    history.close()
