"""``kvd-bench decode``: a decode step of GLM-5.3, recorded as one CUDA graph, beside the time to read what it reads.

Real dimensions and layers, random weights with few experts so that all layers fit one card; with 8 experts each of them
is active in every row, as many bytes as the real model's. Histories are synthetic: random rows, and index keys that
nobody queried for, so a selection jumps about. Before anything is timed, an offloaded session decodes with the same
weights and history as a resident one, and both must give the same tokens and the same bits of hidden states; a
corrupted row must change them.

The split by kernel comes from a profiler, in a pass of its own that is not among those timed.
"""

from __future__ import annotations

import hashlib
import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from dataclasses import replace

import torch
import triton

from benchmarks.decode_world import ROOM, Session, offloaded, resident
from benchmarks.harness import Floors, measure_floors
from benchmarks.report import Report, Row
from benchmarks.step_world import FORMAT, Pages
from compute.decode.matrices import WEIGHT_TYPES
from compute.decode.step import DecodeStep
from compute.decode.weights import DecodeWeights, MoeWeights, random_weights_on
from protocol.errors import InvalidValue
from protocol.layout import PAGE_TOKENS, Q8G64
from protocol.model import GLM_5_3

GOALS = {"bf16": 1.3, "fp8": 1.5}
"""Step time over its floor, batch 1."""
BATCH_GOAL = 1.2
"""Step time of a batch over that of one session plus the time to read the other sessions' bytes."""
COMPARED = 32
"""Steps that resident and offloaded sessions are compared over."""
STEPS = 32
"""Steps of a timed pass."""

_KINDS = (
    ("experts", ("gate_up", "_down", "expert")),
    ("attention", ("split_kernel", "join_kernel")),
    ("index and selection", ("score", "collect", "select", "topk", "maxima")),
    ("cache", ("resolve", "fetch", "addresses")),
    ("append", ("append", "_store_kernel", "_begin")),
    ("products", ("linear", "gemm", "product")),
    ("norms, rotations, routing", ("norm", "_hidden_kernel", "_query_kernel", "silu", "route")),
)


def configure(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--dtype", choices=WEIGHT_TYPES, nargs="+", default=["fp8"], help="types of weights (default %(default)s)")
    add("--layers", type=int, default=GLM_5_3.num_hidden_layers, help="the first N layers (default all %(default)s)")
    add("--experts", type=int, default=8, help="routed experts of a layer (default %(default)s)")
    add("--tokens", type=int, default=51_200, help="history of each session (default %(default)s)")
    add("--batches", nargs="+", default=["1x1", "1x4", "16x1"], help="sessions x rows (default %(default)s)")
    add("--passes", type=int, default=5, help="timed passes of each case (default %(default)s)")


def run(arguments: Namespace) -> Report:
    """Measure; raises `InvalidValue` if an offloaded session's outputs are not the resident one's."""
    batches = [_batch(text) for text in arguments.batches]
    config = GLM_5_3.with_layers(arguments.layers).with_experts(arguments.experts)
    if all(group.end != config.num_hidden_layers for group in FORMAT.groups):
        raise InvalidValue("--layers", arguments.layers, "the end of an index group: 1, 2, 6, 10, … 78")
    if arguments.tokens % PAGE_TOKENS or arguments.tokens < 4 * ROOM:
        raise InvalidValue("--tokens", arguments.tokens, f"a multiple of {PAGE_TOKENS}, at least {4 * ROOM}")
    floors = measure_floors()
    torch.cuda.empty_cache()
    settings = {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "weights": "random",
        "layers": config.num_hidden_layers,
        "experts": config.n_routed_experts,
        "history": f"synthetic, {arguments.tokens} tokens each",
        "passes": arguments.passes,
    }
    report = Report("decode", torch.cuda.get_device_name(), settings, floors.rows())
    places = max(places for places, _ in batches)
    compared = [dtype for dtype in arguments.dtype if arguments.only in f"{dtype} equality"]
    pages = Pages(arguments.tokens // PAGE_TOKENS, on_host=bool(compared))
    many = pages if places == 1 else Pages(places * (arguments.tokens // PAGE_TOKENS), on_host=False)
    for dtype in arguments.dtype:
        started = time.monotonic()
        weights = random_weights_on(config, 0, dtype, "cuda")
        torch.cuda.synchronize()
        used = torch.cuda.memory_allocated() / 2**30
        _say(f"{dtype}: weights made in {time.monotonic() - started:.1f} s; {used:.1f} GiB allocated in all")
        if dtype in compared:
            report.rows += _compare(dtype, weights, pages, arguments.tokens)
        alone: Row | None = None
        for sessions, rows in batches:
            case = f"{dtype}, {config.num_hidden_layers} layers, {sessions} sessions of {rows} rows"
            if arguments.only in case:
                source = pages if sessions == 1 else many
                rows_of_case = _time(case, dtype, weights, source, sessions, rows, arguments, floors)
                step = rows_of_case[0]
                if sessions == rows == 1:
                    alone = step
                elif alone is not None and rows == 1 and step.floor and alone.floor:
                    goal = BATCH_GOAL * (alone.value + step.floor - alone.floor)
                    rows_of_case[0] = replace(step, goal=goal)
                report.rows += rows_of_case
        del weights
        torch.cuda.empty_cache()
    report.rows.append(Row("peak of VRAM that torch took", torch.cuda.max_memory_reserved() / 2**30, "GiB"))
    return report


def _step(weights: DecodeWeights, tokens: int, *, places: int = 1, rows: int = 1, cached: bool = False) -> DecodeStep:
    return DecodeStep(weights, FORMAT, torch.device("cuda"), places=places, rows=rows, max_tokens=tokens, cached=cached)


def _compare(dtype: str, weights: DecodeWeights, pages: Pages, tokens: int) -> list[Row]:
    """Tokens and hidden states of both modes; then with one wrong row in each slot of a group."""
    outputs: dict[str, tuple[list[int], str]] = {}
    here, there = resident(pages, tokens, 0), offloaded(pages, tokens)
    for name, session, cached in (("resident", here, False), ("offloaded", there, True)):
        started = time.monotonic()
        step = _step(weights, tokens, cached=cached)
        session.join(step, 0, 1)
        outputs[name] = _decode(step)
        _say(f"{dtype}, {name}: {COMPARED} steps, recorded and run, in {time.monotonic() - started:.1f} s")
        if cached:
            missed, looked_up = session.counters()
            session.join(step, 0, 1)
            # The cache is filled by the first steps, so the corruption comes between them and the ones compared.
            corrupted = _decode(step, corrupt=session)
    distinct = len(set(outputs["resident"][0]))
    for name, (sequence, digest) in {**outputs, "corrupted": corrupted}.items():
        _say(f"{dtype}, {name}: hidden states {digest}, tokens {sequence[:12]}…")
    if outputs["resident"] != outputs["offloaded"]:
        raise InvalidValue("outputs of the offloaded session", outputs["offloaded"][1], outputs["resident"][1])
    if corrupted[1] == outputs["resident"][1]:
        raise InvalidValue("outputs with corrupted rows", corrupted[1], "others than without")
    return [
        Row(f"{dtype}: equal steps, resident and offloaded", COMPARED, "steps"),
        Row(f"{dtype}: distinct tokens among them", distinct, "tokens"),
        Row(f"{dtype}: offloaded, missed", 100 * missed / looked_up, "% of selections"),
    ]


def _decode(step: DecodeStep, corrupt: Session | None = None) -> tuple[list[int], str]:
    """Tokens of `COMPARED` steps, and a hash of all their hidden states."""
    sequence, states = [], []
    for number in range(COMPARED):
        sampled, _ = step.replay().wait()
        sequence.append(sampled[0][0])
        states.append(step.hidden[0].clone())
        if corrupt is not None and number == COMPARED // 4:
            cache = max(corrupt.caches, key=lambda cache: cache.rows.shape[1])
            cache.rows[:, 1, 0] ^= 0x40
    if not bool(torch.isfinite(torch.stack(states)).all()):
        raise InvalidValue("hidden states", "not finite", "finite ones")
    return sequence, hashlib.sha256(torch.stack(states).cpu().numpy().tobytes()).hexdigest()[:16]


def _time(
    case: str,
    dtype: str,
    weights: DecodeWeights,
    pages: Pages,
    sessions: int,
    rows: int,
    arguments: Namespace,
    floors: Floors,
) -> list[Row]:
    step = _step(weights, arguments.tokens, places=sessions, rows=rows)
    members = [resident(pages, arguments.tokens, place) for place in range(sessions)]
    times = []
    for _ in range(arguments.passes + 1):  # the first one records
        for place, session in enumerate(members):
            session.join(step, place, place + 1)
        times.append(_pass(step))
    weight_bytes = read_bytes(weights, sessions * rows)
    of_histories = sessions * history_bytes(weights, members[0].length, rows)
    floor = floors.read_us(weight_bytes + of_histories)
    figure = statistics.median(times[1:])
    _say(f"{case}: µs per step {', '.join(f'{each:.0f}' for each in times[1:])}; floor {floor:.0f}")
    goal = GOALS[dtype] if sessions == rows == 1 else None
    found = [
        Row(f"{case}: step", figure, "µs", floor, goal=goal and goal * floor),
        Row(f"{case}: step over floor", figure / floor, "times", goal=goal),
        Row(f"{case}: weights read", weight_bytes / 1e9, "GB"),
        Row(f"{case}: history read", of_histories / 1e9, "GB"),
    ]
    for place, session in enumerate(members):
        session.join(step, place, place + 1)
    return found + _split(case, step)


def _pass(step: DecodeStep) -> float:
    """µs of a step, over `STEPS` of them enqueued one behind the other."""
    torch.cuda.synchronize()
    start, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(STEPS):
        step.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / STEPS


def _split(case: str, step: DecodeStep) -> list[Row]:
    """µs of a step by kind of kernel: from the end of the kernel before to its own end, so that all add up to the step.

    A kernel's own duration would say little: it is set up, and waits, while the one before still runs. What goes beside
    others, as appending does, may so be given time of theirs.
    """
    steps = 2
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step.replay()
        torch.cuda.synchronize()
    kernels = sorted(
        (event.time_range.end, event.time_range.start, event.name)
        for event in profile.events()
        if str(event.device_type) == "DeviceType.CUDA"
    )
    kinds: dict[str, float] = defaultdict(float)
    names: dict[str, list[float]] = defaultdict(list)
    before = kernels[0][1] if kernels else 0.0
    for end, _, name in kernels:
        kind = next((kind for kind, parts in _KINDS if any(part in name for part in parts)), "other")
        kinds[kind] += (end - before) / steps
        names[name].append((end - before) / steps)
        before = end
    for name, spent in sorted(names.items(), key=lambda item: -sum(item[1])):
        count = max(len(spent) // steps, 1)
        _say(f"  {sum(spent):9.1f} µs a step, {count:5d} launches of {sum(spent) / count:8.2f} µs  {name[:90]}")
    return [Row(f"{case}: {kind}", total, "µs") for kind, total in sorted(kinds.items())]


def read_bytes(weights: DecodeWeights, rows: int) -> float:
    """Bytes of weights that a step of ``rows`` rows reads, experts that no row is expected to choose left out."""
    total = float(weights.head.nbytes if weights.head else 0) + rows * 2 * weights.config.hidden_size
    for layer in weights.layers:
        parts = [layer.from_hidden, layer.from_latent, layer.absorb_key, layer.absorb_value, layer.output]
        feed = layer.feed_forward
        if isinstance(feed, MoeWeights):
            unused = (1 - weights.config.num_experts_per_tok / feed.experts.count) ** rows
            total += (feed.experts.gate_up.nbytes + feed.experts.down.nbytes) * (1 - unused)
            parts += [feed.router, feed.shared.gate_up, feed.shared.down]
        else:
            parts += [feed.gate_up, feed.down]
        total += sum(part.nbytes for part in parts)
    return total


def history_bytes(weights: DecodeWeights, length: int, rows: int) -> float:
    """All index keys of a session, and the selected rows of all layers, each query row's own."""
    config = weights.config
    keys = len(config.index_groups()) * length * (Q8G64.keys.block_bytes // PAGE_TOKENS)
    return keys + rows * config.index_topk * config.num_hidden_layers * Q8G64.rows.row_bytes


def _batch(text: str) -> tuple[int, int]:
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise InvalidValue("--batches", text, "SESSIONSxROWS, such as 1x4")
    return int(parts[0]), int(parts[1])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
