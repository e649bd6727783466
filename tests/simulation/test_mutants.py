"""Planted bugs are caught, nearly all, by the simulation or by the test that names them."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.simulation.mutants import mutants

SHARE = 0.95
QUICK = (
    "freed with a reference left",
    "a frame given twice",
    "another uid's bytes",
    "changed before it is written",
    "stale epoch accepted",
    "stale generation accepted",
    "name not synced",
    "spilled without its file",
)
"""Caught within seconds."""


def run(steps: int, worlds: int, *names: str) -> list[str]:
    """The lines of the run, one for each planted bug; they are printed."""
    command = [sys.executable, "-m", "tests.simulation.mutants", str(steps), str(worlds), *names]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    sys.stdout.write("\n" + result.stdout)
    return re.findall(r"^(?:caught|missed) .*", result.stdout, re.MULTILINE)


def test_planted_bugs_are_caught_at_once() -> None:
    lines = run(1000, 2, *QUICK)
    assert len(lines) == len(QUICK)
    assert [line for line in lines if line.startswith("missed")] == []


@pytest.mark.torture
@pytest.mark.timeout(0)
def test_nearly_all_planted_bugs_are_caught() -> None:
    planted = mutants()
    lines = run(4000, 12)
    caught = sum(line.startswith("caught") for line in lines)
    assert len(planted) == len(lines) >= 20
    assert caught >= SHARE * len(planted)


def test_every_planted_bug_fits_its_source() -> None:
    assert len({mutant.name for mutant in mutants()}) == len(mutants())
    for mutant in mutants():
        assert mutant.fits(), mutant
