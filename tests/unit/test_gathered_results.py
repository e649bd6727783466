"""All kept results in one report: what is newest, what is shown, and what is no result."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from benchmarks.gather import markdown, newest, summary
from benchmarks.report import RESULTS, Report, Row, load
from protocol.errors import InvalidValue


def kept(folder: Path, date: str, *rows: Row, bench: str = "kernels", hardware: str = "card", **sizes: int) -> Path:
    return Report(bench, hardware, {"torch": "2", **sizes}, list(rows), "abc", date).save(folder)


def test_the_newest_is_shown_with_what_it_lacks(tmp_path: Path) -> None:
    old = kept(tmp_path, "2026-01-01T00:00:00", Row("a", 1, "µs"), Row("b", 2, "µs", goal=1))
    new = kept(tmp_path, "2026-02-01T00:00:00", Row("a", 5, "µs", goal=9))
    other = kept(tmp_path, "2026-01-05T00:00:00", Row("a", 7, "µs"), hardware="another")
    first, second = newest([old, new, other])
    assert (first.hardware, [row.value for row in first.rows]) == ("another", [7])
    assert [(row.case, row.value) for row in second.rows] == [("a", 5), ("b", 2)]
    assert summary([second]) == "- kernels on card: 1 of 2 goals met"
    assert "| b | 2 | µs |  |  | 1 | no |" in markdown(second)


def test_results_of_other_sizes_are_apart(tmp_path: Path) -> None:
    ten = kept(tmp_path, "2026-01-01T00:00:00", Row("a", 1, "s"), bench="sessions", layers=10)
    all_layers = kept(tmp_path, "2026-02-01T00:00:00", Row("b", 2, "s"), bench="sessions", layers=78)
    assert [[row.case for row in report.rows] for report in newest([ten, all_layers])] == [["a"], ["b"]]


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)


def test_the_page(tmp_path: Path) -> None:
    """With every kind of picture, and names that are not markup."""
    results = tmp_path / "results"
    results.mkdir()
    times = [Row(f"case <b>{at}</b>", 2.0 + at, "µs", floor=1.0, goal=3.0) for at in range(4)]
    losses = [Row("about1, MTP=3, pair 1: loss", 0.3, "%", goal=0.5), Row("x: between steps' tokens, p99", 9, "ms")]
    added = [Row(f"1 row, {share} % miss: added", share + 1.0, "µs a group") for share in (1, 5)]
    missed = [Row(f"LRU, {slots} slots", 9.0, "% missed") for slots in ("2,048", "4,096")]
    kept(results, "2026-01-01T00:00:00", *times, *losses, *added, *missed)
    # In a process of its own: matplotlib keeps its fonts open.
    command = [sys.executable, "-m", "benchmarks.cli", "report", str(results), "--out", str(tmp_path / "out")]
    subprocess.run(command, check=True)
    page = (tmp_path / "out" / "report.html").read_text()
    tags = _Tags()
    tags.feed(page)
    assert tags.seen.count("svg") == 5
    assert "b" not in tags.seen
    assert "3 of 5 goals met" in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_what_is_kept_can_be_read(path: Path) -> None:
    assert load(path).rows


def test_no_results(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(InvalidValue, match="result file"):
        newest([tmp_path / "bad.json"])
