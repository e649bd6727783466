"""How a kernel is timed, and what a figure is reported with.

A `Case` names what is measured and its goal; its ``prepare`` builds a `Work`, which the harness captures into one CUDA
graph of ``Work.runs`` launches, each on inputs of its own, and replays. A figure is the median over the replays of the
time of one launch. The floors (HBM read, copy engine, empty kernel) are measured by `measure_floors` in the same run.

A case module (``benchmarks/kernels_*.py``) has one function ``cases() -> list[Case]``; nothing else registers it::

    def cases() -> list[Case]:
        return [Case("top-2,048 of 50K, 1 row", _prepare_topk, goal=7.0, baseline=7.1)]

    def _prepare_topk(floors: Floors) -> Work:
        scores = torch.randn(64, 51_200, device="cuda")
        out = torch.empty(64, 2_048, dtype=torch.int32, device="cuda")
        return Work(
            launch=lambda run: select_topk(scores[run], out[run]),
            runs=64,
            floor=floors.read_us(scores[0].nbytes),
            torch=lambda run: scores[run].topk(2_048),
        )

Reports, files and plots are in `benchmarks.report`.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from benchmarks.report import Row
from protocol.errors import NoDevice

Launch = Callable[[int], object]
"""Enqueues launch number ``run`` on the current stream; must be capturable: no host read-back, no synchronisation."""

REPLAYS = 30
_MICROSECONDS = 1e3  # events count milliseconds


@dataclass(frozen=True)
class Work:
    """What one case runs.

    ``launch(run)`` is captured for run = 0 … ``runs`` − 1 in one graph; every run should have fresh inputs, and all of
    them together should exceed the L2 where the real thing would. Below about 10 µs use 100 runs or more, so that the
    graph's own launch (some 6 µs) does not count. ``reset`` is called before each replay, untimed. ``check`` is called
    once after the last replay and raises if an output is wrong. ``torch`` is the same work done by torch, timed alike,
    if torch can do it. With ``without``, the figure is what ``launch`` takes beyond ``without``. ``floor`` is in the
    case's unit. ``payload`` is the bytes of one run, and makes a figure in GB/s of a time. ``goal`` is that of a case
    whose goal depends on the floors.
    """

    launch: Launch
    runs: int
    floor: float | None = None
    payload: int | None = None
    reset: Callable[[], object] | None = None
    check: Callable[[], object] | None = None
    torch: Launch | None = None
    without: Launch | None = None
    goal: float | None = None


@dataclass(frozen=True)
class Case:
    """A figure to take. ``unit`` is "µs" (the goal is an upper limit) or "GB/s" (a lower one; needs `Work.payload`).

    ``baseline`` is the best peer's figure on the same card, where there is one.
    """

    name: str
    prepare: Callable[[Floors], Work]
    goal: float | None = None
    baseline: float | None = None
    unit: str = "µs"


@dataclass(frozen=True)
class Floors:
    """Ceilings of this machine, measured in this run: bytes per second, and the µs of an empty kernel in a graph."""

    hbm_read: float
    copy_to_device: float
    copy_to_host: float
    empty_kernel_us: float

    def read_us(self, nbytes: float) -> float:
        """µs to read ``nbytes`` from device memory, launch included."""
        return self.empty_kernel_us + 1e6 * nbytes / self.hbm_read

    def upload_us(self, nbytes: float) -> float:
        """µs for ``nbytes`` over the bus from pinned host memory, launch included."""
        return self.empty_kernel_us + 1e6 * nbytes / self.copy_to_device

    def rows(self) -> list[Row]:
        return [
            Row("floor: HBM read", self.hbm_read / 1e9, "GB/s"),
            Row("floor: copy engine, host to device", self.copy_to_device / 1e9, "GB/s"),
            Row("floor: copy engine, device to host", self.copy_to_host / 1e9, "GB/s"),
            Row("floor: empty kernel in a graph", self.empty_kernel_us, "µs"),
        ]


def run_cases(cases: Iterable[Case], floors: Floors) -> Iterator[Row]:
    """The rows of ``cases``, one case at a time, so that only one's buffers are alive. Says on stderr where it is."""
    for case in cases:
        print(case.name, file=sys.stderr, flush=True)
        work = case.prepare(floors)
        time = graph_time(work.launch, work.runs, reset=work.reset)
        if work.check is not None:
            work.check()
        if work.without is not None:
            time -= graph_time(work.without, work.runs, reset=work.reset)
        goal = case.goal if work.goal is None else work.goal
        yield Row(case.name, _figure(time, case, work), case.unit, work.floor, case.baseline, goal)
        if work.torch is not None:
            time = graph_time(work.torch, work.runs, reset=work.reset)
            yield Row(f"{case.name}, torch", _figure(time, case, work), case.unit, work.floor)
        del work
        torch.cuda.empty_cache()


def graph_time(
    launch: Launch, runs: int, *, reset: Callable[[], object] | None = None, replays: int = REPLAYS
) -> float:
    """Median µs of one launch: ``runs`` launches in one graph, replayed ``replays`` times."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # inputs are made on the current one
    with torch.cuda.stream(stream):
        for run in range(runs):  # compiles what the capture may not
            launch(run)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for run in range(runs):
                launch(run)
        times: list[float] = []
        for replay in range(replays + 2):
            if reset is not None:
                reset()
            start, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if replay >= 2:
                times.append(start.elapsed_time(end) * _MICROSECONDS / runs)
    return statistics.median(times)


def measure_floors() -> Floors:
    """Measure the ceilings; raises `NoDevice` without a CUDA or ROCm device."""
    if not torch.cuda.is_available():
        raise NoDevice("kernel benchmarks need a GPU; torch sees none")
    words = torch.ones(1 << 30, dtype=torch.float32, device="cuda")
    sink = torch.empty((), dtype=torch.float32, device="cuda")
    read = graph_time(lambda _: torch.sum(words, dim=0, out=sink), 4, replays=8)
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True).zero_()
    device = words.view(torch.uint8)[: host.numel()]
    up = graph_time(lambda _: device.copy_(host, non_blocking=True), 1, replays=8)
    down = graph_time(lambda _: host.copy_(device, non_blocking=True), 1, replays=8)
    empty = graph_time(lambda _: _empty_kernel[(1,)](sink), 500)
    return Floors(words.nbytes / read * 1e6, host.nbytes / up * 1e6, host.nbytes / down * 1e6, empty)


@triton.jit
def _empty_kernel(_pointer):  # type: ignore[no-untyped-def]
    tl.program_id(0)


def _figure(time: float, case: Case, work: Work) -> float:
    if case.unit != "GB/s":
        return time
    assert work.payload is not None, f"{case.name}: a figure in GB/s needs Work.payload"
    return work.payload / time / 1e3
