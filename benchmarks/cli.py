"""The command ``kvd-bench``. A bench is a module with ``configure(parser)`` and ``run(arguments) -> Report | None``."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Report, load
from protocol.command_line import Parser, run_command


@dataclass(frozen=True)
class Bench:
    """A subcommand; its module is imported only when it is asked for."""

    name: str
    module: str
    help: str


BENCHES = [
    Bench("kernels", "benchmarks.kernels", "kernels by CUDA-graph replay, beside their floors"),
    Bench("daemon", "benchmarks.daemon", "round trips, sessions, memory, start and scrape of the daemon"),
    Bench("lifecycle", "benchmarks.lifecycle", "barrier, save, restore and fork of sessions"),
    Bench("prefix", "benchmarks.prefix", "the block store: look-ups, and put and get beside memcpy"),
    Bench("pairs", "benchmarks.pairs", "complete requests, offloaded against resident, with and without drafts"),
    Bench("sessions", "benchmarks.sessions", "many long sessions that decode at once, and each of them alone"),
    Bench("serve", "benchmarks.serve", "a trace of requests to a server, and the same requests alone"),
    Bench("choices", "benchmarks.choices", "long sessions at each number of drafts and batch limit, and by choice"),
    Bench("decode", "benchmarks.decode", "a decode step of the whole model, and its floor"),
    Bench("prefill", "benchmarks.prefill", "reading a long text, beside a chain of library products"),
    Bench("step", "benchmarks.step", "the attention side of a decode step, offloaded against resident"),
    Bench("transformers", "benchmarks.transformers_memory", "VRAM of a history in kvd and in the library"),
    Bench("encodings", "benchmarks.encodings", "how far row encodings err, on a CPU"),
    Bench("plan", "benchmarks.plan_check", "what kvd plan expects of kept results, beside what they measured"),
    Bench("report", "benchmarks.gather", "all kept results in one HTML and Markdown report"),
    Bench("cache-sim", "benchmarks.cache_sim", "miss rates of replacement policies, on a CPU"),
    Bench("prefix-engine", "benchmarks.prefix_engine", "first token after an engine was started again, with vLLM"),
    Bench("engine-copies", "benchmarks.engine_copies", "an engine's blocks on a GPU to frames and back"),
    Bench("attach", "benchmarks.attach", "how long mapping and registering the host tier takes"),
]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one bench; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(prog="kvd-bench", description=__doc__)
    subparsers = parser.add_subparsers(dest="bench", required=True)
    for bench in BENCHES:
        subparser = subparsers.add_parser(bench.name, help=bench.help)
        _add_common_arguments(subparser)
        if argv[:1] == [bench.name]:
            importlib.import_module(bench.module).configure(subparser)

    def act() -> int:
        arguments = parser.parse_args(argv)
        module = next(bench.module for bench in BENCHES if bench.name == arguments.bench)
        report = importlib.import_module(module).run(arguments)
        if report is not None:
            _deliver(report, arguments)
        return report.exit_status if report is not None else 0

    return run_command("kvd-bench", act)


def _add_common_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--only", default="", metavar="TEXT", help="run only the cases whose name contains TEXT")
    parser.add_argument(
        "--merge", type=Path, action="append", default=[], metavar="FILE", help="add a kept result's rows"
    )
    parser.add_argument("--save", type=Path, metavar="DIRECTORY", help="keep the result as a file in this directory")
    parser.add_argument("--commit", help="what to name as the commit, where the tree is no repository")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw time against floor (needs matplotlib)")


def _deliver(report: Report, arguments: argparse.Namespace) -> None:
    if arguments.commit is not None:
        report.commit = arguments.commit
    for path in arguments.merge:
        report.merge(load(path))
    if arguments.json:
        print(json.dumps(report.as_json(), ensure_ascii=False))
    else:
        report.print_table()
    if arguments.save is not None:
        print(f"kept as {report.save(arguments.save)}", file=sys.stderr)
    if arguments.plot is not None:
        report.plot(arguments.plot)


if __name__ == "__main__":
    raise SystemExit(main())
