"""The places of recorded steps: who is in which, and the steps under way.

Each depth of drafting has recorded steps of its own; sessions move between them when no step is under way. A session
takes part in the steps that are enqueued while it has a place; what a step gives for a place that another session has
meanwhile is nobody's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from compute.decode.mtp import Speculation
from compute.decode.sampler import Sampling
from compute.decode.step import DecodeStep, StepOutput
from compute.history import History
from compute.serve.gaps import Stopwatch
from compute.serve.tuning import padded
from compute.worker import Worker

STEPS_AHEAD = 2


def rows_behind(depth: int) -> int:
    """Rows that steps with up to ``depth`` drafts write behind a session's last token, at most."""
    return STEPS_AHEAD * (depth + 1) + 1


@dataclass(eq=False)
class Seat:
    """A session that decodes: ``token`` is the one that comes next, of which no row is there yet.

    ``hidden`` [hidden size] is the last row's, after the final norm; None where the steps have it.
    """

    history: History
    hidden: Tensor | None
    token: int
    sampling: Sampling
    remaining: int
    """Tokens still to come."""
    place: int = -1
    under_way: int = 0
    """Steps enqueued and not read."""
    _kept: int = field(default=0, repr=False)


@dataclass(frozen=True)
class _Flight:
    output: StepOutput
    seats: dict[int, Seat]
    watch: Stopwatch


@dataclass(frozen=True)
class StepRead:
    """What a step gave: tokens behind each seat's, one or several.

    ``verified`` are how many they were for each seat that had ``depth`` drafts: in the first step of a place there are
    none. ``seconds`` are the step's own, whatever else the device had to do.
    """

    tokens: list[tuple[Seat, list[int]]]
    depth: int
    verified: list[int]
    seconds: float


class Places:
    """Up to ``count`` sessions of ``worker``, each of up to ``max_tokens`` rows, at one of ``depths``."""

    def __init__(self, worker: Worker, count: int, max_tokens: int, depths: Sequence[int]) -> None:
        self._steps = {depth: worker.steps(count, depth, max_tokens) for depth in depths}
        self._count, self._device = count, worker.device.torch_device
        self._prepared_ahead = 1 if worker.mtp else 0
        self.depth = depths[0]
        self.ahead = STEPS_AHEAD if self._device.type == "cuda" else 1
        """Steps enqueued at a time. Without a GPU a step is done when it is enqueued: one ahead would only be late."""
        self.seats: dict[int, Seat] = {}
        self._flights: deque[_Flight] = deque()

    def record(self) -> None:
        """Record all steps now, so that none of them is recorded while somebody waits for a token."""
        for steps in self._steps.values():
            step = _recorded(steps)
            for step.sampling in (False, True):
                step.record()

    @property
    def under_way(self) -> int:
        """Steps enqueued and not read."""
        return len(self._flights)

    def join(self, seat: Seat) -> None:
        """Give ``seat`` the lowest free place, from the next step on. There is one."""
        place = next(place for place in range(self._count) if place not in self.seats)
        self._enter(seat, place)

    def leave(self, seat: Seat) -> None:
        """Make its place idle. What steps under way give for it is nobody's."""
        self._steps[self.depth].leave(seat.place)
        del self.seats[seat.place]
        seat.place = -1
        seat.history.settled()

    def enqueue(self) -> bool:
        """Enqueue a step if anybody needs one more than are under way; returns whether it did."""
        if not any(seat.remaining > seat.under_way for seat in self.seats.values()):
            return False
        steps = self._steps[self.depth]
        for seat in self.seats.values():
            seat.history.prepare((seat.under_way + 1) * (self.depth + 1) + self._prepared_ahead)
            seat.under_way += 1
        _recorded(steps).sampling = any(seat.sampling.temperature > 0 for seat in self.seats.values())
        watch = Stopwatch(self._device)
        output = steps.replay()
        watch.stop()
        self._flights.append(_Flight(output, dict(self.seats), watch))
        return True

    def read(self) -> StepRead:
        """Wait for the oldest step. Its tokens have no rows settled yet: that is `settle`'s, of as many as are kept."""
        flight = self._flights.popleft()
        sampled, accepted = flight.output.wait()
        seconds = flight.watch.seconds(wait=True)
        assert seconds is not None
        found: list[tuple[Seat, list[int]]] = []
        verified = []
        for place, seat in flight.seats.items():
            seat.under_way -= 1
            if self.seats.get(place) is seat:
                seat._kept = accepted[place]
                if seat.hidden is None:
                    verified.append(accepted[place])
                seat.hidden = None  # the first step in its place makes its first drafts
                found.append((seat, sampled[place][: accepted[place]]))
        return StepRead(found, self.depth, verified, seconds)

    def settle(self, seat: Seat, tokens: Sequence[int]) -> None:
        """Keep ``tokens``, the first ones of those that `read` gave: the rows that they were sampled behind are there.

        Where they are not all of them, `leave` comes next.
        """
        seat.history.settle(seat.history.length + len(tokens))
        seat.token = tokens[-1]
        seat.remaining -= len(tokens)

    def sparse(self) -> bool:
        """Whether steps are larger than they would be if the sessions sat together."""
        return bool(self.seats) and padded(max(self.seats) + 1) > padded(len(self.seats))

    def rearrange(self, depth: int) -> None:
        """Have all sessions sit together, and draft ``depth`` tokens. No step is under way."""
        assert not self._flights, "places change between steps only"
        moving = list(self.seats.values())
        for seat in moving:
            seat.hidden = self._hidden(seat)
        for seat in moving:
            self.leave(seat)
        self.depth = depth
        for seat in moving:
            self.join(seat)

    def _hidden(self, seat: Seat) -> Tensor:
        if seat.hidden is not None:
            return seat.hidden
        return _recorded(self._steps[self.depth]).hidden[seat.place, seat._kept - 1]

    def _enter(self, seat: Seat, place: int) -> None:
        steps = self._steps[self.depth]
        if isinstance(steps, Speculation):
            assert seat.hidden is not None
            steps.join(place, seat.history, seat.hidden, seat.token)
        else:
            steps.join(place, seat.history, seat.token)
        _recorded(steps).sampler.set(place, seat.sampling)
        seat.place = place
        self.seats[place] = seat


def _recorded(steps: DecodeStep | Speculation) -> DecodeStep:
    return steps.step if isinstance(steps, Speculation) else steps
