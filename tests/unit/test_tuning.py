"""What a scheduler chooses, against machines whose speed is known."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from compute.serve.tuning import HALF_LIFE, PROBE_EVERY, WINDOW_STEPS, Acceptance, ChunkTuner, StepTuner

RIGHT = 0.7775
"""With it a step gives 1.78 tokens of one draft and 2.85 of three, in the mean."""


class Machine:
    """Steps take a time that grows with rows, and give tokens by how often drafts are right."""

    def __init__(
        self, fixed_s: float, row_s: float, right: float, *, slow_above: int = 99, noise: float = 0.0, seed: int = 0
    ) -> None:
        self.fixed_s, self.row_s, self.right, self.slow_above, self.noise = fixed_s, row_s, right, slow_above, noise
        self._chance = random.Random(seed)

    def tokens(self, depth: int) -> int:
        """What a step gives a session: drafts until one is wrong, and one."""
        return 1 + next((draft for draft in range(depth) if self._chance.random() >= self.right), depth)

    def seconds(self, depth: int, sessions: int) -> float:
        seconds = self.fixed_s + self.row_s * sessions * (depth + 1)
        return seconds * (9 if sessions > self.slow_above else 1) * self._chance.gauss(1, self.noise)


def h200(seed: int) -> Machine:
    """Ten sessions take 3.6, 5.7 and 10.0 ms at 0, 1 and 3 drafts: a session gets 279, 311 and 286 tokens/s."""
    return Machine(1.45e-3, 0.2135e-3, RIGHT, noise=0.01, seed=seed)


def run(tuner: StepTuner, machine: Machine, sessions: int, steps: int) -> Counter[int]:
    """How many steps were made at each depth."""
    made: Counter[int] = Counter()
    for _ in range(steps):
        depth = tuner.depth(sessions)
        made[depth] += 1
        accepted = [machine.tokens(depth) for _ in range(sessions)]
        tuner.measured(depth, sessions, accepted, machine.seconds(depth, sessions))
    return made


def answer(tuner: StepTuner, machine: Machine, *, reading: int, sessions: int = 10, output: int = 128) -> int:
    """A group of requests, one more of which has been read every ``reading`` steps; returns the changes of depth.

    A session has no drafts in its first step, nor in the first one after a change.
    """
    remaining: list[int] = []
    drafted: list[bool] = []
    waiting, step, depth, changes = sessions, 0, tuner.depth(1), 0
    while waiting or remaining:
        if waiting and step % reading == 0:
            waiting -= 1
            remaining.append(output)
            drafted.append(False)
        step += 1
        if not remaining:
            continue
        if tuner.depth(len(remaining)) != depth:
            depth = tuner.depth(len(remaining))
            changes += 1
            drafted = [False] * len(remaining)
        tokens = [machine.tokens(depth) if has else 1 for has in drafted]
        accepted = [count for count, has in zip(tokens, drafted, strict=True) if has]
        tuner.measured(depth, len(remaining), accepted, machine.seconds(depth, len(remaining)))
        left = (before - count for before, count in zip(remaining, tokens, strict=True))
        remaining = [count for count in left if count > 0]
        drafted = [True] * len(remaining)
    return changes


@pytest.mark.parametrize(
    ("machine", "expected"),
    [(Machine(1, 0.001, 0.8), (3, 3, 3)), (Machine(0.01, 1, 0.4), (0, 0, 0)), (Machine(1, 0.3, 0.3), (0, 0, 1))],
)
def test_the_best_depth_is_found_and_kept(machine: Machine, expected: tuple[int, ...]) -> None:
    tuner = StepTuner((0, 1, 3), 16)
    for sessions, best in zip((16, 4, 1), expected, strict=True):
        steps = 100 * WINDOW_STEPS
        made = run(tuner, machine, sessions, steps)
        assert made[best] > 0.9 * steps, made
        assert tuner.depth(sessions) == best


@pytest.mark.parametrize("reading", [1, 2, 5])
def test_two_groups_of_requests_teach_the_best_depth(reading: int) -> None:
    """However the drafts of some steps turn out, and although the batch fills and empties meanwhile."""
    chosen: Counter[int] = Counter()
    for seed in range(200):
        tuner, machine = StepTuner((0, 1, 3), 16), h200(seed)
        for _ in range(2):
            answer(tuner, machine, reading=reading)
        chosen[tuner.best(10)] += 1
    assert chosen[1] >= 0.97 * 200, chosen


def test_what_many_sessions_teach_about_drafts_holds_for_one() -> None:
    """Its own few steps, with rates as far apart as those of ten on an H200, would say little."""
    chosen: Counter[int] = Counter()
    for seed in range(200):
        tuner, machine = StepTuner((0, 1, 3), 16), h200(seed)
        run(tuner, machine, 16, 10 * WINDOW_STEPS)
        machine.row_s *= 10
        run(tuner, machine, 1, 8 * WINDOW_STEPS)
        chosen[tuner.best(1)] += 1
    assert chosen[1] >= 0.97 * 200, chosen


def test_a_batch_size_in_passing_does_not_change_the_depth() -> None:
    """A group would change it as it fills and as it empties, where fewer sessions are faster with more drafts."""
    changes = []
    for seed in range(20):
        tuner, machine = StepTuner((0, 1, 3), 16), h200(seed)
        for _ in range(10):
            answer(tuner, machine, reading=1)
        changes += [answer(tuner, machine, reading=1) for _ in range(5)]
    assert sum(changes) < 0.7 * len(changes), changes


def test_a_small_advantage_is_not_worth_a_change() -> None:
    tuner = StepTuner((0, 1), 16)
    chosen = []
    for at_none in (1.0, 1.02, 1.05):
        for _ in range(20 * WINDOW_STEPS):
            depth = tuner.depth(4)
            tuner.measured(depth, 4, [1] * 4, 1.01 if depth else at_none)
        chosen.append(tuner.depth(4))
    assert chosen == [0, 0, 1]


def test_a_batch_size_that_changes_while_another_depth_is_measured_goes_back_to_the_best() -> None:
    tuner, machine = StepTuner((0, 1), 16), Machine(1, 1, 0)
    for sessions in (8, 4):
        run(tuner, machine, sessions, 4 * WINDOW_STEPS)
    while tuner.depth(4) == 0:
        run(tuner, machine, 4, 1)
    run(tuner, machine, 4, 2)
    assert (tuner.depth(4), tuner.depth(8)) == (1, 0)


def test_drafts_that_are_never_right_any_more_are_given_up_and_come_back() -> None:
    tuner, machine = StepTuner((0, 1, 3), 16), h200(0)
    run(tuner, machine, 10, 1000)
    assert tuner.best(10) == 1
    machine.right = 0.0
    run(tuner, machine, 10, HALF_LIFE // 10)
    assert tuner.depth(10) == 0, "after half of it was forgotten"
    made = run(tuner, machine, 10, 5 * PROBE_EVERY)
    assert made[0] > 0.99 * 5 * PROBE_EVERY
    machine.right = RIGHT
    run(tuner, machine, 10, 5 * PROBE_EVERY)
    assert tuner.best(10) == 1


def test_every_step_teaches_about_all_depths() -> None:
    acceptance, machine = Acceptance(3), h200(0)
    assert acceptance.tokens(3) == 4, "not tried"
    for _ in range(400):
        acceptance.measured(3, [machine.tokens(3) for _ in range(10)])
    assert [acceptance.tokens(depth) for depth in (0, 1, 3)] == pytest.approx([1, 1.78, 2.85], rel=0.03)
    before = acceptance.tokens(1)
    for _ in range(400):
        acceptance.measured(0, [1] * 10)
    assert acceptance.tokens(1) == pytest.approx(before), "steps without drafts say nothing"
    for _ in range(400):
        acceptance.measured(1, [1] * 10)
    assert acceptance.tokens(3) < 2, "nor is a draft right behind one that is not"


def test_a_depth_that_has_become_better_is_found() -> None:
    tuner = StepTuner((0, 3), 4)
    run(tuner, Machine(1, 0.5, 0.2), 4, 10 * WINDOW_STEPS)
    assert tuner.depth(4) == 0
    made = run(tuner, Machine(1, 0.001, 0.9), 4, 16 * PROBE_EVERY)
    assert made[3] > made[0] / 2
    assert tuner.depth(4) == 3


def test_depths_that_are_much_slower_with_fewer_sessions_are_not_measured_with_more() -> None:
    tuner, machine = StepTuner((0, 1, 3), 16), Machine(1, 0.01, 0.9)
    run(tuner, machine, 1, 5 * WINDOW_STEPS)
    run(tuner, machine, 2, 5 * WINDOW_STEPS)
    assert tuner.unmeasured(2) == []
    assert set(tuner.rates()) == {"0x1", "1x1", "3x1", "3x2"}
    slower = Machine(1, 1, 0.9)
    run(tuner, slower, 16, 6 * WINDOW_STEPS)
    assert tuner.unmeasured(16) == [], "three drafts are not much faster there"
    assert {"0x16", "1x16", "3x16"} < set(tuner.rates())


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
        tuner.measured(0, 8, [1] * 8, 1.0)
    for _ in range(3 * WINDOW_STEPS):
        tuner.measured(0, 9, [1] * 9, 1.5)
    assert [tuner.limit(sessions) for sessions in (8, 9, 16)] == [8, 8, 16]
    for _ in range(30 * WINDOW_STEPS):
        tuner.measured(0, 9, [1] * 9, 1.2)
    assert tuner.limit(9) == 9, "a little more is not worth that one waits"


def test_a_batch_that_was_not_full_is_not_taken_for_a_full_one() -> None:
    """Steps of eight places that five sessions sat in were short: nine together are not slower than eight would be."""
    tuner = StepTuner((0,), 16)
    for sessions in (5, 9):
        run(tuner, Machine(1, 1, 0), sessions, 3 * WINDOW_STEPS)
    assert tuner.limit(9) == 9


def test_a_batch_is_not_judged_before_all_depths_were_measured() -> None:
    """Sixteen together are slower than eight with three drafts, and faster without."""
    tuner, seconds = StepTuner((0, 3), 16), {(0, 8): 1.0, (3, 8): 3.0, (0, 16): 1.0, (3, 16): 8.0}
    for sessions, steps, unmeasured in ((8, 4, []), (16, 1.5, [0]), (16, 3, [])):
        for _ in range(int(steps * WINDOW_STEPS)):
            depth = tuner.depth(sessions)
            tuner.measured(depth, sessions, [depth + 1] * sessions, seconds[depth, sessions])
        assert tuner.unmeasured(sessions) == unmeasured
        assert tuner.limit() == 16


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
