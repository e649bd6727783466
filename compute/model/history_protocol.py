"""What a decoder asks of a history."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class History(Protocol):
    """Keeps what a model's layers must remember, and attends to it.

    One forward pass has M rows, of one session or of several: which session a row belongs to is the history's business.
    All M rows are appended before any of them selects, and row r only ever sees positions up to ``positions[r]``, its
    own included. For one forward pass the decoder calls, layer after layer:

    1. ``append`` with the layer's rows;
    2. at the first layer of an index group ``append_keys``, ``select`` and, once, ``addresses``;
    3. ``attend``. In the later layers of a group the addresses stay those of the first: they are of group rows, and
       each layer's part of the new tokens' group rows is written by ``append`` before that layer attends.

    Results must not depend on M, on a row's place among the rows, or on how a text was divided into passes.
    """

    def append(self, layer: int, positions: Tensor, latent: Tensor, rope: Tensor) -> None:
        """Store one layer's rows: positions int64 [M], latent float32 [M, 512], rope float32 [M, 64]."""

    def append_keys(self, group: int, positions: Tensor, keys: Tensor) -> None:
        """Store index keys of a group: positions int64 [M], keys float32 [M, 128]."""

    def select(self, group: int, query: Tensor, weights: Tensor, positions: Tensor) -> Tensor:
        """The selection, int32 [M, k], of index queries [M, heads, 128] with float32 head weights [M, heads]."""

    def addresses(self, group: int, selection: Tensor) -> Tensor:
        """Where the selected group rows can be read until the next forward pass: int64 [M, k], 0 where empty."""

    def attend(self, layer: int, addresses: Tensor, query_latent: Tensor, query_rope: Tensor, scale: float) -> Tensor:
        """Attention output, float32 [M, H, 512], of queries [M, H, 512] and [M, H, 64]."""
