"""A scheduler's limits, the requests on their way through it, and how it stands."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from compute.serve.places import Seat
from compute.serve.requests import FinishReason, Queued, Reading, Request, Sink, Usage
from compute.serve.sessions import OpenSession, SessionSettings
from compute.step import BATCH_SIZES
from protocol.errors import InvalidValue
from protocol.layout import PAGE_TOKENS

Offered = tuple[list[int], FinishReason | None]
"""The first of some tokens, up to the one that ends an answer, and why it does."""
StepOffered = tuple[list[Offered], float]
"""Of each place of a step, and the seconds that it took."""


@dataclass(frozen=True)
class SchedulerSettings:
    """Limits of a scheduler. ``depths`` of drafting and ``batch`` are chosen by measurement where they leave a choice.

    ``running`` requests have memory at a time, ``batch`` of them decode together (None: by measurement), and
    ``queue`` more may wait, for ``queue_s`` seconds at most. ``gap_s`` bounds the gap between two tokens of a request
    while others' prompts are read; where a step takes more than half of that, two steps do.
    """

    context: int = 8192
    hot_rows: int = 2048
    ring_pages: int = 8
    chunk: int = 256
    gap_s: float = 0.2
    running: int = 16
    batch: int | None = None
    depths: tuple[int, ...] = (0,)
    queue: int = 256
    queue_s: float = 600.0
    idle_s: float = 30.0
    default_output: int = 512

    def __post_init__(self) -> None:
        """Raises `InvalidValue`."""
        most = BATCH_SIZES[-1]
        for name, value, low, high in (
            ("running", self.running, 1, most),
            ("batch", 1 if self.batch is None else self.batch, 1, most),
            ("context", self.context, 2, 1 << 31),
            ("chunk", self.chunk, 1, 1 << 20),
            ("queue", self.queue, 0, 1 << 20),
            ("default_output", self.default_output, 1, 1 << 31),
        ):
            if not low <= value <= high:
                raise InvalidValue(name, value, f"{low} to {high}")
        if self.chunk > (self.ring_pages - 1) * PAGE_TOKENS:
            raise InvalidValue("chunk", self.chunk, f"at most {(self.ring_pages - 1) * PAGE_TOKENS}, to fit the ring")
        if not (self.gap_s > 0 and self.queue_s > 0 and self.idle_s >= 0):  # a NaN is none of that
            raise InvalidValue("seconds", (self.gap_s, self.queue_s, self.idle_s), "above 0; idle_s may be 0")

    def of_sessions(self, slack: int) -> SessionSettings:
        """With ``slack`` rows behind a session's last token."""
        return SessionSettings(self.context, self.hot_rows, self.ring_pages, slack, self.idle_s, self.default_output)


@dataclass(eq=False)
class Job:
    """A request on its way through the scheduler."""

    number: int
    request: Request
    sink: Sink
    arrived: float
    opened: OpenSession | None = None
    prompt: int = 0
    """Tokens of the history before the first that is decoded."""
    unread: list[int] = field(default_factory=list)
    read: int = 0
    turn: float = 0.0
    """Time that was spent on reading it, or that others had had when it came."""
    seat: Seat | None = None
    output: int = 0
    steps: int = 0
    admitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    told: Queued | Reading | None = None
    """The last event of its progress: it is not told twice."""

    def tell(self, event: Queued | Reading) -> None:
        if event != self.told:
            self.told = event
            self.sink.emit(event)

    def offer(self, tokens: list[int]) -> Offered:
        assert self.opened is not None
        for index, token in enumerate(tokens, 1):
            if token in self.request.stop_tokens or self.sink.take(token):
                return tokens[:index], "stop"
            if self.output + index == self.opened.max_tokens:
                return tokens[:index], "length"
        return tokens, None

    def usage(self) -> Usage:
        """As far as it has come."""
        now = time.monotonic()
        return Usage(
            prompt=self.prompt or len(self.request.prompt),
            cached=self.opened.cached if self.opened else 0,
            output=self.output,
            steps=self.steps,
            queued_s=(self.admitted or now) - self.arrived,
            first_token_s=(self.first_token or now) - self.arrived,
            decode_s=self.last_token - self.first_token,
        )


@dataclass(frozen=True)
class Status:
    """A scheduler at one moment. ``requests`` are (number, state, queue place or tokens read, of, tokens out)."""

    queued: int
    reading: int
    ready: int
    decoding: int
    idle_sessions: int
    depth: int
    batch_limit: int
    steps: int
    tokens: int
    accepted_per_step: float
    gap_p50_s: float
    gap_p99_s: float
    longest_gap_s: float
    rates: dict[str, float]
    waiting_for: str
    requests: list[tuple[int, str, int, int, int]]
