"""The rows of ``kvd-bench sessions``: equality, speed beside its floor and what ``kvd plan`` expects, memory."""

from __future__ import annotations

import statistics
from argparse import Namespace
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.report import Row
from benchmarks.sessions_decode import Pass, digests
from benchmarks.sessions_world import SessionsSettings, World, say
from compute.decode.selections import Trace
from compute.kernels.state import DUPLICATE_MISSES, UNIQUE_MISSES
from kvd.planning.products import weight_bytes
from kvd.planning.step_model import Batch as PlannedBatch
from kvd.planning.step_model import Rates, StepModel
from protocol.layout import Q8G64

RATE_GOAL = 0.97
"""Of the resident rate, at one percent of misses."""
SHARDS_LOSS_GOAL = 0.5
"""Percent that ranks with parts of a model may lose at one percent of misses."""
BYTES_GOAL = 1.0
"""Percent that memory may differ from what ``kvd plan`` says."""
ATTACH_GOAL = 5.0
"""Seconds to map and register the host RAM of all sessions."""


@dataclass
class Case:
    """One part of misses: what is drawn for it, and what came out."""

    name: str
    percent: float | None
    drawn: tuple[Tensor, Tensor]
    """Selections, and the rows that they begin at, on the host; see `World.draw`."""
    cached: list[Tensor]
    offloaded: list[Pass] = field(default_factory=list)
    resident: list[Pass] = field(default_factory=list)
    alone: list[list[Pass]] = field(default_factory=list)
    looked_up: list[Tensor] = field(default_factory=list)
    """Of each session, int64 [groups, 4]: hits, misses, ring hits and duplicate misses of the timed passes."""
    right: bool = True
    rows: list[Row] = field(default_factory=list)

    def drawn_for(self, sessions: slice, world: World) -> tuple[Tensor, Tensor]:
        """What was drawn for these sessions, on the device."""
        drawn, first = self.drawn
        device = world.worker.device.torch_device
        return drawn[sessions].to(device), first[sessions].to(device)


def case_rows(world: World, case: Case, arguments: Namespace, rates: Rates) -> list[Row]:
    name, sessions = case.name, world.settings.sessions
    offloaded = digests(case.offloaded[:2])
    alone = [digests(passes)[0] for passes in case.alone]
    equal = sum(one == other for one, other in zip(offloaded, alone, strict=True))
    for session, (one, other) in enumerate(zip(offloaded, alone, strict=True)):
        said = "equal" if one == other else "DIFFERENT"
        say(f"{name}, session {session + 1}: offloaded in a batch {one}, resident and alone {other}: {said}")
    distinct = len({token for taken in case.offloaded for output in taken.tokens for token in output})
    case.right &= equal == sessions
    if world.team is not None:
        alike = len({tuple(found) for found in world.team.exchange(offloaded, list[str])}) == 1
        case.right &= alike
        case.rows.append(Row(f"{name}: all ranks have the same outputs", float(alike), "of 1"))
    rows = [
        Row(f"{name}: outputs equal to the session resident and alone", equal, f"of {sessions}"),
        Row(f"{name}: distinct tokens", distinct, "tokens"),
        *case.rows,
    ]
    if case.resident:
        same = sum(a == b for a, b in zip(digests(case.offloaded), digests(case.resident), strict=True))
        case.right &= same == sessions
        rows.append(Row(f"{name}: outputs equal to the resident batch, all passes", same, f"of {sessions}"))
    return [*rows, *_speed_rows(world, case, arguments, rates)]


def _speed_rows(world: World, case: Case, arguments: Namespace, rates: Rates) -> list[Row]:
    name, settings, steps = case.name, world.settings, arguments.steps
    total = torch.stack(case.looked_up).sum(0)
    missed = int(total[:, UNIQUE_MISSES].sum() + total[:, DUPLICATE_MISSES].sum())
    misses = missed / max(int(total.sum()), 1)
    row_bytes = torch.tensor([world.worker.format.group_row_bytes(group) for group in range(len(total))])
    fetched = int((total[:, UNIQUE_MISSES] * row_bytes).sum()) / (steps * arguments.pairs)
    rows = [Row(f"{name}: misses, measured", 100 * misses, "% of selections")]
    if len(case.drawn[0]):
        overlaps = Trace(case.drawn[0][0], 0).overlaps()
        overlap = 100 * statistics.mean(overlaps)
        rows.append(Row(f"{name}: overlap of consecutive selections, mean of groups", overlap, "%"))
    rows.append(Row(f"{name}: fetched from host RAM", fetched / 2**20, "MiB a step"))
    times: dict[str, list[float]] = {}
    for mode, passes in (("resident", case.resident[1:]), ("offloaded", case.offloaded[1:])):
        times[mode] = [taken.seconds / steps for taken in passes]
        for number, taken in enumerate(passes):
            base = case.resident[1 + number].tokens_per_s if mode == "offloaded" and case.resident else None
            goal = RATE_GOAL * base if base is not None and case.percent == 1.0 else None
            rows.append(Row(f"{name}, pass {number + 1}: {mode}", taken.tokens_per_s, "tokens/s", goal=goal))
        if passes:
            rows.append(Row(f"{name}: {mode}, a step", 1e6 * statistics.median(times[mode]), "µs"))
            if settings.tensor == 1:
                expected = _planned(settings, rates, misses, cached=mode == "offloaded")
                rows.append(Row(f"{name}: {mode}, a step as kvd plan expects it", expected, "µs"))
    for number, (here, there) in enumerate(zip(times["resident"], times["offloaded"], strict=False)):
        loss, floor = 100 * (1 - here / there), 100 * fetched / rates.bus_read / there
        goal = SHARDS_LOSS_GOAL if settings.tensor > 1 and case.percent == 1.0 else None
        rows.append(
            Row(f"{name}, pass {number + 1}: loss; the floor is that of fetched bytes", loss, "%", floor, goal=goal)
        )
    if len(times["resident"]) > 1:
        spread = 100 * (max(times["resident"]) / min(times["resident"]) - 1)
        rows.append(Row(f"{name}: slowest resident pass against the fastest", spread, "%"))
    return rows


def _planned(settings: SessionsSettings, rates: Rates, misses: float, *, cached: bool) -> float:
    """µs of a step as `kvd.planning` expects it."""
    kind = settings.dtype
    model = StepModel(settings.config, Q8G64, kind, rates, cached=cached)
    mean = sum(settings.rows(session) for session in range(settings.sessions)) / settings.sessions
    return model.step(PlannedBatch(settings.sessions, mean, 0, misses)).total


def memory_rows(world: World) -> list[Row]:
    """Bytes by purpose beside the plan's (of VRAM, on all devices), and how long attaching took."""
    settings, plan, committed = world.settings, world.settings.plan, world.committed()
    count, devices = settings.sessions, settings.tensor
    planned = {part.purpose: count * part.committed_bytes for part in plan.parts}
    planned["index_keys"] = plan.key_slabs(count).nbytes
    groups = {
        "host RAM": (("pages", "session_state"), plan.host_bytes(count)),
        "index keys": (("index_keys",), devices * planned["index_keys"]),
        "hot caches": (("hot_cache",), devices * planned["hot_cache"]),
        "VRAM of histories": (("hot_cache", "tables", "ring", "index_keys"), devices * plan.vram_bytes(count)),
    }
    rows = []
    for what, (purposes, expected) in groups.items():
        found = sum(committed.get(purpose, 0) for purpose in purposes)
        off = 100 * abs(found / expected - 1)
        rows += [
            Row(f"memory: {what}", found / 2**30, "GiB"),
            Row(f"memory: {what}, as planned", expected / 2**30, "GiB"),
            Row(f"memory: {what}, off by", off, "%", goal=BYTES_GOAL),
        ]
    if settings.device != "cpu" and devices == 1:
        expected_weights = weight_bytes(
            settings.config, settings.dtype, range(settings.config.num_hidden_layers), drafts=False
        )
        rows.append(Row("memory: weights", world.weights_bytes / 2**30, "GiB"))
        rows.append(Row("memory: weights, as planned", expected_weights / 2**30, "GiB"))
    attachment = world.worker.attachment
    rows.append(Row("attaching host RAM", attachment.attach_seconds, "s", goal=ATTACH_GOAL))
    rows.append(Row("host RAM attached", attachment.attached_bytes / 2**30, "GiB"))
    return rows
