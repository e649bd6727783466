"""``kvd-bench serve``: a trace of requests to a real server, against the same requests one after the other without one.

A daemon and a ``kvd-worker serve`` of its own. The trace is drawn from a seed: prompts and answers of mixed lengths,
every other request sampled, at a rate or from clients that ask again as soon as they are answered. Each answer must be
what the worker gives to that request alone, token for token, and the daemon's memory must be what it was before. The
floor of each time is that of the worker alone: no queue, no HTTP, no other session.
"""

from __future__ import annotations

import json
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

from benchmarks.model_arguments import model_of
from benchmarks.report import Report, Row, cpu_name
from benchmarks.serve_trace import SHORTEST, Alone, Answer, Asked, ask, draw
from benchmarks.timing import percentile
from compute.decode.matrices import WEIGHT_TYPES
from compute.embedded import EmbeddedDaemon
from compute.histories import MAX_DRAFTS, HistorySettings
from compute.model_arguments import chunk_of, hot_rows_of, ring_pages_of
from compute.serve.places import rows_behind
from compute.step import BATCH_SIZES
from compute.worker import Worker
from kvd.planning.footprint import Footprint
from protocol.errors import InvalidValue, OsFailure
from protocol.layout import PAGE_TOKENS, Q8G64, round_up
from protocol.model import ModelConfig
from protocol.stats import NodeStats

NAME = "served"
START_S = 1800.0
"""The longest wait for a server: weights, and steps that are compiled and recorded."""
SETTLED_S = 10.0
"""The longest wait for the daemon to have back what a server that has ended held."""


def configure(parser: ArgumentParser) -> None:
    parser.description = __doc__
    add = parser.add_argument
    add("--model", default="demo", help="a preset, or a config.json (default %(default)s)")
    add("--layers", type=int, metavar="N", help="the first N layers only")
    add("--experts", type=int, metavar="N", help="routed experts of a layer")
    add("--device", default="cpu", help="cuda or cpu (default %(default)s)")
    add("--dtype", choices=WEIGHT_TYPES, default="bf16", help="type of the weights (default %(default)s)")
    add("--requests", type=int, default=32, metavar="N", help="of the trace (default %(default)s)")
    add("--rate", type=float, default=0.0, metavar="R", help="a second; 0: as clients are free (default %(default)s)")
    add("--clients", type=int, default=8, metavar="N", help="requests under way at a time (default %(default)s)")
    add("--seed", type=int, default=0, help="of the trace (default %(default)s)")
    add("--prompt", type=int, default=512, metavar="N", help="most tokens of a prompt (default %(default)s)")
    add("--output", type=int, default=64, metavar="N", help="most tokens of an answer (default %(default)s)")
    add("--mtp", type=int, default=0, metavar="N", help="drafts of a step (default %(default)s)")
    add("--hot-rows", type=int, metavar="N", help="slots of a hot cache (default: what a step selects, 2,048 at least)")
    add("--ring-pages", type=int, metavar="N", help="newest pages of a session, in VRAM")
    add("--chunk", type=int, metavar="N", help="most tokens of a prompt that are read at a time")


def run(arguments: Namespace) -> Report:
    """Measure. ``exit_status`` is 1 if an answer differs, a request fails, or memory is missing afterwards."""
    config = model_of(arguments)
    _check(arguments)
    arguments.chunk = chunk_of(arguments)
    arguments.ring_pages = ring_pages_of(arguments, arguments.chunk)
    arguments.hot_rows = hot_rows_of(arguments, config, arguments.mtp)
    trace = draw(
        arguments.requests, arguments.rate, arguments.seed, config.vocab_size, arguments.prompt, arguments.output
    )
    with EmbeddedDaemon(arguments.device, **_sizes(arguments, config)) as daemon:
        before = daemon.stat()
        with _served(daemon.run_dir, arguments, config) as path:
            ask(path, Asked(None, trace[0].prompt[:SHORTEST], SHORTEST, trace[0].sampling), 0.0)
            served, served_s = _trace(path, trace, arguments.clients)
        drift = _drift(daemon, before)
        alone, alone_s = _alone(daemon.run_dir, arguments, config, trace)
    settings = {
        name: getattr(arguments, name)
        for name in (
            *("model", "layers", "experts", "dtype", "requests", "rate", "clients", "seed"),
            *("prompt", "output", "mtp", "hot_rows", "ring_pages", "chunk"),
        )
    }
    told = settings | {"torch": torch.__version__, "weights": "random", "trace": "synthetic: random tokens"}
    report = Report("serve", cpu_name() if arguments.device == "cpu" else torch.cuda.get_device_name(), told)
    report.rows += rows_of(trace, served, served_s, alone, alone_s, drift)
    report.exit_status = int(any(row.met is False for row in report.rows))
    return report


def rows_of(
    trace: Sequence[Asked],
    served: Sequence[Answer],
    served_s: float,
    alone: Sequence[Answer],
    alone_s: float,
    drift: dict[str, int],
) -> list[Row]:
    """All figures; those with a goal are what must hold, and the floors are of the requests alone."""
    rows = []
    for name, of in (("time to first token", lambda answer: [answer.first_s]), ("gap between tokens", _gaps)):
        times, floors = ([value for answer in each for value in of(answer)] or [0.0] for each in (served, alone))
        for percent in (50, 99):
            here, floor = percentile(times, percent), percentile(floors, percent)
            rows.append(Row(f"{name}, p{percent}", 1e3 * here, "ms", floor=1e3 * floor))
    tokens = [sum(len(answer.tokens) for answer in each) for each in (served, alone)]
    rows.append(Row("output tokens of all requests", tokens[0] / served_s, "tokens/s", floor=tokens[1] / alone_s))
    rows.append(Row("prompt tokens", sum(len(asked.prompt) for asked in trace), "tokens"))
    rows.append(Row("output tokens", tokens[0], "tokens"))
    rows.append(Row("distinct output tokens", len({token for answer in served for token in answer.tokens}), "tokens"))
    differing = sum(here.tokens != there.tokens for here, there in zip(served, alone, strict=True))
    rows.append(Row("answers that differ from those alone", differing, "answers", goal=0))
    rows.append(Row("requests that failed", sum(bool(answer.error) for answer in served), "requests", goal=0))
    rows += [Row(f"{tier}: bytes requested more or less than before", abs(drift[tier]), "B", goal=0) for tier in drift]
    return rows


def _gaps(answer: Answer) -> list[float]:
    return answer.gaps_s


def _check(arguments: Namespace) -> None:
    for name, least, most in (
        ("requests", 1, 1_000_000),
        ("clients", 1, 1024),
        ("prompt", SHORTEST, 1 << 20),
        ("output", SHORTEST, 1 << 20),
        ("mtp", 0, MAX_DRAFTS),
    ):
        value = getattr(arguments, name)
        if not least <= value <= most:
            raise InvalidValue(f"--{name}", value, f"{least} to {most}")
    if not arguments.rate >= 0:
        raise InvalidValue("--rate", arguments.rate, "at least 0")


def _most_tokens(arguments: Namespace) -> int:
    """Of a session, with what steps write behind its last token."""
    behind = max(rows_behind(arguments.mtp), MAX_DRAFTS + PAGE_TOKENS)
    return round_up(int(arguments.prompt + arguments.output) + behind, PAGE_TOKENS)


def _sizes(arguments: Namespace, config: ModelConfig) -> dict[str, int]:
    """Of the daemon, so that as many sessions fit as a server runs at a time."""
    sessions, on_gpu = BATCH_SIZES[-1] + 1, arguments.device != "cpu"
    tokens = _most_tokens(arguments)
    plan = Footprint(config, Q8G64, tokens, arguments.hot_rows, arguments.mtp, arguments.ring_pages)
    extent = 1 << 30 if on_gpu else round_up(4 * plan.page_format.stride, 4 << 20)
    host = round_up(2 * plan.host_bytes(sessions), extent)
    if on_gpu:
        vram = torch.cuda.get_device_properties(torch.device(arguments.device)).total_memory
    else:
        vram = 2 * plan.vram_bytes(sessions) + (256 << 20)
    return {"host_bytes": host, "extent_bytes": extent, "vram_bytes": vram // (2 << 20) * (2 << 20)}


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


def _trace(path: Path, trace: Sequence[Asked], clients: int) -> tuple[list[Answer], float]:
    """All answers, and the seconds from the first request to the last answer."""
    started, answers = time.monotonic(), []
    with ThreadPoolExecutor(clients) as pool:
        for answer in pool.map(lambda asked: ask(path, asked, started), trace):
            answers.append(answer)
            _progress("served", answers, len(trace), started)
    return answers, time.monotonic() - started


def _alone(
    run_dir: Path, arguments: Namespace, config: ModelConfig, trace: Sequence[Asked]
) -> tuple[list[Answer], float]:
    """The same without a server, one after the other."""
    with Worker(
        run_dir, arguments.device, config, Q8G64, dtype=arguments.dtype, rows=arguments.chunk, mtp=arguments.mtp
    ) as worker:
        settings = HistorySettings(
            "offloaded", _most_tokens(arguments), arguments.hot_rows, arguments.ring_pages, "alone"
        )
        alone = Alone(worker, settings, arguments.mtp, arguments.chunk)
        alone.answer(Asked(None, trace[0].prompt[:SHORTEST], SHORTEST, trace[0].sampling))
        started, answers = time.monotonic(), []
        for asked in trace:
            answers.append(alone.answer(asked))
            _progress("alone", answers, len(trace), started)
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


def _progress(what: str, answers: Sequence[Answer], count: int, started: float) -> None:
    """At every tenth of the requests."""
    if 10 * len(answers) // count != 10 * (len(answers) - 1) // count:
        tokens = sum(len(answer.tokens) for answer in answers)
        say(f"{what}: {len(answers)} of {count} requests, {tokens / (time.monotonic() - started):.0f} tokens/s")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
