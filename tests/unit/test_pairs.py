"""``kvd-bench pairs``: the drafts that it scripts, what it makes of runs, and all of it once, on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cli import main
from benchmarks.pairs_prompt import text_tokens
from benchmarks.pairs_report import PairsReport
from benchmarks.pairs_run import DecodeResult, PrefillResult, RunSettings
from benchmarks.pairs_script import KEPT, kept_drafts, scripted_drafts
from benchmarks.report import Report
from compute.decode.selections import Trace
from protocol.errors import InvalidValue
from protocol.layout import PAGE_TOKENS
from protocol.model import DEMO

CONFIG = replace(DEMO, index_topk=32, hidden_size=64, index_n_heads=8, n_routed_experts=4, num_nextn_predict_layers=1)
CONFIG = replace(CONFIG, num_hidden_layers=3, vocab_size=4096)


def test_scripted_drafts_are_kept_as_often_as_published() -> None:
    output = list(range(5000, 6024))
    drafts = scripted_drafts(output, 3, 0, vocabulary=10_000)
    right = [draft == token for draft, token in zip(drafts, output, strict=True)]
    assert kept_drafts(right, 3) == KEPT == 665
    assert all(draft in (token, token + 1) for draft, token in zip(drafts, output, strict=True))
    assert drafts == scripted_drafts(output, 3, 0, vocabulary=10_000)
    assert drafts != scripted_drafts(output, 3, 9_000, vocabulary=10_000)


def test_drafts_that_are_kept() -> None:
    assert kept_drafts([True] * 10, 3) == 6  # 1, 1 without drafts, 4, 4
    assert kept_drafts([False] * 10, 3) == 0
    assert kept_drafts([True, True, True, False, True, True, True, True], 3) == 1 + 3  # 1, 1, 2, 4


def test_the_prompt_is_a_text_in_words(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("to be, or not to be")
    tokens = text_tokens(12, 4096, tmp_path / "text")
    assert tokens[0] == tokens[9]
    assert tokens[1] == tokens[4] == tokens[6]
    assert len(set(tokens)) == 6
    assert all(0 <= token < 4096 for token in tokens)
    with pytest.raises(InvalidValue, match=r"tokens of the prompt is 13; allowed: at most the 12"):
        text_tokens(13, 4096, tmp_path / "text")
    assert len(text_tokens(50_023, 154_880)) == 50_023  # the project's own


def settings() -> RunSettings:
    return RunSettings(
        run_dir="",
        device="cpu",
        model=asdict(CONFIG),
        dtype="bf16",
        seed=0,
        prompt=[1, 2],
        stored=0,
        chunk=1,
        tokens=4,
        hot_rows=64,
        format_drafts=0,
    )


def result(tokens: list[int], step_s: float, stall_s: float = 0.0) -> DecodeResult:
    times = [0.1 + step_s * step for step in range(len(tokens))]
    times[-1] += stall_s
    lookups = [[90, 6, 0, 4]] * len(CONFIG.index_groups())
    return DecodeResult(tokens, [(time, 1) for time in times], 0, lookups, 0, 0.0)


def report_of(resident: DecodeResult, offloaded: DecodeResult) -> PairsReport:
    report = PairsReport.begin("none", CONFIG, settings())
    report.prompt_stored(PrefillResult("none", 2, 1.0, 0))
    report.reference("about1", resident)
    report.pair("about1", 0, 1, resident, offloaded)
    report.case_done("about1", 0)
    return report


def test_a_pair_is_reported_as_it_is() -> None:
    report = report_of(result([1, 2, 3, 4], 0.010), result([1, 2, 3, 4], 0.010, 0.070))
    rows = {row.case: row for row in report.rows}
    assert rows["about1, MTP=0, pair 1: resident"].value == pytest.approx(100)
    assert rows["about1, MTP=0, pair 1: offloaded"].value == pytest.approx(30)
    loss = rows["about1, MTP=0, pair 1: loss"]
    assert loss.value == pytest.approx(70)
    assert loss.met is False
    assert rows["about1, MTP=0, offloaded: between steps' tokens, longest"].value == pytest.approx(80)
    assert rows["about1, MTP=0: misses, mean of groups"].value == pytest.approx(10)
    assert report.settings["gaps"]["about1, MTP=0, offloaded, pair 1: over 5 medians"] == [{"step": 3, "ms": 80.0}]
    assert report.settings["gaps"]["about1, MTP=0, resident, pair 1: over 5 medians"] == []
    assert report.exit_status == 0
    assert "| about1, MTP=0, pair 1: loss | 70 | % |  |  | 0.5 | no |" in report.markdown()
    assert rows["about1, MTP=0, pair 1: outputs equal to the reference"].value == 2


def test_an_output_that_differs_fails_the_bench() -> None:
    report = report_of(result([1, 2, 3, 4], 0.010), result([1, 2, 5, 4], 0.010))
    assert report.exit_status == 1
    assert any("token 2 is 5, not 3" in row.case and row.met is False for row in report.rows)
    report = report_of(result([1, 2, 3, 4], 0.010), result([1, 2, 3, 4], 0.010))
    report.negative_control("about1", result([1, 2, 3], 0.010))
    assert report.exit_status == 1


def test_parts_that_ran_apart_are_merged() -> None:
    report = report_of(result([1, 2, 3, 4], 0.010), result([1, 2, 3, 4], 0.010))
    earlier = report_of(result([1, 2, 3, 4], 0.010), result([1, 2, 3, 4], 0.020))
    earlier.pair("about1", 0, 2, result([1, 2, 3, 4], 0.010), result([1, 2, 3, 4], 0.020))
    report.merge(Report.from_json(json.loads(json.dumps(earlier.as_json()))))
    values = {row.case: row.value for row in report.rows}
    assert values["about1, MTP=0, pair 1: offloaded"] == pytest.approx(100)
    assert values["about1, MTP=0, pair 2: offloaded"] == pytest.approx(50)
    assert "about1, MTP=0, pair 2, offloaded" in report.settings["outputs"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--trace /dev/null", "trace is '/dev/null'"),
        ("--text /nowhere", "--text is '/nowhere'"),
        ("--mtp 4", "--mtp is 4; allowed: 0 to 3"),
        ("--prompt 90 --append 40", "--prompt and --tokens"),
        ("--experts 7", "routed experts is 7"),
        ("--layers 0", "layers is 0; allowed: 1 to 78"),
    ],
)
def test_what_cannot_run_is_refused_at_once(options: str, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["pairs", *options.split()]) == 64
    assert said in capfd.readouterr().err


@pytest.mark.slow
def test_pairs_on_a_cpu(tmp_path: Path) -> None:
    """One pair with drafts and blended queries, and what its selections are; kept, with a table and a plot."""
    model, trace = tmp_path / "config.json", tmp_path / "selections"
    model.write_text(json.dumps(asdict(CONFIG)))
    command = f"--model {model} --experts 4 --dtype bf16 --device cpu --prompt 180 --chunk 128 --tokens 24 --pairs 1"
    command += f" --hot-rows 128 --mtp 3 --preset overlap40 --record-selections {trace} --json --save {tmp_path}"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cli", "pairs", *command.split()],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
    )
    written: dict[str, Any] = json.loads(done.stdout)
    values = {row["case"]: row["value"] for row in written["rows"]}
    assert values["overlap40: a corrupted fetched row a step changes the output"] == 1
    assert values["overlap40, MTP=3: drafts kept"] == 16
    assert values["overlap40, MTP=3: misses, mean of groups"] > 0
    assert set(written["settings"]["outputs"].values()) == {
        written["settings"]["outputs"]["overlap40, reference"],
        written["settings"]["outputs"]["overlap40, corrupted rows"],
    }
    assert {path.suffix for path in tmp_path.glob("pairs-*")} == {".json", ".md", ".png"}
    recorded = Trace.load(trace, len(CONFIG.index_groups(0, 4)), CONFIG.index_topk)
    assert (recorded.first_position, len(recorded.selections)) == (180, 23)
    assert 2 * PAGE_TOKENS < 180
