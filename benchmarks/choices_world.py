"""What ``kvd-bench choices`` asks: a daemon of its own, stored histories, and a scheduler that takes groups of them."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.daemon_room import room_for
from benchmarks.pairs_script import scripted_drafts
from benchmarks.random_pages import fill_at_home
from compute.decode.matrices import WeightType
from compute.decode.mtp import Speculation
from compute.embedded import EmbeddedDaemon
from compute.histories import HistorySettings
from compute.serve.jobs import SchedulerSettings
from compute.serve.places import Places, Seat
from compute.serve.requests import Decoded, Event, Failed, Finished, Request
from compute.serve.scheduler import Scheduler
from compute.serve.tuning import StepTuner
from compute.worker import Worker
from kvd.planning.footprint import Footprint
from protocol.errors import InvalidValue
from protocol.layout import PAGE_TOKENS, Q8G64, round_up
from protocol.model import ModelConfig


@dataclass(frozen=True)
class Sizes:
    """Of a model, and of requests that each begin with ``history`` stored tokens."""

    config: ModelConfig
    device: str
    dtype: WeightType
    depths: tuple[int, ...]
    history: int
    append: int
    output: int
    hot_rows: int
    ring_pages: int
    chunk: int


@dataclass(frozen=True)
class Group:
    """What the requests of a group were answered. ``steps`` are those of all sessions, ``missed`` the part of what they
    selected, where it was counted.
    """

    answers: list[list[int]]
    seconds: float
    steps: int
    missed: float

    @property
    def tokens(self) -> int:
        return sum(map(len, self.answers))

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_step(self) -> float:
        """The first token of an answer is the prompt's."""
        return (self.tokens - len(self.answers)) / self.steps


class ScriptedPlaces(Places):
    """Whose sessions get the drafts of ``scripts``, by name, from the first token of their answers at ``first`` on."""

    first = 0
    counting = False
    """Whether to count what hot caches are asked: that waits for the device."""

    def __init__(self, worker: Worker, count: int, max_tokens: int, depths: Sequence[int]) -> None:
        super().__init__(worker, count, max_tokens, depths)
        self.scripts: dict[str, Tensor] = {}
        self.looked_up: dict[str, int] = {}

    def record(self) -> None:
        """Greedy steps alone: nobody asks for others."""
        for steps in self._steps.values():
            (steps.step if isinstance(steps, Speculation) else steps).record()

    def join(self, seat: Seat) -> None:
        super().join(seat)
        steps = self._steps[self.depth]
        script = self.scripts.get(_name(seat))
        if script is not None and isinstance(steps, Speculation):
            steps.script[seat.place, self.first : self.first + len(script)] = script
        self._look_up(seat, -1)

    def leave(self, seat: Seat) -> None:
        self._look_up(seat, 1)
        super().leave(seat)

    def _look_up(self, seat: Seat, sign: int) -> None:
        if self.counting:
            counters = seat.history.counters()
            for name in ("hits", "misses", "ring_hits"):
                self.looked_up[name] = self.looked_up.get(name, 0) + sign * counters[name]


@dataclass
class _Answer:
    """A sink. ``done`` is when its last token was there, ``cached`` how many tokens were stored before."""

    tokens: list[int] = field(default_factory=list)
    steps: int = 0
    cached: int = 0
    done: float | None = None

    def take(self, token: int) -> bool:  # noqa: ARG002
        return False

    def emit(self, event: Event) -> None:
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Decoded):
            self.tokens += event.tokens
        if isinstance(event, Finished):
            self.done = time.perf_counter()
            self.steps, self.cached = event.usage.steps, event.usage.cached


class World:
    """Stored histories of ``sizes``, and a scheduler for requests that begin with them."""

    def __init__(self, worker: Worker, sizes: Sizes, sessions: int, seed: int) -> None:
        self._sizes = sizes
        self.scheduler = Scheduler(
            worker,
            SchedulerSettings(
                context=sizes.history + sizes.append + sizes.output,
                hot_rows=sizes.hot_rows,
                ring_pages=sizes.ring_pages,
                chunk=sizes.chunk,
                depths=sizes.depths,
            ),
        )
        settings = self.scheduler.settings
        room = round_up(settings.context + self.scheduler.sessions.settings.slack, PAGE_TOKENS)
        self._places = ScriptedPlaces(worker, settings.running, room, sizes.depths)
        self._places.first = sizes.history + sizes.append
        self._places.record()
        self.scheduler.places = self._places
        self.prompts: dict[str, list[int]] = {}
        self._stored = []
        """They stay open, so that those that begin with them share their index keys too."""
        chance = random.Random(seed)
        for number in range(sessions):
            tokens = [chance.randrange(sizes.config.vocab_size) for _ in range(sizes.history + sizes.append)]
            name = f"stored-{number}"
            stored = HistorySettings("offloaded", room, sizes.hot_rows, sizes.ring_pages, name, worker.kernels)
            history = worker.history(stored)
            assert history.session is not None
            history.session.state.append_tokens(tokens[: sizes.history])
            fill_at_home(history, sizes.history, seed + number, worker.device.torch_device)
            self._stored.append(history)
            self.prompts[f"answer-{number}"] = tokens

    def script(self, answers: Sequence[Sequence[int]], seed: int) -> None:
        """From now on, have drafts be ``answers`` with mistakes."""
        depth, vocabulary = max(self._sizes.depths), self._sizes.config.vocab_size
        for number, (name, answer) in enumerate(zip(self.prompts, answers, strict=True)):
            drafts = scripted_drafts(answer, depth, seed + number, vocabulary=vocabulary)
            self._places.scripts[name] = torch.tensor(drafts)

    def group(self, tuner: StepTuner, *, counted: bool = False) -> Group:
        """Ask for all answers at once, with drafts and a limit as ``tuner`` says."""
        scheduler, places, output = self.scheduler, self._places, self._sizes.output
        scheduler.steps, places.counting = tuner, counted
        places.looked_up.clear()
        answers, started = [_Answer() for _ in self.prompts], time.perf_counter()
        for (name, prompt), answer in zip(self.prompts.items(), answers, strict=True):
            scheduler.submit(Request(prompt, output, name), answer)
        while not all(answer.done for answer in answers):
            scheduler.turn()
        seconds = max(answer.done or 0.0 for answer in answers) - started
        ended = [scheduler.end_session(name) for name in self.prompts]
        scheduler.turn()
        for each in ended:
            each.result()
        for answer in answers:
            if answer.cached != self._sizes.history:
                raise InvalidValue("stored tokens that a request began with", answer.cached, str(self._sizes.history))
        looked_up = places.looked_up
        missed = looked_up.get("misses", 0) / max(sum(looked_up.values()), 1)
        return Group([answer.tokens for answer in answers], seconds, sum(answer.steps for answer in answers), missed)

    def close(self) -> None:
        for history in self._stored:
            history.close()


def _name(seat: Seat) -> str:
    assert seat.history.session is not None
    return seat.history.session.name


@contextmanager
def opened(sizes: Sizes, sessions: int, seed: int) -> Iterator[World]:
    """A world on a daemon of its own."""
    most = max(sizes.depths)
    tokens = round_up(sizes.history + sizes.append + sizes.output + PAGE_TOKENS, PAGE_TOKENS)
    plan = Footprint(sizes.config, Q8G64, tokens, sizes.hot_rows, most, sizes.ring_pages)
    with (
        EmbeddedDaemon(sizes.device, **room_for(sizes.device, plan, sessions)) as daemon,
        Worker(
            daemon.run_dir, sizes.device, sizes.config, Q8G64, dtype=sizes.dtype, rows=sizes.chunk, mtp=most
        ) as worker,
    ):
        world = World(worker, sizes, sessions, seed)
        yield world
        world.close()
