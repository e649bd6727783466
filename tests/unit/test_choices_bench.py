"""``kvd-bench choices``: what it makes of rates, what it refuses, and all of it once, on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.choices import CHOSEN, kind, table
from benchmarks.choices_world import Group
from benchmarks.cli import main
from tests.blackbox.scheduling import CONFIG


def group(seconds: float) -> Group:
    return Group([[1, 2, 3], [4, 5, 6]], seconds, 2, 0.0)


def test_the_choice_is_held_against_the_best_of_the_others() -> None:
    """Rates are tokens of all rounds over their time, not a mean of rates."""
    timed = {kind(0, 4): [group(1.0), group(2.0)], kind(3, 4): [group(1.5), group(0.5)], CHOSEN: [group(0.5)] * 2}
    rows = {row.case: row for row in table(timed)}
    assert (rows[kind(0, 4)].value, rows[kind(3, 4)].value, rows[CHOSEN].value) == (4, 6, 12)
    assert rows[kind(0, 4)].baseline == 6
    assert rows[f"{CHOSEN}, beside the best"].value == 2
    assert rows[f"{CHOSEN}, beside the best"].met is True
    assert rows["difference between rounds, median of all kinds"].value == 100
    slow = {row.case: row for row in table(timed | {CHOSEN: [group(1.1)]})}
    assert slow[f"{CHOSEN}, beside the best"].met is False
    assert group(1.0).tokens_per_step == 2, "the first token of each answer comes without a step"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--sessions 17", "--sessions is 17; allowed: 1 to 16"),
        ("--mtp 0 4", "--mtp is 4; allowed: 0 to 3"),
        ("--model demo --mtp 1", "--mtp is 1; allowed: 0: the model has no MTP layer"),
        ("--limits 4 0", "--limits is 0; allowed: 1 to 16"),
        ("--history 100", "--history is 100; allowed: a multiple of 64"),
        ("--output 1", "--output is 1; allowed: 2"),
        ("--hot-rows 10", "--hot-rows is 10"),
    ],
)
def test_what_cannot_run_is_refused_at_once(options: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["choices", "--device", "cpu", *options.split()]) == 64
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_small_table_on_a_cpu(tmp_path: Path) -> None:
    """Answers are the same in every cell, drafts stay as often as they are scripted to."""
    model = tmp_path / "config.json"
    model.write_text(json.dumps(asdict(CONFIG)))
    options = "--device cpu --dtype bf16 --experts 4 --sessions 3 --history 128 --append 20 --output 20 --mtp 0 3"
    options += " --limits 1 4 --rounds 1 --chunk 64 --json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cli", "choices", "--model", str(model), *options.split()],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
    )
    values = {row["case"]: row["value"] for row in json.loads(done.stdout)["rows"]}
    assert {kind(depth, limit) for depth in (0, 3) for limit in (1, 4)} < set(values)
    assert values["answers that differ from the first group's"] == 0
    assert values["distinct output tokens"] > 8
    assert values["MTP 0: tokens of a session's step"] == 1
    assert values["MTP 3: tokens of a session's step"] > 1.5
