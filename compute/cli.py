"""``kvd-worker``: decode with the node's daemon from the command line."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from compute import model_arguments
from compute.histories import HistorySettings
from compute.history import History
from compute.model import tokenizer
from compute.model_arguments import chunk_of, hot_rows_of, model_options, ring_pages_of
from compute.parallel.command import is_parallel, open_ranks, require_one_process
from compute.serve import command
from compute.worker import Worker
from protocol.command_line import Parser, run_command
from protocol.errors import InvalidValue
from protocol.layout import PAGE_TOKENS, encoding_named
from protocol.model import model_named

_EXAMPLES = """examples:
  kvd-worker generate --prompt-file notes.txt --tokens 64
  kvd-worker generate --prompt-file notes.txt --mode resident --json
  kvd-worker generate --model /models/tiny --weights /models/tiny --device cuda --tokens 256
  kvd-worker generate --prompt-file notes.txt --session chat-1 --keep     # leave the history stored
  kvd-worker generate --session chat-1 --continue --tokens 64             # and go on from it
  torchrun --nproc-per-node 2 -m compute.cli generate --device cuda --tensor-parallel 2 --prompt-file notes.txt
"""


@dataclass(frozen=True)
class Report:
    """What one generation did, as ``--json`` prints it. Times are seconds, sizes bytes."""

    mode: str
    device: str
    model: str
    encoding: str
    prompt_tokens: int
    history_tokens: int
    generated_tokens: int
    distinct_tokens: int
    output_sha256: str
    text: str
    prefill_s: float
    prefill_tok_s: float
    decode_s: float
    decode_tok_s: float
    hot_rows: int
    selections: int
    hits: int
    misses: int
    ring_hits: int
    copybacks: int
    committed_rows: int
    windows_with_hits_and_misses: str
    attach_s: float
    attached_bytes: int
    host_requested_bytes: int
    host_committed_bytes: int
    vram_requested_bytes: int
    vram_committed_bytes: int
    negative_control: bool | None


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""

    def act() -> int:
        arguments = parser().parse_args(argv)
        can_be_parallel = arguments.command == "generate" or arguments.pipeline_parallel == 1
        if not (can_be_parallel and is_parallel(arguments)):
            require_one_process(arguments, os.environ)
        status: int = arguments.run(arguments)
        return status

    return run_command("kvd-worker", act)


def parser() -> argparse.ArgumentParser:
    """What the command takes, for it and for its manual page."""
    top: argparse.ArgumentParser = Parser(
        prog="kvd-worker", description="A compute worker on the memory of the node's kvd daemon."
    )
    commands = top.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    _add_generate(commands)
    command.configure(commands)
    return top


def _add_generate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "generate",
        help="read a text as history and decode on from it",
        description="Prefill a text, decode greedily, and report what the memory tiers did.",
        epilog=_EXAMPLES,
    )
    model_arguments.configure(parser)
    add = parser.add_argument
    add("--prompt-file", type=Path, metavar="FILE", help="text to read; without it, the BOS token alone")
    add("--max-prompt-tokens", type=int, metavar="N", help="read no more of it than N tokens")
    add("--tokens", type=int, default=64, metavar="N", help="tokens to decode (default %(default)s)")
    add(
        "--mode",
        choices=("offloaded", "resident"),
        default="offloaded",
        help="where the history lives (default %(default)s)",
    )
    add(
        "--mtp",
        type=int,
        default=0,
        metavar="N",
        help="tokens that the model's MTP layer drafts for each step, with --dtype: 0 to 3 (default %(default)s)",
    )
    add("--session", default="default", metavar="NAME", help="name of the session in the daemon (default %(default)s)")
    add(
        "--max-tokens",
        type=int,
        metavar="N",
        help="most tokens that a new session may ever hold (default: those of this run, or 512)",
    )
    model_arguments.configure_ranks(parser, stages=True)
    add("--keep", action="store_true", help="leave the session stored when done")
    add("--save", action="store_true", help="write the session to disk when done, on the nodes of all ranks")
    add("--restore", action="store_true", help="with --continue: bring NAME back from disk first, on all nodes")
    add("--continue", dest="resume", action="store_true", help="go on from the stored session NAME")
    add(
        "--on-daemon-loss",
        choices=("fail", "wait"),
        default="fail",
        help="what to do when the daemon goes away: fail, or wait for the next one and go on (default %(default)s)",
    )
    add(
        "--negative-control",
        action="store_true",
        help="decode again with one fetched row corrupted: the output must differ",
    )
    add("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=generate)


def generate(arguments: argparse.Namespace) -> int:
    """Run ``kvd-worker generate``."""
    if arguments.tokens < 1:
        raise InvalidValue("--tokens", arguments.tokens, "at least 1")
    arguments.chunk = chunk_of(arguments)
    arguments.ring_pages = ring_pages_of(arguments, arguments.chunk)
    with _open_worker(arguments) as (worker, prompt):
        report = _generate(worker, arguments, prompt)
    if not worker.reports:
        return 0
    if arguments.json:
        print(json.dumps(asdict(report)))
    else:
        print(report.text)
        for name, value in asdict(report).items():
            if name != "text" and value is not None:
                print(f"{name:>30}  {f'{value:,.3f}' if isinstance(value, float) else value}", file=sys.stderr)
    return 0


@contextmanager
def _open_worker(arguments: argparse.Namespace) -> Iterator[tuple[Worker, list[int]]]:
    """The worker and the prompt."""
    config, encoding = model_named(arguments.model), encoding_named(arguments.encoding)
    options = model_options(arguments, rows=arguments.chunk, mtp=arguments.mtp)
    arguments.hot_rows = hot_rows_of(arguments, config, arguments.mtp)
    if is_parallel(arguments):
        with open_ranks(arguments, config, encoding, lambda: _read_prompt(arguments), **options) as opened:
            yield opened
        return
    prompt = _read_prompt(arguments)
    with Worker(
        arguments.run_dir,
        arguments.device,
        config,
        encoding,
        dtype=arguments.dtype,
        daemon_wait_s=arguments.daemon_timeout if arguments.on_daemon_loss == "wait" else 0.0,
        **options,
    ) as worker:
        yield worker, prompt


def _generate(worker: Worker, arguments: argparse.Namespace, prompt: list[int]) -> Report:
    history, tokens = _open_history(worker, arguments, prompt)
    rows = history.length
    started = time.perf_counter()
    hidden = worker.prefill(history, tokens[rows:], arguments.chunk, _progress("prefill", worker))
    worker.device.synchronize()
    prefill_s = time.perf_counter() - started
    before = history.counters()
    started = time.perf_counter()
    output, windows = _decode(worker, history, hidden, arguments.tokens)
    worker.device.synchronize()
    decode_s = time.perf_counter() - started
    counters = history.counters()
    worker.barrier(history)
    stats = worker.stat()
    host = next(tier for tier in stats.tiers if tier.tier == "host")
    vram = next(tier for tier in stats.tiers if tier.tier == f"vram:{worker.device.uuid}")
    pages = [purpose for purpose in host.purposes if purpose.purpose == "pages"]
    control = _negative_control(worker, history, tokens, output) if arguments.negative_control else None
    committed = history.session.committed_rows if history.session else 0
    if arguments.save:
        worker.save(history)
    worker.end(history, keep=arguments.keep)
    return Report(
        mode=arguments.mode,
        device=arguments.device,
        model=arguments.model,
        encoding=arguments.encoding,
        prompt_tokens=len(tokens),
        history_tokens=len(tokens) + len(output),
        generated_tokens=len(output),
        distinct_tokens=len(set(output)),
        output_sha256=_digest(output),
        text=tokenizer.decode(output),
        prefill_s=prefill_s,
        prefill_tok_s=(len(tokens) - rows) / prefill_s,
        decode_s=decode_s,
        decode_tok_s=len(output) / decode_s,
        hot_rows=arguments.hot_rows if history.session else 0,
        selections=counters["selections"] - before["selections"],
        hits=counters["hits"] - before["hits"],
        misses=counters["misses"] - before["misses"],
        ring_hits=counters["ring_hits"] - before["ring_hits"],
        copybacks=counters["copybacks"],
        committed_rows=committed,
        windows_with_hits_and_misses=f"{sum(windows)}/{len(windows)}",
        attach_s=worker.attachment.attach_seconds,
        attached_bytes=worker.attachment.attached_bytes,
        host_requested_bytes=sum(purpose.requested for purpose in pages),
        host_committed_bytes=sum(purpose.committed for purpose in pages),
        vram_requested_bytes=vram.requested,
        vram_committed_bytes=vram.committed,
        negative_control=control,
    )


WINDOW_STEPS = 32
"""Decode steps whose hits and misses are looked at together."""


def _decode(worker: Worker, history: History, hidden: torch.Tensor, count: int) -> tuple[list[int], list[bool]]:
    """The tokens, and for each window of steps whether it had both hits and misses."""
    output: list[int] = []
    windows: list[bool] = []
    seen = history.counters()
    progress = _progress("decode", worker)
    for token in worker.decode(history, hidden, count):
        output.append(token)
        progress(len(output), count)
        if history.caches and len(output) > 1 and (len(output) - 1) % WINDOW_STEPS == 0:
            now = history.counters()
            windows.append(now["hits"] > seen["hits"] and now["misses"] > seen["misses"])
            seen = now
    return output, windows


def _negative_control(worker: Worker, history: History, tokens: list[int], output: list[int]) -> bool:
    """Whether the output changes when one fetched row is wrong: an equality that cannot fail shows nothing."""
    history.truncate(len(tokens) - 1)
    hidden = worker.prefill(history, tokens[-1:], 1)
    history.corrupt_next_fetch()
    return any(now != before for now, before in zip(worker.decode(history, hidden, len(output)), output, strict=True))


def _open_history(worker: Worker, arguments: argparse.Namespace, prompt: list[int]) -> tuple[History, list[int]]:
    """The history, and all tokens that belong in it before decoding."""
    if arguments.mode == "resident" and (arguments.keep or arguments.resume or arguments.save):
        raise InvalidValue(
            "--mode", "resident", "offloaded, with --keep, --save or --continue: resident histories are not stored"
        )
    if arguments.restore and not arguments.resume:
        raise InvalidValue("--restore", "without --continue", "with it: a restored session is gone on from")
    tokens = worker.prompt_tokens(prompt)
    limit = len(tokens) + arguments.tokens + (PAGE_TOKENS if arguments.mtp else 0)  # drafts lie behind the output
    capacity = arguments.max_tokens or max(limit, 8 * PAGE_TOKENS)
    settings = HistorySettings(
        arguments.mode, capacity, arguments.hot_rows, arguments.ring_pages, arguments.session, arguments.kernels
    )
    if not arguments.resume:
        history = worker.history(settings)
        if history.session:
            history.session.state.append_tokens(tokens)
        return history, tokens
    if arguments.restore:
        worker.restore(arguments.session)
    history, logged = worker.take_over(settings)
    assert history.session is not None
    history.session.state.append_tokens(prompt)
    return history, [*logged, *prompt]


def _read_prompt(arguments: argparse.Namespace) -> list[int]:
    if arguments.prompt_file is None:
        return []
    try:
        data = arguments.prompt_file.read_bytes()
    except OSError as error:
        raise InvalidValue("--prompt-file", str(arguments.prompt_file), f"a readable file ({error.strerror})") from None
    return tokenizer.encode(data)[: arguments.max_prompt_tokens]


def _digest(tokens: list[int]) -> str:
    return hashlib.sha256(b"".join(token.to_bytes(4, "little") for token in tokens)).hexdigest()


def _progress(what: str, worker: Worker) -> Callable[[int, int], None]:
    """Prints to stderr at most twice a second: counting in place on a terminal, at every tenth elsewhere."""
    started = time.perf_counter()
    terminal = sys.stderr.isatty()
    last_time, last_tenth = started, 0

    def show(done: int, total: int) -> None:
        nonlocal last_time, last_tenth
        now, tenth = time.perf_counter(), 10 * done // total
        if not worker.reports or (done < total and (now - last_time < 0.5 if terminal else tenth == last_tenth)):
            return
        last_time, last_tenth = now, tenth
        rate = done / max(now - started, 1e-9)
        end = "\n" if done == total or not terminal else "\r"
        print(f"{what}: {done:,} of {total:,} tokens, {rate:,.0f} tokens/s", end=end, file=sys.stderr, flush=True)

    return show


if __name__ == "__main__":
    sys.exit(main())
