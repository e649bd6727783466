"""One worker process of ``kvd-bench pairs``: it reads the prompt, or decodes on from it, and says what happened.

Every run is a fresh process with a device context and a lease of its own; only the modules are imported before it is
forked off (`run_apart`). What is timed is the window from the first token to the last, with everything recorded and
compiled before it.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from benchmarks.pairs_prompt import fill_synthetic
from benchmarks.report import cpu_name
from compute.decode import generate, mtp
from compute.decode.decoder import FastDecoder
from compute.decode.locality import Blend
from compute.decode.matrices import WeightType
from compute.decode.selections import Change, Recorder, Trace
from compute.decode.step import DecodeStep
from compute.histories import HistorySettings, Mode
from compute.history import History
from compute.worker import Worker
from protocol.errors import InvalidValue, KvdError
from protocol.layout import PAGE_TOKENS, Q8G64
from protocol.model import ModelConfig

_ResultT = TypeVar("_ResultT")

PROMPT, RUN = "prompt", "run"
"""Names of sessions."""
RING_PAGES = 8
WARM_UP_TOKENS = 3 * PAGE_TOKENS
EXTRA_TOKENS = 4 * PAGE_TOKENS
"""Room behind the output, for drafts."""


class RunSettings(msgspec.Struct, frozen=True):
    """What a run does. ``model`` holds the fields of a `ModelConfig`."""

    run_dir: str
    device: str
    model: dict[str, Any]
    dtype: WeightType
    seed: int
    prompt: list[int]
    stored: int
    """Tokens of the prompt that the stored session has; each run reads the others."""
    chunk: int
    tokens: int
    hot_rows: int
    format_drafts: int
    """Most drafts of any run: pages have the MTP layer's rows in all of them, or in none."""
    mode: Mode | None = None
    """None: store the prompt."""
    synthetic: bool = False
    """The stored rows are random, not computed."""
    keep: float = 0.0
    """Of `compute.decode.locality.Blend`."""
    drafts: int = 0
    script: list[int] = []
    """What is drafted for the tokens of the output; the MTP layer decides what is not here."""
    trace: str | None = None
    record: str | None = None
    measure: bool = False
    """Look at selections and misses too, and at the memory's rate; such a run is not timed."""
    corrupt: bool = False
    """Make one fetched row of each step wrong."""


class PrefillResult(msgspec.Struct, frozen=True):
    hardware: str
    tokens: int
    seconds: float
    peak_vram_bytes: int


class DecodeResult(msgspec.Struct, frozen=True):
    """Times are seconds; ``deliveries`` are (when, tokens): drafts that stay arrive together with the step's own."""

    tokens: list[int]
    deliveries: list[tuple[float, int]]
    """From the reading of the prompt's rest on; the first is the first token."""
    kept_drafts: int
    lookups: list[list[int]]
    """Hits, misses, ring hits and duplicate misses of each group within the window; empty if resident."""
    peak_vram_bytes: int
    step_bytes: float
    """Read by a step of as many rows as there were: weights, index keys, selected rows. 0 without a GPU."""
    bytes_per_s: float = 0.0
    """Of the device's memory, if measured."""
    overlaps: list[float] = []
    missed_percentiles: list[list[float]] = []

    @property
    def window_s(self) -> float:
        return self.deliveries[-1][0] - self.deliveries[0][0]

    @property
    def tokens_per_s(self) -> float:
        """Of those behind the first delivery."""
        return (len(self.tokens) - self.deliveries[0][1]) / self.window_s

    @property
    def gaps(self) -> list[float]:
        """Seconds between deliveries."""
        times = [when for when, _ in self.deliveries]
        return [after - before for before, after in itertools.pairwise(times)]


def run_apart(settings: RunSettings, kind: type[_ResultT]) -> _ResultT:
    """Do ``settings`` in a process of its own. Raises `KvdError` if that ends without a result of ``kind``."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.pairs_run"])
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(msgspec.json.encode(settings), sending))
    process.start()
    sending.close()
    try:
        answer = receiving.recv_bytes()
    except EOFError:
        process.join()
        what = settings.mode or "the prompt"
        raise KvdError(f"a run of {what} ended with exit status {process.exitcode}") from None
    process.join()
    return msgspec.json.decode(answer, type=kind)


def _run(request: bytes, sending: Connection) -> None:
    """In the process of its own; an error of kvd's is said in a line, and is its exit status."""
    try:
        sending.send_bytes(msgspec.json.encode(_result(msgspec.json.decode(request, type=RunSettings))))
    except KvdError as error:
        print(f"kvd-bench: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_status)


def _result(settings: RunSettings) -> PrefillResult | DecodeResult:
    with Worker(
        Path(settings.run_dir),
        settings.device,
        ModelConfig(**settings.model),
        Q8G64,
        seed=settings.seed,
        dtype=settings.dtype,
        rows=settings.chunk,
        mtp=settings.format_drafts,
    ) as worker:
        return _store_prompt(worker, settings) if settings.mode is None else _decode(worker, settings)


def _store_prompt(worker: Worker, settings: RunSettings) -> PrefillResult:
    """Compute the rows in VRAM, which is faster, and copy them. Random ones are made in host RAM, as there are many."""
    tokens, room = settings.prompt[: settings.stored], len(settings.prompt) + settings.tokens + EXTRA_TOKENS
    mode: Mode = "offloaded" if settings.synthetic else "resident"
    stored = HistorySettings(mode, room, settings.hot_rows, _ring_pages(settings, len(tokens)), PROMPT)
    history = worker.history(stored)
    started = time.perf_counter()
    if settings.synthetic:
        _log(history, tokens)
        hidden = fill_synthetic(history, len(tokens), settings.seed)
    else:
        hidden = worker.prefill(history, tokens, settings.chunk, _say_progress)
    worker.device.synchronize()
    seconds = time.perf_counter() - started
    if settings.synthetic:
        history.barrier(hidden)
    else:
        worker.store(history, stored, tokens, hidden)
    on_gpu = worker.device.torch_device.type == "cuda"
    hardware = torch.cuda.get_device_name() if on_gpu else cpu_name()
    result = PrefillResult(hardware, len(tokens), seconds, _vram(worker))
    history.close(keep=True)
    return result


def _decode(worker: Worker, settings: RunSettings) -> DecodeResult:
    history = _opened(worker, settings)
    runner = _Runner(worker, settings, history)
    if not settings.measure:
        _warm_up(worker, settings, runner)
    started = time.perf_counter()
    hidden = worker.prefill(history, settings.prompt[history.length :], settings.chunk)
    token = int(worker.decoder.logits(hidden[None])[0].argmax())
    history.reserve(settings.tokens + EXTRA_TOKENS)
    history.prepare(1)  # what the last rows of the prompt selected is in the cache now
    deliveries, tokens = [(time.perf_counter(), 1)], [token]
    before = _lookups(history)
    _log(history, tokens)
    for arrived in runner.run(history, hidden, token, settings.tokens - 1):
        deliveries.append((time.perf_counter(), len(arrived)))
        _log(history, arrived)
        if settings.corrupt:
            history.corrupt_next_fetch()
        tokens += arrived
    worker.device.synchronize()
    result = DecodeResult(
        tokens=tokens,
        deliveries=[(when - started, count) for when, count in deliveries],
        kept_drafts=len(tokens) - len(deliveries),
        lookups=[
            [after - earlier for after, earlier in zip(*group, strict=True)]
            for group in zip(_lookups(history), before, strict=True)
        ],
        peak_vram_bytes=_vram(worker),
        step_bytes=_step_bytes(worker, history.length, settings.drafts + 1),
        overlaps=runner.overlaps(),
        missed_percentiles=runner.missed_percentiles(history.length),
    )
    history.close()
    if settings.measure and worker.device.torch_device.type == "cuda":
        from benchmarks.harness import measure_floors

        result = msgspec.structs.replace(result, bytes_per_s=measure_floors().hbm_read)
    return result


def _opened(worker: Worker, settings: RunSettings) -> History:
    """A history of this run's own that begins with the stored rows: in VRAM, or sharing the stored session's pages."""
    room = len(settings.prompt) + settings.tokens + EXTRA_TOKENS
    if settings.mode == "resident":
        return worker.resident_copy(HistorySettings("resident", room, name=PROMPT))
    ring_pages = _ring_pages(settings, len(settings.prompt) - settings.stored)
    own = HistorySettings("offloaded", room, settings.hot_rows, ring_pages, RUN)
    history = worker.fork_prefix(own, settings.prompt[: settings.stored + 1])
    if history is None or history.length != settings.stored:
        raise InvalidValue("stored rows of the prompt", history and history.length, str(settings.stored))
    assert history.session is not None
    history.session.state.append_tokens(settings.prompt[history.session.state.token_count :])
    return history


def _ring_pages(settings: RunSettings, tokens: int) -> int:
    """Room to prefill ``tokens``: one pass is copied back while the next is computed."""
    return max(RING_PAGES, 2 * min(settings.chunk, tokens) // PAGE_TOKENS + 2)


def _warm_up(worker: Worker, settings: RunSettings, runner: _Runner) -> None:
    """Compile and record everything, on a session of its own."""
    mode: Mode = settings.mode or "resident"
    short = HistorySettings(
        mode, WARM_UP_TOKENS + EXTRA_TOKENS, settings.hot_rows, _ring_pages(settings, WARM_UP_TOKENS), "warm-up"
    )
    history = worker.history(short)
    hidden = worker.prefill(history, settings.prompt[:WARM_UP_TOKENS], settings.chunk)
    for _ in runner.run(history, hidden, settings.prompt[0], 4):
        pass
    history.close()


class _Runner:
    """The recorded steps of a run, with what changes or watches its selections."""

    def __init__(self, worker: Worker, settings: RunSettings, history: History) -> None:
        assert isinstance(worker.decoder, FastDecoder)
        self._settings = settings
        device, page_format = worker.device.torch_device, worker.format
        groups, topk = len(page_format.groups), worker.config.index_topk
        self._changes: list[Change] = []
        if settings.trace is not None:
            self._changes.append(Trace.load(Path(settings.trace), groups, topk).replay(device))
        self._recorder: Recorder | None = None
        if settings.measure:
            self._recorder = Recorder(
                groups,
                topk,
                first_position=len(settings.prompt),
                tokens=settings.tokens - 1,
                device=device,
                page_map=history.map,
                caches=history.caches.groups if history.caches else (),
            )
            self._changes.append(self._recorder)
        blend, draft_blend = Blend(settings.keep), Blend(settings.keep)
        choose = self._choose if self._changes else None
        self._speculation: mtp.Speculation | None = None
        of_model = (worker.decoder.weights, page_format, device)
        cached = settings.mode == "offloaded"
        if settings.drafts:
            self._speculation = mtp.Speculation(
                *of_model,
                places=1,
                depth=settings.drafts,
                max_tokens=history.max_tokens,
                cached=cached,
                choose=choose,
                on_query=blend,
                draft_choose=choose,
                draft_on_query=draft_blend,
            )
            self._step = self._speculation.step
            draft_blend.attach(self._speculation.draft)
        else:
            self._step = DecodeStep(
                *of_model, places=1, max_tokens=history.max_tokens, cached=cached, choose=choose, on_query=blend
            )
        blend.attach(self._step.attention)

    def run(self, history: History, hidden: Tensor, token: int, count: int) -> Iterator[list[int]]:
        """The ``count`` tokens behind ``token``, as they arrive."""
        if self._speculation is None:
            return ([following] for following in generate.generate(self._step, history, token, count))
        script, first = self._settings.script, len(self._settings.prompt)
        self._speculation.script[0, first : first + len(script)] = torch.tensor(script)
        return mtp.generate_steps(self._speculation, history, hidden, token, count)

    def overlaps(self) -> list[float]:
        """Of each group, between consecutive tokens; keeps the trace, if it is wanted."""
        if self._recorder is None:
            return []
        trace = self._recorder.trace()
        if self._settings.record is not None:
            trace.save(Path(self._settings.record))
        return trace.overlaps()

    def missed_percentiles(self, tokens: int) -> list[list[float]]:
        return self._recorder.missed_percentiles(tokens) if self._recorder else []

    def _choose(self, group: int, selection: Tensor) -> None:
        drafting = self._speculation is not None and group == len(self._step.format.groups) - 1
        step = self._speculation.draft if self._speculation and drafting else self._step.attention
        for change in self._changes:
            change(step.positions, group, selection)


def _log(history: History, tokens: list[int]) -> None:
    if history.session:
        history.session.state.append_tokens(tokens)


def _lookups(history: History) -> list[list[int]]:
    """Hits, misses, ring hits and duplicate misses of each group so far."""
    return [cache.counters.tolist() for cache in history.caches.groups] if history.caches else []


def _vram(worker: Worker) -> int:
    """Bytes that this process took at most of torch, and has of the daemon."""
    if worker.device.torch_device.type != "cuda":
        return 0
    tier = next(tier for tier in worker.stat().tiers if tier.tier == f"vram:{worker.device.uuid}")
    return torch.cuda.max_memory_reserved() + tier.committed


def _step_bytes(worker: Worker, length: int, rows: int) -> float:
    if worker.device.torch_device.type != "cuda":
        return 0.0
    from benchmarks.decode import history_bytes, read_bytes

    assert isinstance(worker.decoder, FastDecoder)
    weights = worker.decoder.weights
    nbytes = read_bytes(weights, rows) + history_bytes(weights, length, rows)
    if rows == 1 or weights.mtp is None:
        return nbytes
    drafting = replace(weights, first_layer=weights.end_layer, layers=(weights.mtp.layer,))
    return nbytes + (rows - 1) * (read_bytes(drafting, 1) + weights.mtp.combine.nbytes)


def _say_progress(done: int, total: int) -> None:
    print(f"prompt: {done:,} of {total:,} tokens", file=sys.stderr, flush=True)
