"""Work that takes longer than the loop may stand still: its steps run in threads, and what is between them in the loop.

A job is a generator. Whatever it yields is called in a thread; what that returns or raises comes back from the
``yield``. A `Future` that it yields is waited for, without a thread. So books and sessions change on the loop's thread
only, and what a job must undo it undoes in ``finally``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from protocol.errors import InvalidValue
from protocol.messages import Reply

Step = Callable[[], Any] | Future[Any]
Job = Generator[Step, Any, Reply]
Finished = Callable[[Reply | Exception], None]

MOST_JOBS = 64
"""Jobs that are under way or wait for a thread; each may have two files open."""
THREADS = 2


class Jobs:
    """Runs jobs. All methods are for the loop's thread. ``wake`` can be read when `resume` has something to do.

    ``cancelled`` is set when the jobs are to end: long steps look at it.
    """

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self.wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="job")
        self._ended: SimpleQueue[tuple[Job, Future[Any]]] = SimpleQueue()
        self._under_way: dict[Job, Finished] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def start(self, job: Job, finished: Finished, *, always: bool = False) -> None:
        """Run ``job``; ``finished`` gets its reply or error, at once or later. One too many is an `InvalidValue`, but
        ``always`` not: the daemon's own.
        """
        self._under_way[job] = finished
        self._advance(job, job.__next__, None if always else MOST_JOBS)

    def resume(self) -> None:
        """Go on with the jobs whose steps have ended."""
        os.eventfd_read(self.wake)
        while True:
            try:
                job, step = self._ended.get_nowait()
            except Empty:
                return
            error = step.exception()
            self._advance(job, partial(job.throw, error) if error else partial(job.send, step.result()))

    def close(self) -> None:
        """End all jobs: steps that run are waited for, and nobody hears of the outcome."""
        self.cancelled.set()
        self._threads.shutdown(cancel_futures=True)
        for job in list(self._under_way):
            job.close()
        self._under_way.clear()
        os.close(self.wake)

    def _advance(self, job: Job, go_on: Callable[[], Step], most: int | None = None) -> None:
        try:
            step = go_on()
        except StopIteration as end:
            self._under_way.pop(job)(end.value)
        except Exception as error:  # noqa: BLE001 - the job's failure is its answer
            self._under_way.pop(job)(error)
        else:
            count = len(self._under_way)
            if most is not None and count > most:  # this one has only begun
                job.close()
                self._under_way.pop(job)(InvalidValue("requests under way", count, f"at most {most}"))
                return
            future = step if isinstance(step, Future) else self._threads.submit(step)
            future.add_done_callback(lambda future: self._step_ended(job, future))

    def _step_ended(self, job: Job, future: Future[Any]) -> None:
        """In the step's thread, or in the loop's when it was cancelled before it began, or only waited for."""
        self._ended.put((job, future))
        os.eventfd_write(self.wake, 1)
