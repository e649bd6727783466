"""``kvd-bench kernels``: every kernel by graph replay, beside its floor. Cases are in ``benchmarks/kernels_*.py``."""

from __future__ import annotations

import importlib
import pkgutil
import time
from argparse import ArgumentParser, Namespace

import torch
import triton

import benchmarks
from benchmarks.harness import REPLAYS, Case, measure_floors, run_cases
from benchmarks.report import Report


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--list", action="store_true", help="print the names of the cases and exit")
    parser.add_argument("--seconds", type=float, metavar="S", help="begin no case after S seconds; those are named")


def run(arguments: Namespace) -> Report | None:
    """Measure the cases whose name contains ``--only`` (all by default)."""
    cases = [case for case in all_cases() if arguments.only in case.name]
    if arguments.list:
        print("\n".join(case.name for case in cases))
        return None
    floors = measure_floors()
    settings = {"torch": torch.__version__, "triton": triton.__version__, "replays": REPLAYS, "only": arguments.only}
    report = Report("kernels", torch.cuda.get_device_name(), settings, floors.rows())
    started, left_out = time.monotonic(), []
    for case in cases:
        if arguments.seconds is not None and time.monotonic() - started > arguments.seconds:
            left_out.append(case.name)
        else:
            report.rows += run_cases([case], floors)
    if left_out:
        report.settings = settings | {"left out": left_out}
    return report


def all_cases() -> list[Case]:
    """The cases of every module ``benchmarks.kernels_*``."""
    names = sorted(m.name for m in pkgutil.iter_modules(benchmarks.__path__) if m.name.startswith("kernels_"))
    return [case for name in names for case in importlib.import_module(f"benchmarks.{name}").cases()]
