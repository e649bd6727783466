"""What a scheduler chooses by what it measured: how many tokens to draft, how many sessions to decode at a time, and
how long a piece of a prompt may be without holding up those that decode.

None of it changes a token: rows do not depend on the batch they are in, nor on the pieces a prompt is read in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compute.step import BATCH_SIZES

WINDOW_STEPS = 8
"""Steps whose time is one measurement, and that a batch size has to last before the depth is changed for it."""
PROBE_EVERY = 1600
"""Steps after which a depth that was slower is measured again; four times as many where it was much slower."""
FORGET_AFTER = 6400
"""Steps after which a batch size that was slower is tried again."""
HALF_LIFE = 4000
"""Steps of single sessions after which what drafts were then counts half. Others than a depth's own make it older too,
so that a depth that is only measured now and then is judged by how drafts are now.
"""
WORTH_WAITING = 1.1
"""How much faster fewer sessions must be: the others wait for a place meanwhile."""
WORTH_CHANGING = 1.02
"""How much faster another depth must be: every session is seated anew, and has no drafts in its next step."""
MUCH_SLOWER = 0.8
_SMOOTHING = 0.3
_STEP_SMOOTHING = 0.08
"""So that the steps of one measurement count as much as all before it."""


def padded(sessions: int) -> int:
    """The batch size that so many sessions are decoded in."""
    return next(size for size in BATCH_SIZES if size >= sessions)


class Acceptance:
    """How often each of up to ``most`` drafts is right where all before it are.

    That depends on the text, not on the batch size, nor on how many drafts come behind: each step teaches about all
    depths, and much more exactly together than the few steps of one depth and batch size would.
    """

    def __init__(self, most: int) -> None:
        self._tried, self._right = [0.0] * most, [0.0] * most

    def measured(self, depth: int, tokens: Sequence[int]) -> None:
        """A step with ``depth`` drafts gave each session so many ``tokens``: the drafts that were right, and one."""
        kept = 0.5 ** (len(tokens) / HALF_LIFE)
        for draft in range(len(self._tried)):
            tried = sum(count > draft for count in tokens) if draft < depth else 0
            right = sum(count > draft + 1 for count in tokens)
            self._tried[draft] = kept * self._tried[draft] + tried
            self._right[draft] = kept * self._right[draft] + right

    def tokens(self, depth: int) -> float:
        """What a session's step with ``depth`` drafts is expected to give; a draft that was never tried is right."""
        expected = likely = 1.0
        for right, tried in zip(self._right[:depth], self._tried[:depth], strict=True):
            likely *= right / tried if tried else 1.0
            expected += likely
        return expected


@dataclass(frozen=True)
class Cell:
    """Steps at one depth and batch size: the seconds of one and the sessions in it, in the mean of the last ones."""

    seconds: float = 0.0
    sessions: float = 0.0
    steps: int = 0
    at: int = 0
    """The step, of all that were made, that completed the last measurement."""


class StepTuner:
    """Chooses among ``depths`` of drafting and batch sizes up to ``most``; one of either is a choice made already.

    Each batch size is measured at every depth once, then stays at the best and looks at another now and then. The rate
    of a session is what its step is expected to give over the time that steps of its batch size take: tokens of a few
    steps say too little, and those of one session hardly anything.
    """

    def __init__(self, depths: Sequence[int], most: int, *, limit: int | None = None) -> None:
        """With a ``limit``, as many sessions are decoded together as that, whatever is measured."""
        self.depths, self._most, self._fixed_limit = tuple(depths), most, limit
        self.acceptance = Acceptance(max(depths))
        self.cells: dict[tuple[int, int], Cell] = {}
        """None is ever taken out: other threads read them."""
        self._steps = 0
        self._key: tuple[int, int] | None = None
        self._resized = 0
        """The step since which the batch size has been what it is."""
        self._chosen: int | None = None
        """The last depth that was chosen for being the best: not to be measured."""

    def measured(self, depth: int, sessions: int, accepted: Sequence[int], seconds: float) -> None:
        """A step of ``sessions`` took ``seconds``. ``accepted`` are the tokens that it gave each of those whose drafts
        it verified, whether or not they were wanted.
        """
        self.acceptance.measured(depth, accepted)
        self._steps += 1
        key = (depth, padded(sessions))
        if self._key is None or self._key[1] != key[1]:
            self._resized = self._steps
        if key != self._key:
            self._key = key
            return  # the first step after a change has work of the change in it
        cell = self.cells.get(key, Cell())
        steps = cell.steps + 1
        weight = max(1 / steps, _STEP_SMOOTHING)
        self.cells[key] = Cell(
            cell.seconds + weight * (seconds - cell.seconds),
            cell.sessions + weight * (sessions - cell.sessions),
            steps,
            cell.at if steps % WINDOW_STEPS else self._steps,
        )

    def depth(self, sessions: int) -> int:
        """How many tokens to draft for the next step, of so many sessions."""
        size = padded(sessions)
        if self._key is not None and (self._key[1] != size or self._steps - self._resized < WINDOW_STEPS):
            return self._key[0] if self._chosen is None else self._chosen  # a change is not worth it in passing
        if unmeasured := self.unmeasured(size):
            return max(unmeasured)
        self._chosen = best = self.best(sessions)
        known = self._known(size)
        for depth, rate in known.items():
            patience = PROBE_EVERY * (4 if rate < MUCH_SLOWER * known[best] else 1)
            if depth != best and self._steps - self.cells[depth, size].at >= patience:
                return depth
        return best

    def best(self, sessions: int) -> int:
        """The depth at which so many sessions are fastest as far as is known, or the present one if that is about as
        fast.
        """
        known = self._known(padded(sessions))
        best = max(known, key=known.__getitem__, default=max(self.depths))
        present = self._chosen
        return present if present in known and known[best] < WORTH_CHANGING * known[present] else best

    def unmeasured(self, size: int) -> list[int]:
        """Depths still to be measured at a batch size: all but those that are much slower than the best there even
        where fewer sessions share a step, which makes none slower.
        """
        known = self._known(size)
        least = MUCH_SLOWER * max(known.values(), default=0.0)
        return [
            depth
            for depth in self.depths
            if depth not in known
            and all(self._known(fewer).get(depth, least) >= least for fewer in BATCH_SIZES if fewer < size)
        ]

    def limit(self, sessions: int | None = None) -> int:
        """How many of ``sessions``, by default as many as may be, to decode together at most: all, or fewer where that
        gives clearly more tokens.
        """
        if self._fixed_limit is not None:
            return self._fixed_limit
        chosen = self._most if sessions is None else max(min(sessions, self._most), 1)
        for fewer in sorted((size for size in BATCH_SIZES if size < chosen), reverse=True):
            size = padded(chosen)
            if not (self._is_recent(fewer) and self._is_recent(size)) or self.unmeasured(size):
                continue
            # One that was not full says nothing against a full one, and no more for itself than it gave.
            if self._together(fewer) > WORTH_WAITING * self._together(size, chosen):
                chosen = fewer
        return chosen

    def rates(self) -> dict[str, float]:
        """Tokens per second of full batches by ``depth × batch size``."""
        known = {(depth, size): rate for size in BATCH_SIZES for depth, rate in self._known(size).items()}
        return {f"{depth}x{size}": size * known[depth, size] for depth, size in sorted(known)}

    def _known(self, size: int) -> dict[int, float]:
        """Tokens per second of a session at each depth that was measured at a batch size."""
        cells = {depth: self.cells.get((depth, size), Cell()) for depth in self.depths}
        return {
            depth: self.acceptance.tokens(depth) / cell.seconds
            for depth, cell in cells.items()
            if cell.steps >= WINDOW_STEPS
        }

    def _together(self, size: int, sessions: int = 0) -> float:
        """Tokens per second of all at a batch size that was measured: of as many as there were, or of ``sessions``
        where that is more, as if their steps took no longer.
        """
        return max(rate * max(self.cells[depth, size].sessions, sessions) for depth, rate in self._known(size).items())

    def _is_recent(self, size: int) -> bool:
        """Whether what was measured at a batch size is still believed."""
        last = max((self.cells[depth, size].at for depth in self._known(size)), default=None)
        return last is not None and self._steps - last <= FORGET_AFTER


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
