"""The MTP layer on rows: its arithmetic, and the rows and index keys that it stores of what is appended in passes."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from compute import warming
from compute.decode.decoder import FastDecoder
from compute.decode.layers import LayerInputs, Layers
from compute.decode.weights import DecodeWeights, MtpWeights
from compute.history import History
from compute.kernels.linear import linear
from compute.kernels.norms import rms_norm
from protocol.errors import InvalidValue
from protocol.layout import PAGE_TOKENS
from protocol.session_state import NO_COMMIT


class DraftLayer:
    """The MTP layer's arithmetic on rows, with the scratch of ``layers``."""

    def __init__(self, layers: Layers, weights: DecodeWeights) -> None:
        """Raises `InvalidValue` for weights without an MTP layer."""
        if weights.mtp is None or weights.embedding is None or weights.head is None:
            raise InvalidValue("MTP layer of the weights", None, "weights made with mtp=True, of the whole model")
        self.weights: MtpWeights = weights.mtp
        self.number = weights.config.num_hidden_layers
        self._layers, self._embedding, self._eps = layers, weights.embedding, weights.config.rms_norm_eps
        hidden = weights.config.hidden_size
        device = weights.embedding.device
        self._pair = torch.empty((layers.rows, 2 * hidden), dtype=torch.bfloat16, device=device)
        self._combined = torch.empty((layers.rows, hidden), device=device)

    def begin(self, tokens: Tensor, hidden: Tensor, positions: Tensor) -> None:
        """Start a pass of pairs: ``tokens`` int64 [M], ``hidden`` float32 [M, H], of ``positions`` int64 [M], which the
        tokens come behind.
        """
        count, size = hidden.shape
        pair, kernels = self._pair[:count], self._layers.kernels
        rms_norm(self._embedding[tokens], self.weights.embedding_norm, self._eps, pair[:, :size], kernels=kernels)
        rms_norm(hidden, self.weights.hidden_norm, self._eps, pair[:, size:], kernels=kernels)
        linear(pair, self.weights.combine, self._combined[:count], self._layers.workspace)
        self._layers.begin(self._combined[:count], positions)

    def project(self, inputs: LayerInputs) -> None:
        self._layers.project(self.weights.layer, inputs)

    def absorb(self, inputs: LayerInputs) -> None:
        self._layers.absorb(self.weights.layer, inputs)

    def feed(self, attended: Tensor) -> None:
        self._layers.feed(self.weights.layer, attended)

    def finish(self, hidden: Tensor) -> None:
        """Write g of all rows to ``hidden`` float32 [M, H]."""
        self._layers.finish(self.weights.norm, hidden)

    def logits(self, hidden: Tensor, out: Tensor) -> None:
        self._layers.logits(hidden, out)


class DraftRows:
    """Stores the MTP layer's rows of what is appended in passes: prompts, and what follows a takeover."""

    def __init__(self, decoder: FastDecoder) -> None:
        self._layer = DraftLayer(decoder.layers, decoder.weights)
        self._inputs = LayerInputs.empty(decoder.config, decoder.rows, decoder.device)
        self._ends: WeakKeyDictionary[History, tuple[int, Tensor]] = WeakKeyDictionary()

    def append(self, history: History, positions: Tensor, tokens: Tensor, hidden: Tensor) -> None:
        """Between a pass over ``tokens`` [M], which gave ``hidden`` [M, H], and `History.finish`.

        The row of the first of them needs the hidden state before it. Where that is not known, the row is there
        already: the last row of a stored history is computed again.
        """
        first = history.length - len(tokens)
        before = self._hidden_before(history, first)
        earlier = hidden[:-1] if before is None else torch.cat((before.to(hidden.device)[None], hidden[:-1]))
        if len(earlier):
            skipped = len(tokens) - len(earlier)
            append_draft_rows(self._layer, self._inputs, history, positions[skipped:], tokens[skipped:], earlier)
        self._ends[history] = history.length, hidden[-1].clone()

    def _hidden_before(self, history: History, first: int) -> Tensor | None:
        end, hidden = self._ends.get(history, (0, None))
        if hidden is not None and end == first:
            return hidden
        return _stored_hidden(history, first - 1) if first else None


def append_draft_rows(
    layer: DraftLayer, inputs: LayerInputs, history: History, positions: Tensor, tokens: Tensor, hidden: Tensor
) -> None:
    """Store the MTP layer's rows ``positions`` int64 [M] of a history that has room for them, and the index keys.

    ``tokens`` int64 [M] are those at the positions, ``hidden`` float32 [M, H] the states of the positions before.
    """
    inputs, group = inputs.first(len(tokens)), len(history.format.groups) - 1
    layer.begin(tokens, hidden, positions - 1)
    layer.project(inputs)
    history.append(layer.number, positions, inputs.latent, inputs.rope)
    history.append_keys(group, positions, inputs.index_keys)
    newest = slice(max(len(tokens) - warming.ROWS, 0), None)  # drafting begins with a warm cache
    history.select(group, inputs.index_query[newest], inputs.index_weights[newest], positions[newest])


def _stored_hidden(history: History, row: int) -> Tensor | None:
    """The hidden [H] of ``row``, if it ends a page or the commit record."""
    if row % PAGE_TOKENS == PAGE_TOKENS - 1:
        stored = history.page(row // PAGE_TOKENS)[history.format.hidden_offset :]
        return stored[: 4 * history.format.hidden_size].view(torch.float32)
    commit = history.session.commit if history.session else NO_COMMIT
    if commit.rows != row + 1 or not commit.payload:
        return None
    return torch.frombuffer(bytearray(commit.payload), dtype=torch.float32)
