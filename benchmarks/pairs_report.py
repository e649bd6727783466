"""What ``kvd-bench pairs`` reports: each pair by itself, hashes of all outputs, gaps between tokens, and why."""

from __future__ import annotations

import hashlib
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from benchmarks.gather import markdown
from benchmarks.pairs_run import DecodeResult, PrefillResult, RunSettings
from benchmarks.report import RESULTS, Report, Row
from compute.kernels.state import DUPLICATE_MISSES, UNIQUE_MISSES
from protocol.layout import Q8G64
from protocol.model import ModelConfig

LOSS_GOAL = 0.5
"""Percent, of each pair at about 1 % misses."""
MISSES_GOAL = 3.0
"""Percent, the most of any group at about 1 %."""
SPEED_UP_GOAL = 2.0
"""Of three drafts a step."""
FIRST_TOKEN_GOAL = 1.01
"""Of the time that a resident run takes to read what is appended, and say the first token."""
STALL = 5
"""A gap of more medians than this is listed."""
_HOST_SETTINGS = (
    "/proc/sys/kernel/numa_balancing",
    "/proc/sys/vm/compaction_proactiveness",
    "/sys/kernel/mm/transparent_hugepage/enabled",
    "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
)
_MODES = ("resident", "offloaded")


@dataclass
class PairsReport(Report):
    """``exit_status`` is 1 once an output differed, or the negative control did not."""

    _config: ModelConfig | None = None
    _references: dict[str, DecodeResult] = field(default_factory=dict)
    _bytes_per_s: float = 0.0
    _runs: dict[tuple[str, int], dict[str, list[DecodeResult]]] = field(default_factory=dict)

    @classmethod
    def begin(cls, hardware: str, config: ModelConfig, base: RunSettings, appended: int = 0) -> Self:
        settings: dict[str, Any] = {
            "torch": torch.__version__,
            "layers": config.num_hidden_layers,
            "experts": config.n_routed_experts,
            "dtype": base.dtype,
            "prompt tokens": len(base.prompt),
            "appended tokens": appended,
            "prompt sha256": token_digest(base.prompt),
            "prompt": "synthetic rows" if base.synthetic else "computed rows",
            "output tokens": base.tokens,
            "hot rows": base.hot_rows,
            "selections": base.trace or "of random weights, index queries blended with their predecessors",
            "host": {path: _read(path) for path in _HOST_SETTINGS},
            "left out": [],
            "outputs": {},
            "gaps": {},
            "selections measured": {},
        }
        return cls("pairs", hardware, settings, _config=config)

    def prompt_stored(self, result: PrefillResult) -> None:
        rate = result.tokens / result.seconds
        self.rows.append(Row("prompt: stored", rate, "tokens/s"))
        self.rows.append(Row("prompt: VRAM taken at most", result.peak_vram_bytes / 2**30, "GiB"))

    def reference(self, preset: str, result: DecodeResult) -> None:
        """The output that all others of ``preset`` must equal."""
        self._references[preset] = result
        self._note_output(f"{preset}, reference", result)
        self.rows.append(Row(f"{preset}: distinct tokens of the output", len(set(result.tokens)), "tokens"))

    def negative_control(self, preset: str, result: DecodeResult) -> None:
        differs = result.tokens != self._references[preset].tokens[: len(result.tokens)]
        self._note_output(f"{preset}, corrupted rows", result)
        self.rows.append(Row(f"{preset}: a corrupted fetched row a step changes the output", float(differs), "of 1"))
        if not differs:
            fetched = sum(counts[UNIQUE_MISSES] for counts in result.lookups)
            self._fail(
                f"{preset}: of {fetched} fetched rows corrupted ones changed nothing; a wrong one would go unseen"
            )

    def measured(self, preset: str, result: DecodeResult) -> None:
        """Overlap, and where misses lie."""
        self._compare(f"{preset}, selections", preset, result)
        self._bytes_per_s = result.bytes_per_s or self._bytes_per_s
        main = self._main_groups(result.overlaps)
        self.rows.append(Row(f"{preset}: overlap of consecutive tokens, mean of groups", 100 * _mean(main), "%"))
        percentiles = [pair for pair in self._main_groups(result.missed_percentiles) if pair]
        if percentiles:
            spans = [100 * (high - low) for low, high in percentiles]
            name = f"{preset}: 10th to 90th percentile of missed positions"
            self.rows.append(Row(f"{name}, part of the history, least of groups", min(spans), "% spanned"))
        self.settings["selections measured"][preset] = {
            "overlap of each group": [round(overlap, 4) for overlap in result.overlaps],
            "missed positions, 10th and 90th percentile of each group": result.missed_percentiles,
            "misses of each group, %": [round(rate, 3) for rate in _miss_rates(result)],
        }

    def pair(self, preset: str, depth: int, number: int, resident: DecodeResult, offloaded: DecodeResult) -> None:
        case = f"{case_name(preset, depth)}, pair {number}"
        runs = self._runs.setdefault((preset, depth), {"resident": [], "offloaded": []})
        equal = 0
        for mode, result in zip(_MODES, (resident, offloaded), strict=True):
            equal += self._compare(f"{case}, {mode}", preset, result)
            runs[mode].append(result)
        goal = LOSS_GOAL if preset == "about1" else None
        base = resident.tokens_per_s
        self.rows += [
            Row(f"{case}: resident", base, "tokens/s"),
            Row(f"{case}: offloaded", offloaded.tokens_per_s, "tokens/s", baseline=base),
            Row(f"{case}: loss", _loss(resident, offloaded), "%", goal=goal),
            Row(f"{case}: outputs equal to the reference", equal, "of 2"),
        ]
        if self.settings["appended tokens"]:
            first, second = resident.deliveries[0][0], offloaded.deliveries[0][0]
            self.rows += [
                Row(f"{case}: first token, resident", first, "s"),
                Row(f"{case}: first token, offloaded", second, "s", baseline=first, goal=FIRST_TOKEN_GOAL * first),
            ]

    def resident_pair(self, preset: str, depth: int, number: int, first: DecodeResult, second: DecodeResult) -> None:
        case = f"{case_name(preset, depth)}, resident pair {number}"
        for result in (first, second):
            self._compare(case, preset, result)
        self.rows.append(Row(f"{case}: first against second", _loss(first, second), "%"))

    def left_out(self, what: str) -> None:
        """``what`` was not run, for want of time."""
        self.settings["left out"].append(what)

    def case_done(self, preset: str, depth: int) -> None:
        """What all pairs of a case have in common."""
        case, runs = case_name(preset, depth), self._runs.get((preset, depth))
        if not runs:
            return
        for mode, results in runs.items():
            gaps = sorted(1e3 * gap for result in results for gap in result.gaps)
            for name, value in (("p50", _at(gaps, 0.5)), ("p99", _at(gaps, 0.99)), ("longest", gaps[-1])):
                self.rows.append(Row(f"{case}, {mode}: between steps' tokens, {name}", value, "ms"))
            self._note_stalls(f"{case}, {mode}", results)
        offloaded, resident = runs["offloaded"][-1], runs["resident"]
        rates = [result.tokens_per_s for result in resident]
        if len(rates) > 1:
            spread = 100 * (1 - min(rates) / max(rates))
            self.rows.append(Row(f"{case}: slowest resident run against the fastest", spread, "%"))
        if depth:
            kept = statistics.median(result.kept_drafts for result in resident)
            self.rows.append(Row(f"{case}: drafts kept", kept, "drafts"))
        self._note_misses(case, preset, offloaded)
        if resident[0].step_bytes and self._bytes_per_s:
            steps = len(resident[0].deliveries) - 1
            behind_first = len(resident[0].tokens) - 1
            floor = behind_first / (steps * resident[0].step_bytes / self._bytes_per_s)
            self.rows.append(Row(f"{case}: resident, best, beside its floor", max(rates), "tokens/s", floor=floor))
        undrafted = self._runs.get((preset, 0))
        if depth and undrafted:
            ratio = _rate(runs["offloaded"]) / _rate(undrafted["offloaded"])
            goal = SPEED_UP_GOAL if depth == 3 else None
            self.rows.append(Row(f"{case} against none, offloaded", ratio, "times the speed", goal=goal))

    def merge(self, earlier: Report) -> None:
        """Add what ``earlier`` has and this report lacks: rows, and what is known of their runs."""
        super().merge(earlier)
        for name in ("outputs", "gaps", "selections measured"):
            self.settings[name].update(earlier.settings.get(name, {}) | self.settings[name])

    def print_table(self) -> None:
        super().print_table()
        for name, value in self.settings.items():
            print(f"{name}: {value}")

    def save(self, directory: Path = RESULTS) -> Path:
        """The JSON file, and beside it a table in Markdown and, where matplotlib is installed, a plot."""
        path = super().save(directory)
        path.with_suffix(".md").write_text(self.markdown())
        try:
            self.plot(path.with_suffix(".png"))
        except ModuleNotFoundError as error:
            print(f"no plot: {error}", file=sys.stderr)
        return path

    def markdown(self) -> str:
        about = (f"- {name}: {value}" for name, value in self.settings.items())
        return "\n".join([markdown(self), "", *about, ""])

    def plot(self, path: Path) -> None:
        """Speed of each pair's runs, side by side, and the loss above them."""
        from matplotlib.figure import Figure

        values = {row.case: row.value for row in self.rows}
        pairs = [case.removesuffix(": loss") for case in values if case.endswith(": loss")]
        figure = Figure(figsize=(2 + 1.2 * max(len(pairs), 2), 5), layout="constrained")
        axes = figure.add_subplot(ylabel="tokens/s", title=f"{self.bench} on {self.hardware}")
        for side, mode in enumerate(_MODES):
            places = [place + 0.4 * side for place in range(len(pairs))]
            axes.bar(places, [values[f"{pair}: {mode}"] for pair in pairs], width=0.38, label=mode)
        for place, pair in enumerate(pairs):
            axes.text(place + 0.2, values[f"{pair}: resident"], f"{values[f'{pair}: loss']:.2f} %", ha="center")
        axes.set_xticks([place + 0.2 for place in range(len(pairs))], [pair.replace(", ", "\n") for pair in pairs])
        axes.legend()
        figure.savefig(path)

    def _compare(self, case: str, preset: str, result: DecodeResult) -> bool:
        """Whether the output is the reference's, as far as it goes; the bench fails if not."""
        self._note_output(case, result)
        expected = self._references[preset].tokens[: len(result.tokens)]
        if result.tokens != expected:
            first = next(
                at for at, (got, wanted) in enumerate(zip(result.tokens, expected, strict=True)) if got != wanted
            )
            self._fail(f"{case}: token {first} is {result.tokens[first]}, not {expected[first]}")
        return result.tokens == expected

    def _fail(self, why: str) -> None:
        self.exit_status = 1
        print(f"DIFFERENT: {why}", file=sys.stderr, flush=True)
        self.rows.append(Row(f"DIFFERENT: {why}", 1, "of 1", goal=0))

    def _note_output(self, case: str, result: DecodeResult) -> None:
        self.settings["outputs"][case] = token_digest(result.tokens)

    def _note_stalls(self, case: str, results: list[DecodeResult]) -> None:
        for number, result in enumerate(results, 1):
            typical = statistics.median(result.gaps)
            stalls = [
                {"step": step, "ms": round(1e3 * gap, 3)}
                for step, gap in enumerate(result.gaps, 1)
                if gap > STALL * typical
            ]
            self.settings["gaps"][f"{case}, pair {number}: over {STALL} medians"] = stalls

    def _note_misses(self, case: str, preset: str, result: DecodeResult) -> None:
        rates = self._main_groups(_miss_rates(result))
        if not rates or self._config is None:
            return
        goal = MISSES_GOAL if preset == "about1" else None
        page_format = self._config.page_format(Q8G64, mtp=len(result.lookups) > len(self._config.index_groups()))
        fetched = sum(
            counts[UNIQUE_MISSES] * page_format.group_row_bytes(group) for group, counts in enumerate(result.lookups)
        )
        steps = len(result.deliveries) - 1
        self.rows += [
            Row(f"{case}: misses, mean of groups", _mean(rates), "% of selections"),
            Row(f"{case}: misses, least group", min(rates), "% of selections"),
            Row(f"{case}: misses, largest group", max(rates), "% of selections", goal=goal),
            Row(f"{case}: fetched from host RAM", fetched / steps / 2**20, "MiB a step"),
        ]

    def _main_groups(self, of_groups: list[Any]) -> list[Any]:
        """Without the MTP layer's, which rests where nothing is drafted."""
        assert self._config is not None
        return of_groups[: len(self._config.index_groups())]


def _miss_rates(result: DecodeResult) -> list[float]:
    """Percent of each group's lookups."""
    return [100 * (counts[UNIQUE_MISSES] + counts[DUPLICATE_MISSES]) / max(sum(counts), 1) for counts in result.lookups]


def _loss(resident: DecodeResult, offloaded: DecodeResult) -> float:
    """Percent."""
    return 100 * (1 - offloaded.tokens_per_s / resident.tokens_per_s)


def _rate(results: list[DecodeResult]) -> float:
    return statistics.median(result.tokens_per_s for result in results)


def _at(values: list[float], part: float) -> float:
    """Of ascending values."""
    return values[min(int(part * len(values)), len(values) - 1)]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def case_name(preset: str, depth: int) -> str:
    return f"{preset}, MTP={depth}"


def token_digest(tokens: list[int]) -> str:
    return hashlib.sha256(b"".join(token.to_bytes(4, "little") for token in tokens)).hexdigest()


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        return error.strerror or "unreadable"
