"""``kvd-bench sessions``: many long sessions that decode at once, offloaded against resident and against each alone.

A daemon of its own, real sessions in host RAM, recorded steps of the whole model, page copyback. Every session's tokens
and hidden states must be those that it gives resident and alone, bit for bit; one corrupted fetched row must change its
own and nobody else's. Speed is that of the whole: tokens of all sessions over the time of a pass.

Where VRAM holds both, passes of offloaded and resident sessions alternate; else one mode is measured after the other.
"""

from __future__ import annotations

import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.locality import Locality
from benchmarks.model_arguments import add_model_arguments, model_of
from benchmarks.report import Report, Row, cpu_name
from benchmarks.sessions_decode import Batch, Pass, digests
from benchmarks.sessions_fetch import fetch_rows
from benchmarks.sessions_report import Case, case_rows, memory_rows
from benchmarks.sessions_world import SessionsSettings, World, fill_cache, opened, say
from compute.decode.decoder import FastDecoder
from compute.history import History
from compute.kernels.state import GroupCache
from compute.step import BATCH_SIZES
from kvd.planning.products import weight_bytes
from kvd.planning.step_model import Rates, measured
from protocol.errors import InvalidValue
from protocol.model import model_named

WARM_UP = 8
"""Steps before the first timed one: they compile and record."""
_WRONG = 0x40  # as scale and value: 192, and finite
VRAM_SPARE = 6 << 30
"""Left for torch and the context where it is decided whether both modes fit at a time."""


def configure(parser: ArgumentParser) -> None:
    parser.description = __doc__
    add = parser.add_argument
    add_model_arguments(parser)
    add("--sessions", type=int, default=15, metavar="N", help="sessions of one step (default %(default)s)")
    add("--tokens", type=int, default=1_048_576, metavar="N", help="most tokens of a session (default %(default)s)")
    add("--hot-rows", type=int, default=32_768, metavar="N", help="slots of a hot cache (default %(default)s)")
    add("--ring-pages", type=int, default=8, metavar="N", help="newest pages of a session, in VRAM (default 8)")
    add("--selections", choices=("drawn", "real"), default="drawn", help="drawn, or those of a prompt that is read")
    add("--misses", type=float, nargs="+", default=[1.0], metavar="PERCENT", help="of drawn selections (default 1)")
    add("--working-set", type=int, default=16_384, metavar="N", help="positions that hits are drawn from")
    add("--steps", type=int, default=64, metavar="N", help="steps of a timed pass (default %(default)s)")
    add("--pairs", type=int, default=3, metavar="N", help="timed passes of each mode (default %(default)s)")
    add("--alone-only", action="store_true", help="no resident batch: each session resident alone, one after the other")
    add("--apart", action="store_true", help="one mode after the other, even where VRAM holds both")
    add("--chunk", type=int, default=256, metavar="N", help="tokens of a real prompt read at a time (default 256)")
    add("--tensor-parallel", type=int, default=1, metavar="N", help="ranks of a model, under torchrun (default 1)")


def run(arguments: Namespace) -> Report | None:
    """Measure. ``exit_status`` is 1 if an output differs, or if a corrupted row does not show. Of several ranks, rank 0
    reports.
    """
    started = time.monotonic()
    if arguments.tensor_parallel > 1 and arguments.device != "cpu":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    settings = _settings(arguments)
    locality, percents = _locality(settings, arguments), _percents(settings, arguments)
    on_gpu = settings.device != "cpu"
    apart = arguments.apart or arguments.alone_only or not _both_fit(settings)
    if apart and settings.tensor > 1:  # before anything is filled
        raise InvalidValue("ranks where modes are measured one after the other", settings.tensor, "1")
    order = {"order": "one mode after the other" if apart else "passes of both modes in turns"}
    report = Report(
        "sessions", torch.cuda.get_device_name() if on_gpu else cpu_name(), _told(settings, arguments) | order
    )
    rates = Rates(measured()["hbm_read"], measured()["bus_read"])
    if on_gpu:
        from benchmarks.harness import measure_floors

        floors = measure_floors()
        torch.cuda.empty_cache()
        report.rows += floors.rows()
        rates = Rates(floors.hbm_read, floors.copy_to_device)
    with opened(settings) as world:
        world.open_all()
        report.rows.append(Row("time until all sessions were there", time.monotonic() - started, "s"))
        report.rows += memory_rows(world)
        if world.team is not None and on_gpu:
            report.rows += fetch_rows(world, world.team)
        cases = [_case(world, locality, percent) for percent in percents]
        if on_gpu:
            torch.cuda.empty_cache()  # what drawing took: resident pages are the daemon's
        (_run_apart if apart else _run_in_turns)(world, cases, arguments)
        for case in cases:
            report.rows += case_rows(world, case, arguments, rates)
            report.exit_status |= not case.right
    if on_gpu:
        report.rows.append(Row("peak of VRAM that torch took", torch.cuda.max_memory_reserved() / 2**30, "GiB"))
    report.rows.append(Row("time of the whole run", time.monotonic() - started, "s"))
    return report if world.team is None or world.worker.reports else None


def _settings(arguments: Namespace) -> SessionsSettings:
    config = model_of(arguments)
    ends = [group.end for group in model_named(arguments.model).index_groups()]
    if config.num_hidden_layers not in ends:
        raise InvalidValue("--layers", arguments.layers, f"the end of an index group: {', '.join(map(str, ends))}")
    for name, least, most in (
        ("sessions", 1, BATCH_SIZES[-1]),
        ("steps", 2, 4096),
        ("pairs", 1, 100),
        ("tensor-parallel", 1, 64),
        ("ring-pages", 2, 4096),
    ):
        if not least <= getattr(arguments, name.replace("-", "_")) <= most:
            raise InvalidValue(f"--{name}", getattr(arguments, name.replace("-", "_")), f"{least} to {most}")
    if not all(0 <= percent <= 100 for percent in arguments.misses):
        raise InvalidValue("--misses", arguments.misses, "0 to 100")
    return SessionsSettings(
        config=config,
        device=arguments.device,
        dtype=arguments.dtype,
        kind=arguments.selections,
        sessions=arguments.sessions,
        tokens=arguments.tokens,
        room=WARM_UP + arguments.pairs * arguments.steps + 2,
        hot_rows=arguments.hot_rows,
        ring_pages=arguments.ring_pages,
        chunk=arguments.chunk,
        tensor=arguments.tensor_parallel,
    )


def _locality(settings: SessionsSettings, arguments: Namespace) -> Locality:
    groups, topk = len(settings.config.index_groups()), settings.config.index_topk
    steps = WARM_UP + arguments.pairs * arguments.steps
    return Locality(groups, topk, settings.hot_rows, arguments.working_set, steps)


def _told(settings: SessionsSettings, arguments: Namespace) -> dict[str, object]:
    drawn = f"synthetic: drawn from {arguments.working_set} positions of each group, after real scoring and selection"
    return {
        "torch": torch.__version__,
        "layers": settings.config.num_hidden_layers,
        "experts": settings.config.n_routed_experts,
        "ranks": settings.tensor,
        "dtype": settings.dtype,
        "weights": "random",
        "sessions": settings.sessions,
        "tokens": settings.tokens,
        "rows at the start": [settings.rows(session) for session in range(settings.sessions)],
        "histories": "synthetic: random rows and keys" if settings.kind == "drawn" else "read: random tokens",
        "selections": drawn if settings.kind == "drawn" else "real, of random weights",
        "hot rows": settings.hot_rows,
        "ring pages": settings.ring_pages,
        "steps of a pass": arguments.steps,
        "passes of each mode": arguments.pairs,
    }


def _percents(settings: SessionsSettings, arguments: Namespace) -> list[float | None]:
    wanted = arguments.misses if settings.kind == "drawn" else [None]
    named = [percent for percent in wanted if arguments.only in _name(settings, percent)]
    if not named:
        raise InvalidValue("--only", arguments.only, "a part of a case's name, such as '5 % miss'")
    return named


def _name(settings: SessionsSettings, percent: float | None) -> str:
    part = "real selections" if percent is None else f"{percent:g} % miss"
    return f"{settings.sessions} sessions of {settings.tokens:,} tokens, {part}"


def _case(world: World, locality: Locality, percent: float | None) -> Case:
    name = _name(world.settings, percent)
    if percent is None:
        nothing = torch.empty((0, 0, 0, 0), dtype=torch.int32)
        return Case(name, None, (nothing, nothing), [])
    drawn, first, cached = world.draw(locality, percent)
    return Case(name, percent, (drawn, first), cached)


def _both_fit(settings: SessionsSettings) -> bool:
    if settings.device == "cpu":
        return True
    plan = settings.plan
    weights = weight_bytes(settings.config, settings.dtype, range(settings.config.num_hidden_layers), drafts=False)
    taken = (
        weights // settings.tensor
        + plan.vram_bytes(settings.sessions)
        + settings.sessions * plan.pages * plan.page_format.stride
    )
    return taken + VRAM_SPARE < torch.cuda.get_device_properties(torch.device(settings.device)).total_memory


def _run_in_turns(world: World, cases: Sequence[Case], arguments: Namespace) -> None:
    """Both modes hold all sessions at a time."""
    count = world.settings.sessions
    with (
        _batch(world, count, cached=True) as offloaded,
        _batch(world, count, cached=False) as here,
        _batch(world, 1, cached=False) as single,
    ):
        resident = [world.resident(session) for session in range(count)]
        for case in cases:
            _begin(world, case, offloaded, world.offloaded)
            _begin(world, case, here, resident)
            before = _lookups(world.offloaded)
            for pair in range(arguments.pairs):
                _take(case, "offloaded", case.offloaded, offloaded.decode(arguments.steps), pair)
                _take(case, "resident", case.resident, here.decode(arguments.steps), pair)
            case.looked_up = _since(before, world.offloaded)
            here.leave()
            for session, history in enumerate(resident):
                case.alone.append(_alone(world, case, single, history, session, arguments.steps))
            if case.percent != 0:
                _control(world, case, offloaded, arguments.steps)
        for history in resident:
            world.worker.end(history)


def _run_apart(world: World, cases: Sequence[Case], arguments: Namespace) -> None:
    """Offloaded sessions first, then resident ones: all at a time, or one after the other."""
    count = world.settings.sessions
    with _batch(world, count, cached=True) as offloaded:
        for case in cases:
            _begin(world, case, offloaded, world.offloaded)
            before = _lookups(world.offloaded)
            for pair in range(arguments.pairs):
                _take(case, "offloaded", case.offloaded, offloaded.decode(arguments.steps), pair)
            case.looked_up = _since(before, world.offloaded)
            if case.percent != 0:
                _control(world, case, offloaded, arguments.steps)
    for session, history in enumerate(world.offloaded):
        history.truncate(world.settings.rows(session))
    world.let_go()
    del offloaded
    with _batch(world, 1, cached=False) as single:
        if arguments.alone_only:
            for session in range(count):
                history = world.resident(session)
                for case in cases:
                    case.alone.append(_alone(world, case, single, history, session, arguments.steps))
                world.worker.end(history)
            return
        resident = [world.resident(session) for session in range(count)]
        with _batch(world, count, cached=False) as here:
            for case in cases:
                _begin(world, case, here, resident)
                for pair in range(arguments.pairs):
                    _take(case, "resident", case.resident, here.decode(arguments.steps), pair)
                here.leave()
                for session, history in enumerate(resident):
                    case.alone.append(_alone(world, case, single, history, session, arguments.steps))
        for history in resident:
            world.worker.end(history)


def _batch(world: World, places: int, *, cached: bool) -> Batch:
    settings, worker = world.settings, world.worker
    assert isinstance(worker.decoder, FastDecoder)
    return Batch(
        worker.decoder.weights,
        worker.format,
        worker.device.torch_device,
        places=places,
        max_tokens=settings.tokens,
        cached=cached,
        drawn=settings.kind == "drawn",
    )


def _begin(world: World, case: Case, batch: Batch, histories: Sequence[History]) -> None:
    """Have all sessions where they began, with the caches that the case begins with, and take the first steps."""
    for session, history in enumerate(histories):
        history.truncate(world.settings.rows(session))
        if history.caches is not None and case.cached:
            fill_cache(history, case.cached[session])
    started = time.monotonic()
    batch.join(histories, range(len(histories)), world.first_tokens, case.drawn_for(slice(None), world))
    passes = case.offloaded if histories[0].caches is not None else case.resident
    passes.append(batch.decode(WARM_UP))
    say(f"{case.name}: compiled, recorded and warmed up in {time.monotonic() - started:.1f} s")


def _alone(world: World, case: Case, single: Batch, history: History, session: int, steps: int) -> list[Pass]:
    """The first steps of one session, resident, with no other beside it."""
    history.truncate(world.settings.rows(session))
    drawn = case.drawn_for(slice(session, session + 1), world)
    single.join([history], [0], [world.first_tokens[session]], drawn)
    passes = [single.decode(WARM_UP), single.decode(steps)]
    single.leave()
    return passes


def _take(case: Case, mode: str, passes: list[Pass], taken: Pass, pair: int) -> None:
    passes.append(taken)
    steps = len(taken.tokens[0])
    say(
        f"{case.name}, pass {pair + 1}, {mode}: {taken.tokens_per_s:.1f} tokens/s, "
        f"{1e3 * taken.seconds / steps:.3f} ms a step"
    )


def _control(world: World, case: Case, batch: Batch, steps: int) -> None:
    """From the start once more, with a wrong row in a hot cache of the first session: one that the next step reads.

    Of real selections nobody knows which that is, so all rows of the cache are wrong.
    """
    for session, history in enumerate(world.offloaded):
        history.truncate(world.settings.rows(session))
        if case.cached:
            fill_cache(history, case.cached[session])
    histories = world.offloaded
    batch.join(histories, range(len(histories)), world.first_tokens, case.drawn_for(slice(None), world))
    passes = [batch.decode(WARM_UP)]
    group, cache = _largest_cache(world.offloaded[0])
    if case.percent is None:
        cache.rows.fill_(_WRONG)
    else:
        slots = cache.table[case.drawn[0][0, WARM_UP, group].to(cache.table.device).long()]
        cache.rows[slots[slots >= 0][0].long()] = _WRONG
    passes.append(batch.decode(steps))
    batch.leave()
    pairs = zip(digests(case.offloaded[:2]), digests(passes), strict=True)
    changed = [session for session, (clean, corrupted) in enumerate(pairs) if clean != corrupted]
    case.right &= changed == [0]
    say(f"{case.name}: what is wrong in session 1 changes sessions {[session + 1 for session in changed]}")
    what = "all cached rows of a group" if case.percent is None else "one cached row"
    case.rows.append(
        Row(f"{case.name}: {what} of one session, corrupted, change it alone", float(changed == [0]), "of 1")
    )


def _largest_cache(history: History) -> tuple[int, GroupCache]:
    """The group with the most layers: a wrong key that all heads of one layer pass over shows nothing."""
    assert history.caches is not None, "a resident history has no hot caches"
    return max(enumerate(history.caches.groups), key=lambda item: item[1].rows.shape[1])


def _lookups(histories: Sequence[History]) -> list[Tensor]:
    return [
        torch.stack([cache.counters for cache in history.caches.groups]).cpu()
        for history in histories
        if history.caches is not None
    ]


def _since(before: Sequence[Tensor], histories: Sequence[History]) -> list[Tensor]:
    return [after - earlier for earlier, after in zip(before, _lookups(histories), strict=True)]
