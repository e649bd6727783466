"""All kept results in one report: HTML with its pictures inside, and Markdown.

Of each bench, machine and size the newest result is shown, with what older ones have beside it: a bench may have been
run in parts. A figure stands beside its floor, its baseline and its goal, as it was kept; nothing is computed here.
"""

from __future__ import annotations

import argparse
import html
import io
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.report import RESULTS, Report, Row, load
from protocol.errors import InvalidValue

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZES = ("layers", "experts", "sessions", "tokens", "prompt tokens", "output tokens")
"""Settings with which a bench measures something else, under the same names."""
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0; font-size: 13px }
td, th { border-bottom: 1px solid #ddd; padding: 3px 9px }
td.n { text-align: right; font-variant-numeric: tabular-nums }
.no { color: #b00020; font-weight: 600 }
.yes { color: #0a6b2d }
.about { color: #666; font-size: 13px }
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument(
        "results", type=Path, nargs="*", help="result files, or folders of some (default: the kept ones)"
    )
    parser.add_argument("--out", type=Path, default=Path("report"), help="folder to write to (default %(default)s)")


def run(arguments: argparse.Namespace) -> None:
    """Write report.html and report.md into ``arguments.out``. Raises `InvalidValue` for a file that is no result."""
    reports = newest(list(_files(arguments.results or [RESULTS])))
    reports = [report for report in reports if arguments.only in report.bench]
    if not reports:
        raise InvalidValue("results", [str(path) for path in arguments.results], "at least one kept result")
    arguments.out.mkdir(parents=True, exist_ok=True)
    page, text = arguments.out / "report.html", arguments.out / "report.md"
    page.write_text(_page(reports))
    text.write_text(
        "\n\n".join([f"# kvd: what was measured\n\n{summary(reports)}", *(markdown(each) for each in reports)]) + "\n"
    )
    print(f"{page}\n{text}", file=sys.stderr)


def newest(files: list[Path]) -> list[Report]:
    """One report for each bench, machine and size: the newest, and rows of older ones that it lacks."""
    found: dict[tuple[str, ...], list[Report]] = defaultdict(list)
    for path in files:
        report = load(path)
        sizes = (str(report.settings.get(name, "")) for name in _SIZES)
        found[report.bench, report.hardware, *sizes].append(report)
    merged = []
    for _, reports in sorted(found.items()):
        first, *older = sorted(reports, key=lambda report: report.date, reverse=True)
        for report in older:
            first.merge(report)
        merged.append(first)
    return merged


def summary(reports: list[Report]) -> str:
    lines = []
    for report in reports:
        judged = [row.met for row in report.rows if row.met is not None]
        lines.append(f"- {report.bench} on {report.hardware}: {sum(judged)} of {len(judged)} goals met")
    return "\n".join(lines)


def markdown(report: Report) -> str:
    lines = [f"## {_title(report)}", "", "| case | value | unit | floor | baseline | goal | met |"]
    lines.append("|---|---:|---|---:|---:|---:|---|")
    for row in report.rows:
        cells = [_number(row.value), row.unit, *map(_number, (row.floor, row.baseline, row.goal)), _met(row)]
        lines.append(f"| {row.case.replace('|', '/')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _page(reports: list[Report]) -> str:
    parts = [_section(report) for report in reports]
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>kvd: what was measured</title><style>{_STYLE}</style>"
        f"<h1>kvd: what was measured</h1><pre>{html.escape(summary(reports))}</pre>{''.join(parts)}</html>\n"
    )


def _section(report: Report) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(row.case)}<td class=n>{_number(row.value)}<td>{html.escape(row.unit)}"
        f"<td class=n>{_number(row.floor)}<td class=n>{_number(row.baseline)}<td class=n>{_number(row.goal)}"
        f"<td class={_met(row) or 'none'}>{_met(row)}"
        for row in report.rows
    )
    settings = html.escape("; ".join(f"{name}: {_short(value)}" for name, value in report.settings.items()))
    pictures = "".join(f"<figure>{_svg(draw, report)}</figure>" for draw in _PICTURES if draw(report, None))
    head = "".join(f"<th>{name}" for name in ("case", "value", "unit", "floor", "baseline", "goal", "met"))
    return (
        f"<h2>{html.escape(_title(report))}</h2><p class=about>{settings}</p>{pictures}<table><tr>{head}{rows}</table>"
    )


def _files(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(path.glob("*.json"))
        elif path.exists():
            yield path
        else:
            raise InvalidValue("result", str(path), "a file, or a folder")


# Pictures: each says whether it has something to show of a report, and draws it if it is given axes.

_Picture = Callable[[Report, "Axes | None"], bool]


def _times(report: Report, axes: Axes | None) -> bool:
    """Times beside their floors and goals."""
    rows = sorted((row for row in report.rows if row.unit in ("µs", "ms") and row.floor), key=lambda row: row.value)
    if axes is None or not rows:
        return len(rows) > 2
    places = list(range(len(rows)))
    axes.barh(places, [row.value / (row.floor or 1) for row in rows], color="tab:blue")
    goals = [(row.goal / row.floor, place) for place, row in enumerate(rows) if row.goal and row.floor]
    axes.scatter([goal for goal, _ in goals], [place for _, place in goals], color="tab:red", marker="d", zorder=3)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(places, [row.case for row in rows], fontsize=7)
    axes.set_xscale("log")
    axes.set_xlabel("time over its floor (diamond: goal)")
    return True


def _losses(report: Report, axes: Axes | None) -> bool:
    """What offloading cost each pair."""
    rows = [row for row in report.rows if row.case.endswith(": loss") or row.case.endswith("first against second")]
    if axes is None or not rows:
        return bool(rows)
    places = list(range(len(rows)))
    axes.bar(
        places, [row.value for row in rows], color=["tab:gray" if "first" in row.case else "tab:blue" for row in rows]
    )
    axes.axhline(0, color="black", linewidth=1)
    axes.axhline(0.5, color="tab:red", linewidth=1, linestyle="--")
    axes.set_xticks(places, [row.case.split(":")[0].replace(", ", "\n") for row in rows], fontsize=7)
    axes.set_ylabel("% loss (grey: resident against itself)")
    return True


def _gaps(report: Report, axes: Axes | None) -> bool:
    """The gaps between steps' tokens."""
    rows = [row for row in report.rows if "between steps' tokens" in row.case]
    if axes is None or not rows:
        return bool(rows)
    axes.barh(range(len(rows)), [row.value for row in rows], color="tab:blue")
    axes.set_yticks(range(len(rows)), [row.case.replace(": between steps' tokens", "") for row in rows], fontsize=7)
    axes.set_xscale("log")
    axes.set_xlabel("ms")
    return True


def _added(report: Report, axes: Axes | None) -> bool:
    """What offloading adds to a step, against the part of the selection that is missed."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in report.rows:
        share = re.search(r"(\d+(?:\.\d+)?) ?% miss", row.case)
        if share and row.unit.startswith("µs") and "add" in row.case + row.unit:
            found[re.sub(r",? ?\d+(?:\.\d+)? ?% miss(?:es)?", "", row.case)].append((float(share[1]), row.value))
    if axes is None or not found:
        return bool(found)
    for name, points in found.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    axes.set_xlabel("% of the selection missed")
    axes.set_ylabel("µs added for each index group")
    axes.set_xscale("symlog", linthresh=1)
    axes.set_yscale("log")
    axes.legend(fontsize=6)
    return True


def _missed(report: Report, axes: Axes | None) -> bool:
    """Rows missed against the size of the hot cache, by policy: the mean over index groups."""
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in report.rows:
        case = re.search(r"(\w+), ([\d,]+) slots$", row.case)
        if case and row.unit == "% missed":
            found[case[1]][int(case[2].replace(",", ""))].append(row.value)
    if axes is None or not found:
        return bool(found)
    for policy, sizes in found.items():
        points = sorted((slots, sum(values) / len(values)) for slots, values in sizes.items())
        axes.plot(*zip(*points, strict=True), marker="o", label=policy)
    axes.set_xscale("log")
    axes.set_xlabel("slots")
    axes.set_ylabel("% of selected rows missed")
    axes.legend()
    return True


_PICTURES: tuple[_Picture, ...] = (_losses, _gaps, _added, _times, _missed)


def _svg(draw: _Picture, report: Report) -> str:
    from matplotlib.figure import Figure

    height = 1.2 + 0.22 * len(report.rows) if draw is _times else 4.0
    figure = Figure(figsize=(9, height), layout="constrained")
    axes = figure.add_subplot()
    draw(report, axes)
    axes.set_title((draw.__doc__ or "").split("\n")[0].rstrip("."), fontsize=10)
    out = io.StringIO()
    figure.savefig(out, format="svg")
    return out.getvalue()[out.getvalue().index("<svg") :]


def _title(report: Report) -> str:
    return f"{report.bench} on {report.hardware}, {report.date}, commit {report.commit}"


def _number(number: float | None) -> str:
    return "" if number is None else f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.4g}"


def _met(row: Row) -> str:
    return {None: "", True: "yes", False: "no"}[row.met]


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 120 else f"{text[:117]}…"
