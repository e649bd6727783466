"""VRAM of a history in the ``transformers`` library's own cache, and in kvd's, against its length.

A model of GLM's structure with rows of their real size, seven layers in four index groups. The library's cache holds
bfloat16 latents, ropes and index keys of every token; kvd's share of VRAM is what the daemon's books say is committed:
hot caches, ring, index keys and tables. Rows are random, and nobody attends to them: only sizes are looked at.
"""

from __future__ import annotations

import argparse
import sys

import torch
from transformers import DynamicCache, GlmMoeDsaConfig

from benchmarks.report import Report, Row, cpu_name
from compute.api import Node, Session
from compute.embedded import EmbeddedDaemon
from protocol.errors import InvalidValue
from protocol.layout import INDEX_DIM, LATENT_DIM, PAGE_TOKENS, Q8G64, ROPE_DIM, round_up
from protocol.model import DEMO

LENGTHS = "1024,4096,8192,16384,32768,51200"
HOT_ROWS = 4096
CHUNK = 448
_MIB = 1 << 20


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument("--lengths", default=LENGTHS, help="tokens of history (default %(default)s)")
    parser.add_argument("--hot-rows", type=int, default=HOT_ROWS, help="slots of a hot cache (default %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default %(default)s)")


def run(arguments: argparse.Namespace) -> Report:
    words = arguments.lengths.split(",")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise InvalidValue("--lengths", arguments.lengths, "numbers above 0, with commas between")
    lengths = sorted({int(word) for word in words})
    hardware = torch.cuda.get_device_name() if arguments.device.startswith("cuda") else cpu_name()
    report = Report("transformers", hardware, {"layers": DEMO.num_hidden_layers, "hot rows": arguments.hot_rows})
    pages = round_up(lengths[-1], PAGE_TOKENS * 16) // PAGE_TOKENS
    host = round_up(pages * DEMO.page_format(Q8G64).stride + 64 * _MIB, 64 * _MIB)
    kind = arguments.device.split(":")[0]
    with (
        EmbeddedDaemon(kind, host_bytes=host, extent_bytes=64 * _MIB, vram_bytes=8 << 30) as daemon,
        Node(daemon.run_dir, arguments.device) as node,
    ):
        session = node.session("history", DEMO, bytes(32), max_tokens=lengths[-1], hot_rows=arguments.hot_rows)
        for length in lengths:
            print(f"{length:,} tokens", file=sys.stderr, flush=True)
            _fill(session, length)
            theirs = _library_bytes(length) / _MIB
            held = [tier for tier in node.stats().tiers if tier.tier.startswith("vram")]
            ours = sum(tier.committed for tier in held) / _MIB
            report.rows.append(Row(f"kvd, {length:,} tokens", ours, "MiB", baseline=theirs))
            report.rows.append(Row(f"the library's cache, {length:,} tokens", theirs, "MiB"))
        session.close(keep=False)
    if arguments.plot:
        plot(report, arguments.plot)
        arguments.plot = None  # what `kvd-bench` would draw is times against floors
    return report


def _fill(session: Session, length: int) -> None:
    """Append random rows up to ``length``."""
    while session.length < length:
        positions = session.begin(min(CHUNK, length - session.length), cached=False)
        rows = torch.randn(len(positions), LATENT_DIM + ROPE_DIM, device=positions.device)
        for group, index in enumerate(session.format.groups):
            session.append_index_keys(group, positions, rows[:, :INDEX_DIM])
            for layer in range(index.first_layer, index.end):
                session.append(layer, positions, rows[:, :LATENT_DIM], rows[:, LATENT_DIM:])
        session.finish(positions)


def _library_bytes(length: int) -> int:
    """Bytes of a `DynamicCache` of so many tokens: measured, layer by layer, of the tensors that it keeps."""
    config = GlmMoeDsaConfig(
        num_hidden_layers=DEMO.num_hidden_layers,
        index_topk_freq=DEMO.index_topk_freq,
        index_skip_topk_offset=DEMO.index_skip_topk_offset,
        first_k_dense_replace=DEMO.first_k_dense_replace,
    )
    cache = DynamicCache(config=config)
    for layer in range(DEMO.num_hidden_layers):
        rows = torch.zeros(1, 1, length, LATENT_DIM, dtype=torch.bfloat16)
        cache.update(rows, rows[..., :ROPE_DIM].clone(), layer)
        if DEMO.has_indexer(layer):
            cache.update_indexer(rows[:, 0, :, :INDEX_DIM].clone(), layer)
    kept = (value for layer in cache.layers for value in vars(layer).values() if isinstance(value, torch.Tensor))
    return sum(tensor.nbytes for tensor in kept if tensor.dim() > 2)


def plot(report: Report, path: object) -> None:
    """Draw both against the length of the history."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="tokens of history", ylabel="MiB of VRAM")
    axes.set_title(f"{report.settings['layers']} layers, {report.settings['hot rows']:,} hot rows", fontsize=10)
    for name in ("kvd", "the library's cache"):
        rows = [row for row in report.rows if row.case.startswith(name)]
        lengths = [int(row.case.split(", ")[1].split(" ")[0].replace(",", "")) for row in rows]
        axes.plot(lengths, [row.value for row in rows], marker="o", label=name)
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(str(path))
