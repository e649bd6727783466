"""The fast decoder over one session's history: prefill in chunks, and decoding without a recorded step.

It stands where `compute.model.decoder.Decoder`, the float32 reference, does, and computes the same model in bfloat16
and FP8. A row has the same bits however a text is cut into passes, and in a recorded step (`compute.decode.step`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from compute.decode.layers import LayerInputs, Layers
from compute.decode.weights import DecodeWeights
from compute.kernels.choice import KernelsName
from compute.model.history_protocol import History
from protocol.errors import InvalidValue


class FastDecoder:
    """A model on one device, with scratch for passes of up to ``rows`` rows. It keeps no state between calls."""

    def __init__(
        self, weights: DecodeWeights, device: torch.device, *, rows: int, kernels: KernelsName | None = None
    ) -> None:
        """``weights`` are those of all layers."""
        self._check_layers(weights)
        self.config, self.weights, self.device = weights.config, weights, device
        self.layers = Layers(weights.config, weights, rows, device, kernels)
        self._inputs = LayerInputs.empty(weights.config, rows, device)
        self._groups = weights.config.index_groups(weights.first_layer, weights.end_layer)

    @property
    def rows(self) -> int:
        """The most rows of a pass."""
        return self.layers.rows

    @torch.inference_mode()
    def forward(self, tokens: Tensor, positions: Tensor, history: History) -> Tensor:
        """Hidden states after the final norm, float32 [M, hidden], of ``tokens`` int64 [M] at ``positions`` int64 [M].

        Appends the rows of all M tokens to ``history``. Where ``tokens`` are the host's, nothing waits for the device.
        Raises `InvalidValue` for a token outside the vocabulary, or for no tokens or more than `rows`; then nothing is
        appended.
        """
        count, most = len(tokens), self.rows
        if tokens.dim() != 1 or tokens.shape != positions.shape or not 0 < count <= most:
            shapes = (tuple(tokens.shape), tuple(positions.shape))
            raise InvalidValue("tokens and positions", shapes, f"both [M], M > 0 and M <= {most}")
        outside = (tokens < 0) | (tokens >= self.config.vocab_size)
        if bool(outside.any()):
            raise InvalidValue("token", int(tokens[outside][0]), f"0 to {self.config.vocab_size - 1}")
        self.layers.begin(self._entering(tokens), positions)
        inputs = self._inputs.first(count)
        for group, layers in enumerate(self._groups):
            self._run_group(group, range(layers.first_layer, layers.end), positions, history, inputs)
        return self._leaving(count)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [M, hidden], as `forward` gave them -> [M, vocabulary]."""
        out = torch.empty((len(hidden), self.config.vocab_size), device=self.device)
        self.layers.logits(hidden, out)
        return out

    def _check_layers(self, weights: DecodeWeights) -> None:
        if weights.embedding is None or weights.norm is None or weights.head is None:
            raise InvalidValue(
                "layers of a decoder", f"{weights.first_layer} to {weights.end_layer}", "all of the model"
            )

    def _entering(self, tokens: Tensor) -> Tensor:
        """What goes into the first layer, [M, hidden]."""
        assert self.weights.embedding is not None
        embedded: Tensor = self.weights.embedding[tokens.to(self.device, non_blocking=True)]
        return embedded

    def _leaving(self, count: int) -> Tensor:
        """What `forward` gives, float32 [M, hidden]."""
        assert self.weights.norm is not None
        hidden = torch.empty((count, self.config.hidden_size), device=self.device)
        self.layers.finish(self.weights.norm, hidden)
        return hidden

    def _run_group(self, group: int, layers: range, positions: Tensor, history: History, inputs: LayerInputs) -> None:
        addresses: Tensor | None = None
        for layer in layers:
            weights = self.weights.layer(layer)
            self.layers.project(weights, inputs)
            self.layers.absorb(weights, inputs)
            history.append(layer, positions, inputs.latent, inputs.rope)
            if addresses is None:
                history.append_keys(group, positions, inputs.index_keys)
                selection = history.select(group, inputs.index_query, inputs.index_weights, positions)
                addresses = history.addresses(group, selection)
            scale = self.config.softmax_scale
            attended = history.attend(layer, addresses, inputs.query_latent, inputs.query_rope, scale)
            self.layers.feed(weights, attended)
