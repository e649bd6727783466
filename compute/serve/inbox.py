"""What other threads ask of a scheduler, until its own thread takes it."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from compute.serve.errors import QueueFull, ShuttingDown
from compute.serve.jobs import Job


@dataclass
class Asked:
    """Requests, numbers of those that are cancelled, and sessions to end."""

    jobs: list[Job] = field(default_factory=list)
    cancelled: set[int] = field(default_factory=set)
    sessions: list[tuple[str, Future[None]]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.jobs or self.cancelled or self.sessions)


class Inbox:
    """All of it under one lock."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._asked = Asked()
        self._stopping = False

    def put(self, job: Job, *, waiting: int, limit: int) -> None:
        """Raises `ShuttingDown`, or `QueueFull` where ``waiting`` others and those here are ``limit``."""
        with self._changed:
            self._refuse_when_stopping()
            if waiting + len(self._asked.jobs) >= limit:
                raise QueueFull(waiting + len(self._asked.jobs), limit)
            self._asked.jobs.append(job)
            self._changed.notify()

    def cancel(self, number: int) -> None:
        with self._changed:
            self._asked.cancelled.add(number)
            self._changed.notify()

    def end_session(self, name: str) -> Future[None]:
        """Raises `ShuttingDown`."""
        with self._changed:
            self._refuse_when_stopping()
            ended: Future[None] = Future()
            self._asked.sessions.append((name, ended))
            self._changed.notify()
            return ended

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def now(self) -> float:
        """Seconds, of a clock that all who take from it have in common."""
        return time.monotonic()

    def wait(self, seconds: float, *, busy: bool) -> bool:
        """Return when there is something to do, or after ``seconds``; at once where the scheduler is ``busy``.

        Returns whether to go on.
        """
        with self._changed:
            if not busy and not self._asked and not self._stopping:
                self._changed.wait(seconds)
            return not self._stopping

    def take(self) -> Asked:
        """All that has come."""
        with self._changed:
            asked, self._asked = self._asked, Asked()
            return asked

    def _refuse_when_stopping(self) -> None:
        if self._stopping:
            raise ShuttingDown
