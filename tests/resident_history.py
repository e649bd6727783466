"""A history in memory, for tests: one session, all pages at home, read through the reference functions."""

from __future__ import annotations

import torch
from torch import Tensor

from compute.kernels import reference
from compute.kernels.state import LENGTH, NO_RING, PageMap
from protocol.layout import PAGE_TOKENS, Encoding
from protocol.model import ModelConfig

POISON = 0xFF
"""Memory that nothing wrote is full of this: a NaN in every floating-point dtype of a page."""


class ResidentHistory:
    """Implements `compute.model.history_protocol.History`."""

    def __init__(self, config: ModelConfig, encoding: Encoding, max_tokens: int) -> None:
        self.format = config.page_format(encoding)
        self.topk = config.index_topk
        pages = -(-max_tokens // PAGE_TOKENS)
        groups = len(self.format.groups)
        self._pages = torch.full((pages * self.format.stride,), POISON, dtype=torch.uint8)
        block_bytes = encoding.keys.block_bytes
        self._blocks = torch.full((groups * pages * block_bytes,), POISON, dtype=torch.uint8)
        self.memory = reference.Memory(self._pages, self._blocks)
        self.page_map = PageMap(
            page_address=self._pages.data_ptr() + torch.arange(pages) * self.format.stride,
            key_block_address=self._blocks.data_ptr() + torch.arange(groups * pages).view(groups, pages) * block_bytes,
            window=torch.tensor([NO_RING, 0]),
            ring_base=0,
            ring_pages=1,
            format=self.format,
        )

    def append(self, layer: int, positions: Tensor, latent: Tensor, rope: Tensor) -> None:
        self.page_map.window[LENGTH] = torch.maximum(self.page_map.window[LENGTH], positions.max() + 1)
        group = self.format.group_of_layer(layer)
        in_group = layer - self.format.groups[group].first_layer
        reference.append_rows(self.memory, self.page_map, group, in_group, positions, latent, rope)

    def append_keys(self, group: int, positions: Tensor, keys: Tensor) -> None:
        reference.append_keys(self.memory, self.page_map, group, positions, keys)

    def select(self, group: int, query: Tensor, weights: Tensor, positions: Tensor) -> Tensor:
        scores = reference.index_scores(self.memory, self.page_map, group, query, weights, positions)
        return reference.select_topk(scores, positions + 1, self.topk)

    def addresses(self, group: int, selection: Tensor) -> Tensor:
        return reference.row_addresses(self.page_map, group, selection)

    def attend(self, layer: int, addresses: Tensor, query_latent: Tensor, query_rope: Tensor, scale: float) -> Tensor:
        group = self.format.group_of_layer(layer)
        in_group = layer - self.format.groups[group].first_layer
        rows = self.format.encoding.rows
        return reference.attend(self.memory, addresses, in_group, rows, query_latent, query_rope, scale)
