"""What a bench reports: rows, one JSON object, a table, kept result files, and a plot of time against floor."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from protocol.errors import InvalidValue

RESULTS = Path(__file__).parent / "results"

_HIGHER_IS_BETTER = frozenset({"GB/s", "TB/s", "tokens/s", "1/s", "times the speed"})


@dataclass(frozen=True)
class Row:
    """One figure. ``floor`` (what the hardware allows), ``baseline`` (the best peer's) and ``goal`` are in ``unit``."""

    case: str
    value: float
    unit: str
    floor: float | None = None
    baseline: float | None = None
    goal: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached; None where there is no goal."""
        if self.goal is None:
            return None
        return self.value >= self.goal if self.unit in _HIGHER_IS_BETTER else self.value <= self.goal


@dataclass
class Report:
    """All rows of one run of one bench. ``settings`` holds what the figures depend on: versions, sizes, repetitions.

    ``exit_status`` is what the command ends with once the report is delivered.
    """

    bench: str
    hardware: str
    settings: Mapping[str, Any]
    rows: list[Row] = field(default_factory=list)
    commit: str = field(default_factory=lambda: current_commit())
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    exit_status: int = 0

    def as_json(self) -> dict[str, Any]:
        return {
            "bench": self.bench,
            "commit": self.commit,
            "hardware": self.hardware,
            "date": self.date,
            "settings": dict(self.settings),
            "rows": [asdict(row) | {"met": row.met} for row in self.rows],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Report:
        rows = [Row(**{key: value for key, value in row.items() if key != "met"}) for row in data["rows"]]
        return cls(data["bench"], data["hardware"], data["settings"], rows, data["commit"], data["date"])

    def merge(self, earlier: Report) -> None:
        """Add the rows of ``earlier`` that this report lacks; raises `InvalidValue` for another bench or hardware."""
        if (earlier.bench, earlier.hardware) != (self.bench, self.hardware):
            raise InvalidValue(
                "report to merge", f"{earlier.bench} on {earlier.hardware}", f"{self.bench} on {self.hardware}"
            )
        have = {row.case for row in self.rows}
        self.rows += [row for row in earlier.rows if row.case not in have]

    def save(self, directory: Path = RESULTS) -> Path:
        """Write ``<bench>-<hardware>-<date and time>.json`` and return its path."""
        stamp = self.date.split("+")[0].replace(":", "")
        path = directory / f"{self.bench}-{self.hardware.replace(' ', '-')}-{stamp}.json"
        path.write_text(json.dumps(self.as_json(), indent=1, ensure_ascii=False) + "\n")
        return path

    def print_table(self) -> None:
        table = Table(title=f"{self.bench} on {self.hardware}, commit {self.commit}, {self.date}")
        for name in ("case", "value", "unit", "floor", "baseline", "goal", "met"):
            table.add_column(name, justify="left" if name in ("case", "unit", "met") else "right", overflow="fold")
        for row in self.rows:
            numbers = [_number(number) for number in (row.floor, row.baseline, row.goal)]
            met = {None: "", True: "yes", False: "NO"}[row.met]
            table.add_row(row.case, _number(row.value), row.unit, *numbers, met)
        Console(width=160).print(table)

    def plot(self, path: Path) -> None:
        """Draw each time beside its floor and goal, longest last, on a logarithmic axis."""
        from matplotlib.figure import Figure

        rows = sorted((row for row in self.rows if row.unit == "µs" and row.floor), key=lambda row: row.value)
        figure = Figure(figsize=(10, 1 + 0.3 * len(rows)), layout="constrained")
        axes = figure.add_subplot(xscale="log", xlabel="µs", title=f"{self.bench} on {self.hardware}")
        places = range(len(rows))
        axes.barh(places, [row.value for row in rows], color="tab:blue", label="measured")
        floors = [row.floor for row in rows if row.floor]
        axes.scatter(floors, places, color="black", marker="|", s=200, zorder=3, label="floor")
        goals = [(row.goal, place) for place, row in zip(places, rows, strict=True) if row.goal is not None]
        axes.scatter([g for g, _ in goals], [p for _, p in goals], color="tab:red", marker="d", zorder=3, label="goal")
        axes.set_yticks(list(places), [row.case for row in rows], fontsize=7)
        axes.legend()
        figure.savefig(path)


def load(path: Path) -> Report:
    """Read a kept result; raises `InvalidValue` if the file is not one."""
    try:
        return Report.from_json(json.loads(path.read_text()))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise InvalidValue("result file", str(path), "an object that a bench wrote with --json") from error


def current_commit() -> str:
    """The commit of the working tree, or "unknown" outside a repository."""
    done = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def cpu_name() -> str:
    """The processor's name, for benches that need no GPU."""
    return platform.processor() or platform.machine()


def _number(number: float | None) -> str:
    return "" if number is None else f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.4g}"
