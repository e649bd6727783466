"""``make demo``: from a text file to tokens, in both modes, with a daemon of its own.

Starts ``kvd`` on a private run directory, lets one worker process after the other read the text and decode, compares
their outputs, and shows what the tiers did and what ``kvd-stat`` counted.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compute.embedded import EmbeddedDaemon
from protocol.command_line import Parser, run_command
from protocol.errors import InvalidValue, KvdError
from protocol.stats import NodeStats

PROMPT_TOKENS = 8192
DECODE_TOKENS = 256
HOT_ROWS = 2048
HOST_BYTES = 256 << 20
EXTENT_BYTES = 32 << 20
VRAM_BYTES = 512 << 20


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = Parser(prog="python -m compute.demo", description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=Path, help="text to read (default: the project's own documentation)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default %(default)s)")
    parser.add_argument("--kernels", help="which kernels, as kvd-worker generate names them (default: by device)")
    parser.add_argument("--tokens", type=int, default=DECODE_TOKENS, help="tokens to decode (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the daemon is stopped and its memory given back

    def act() -> int:
        arguments = parser.parse_args(argv)
        with tempfile.TemporaryDirectory(prefix="kvd-demo-") as folder:
            return _demo(arguments, Path(folder))

    return run_command("demo", act)


def _demo(arguments: argparse.Namespace, folder: Path) -> int:
    text = _text(arguments.text, folder)
    sizes = {"host_bytes": HOST_BYTES, "extent_bytes": EXTENT_BYTES, "vram_bytes": VRAM_BYTES}
    with EmbeddedDaemon(arguments.device, **sizes) as daemon:
        print(f"daemon: kvd on {daemon.run_dir}, {HOST_BYTES >> 20}MiB of host RAM, device {arguments.device}")
        reports = {}
        for mode in ("resident", "offloaded"):
            print(f"worker: {mode}", flush=True)
            reports[mode] = _generate(daemon.run_dir, text, mode, arguments)
        stats = daemon.stat()
    resident, offloaded = reports["resident"], reports["offloaded"]
    equal = resident["output_sha256"] == offloaded["output_sha256"]
    _show(resident, offloaded, equal, stats)
    if arguments.json:
        print(json.dumps(_summary(resident, offloaded, equal)))
    return 0 if equal and offloaded["negative_control"] else 1


def _generate(run_dir: Path, text: Path, mode: str, arguments: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "compute.cli", "generate", "--run-dir", str(run_dir), "--mode", mode, "--json"]
    command += [
        "--prompt-file",
        str(text),
        "--max-prompt-tokens",
        str(PROMPT_TOKENS),
        "--tokens",
        str(arguments.tokens),
    ]
    command += ["--device", arguments.device, "--hot-rows", str(HOT_ROWS), "--session", "demo"]
    if arguments.kernels:
        command += ["--kernels", arguments.kernels]
    if mode == "offloaded":
        command.append("--negative-control")
    # The products are small: a second thread costs more at barriers than it computes, and stalls beside other work.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    result = subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=False)
    if result.returncode:
        raise KvdError(f"the {mode} worker ended with exit status {result.returncode}")
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def _text(path: Path | None, folder: Path) -> Path:
    """The text to read: ``path``, or the project's documentation put together."""
    if path is not None:
        if not path.is_file() or path.stat().st_size == 0:
            raise InvalidValue("--text", str(path), "a file that is not empty")
        return path
    root = Path(__file__).resolve().parent.parent
    sources = [*sorted((root / "docs").glob("*.md")), root / "protocol" / "SPEC.md"]
    joined = folder / "docs.txt"
    joined.write_text("\n".join(source.read_text() for source in sources if source.is_file()))
    return joined


def _show(resident: dict[str, Any], offloaded: dict[str, Any], equal: bool, stats: NodeStats) -> None:
    rows = [
        ("", "resident", "offloaded"),
        ("history, tokens", resident["history_tokens"], offloaded["history_tokens"]),
        ("hot rows per index group", "all in VRAM", offloaded["hot_rows"]),
        ("selections while decoding", resident["selections"], offloaded["selections"]),
        ("rows hit / missed", "-", f"{offloaded['hits']:,} / {offloaded['misses']:,}"),
        ("rows read in the ring", "-", offloaded["ring_hits"]),
        ("windows with hits and misses", "-", offloaded["windows_with_hits_and_misses"]),
        ("pages copied back", resident["copybacks"], offloaded["copybacks"]),
        ("prefill, tokens/s", resident["prefill_tok_s"], offloaded["prefill_tok_s"]),
        ("decode, tokens/s", resident["decode_tok_s"], offloaded["decode_tok_s"]),
        ("distinct tokens", resident["distinct_tokens"], offloaded["distinct_tokens"]),
        ("output, sha256", resident["output_sha256"][:16], offloaded["output_sha256"][:16]),
        ("pages in RAM, requested (logical)", _mib(0), _mib(offloaded["host_requested_bytes"])),
        ("pages in RAM, committed (real)", _mib(0), _mib(offloaded["host_committed_bytes"])),
        ("VRAM, requested (logical)", _mib(resident["vram_requested_bytes"]), _mib(offloaded["vram_requested_bytes"])),
        ("VRAM, committed (real)", _mib(resident["vram_committed_bytes"]), _mib(offloaded["vram_committed_bytes"])),
    ]
    print()
    for name, left, right in rows:
        print(f"{name:<34}{_cell(left):>20}{_cell(right):>20}")
    print()
    print(f"outputs equal: {'yes' if equal else 'NO'}")
    print(f"one corrupted fetched row changes the output: {'yes' if offloaded['negative_control'] else 'NO'}")
    for tier in stats.tiers:
        held = f"{sum(purpose.requested for purpose in tier.purposes):,} bytes requested"
        print(f"{tier.tier} afterwards: {held}, {tier.committed:,} of {tier.capacity:,} committed")


def _summary(resident: dict[str, Any], offloaded: dict[str, Any], equal: bool) -> dict[str, Any]:
    same = (
        "history_tokens",
        "hot_rows",
        "hits",
        "misses",
        "ring_hits",
        "copybacks",
        "distinct_tokens",
        "negative_control",
    )
    sizes = ("host_requested_bytes", "host_committed_bytes", "vram_requested_bytes", "vram_committed_bytes")
    return {
        "outputs_match": equal,
        **{name: offloaded[name] for name in (*same, *sizes, "negative_control", "attach_s", "attached_bytes")},
        "resident_tok_s": resident["decode_tok_s"],
        "offloaded_tok_s": offloaded["decode_tok_s"],
    }


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.1f} MiB"


if __name__ == "__main__":
    sys.exit(main())
