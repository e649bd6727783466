"""Tensor parallelism: how the shards' parts of a result become one, with the same bits on every shard.

Parts are gathered and added in the shards' order, in float32. So a row's result depends on nothing but its own inputs
and the number of shards: a library's all-reduce adds in an order of its own, which may change with the size. With
another number of shards the bits are others, as a sum that was one has become several.

The latent row, the index keys and the selection are made of what every shard has whole, so they are the same on all.
Which tensors are cut is in ``compute.decode.shards``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from compute.parallel.peers import Peers
from protocol.model import ModelConfig

LOGIT_ROWS = 64
"""Rows whose logits are gathered at a time: those of a whole pass would take gigabytes with a real vocabulary."""


class Split:
    """The shards ``peers``, two or more, of a model whose whole ``config`` is given."""

    def __init__(self, peers: Peers, config: ModelConfig, device: torch.device) -> None:
        self._peers, self._config, self._device = peers, config, device

    def for_rows(self, rows: int) -> SplitRows:
        """With scratch for passes of up to ``rows`` rows, made once: recorded graphs keep its addresses."""
        return SplitRows(self._peers, self._config, rows, self._device)


class SplitRows:
    """Sums and logits of up to ``rows`` rows."""

    def __init__(self, peers: Peers, config: ModelConfig, rows: int, device: torch.device) -> None:
        self._peers, self._shards = peers, len(peers)
        logits = min(rows, LOGIT_ROWS) * config.vocab_size
        self._gathered = torch.empty(self._shards * rows * config.hidden_size, device=device)
        self._own_logits = torch.empty(logits // self._shards, device=device)
        self._logits = torch.empty(logits, device=device)

    def add(self, part: Tensor) -> None:
        """Have ``part`` float32 [M, hidden], contiguous, be the sum of all shards' parts, added in their order."""
        gathered = self._gathered[: self._shards * part.numel()].view(self._shards, *part.shape)
        self._peers.all_gather(part, gathered)
        first, second, *others = gathered
        torch.add(first, second, out=part)
        for other in others:
            part.add_(other)

    def logits(self, out: Tensor, product: Callable[[slice, Tensor], None]) -> None:
        """Put all shards' shares of the logits side by side into ``out`` float32 [M, vocabulary], contiguous.

        ``product`` is given a few of the rows at a time, and where this shard's share of their logits goes, float32
        [rows, vocabulary / shards].
        """
        shards, columns = self._shards, out.shape[1] // self._shards
        for start in range(0, len(out), LOGIT_ROWS):
            rows = slice(start, start + LOGIT_ROWS)
            part = out[rows].view(-1, shards, columns)
            own = self._own_logits[: len(part) * columns].view(-1, columns)
            product(rows, own)
            every = self._logits[: part.numel()].view(shards, *own.shape)
            self._peers.all_gather(own, every)
            part.copy_(every.transpose(0, 1))
