"""A scheduler on several ranks: each runs it, and all do the same, since all that is not the same on them is rank 0's.

That is what came from outside, the time, how long things took, and which tokens end an answer.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from compute.parallel.worker import ParallelWorker
from compute.serve.inbox import Asked, Inbox
from compute.serve.jobs import Job
from compute.serve.requests import Event, Request


@dataclass(frozen=True)
class Turn:
    """What rank 0 begins a turn with: whether there is one, the time, and what has come."""

    goes_on: bool
    now: float
    jobs: list[tuple[int, Request, float]] = field(default_factory=list)
    cancelled: set[int] = field(default_factory=set)
    sessions: list[str] = field(default_factory=list)


class SharedInbox(Inbox):
    """Rank 0's, on all ranks of ``worker``: what comes to another one's is not looked at."""

    def __init__(self, worker: ParallelWorker) -> None:
        super().__init__()
        self._worker = worker
        self._now = time.monotonic()
        self._told = Asked()

    def now(self) -> float:
        return self._now

    def wait(self, seconds: float, *, busy: bool) -> bool:
        own, turn = Asked(), None
        if self._worker.reports:
            # The others wait with it, and take one that says nothing for longer than their time-out for lost.
            goes_on = super().wait(min(seconds, self._worker.team.timeout_s / 4), busy=busy)
            own = super().take() if goes_on else own
            turn = Turn(
                goes_on,
                time.monotonic(),
                [(job.number, job.request, job.arrived) for job in own.jobs],
                own.cancelled,
                [name for name, _ in own.sessions],
            )
        turn = self._worker.shared(turn, Turn)
        assert turn is not None
        self._now = turn.now
        if not self._worker.reports:
            jobs = [Job(number, request, _Nobody(), arrived) for number, request, arrived in turn.jobs]
            own = Asked(jobs, turn.cancelled, [(name, Future()) for name in turn.sessions])
        self._told = own
        return turn.goes_on

    def take(self) -> Asked:
        """What the turn has begun with; after the last one, what has come to this rank meanwhile."""
        told, self._told = self._told, Asked()
        return told or super().take()


class _Nobody:
    """Who gets tokens on another rank than 0."""

    def take(self, token: int) -> bool:  # noqa: ARG002
        return False

    def emit(self, event: Event) -> None:
        """Rank 0's sink is told."""
