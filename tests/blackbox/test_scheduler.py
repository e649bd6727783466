"""Many sessions at once through a real daemon: each request's tokens are those that it gets alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from compute.decode.mtp import Speculation
from compute.decode.sampler import GREEDY, Sampling
from compute.decode.step import DecodeStep
from compute.histories import HistorySettings
from compute.history import History
from compute.serve.requests import Request
from compute.serve.scheduler import Scheduler
from compute.serve.warm_up import read_pieces
from compute.worker import Worker
from protocol.errors import InvalidValue, SessionBusy
from protocol.layout import PAGE_TOKENS
from tests.blackbox.commits import rows_follow_tokens
from tests.blackbox.scheduling import DEVICE, SETTINGS, Client, alone, daemon_with, held, prompt, serve, worker_of

pytestmark = pytest.mark.leaks_per_module

HOST_BYTES = 48 << 20


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with daemon_with(HOST_BYTES) as daemon, worker_of(daemon.run_dir) as opened:
        yield opened


@pytest.fixture
def scheduler(worker: Worker) -> Iterator[Scheduler]:
    before = held(worker)
    scheduler = Scheduler(worker, SETTINGS)
    yield scheduler
    scheduler.stop()
    scheduler.run()
    for session in worker.stat().sessions:  # what a test has named
        scheduler.sessions.end(session.name)
    assert held(worker) == before


def test_pieces_of_every_length_are_measured_before_requests_come(worker: Worker, scheduler: Scheduler) -> None:
    before = held(worker)
    read_pieces(worker, scheduler)
    assert sorted(scheduler.chunks.seconds) == scheduler.chunks.sizes
    assert min(scheduler.chunks.seconds.values()) > 0
    assert held(worker) == before


@pytest.mark.parametrize("seed", [1, 2])
def test_tokens_are_those_that_a_request_gets_alone(
    worker: Worker, scheduler: Scheduler, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of several lengths come in any order, some sampled; some are cancelled, wherever they are; the number
    of drafts changes all the time.
    """
    monkeypatch.setattr("compute.serve.tuning.WINDOW_STEPS", 2)
    monkeypatch.setattr("compute.serve.tuning.PROBE_EVERY", 4)
    chance = random.Random(seed)
    lengths = [1, 5, 63, 64, 65, 130, 190, 30]
    asked: list[tuple[list[int], int, Sampling]] = [
        (prompt(length, seed), chance.randint(1, 20), Sampling(0.9, 0.8, index) if index % 3 == 2 else GREEDY)
        for index, length in enumerate(lengths)
    ]
    chance.shuffle(asked)
    clients: list[Client] = []
    numbers: list[int] = []
    cancelled = set(chance.sample(range(len(asked)), 2))
    for index, (tokens, count, sampling) in enumerate(asked):
        clients.append(Client())
        numbers.append(scheduler.submit(Request(tokens, count, sampling=sampling), clients[-1]))
        for _ in range(chance.randint(0, 12)):
            scheduler.turn()
        if index in cancelled:
            scheduler.cancel(numbers[-1])
    serve(scheduler, *clients)
    for index, (client, (tokens, count, sampling)) in enumerate(zip(clients, asked, strict=True)):
        expected = alone(worker, tokens, count, sampling)
        assert client.tokens == expected[: len(client.tokens)]
        if index not in cancelled:
            assert client.reason == "length"
            assert client.usage.output == len(client.tokens) == count
            assert client.usage.prompt == len(tokens)
    assert {client.reason for client in clients} <= {"length", "cancelled"}
    assert len({token for client in clients for token in client.tokens}) > 20
    assert {depth for depth, _ in scheduler.steps.cells} == {0, 1, 3}


def test_the_first_step_in_a_place_says_nothing_about_drafts(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are none yet to verify."""
    verified: list[list[int]] = []
    monkeypatch.setattr(
        scheduler.steps, "measured", lambda depth, sessions, accepted, seconds: verified.append(accepted)
    )
    client = Client()
    scheduler.submit(Request(prompt(20), 8), client)
    serve(scheduler, client)
    assert [len(accepted) for accepted in verified] == [0] + [1] * (len(verified) - 1)
    assert all(1 <= tokens <= 4 for accepted in verified for tokens in accepted)


def test_a_session_goes_on_without_its_history_being_sent(worker: Worker, scheduler: Scheduler) -> None:
    first, second = prompt(100), prompt(40, 7)
    clients = [Client(), Client(), Client()]
    scheduler.submit(Request(first, 10, session="chat"), clients[0])
    serve(scheduler, clients[0])
    scheduler.submit(Request(second, 10, session="chat"), clients[1])
    with pytest.raises(AssertionError, match="not done"):
        serve(scheduler, clients[1], turns=1)
    refused = Client()
    scheduler.submit(Request(second, 10, session="chat"), refused)
    serve(scheduler, refused, clients[1])
    assert isinstance(refused.error, SessionBusy)
    assert scheduler.sessions.let_go("chat")
    assert not scheduler.sessions.let_go("chat")
    # From the daemon's memory now, its end of turn not read twice.
    history = [*first, *clients[0].tokens, *second, *clients[1].tokens]
    third = [history[-1], 5, 6, 7]
    stop = frozenset({history[-1]})
    scheduler.submit(Request(prompt(3), 10, "chat", third, stop_tokens=stop), clients[2])
    serve(scheduler, clients[2])
    assert clients[0].tokens == alone(worker, first, 10)
    assert clients[1].tokens == alone(worker, [*first, *clients[0].tokens, *second], 10)
    assert clients[1].usage.prompt == 150
    assert clients[1].usage.cached == 109
    output = alone(worker, [*history, 5, 6, 7], 10)
    expected = output[: output.index(history[-1]) + 1] if history[-1] in output else output
    assert clients[2].tokens == expected
    assert clients[2].usage.prompt == 163
    assert clients[2].usage.cached >= 158


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_a_turn_that_is_cancelled_before_its_first_token_never_was(
    worker: Worker, scheduler: Scheduler, turns: int
) -> None:
    first, client, lost, again = prompt(70), Client(), Client(), Client()
    scheduler.submit(Request(first, 5, session="kept"), client)
    serve(scheduler, client)
    number = scheduler.submit(Request(prompt(200), 5, session="kept"), lost)
    for _ in range(turns):
        scheduler.turn()
    scheduler.cancel(number)
    serve(scheduler, lost)
    assert lost.reason == "cancelled"
    assert not lost.tokens
    scheduler.submit(Request([1, 2], 5, session="kept"), again)
    serve(scheduler, again)
    assert again.tokens == alone(worker, [*first, *client.tokens, 1, 2], 5)
    assert again.usage.prompt == 77


def test_what_was_streamed_before_a_cancellation_is_in_the_history(worker: Worker, scheduler: Scheduler) -> None:
    first, cut, again = prompt(70), Client(), Client()
    number = scheduler.submit(Request(first, 500, session="cut"), cut)
    while len(cut.tokens) < 20:
        scheduler.turn()
    scheduler.cancel(number)
    serve(scheduler, cut)
    assert cut.reason == "cancelled"
    scheduler.submit(Request([9], 5, session="cut"), again)
    serve(scheduler, again)
    assert again.tokens == alone(worker, [*first, *cut.tokens, 9], 5)


def test_a_prompt_that_begins_as_another_history_is_read_from_there(worker: Worker, scheduler: Scheduler) -> None:
    first, client, other = prompt(200), Client(), Client()
    scheduler.submit(Request(first, 5), client)
    serve(scheduler, client)
    scheduler.submit(Request([*first[:150], 1, 2, 3], 12), other)
    serve(scheduler, other)
    assert other.usage.cached == 128
    assert other.tokens == alone(worker, [*first[:150], 1, 2, 3], 12)


@pytest.mark.skipif(DEVICE != "cpu", reason="copies of the CPU device can be waited for where they start")
def test_no_row_is_committed_before_its_token_is_logged(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are done at once, and steps with several tokens fill pages: whoever is killed there leaves a history that
    can be gone on from.
    """
    tokens, count = prompt(181), 80
    expected = alone(worker, tokens, count)
    scheduler = Scheduler(worker, replace(SETTINGS, depths=(3,)))
    speculation = scheduler.places._steps[3]
    assert isinstance(speculation, Speculation)
    speculation.script[0, len(tokens) : len(tokens) + count] = torch.tensor(expected)
    committed = rows_follow_tokens(worker, monkeypatch)
    client = Client()
    scheduler.submit(Request(tokens, count), client)
    serve(scheduler, client)
    assert client.tokens == expected
    assert client.usage.steps < count / 2
    assert {192, 256} <= set(committed)
    scheduler.stop()
    scheduler.run()


def test_answers_end_where_they_should(worker: Worker, scheduler: Scheduler) -> None:
    tokens = alone(worker, prompt(50), 30)
    by_token, by_sink = Client(), Client(stop_after=3)
    scheduler.submit(Request(prompt(50), 30, stop_tokens=frozenset({tokens[8]})), by_token)
    scheduler.submit(Request(prompt(50), 30), by_sink)
    serve(scheduler, by_token, by_sink)
    end = tokens.index(tokens[8]) + 1
    assert (by_token.tokens, by_token.reason) == (tokens[:end], "stop")
    assert (by_sink.tokens, by_sink.reason) == (tokens[:3], "stop")


def test_a_turn_does_not_count_what_nobody_asks_for(
    worker: Worker, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, asked = Client(), []

    def quantile(part: float) -> float:
        asked.append(part)
        return part

    monkeypatch.setattr(scheduler.gaps, "quantile", quantile)
    scheduler.submit(Request(prompt(10), 5), client)
    serve(scheduler, client)
    assert not asked
    status = scheduler.status()
    assert (status.gap_p50_s, status.gap_p99_s) == (0.5, 0.99)
    assert status.tokens == 4, "the first token is the prompt's"


def test_steps_that_sample_are_recorded_beside_greedy_ones(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = []
    monkeypatch.setattr(DecodeStep, "record", lambda step: recorded.append((step, step.sampling)))
    scheduler.places.record()
    assert len(set(recorded)) == 2 * len(SETTINGS.depths)
    assert [sampling for _, sampling in recorded] == [False, True] * len(SETTINGS.depths)


def test_histories_without_a_name_are_each_ones_own(worker: Worker) -> None:
    """Of any number of servers on a node, whatever their processes are called."""
    schedulers = [Scheduler(worker, SETTINGS), Scheduler(worker, SETTINGS)]
    clients = [Client(), Client()]
    for scheduler, client in zip(schedulers, clients, strict=True):
        scheduler.submit(Request(prompt(10), 5), client)
        serve(scheduler, client)
    assert clients[0].tokens == clients[1].tokens == alone(worker, prompt(10), 5)
    for scheduler in schedulers:
        scheduler.stop()
        scheduler.run()


@pytest.mark.parametrize("answer", [1, 2])
def test_what_is_stored_after_an_answer_is_as_if_it_had_been_read(
    worker: Worker, scheduler: Scheduler, answer: int
) -> None:
    """The MTP layer's rows too: that of an only token needs the hidden state before it, from the commit record."""
    first, second, clients = prompt(70), prompt(20, 1), [Client(), Client()]
    scheduler.submit(Request(first, answer, session="kept"), clients[0])
    serve(scheduler, clients[0])
    assert scheduler.sessions.let_go("kept")
    scheduler.submit(Request(second, 3, session="kept"), clients[1])
    serve(scheduler, clients[1])
    assert scheduler.sessions.let_go("kept")
    stored, tokens = worker.take_over(HistorySettings("offloaded", 1024, 256, 4, "kept"))
    assert tokens == [*first, *clients[0].tokens, *second, *clients[1].tokens]
    whole = worker.history(HistorySettings("resident", 256))
    worker.prefill(whole, tokens[: stored.length], 64)
    assert stored.length == len(tokens) - 1
    assert torch.equal(mtp_rows(stored), mtp_rows(whole))
    whole.close()
    stored.close(keep=True)


def mtp_rows(history: History) -> torch.Tensor:
    """The MTP layer's rows from 1 to the last, as they are encoded."""
    group = len(history.format.groups) - 1
    first, size = history.format.group_offset(group), history.format.group_row_bytes(group)
    pages = [
        history.page(page)[first : first + PAGE_TOKENS * size].view(PAGE_TOKENS, size)
        for page in range(-(-history.length // PAGE_TOKENS))
    ]
    return torch.cat(pages)[1 : history.length].clone()


def test_bad_requests_are_refused(worker: Worker, scheduler: Scheduler) -> None:
    for request, words in (
        (Request([]), "prompt's tokens is 0"),
        (Request([256]), "token is 256"),
        (Request([1], 0), "max_tokens is 0"),
        (Request([1], continued=[-1]), "token is -1"),
    ):
        with pytest.raises(InvalidValue, match=words):
            scheduler.submit(request, Client())
    with pytest.raises(InvalidValue, match="MTP depth is 4"):
        Scheduler(worker, replace(SETTINGS, depths=(4,)))
    with pytest.raises(InvalidValue, match="to fit the ring"):
        replace(SETTINGS, chunk=256)
