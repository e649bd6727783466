"""Miss rates of replacement policies against cache size, over recorded or synthetic selections. Needs no GPU.

The product's cache is circular: what other policies would save is shown here, and what they cost is not: a clock's hand
or a least-recently-used order must be kept by every program that looks up a row.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from benchmarks.cache_policies import POLICIES, Integers, misses, next_uses
from benchmarks.report import Report, Row, cpu_name
from protocol.errors import InvalidValue

SLOTS = "2048,4096,8192,16384,32768"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument("--trace", type=Path, metavar="FILE", help="selections that kvd-bench pairs recorded")
    parser.add_argument("--slots", default=SLOTS, help="cache sizes, in rows (default %(default)s)")
    parser.add_argument("--policies", default=",".join(POLICIES), help="which (default %(default)s)")
    parser.add_argument("--history", type=int, default=51200, help="synthetic: tokens of history (default %(default)s)")
    parser.add_argument("--topk", type=int, default=2048, help="synthetic: rows selected (default %(default)s)")
    parser.add_argument("--steps", type=int, default=256, help="synthetic: decode steps (default %(default)s)")
    parser.add_argument(
        "--overlap", type=float, default=0.45, help="synthetic: of consecutive steps (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="synthetic (default %(default)s)")


def run(arguments: argparse.Namespace) -> Report:
    sizes = [_slots(word) for word in arguments.slots.split(",")]
    names = arguments.policies.split(",")
    for name in names:
        if name not in POLICIES:
            raise InvalidValue("--policies", name, ", ".join(POLICIES))
    settings: dict[str, Any]
    if arguments.trace:
        groups = load_trace(arguments.trace)
        settings = {"selections": str(arguments.trace), "groups": len(groups)}
    else:
        shape = (arguments.history, arguments.topk, arguments.steps, arguments.overlap)
        groups = {"": synthetic(*shape, seed=arguments.seed)}
        settings = {"selections": "synthetic", "history": arguments.history, "seed": arguments.seed}
    report = Report("cache-sim", cpu_name(), settings)
    for label, selections in groups.items():
        report.rows += _rows(label, selections, sizes, names, arguments.only)
    if arguments.plot:
        plot(report, sizes, names, arguments.plot)
        arguments.plot = None  # what `kvd-bench` would draw is times against floors
    return report


def _rows(label: str, selections: list[Integers], sizes: list[int], names: list[str], only: str) -> list[Row]:
    """The second half of the steps counts: the first fills the cache."""
    most = max(map(len, selections))
    uses, counted = next_uses(selections), len(selections) // 2
    asked = sum(map(len, selections[counted:]))
    rows = [Row(f"{label}overlap of consecutive steps", 100 * overlap(selections), "%")]
    for slots in sizes:
        if slots < most:
            raise InvalidValue("--slots", slots, f"at least the {most} rows of the largest selection")
        best: float | None = None
        for name in sorted(names, key=lambda name: name != "optimal"):  # the others are shown beside it
            case = f"{label}{name}, {slots:,} slots"
            if only not in case:
                continue
            print(case, file=sys.stderr, flush=True)
            missed = misses(selections, slots, POLICIES[name](slots), uses)
            share = 100 * int(missed[counted:].sum()) / asked
            best = share if name == "optimal" else best
            rows.append(Row(case, share, "% missed", floor=best))
    return rows


def synthetic(history: int, topk: int, steps: int, kept: float, *, seed: int) -> list[Integers]:
    """Selections of a history: part ``kept`` of a step's predecessor, and others, of which few are chosen often.

    How often a position is chosen falls with its rank as 1 / rank, in an order that has nothing to do with its place.
    """
    if not 0 < topk <= history or not 0.0 <= kept <= 1.0 or steps < 2:
        raise InvalidValue(
            "synthetic selections", (history, topk, steps, kept), "topk ≤ history, overlap 0 to 1, steps ≥ 2"
        )
    random = np.random.default_rng(seed)
    places = random.permutation(history)
    weight = 1.0 / np.arange(1, history + 1)
    selections: list[Integers] = []
    for _ in range(steps):
        before = random.permutation(selections[-1])[: round(kept * topk)] if selections else np.empty(0, dtype=np.int64)
        # A weighted draw without replacement: the largest of u ** (1 / weight).
        keys = np.log(random.random(history)) / weight
        drawn = places[np.argsort(-keys)]
        fresh = drawn[~np.isin(drawn, before)][: topk - len(before)]
        selections.append(np.sort(np.concatenate((before, fresh)).astype(np.int64)))
    return selections


def load_trace(path: Path) -> dict[str, list[Integers]]:
    """Of each index group, the selection of each step. Raises `InvalidValue` for a file that is no trace.

    The format is that of `compute.decode.selections`; a model's shape is not asked here.
    """
    try:
        with safe_open(path, framework="numpy") as opened:
            found = opened.get_tensor("selections")
    except (OSError, SafetensorError) as error:
        raise InvalidValue("trace", str(path), f"a safetensors file with selections ({error})") from None
    if found.dtype != np.int32 or found.ndim != 3 or found.shape[0] < 2:
        raise InvalidValue(
            f"selections of trace {path}", f"{found.dtype} {found.shape}", "int32 [2 or more, groups, k]"
        )
    groups = found.astype(np.int64).transpose(1, 0, 2)
    return {f"group {group}: ": [row[row >= 0] for row in rows] for group, rows in enumerate(groups)}


def overlap(selections: Sequence[Integers]) -> float:
    """The part of a selection that the step before had selected too, on average."""
    pairs = itertools.pairwise(selections)
    return float(np.mean([len(np.intersect1d(before, after)) / max(len(after), 1) for before, after in pairs]))


def plot(report: Report, sizes: list[int], names: list[str], path: Path) -> None:
    """Draw the rows missed against the size of the cache, a line for each policy: the mean over index groups."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel="slots", ylabel="% of selected rows missed")
    axes.set_title(f"hot cache, {report.settings['selections']} selections", fontsize=10)
    for name in names:
        values = [
            np.mean([row.value for row in report.rows if row.case.endswith(f"{name}, {slots:,} slots")] or [np.nan])
            for slots in sizes
        ]
        axes.plot(sizes, values, marker="o", label=name)
    axes.set_xticks(sizes, [f"{slots:,}" for slots in sizes])
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path)


def _slots(word: str) -> int:
    if not word.isdecimal() or not 0 < int(word) <= 1 << 24:
        raise InvalidValue("--slots", word, "numbers from 1 to 16,777,216, with commas between")
    return int(word)
