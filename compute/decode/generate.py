"""Greedy decoding by recorded steps, one of them enqueued ahead of the token that is being read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence

from compute.decode.step import DecodeStep, StepOutput
from compute.history import History

AHEAD = 2
"""Steps under way at a time."""
RESERVED = 4096
"""Rows that there are pages for from the start, at most; beyond them a step in 64 waits for the daemon."""


def generate(step: DecodeStep, history: History, token: int, count: int) -> Generator[int, None, None]:
    """Yield the ``count`` tokens that follow ``token``, whose row is the first to be appended.

    ``step`` has one place and one row. When this ends, early or not, the history has the rows of ``token`` and of all
    tokens yielded but the last; of rows that were computed ahead nothing is left.
    """
    history.reserve(min(count, RESERVED))
    step.join(0, history, token)
    try:
        for sampled in steps_ahead(step, [history], count):
            yield sampled[0][0]
    finally:
        step.leave(0)
        history.settled()


def steps_ahead(
    step: DecodeStep, histories: Sequence[History], count: int, enqueued: Callable[[int], object] | None = None
) -> Iterator[list[list[int]]]:
    """Yield what each of the next ``count`` steps samples, int [places][1], when ``histories`` have its row.

    These are in the first places of ``step``, which has one row, and have pages for all of that. ``enqueued`` is told
    of each step by its number, right behind it on the stream.
    """
    outputs: deque[StepOutput] = deque()
    number = 0
    for produced in range(count):
        while number < min(produced + AHEAD, count):
            for history in histories:
                history.prepare(number - produced + 1)
            outputs.append(step.replay())
            if enqueued is not None:
                enqueued(number)
            number += 1
        sampled, _ = outputs.popleft().wait()
        for history in histories:
            history.settle(history.length + 1)
        yield sampled
