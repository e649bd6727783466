"""Workers killed at named points and random times; the next one goes on.

A round is one worker's death. What it had shown must begin what its successor shows, and what the last one shows must
be what a worker shows that nobody kills. Whatever lies beyond the commit record is overwritten before it is taken over.
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
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from protocol.stats import NodeStats
from tests.blackbox.daemon_process import DaemonProcess
from tests.torture.decoding import Decoders
from tests.torture.decoding_process import SETUPS, Order

PROMPTS = (1, 40, 63, 64, 130)
GENERATED = 72
RECLAIM_LIMIT_S = 2.0
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT)
SESSION = "torture"


@dataclass
class Outcome:
    """What the rounds came to."""

    trials: int = 0
    failures: list[str] = field(default_factory=list)
    reclaim_s: list[float] = field(default_factory=list)
    deaths: Counter[str] = field(default_factory=Counter)
    restores: int = 0
    """Acknowledged saves that were restored."""

    @property
    def reclaim_p99_s(self) -> float:
        ordered = sorted(self.reclaim_s)
        return ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]

    def show(self, what: str) -> None:
        """Print the figures."""
        failed = len(self.failures)
        bound = f"{3 / self.trials:.2e}" if self.trials and not failed else "-"
        lines = [f"{what}: {self.trials} trials, {failed} failures, 95 % bound on the rate {bound}"]
        lines += [f"  {failure}" for failure in self.failures[:10]]
        if self.reclaim_s:
            lines.append(f"  reclaim: p99 {self.reclaim_p99_s:.3f} s, longest {max(self.reclaim_s):.3f} s")
        if self.restores:
            lines.append(f"  restored: {self.restores} acknowledged saves")
        lines.append("  " + ", ".join(f"{point} {count}" for point, count in sorted(self.deaths.items())))
        sys.stdout.write("\n".join(lines) + "\n")


def run_rounds(rounds: int, seed: int, setup: str = "cpu", *, until: float = math.inf) -> Outcome:
    """At least ``rounds`` deaths of workers, with a daemon of their own, or what there is by ``until`` (monotonic)."""
    outcome = Outcome()
    run_dir = Path(tempfile.mkdtemp(prefix="kvd-torture-", dir="/tmp"))
    settings = SETUPS[setup].daemon
    with DaemonProcess(run_dir, drain_timeout_s="0", **settings) as daemon, Decoders(run_dir, setup) as decoders:
        daemon.wait_ready()
        chance = random.Random(seed)
        truths: dict[int, list[int]] = {}
        while outcome.trials < rounds and time.monotonic() < until:
            prompt = chance.choice(PROMPTS)
            if prompt not in truths:
                truths[prompt] = decoders.run(Order(SESSION, prompt, prompt + GENERATED))
                assert decoders.is_done, (decoders.error, outcome.failures)
            _Conversation(daemon, decoders, outcome, chance, SETUPS[setup].points, prompt, truths[prompt]).run()
        stats = daemon.stat()
        if stats.ledger != "balanced" or stats.sessions:
            outcome.failures.append(f"afterwards: {stats.ledger}, {len(stats.sessions)} sessions")
        if (
            len({tuple(truth) for truth in truths.values()}) < len(truths)
            or min(len(set(t)) for t in truths.values()) < 8
        ):
            outcome.failures.append("the truths have too few distinct tokens to show anything")
    shutil.rmtree(run_dir)
    return outcome


class _Conversation:
    """One session, from its creation to its last token, through as many workers as it takes."""

    def __init__(
        self,
        daemon: DaemonProcess,
        decoders: Decoders,
        outcome: Outcome,
        chance: random.Random,
        points: tuple[str, ...],
        prompt: int,
        truth: list[int],
    ) -> None:
        self._daemon = daemon
        self._decoders = decoders
        self._outcome = outcome
        self._chance = chance
        self._points = points
        self._prompt = prompt
        self._truth = truth
        self._shown: list[int] = []

    def run(self) -> None:
        resume = False
        while True:
            by_itself = self._chance.random() < 0.6
            point = self._chance.choice(self._points) if by_itself else ""
            nth = self._chance.choice((1, 1, 2, 5, 20))
            self._decoders.start(Order(SESSION, self._prompt, self._prompt + GENERATED, resume, point, nth))
            what = f"prompt {self._prompt}, {point or 'random time'} {nth}, {len(self._shown)} shown"
            self._watch(by_itself)
            died = time.monotonic()
            if self._decoders.tokens[: len(self._shown)] != self._shown[: len(self._decoders.tokens)]:
                self._fail(f"{what}: tokens that were shown are not those of the next worker")
            self._shown = max(self._shown, self._decoders.tokens, key=len)
            if self._decoders.error:
                self._fail(f"{what}: {self._decoders.error}")
                return
            if self._decoders.is_done:
                if self._shown != self._truth:
                    self._fail(f"{what}: the tokens are not those of a worker that lives on")
                return
            self._outcome.trials += 1
            self._outcome.deaths[point or "random time"] += 1
            stats = self._reclaimed(died)
            resume = bool(stats.sessions)
            if not resume and self._shown == self._truth:
                return  # it died while it closed the session
            self._check(what, stats)

    def _watch(self, by_itself: bool) -> None:
        """Read until the worker has ended; unless it kills itself, kill it after a while."""
        timer = None
        delay = self._chance.uniform(0.0, 0.5)
        number = self._chance.choice(SIGNALS)
        for _ in self._decoders.lines():
            if not by_itself and timer is None and self._decoders.pid:
                timer = threading.Timer(delay, _kill, (self._decoders.pid, number))
                timer.start()
        if timer:
            timer.cancel()
            timer.join()

    def _reclaimed(self, died: float) -> NodeStats:
        while True:
            stats = self._daemon.stat()
            now = time.monotonic()
            if not stats.leases:
                self._outcome.reclaim_s.append(now - died)
                return stats
            if now - died > 10 * RECLAIM_LIMIT_S:
                self._fail(f"lease of a dead worker is still there after {now - died:.1f} s")
                return stats
            time.sleep(0.002)

    def _check(self, what: str, stats: NodeStats) -> None:
        [vram] = [tier for tier in stats.tiers if tier.tier.startswith("vram:")]
        if vram.committed or stats.ledger != "balanced":
            self._fail(f"{what}: {vram.committed} bytes of VRAM left, {stats.ledger}")
        if not stats.sessions and self._shown:
            self._fail(f"{what}: a session with shown tokens is gone")
        for session in stats.sessions:
            acknowledged = session.tokens - self._prompt
            if session.state != "stored" or acknowledged < len(self._shown) or session.committed_rows > session.tokens:
                self._fail(f"{what}: {session}")

    def _fail(self, reason: str) -> None:
        self._outcome.failures.append(reason)


def _kill(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it was done first
