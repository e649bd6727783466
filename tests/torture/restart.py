"""Daemons killed at named points and random times, under a worker that decodes and waits for the next one.

A round is one daemon's death. The worker must show what it shows under a daemon that lives, and when it has closed its
session, nothing is left: no committed byte, no name, no descriptor more than before. What it was told is saved is
restored to the same bytes.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from kvd.control import Control
from protocol.errors import DaemonUnavailable, UnknownSaved
from protocol.messages import Done, EndSession, RemoveSaved, RestoreSession, Saved
from tests.blackbox.daemon_process import DaemonProcess
from tests.torture.content import content_digest
from tests.torture.decoding import Decoders
from tests.torture.decoding_process import SETUPS, Order
from tests.torture.killable_daemon import POINTS
from tests.torture.takeover import GENERATED, SESSION, Outcome

PROMPTS = (40, 130)
COPYBACK = ("append", "submit", "mid copy", "copied", "finish", "amid a record", "before commit sequence")
"""Points of a worker at which its daemon dies."""
DEAD_WORKERS = 0.15
"""Share of the rounds in which the worker is killed as well."""


def run_rounds(rounds: int, seed: int, setup: str = "cpu", *, until: float = math.inf) -> Outcome:
    """At least ``rounds`` deaths of daemons, or what there is by ``until`` (monotonic)."""
    outcome = Outcome()
    run_dir = Path(tempfile.mkdtemp(prefix="kvd-torture-", dir="/tmp"))
    with Decoders(run_dir, setup) as decoders:
        trial = _Trial(run_dir, decoders, outcome, random.Random(seed), SETUPS[setup].daemon)
        try:
            trial.begin()
            while outcome.trials < rounds and time.monotonic() < until:
                trial.conversation()
        finally:
            trial.end()
    shutil.rmtree(run_dir)
    return outcome


class _Trial:
    """A run directory whose daemon is always started again."""

    def __init__(
        self, run_dir: Path, decoders: Decoders, outcome: Outcome, chance: random.Random, settings: dict[str, str]
    ) -> None:
        self._run_dir = run_dir
        self._decoders = decoders
        self._outcome = outcome
        self._chance = chance
        self._settings = {"disk_state_dir": str(run_dir / "state"), **settings}
        self._truths: dict[int, list[int]] = {}
        self._daemon: DaemonProcess | None = None
        self._baseline: tuple[object, ...] = ()

    def begin(self) -> None:
        """Learn what workers show under a daemon that lives, and what it has without sessions."""
        self._start("", 1)
        for prompt in PROMPTS:
            self._truths[prompt] = self._decoders.run(_order(prompt, resume=False))
            assert self._decoders.is_done, self._decoders.error
        self._baseline = self._holdings()

    def end(self) -> None:
        if self._daemon is not None:
            self._daemon.__exit__(None, None, None)

    def conversation(self) -> None:
        """One session, from its creation to its end, under daemons that die."""
        prompt = self._chance.choice(PROMPTS)
        self._decoders.saved = ""
        shown: list[int] = []
        resume = False
        while True:
            what = self._worker(prompt, resume)
            got = self._decoders.tokens
            if got[: len(shown)] != shown[: len(got)]:
                self._fail(f"{what}: tokens that were shown are not those of the next worker")
            shown = max(shown, got, key=len)
            if self._decoders.is_done:
                break
            if self._decoders.error and not self._decoders.error.startswith("DaemonUnavailable"):
                self._fail(f"{what}: {self._decoders.error}")
                self._start("", 1)
                break
            self._start("", 1)
            sessions = self._wait_stored()
            if not sessions and shown == self._truths[prompt]:
                break  # it died while it closed the session
            if shown and not sessions:
                self._fail(f"{what}: a session with shown tokens is gone")
                break
            resume = bool(sessions)
        if self._decoders.is_done and shown != self._truths[prompt]:
            self._fail(f"{what}: the tokens are not those of a worker whose daemon lives")
        self._start("", 1)
        self._check_saved(what)
        deadline = time.monotonic() + 5
        while self._holdings() != self._baseline and time.monotonic() < deadline:
            time.sleep(0.01)
        if self._holdings() != self._baseline:
            self._fail(f"{what}: left {self._holdings()}; before {self._baseline}")

    def _check_saved(self, what: str) -> None:
        """Whatever has died since it was acknowledged, the saved session is there, byte for byte."""
        uid, digest = os.getuid(), self._decoders.saved
        with Control(self._run_dir, "torture") as control:
            if not self._decoders.is_done:  # it failed, or its last worker died as it closed the session
                self._wait_stored()
                for left in control.stats().sessions:
                    control.ask(partial(EndSession, uid=uid, name=left.name), Done)
            if digest:
                control.ask(lambda seq: RestoreSession(seq, SESSION, b"", ""), Saved)
                [session] = control.stats().sessions
                self._outcome.restores += 1
                if content_digest(self._run_dir, session.session) != digest:
                    self._fail(f"{what}: a saved session is restored to other bytes")
                control.ask(lambda seq: EndSession(seq, uid, SESSION), Done)
            with suppress(UnknownSaved):
                control.ask(lambda seq: RemoveSaved(seq, SESSION), Done)

    def _worker(self, prompt: int, resume: bool) -> str:
        """Run one worker until it ends, and have daemons die meanwhile."""
        copyback = self._chance.choice(COPYBACK) if self._chance.random() < 0.3 else ""
        point, nth = ("", 1) if copyback else self._next_point()
        self._start(point, nth)
        order = _order(prompt, resume)
        if copyback:
            order = replace(order, point=copyback, nth=self._chance.choice((1, 1, 2, 5)), kills_daemon=True)
        self._decoders.start(order)
        reader = threading.Thread(target=lambda: list(self._decoders.lines()))
        reader.start()
        deaths = []
        dies_at = None if copyback else self._random_death(point)
        worker_dies_at = time.monotonic() + self._chance.uniform(0, 2) if self._chance.random() < DEAD_WORKERS else None
        while reader.is_alive():
            now = time.monotonic()
            assert self._daemon is not None
            if dies_at and now > dies_at:
                self._daemon.process.kill()
                self._daemon.process.wait()
            if worker_dies_at and now > worker_dies_at and self._decoders.pid:
                worker_dies_at = None
                _kill(self._decoders.pid)
            if self._daemon.process.poll() is not None:
                where = f"in {copyback}" if copyback else point or "random time"
                deaths.append(f"{where} {nth}")
                self._outcome.trials += 1
                self._outcome.deaths[where] += 1
                copyback = ""
                # One daemon in a row may die as it starts; a worker that nobody answers would wait for ever.
                point, nth = self._next_point() if len(deaths) < 6 else ("", 1)
                self._start(point, nth)
                dies_at = self._random_death(point) if len(deaths) < 6 else None
            reader.join(0.005)
        return f"prompt {prompt}, {'resumed' if resume else 'new'}, deaths {deaths}"

    def _next_point(self) -> tuple[str, int]:
        if self._chance.random() < 0.4:
            return "", 1
        return self._chance.choice(POINTS), self._chance.choice((1, 1, 1, 2, 3, 5))

    def _random_death(self, point: str) -> float | None:
        return None if point else time.monotonic() + self._chance.uniform(0, 1.2)

    def _start(self, point: str, nth: int) -> None:
        """Have a daemon that lives: another one with this point if there is none, or if this one may yet die."""
        started = time.monotonic()
        while True:
            if self._daemon is not None and (point or not self._is_lasting()):
                self._daemon.process.kill()
                self._daemon.process.wait()
                self._daemon = None
            if self._daemon is None:
                command = [sys.executable, "-m", "kvd"]
                if point:
                    command = [sys.executable, "-m", "tests.torture.killable_daemon", point, str(nth)]
                self._daemon = DaemonProcess(self._run_dir, command, drain_timeout_s="0", **self._settings)
                self._lasting = not point
            try:
                self._daemon.wait_ready()
                self._outcome.reclaim_s.append(time.monotonic() - started)
                return
            except (AssertionError, DaemonUnavailable):
                if not point:
                    raise
                self._daemon.process.kill()  # it died as it started, or has taken too long for this machine
                self._daemon.process.wait()
                self._outcome.trials += 1
                self._outcome.deaths[point] += 1
                point = ""
                self._daemon = None

    def _is_lasting(self) -> bool:
        return self._daemon is not None and self._lasting and self._daemon.process.poll() is None

    def _wait_stored(self) -> int:
        """The number of sessions, when all are stored."""
        assert self._daemon is not None
        deadline = time.monotonic() + 5
        while any(session.state != "stored" for session in self._daemon.stat().sessions):
            if time.monotonic() > deadline:
                self._fail(f"a dead worker's session is not stored: {self._daemon.stat().sessions}")
                break
            time.sleep(0.01)
        return len(self._daemon.stat().sessions)

    def _holdings(self) -> tuple[object, ...]:
        """What there is: committed bytes, leases, sessions, names, and descriptors of the daemon."""
        assert self._daemon is not None
        stats = self._daemon.stat()
        tiers = [(tier.tier, tier.requested, tier.committed, tier.quarantined) for tier in stats.tiers]
        files = _settled_descriptors(self._daemon.process.pid)
        names = self._daemon.segments
        return tiers, stats.ledger, len(stats.leases), len(stats.sessions), len(names), files

    def _fail(self, reason: str) -> None:
        self._outcome.failures.append(reason)


def _settled_descriptors(pid: int) -> int:
    """How many descriptors a daemon has when it has closed, in its own time, the connections that were just used."""
    folder = f"/proc/{pid}/fd"
    before, now = -1, len(os.listdir(folder))
    while now != before:
        time.sleep(0.1)
        before, now = now, len(os.listdir(folder))
    return now


def _order(prompt: int, resume: bool) -> Order:
    return Order(SESSION, prompt, prompt + GENERATED, resume, daemon_wait_s=60.0, rewrite=20, save=True)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it was done first
