"""Absorbed MLA with its indexer: what a layer appends to the history and asks of it.

    row_t = (c_t = rms_norm(kv_a[:512]), p_t = rope_interleaved(kv_a[512:576]))
    Wk, Wv = kv_b as [heads, nope + v, 512], cut after nope
    o_h = (softmax((q_nope_h @ Wk_h) . c_t + q_rope_h . p_t) * scale) @ c) @ Wv_h.T

A query's rope is the last 64 dimensions of a head; the indexer's is the first 64 of its 128.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from compute.kernels import tiles
from compute.model.feed_forward import Take
from compute.model.history_protocol import History
from compute.model.rope import rotate_half_split, rotate_interleaved
from protocol.layout import INDEX_DIM, LATENT_DIM, ROPE_DIM, Encoding
from protocol.model import ModelConfig

LATENT_EPS = 1e-6
"""Of the norms of both latents and of the index keys, whatever ``rms_norm_eps`` says, as in ``transformers``."""


class Indexer:
    """Makes index keys and queries of projected hidden states. The first layer of each index group has one."""

    def __init__(self, config: ModelConfig, encoding: Encoding, take: Take) -> None:
        self._norm_weight = take("self_attn.indexer.k_norm.weight")
        self._norm_bias = take("self_attn.indexer.k_norm.bias")
        self._heads = config.index_n_heads
        self._rotate = rotate_interleaved if config.indexer_rope_interleaved else rotate_half_split
        # Quantised keys are scored against bfloat16 queries; unquantised ones in float32.
        self._query_dtype = torch.bfloat16 if encoding.keys.has_scales else torch.float32

    def keys(self, projected: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Keys, float32 [16 n, 128], of ``wk(x)`` [16 n, 128]."""
        keys = layer_norm(projected, (INDEX_DIM,), self._norm_weight, self._norm_bias, LATENT_EPS)
        return torch.cat((self._rotate(keys[:, :ROPE_DIM], cos, sin), keys[:, ROPE_DIM:]), dim=1)

    def queries(self, projected: Tensor, weights: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [16 n, heads, 128] of ``wq_b(qr)``, and the head weights [16 n, heads] times ``heads ** -0.5``."""
        query = projected.unflatten(1, (self._heads, INDEX_DIM))
        rotated = self._rotate(query[..., :ROPE_DIM], cos[:, None], sin[:, None])
        query = torch.cat((rotated, query[..., ROPE_DIM:]), dim=2).to(self._query_dtype)
        return query, weights * self._heads**-0.5


class Attention:
    """One layer's attention. Layers without an indexer use the selection of their group's first."""

    def __init__(self, config: ModelConfig, encoding: Encoding, layer: int, group: int, take: Take) -> None:
        self._config = config
        self._layer = layer
        self._group = group
        self._indexer = Indexer(config, encoding, take) if config.has_indexer(layer) else None
        from_hidden = [take("self_attn.q_a_proj.weight"), take("self_attn.kv_a_proj_with_mqa.weight")]
        from_latent = [take("self_attn.q_b_proj.weight")]
        if self._indexer is not None:
            from_hidden += [take("self_attn.indexer.wk.weight"), take("self_attn.indexer.weights_proj.weight")]
            from_latent.append(take("self_attn.indexer.wq_b.weight"))
        self._from_hidden, self._hidden_cuts = tiles.Linear(*from_hidden), [len(weight) for weight in from_hidden]
        self._from_latent, self._latent_cuts = tiles.Linear(*from_latent), [len(weight) for weight in from_latent]
        self._query_norm = take("self_attn.q_a_layernorm.weight")
        self._row_norm = take("self_attn.kv_a_layernorm.weight")
        expanded = take("self_attn.kv_b_proj.weight").view(config.num_attention_heads, -1, LATENT_DIM)
        self._key = expanded[:, : config.qk_nope_head_dim].contiguous()  # [H, nope, 512]
        self._value = expanded[:, config.qk_nope_head_dim :].transpose(1, 2).contiguous()  # [H, 512, v]
        self._output = tiles.Linear(take("self_attn.o_proj.weight"))

    def forward(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        positions: Tensor,
        history: History,
        addresses: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Attention output [16 n, hidden] and the group's addresses, new from a layer with an indexer.

        ``x`` is float32 [16 n, hidden], of which the first ``len(positions)`` rows are tokens and the rest padding.
        """
        config, rows = self._config, positions.shape[0]
        cos, sin = angles
        query_a, row, *index_parts = torch.split(self._from_hidden(x), self._hidden_cuts, dim=1)
        latent = tiles.rms_norm(row[:, :LATENT_DIM], self._row_norm, LATENT_EPS)
        history.append(self._layer, positions, latent[:rows], rotate_interleaved(row[:, LATENT_DIM:], cos, sin)[:rows])

        query_latent = tiles.rms_norm(query_a, self._query_norm, LATENT_EPS)
        query, *index_query = torch.split(self._from_latent(query_latent), self._latent_cuts, dim=1)
        if self._indexer is not None:
            history.append_keys(self._group, positions, self._indexer.keys(index_parts[0], cos, sin)[:rows])
            scored, weights = self._indexer.queries(index_query[0], index_parts[1], cos, sin)
            selection = history.select(self._group, scored[:rows], weights[:rows], positions)
            addresses = history.addresses(self._group, selection)
        assert addresses is not None, "the first layer of a group has an indexer"

        query = query.unflatten(1, (config.num_attention_heads, config.qk_head_dim))
        absorbed = tiles.head_products(query[..., : config.qk_nope_head_dim], self._key)  # [16 n, H, 512]
        rotated = rotate_interleaved(query[..., config.qk_nope_head_dim :], cos[:, None], sin[:, None])
        attended = history.attend(self._layer, addresses, absorbed[:rows], rotated[:rows], config.softmax_scale)
        values = tiles.head_products(tiles.pad_rows(attended), self._value)  # [16 n, H, v]
        return self._output(values.flatten(1)), addresses
