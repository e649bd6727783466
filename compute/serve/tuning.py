"""What a scheduler chooses by what it measured: how many tokens to draft, how many sessions to decode at a time, and
how long a piece of a prompt may be without holding up those that decode.

None of it changes a token: rows do not depend on the batch they are in, nor on the pieces a prompt is read in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compute.step import BATCH_SIZES

WINDOW_STEPS = 16
"""Steps whose tokens and time are one measurement."""
PROBE_EVERY = 100
"""Windows after which a depth that was slower is measured again; four times as many where it was much slower."""
FORGET_AFTER = 400
"""Windows after which a batch size that was slower is tried again."""
WORTH_WAITING = 1.1
"""How much faster fewer sessions must be: the others wait for a place meanwhile."""
MUCH_SLOWER = 0.8
_SMOOTHING = 0.3


def padded(sessions: int) -> int:
    """The batch size that so many sessions are decoded in."""
    return next(size for size in BATCH_SIZES if size >= sessions)


@dataclass
class Cell:
    """Tokens per second of a session at one depth and batch size, as last measured, and in which window that was."""

    rate: float
    window: int


class StepTuner:
    """Chooses among ``depths`` of drafting and batch sizes up to ``most``; one of either is a choice made already.

    Each batch size is measured at every depth once, then stays at the best and looks at another now and then.
    """

    def __init__(self, depths: Sequence[int], most: int, *, limit: int | None = None) -> None:
        """With a ``limit``, as many sessions are decoded together as that, whatever is measured."""
        self.depths, self._most, self._fixed_limit = tuple(depths), most, limit
        self.cells: dict[tuple[int, int], Cell] = {}
        self._windows = 0
        self._tokens, self._seconds, self._steps = 0.0, 0.0, 0
        self._key: tuple[int, int] | None = None

    def measured(self, depth: int, sessions: int, tokens: int, seconds: float) -> bool:
        """A step of ``sessions`` gave ``tokens`` in ``seconds``; returns whether this ends a window of such steps."""
        key = (depth, padded(sessions))
        if key != self._key:
            self._key, self._tokens, self._seconds, self._steps = key, 0.0, 0.0, 0
            return False  # the first step after a change has work of the change in it
        self._tokens += tokens / sessions
        self._seconds += seconds
        self._steps += 1
        if self._steps < WINDOW_STEPS:
            return False
        self._windows += 1
        rate, cell = self._tokens / self._seconds, self.cells.get(key)
        before = rate if cell is None else cell.rate
        self.cells[key] = Cell(before + _SMOOTHING * (rate - before), self._windows)
        self._tokens, self._seconds, self._steps = 0.0, 0.0, 0
        return True

    def depth(self, sessions: int) -> int:
        """How many tokens to draft for each step of so many sessions."""
        size = padded(sessions)
        unmeasured = [depth for depth in self.depths if (depth, size) not in self.cells]
        promising = [depth for depth in unmeasured if not self._was_much_slower(depth, size)]
        if promising:
            return max(promising)
        known = {depth: self.cells[depth, size] for depth in self.depths if depth not in unmeasured}
        best = max(known, key=lambda depth: known[depth].rate)
        for depth, cell in known.items():
            patience = PROBE_EVERY * (4 if cell.rate < MUCH_SLOWER * known[best].rate else 1)
            if depth != best and self._windows - cell.window >= patience:
                return depth
        return best

    def limit(self, sessions: int | None = None) -> int:
        """How many of ``sessions``, by default as many as may be, to decode together at most: all, or fewer where that
        gives clearly more tokens.
        """
        if self._fixed_limit is not None:
            return self._fixed_limit
        chosen = self._most if sessions is None else max(min(sessions, self._most), 1)
        for fewer in sorted((size for size in BATCH_SIZES if size < chosen), reverse=True):
            here, there = self._rate(fewer), self._rate(chosen)
            if here is not None and there is not None and here > WORTH_WAITING * there:
                chosen = fewer
        return chosen

    def rates(self) -> dict[str, float]:
        """Tokens per second of full batches by ``depth × batch size``."""
        return {f"{depth}x{size}": size * cell.rate for (depth, size), cell in sorted(self.cells.copy().items())}

    def _was_much_slower(self, depth: int, size: int) -> bool:
        """Whether ``depth`` was, at the nearest batch size where all depths were measured."""
        whole = [
            other for other in BATCH_SIZES if other != size and all((each, other) in self.cells for each in self.depths)
        ]
        if not whole:
            return False
        nearest = min(whole, key=lambda other: abs(BATCH_SIZES.index(other) - BATCH_SIZES.index(size)))
        best = max(self.cells[each, nearest].rate for each in self.depths)
        return self.cells[depth, nearest].rate < MUCH_SLOWER * best

    def _rate(self, sessions: int) -> float | None:
        """The best rate of so many together; None where it is not known, or not any more."""
        size = padded(sessions)
        found = [self.cells[depth, size] for depth in self.depths if (depth, size) in self.cells]
        if not found or self._windows - max(cell.window for cell in found) > FORGET_AFTER:
            return None
        return sessions * max(cell.rate for cell in found)


class ChunkTuner:
    """How many tokens of a prompt to read between two decode steps, so that a gap is ``gap_s`` at most.

    Where a step alone takes more than half of that, a piece may take as long as a step: a gap is two steps at most, and
    reading has its half of the time. Lengths are of a few sizes up to ``most``, and each is judged by what it took,
    since short pieces cost more for a token. The least is read however long that takes, so that prompts come to an end.
    """

    def __init__(self, gap_s: float, most: int, least: int = 16) -> None:
        self.gap_s, self._most = gap_s, most
        doubled = [least << power for power in range(most.bit_length())]
        sizes = {size for whole in doubled for size in (whole, whole * 3 // 2)}
        self.sizes = sorted({min(least, most), most} | {size for size in sizes if size < most})
        self.seconds: dict[int, float] = {}
        """What pieces of each size took lately."""

    def measured(self, tokens: int, seconds: float) -> None:
        """A piece of ``tokens`` took ``seconds``. What is slower than before is believed at once.

        A longer piece takes no more for a token: where one was slower than that, it is forgotten by and by, else one
        that was held up once would never be tried again.
        """
        if tokens not in self.sizes:
            return
        before = self.seconds.get(tokens, 0.0)
        self.seconds[tokens] = max(seconds, before + _SMOOTHING * (seconds - before))
        for size, longer in self.seconds.items():
            if size > tokens:
                most = self.seconds[tokens] * size / tokens
                self.seconds[size] = min(longer, longer + _SMOOTHING * (most - longer))

    def tokens(self, *, decoding: bool, step_s: float) -> int:
        """Length of the next piece: the longest where nobody decodes, else what the gap leaves beside a step."""
        if not decoding:
            return self._most
        room = max(self.gap_s - step_s, step_s)
        return max((size for size in self.sizes if self._expected(size) <= room), default=self.sizes[0])

    def _expected(self, size: int) -> float:
        """Seconds that a piece takes at most, by its own size or by the next shorter or longer one."""
        if size in self.seconds:
            return self.seconds[size]
        shorter = max((known for known in self.seconds if known < size), default=None)
        if shorter is not None:
            return self.seconds[shorter] * size / shorter
        longer = min((known for known in self.seconds if known > size), default=None)
        return self.seconds[longer] if longer is not None else float("inf")
