"""The decoder: embedding, layers, final norm, logits.

All arithmetic is float32. Rows are padded to tiles once, at the entrance, and no row's result depends on another's
(``compute.kernels.tiles``). The MTP layer is not part of it: its rows have a numbering of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compute.kernels import tiles
from compute.kernels.reference_keys import KEY_TILE
from compute.model.attention import Attention
from compute.model.feed_forward import GatedMLP, MixtureOfExperts, Take
from compute.model.history_protocol import History
from compute.model.rope import Rope
from compute.model.weights import Weights
from protocol.errors import InvalidValue
from protocol.layout import INDEX_DIM, LATENT_DIM, ROPE_DIM, Encoding
from protocol.model import ModelConfig


class DecoderLayer:
    """``x + attention(norm(x))``, then ``x + feed_forward(norm(x))``."""

    def __init__(self, config: ModelConfig, encoding: Encoding, layer: int, group: int, take: Take) -> None:
        self._eps = config.rms_norm_eps
        self._input_norm = take("input_layernorm.weight")
        self._middle_norm = take("post_attention_layernorm.weight")
        self._attention = Attention(config, encoding, layer, group, take)
        dense = layer < config.first_k_dense_replace
        self._feed_forward = GatedMLP(take, "mlp") if dense else MixtureOfExperts(config, take)

    def forward(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        positions: Tensor,
        history: History,
        addresses: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The layer's output [16 n, hidden] and its group's addresses; arguments as of `Attention.forward`."""
        normed = tiles.rms_norm(x, self._input_norm, self._eps)
        attended, addresses = self._attention.forward(normed, angles, positions, history, addresses)
        x = x + attended
        normed = tiles.rms_norm(x, self._middle_norm, self._eps)
        if isinstance(self._feed_forward, GatedMLP):
            return x + self._feed_forward.forward(normed), addresses
        return x + self._feed_forward.forward(normed, positions.shape[0]), addresses


class Decoder:
    """A model on one device. It keeps no state between calls: what it must remember is in the `History`."""

    def __init__(
        self, config: ModelConfig, weights: Weights, encoding: Encoding, device: torch.device | str = "cpu"
    ) -> None:
        """Move ``weights`` to ``device`` and derive the absorbed forms.

        Raises `InvalidValue` if torch may shorten float32 products, and `NoDevice` if the machine's matrix library does
        not give a row the same bits at every place of a product of this model's shapes.
        """
        tiles.check_precision()
        self.config = config
        self.device = torch.device(device)
        groups = config.index_groups()
        self._embedding = weights["model.embed_tokens.weight"].to(self.device)
        self._norm = weights["model.norm.weight"].to(self.device)
        self._head = tiles.Linear(weights["lm_head.weight"].to(self.device))
        self._rope = Rope(config, self.device)
        self._layers = [
            DecoderLayer(config, encoding, layer, index, _taking(weights, layer, self.device))
            for index, group in enumerate(groups)
            for layer in range(group.first_layer, group.end)
        ]
        self._check_row_invariance()

    @torch.inference_mode()
    def forward(self, tokens: Tensor, positions: Tensor, history: History) -> Tensor:
        """Hidden states after the final norm, float32 [M, hidden], of ``tokens`` int64 [M] at ``positions`` int64 [M].

        Appends the rows of all M tokens to ``history``. Raises `InvalidValue` for a token outside the vocabulary, or
        for no tokens; then nothing is appended.
        """
        if tokens.dim() != 1 or tokens.shape != positions.shape or tokens.shape[0] == 0:
            raise InvalidValue("tokens and positions", (tuple(tokens.shape), tuple(positions.shape)), "both [M], M > 0")
        outside = (tokens < 0) | (tokens >= self.config.vocab_size)
        if bool(outside.any()):
            raise InvalidValue("token", int(tokens[outside][0]), f"0 to {self.config.vocab_size - 1}")
        rows = tokens.shape[0]
        x = self._embedding[tiles.pad_rows(tokens)]
        angles = self._rope.tables(tiles.pad_rows(positions))
        addresses: Tensor | None = None
        for layer in self._layers:
            x, addresses = layer.forward(x, angles, positions, history, addresses)
        return tiles.rms_norm(x, self._norm, self.config.rms_norm_eps)[:rows]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [M, hidden], as `forward` gave them -> [M, vocabulary]."""
        return self._head(tiles.pad_rows(hidden))[: hidden.shape[0]]

    def _check_row_invariance(self) -> None:
        """Try out the products of which a pass makes one for each row; `tiles.Linear` has tried out the others."""
        config = self.config
        heads, index_heads, selected = config.num_attention_heads, config.index_n_heads, config.index_topk
        for rows, inner, columns in (
            (heads, LATENT_DIM + ROPE_DIM, selected),
            (heads, selected, LATENT_DIM),
            (index_heads, INDEX_DIM, KEY_TILE),
            (1, index_heads, KEY_TILE),
        ):
            tiles.check_batched(rows, inner, columns, self.device)


def _taking(weights: Weights, layer: int, device: torch.device) -> Take:
    return lambda name: weights[f"model.layers.{layer}.{name}"].to(device)
