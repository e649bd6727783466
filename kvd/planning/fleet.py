"""How many nodes a mix of sessions takes, which of their resources ends first, and how fast they decode.

A *replica* is the GPUs that hold all weights once: ``pipeline`` stages of whole index groups, each on ``tensor`` GPUs
that share heads and experts. Ranks of a stage read the same pages in host RAM, but each has its own hot caches and
index keys. A step goes through one stage after the other. A *unit* is the node that has one replica or several, or the
nodes that have one replica among them.

Memory is `kvd.planning.footprint`'s, time is `kvd.planning.step_model`'s. What a prefill takes of time is left out.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from kvd.planning.footprint import Footprint, slabs_of
from kvd.planning.mix import SessionKind, fullest_share, in_proportion
from kvd.planning.nodes import NodeType
from kvd.planning.products import WeightType, weight_bytes
from kvd.planning.step_model import Batch, StepModel, StepTime, measured
from kvd.units import format_bytes
from protocol.errors import InvalidValue
from protocol.layout import PAGE_TOKENS, Encoding
from protocol.model import ModelConfig

MOST_SESSIONS = 10**6
"""More on one unit are not counted."""
MOST_STAGES = 64
STEP = "step time"
"""The resource that the sum of all waiting is."""
DECIDING = ("host RAM", "VRAM", STEP)
"""What the number of sessions depends on; the other resources are parts of a step's time."""


@dataclass(frozen=True)
class Workload:
    """What is decoded: ``misses`` is a part of selected rows, ``kept`` a part of drafts.

    ``least_rate`` is tokens/s that a decoding session gets at least.
    """

    model: ModelConfig
    encoding: Encoding
    weights: WeightType
    mix: tuple[SessionKind, ...]
    hot_rows: int
    ring_pages: int
    drafts: int
    misses: float
    kept: float
    least_rate: float

    @property
    def tokens_per_step(self) -> float:
        return 1 + self.kept * self.drafts


@dataclass(frozen=True)
class Layout:
    """How a replica is spread over GPUs."""

    tensor: int
    pipeline: int

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline


@dataclass(frozen=True)
class Use:
    """Of one resource of a unit: how much of it some sessions take, and how many sessions it would hold in all.

    Bytes for memory; seconds of each second for the rest. ``holds`` is None where `MOST_SESSIONS` would do.
    """

    resource: str
    used: float
    limit: float
    holds: int | None


class Stage:
    """One stage of a replica, on ``tensor`` GPUs."""

    def __init__(self, workload: Workload, node: NodeType, layers: range, tensor: int) -> None:
        model = workload.model
        self._footprints = {
            kind.tokens: Footprint(
                model, workload.encoding, kind.tokens, workload.hot_rows, workload.drafts, workload.ring_pages, layers
            )
            for kind in workload.mix
        }
        self._block_bytes = workload.encoding.keys.block_bytes
        self.layers = layers
        self.weights = weight_bytes(model, workload.weights, layers, drafts=workload.drafts > 0) / tensor
        self.model = StepModel(
            model, workload.encoding, workload.weights, node.rates, layers=layers, tensor=tensor, cached=True
        )
        longest = max(self._footprints.values(), key=lambda footprint: footprint.pages)
        widest = max(map(longest.page_format.group_row_bytes, range(len(longest.page_format.groups))))
        self.append_stream = 2 * longest.pages * PAGE_TOKENS * widest
        """Bytes of two groups' rows of the longest session, which a long append streams."""

    def host_bytes(self, kinds: tuple[SessionKind, ...]) -> int:
        return sum(self._footprints[kind.tokens].host_bytes(kind.stored) for kind in kinds)

    def fixed_vram(self) -> float:
        """Bytes on each GPU that no session needs less or more of."""
        worker: int = measured()["worker"]["vram"]
        return self.weights + worker + self.append_stream

    def session_vram(self, kinds: tuple[SessionKind, ...]) -> dict[str, int]:
        """Bytes of the decoding sessions on each GPU, by purpose."""
        found: dict[str, int] = {}
        blocks = 0
        for kind in kinds:
            footprint = self._footprints[kind.tokens]
            for part in footprint.parts:
                if part.tier == "vram" and part.purpose != "index_keys":
                    found[part.purpose] = found.get(part.purpose, 0) + kind.decoding * part.committed_bytes
            blocks += kind.decoding * footprint.pages * len(footprint.page_format.groups)
        return {**found, "index_keys": slabs_of(blocks, self._block_bytes).nbytes}


class Unit:
    """A node with its replicas, or the nodes that share one replica."""

    def __init__(self, workload: Workload, node: NodeType, layout: Layout) -> None:
        """Raises `InvalidValue` for a layout that model or node do not allow."""
        _check(workload.model, node, layout)
        self.workload, self.node, self.layout = workload, node, layout
        self.replicas = max(node.gpus // layout.gpus, 1)
        self.nodes = -(-layout.gpus // (node.gpus // layout.tensor * layout.tensor))
        ranges = _stages(workload.model, layout.pipeline)
        self.stages = [Stage(workload, node, layers, layout.tensor) for layers in ranges]
        self._stages_per_node = min(node.gpus // layout.tensor, layout.pipeline)
        self._steps: dict[Batch, StepTime] = {}

    @cached_property
    def vram_for_sessions(self) -> float:
        """Bytes on the fullest GPU beside weights, worker and streams; below 0 where these do not fit."""
        return self.node.vram - max(stage.fixed_vram() for stage in self.stages)

    def host_bytes(self, kinds: tuple[SessionKind, ...]) -> int:
        """Of the fullest node."""
        stages = [stage.host_bytes(kinds) for stage in self.stages]
        step = self._stages_per_node
        return max(sum(stages[first : first + step]) for first in range(0, len(stages), step))

    def of_replica(self, kinds: tuple[SessionKind, ...]) -> tuple[SessionKind, ...]:
        """Of the unit's sessions, those of the fullest replica."""
        return fullest_share(kinds, self.replicas)

    def vram_bytes(self, kinds: tuple[SessionKind, ...]) -> float:
        """Of the fullest GPU, weights and all."""
        share = self.of_replica(kinds)
        return max(stage.fixed_vram() + sum(stage.session_vram(share).values()) for stage in self.stages)

    def batch(self, kinds: tuple[SessionKind, ...]) -> tuple[Batch, float]:
        """The sessions of a replica's step, and how many steps it takes for each to have its turn."""
        share = self.of_replica(kinds)
        decoding = sum(kind.decoding for kind in share)
        together = min(decoding, measured()["worker"]["decode_batch"])
        tokens = sum(kind.decoding * kind.tokens for kind in share) / max(decoding, 1)
        return Batch(together, tokens, self.workload.drafts, self.workload.misses), decoding / max(together, 1)

    def step(self, kinds: tuple[SessionKind, ...]) -> StepTime:
        """One step of a replica, through all of its stages."""
        batch, _ = self.batch(kinds)
        if batch not in self._steps:
            self._steps[batch] = sum((stage.model.step(batch) for stage in self.stages), StepTime())
        return self._steps[batch]

    def rate(self, kinds: tuple[SessionKind, ...]) -> float:
        """Tokens/s of one session; 0 where none decodes."""
        batch, turns = self.batch(kinds)
        return self.workload.tokens_per_step * 1e6 / (turns * self.step(kinds).total) if batch.sessions else 0.0

    def uses(self, kinds: tuple[SessionKind, ...]) -> list[Use]:
        """Of all resources: what ``kinds`` take, and how many sessions in this proportion they would hold."""
        return [
            Use(name, used(kinds), limit, self._holds(used, limit)) for name, (used, limit) in self._resources.items()
        ]

    def fits(self, kinds: tuple[SessionKind, ...]) -> bool:
        return all(used(kinds) <= limit for used, limit in map(self._resources.__getitem__, DECIDING))

    @cached_property
    def _resources(self) -> dict[str, tuple[Callable[[tuple[SessionKind, ...]], float], float]]:
        """What is used of each, as a function of the sessions, and its limit."""

        def busy(part: Callable[[StepTime], float]) -> Callable[[tuple[SessionKind, ...]], float]:
            """Seconds of each second at the least rate."""

            def used(kinds: tuple[SessionKind, ...]) -> float:
                batch, turns = self.batch(kinds)
                if not batch.sessions:
                    return 0.0
                steps = turns * self.workload.least_rate / self.workload.tokens_per_step
                return steps * part(self.step(kinds)) / 1e6

            return used

        return {
            "host RAM": (self.host_bytes, self.node.host_for_kvd),
            "VRAM": (self.vram_bytes, self.node.vram),
            "PCIe": (busy(lambda step: step.bus_busy), 1.0),
            "HBM": (busy(lambda step: step.hbm), 1.0),
            "compute": (busy(lambda step: step.compute), 1.0),
            STEP: (busy(lambda step: step.total), 1.0),
        }

    def _holds(self, used: Callable[[tuple[SessionKind, ...]], float], limit: float) -> int | None:
        def amount(sessions: int) -> float:
            return used(in_proportion(self.workload.mix, sessions))

        if amount(MOST_SESSIONS) <= limit:
            return None
        return max(bisect.bisect_right(range(MOST_SESSIONS), limit, key=amount) - 1, 0)


@dataclass(frozen=True)
class FleetPlan:
    """The answer: ``units`` of them, and the sessions of the fullest."""

    unit: Unit
    units: int
    fullest: tuple[SessionKind, ...]

    @property
    def nodes(self) -> int:
        return self.units * self.unit.nodes

    @property
    def rate(self) -> float:
        """Tokens/s of a session on the fullest unit."""
        return self.unit.rate(self.fullest)

    @property
    def total_rate(self) -> float:
        """Tokens/s of all decoding sessions, each as fast as one on the fullest unit."""
        return self.rate * sum(kind.decoding for kind in self.unit.workload.mix)

    @cached_property
    def uses(self) -> list[Use]:
        return self.unit.uses(self.fullest)

    @property
    def first_out(self) -> Use:
        """What keeps a unit from holding more."""
        deciding = [use for use in self.uses if use.resource in DECIDING]
        return min(deciding, key=lambda use: math.inf if use.holds is None else use.holds)


def plan(workload: Workload, node: NodeType, *, tensor: int | None = None, pipeline: int | None = None) -> FleetPlan:
    """The fewest nodes for all sessions; of layouts that need as few, the fastest.

    Raises `InvalidValue` where no layout of the node holds one session of each kind, with what is missing.
    """
    best: FleetPlan | None = None
    closest: Unit | None = None
    for layout in _layouts(workload.model, node, tensor, pipeline):
        unit = Unit(workload, node, layout)
        if closest is None or unit.vram_for_sessions > closest.vram_for_sessions:
            closest = unit
        if unit.vram_for_sessions <= 0 or (best is not None and unit.nodes > best.nodes):
            continue
        units = _units(unit)
        if units is None:
            continue
        found = FleetPlan(unit, units, fullest_share(workload.mix, units))
        if best is None or (found.nodes, -found.rate) < (best.nodes, -best.rate):
            best = found
    if best is not None:
        return best
    assert closest is not None, "no layout at all"
    raise InvalidValue("node", node.name, _needed(closest))


def _units(unit: Unit) -> int | None:
    """The fewest that hold everything; None if one of each kind is too much for one of them."""
    mix = unit.workload.mix
    most = max(kind.stored for kind in mix)
    if not unit.fits(fullest_share(mix, most)):
        return None
    return bisect.bisect_left(range(1, most + 1), True, key=lambda units: unit.fits(fullest_share(mix, units))) + 1


def _needed(unit: Unit) -> str:
    """What a node would have to have, of the layout that comes closest."""
    one = fullest_share(unit.workload.mix, MOST_SESSIONS)
    layout = f"tensor {unit.layout.tensor}, pipeline {unit.layout.pipeline}"
    needs = {
        "VRAM on each GPU": (unit.vram_bytes(one), unit.node.vram),
        "host RAM beside what is reserved": (unit.host_bytes(one), unit.node.host_for_kvd),
    }
    for what, (needed, there) in needs.items():
        if needed > there:
            return (
                f"one with at least {format_bytes(math.ceil(needed))} of {what} for one session of each kind "
                f"({layout}); it has {format_bytes(there)}"
            )
    rate = unit.rate(one)
    return f"one that is faster, or --least-rate {rate:.3g} at most, what one session of each kind gets ({layout})"


def _layouts(model: ModelConfig, node: NodeType, tensor: int | None, pipeline: int | None) -> Iterator[Layout]:
    widths = [tensor] if tensor else [width for width in (1, 2, 4, 8, 16) if _divides(model, node, width)]
    deepest = min(MOST_STAGES, len(model.index_groups()))
    depths = [pipeline] if pipeline else [depth for depth in range(1, deepest + 1) if depth <= 8 or depth % 4 == 0]
    for width in widths:
        for depth in depths:
            if tensor or pipeline or width * depth <= max(node.gpus, MOST_STAGES):
                yield Layout(width, depth)


def _divides(model: ModelConfig, node: NodeType, tensor: int) -> bool:
    return tensor <= node.gpus and not model.num_attention_heads % tensor and not model.n_routed_experts % tensor


def _check(model: ModelConfig, node: NodeType, layout: Layout) -> None:
    if layout.tensor > node.gpus:
        raise InvalidValue("--tensor", layout.tensor, f"1 to {node.gpus}, the GPUs of a {node.name}")
    if not _divides(model, node, layout.tensor):
        heads, experts = model.num_attention_heads, model.n_routed_experts
        raise InvalidValue("--tensor", layout.tensor, f"a divisor of {heads} heads and {experts} experts")
    groups = len(model.index_groups())
    if layout.pipeline > groups:
        raise InvalidValue("--pipeline", layout.pipeline, f"1 to {groups}, the index groups of the model")


def _stages(model: ModelConfig, count: int) -> list[range]:
    """Layers of each stage: whole index groups, as even as they go."""
    groups, layers = model.index_groups(), model.num_hidden_layers
    starts = [0]
    for stage in range(1, count):
        least, most = starts[-1] + 1, len(groups) - (count - stage)
        wanted = stage * layers / count
        starts.append(min(range(least, most + 1), key=lambda group: abs(groups[group].first_layer - wanted)))
    firsts = [groups[start].first_layer for start in starts]
    return [range(first, end) for first, end in zip(firsts, [*firsts[1:], layers], strict=True)]
