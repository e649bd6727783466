"""The arguments of every command that decodes: the daemon, the device, the model, and how histories are kept."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, Namespace
from pathlib import Path
from typing import TypedDict

from compute.decode.matrices import WEIGHT_TYPES
from compute.kernels.choice import KERNELS, KernelsName
from protocol.errors import InvalidValue
from protocol.layout import ENCODINGS, PAGE_TOKENS
from protocol.model import PRESETS, ModelConfig

GPU_CHUNK, CPU_CHUNK = 2048, 256
"""Tokens of a pass. On a GPU: enough for its products to be as fast as they get."""
HOT_ROWS = 2048
"""Slots of a hot cache where nobody says how many, and a step selects no more."""


class ModelOptions(TypedDict):
    """What a `Worker` is told of its model and its passes."""

    seed: int
    weights: Path | None
    kernels: KernelsName | None
    rows: int
    mtp: int


def configure(parser: ArgumentParser) -> None:
    """Add them."""
    add = parser.add_argument
    add("--run-dir", type=Path, default=Path("/run/kvd"), help="where the daemon's sockets are (default %(default)s)")
    add("--device", default="cpu", help="cpu, cuda or cuda:N; never another one than that (default %(default)s)")
    add("--model", default="demo", help=f"{', '.join(PRESETS)}, or a config.json or its folder (default %(default)s)")
    add(
        "--weights",
        type=Path,
        metavar="PATH",
        help="safetensors file or folder; without it, random weights from --seed",
    )
    add("--seed", type=int, default=0, help="seed of random weights (default %(default)s)")
    add(
        "--dtype",
        choices=WEIGHT_TYPES,
        help="weights of the fast decoder (default: bf16 on a GPU; on a CPU the float32 reference decodes without it)",
    )
    add("--encoding", choices=sorted(ENCODINGS), default="q8g64", help="row encoding (default %(default)s)")
    add(
        "--hot-rows",
        type=int,
        metavar="N",
        help=f"slots of each group's hot cache (default: what a step selects, with its drafts; at least {HOT_ROWS})",
    )
    add("--kernels", choices=KERNELS, help="which kernels (default: triton on a GPU, reference on a CPU)")
    add("--ring-pages", type=int, metavar="N", help="newest pages kept in VRAM (default: 8, or what --chunk needs)")
    add(
        "--chunk",
        type=int,
        metavar="N",
        help=f"tokens prefilled at a time (default: {GPU_CHUNK} on a GPU, else {CPU_CHUNK})",
    )
    add("--daemon-timeout", type=float, default=60.0, metavar="S", help="longest wait for it (default %(default)s)")


def configure_ranks(parser: ArgumentParser, *, stages: bool) -> None:
    """Add how the model is spread over ranks. Without ``stages`` of layers, their argument is there to be refused by a
    better error than that nobody knows it.
    """
    add = parser.add_argument
    add(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="N",
        help="cut heads and experts into N shards, each on a rank of its own; under torchrun (default %(default)s)",
    )
    add(
        "--pipeline-parallel",
        type=int,
        default=1,
        metavar="N",
        help="cut the layers into N stages, each of so many shards; under torchrun (default %(default)s)"
        if stages
        else SUPPRESS,
    )
    add(
        "--peer-timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="longest wait for another rank in the middle of its work, in seconds (default %(default)s)",
    )


def hot_rows_of(arguments: Namespace, config: ModelConfig, drafts: int) -> int:
    """Slots of a hot cache; raises `InvalidValue` for fewer than a step with ``drafts`` selects."""
    least = (drafts + 1) * config.index_topk
    given: int = max(HOT_ROWS, least) if arguments.hot_rows is None else arguments.hot_rows
    if given < least:
        allowed = f"at least {least}: {drafts + 1} query rows of {config.index_topk} selected rows each"
        raise InvalidValue("--hot-rows", given, allowed)
    return given


def chunk_of(arguments: Namespace) -> int:
    """Tokens of a pass; raises `InvalidValue` for none."""
    default = CPU_CHUNK if arguments.device == "cpu" else GPU_CHUNK
    return _count("--chunk", arguments.chunk, default)


def ring_pages_of(arguments: Namespace, chunk: int) -> int:
    """Pages of a ring, by default for two passes: the pages of one are copied back while the next is computed.

    Raises `InvalidValue` for none.
    """
    return _count("--ring-pages", arguments.ring_pages, max(8, 2 * chunk // PAGE_TOKENS + 2))


def model_options(arguments: Namespace, *, rows: int, mtp: int) -> ModelOptions:
    """For passes of up to ``rows`` tokens, and ``mtp`` drafts of a step at most."""
    return {
        "seed": arguments.seed,
        "weights": arguments.weights,
        "kernels": arguments.kernels,
        "rows": rows,
        "mtp": mtp,
    }


def _count(name: str, given: int | None, default: int) -> int:
    if given is not None and given < 1:
        raise InvalidValue(name, given, "at least 1")
    return default if given is None else given
