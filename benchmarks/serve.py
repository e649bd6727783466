"""``kvd-bench serve``: a trace of requests to a real server, against the same requests one after the other without one.

A daemon and a ``kvd-worker serve`` of its own. The trace is drawn from a seed: prompts and answers of mixed lengths,
every other request sampled, at a rate or from clients that ask again as soon as they are answered. Each answer, or each
of those that ``--verify`` draws, must be what the worker gives to that request alone, token for token, and the daemon's
memory must be what it was before. The floor of each time is that of the worker alone, of the requests that were
verified: no queue, no HTTP, no other session.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.daemon_room import room_for
from benchmarks.model_arguments import add_model_arguments, model_of
from benchmarks.report import Report, cpu_name
from benchmarks.serve_report import Trace
from benchmarks.serve_trace import SHORTEST, Alone, Answer, Asked, Lengths, ask, draw
from compute.embedded import EmbeddedDaemon
from compute.histories import MAX_DRAFTS, HistorySettings
from compute.model_arguments import chunk_of, hot_rows_of, ring_pages_of
from compute.serve.jobs import SchedulerSettings
from compute.serve.places import rows_behind
from compute.worker import Worker
from kvd.planning.footprint import Footprint
from protocol.errors import InvalidValue, OsFailure
from protocol.layout import PAGE_TOKENS, Q8G64, round_up
from protocol.model import ModelConfig
from protocol.stats import NodeStats

NAME = "served"
START_S = 1800.0
"""The longest wait for a server: weights, and steps that are compiled and recorded."""
SETTINGS = SchedulerSettings()
"""A server's, by default."""
TOLD = (
    *("model", "layers", "experts", "dtype", "requests", "rate", "clients", "seed", "prompt", "shortest", "skew"),
    *("output", "mtp", "hot_rows", "ring_pages", "chunk", "token_gap", "verify", "seconds"),
)
"""Settings that a report names."""
SETTLED_S = 10.0
"""The longest wait for the daemon to have back what a server that has ended held."""


def configure(parser: ArgumentParser) -> None:
    parser.description = __doc__
    add = parser.add_argument
    add_model_arguments(parser, model="demo", experts=None, dtype="bf16", device="cpu")
    add("--requests", type=int, default=32, metavar="N", help="of the trace (default %(default)s)")
    add("--rate", type=float, default=0.0, metavar="R", help="a second; 0: as clients are free (default %(default)s)")
    add("--clients", type=int, default=8, metavar="N", help="requests under way at a time (default %(default)s)")
    add("--seed", type=int, default=0, help="of the trace (default %(default)s)")
    add("--prompt", type=int, default=512, metavar="N", help="most tokens of a prompt (default %(default)s)")
    add("--shortest", type=int, default=SHORTEST, metavar="N", help="fewest tokens of a prompt (default %(default)s)")
    add(
        "--skew",
        type=float,
        default=0.0,
        metavar="X",
        help="how much more frequent short prompts are: 0: all lengths alike on a logarithmic scale, 1: half a length "
        "twice as often (default %(default)s)",
    )
    add("--output", type=int, default=64, metavar="N", help="most tokens of an answer (default %(default)s)")
    add("--mtp", type=int, default=0, metavar="N", help="drafts of a step (default %(default)s)")
    add("--hot-rows", type=int, metavar="N", help="slots of a hot cache (default: what a step selects, 2,048 at least)")
    add("--ring-pages", type=int, metavar="N", help="newest pages of a session, in VRAM")
    add("--chunk", type=int, metavar="N", help="most tokens of a prompt that are read at a time")
    add("--token-gap", type=float, default=SETTINGS.gap_s, metavar="S", help="the server's (default %(default)s)")
    add("--verify", type=int, metavar="N", help="requests that are answered alone too (default: all)")
    add("--seconds", type=float, metavar="S", help="send nothing after S seconds; the report says what was left out")


def run(arguments: Namespace) -> Report:
    """Measure. ``exit_status`` is 1 if an answer differs, a request fails, or memory is missing afterwards."""
    started, config = time.monotonic(), model_of(arguments)
    _check(arguments)
    arguments.chunk = chunk_of(arguments)
    arguments.ring_pages = ring_pages_of(arguments, arguments.chunk)
    arguments.hot_rows = hot_rows_of(arguments, config, arguments.mtp)
    lengths = Lengths(arguments.shortest, arguments.prompt, arguments.output, arguments.skew)
    trace = draw(arguments.requests, arguments.rate, arguments.seed, config.vocab_size, lengths)
    first = _first(arguments, config)
    plan = Footprint(config, Q8G64, _most_tokens(arguments), arguments.hot_rows, arguments.mtp, arguments.ring_pages)
    with EmbeddedDaemon(arguments.device, **room_for(arguments.device, plan, SETTINGS.running + 1)) as daemon:
        before = daemon.stat()
        with _served(daemon.run_dir, arguments, config) as path:
            ask(path, first, 0.0)
            until = None if arguments.seconds is None else started + arguments.seconds
            answers, served_s = _served_answers(path, trace, arguments.clients, until)
        drift = _drift(daemon, before)
        served = [number for number, answer in enumerate(answers) if answer is not None]
        if not served:
            raise InvalidValue("--seconds", arguments.seconds, "more than it takes to start the server")
        asked = [trace[number] for number in served]
        numbers = verified(asked, arguments.verify, arguments.seed)
        alone, alone_s = _alone(daemon.run_dir, arguments, config, first, [asked[number] for number in numbers])
    told = {name: getattr(arguments, name) for name in TOLD}
    told |= {"torch": torch.__version__, "weights": "random", "trace": "synthetic: random tokens"}
    report = Report("serve", cpu_name() if arguments.device == "cpu" else torch.cuda.get_device_name(), told)
    report.rows += Trace(
        asked,
        [answer for answer in answers if answer is not None],
        served_s,
        len(trace) - len(asked),
        dict(zip(numbers, alone, strict=True)),
        alone_s,
        drift,
    ).rows(min(arguments.clients, SETTINGS.running))
    report.exit_status = int(any(row.met is False for row in report.rows))
    return report


def _check(arguments: Namespace) -> None:
    for name, least, most in (
        ("requests", 1, 1_000_000),
        ("clients", 1, 1024),
        ("shortest", SHORTEST, 1 << 20),
        ("prompt", arguments.shortest, 1 << 20),
        ("output", SHORTEST, 1 << 20),
        ("mtp", 0, MAX_DRAFTS),
        ("verify", 1, arguments.requests),
    ):
        value = getattr(arguments, name)
        if value is not None and not least <= value <= most:
            raise InvalidValue(f"--{name}", value, f"{least} to {most}")
    for name in ("rate", "skew"):
        if not getattr(arguments, name) >= 0:
            raise InvalidValue(f"--{name}", getattr(arguments, name), "at least 0")


def _first(arguments: Namespace, config: ModelConfig) -> Asked:
    """A request before those that are timed, long enough that passes of all kinds are compiled: none of the trace's."""
    tokens = min(arguments.prompt, 2 * arguments.chunk + SHORTEST)
    return draw(1, 0.0, -1 - arguments.seed, config.vocab_size, Lengths(tokens, tokens, SHORTEST))[0]


def _most_tokens(arguments: Namespace) -> int:
    """Of a session, with what steps write behind its last token."""
    behind = max(rows_behind(arguments.mtp), MAX_DRAFTS + PAGE_TOKENS)
    return round_up(int(arguments.prompt + arguments.output) + behind, PAGE_TOKENS)


@contextmanager
def _served(run_dir: Path, arguments: Namespace, config: ModelConfig) -> Iterator[Path]:
    """A server on the daemon in ``run_dir``, at the UNIX socket that this gives; ended with the block.

    Raises `OsFailure` with what it said if it does not start, or does not end well.
    """
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as folder:
        model, path, log = Path(folder, "config.json"), Path(folder, "http.sock"), Path(folder, "log")
        model.write_text(json.dumps(asdict(config)))
        options = {
            "run-dir": run_dir,
            "model": model,
            "listen": f"unix:{path}",
            "tokenizer": "none",
            "model-name": NAME,
            **{name: getattr(arguments, name.replace("-", "_")) for name in ("device", "dtype", "mtp", "chunk")},
            "hot-rows": arguments.hot_rows,
            "ring-pages": arguments.ring_pages,
            "token-gap": arguments.token_gap,
            "context": arguments.prompt + arguments.output,
            "queue": arguments.clients,
        }
        command = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        with log.open("wb") as output:
            process = subprocess.Popen([sys.executable, "-m", "compute.cli", "serve", *command], stderr=output)
        try:
            deadline = time.monotonic() + START_S
            while f"{NAME} on unix:" not in log.read_text():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise OsFailure(f"the server did not start (exit status {process.poll()}):\n{log.read_text()}")
                time.sleep(0.05)
            say("the server serves")
            yield path
            process.send_signal(signal.SIGTERM)
            if process.wait() != 0:
                raise OsFailure(f"the server ended with {process.returncode}:\n{log.read_text()}")
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def _served_answers(
    path: Path, trace: Sequence[Asked], clients: int, until: float | None
) -> tuple[list[Answer | None], float]:
    """All answers, and the seconds from the first request to the last answer. Nothing is sent after ``until``."""
    started, answers = time.monotonic(), []
    with ThreadPoolExecutor(clients) as pool:
        for answer in pool.map(lambda asked: ask(path, asked, started, until), trace):
            answers.append(answer)
            _progress("served", answers, len(trace), started)
    return answers, max((answer.end_s for answer in answers if answer is not None), default=0.0)


def verified(asked: Sequence[Asked], count: int | None, seed: int) -> list[int]:
    """The numbers of the requests that are answered alone too: all, or the longest prompt and others from the seed."""
    if count is None or count >= len(asked):
        return list(range(len(asked)))
    longest = max(range(len(asked)), key=lambda number: len(asked[number].prompt))
    others = [number for number in range(len(asked)) if number != longest]
    return sorted([longest, *random.Random(seed).sample(others, count - 1)])


def _alone(
    run_dir: Path, arguments: Namespace, config: ModelConfig, first: Asked, asked: Sequence[Asked]
) -> tuple[list[Answer], float]:
    """The answers to ``asked`` without a server, one after the other, and their seconds, behind that to ``first``."""
    with Worker(
        run_dir, arguments.device, config, Q8G64, dtype=arguments.dtype, rows=arguments.chunk, mtp=arguments.mtp
    ) as worker:
        settings = HistorySettings(
            "offloaded", _most_tokens(arguments), arguments.hot_rows, arguments.ring_pages, "alone"
        )
        alone = Alone(worker, settings, arguments.mtp, arguments.chunk)
        alone.answer(first)
        started, answers = time.monotonic(), []
        for each in asked:
            answers.append(alone.answer(each))
            _progress("alone", answers, len(asked), started)
        return answers, time.monotonic() - started


def _drift(daemon: EmbeddedDaemon, before: NodeStats) -> dict[str, int]:
    """Bytes requested of each tier, less those of ``before``: of a server that has ended nothing is to be left."""
    deadline = time.monotonic() + SETTLED_S
    requested = {tier.tier: tier.requested for tier in before.tiers}
    while True:
        drift = {tier.tier: tier.requested - requested[tier.tier] for tier in daemon.stat().tiers}
        if not any(drift.values()) or time.monotonic() > deadline:
            return drift
        time.sleep(0.05)


def _progress(what: str, answers: Sequence[Answer | None], count: int, started: float) -> None:
    """At every tenth of the requests."""
    if 10 * len(answers) // count != 10 * (len(answers) - 1) // count:
        tokens = sum(len(answer.tokens) for answer in answers if answer is not None)
        say(f"{what}: {len(answers)} of {count} requests, {tokens / (time.monotonic() - started):.0f} tokens/s")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
