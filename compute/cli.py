"""``kvd-worker``: decode with the node's daemon from the command line."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from compute.history import History
from compute.kernels.choice import KERNELS
from compute.model import tokenizer
from compute.worker import HistorySettings, Worker
from protocol.errors import InvalidValue, KvdError
from protocol.layout import ENCODINGS, PAGE_TOKENS, encoding_named
from protocol.model import PRESETS, model_named

_EXAMPLES = """examples:
  kvd-worker generate --prompt-file notes.txt --tokens 64
  kvd-worker generate --prompt-file notes.txt --mode resident --json
  kvd-worker generate --model /models/tiny --weights /models/tiny --device cuda --tokens 256
  kvd-worker generate --prompt-file notes.txt --session chat-1 --keep     # leave the history stored
  kvd-worker generate --session chat-1 --continue --tokens 64             # and go on from it
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
    parser = argparse.ArgumentParser(
        prog="kvd-worker", description="A compute worker on the memory of the node's kvd daemon."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_generate(commands)
    arguments = parser.parse_args(argv)
    try:
        status: int = arguments.run(arguments)
        return status
    except KvdError as error:
        print(f"kvd-worker: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return 130


def _add_generate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "generate",
        help="read a text as history and decode on from it",
        description="Prefill a text, decode greedily, and report what the memory tiers did.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--run-dir", type=Path, default=Path("/run/kvd"), help="where the daemon's sockets are (default %(default)s)")
    add("--prompt-file", type=Path, metavar="FILE", help="text to read; without it, the BOS token alone")
    add("--max-prompt-tokens", type=int, metavar="N", help="read no more of it than N tokens")
    add("--tokens", type=int, default=64, metavar="N", help="tokens to decode (default %(default)s)")
    add(
        "--mode",
        choices=("offloaded", "resident"),
        default="offloaded",
        help="where the history lives (default %(default)s)",
    )
    add("--device", default="cpu", help="cpu, cuda or cuda:N; never another one than that (default %(default)s)")
    add("--model", default="demo", help=f"{', '.join(PRESETS)}, or a config.json (default %(default)s)")
    add(
        "--weights",
        type=Path,
        metavar="PATH",
        help="safetensors file or folder; without it, random weights from --seed",
    )
    add("--seed", type=int, default=0, help="seed of random weights (default %(default)s)")
    add("--encoding", choices=sorted(ENCODINGS), default="q8g64", help="row encoding (default %(default)s)")
    add("--hot-rows", type=int, default=2048, metavar="N", help="slots of each group's hot cache (default %(default)s)")
    add("--kernels", choices=KERNELS, help="which kernels (default: triton on a GPU, reference on a CPU)")
    add("--ring-pages", type=int, default=8, metavar="N", help="newest pages kept in VRAM (default %(default)s)")
    add("--chunk", type=int, default=256, metavar="N", help="tokens prefilled at a time (default %(default)s)")
    add("--session", default="default", metavar="NAME", help="name of the session in the daemon (default %(default)s)")
    add(
        "--max-tokens",
        type=int,
        metavar="N",
        help="most tokens that a new session may ever hold (default: those of this run, or 512)",
    )
    add("--keep", action="store_true", help="leave the session stored when done")
    add("--continue", dest="resume", action="store_true", help="go on from the stored session NAME")
    add(
        "--on-daemon-loss",
        choices=("fail", "wait"),
        default="fail",
        help="what to do when the daemon goes away: fail, or wait for the next one and go on (default %(default)s)",
    )
    add("--daemon-timeout", type=float, default=60.0, metavar="S", help="longest wait for it (default %(default)s)")
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
    if arguments.chunk < 1:
        raise InvalidValue("--chunk", arguments.chunk, "at least 1")
    config = model_named(arguments.model)
    prompt = _read_prompt(arguments)
    encoding = encoding_named(arguments.encoding)
    with Worker(
        arguments.run_dir,
        arguments.device,
        config,
        encoding,
        seed=arguments.seed,
        weights=arguments.weights,
        daemon_wait_s=arguments.daemon_timeout if arguments.on_daemon_loss == "wait" else 0.0,
    ) as worker:
        report = _generate(worker, arguments, prompt)
    if arguments.json:
        print(json.dumps(asdict(report)))
    else:
        print(report.text)
        for name, value in asdict(report).items():
            if name != "text" and value is not None:
                print(f"{name:>30}  {f'{value:,.3f}' if isinstance(value, float) else value}", file=sys.stderr)
    return 0


def _generate(worker: Worker, arguments: argparse.Namespace, prompt: list[int]) -> Report:
    history, tokens = _open_history(worker, arguments, prompt)
    rows = history.length
    started = time.perf_counter()
    hidden = worker.prefill(history, tokens[rows:], arguments.chunk, _progress("prefill"))
    worker.device.synchronize()
    prefill_s = time.perf_counter() - started
    before = history.counters()
    started = time.perf_counter()
    output, windows = _decode(worker, history, hidden, arguments.tokens)
    worker.device.synchronize()
    decode_s = time.perf_counter() - started
    counters = history.counters()
    history.barrier(hidden)
    stats = worker.stat()
    host = next(tier for tier in stats.tiers if tier.tier == "host")
    vram = next(tier for tier in stats.tiers if tier.tier == f"vram:{worker.device.uuid}")
    pages = [purpose for purpose in host.purposes if purpose.purpose == "pages"]
    control = _negative_control(worker, history, tokens, output) if arguments.negative_control else None
    committed = history.session.committed_rows if history.session else 0
    history.close(keep=arguments.keep)
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
    progress = _progress("decode")
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
    if arguments.mode == "resident" and (arguments.keep or arguments.resume):
        raise InvalidValue(
            "--mode", "resident", "offloaded, with --keep or --continue: resident histories are not stored"
        )
    tokens = worker.prompt_tokens(prompt)
    limit = len(tokens) + arguments.tokens
    capacity = arguments.max_tokens or max(limit, 8 * PAGE_TOKENS)
    settings = HistorySettings(
        arguments.mode, capacity, arguments.hot_rows, arguments.ring_pages, arguments.session, arguments.kernels
    )
    if not arguments.resume:
        history = worker.history(settings)
        if history.session:
            history.session.state.append_tokens(tokens)
        return history, tokens
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


def _progress(what: str) -> Callable[[int, int], None]:
    """Prints to stderr at most twice a second: counting in place on a terminal, at every tenth elsewhere."""
    started = time.perf_counter()
    terminal = sys.stderr.isatty()
    last_time, last_tenth = started, 0

    def show(done: int, total: int) -> None:
        nonlocal last_time, last_tenth
        now, tenth = time.perf_counter(), 10 * done // total
        if done < total and (now - last_time < 0.5 if terminal else tenth == last_tenth):
            return
        last_time, last_tenth = now, tenth
        rate = done / max(now - started, 1e-9)
        end = "\n" if done == total or not terminal else "\r"
        print(f"{what}: {done:,} of {total:,} tokens, {rate:,.0f} tokens/s", end=end, file=sys.stderr, flush=True)

    return show


if __name__ == "__main__":
    sys.exit(main())
