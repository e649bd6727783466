"""``kvd-bench kernels``: every kernel by graph replay, beside its floor. Cases are in ``benchmarks/kernels_*.py``."""

from __future__ import annotations

import importlib
import pkgutil
from argparse import ArgumentParser, Namespace

import torch
import triton

import benchmarks
from benchmarks.harness import REPLAYS, Case, measure_floors, run_cases
from benchmarks.report import Report


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--list", action="store_true", help="print the names of the cases and exit")


def run(arguments: Namespace) -> Report | None:
    """Measure the cases whose name contains ``--only`` (all by default)."""
    cases = [case for case in all_cases() if arguments.only in case.name]
    if arguments.list:
        print("\n".join(case.name for case in cases))
        return None
    floors = measure_floors()
    settings = {"torch": torch.__version__, "triton": triton.__version__, "replays": REPLAYS, "only": arguments.only}
    report = Report("kernels", torch.cuda.get_device_name(), settings, floors.rows())
    report.rows += run_cases(cases, floors)
    return report


def all_cases() -> list[Case]:
    """The cases of every module ``benchmarks.kernels_*``."""
    names = sorted(m.name for m in pkgutil.iter_modules(benchmarks.__path__) if m.name.startswith("kernels_"))
    return [case for name in names for case in importlib.import_module(f"benchmarks.{name}").cases()]
