"""What the bench of engines makes of its times, and of an engine's error."""

from __future__ import annotations

import multiprocessing
import traceback
from pathlib import Path

import pytest

from benchmarks.prefix_engine import Beside, Times, rows
from benchmarks.vllm_engine import EngineError, Setup
from benchmarks.vllm_peers import peers


def beside(cold: float, again: float, slower: float = 1.0) -> Beside:
    """Beside engines that took 2 s and 0.04 s, or ``slower`` times that, as did this one."""
    return Beside(
        Times(slower * cold, slower * again), Times(slower * 2.0, slower * 0.04), Times(cold / 2.0, again / 0.04)
    )


def test_kvd_is_held_against_each_that_ran() -> None:
    found = {"kvd": beside(2.05, 0.05), "A": beside(2, 0.1), "B": beside(1.9, 0.04, slower=2.0)}
    met = {row.case: row.met for row in rows(found)}
    assert met["first token after a restart, kvd"]
    assert met["first token, cold, kvd"]
    assert met["after a restart, kvd against A"]
    assert met["cold, kvd against A"]
    assert met["after a restart, kvd against B"] is False
    assert met["cold, kvd against B"] is False
    assert met["first token after a restart, B"] is None


def test_nothing_but_kvd_ran() -> None:
    cases = [row.case for row in rows({"kvd": beside(2.0, 0.06)})]
    assert len(cases) == 4
    assert not any("against" in case for case in cases)


def test_an_error_in_short() -> None:
    with pytest.raises(ValueError, match="first") as raised:
        raise ValueError("first line\n  second line")
    error = EngineError("".join(traceback.format_exception(raised.value)))
    line = raised.traceback[-1].lineno + 1
    assert error.in_short == f"ValueError: first line ({__file__}:{line})"
    ours, theirs = multiprocessing.Pipe()
    theirs.send(error)
    assert ours.recv().in_short == error.in_short


@pytest.mark.parametrize(
    ("told", "short"),
    [
        (
            'Traceback:\n  File "/x/site-packages/a/b.py", line 7, in f\n    g()\n    ^^^\nE: no\n',
            "E: no (a/b.py:7)",
        ),
        ("what it logged before\npython: No module named 'lmcache'\n", "python: No module named 'lmcache'"),
        ("", ""),
    ],
)
def test_an_error_of_another_process_in_short(told: str, short: str) -> None:
    assert EngineError(told).in_short == short


def test_each_peer_has_settings_of_its_own(tmp_path: Path) -> None:
    setup = Setup(Path("model"), 128, chunk=2048)
    all_peers = peers(setup, tmp_path)
    assert len({peer.name for peer in all_peers}) == len(all_peers)
    assert len({str(peer.setup.transfer) for peer in all_peers}) == len(all_peers)
    assert setup == Setup(Path("model"), 128, chunk=2048)
