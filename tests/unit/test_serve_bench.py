"""``kvd-bench serve``: the trace that it draws, what it calls right, and all of it once, on a CPU."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.cli import main
from benchmarks.report import Row
from benchmarks.serve import verified
from benchmarks.serve_report import Trace
from benchmarks.serve_trace import SHORTEST, Answer, Asked, Lengths, ask, draw
from compute.decode.sampler import GREEDY
from tests.blackbox.scheduling import CONFIG


def test_a_trace_is_its_seeds() -> None:
    mixed = Lengths(SHORTEST, 256, 32)
    trace = draw(200, 50.0, 3, 1000, mixed)
    assert trace == draw(200, 50.0, 3, 1000, mixed)
    assert trace != draw(200, 50.0, 4, 1000, mixed)
    lengths = sorted(len(asked.prompt) for asked in trace)
    assert SHORTEST <= lengths[0] < 16 < lengths[100] < 128 < lengths[-1] <= 256
    assert {asked.tokens for asked in trace} == set(range(SHORTEST, 33))
    assert [asked.sampling is GREEDY for asked in trace] == [True, False] * 100
    due = [asked.due_s or 0.0 for asked in trace]
    assert due == sorted(due)
    assert 2 < due[-1] < 8, "200 requests, 50 a second"
    assert {asked.due_s for asked in draw(5, 0.0, 3, 1000, mixed)} == {None}


@pytest.mark.parametrize(("skew", "above"), [(0.0, 500), (1.0, 91)])
def test_a_skew_makes_long_prompts_rare(skew: float, above: int) -> None:
    """Of 1,000 lengths from 10 to 1,000: how many exceed 100."""
    chance, lengths = random.Random(1), Lengths(10, 1000, 16, skew)
    drawn = sorted(lengths.draw(chance)[0] for _ in range(1000))
    assert drawn[0] == 10
    assert 400 < drawn[-1] <= 1000
    assert abs(sum(length > 100 for length in drawn) - above) < 50


def answers() -> list[Answer]:
    return [Answer([1, 2, 3], 0.0, 0.2, [0.1, 0.3]), Answer([4], 0.5, 0.1, [])]


def rows(served: list[Answer], drift: int = 0, verified: tuple[int, ...] = (0, 1)) -> dict[str, Row]:
    asked = draw(2, 0.0, 3, 10, Lengths(SHORTEST, 16, 16))
    alone = {number: answers()[number] for number in verified}
    return {row.case: row for row in Trace(asked, served, 2.0, 0, alone, 4.0, {"host": drift}).rows(sharers=2)}


def test_what_is_wrong_misses_its_goal() -> None:
    right = rows(answers())
    assert all(row.met is not False for row in right.values())
    assert sum(row.met is True for row in right.values()) == 3
    assert (right["gap between tokens, p99"].value, right["gap between tokens, p99"].floor) == (300, 300)
    assert right["time to first token, p50"].value == 200
    assert (right["output tokens of all requests"].value, right["output tokens of all requests"].floor) == (2, 1)
    other, failed = answers(), answers()
    other[0].tokens[2], failed[1].error = 9, "no"
    assert rows(other)["answers that differ from those alone"].met is False
    assert rows(other, verified=(1,))["answers that differ from those alone"].met is True
    assert rows(failed)["requests that failed"].met is False
    assert rows(answers(), -1)["host: bytes requested more or less than before"].met is False


def test_what_is_due_too_late_is_not_sent(tmp_path: Path) -> None:
    """Nobody listens there."""
    now = time.monotonic()
    assert ask(tmp_path / "http.sock", Asked(5.0, [1], 1, GREEDY), now, until=now + 1) is None
    assert ask(tmp_path / "http.sock", Asked(None, [1], 1, GREEDY), now, until=now - 1) is None
    with pytest.raises(FileNotFoundError):
        ask(tmp_path / "http.sock", Asked(0.0, [1], 1, GREEDY), now, until=now + 1)


def test_the_longest_prompt_is_verified_and_others_of_the_seed() -> None:
    asked = [Asked(None, [0] * length, 1, GREEDY) for length in (3, 9, 4, 1, 5)]
    assert verified(asked, None, 0) == verified(asked, 9, 0) == [0, 1, 2, 3, 4]
    assert verified(asked, 1, 0) == [1]
    drawn = {tuple(verified(asked, 3, seed)) for seed in range(20)}
    assert len(drawn) > 3
    assert all(1 in numbers and len(set(numbers)) == 3 for numbers in drawn)
    assert verified(asked, 3, 7) == verified(asked, 3, 7)


def test_a_request_that_is_passed_over_shows() -> None:
    """Twelve requests of 100 tokens, sent at once and answered one after the other, by two at a time."""
    asked = [Asked(None, [0] * 100, 1, GREEDY)] * 12
    fair = [Answer([1], 0.001 * number, 1.0 + number, []) for number in range(12)]
    assert Trace(asked, fair, 12.0, 0, {}, 1.0, {}).longest_wait(2) <= 1
    fair[1].first_s, fair[1].gaps_s = 11.0, [0.1]
    assert Trace(asked, fair, 12.0, 0, {}, 1.0, {}).longest_wait(2) > 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--requests 0", "--requests is 0; allowed: 1"),
        ("--clients 0", "--clients is 0"),
        ("--rate -1", "--rate is -1.0; allowed: at least 0"),
        ("--output 7", "--output is 7; allowed: 8"),
        ("--mtp 4", "--mtp is 4; allowed: 0 to 3"),
        ("--hot-rows 10", "--hot-rows is 10"),
        ("--shortest 600", "--prompt is 512; allowed: 600"),
        ("--skew -1", "--skew is -1.0; allowed: at least 0"),
        ("--requests 4 --verify 5", "--verify is 5; allowed: 1 to 4"),
    ],
)
def test_what_cannot_run_is_refused_at_once(options: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *options.split()]) == 64
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_small_trace_on_a_cpu(tmp_path: Path) -> None:
    """With drafts and at a rate: each answer that is looked at as alone, and no byte missing."""
    model = tmp_path / "config.json"
    model.write_text(json.dumps(asdict(CONFIG)))
    options = "--requests 6 --clients 3 --rate 20 --mtp 1 --prompt 200 --output 20 --chunk 64 --verify 4 --json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cli", "serve", "--model", str(model), *options.split()],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
    )
    written = json.loads(done.stdout)
    values = {row["case"]: row["value"] for row in written["rows"]}
    assert values["distinct output tokens"] > 8
    assert values["output tokens"] == sum(asked.tokens for asked in draw(6, 20.0, 0, 256, Lengths(SHORTEST, 200, 20)))
    assert values["requests answered alone too"] == 4
    assert values["longest wait for a first token, of what the work ahead of it takes"] > 0
    assert [row["met"] for row in written["rows"] if row["goal"] is not None] == [True] * 4
    assert written["settings"]["hot_rows"] == 2048
