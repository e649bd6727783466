"""``kvd-bench pairs``: complete requests of GLM-5.3, their history in host RAM against the same in VRAM.

A prompt is prefilled once and stored. Each run is a fresh worker process that takes the stored rows up, reads the last
tokens of the prompt itself, and decodes greedily; resident and offloaded runs take turns. Outputs must be equal, to the
last token, before speeds are compared, and corrupted rows must change them. What is timed is the window from the
first token to the last; nothing is taken out of it. The exit status is 1 when an output differs.

Weights are random, with few experts so that all layers fit one card; so selections of consecutive tokens would have
little in common, and drafts would never be right. Index queries are therefore blended with their predecessors
(`compute.decode.locality`), and drafts are the recorded output with seeded mistakes, in all runs alike, while the MTP
layer runs at full cost. What overlap, misses and acceptance resulted is reported.
"""

from __future__ import annotations

import itertools
import sys
import time
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path

import msgspec

from benchmarks.model_arguments import add_model_arguments, model_of
from benchmarks.pairs_prompt import text_tokens
from benchmarks.pairs_report import PairsReport, case_name, token_digest
from benchmarks.pairs_run import EXTRA_TOKENS, DecodeResult, PrefillResult, RunSettings, run_apart
from benchmarks.pairs_script import scripted_drafts
from compute.decode.locality import PRESETS
from compute.decode.selections import Trace
from compute.embedded import EmbeddedDaemon
from compute.histories import MAX_DRAFTS, Mode
from protocol.errors import InvalidValue
from protocol.layout import PAGE_TOKENS, Q8G64, round_up
from protocol.model import ModelConfig

PROMPT_TOKENS, OUTPUT_TOKENS = 50_023, 1_024
MEASURED_TOKENS = 256
"""Output of runs that are not timed, at most."""
LEAST_TAIL = 16
"""Tokens of the prompt that each run reads itself, at least: they warm the hot caches."""
EXTENT = 64 << 20
SPARE_PAGES = 192


def configure(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add_model_arguments(parser)
    add("--prompt", type=int, default=PROMPT_TOKENS, metavar="N", help="tokens in (default %(default)s)")
    add("--append", type=int, default=0, metavar="N", help="of them, at least N that each run reads itself (default 0)")
    add("--text", type=Path, metavar="FILE", help="text of the prompt (default: the project's own)")
    add("--synthetic", action="store_true", help="fill the stored rows with random values instead of computing them")
    add("--tokens", type=int, default=OUTPUT_TOKENS, metavar="N", help="tokens out (default %(default)s)")
    add("--chunk", type=int, default=2048, metavar="N", help="tokens prefilled at a time (default %(default)s)")
    add("--hot-rows", type=int, default=32_768, metavar="N", help="slots of a hot cache (default %(default)s)")
    add("--pairs", type=int, default=3, metavar="N", help="pairs of each case (default %(default)s)")
    add("--resident-pairs", type=int, default=0, metavar="N", help="pairs of resident runs (default %(default)s)")
    add("--mtp", type=int, nargs="+", default=[3, 0], metavar="N", help="drafts of a step (default 3 0)")
    add("--preset", choices=PRESETS, nargs="+", default=["about1"], help="locality (default %(default)s)")
    add("--keep", type=float, metavar="X", help="what the blend keeps of a predecessor, instead of the presets'")
    add("--trace", type=Path, metavar="FILE", help="selections to replay (compute/decode/selections.py)")
    add("--record-selections", type=Path, metavar="FILE", help="where to write those of the measured run")
    add("--seconds", type=float, metavar="S", help="begin no pair after S seconds; the report names those left out")
    add("--seed", type=int, default=0, help="of weights and mistakes (default %(default)s)")


def run(arguments: Namespace) -> PairsReport:
    """Run what ``--only`` leaves; raises `KvdError` if a run fails."""
    started = time.monotonic()
    config = _config(arguments)
    tokens = text_tokens(arguments.prompt, config.vocab_size, arguments.text, repeat=arguments.synthetic)
    stored = (arguments.prompt - max(LEAST_TAIL, arguments.append)) // PAGE_TOKENS * PAGE_TOKENS
    if stored < PAGE_TOKENS or arguments.tokens < 2:
        raise InvalidValue(
            "--prompt and --tokens", (arguments.prompt, arguments.tokens), "80 more than --append, and 2"
        )
    base = RunSettings(
        run_dir="",
        device=arguments.device,
        model=asdict(config),
        dtype=arguments.dtype,
        seed=arguments.seed,
        prompt=tokens,
        stored=stored,
        chunk=arguments.chunk,
        tokens=arguments.tokens,
        hot_rows=arguments.hot_rows,
        format_drafts=max(arguments.mtp),
        synthetic=arguments.synthetic,
        trace=str(arguments.trace.resolve()) if arguments.trace else None,
    )
    page_format = config.page_format(Q8G64, mtp=base.format_drafts > 0)
    if arguments.trace:
        Trace.load(arguments.trace, len(page_format.groups), config.index_topk)  # refused before anything runs
    pages = round_up(len(tokens) + arguments.tokens + EXTRA_TOKENS, PAGE_TOKENS) // PAGE_TOKENS
    host = round_up((pages + SPARE_PAGES) * page_format.stride, EXTENT) + 2 * EXTENT  # runs share the stored pages
    spare = 16 << 30 if arguments.device.startswith("cuda") else 1 << 30
    vram = round_up(2 * pages * page_format.stride + spare, EXTENT)
    with EmbeddedDaemon(arguments.device, host_bytes=host, extent_bytes=EXTENT, vram_bytes=vram) as daemon:
        base = msgspec.structs.replace(base, run_dir=str(daemon.run_dir))
        stored_prompt = run_apart(base, PrefillResult)
        report = PairsReport.begin(stored_prompt.hardware, config, base, arguments.append)
        report.prompt_stored(stored_prompt)
        keeps = {"given": arguments.keep} if arguments.keep is not None else {p: PRESETS[p] for p in arguments.preset}
        for preset, keep in keeps.items():
            _run_preset(preset, msgspec.structs.replace(base, keep=keep), arguments, report, started)
    return report


def _run_preset(preset: str, base: RunSettings, arguments: Namespace, report: PairsReport, started: float) -> None:
    """All pairs of one preset. The first resident run without drafts is what every other output is held against."""
    wanted = [depth for depth in dict.fromkeys(arguments.mtp) if arguments.only in case_name(preset, depth)]
    extras = [name for name in ("selections", "negative control") if arguments.only in f"{preset}: {name}"]
    if not wanted and not extras:
        return
    reference = _decode("reference", base, "resident", 0)
    report.reference(preset, reference)
    if "selections" in extras:
        record = str(arguments.record_selections.resolve()) if arguments.record_selections else None
        measured = msgspec.structs.replace(base, measure=True, record=record)
        report.measured(preset, _decode("selections", _short(measured), "offloaded", 0))
    if "negative control" in extras:
        corrupted = _decode("negative control", _short(msgspec.structs.replace(base, corrupt=True)), "offloaded", 0)
        report.negative_control(preset, corrupted)
    script = scripted_drafts(reference.tokens, MAX_DRAFTS, base.seed, vocabulary=base.model["vocab_size"])
    turns = [("pair", pair) for pair in range(1, arguments.pairs + 1)]
    turns += [("resident pair", pair) for pair in range(1, arguments.resident_pairs + 1)]
    for (kind, pair), depth in itertools.product(turns, wanted):
        what = f"{case_name(preset, depth)}, {kind} {pair}"
        if arguments.seconds is not None and time.monotonic() - started > arguments.seconds:
            report.left_out(what)
            continue
        drafted = msgspec.structs.replace(base, script=script if depth else [])
        if kind == "pair":
            resident, offloaded = (_decode(what, drafted, mode, depth) for mode in _MODES)
            report.pair(preset, depth, pair, resident, offloaded)
        else:
            first, second = (_decode(what, drafted, "resident", depth) for _ in range(2))
            report.resident_pair(preset, depth, pair, first, second)
    for depth in sorted(wanted):
        report.case_done(preset, depth)


_MODES: tuple[Mode, Mode] = ("resident", "offloaded")


def _short(settings: RunSettings) -> RunSettings:
    return msgspec.structs.replace(settings, tokens=min(settings.tokens, MEASURED_TOKENS))


def _decode(what: str, settings: RunSettings, mode: Mode, depth: int) -> DecodeResult:
    result = run_apart(msgspec.structs.replace(settings, mode=mode, drafts=depth), DecodeResult)
    digest = token_digest(result.tokens)[:16]
    rate = f"{result.tokens_per_s:.3f} tokens/s" if len(result.deliveries) > 1 else ""
    print(f"{what}, {mode}: {len(result.tokens)} tokens {digest}, {rate}", file=sys.stderr, flush=True)
    return result


def _config(arguments: Namespace) -> ModelConfig:
    config = model_of(arguments)
    for depth in arguments.mtp:
        if not 0 <= depth <= MAX_DRAFTS:
            raise InvalidValue("--mtp", depth, f"0 to {MAX_DRAFTS}")
    if max(arguments.mtp) and not config.num_nextn_predict_layers:
        raise InvalidValue("--mtp", max(arguments.mtp), "0: the model has no MTP layer")
    return config
