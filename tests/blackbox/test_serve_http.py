"""Routes over real connections, and a scheduler that takes a turn when the test says so."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import openai
import pytest
import uvicorn

from compute.serve.http import RETRY_AFTER_S, Service, application
from compute.serve.requests import Request, Sink
from compute.serve.scheduler import Scheduler
from compute.serve.text import ByteText
from compute.worker import Worker
from tests.blackbox.scheduling import SETTINGS, alone, daemon_with, held, until, worker_of

pytestmark = pytest.mark.leaks_per_module

WAIT_S = 60.0


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with daemon_with(48 << 20) as daemon, worker_of(daemon.run_dir) as opened:
        yield opened


class Served:
    """A scheduler behind a server, with room for one request that runs and one that waits."""

    def __init__(self, worker: Worker) -> None:
        self.scheduler = Scheduler(worker, replace(SETTINGS, running=1, queue=1))
        self.submitted, self.cancelled = threading.Semaphore(0), threading.Semaphore(0)
        self._told(self.scheduler)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._listening.getsockname())
        self.text = ByteText()
        self.service = Service(self.scheduler, self.text, "small", SETTINGS.context, "")
        self._server = uvicorn.Server(uvicorn.Config(application(self.service), log_level="warning", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listening]})
        self._thread.start()

    def _told(self, scheduler: Scheduler) -> None:
        """Have semaphores count what the routes ask of it."""
        submit, cancel = scheduler.submit, scheduler.cancel

        def submitted(request: Request, sink: Sink) -> int:
            number = submit(request, sink)
            self.submitted.release()
            return number

        def cancelled(number: int) -> None:
            cancel(number)
            self.cancelled.release()

        scheduler.submit, scheduler.cancel = submitted, cancelled  # type: ignore[method-assign]

    def post(self, **body: Any) -> http.client.HTTPConnection:
        """Ask, without reading the answer; returns when the scheduler has been asked."""
        connection = http.client.HTTPConnection(self.address, timeout=WAIT_S)
        connection.request("POST", "/v1/completions", json.dumps(body).encode())
        assert self.submitted.acquire(timeout=WAIT_S)
        return connection

    def answered(self, **body: Any) -> Any:
        """The whole answer to a request that runs alone."""
        connection = self.post(**body)
        self.scheduler.turn()
        until(self.scheduler, lambda: not self.scheduler.status().requests)
        reply = json.loads(connection.getresponse().read())
        connection.close()
        return reply

    def get(self, path: str, method: str = "GET") -> tuple[int, Any]:
        connection = http.client.HTTPConnection(self.address, timeout=WAIT_S)
        connection.request(method, path)
        reply = connection.getresponse()
        found = reply.status, json.loads(reply.read())
        connection.close()
        return found

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self.scheduler.stop()
        self.scheduler.run()


@pytest.fixture
def served(worker: Worker) -> Iterator[Served]:
    before, opened = held(worker), Served(worker)
    yield opened
    opened.close()
    assert held(worker) == before


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_goes_away_is_cancelled(served: Served, stream: bool, begun: bool) -> None:
    """While it waits, and amid its answer."""
    scheduler = served.scheduler
    connection = served.post(prompt="long", max_tokens=900, temperature=0, stream=stream)
    if begun:
        until(scheduler, lambda: scheduler.status().decoding == 1)
        assert not stream or connection.getresponse().status == 200
    connection.close()
    assert served.cancelled.acquire(timeout=WAIT_S)
    tokens = scheduler.status().tokens
    scheduler.turn()
    status = scheduler.status()
    assert (status.requests, status.tokens) == ([], tokens)


def test_one_more_than_may_wait_is_told_to_come_again(worker: Worker, served: Served) -> None:
    def ask(prompt: str) -> str:
        with openai.OpenAI(base_url=f"http://{served.address}/v1", api_key="none", max_retries=0) as client:
            return client.completions.create(model="small", prompt=prompt, max_tokens=4, temperature=0).choices[0].text

    with ThreadPoolExecutor(2) as pool:
        taken = [pool.submit(ask, prompt) for prompt in ("one", "two")]
        for _ in taken:
            assert served.submitted.acquire(timeout=WAIT_S)
        with pytest.raises(openai.RateLimitError) as caught:
            ask("three")
        assert caught.value.response.headers["retry-after"] == RETRY_AFTER_S
        assert caught.value.body == {
            "message": "2 requests wait; the limit is 2",
            "type": "rate_limit_error",
            "param": None,
            "code": "queue_full",
            "facts": {"waiting": 2, "limit": 2},
        }
        served.scheduler.turn()
        until(served.scheduler, lambda: not served.scheduler.status().requests)
    assert [each.result() for each in taken] == [text_of(alone(worker, list(prompt), 4)) for prompt in (b"one", b"two")]


def test_a_stream_tells_of_its_place_and_of_what_ended_it(served: Served) -> None:
    """What comes after its first event is an event, errors too."""
    running = served.post(prompt="first", max_tokens=900)
    waiting = served.post(prompt="second", max_tokens=3, stream=True, stream_options={"include_progress": True})
    served.scheduler.turn()
    reply = waiting.getresponse()
    assert reply.status == 200
    assert reply.readline() == b": queued, place 1: 1 requests run, which is the limit\n"
    served.scheduler.stop()
    served.scheduler.run()
    lines = reply.read().decode().strip().split("\n\n")
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
    refused = running.getresponse()
    assert (refused.status, refused.headers["retry-after"]) == (503, RETRY_AFTER_S)
    assert json.loads(refused.read())["error"]["code"] == "shutting_down"
    running.close()
    waiting.close()


def test_stop_tokens_end_an_answer_unless_they_are_to_be_ignored(worker: Worker, served: Served) -> None:
    tokens = alone(worker, list(b"stop"), 8)
    served.text.stop_tokens = frozenset({tokens[3]})
    end = tokens.index(tokens[3]) + 1
    for ignored, count, reason in ((None, end, "stop"), (True, 8, "length")):
        reply = served.answered(prompt="stop", max_tokens=8, temperature=0, ignore_eos=ignored)
        assert reply["usage"]["completion_tokens"] == count
        assert reply["choices"][0]["finish_reason"] == reason


def test_a_stop_is_cut_from_the_answer_and_not_from_the_history(worker: Worker, served: Served) -> None:
    tokens = alone(worker, list(b"stop"), 30)
    text = text_of(tokens)
    stop = text[9:11]
    cut = served.answered(prompt="stop", max_tokens=30, temperature=0, stop=stop, session="cut")
    assert cut["choices"][0]["text"] == text[: text.index(stop)]
    count = cut["usage"]["completion_tokens"]
    assert stop in text_of(tokens[:count])
    assert cut["kvd"]["history_tokens"] == 4 + count
    following = served.answered(prompt="!", max_tokens=5, temperature=0, session="cut")
    history = [*b"stop", *tokens[:count], *b"!"]
    assert following["choices"][0]["text"] == text_of(alone(worker, history, 5))
    assert following["usage"]["prompt_tokens"] == len(history)
    served.scheduler.end_session("cut")
    served.scheduler.turn()


def test_health_and_status_over_http(served: Served) -> None:
    served.answered(prompt="x", max_tokens=3, temperature=0)
    status, body = served.get("/status")
    assert (status, body["requests"], body["tokens"]) == (200, [], 2)
    assert served.get("/healthz") == (200, {"status": "ok"})
    served.service.failure = "DaemonUnavailable: gone"
    assert served.get("/healthz") == (503, {"status": "DaemonUnavailable: gone"})


def test_what_nobody_expected_has_the_shape_of_all_errors(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise RuntimeError(f"no {name}")

    monkeypatch.setattr(served.scheduler, "end_session", broken)
    expected: Any = {
        "message": "RuntimeError: no x",
        "type": "server_error",
        "param": None,
        "code": "internal",
        "facts": {},
    }
    assert served.get("/v1/sessions/x", "DELETE") == (500, {"error": expected})


def text_of(tokens: list[int]) -> str:
    decode: Callable[[int], str] = ByteText().decoder()
    return "".join(decode(token) for token in tokens)
