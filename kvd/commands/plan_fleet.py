"""``kvd plan --fleet``: nodes for a mix of sessions. The arithmetic is in `kvd.planning.fleet`."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from kvd.console import output_console
from kvd.planning.fleet import STEP, FleetPlan, Stage, Use, Workload, plan
from kvd.planning.mix import SessionKind, parse_mix
from kvd.planning.nodes import node_named, node_types
from kvd.planning.products import WEIGHT_TYPES
from kvd.planning.step_model import StepTime, measured
from kvd.units import format_bytes, parse_count
from protocol.errors import InvalidValue
from protocol.layout import Encoding
from protocol.model import ModelConfig

OPTIONS = ("mix", "node", "nodes", "dtype", "misses", "kept_drafts", "least_rate", "tensor", "pipeline")

_PARTS = {
    "launches": "launches and latencies",
    "hbm": "bytes from HBM",
    "compute": "operations",
    "bus": "waiting for PCIe",
    "joins": "joins of tensor-parallel ranks",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--fleet`` and what belongs to it; none has a default, so that one without ``--fleet`` is noticed."""
    option = parser.add_argument_group("nodes for a mix of sessions").add_argument
    option("--fleet", action="store_true", help="how many nodes, what ends first, and expected tokens/s")
    option("--mix", metavar="MIX", help="15x1M,200x50K/20: 20 of 200 decode at a time (default: --sessions, --tokens)")
    option("--node", metavar="NODE", help=f"{', '.join(node_types())}; with changes: h200,host=256GiB (default: h200)")
    option("--nodes", metavar="FILE", help="TOML file with nodes of your own")
    option("--dtype", help=f"type of the weights: {' or '.join(WEIGHT_TYPES)} (default: fp8)")
    option("--misses", metavar="PERCENT", help="selected rows that the hot cache lacks (default: 1)")
    option("--kept-drafts", metavar="PERCENT", help="drafts that are right (default: 62)")
    option("--least-rate", metavar="RATE", help="tokens/s that each decoding session gets (default: 10)")
    option("--tensor", metavar="GPUS", help="GPUs that share heads and experts (default: the best)")
    option("--pipeline", metavar="STAGES", help="stages that share layers (default: the best)")


def fleet_plan(
    args: argparse.Namespace, model: ModelConfig, encoding: Encoding, mix: tuple[SessionKind, ...] | None
) -> FleetPlan:
    """The plan that ``args`` ask for; ``mix`` is what is used without ``--mix``. Raises `InvalidValue`."""
    if args.mix is not None and mix is not None:
        raise InvalidValue("--sessions or --tokens", "given", "nothing beside --mix")
    default = SessionKind(model.max_position_embeddings, 1, 1)
    weights = next((kind for kind in WEIGHT_TYPES if kind == (args.dtype or "fp8")), None)
    if weights is None:
        raise InvalidValue("--dtype", args.dtype, f"one of {', '.join(WEIGHT_TYPES)}")
    workload = Workload(
        model=model,
        encoding=encoding,
        weights=weights,
        mix=parse_mix(args.mix) if args.mix is not None else mix or (default,),
        hot_rows=parse_count(args.hot_rows, "--hot-rows", low=1),
        ring_pages=parse_count(args.ring_pages, "--ring-pages", low=1, high=4096),
        drafts=parse_count(args.mtp, "--mtp", high=16),
        misses=_number(args.misses, "--misses", 1.0, 0, 100) / 100,
        kept=_number(args.kept_drafts, "--kept-drafts", 100 * measured()["drafts"]["kept"], 0, 100) / 100,
        least_rate=_number(args.least_rate, "--least-rate", 10.0, 0.001, 1e6),
    )
    node = node_named(args.node or "h200", Path(args.nodes) if args.nodes is not None else None)
    tensor = parse_count(args.tensor, "--tensor", low=1, high=64) if args.tensor is not None else None
    pipeline = parse_count(args.pipeline, "--pipeline", low=1, high=64) if args.pipeline is not None else None
    return plan(workload, node, tensor=tensor, pipeline=pipeline)


def print_plan(model_name: str, found: FleetPlan) -> None:
    """As text, for people."""
    unit, workload = found.unit, found.unit.workload
    node, layout, batch = unit.node, unit.layout, unit.batch(found.fullest)[0]
    replicas = f"{unit.replicas} replica{'s' if unit.replicas > 1 else ''} on a node"
    if unit.nodes > 1:
        replicas = f"1 replica on {unit.nodes} nodes"
    print(
        f"{model_name}, {workload.encoding.name}, {workload.weights} weights; {workload.drafts} drafts, "
        f"{100 * workload.misses:g} % misses, at least {workload.least_rate:g} tokens/s a session\n"
        f"{node.name}: {node.gpus} x {format_bytes(node.vram)} of VRAM, {format_bytes(node.host_for_kvd)} of host RAM "
        f"for kvd\ntensor {layout.tensor}, pipeline {layout.pipeline}: {replicas}\n"
    )
    output_console().print(_kinds(found))
    print()
    output_console().print(_resources(found))
    print("\nVRAM of the fullest GPU: " + ", ".join(f"{name} {format_bytes(size)}" for name, size in _vram(found)))
    first = found.first_out
    holds = "more" if first.holds is None else f"{first.holds:,}"
    share = sum(kind.stored for kind in found.fullest)
    where = "a node" if unit.nodes == 1 else f"{unit.nodes} nodes"
    print(f"\nNodes: {found.nodes:,}; at most {share:,} sessions on {where}, which would hold {holds}: {_ends(found)}.")
    if batch.sessions:
        step = unit.step(found.fullest)
        spent = ", ".join(
            f"{text} {getattr(step, part) / 1e3:.2f}" for part, text in _PARTS.items() if getattr(step, part)
        )
        print(
            f"Expected: {found.rate:.1f} tokens/s a session, {found.total_rate:,.0f} in all; a step of "
            f"{batch.sessions:g} sessions takes {step.total / 1e3:.2f} ms: {spent}."
        )
    if assumed := _assumed(found):
        print(f"Not measured: {'; '.join(assumed)}.")


def as_object(model_name: str, found: FleetPlan) -> dict[str, Any]:
    """As what ``--json`` prints."""
    unit, workload = found.unit, found.unit.workload
    batch, turns = unit.batch(found.fullest)
    step = unit.step(found.fullest) if batch.sessions else StepTime()
    return {
        "model": model_name,
        "encoding": workload.encoding.name,
        "dtype": workload.weights,
        "query_rows": 1 + workload.drafts,
        "hot_rows": workload.hot_rows,
        "misses_percent": 100 * workload.misses,
        "kept_drafts_percent": 100 * workload.kept,
        "least_tokens_per_s": workload.least_rate,
        "node": {
            "name": unit.node.name,
            "gpus": unit.node.gpus,
            "vram_bytes_per_gpu": unit.node.vram,
            "host_bytes_for_kvd": unit.node.host_for_kvd,
            "source": unit.node.source,
        },
        "mix": [asdict(kind) for kind in workload.mix],
        "tensor": unit.layout.tensor,
        "pipeline": unit.layout.pipeline,
        "replicas_per_node": unit.replicas / unit.nodes,
        "nodes_per_replica": unit.nodes,
        "nodes": found.nodes,
        "fullest": [asdict(kind) for kind in found.fullest],
        "resources": [asdict(use) for use in found.uses],
        "vram_of_fullest_gpu": dict(_vram(found)),
        "runs_out_first": found.first_out.resource,
        "step": {
            "sessions": batch.sessions,
            "turns": turns,
            "us": step.total,
            **{f"{part}_us": getattr(step, part) for part in _PARTS},
            "bus_busy_us": step.bus_busy,
        },
        "tokens_per_s_of_a_session": found.rate,
        "tokens_per_s": found.total_rate,
        "not_measured": _assumed(found),
    }


def _kinds(found: FleetPlan) -> Table:
    unit = found.unit
    table = Table("sessions of", box=None, pad_edge=False)
    for heading in ("stored", "decoding", "fullest", "host RAM", "VRAM"):
        table.add_column(heading, justify="right")
    for kind, share in zip(unit.workload.mix, found.fullest, strict=True):
        one = (SessionKind(kind.tokens, 1, 1),)
        vram = max(sum(stage.session_vram(one).values()) for stage in unit.stages)
        counts = (f"{count:,}" for count in (kind.stored, kind.decoding, share.stored))
        sizes = format_bytes(unit.host_bytes(one)), format_bytes(vram)
        table.add_row(f"{kind.tokens:,} tokens", *counts, *sizes)
    return table


def _resources(found: FleetPlan) -> Table:
    table = Table("resource", box=None, pad_edge=False)
    for heading in ("in use", "of", "part", "holds sessions"):
        table.add_column(heading, justify="right")
    for use in found.uses:
        holds = "no limit" if use.holds is None else f"{use.holds:,}"
        table.add_row(use.resource, *_amounts(use), f"{100 * use.used / use.limit:.1f} %", holds)
    return table


def _amounts(use: Use) -> tuple[str, str]:
    if use.limit > 1:
        return format_bytes(round(use.used)), format_bytes(round(use.limit))
    return f"{1e3 * use.used:.1f} ms", "1 s"


def _fullest_stage(found: FleetPlan) -> Stage:
    share = found.unit.of_replica(found.fullest)
    return max(found.unit.stages, key=lambda stage: stage.fixed_vram() + sum(stage.session_vram(share).values()))


def _vram(found: FleetPlan) -> list[tuple[str, int]]:
    stage = _fullest_stage(found)
    fixed = {"weights": stage.weights, "worker": measured()["worker"]["vram"], "append_stream": stage.append_stream}
    sizes = {**fixed, **stage.session_vram(found.unit.of_replica(found.fullest))}
    return [(name, round(size)) for name, size in sizes.items() if size]


def _ends(found: FleetPlan) -> str:
    first = found.first_out.resource
    if first == "VRAM":
        sizes = {name: size for name, size in _vram(found) if name not in ("weights", "worker", "append_stream")}
        if not sizes:
            return "VRAM ends first"
        most = max(sizes, key=lambda name: sizes[name])
        return f"VRAM ends first, most of the sessions' part is {most}"
    if first == STEP:
        step = found.unit.step(found.fullest)
        most = max(_PARTS, key=lambda part: float(getattr(step, part)))
        return f"the time of a step ends first, most of it {_PARTS[most]}"
    return f"{first} ends first"


def _assumed(found: FleetPlan) -> list[str]:
    unit = found.unit
    texts = []
    if not unit.node.source.startswith("measured"):
        texts.append(f"the figures of {unit.node.name} ({unit.node.source})")
    if unit.layout.tensor > 1:
        texts.append(f"joins of tensor-parallel ranks (taken as {measured()['assumed']['join_us']} µs)")
    if unit.layout.pipeline > 1:
        texts.append("what goes from stage to stage (taken as no time)")
    return texts


def _number(text: str | None, what: str, default: float, low: float, high: float) -> float:
    try:
        value = default if text is None else float(text)
    except ValueError:
        raise InvalidValue(what, text, f"a number, {low:g} to {high:g}") from None
    if not low <= value <= high:
        raise InvalidValue(what, text, f"{low:g} to {high:g}")
    return value
