"""``kvd-bench choices``: long sessions that append and answer, at each number of drafts and batch limit, and by choice.

The scheduler of ``kvd-worker serve``, without its HTTP. A group is a request for each session, all at once: it begins
with a stored history, whose pages it shares, reads some more tokens, and answers. The rate of a group is the output
tokens of all over the time from the first request to the last token. Groups of fixed drafts and limits take turns with
those that the scheduler chooses for, after it has measured; all give the same answers, token for token, else the exit
status is 1.

Histories are synthetic (random rows and keys), selections those of random weights. Drafts of random weights are never
right, so they are the answers with seeded mistakes, as many as a published run had (`benchmarks.pairs_script`), while
the MTP layer runs at full cost.
"""

from __future__ import annotations

import itertools
import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence

import torch

from benchmarks.choices_world import Group, Sizes, World, opened
from benchmarks.model_arguments import add_model_arguments, model_of
from benchmarks.report import Report, Row, cpu_name
from benchmarks.sessions_world import say
from compute.histories import MAX_DRAFTS
from compute.model_arguments import chunk_of, hot_rows_of, ring_pages_of
from compute.serve.tuning import StepTuner, padded
from compute.step import BATCH_SIZES
from protocol.errors import InvalidValue
from protocol.layout import PAGE_TOKENS

MOST = BATCH_SIZES[-1]
NEAR = 0.97
"""Of the best cell's rate: what the choice is to reach."""
LEARNING = 8
"""Groups that the choice may take to measure every number of drafts, at most."""
CHOSEN = "chosen by measurement"
TOLD = ("model", "layers", "experts", "dtype", "sessions", "history", "append", "output", "mtp", "limits", "seed")
"""Settings that a report names."""


def configure(parser: ArgumentParser) -> None:
    parser.description = __doc__
    add = parser.add_argument
    add_model_arguments(parser)
    add("--sessions", type=int, default=10, metavar="N", help="requests of a group (default %(default)s)")
    add("--history", type=int, default=50_048, metavar="N", help="stored tokens of each (default %(default)s)")
    add("--append", type=int, default=512, metavar="N", help="tokens that each reads (default %(default)s)")
    add("--output", type=int, default=128, metavar="N", help="tokens of each answer (default %(default)s)")
    add("--mtp", type=int, nargs="+", default=[0, 1, 3], metavar="N", help="drafts of a step (default 0 1 3)")
    add("--limits", type=int, nargs="+", default=list(BATCH_SIZES), metavar="N", help="sessions decoded together")
    add("--rounds", type=int, default=2, metavar="N", help="groups of each kind (default %(default)s)")
    add("--hot-rows", type=int, metavar="N", help="slots of a hot cache (default: what a step selects, 2,048 at least)")
    add("--ring-pages", type=int, metavar="N", help="newest pages of a session, in VRAM")
    add("--chunk", type=int, metavar="N", help="most tokens of a prompt that are read at a time")
    add("--seed", type=int, default=0, help="of tokens and mistakes (default %(default)s)")
    add(
        "--seconds", type=float, metavar="S", help="begin no round after S seconds; the report says how many there were"
    )


def run(arguments: Namespace) -> Report:
    """Measure. ``exit_status`` is 1 if an answer differs."""
    started = time.monotonic()
    sizes = _sizes(arguments)
    with opened(sizes, arguments.sessions, arguments.seed) as world:
        say(f"{arguments.sessions} sessions after {time.monotonic() - started:.1f} s")
        first = world.group(_fixed(min(sizes.depths), MOST))
        world.script(first.answers, arguments.seed)
        warm = {depth: world.group(_fixed(depth, MOST), counted=True) for depth in sizes.depths}
        chosen = StepTuner(sizes.depths, MOST)
        learnt = _learn(world, chosen)
        say(f"compiled, recorded and measured after {time.monotonic() - started:.1f} s")
        until = None if arguments.seconds is None else started + arguments.seconds
        timed = _timed(world, arguments, chosen, until)
    told: dict[str, object] = {
        "torch": torch.__version__,
        "weights": "random",
        "histories": "synthetic: random rows and keys",
        "selections": "real, of random weights",
        "drafts": "scripted: the answers with seeded mistakes",
        **{name: getattr(arguments, name) for name in TOLD},
        **{name: getattr(sizes, name) for name in ("hot_rows", "ring_pages", "chunk")},
    }
    report = Report("choices", cpu_name() if arguments.device == "cpu" else torch.cuda.get_device_name(), told)
    report.rows += table(timed)
    report.rows.append(Row("rounds", len(timed[CHOSEN]), "rounds"))
    report.rows.append(Row(f"{CHOSEN}: drafts", chosen.best(arguments.sessions), "drafts"))
    report.rows.append(Row(f"{CHOSEN}: limit", chosen.limit(arguments.sessions), "sessions"))
    for depth, group in warm.items():
        report.rows.append(Row(f"MTP {depth}: tokens of a session's step", group.tokens_per_step, "tokens"))
        report.rows.append(Row(f"MTP {depth}: selected rows that were missed", 100 * group.missed, "%"))
    groups = [*warm.values(), *learnt, *(group for each in timed.values() for group in each)]
    differing = sum(here != there for group in groups for here, there in zip(group.answers, first.answers, strict=True))
    distinct = {token for answer in first.answers for token in answer}
    report.rows.append(Row("distinct output tokens", len(distinct), "tokens"))
    report.rows.append(Row("answers that differ from the first group's", differing, "answers", goal=0))
    report.rows.append(Row("time of the whole run", time.monotonic() - started, "s"))
    report.exit_status = int(differing > 0)
    return report


def kind(depth: int, limit: int) -> str:
    return f"MTP {depth}, at most {limit} decoded together"


def table(timed: Mapping[str, Sequence[Group]]) -> list[Row]:
    """The rate of each kind of group over all rounds, beside the best of those that nothing was chosen for."""
    rates, spreads = {}, []
    for what, groups in timed.items():
        rates[what] = sum(group.tokens for group in groups) / sum(group.seconds for group in groups)
        each = [group.tokens_per_s for group in groups]
        spreads.append(max(each) / min(each) - 1)
    best = max(rate for what, rate in rates.items() if what != CHOSEN)
    rows = [Row(what, rate, "tokens/s", baseline=best) for what, rate in rates.items()]
    rows.append(Row(f"{CHOSEN}, beside the best", rates[CHOSEN] / best, "times the speed", goal=NEAR))
    rows.append(Row("difference between rounds, median of all kinds", 100 * statistics.median(spreads), "%"))
    return rows


def _timed(world: World, arguments: Namespace, chosen: StepTuner, until: float | None) -> dict[str, list[Group]]:
    """Rounds of a group of each kind, the last of them by choice; none but the first begins after ``until``."""
    cells = itertools.product(dict.fromkeys(arguments.mtp), dict.fromkeys(arguments.limits))
    tuners = {kind(*cell): _fixed(*cell) for cell in cells} | {CHOSEN: chosen}
    timed: dict[str, list[Group]] = {what: [] for what in tuners}
    for number in range(1, arguments.rounds + 1):
        if number > 1 and until is not None and time.monotonic() > until:
            break
        for what, tuner in tuners.items():
            timed[what].append(world.group(tuner))
            say(f"round {number}: {what}: {timed[what][-1].tokens_per_s:.1f} tokens/s")
    return timed


def _fixed(depth: int, limit: int) -> StepTuner:
    return StepTuner((depth,), MOST, limit=limit)


def _learn(world: World, tuner: StepTuner) -> list[Group]:
    """Groups until every number of drafts that may be the best has been measured with all sessions together."""
    groups: list[Group] = []
    size = padded(min(len(world.prompts), MOST))
    while len(groups) < LEARNING and tuner.unmeasured(size):
        groups.append(world.group(tuner))
    return groups


def _sizes(arguments: Namespace) -> Sizes:
    """Raises `InvalidValue`."""
    config = model_of(arguments)
    for what, values, low, high in (
        ("sessions", [arguments.sessions], 1, MOST),
        ("mtp", arguments.mtp, 0, MAX_DRAFTS),
        ("limits", arguments.limits, 1, MOST),
        ("history", [arguments.history], PAGE_TOKENS, 1 << 20),
        ("append", [arguments.append], 1, 1 << 20),
        ("output", [arguments.output], 2, 1 << 20),
        ("rounds", [arguments.rounds], 1, 1000),
    ):
        for value in values:
            if not low <= value <= high:
                raise InvalidValue(f"--{what}", value, f"{low} to {high}")
    if max(arguments.mtp) and not config.num_nextn_predict_layers:
        raise InvalidValue("--mtp", max(arguments.mtp), "0: the model has no MTP layer")
    if arguments.history % PAGE_TOKENS:
        raise InvalidValue("--history", arguments.history, f"a multiple of {PAGE_TOKENS}")
    chunk = chunk_of(arguments)
    return Sizes(
        config=config,
        device=arguments.device,
        dtype=arguments.dtype,
        depths=tuple(dict.fromkeys(arguments.mtp)),
        history=arguments.history,
        append=arguments.append,
        output=arguments.output,
        hot_rows=hot_rows_of(arguments, config, max(arguments.mtp)),
        ring_pages=ring_pages_of(arguments, chunk),
        chunk=chunk,
    )
