"""``kvd-bench plan``: the step model of ``kvd plan --fleet`` beside what kept results measured.

For each step that a result of ``decode``, ``pairs`` or ``sessions`` has, the time that `kvd.planning.step_model`
expects of the same model, histories, drafts and misses. Nothing runs. The 1 x 1 step of ``decode`` is one that the
model was made from; the others are not.
"""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import RESULTS, Report, Row, load
from kvd.planning.products import WEIGHT_TYPES
from kvd.planning.step_model import Batch, Rates, StepModel, measured
from protocol.errors import InvalidValue
from protocol.layout import Q8G64
from protocol.model import GLM_5_3

BENCHES = ("decode", "pairs", "sessions")
GOAL = 5.0
"""Percent that a plan may be off."""

_DECODE = re.compile(r"(?P<dtype>\w+), \d+ layers, (?P<sessions>\d+) sessions of 1 rows: step")
_SESSIONS = re.compile(r"(?P<name>(?P<sessions>\d+) sessions of .*): (?P<mode>resident|offloaded), a step")
_PAIRS = re.compile(r"(?P<preset>\w+), MTP=(?P<drafts>\d), (?P<mode>\w+): between steps' tokens, p50")


@dataclass(frozen=True)
class Measured:
    """A step that was timed, in µs, and what it decoded."""

    case: str
    us: float
    dtype: str
    cached: bool
    batch: Batch


def configure(parser: ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument("results", type=Path, nargs="*", help="result files (default: those kept of its kernels)")


def run(arguments: Namespace) -> Report:
    """Compare; raises `InvalidValue` where no result has a step of the hardware that the model was measured on."""
    files = arguments.results or sorted(RESULTS.glob("*.json"))
    since = "" if arguments.results else products_date()
    report = Report("plan", measured()["hardware"], {"results": []})
    seen: set[tuple[str, str]] = set()
    for result in sorted(map(load, files), key=lambda result: result.date, reverse=True):
        if result.bench not in BENCHES or result.date < since:
            continue
        if result.hardware != report.hardware:
            print(f"{result.bench} on {result.hardware}: not the plan's hardware", file=sys.stderr)
            continue
        steps = [step for step in steps_of(result) if (result.bench, step.case) not in seen]  # the newest of each
        seen |= {(result.bench, step.case) for step in steps}
        rows = [row for step in steps for row in _compare(result, step) if arguments.only in row.case]
        if rows:
            report.settings["results"].append(f"{result.bench} {result.date}")
            report.rows += rows
    if not report.rows:
        raise InvalidValue(
            "results", [str(path) for path in files], f"one of {', '.join(BENCHES)} on {report.hardware}"
        )
    return report


def products_date() -> str:
    """When the products that the model is made from were measured: kept steps of before then may be of others."""
    return load(RESULTS / measured()["kernels"][-1]).date


def steps_of(result: Report) -> Iterator[Measured]:
    """Those that the model can be asked for."""
    values = {row.case: row.value for row in result.rows}
    for case, value in values.items():
        if result.bench == "decode" and (match := _DECODE.fullmatch(case)):
            tokens = int(re.findall(r"\d+", result.settings["history"])[0])
            batch = Batch(int(match["sessions"]), tokens)
            yield Measured(case.removesuffix(": step"), value, match["dtype"], False, batch)
        elif result.bench == "pairs" and (match := _PAIRS.fullmatch(case)):
            about = f"{match['preset']}, MTP={match['drafts']}"
            tokens = result.settings["prompt tokens"] + result.settings["output tokens"] / 2
            misses = values[f"{about}: misses, mean of groups"] / 100
            batch = Batch(1, tokens, int(match["drafts"]), misses)
            cached = match["mode"] == "offloaded"
            yield Measured(f"{about}, {match['mode']}", 1e3 * value, result.settings["dtype"], cached, batch)
        elif result.bench == "sessions" and (match := _SESSIONS.fullmatch(case)):
            starts = result.settings["rows at the start"]
            misses = values[f"{match['name']}: misses, measured"] / 100
            batch = Batch(int(match["sessions"]), sum(starts) / len(starts), 0, misses)
            cached = match["mode"] == "offloaded"
            yield Measured(f"{match['name']}, {match['mode']}", value, result.settings["dtype"], cached, batch)


def _compare(result: Report, step: Measured) -> list[Row]:
    config = GLM_5_3.with_layers(result.settings["layers"]).with_experts(result.settings["experts"])
    kind = next(kind for kind in WEIGHT_TYPES if kind == step.dtype)
    floors = {row.case: row.value for row in result.rows if row.case.startswith("floor")}
    hbm_read = 1e9 * floors.get("floor: HBM read", measured()["hbm_read"] / 1e9)
    rates = Rates(hbm_read, measured()["bus_read"])
    expected = StepModel(config, Q8G64, kind, rates, cached=step.cached).step(step.batch).total
    case = f"{result.bench}, {step.case}"
    return [
        Row(f"{case}: step, measured", step.us, "µs"),
        Row(f"{case}: step, as planned", expected, "µs"),
        Row(f"{case}: planned, off by", abs(100 * (expected / step.us - 1)), "%", goal=GOAL),
    ]
