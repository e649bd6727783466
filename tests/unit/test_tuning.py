"""What a scheduler chooses, against machines whose speed is known."""

from __future__ import annotations

import pytest

from compute.serve.tuning import PROBE_EVERY, WINDOW_STEPS, ChunkTuner, StepTuner


class Machine:
    """Steps take a time that grows with rows, and give tokens by how often drafts are right."""

    def __init__(self, fixed_s: float, row_s: float, right: float, *, slow_above: int = 99) -> None:
        self.fixed_s, self.row_s, self.right, self.slow_above = fixed_s, row_s, right, slow_above

    def step(self, depth: int, sessions: int) -> tuple[int, float]:
        tokens = sessions * sum(self.right**draft for draft in range(depth + 1))
        seconds = self.fixed_s + self.row_s * sessions * (depth + 1)
        return round(1000 * tokens), 1000 * seconds * (9 if sessions > self.slow_above else 1)


def run(tuner: StepTuner, machine: Machine, sessions: int, steps: int) -> dict[int, int]:
    """How many steps were made at each depth."""
    made: dict[int, int] = {}
    depth = tuner.depth(sessions)
    for _ in range(steps):
        made[depth] = made.get(depth, 0) + 1
        tuner.measured(depth, sessions, *machine.step(depth, sessions))
        depth = tuner.depth(sessions)
    return made


@pytest.mark.parametrize(
    ("machine", "expected"),
    [(Machine(1, 0.001, 0.8), (3, 3, 3)), (Machine(0.01, 1, 0.4), (0, 0, 0)), (Machine(1, 0.3, 0.3), (1, 0, 0))],
)
def test_the_best_depth_is_found_and_kept(machine: Machine, expected: tuple[int, ...]) -> None:
    tuner = StepTuner((0, 1, 3), 16)
    for sessions, best in zip((1, 4, 16), expected, strict=True):
        steps = 100 * WINDOW_STEPS
        made = run(tuner, machine, sessions, steps)
        assert made[best] > 0.9 * steps, made
        assert tuner.depth(sessions) == best


def test_a_depth_that_has_become_better_is_found() -> None:
    tuner = StepTuner((0, 3), 4)
    run(tuner, Machine(1, 0.5, 0.2), 4, 10 * WINDOW_STEPS)
    assert tuner.depth(4) == 0
    made = run(tuner, Machine(1, 0.001, 0.9), 4, 8 * PROBE_EVERY * WINDOW_STEPS)
    assert made[3] > made[0] / 2
    assert tuner.depth(4) == 3


def test_fewer_sessions_are_decoded_together_where_that_is_faster() -> None:
    tuner = StepTuner((0,), 16)
    assert tuner.limit() == 16
    machine = Machine(1, 0.01, 0, slow_above=4)
    for sessions in (4, 16):
        run(tuner, machine, sessions, 3 * WINDOW_STEPS)
    assert [tuner.limit(sessions) for sessions in (1, 3, 4, 16)] == [1, 3, 4, 4]
    assert StepTuner((0,), 16, limit=6).limit() == 6
    even = StepTuner((0,), 16)
    for sessions in (4, 16):
        run(even, Machine(1, 0.01, 0), sessions, 3 * WINDOW_STEPS)
    assert even.limit() == 16


def test_a_batch_that_was_not_full_says_nothing_against_a_full_one() -> None:
    """Steps of 16 places take as long with nine sessions: for nine, eight are faster; for sixteen, all of them are."""
    tuner = StepTuner((0,), 16)
    for _ in range(3 * WINDOW_STEPS):
        tuner.measured(0, 8, 8, 1.0)
    for _ in range(3 * WINDOW_STEPS):
        tuner.measured(0, 9, 9, 1.5)
    assert [tuner.limit(sessions) for sessions in (8, 9, 16)] == [8, 8, 16]
    for _ in range(30 * WINDOW_STEPS):
        tuner.measured(0, 9, 9, 1.2)
    assert tuner.limit(9) == 9, "a little more is not worth that one waits"


@pytest.mark.parametrize(("fixed_s", "token_s"), [(0.0, 0.001), (0.05, 0.0005), (0.0, 0.1)])
def test_pieces_of_prompts_keep_the_gap(fixed_s: float, token_s: float) -> None:
    """Only the first, of which nothing was known, and those of the least length may be longer."""
    chunks, step_s = ChunkTuner(0.2, 256), 0.02
    assert chunks.tokens(decoding=False, step_s=step_s) == 256
    lengths = []
    for _ in range(30):
        length = chunks.tokens(decoding=True, step_s=step_s)
        seconds = fixed_s + token_s * length
        chunks.measured(length, seconds)
        lengths.append(length)
        assert seconds + step_s <= 0.2 or length == chunks.sizes[0]
    fitting = [size for size in chunks.sizes if fixed_s + token_s * size + step_s <= 0.2] or [16]
    assert lengths[-1] >= fitting[-2:][0], "the longest that keeps the gap, or the one before it"


@pytest.mark.parametrize("step_s", [0.15, 0.2, 0.9])
def test_where_steps_are_long_a_piece_takes_as_long_as_a_step(step_s: float) -> None:
    """Pieces that cost 50 ms and 2 ms a token: half of the time is theirs, and no gap is longer than two steps."""
    chunks = ChunkTuner(0.2, 256)
    for _ in range(30):
        length = chunks.tokens(decoding=True, step_s=step_s)
        seconds = 0.05 + 0.002 * length
        chunks.measured(length, seconds)
        assert seconds <= step_s, (length, step_s)
    assert length > 16
    assert seconds > step_s / 2 or length == 256
    for size in chunks.sizes:
        chunks.measured(size, 2 * step_s)
    assert chunks.tokens(decoding=True, step_s=step_s) == 16, "prompts come to an end whatever that takes"


def test_a_piece_that_got_slower_is_believed_at_once_and_forgotten() -> None:
    chunks = ChunkTuner(0.2, 256)
    for length in chunks.sizes:
        chunks.measured(length, length * 0.0005)
    assert chunks.tokens(decoding=True, step_s=0) == 256
    chunks.measured(256, 0.5)
    tried = []
    for _ in range(12):
        tried.append(chunks.tokens(decoding=True, step_s=0))
        chunks.measured(tried[-1], tried[-1] * 0.0005)
    assert tried[0] < 256
    assert tried[-1] == 256, "it was held up once"
    for length in chunks.sizes:
        chunks.measured(length, length * 0.005)
    for _ in range(100):
        assert chunks.tokens(decoding=True, step_s=0) < 48
        chunks.measured(chunks.tokens(decoding=True, step_s=0), 0.005 * 32)
