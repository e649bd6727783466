"""Requests from a seed, and their answers: from a server, and from a worker that has nothing else to do."""

from __future__ import annotations

import http.client
import json
import random
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from compute.decode import generate, mtp
from compute.decode.mtp import Speculation
from compute.decode.sampler import GREEDY, Sampling, choose_one
from compute.decode.step import DecodeStep
from compute.histories import HistorySettings
from compute.worker import Worker

SHORTEST = 8
"""Tokens of a prompt, and of an answer."""
TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Asked:
    """One request. ``due_s`` is when it is sent, after the first; None as soon as a client is free."""

    due_s: float | None
    prompt: list[int]
    tokens: int
    sampling: Sampling


@dataclass
class Answer:
    """What came of a request. ``due_s`` is when it was due, after the trace began; ``first_s`` is counted from there,
    ``gaps_s`` are between deliveries of tokens, which are of one step each. ``error`` is empty where all went well.
    """

    tokens: list[int] = field(default_factory=list)
    due_s: float = 0.0
    first_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def end_s(self) -> float:
        """When its last token was there, after the trace began."""
        return self.due_s + self.first_s + sum(self.gaps_s)


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts, ``shortest`` to ``longest``, and ``most`` of an answer.

    With a ``skew`` of 0 all lengths are as frequent on a logarithmic scale; with 1, half a length is twice as frequent.
    """

    shortest: int
    longest: int
    most: int
    skew: float = 0.0

    def draw(self, chance: random.Random) -> tuple[int, int]:
        """Tokens of a prompt, and of its answer."""
        share, ratio = chance.random(), self.shortest / self.longest
        factor = ratio**-share if not self.skew else (1 - share * (1 - ratio**self.skew)) ** (-1 / self.skew)
        return round(self.shortest * factor), chance.randint(SHORTEST, self.most)


def draw(count: int, rate: float, seed: int, vocabulary: int, lengths: Lengths) -> list[Asked]:
    """``count`` requests of random tokens, ``rate`` a second (0: as clients are free), every other one sampled."""
    chance, due, asked = random.Random(seed), 0.0, []
    for index in range(count):
        prompt, output = lengths.draw(chance)
        tokens = [chance.randrange(vocabulary) for _ in range(prompt)]
        sampling = Sampling(0.8, 0.95, seed + index) if index % 2 else GREEDY
        asked.append(Asked(due if rate else None, tokens, output, sampling))
        due += chance.expovariate(rate) if rate else 0.0
    return asked


def ask(path: Path, asked: Asked, started: float, until: float | None = None) -> Answer | None:
    """The answer of the server at the UNIX socket ``path``, streamed. ``started`` is when the trace was.

    None where the request is due after ``until``: it is not sent.
    """
    due = time.monotonic() if asked.due_s is None else started + asked.due_s
    if until is not None and due > until:
        return None
    time.sleep(max(due - time.monotonic(), 0.0))
    sampling, answer = asked.sampling, Answer(due_s=due - started)
    body = {"prompt": asked.prompt, "max_tokens": asked.tokens, "stream": True, "ignore_eos": True}
    body |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed}
    connection = http.client.HTTPConnection("kvd", timeout=TIMEOUT_S)
    connection.sock = socket.socket(socket.AF_UNIX)
    with closing(connection):
        connection.sock.connect(str(path))
        connection.request("POST", "/v1/completions", json.dumps(body).encode())
        reply = connection.getresponse()
        if reply.status != 200:
            answer.error = reply.read().decode()
            return answer
        _deliver(answer, _texts(reply, answer), due)
    if len(answer.tokens) != asked.tokens:
        answer.error = answer.error or f"{len(answer.tokens)} tokens of {asked.tokens}"
    return answer


class Alone:
    """A worker's answers to one request after the other, by recorded steps of one session with ``depth`` drafts."""

    def __init__(self, worker: Worker, settings: HistorySettings, depth: int, chunk: int) -> None:
        self._worker, self._settings, self._chunk = worker, settings, chunk
        self._steps = worker.steps(1, depth, settings.max_tokens)
        step = self._step
        for step.sampling in (False, True):
            step.record()

    @property
    def _step(self) -> DecodeStep:
        return self._steps.step if isinstance(self._steps, Speculation) else self._steps

    def answer(self, asked: Asked) -> Answer:
        """As the server is to give it."""
        worker, answer, started = self._worker, Answer(), time.monotonic()
        history = worker.history(self._settings)
        hidden = worker.prefill(history, asked.prompt, self._chunk)
        token = choose_one(worker.decoder.logits(hidden[None])[0], len(asked.prompt), asked.sampling)
        self._step.sampling = asked.sampling.temperature > 0
        self._step.sampler.set(0, asked.sampling)

        def tokens() -> Iterator[list[int]]:
            yield [token]
            if isinstance(self._steps, Speculation):
                yield from mtp.generate_steps(self._steps, history, hidden, token, asked.tokens - 1)
            else:
                yield from ([each] for each in generate.generate(self._steps, history, token, asked.tokens - 1))

        _deliver(answer, tokens(), started)
        history.close()
        return answer


def _texts(reply: http.client.HTTPResponse, answer: Answer) -> Iterator[list[int]]:
    """The tokens of each event of a stream; an error goes to ``answer``."""
    for line in reply:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            answer.error = event["error"]["message"]
            return
        tokens = [int(word) for word in event["choices"][0]["text"].split()]
        if tokens:
            yield tokens


def _deliver(answer: Answer, arriving: Iterator[list[int]], due: float) -> None:
    last = None
    for tokens in arriving:
        now = time.monotonic()
        if last is None:
            answer.first_s = now - due
        else:
            answer.gaps_s.append(now - last)
        answer.tokens += tokens
        last = now
