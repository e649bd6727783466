"""How far each row encoding errs: attention over encoded rows against attention over unquantised ones. Needs no GPU.

On random latents, on the activations of the demo model over this project's own text (random weights, real structure),
and on latents with a few large values in each, as trained models have them. Relative error of the output, in float64.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.report import Report, Row, cpu_name
from compute.kernels.reference_rows import decode_rows, encode_rows
from compute.model import tokenizer
from compute.model.decoder import Decoder
from compute.model.weights import random_weights
from protocol.layout import ENCODINGS, F32, LATENT_DIM, ROPE_DIM, RowLayout
from protocol.model import DEMO

HEADS, KEYS, QUERIES = 64, 2048, 4
TOKENS = 512
TEXT = Path(__file__).parent.parent / "protocol" / "SPEC.md"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument(
        "--tokens", type=int, default=TOKENS, help="tokens of the demo model's text (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of random values and weights (default %(default)s)")


def run(arguments: argparse.Namespace) -> Report:
    settings = {"tokens": arguments.tokens, "seed": arguments.seed, "queries": "of the size of the keys"}
    report = Report("encodings", cpu_name(), settings)
    for name, latent, rope, query in _inputs(arguments.tokens, arguments.seed):
        exact = _attend(latent, rope, query)
        for encoding in ENCODINGS.values():
            case = f"{name}: {encoding.name}, {encoding.rows.row_bytes} bytes a row"
            if arguments.only in case:
                got = _attend(*_stored(latent, rope, encoding.rows), query)
                report.rows.append(Row(case, 100 * float((got - exact).norm() / exact.norm()), "% error"))
    return report


def _inputs(tokens: int, seed: int) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Latents [T, 512], ropes [T, 64] and queries [queries, heads, 576] of each case."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    width = LATENT_DIM + ROPE_DIM
    query = normal(QUERIES, HEADS, width) * width**-0.5
    yield "random", normal(KEYS, LATENT_DIM), normal(KEYS, ROPE_DIM), query
    outliers = normal(KEYS, LATENT_DIM)
    outliers[:, ::97] *= 12
    yield "random with outliers", outliers, normal(KEYS, ROPE_DIM), query
    recorded = Recorder()
    ids = torch.tensor(tokenizer.encode(TEXT.read_text())[:tokens])
    Decoder(DEMO, random_weights(DEMO, seed), F32).forward(ids, torch.arange(len(ids)), recorded)
    for layer in (0, DEMO.num_hidden_layers - 1):
        latent, rope = recorded.rows[layer]
        yield f"demo model, layer {layer}", latent, rope, recorded.queries[layer][-QUERIES:] * DEMO.softmax_scale


def _stored(latent: Tensor, rope: Tensor, layout: RowLayout) -> tuple[Tensor, Tensor]:
    return decode_rows(encode_rows(latent, rope, layout), layout)


def _attend(latent: Tensor, rope: Tensor, query: Tensor) -> Tensor:
    """float64 [queries, heads, 512]; the scale is in the queries."""
    keys = torch.cat((latent, rope), dim=1).double()
    return (query.double() @ keys.T).softmax(dim=-1) @ latent.double()


class Recorder:
    """A history (`compute.model.history_protocol.History`) of one pass that keeps what it is given, unquantised."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[Tensor, Tensor]] = {}
        self.queries: dict[int, Tensor] = {}

    def append(self, layer: int, positions: Tensor, latent: Tensor, rope: Tensor) -> None:
        del positions
        self.rows[layer] = latent.clone(), rope.clone()

    def append_keys(self, group: int, positions: Tensor, keys: Tensor) -> None:
        """Nothing is selected, so no key is needed."""

    def select(self, group: int, query: Tensor, weights: Tensor, positions: Tensor) -> Tensor:
        """Every position up to the query's own."""
        del group, query, weights
        return positions[:, None] >= positions[None, :]

    def addresses(self, group: int, selection: Tensor) -> Tensor:
        del group
        return selection

    def attend(self, layer: int, addresses: Tensor, query_latent: Tensor, query_rope: Tensor, scale: float) -> Tensor:
        query = self.queries[layer] = torch.cat((query_latent, query_rope), dim=2)
        latent, rope = self.rows[layer]
        scores = torch.einsum("mhd,td->mht", query, torch.cat((latent, rope), dim=1)) * scale
        weights = scores.masked_fill(~addresses[:, None], -torch.inf).softmax(dim=-1)
        return torch.einsum("mht,td->mhd", weights, latent)
