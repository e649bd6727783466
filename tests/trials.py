"""What a test of many trials says at its end."""

from __future__ import annotations

import sys


def report(what: str, trials: int, **figures: object) -> None:
    """Print trials, failures (none: the test has passed), the 95 % bound that follows (3/N), and ``figures``."""
    rest = "".join(f", {name.replace('_', ' ')} {value}" for name, value in figures.items())
    sys.stdout.write(f"\n{what}: {trials} trials, 0 failures, 95 % bound {3 / trials:.1e}{rest}\n")


def report_all(what: str, cases: int, **figures: object) -> None:
    """The same where there are no more cases than were tried: no bound follows."""
    rest = "".join(f", {name.replace('_', ' ')} {value}" for name, value in figures.items())
    sys.stdout.write(f"\n{what}: all {cases} cases tried, 0 failures{rest}\n")
