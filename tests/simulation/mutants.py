"""Planted bugs: one line of the product changed each, to see whether the simulation, or a test by name, notices.

Run as ``python -m tests.simulation.mutants STEPS WORLDS [NAME …]``. Each mutant lives in a process of its own, which
simulates up to ``WORLDS`` worlds of ``STEPS`` steps, in which nothing is noticed without it. Prints what was caught,
and how, and what was missed.
"""

from __future__ import annotations
import __future__

import importlib
import importlib.util
import inspect
import os
import shutil
import signal
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.simulation.run import simulate

CPU_SECONDS, SECONDS = 240, 3600
"""How long a mutant may live, by the processor's time and by the clock; one that hangs is caught."""


@dataclass(frozen=True)
class Mutant:
    """``old`` in the source of ``place`` (module and name) is ``new``. ``test`` is what should notice."""

    name: str
    place: str
    old: str
    new: str
    test: str = ""

    def fits(self) -> bool:
        """Whether the source is as it was when the bug was written. Nothing is imported for that."""
        spec = importlib.util.find_spec(self.place.partition(":")[0])
        return spec is not None and spec.origin is not None and self.old in Path(spec.origin).read_text()

    def plant(self) -> None:
        """Have this process run with it."""
        module, _, path = self.place.partition(":")
        *owners, name = path.split(".")
        owner: Any = importlib.import_module(module)
        for step in owners:
            owner = getattr(owner, step)
        function: Any = inspect.unwrap(inspect.getattr_static(owner, name))
        source = textwrap.dedent(inspect.getsource(function))
        assert self.old in source, f"{self.place} has no {self.old!r}"
        flags = __future__.annotations.compiler_flag
        made: dict[str, Any] = {}
        program = compile(source.replace(self.old, self.new), self.place, "exec", flags)
        exec(program, function.__globals__, made)  # noqa: S102
        setattr(owner, name, made[name])


def mutants() -> list[Mutant]:
    """Those of ``mutants.txt``."""
    lines = Path(__file__).with_suffix(".txt").read_text().splitlines()
    return [Mutant(*map(str.strip, line.split(" | "))) for line in lines if line and not line.startswith("#")]


def outcome(mutant: Mutant | None, steps: int, worlds: int) -> str:
    """How the mutant is noticed, in a process of its own; empty if it is not. None for the product as it is."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(read)
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        signal.alarm(SECONDS)
        noticed = _live(mutant, steps, worlds)
        os.write(write, noticed.encode()[:4096])
        os._exit(0)
    os.close(write)
    with open(read, "rb") as result:
        noticed = result.read().decode(errors="replace")
    _, status = os.waitpid(pid, 0)
    _tidy(pid)
    if os.WIFSIGNALED(status):
        number = signal.Signals(os.WTERMSIG(status))
        return "it hangs" if number in (signal.SIGALRM, signal.SIGPROF) else f"it dies by {number.name}"
    return noticed


def _live(mutant: Mutant | None, steps: int, worlds: int) -> str:
    if mutant is not None:
        mutant.plant()
    if mutant is not None and mutant.test:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - this process ends
        code = pytest.main(["-q", "-n", "0", "-x", "-p", "no:cacheprovider", mutant.test])
        return f"{mutant.test} fails" if code == pytest.ExitCode.TESTS_FAILED else ""
    for seed in range(worlds):
        try:
            simulate(seed, steps)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is noticed
            return f"{type(error).__name__}: {error}".partition("\n")[0][:160]
    return ""


def _tidy(pid: int) -> None:
    for path in Path("/dev/shm").glob(f"simulated-kvd-*{pid}*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def main() -> None:
    steps, worlds, names = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    chosen = [mutant for mutant in mutants() if not names or mutant.name in names]
    if noticed := outcome(None, steps, worlds):
        sys.exit(f"the product as it is: {noticed}")
    caught = 0
    for mutant in chosen:
        started = time.monotonic()
        noticed = outcome(mutant, steps, worlds)
        caught += bool(noticed)
        seconds = time.monotonic() - started
        line = f"caught {mutant.name}: {noticed}" if noticed else f"missed {mutant.name}"
        sys.stdout.write(f"{line} ({seconds:.1f} s)\n")
        sys.stdout.flush()
    sys.stdout.write(f"{caught} of {len(chosen)} planted bugs caught\n")


if __name__ == "__main__":
    main()
