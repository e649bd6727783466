"""``kvd-bench step``: the attention side of a decode step of GLM-5.3, offloaded against resident, in one run.

Both modes make the same prepared selections (see `benchmarks.step_world`), after scoring and selecting at full cost.
Their outputs are compared bit for bit before they are timed, one corrupted row must change them, and passes alternate.
The history's length stands still; copyback is measured by ``kvd-bench kernels``.
"""

from __future__ import annotations

import hashlib
import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.harness import Floors, measure_floors
from benchmarks.report import Report, Row
from benchmarks.step_world import FORMAT, GROUPS, LOCALITY, SLOTS, STEPS, TOPK, WORKING_SET, History, Pages
from compute.kernels.triton_support import await_kernel_before, launch_options
from compute.step import OVERLAPS, AttentionStep, Overlap, StepShape
from protocol.errors import InvalidValue
from protocol.layout import PAGE_TOKENS, Q8G64
from protocol.model import GLM_5_3

GOALS = {1: 2.7, 5: 6.0}
"""µs that offloading may add per index group, by percent of misses."""


def configure(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--tokens", type=int, nargs="+", default=[51_200, 1_048_576], help="histories (default %(default)s)")
    add("--query-rows", type=int, nargs="+", default=[1, 4], help="rows of a step (default %(default)s)")
    add("--misses", type=int, nargs="+", default=[0, 1, 5, 20], help="percent of misses (default %(default)s)")
    add("--pairs", type=int, default=4, help="passes of each mode, in turns (default %(default)s)")
    add("--variants", choices=OVERLAPS, nargs="+", default=["branch"], help="how the round goes (default %(default)s)")


def run(arguments: Namespace) -> Report:
    """Measure; raises `InvalidValue` if outputs differ between the modes, or if a corrupted row does not show."""
    least = SLOTS + WORKING_SET
    if any(tokens % PAGE_TOKENS or tokens < least for tokens in arguments.tokens):
        raise InvalidValue("--tokens", arguments.tokens, f"multiples of {PAGE_TOKENS}, at least {least}")
    floors = measure_floors()
    torch.cuda.empty_cache()
    started = time.monotonic()
    pages = Pages(max(arguments.tokens) // PAGE_TOKENS)
    _say(f"{pages.count} pages of {FORMAT.stride} bytes ready after {time.monotonic() - started:.1f} s")
    settings = {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "selections": f"synthetic: drawn from {WORKING_SET} positions of each group, after real scoring and selection",
        "slots": SLOTS,
        "steps": STEPS,
        "pairs": arguments.pairs,
    }
    report = Report("step", torch.cuda.get_device_name(), settings, floors.rows())
    for tokens in arguments.tokens:
        history = History(pages, tokens)
        for rows in arguments.query_rows:
            _run_rows(history, rows, arguments, floors, report)
        del history
        torch.cuda.empty_cache()
    return report


def _run_rows(history: History, rows: int, arguments: Namespace, floors: Floors, report: Report) -> None:
    cases = {
        percent: f"{history.max_tokens:,} tokens, {rows} query rows, {percent} % miss" for percent in arguments.misses
    }
    wanted = {percent: case for percent, case in cases.items() if arguments.only in case}
    if not wanted:
        return
    resident = Mode("resident", history, rows, None)
    offloaded = [Mode(overlap, history, rows, overlap) for overlap in arguments.variants]
    for percent, case in wanted.items():
        selections, cached = LOCALITY.draw(history.ring_first, rows, percent, torch.device("cuda"))
        history.fill_caches(cached)
        for mode in (resident, *offloaded):
            mode.selections.copy_(selections)
        for mode in offloaded:
            report.rows += _compare(case, history, resident, mode)
        report.rows += _time(case, percent, history, resident, offloaded, selections, arguments.pairs, floors)


class Mode:
    """A recorded step of one way to keep the history, with its place among the prepared selections."""

    def __init__(self, name: str, history: History, rows: int, overlap: Overlap | None) -> None:
        self.name = name
        device = torch.device("cuda")
        self.selections = torch.full((STEPS, GROUPS, rows, TOPK), -1, dtype=torch.int32, device=device)
        self._turn = torch.zeros(1, dtype=torch.int32, device=device)
        shape = StepShape(
            places=1,
            rows=rows,
            topk=TOPK,
            heads=GLM_5_3.num_attention_heads,
            index_heads=GLM_5_3.index_n_heads,
            softmax_scale=GLM_5_3.softmax_scale,
            max_tokens=history.max_tokens,
        )
        cached = overlap is not None
        self.step = AttentionStep(
            FORMAT, shape, device, cached=cached, overlap=overlap or "serial", choose=self._choose
        )
        generator = torch.Generator(device).manual_seed(2)
        for tensor in vars(self.step.inputs).values():
            tensor.normal_(generator=generator)
        if cached:
            self.step.join(0, history.offloaded, history.caches, history.length)
        else:
            self.step.join(0, history.resident, [], history.length)
        started = time.monotonic()
        self.step.replay()
        torch.cuda.synchronize()
        _say(f"{name}, {rows} query rows: compiled and recorded in {time.monotonic() - started:.1f} s")

    def rewind(self) -> None:
        """Have the next step be the first of the prepared ones."""
        self._turn.fill_(-1)

    def _choose(self, group: int, selection: Tensor) -> None:
        if group == 0:
            _turn_kernel[(1,)](self._turn, STEPS, num_warps=1, **launch_options())
        selected = selection.numel()
        _choose_kernel[(triton.cdiv(selected, 1024),)](
            self.selections, self._turn, selection, group, GROUPS, selected, num_warps=4, **launch_options()
        )


@triton.jit
def _turn_kernel(turn, steps, OVERLAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    await_kernel_before(OVERLAPPED)
    tl.store(turn, (tl.load(turn) + 1) % steps)


@triton.jit
def _choose_kernel(  # type: ignore[no-untyped-def]
    selections, turn, selection, group, groups, selected, OVERLAPPED: tl.constexpr
):
    """Put the prepared selection of this step and group in the place of the one that was just made."""
    lane = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    await_kernel_before(OVERLAPPED)
    first = (tl.load(turn) * groups + group) * selected
    tl.store(selection + lane, tl.load(selections + first + lane, mask=lane < selected), mask=lane < selected)


def _compare(case: str, history: History, resident: Mode, offloaded: Mode) -> list[Row]:
    """Outputs of all layers, bit for bit, over all steps; then the same with one corrupted row, which must show."""
    modes = (resident, offloaded)

    def replay_both() -> Tensor:
        for mode in modes:
            mode.step.replay()
        left, right = (mode.step.out.view(torch.int32) for mode in modes)
        return (left != right).sum()

    _restart(history, *modes)
    different = int(torch.stack([replay_both() for _ in range(STEPS)]).sum())
    hashes = [hashlib.sha256(mode.step.out.cpu().numpy().tobytes()).hexdigest()[:16] for mode in modes]
    looked_up = history.counters()
    finite = bool(torch.isfinite(resident.step.out).all()) and bool(resident.step.out.any())
    _say(f"{case}: {offloaded.name} differs in {different} values; hashes of the last step {hashes}")
    if different or not finite:
        raise InvalidValue(f"outputs of {offloaded.name}", f"{different} values differ", "the bits of resident ones")

    _restart(history, *modes)
    replay_both()
    group = GROUPS // 2
    cache, chosen = history.caches[group], resident.selections[1, group, 0].long()
    slots = cache.table[chosen]
    cache.rows[slots[slots >= 0][0].long(), 1, 0] ^= 0x40
    if int(replay_both()) == 0:
        raise InvalidValue("outputs with a corrupted row", "those without", "others")
    return [Row(f"{case}, {offloaded.name}: measured", 100 * looked_up[0] / looked_up[1], "% miss")]


def _time(
    case: str,
    percent: int,
    history: History,
    resident: Mode,
    offloaded: list[Mode],
    selections: Tensor,
    pairs: int,
    floors: Floors,
) -> list[Row]:
    times: dict[str, list[float]] = {mode.name: [] for mode in (resident, *offloaded)}
    for pair in range(pairs):
        for mode in (resident, *offloaded):
            times[mode.name].append(_pass(history, mode))
        shown = ", ".join(f"{name} {figures[-1]:.1f}" for name, figures in times.items())
        _say(f"{case}, pair {pair + 1}, µs per step: {shown}")
    floor = _floor(history, selections, percent, floors)
    base = times[resident.name]
    rows = [
        Row(f"{case}: resident", statistics.median(base), "µs", floor.resident_us),
        Row(f"{case}: resident against itself, per group", (max(base) - min(base)) / GROUPS, "µs"),
    ]
    for mode in offloaded:
        added = [(mine - theirs) / GROUPS for mine, theirs in zip(times[mode.name], base, strict=True)]
        rows.append(
            Row(f"{case}: offloaded, {mode.name}", statistics.median(times[mode.name]), "µs", floor.resident_us)
        )
        name = f"{case}: offloaded, {mode.name}, added per group"
        rows.append(Row(name, statistics.median(added), "µs", floor.misses_us, goal=GOALS.get(percent)))
    return rows


def _pass(history: History, mode: Mode) -> float:
    """µs of a step: all prepared steps, one after the other."""
    _restart(history, mode)
    start, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(STEPS):
        mode.step.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / STEPS


@dataclass(frozen=True)
class _Floor:
    resident_us: float
    """Bytes that a step reads from device memory over the rate measured: all index keys, each selected row once."""
    misses_us: float
    """Bytes of the misses of one group over the bus's rate; they may be fetched while something else runs."""


def _floor(history: History, selections: Tensor, percent: int, floors: Floors) -> _Floor:
    keys = GROUPS * history.length * (Q8G64.keys.block_bytes // PAGE_TOKENS)
    rows = int(torch.unique(selections[0, 0]).numel()) * FORMAT.layer_count * Q8G64.rows.row_bytes
    group_row_bytes = FORMAT.rows_bytes / PAGE_TOKENS / GROUPS
    missed = round(TOPK * percent / 100) * group_row_bytes
    return _Floor(1e6 * (keys + rows) / floors.hbm_read, 1e6 * missed / floors.copy_to_device)


def _restart(history: History, *modes: Mode) -> None:
    history.reset()
    for mode in modes:
        mode.rewind()
    torch.cuda.synchronize()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
