"""What a server does before it takes requests, so that none of them waits for a compiler."""

from __future__ import annotations

import sys

from compute.serve.gaps import Stopwatch
from compute.serve.scheduler import Scheduler
from compute.worker import Worker


def warm_up(worker: Worker, scheduler: Scheduler) -> None:
    """Record the steps. On a GPU pieces of every length are read, too, once for what they compile and once for what
    they take. Raises `OutOfCapacity` without memory for a session of the longest context.
    """
    _say(worker, "recording steps of all batch sizes")
    scheduler.places.record()
    if worker.device.torch_device.type == "cuda":
        for what in ("compiling", "measuring"):
            _say(worker, f"{what} what reads prompts")
            read_pieces(worker, scheduler)


def read_pieces(worker: Worker, scheduler: Scheduler) -> None:
    """Read and forget a piece of every length that fits; the chunk tuner is told what each took."""
    device, room = worker.device.torch_device, scheduler.settings.context
    with scheduler.sessions.scratch(room) as history:
        for size in reversed(scheduler.chunks.sizes):
            if history.length + size <= room:
                watch = Stopwatch(device)
                worker.step(history, [0] * size, cached=False)
                watch.stop()
                scheduler.chunks.seconds[size] = worker.shared(watch.seconds(wait=True) or 0.0, float)


def _say(worker: Worker, what: str) -> None:
    if worker.reports:
        sys.stderr.write(f"kvd-worker: {what}\n")
