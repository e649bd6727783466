"""The MTP layer in plain torch and float32, for tests: all rows at once, from given hidden states and tokens."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from compute.decode.weights import DecodeWeights
from compute.kernels import tiles
from compute.kernels.reference_linear import dequantise
from compute.model.decoder import DecoderLayer
from compute.model.rope import Rope
from protocol.layout import Q8G64
from tests.fast_weights import parts_of
from tests.resident_history import ResidentHistory


class _History(ResidentHistory):
    """Index 0 is empty and never selected; once ``frozen``, nothing is stored, and the selection stays that."""

    frozen: Tensor | None = None

    def append(self, layer: int, positions: Tensor, latent: Tensor, rope: Tensor) -> None:
        if self.frozen is None:
            super().append(layer, positions, latent, rope)

    def append_keys(self, group: int, positions: Tensor, keys: Tensor) -> None:
        if self.frozen is None:
            super().append_keys(group, positions, keys)

    def select(self, group: int, query: Tensor, weights: Tensor, positions: Tensor) -> Tensor:
        if self.frozen is not None:
            return self.frozen
        made = super().select(group, query, weights, positions)
        self.last = torch.where(made == 0, -1, made)
        return self.last


def draft_states(weights: DecodeWeights, tokens: list[int], hidden: Tensor, drafts: list[int]) -> list[Tensor]:
    """The states g that ``drafts`` are made of, behind ``tokens`` x_0 … x_n; ``hidden`` [n, H] are of all but x_n.

    Of the drafts only those before the last are looked at.
    """
    assert weights.mtp is not None
    assert weights.embedding is not None
    assert weights.head is not None
    mtp, config = weights.mtp, weights.config
    alone = replace(config, num_hidden_layers=1, first_k_dense_replace=0, index_topk_freq=1)
    parts = parts_of(config, mtp.layer)
    layer = DecoderLayer(alone, Q8G64, 0, 0, lambda name: parts[name])
    history, rope, embedding = (
        _History(alone, Q8G64, len(tokens) + 1),
        Rope(config, torch.device("cpu")),
        weights.embedding,
    )
    history.append(0, torch.zeros(1, dtype=torch.int64), torch.zeros(1, 512), torch.zeros(1, 64))
    history.append_keys(0, torch.zeros(1, dtype=torch.int64), torch.zeros(1, 128))

    def run(ids: Tensor, states: Tensor, positions: Tensor) -> Tensor:
        named = tiles.rms_norm(embedding[ids].float(), mtp.embedding_norm, config.rms_norm_eps)
        pair = torch.cat((named, tiles.rms_norm(states, mtp.hidden_norm, config.rms_norm_eps)), dim=1)
        x = tiles.pad_rows(pair @ dequantise(mtp.combine).T)
        z, _ = layer.forward(x, rope.tables(tiles.pad_rows(positions - 1)), positions, history, None)
        return tiles.rms_norm(z[: len(ids)], mtp.norm, config.rms_norm_eps)

    last = len(tokens) - 1
    state = run(torch.tensor(tokens[1:]), hidden, torch.arange(1, last + 1))[-1]
    history.frozen = history.last[-1:]
    states = [state]
    for number, draft in enumerate(drafts[:-1], 1):
        state = run(torch.tensor([draft]), state[None], torch.tensor([last + number]))[0]
        states.append(state)
    return states
