"""Absorbed MLA over selected rows, read in place by address.

    s_ht = (query_latent_h . c_t + query_rope_h . p_t) * scale,    o_h = softmax(s_h) @ c

The caller has multiplied the query by ``Wk`` and multiplies the output by ``Wv``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from compute.kernels.memory import Memory
from compute.kernels.reference_rows import decode_joined
from protocol.layout import LATENT_DIM, RowLayout, round_up

QUERY_ROWS = 16
"""Query rows whose selected rows are gathered at a time; bounds the temporary memory, not the result."""

_HEADS, _KEYS = 4, 16
"""Heads and keys of a product are padded to multiples of these: matrix libraries treat what is left over of a blocking
otherwise, and then a row's bits differ between a batch of one and a batch of many."""


def attend(
    memory: Memory,
    addresses: Tensor,
    layer_in_group: int,
    layout: RowLayout,
    query_latent: Tensor,
    query_rope: Tensor,
    scale: float,
) -> Tensor:
    """Attention output in the latent space: float32 [R, H, 512].

    ``addresses`` int64 [R, k] are of group rows, 0 where empty; ``query_latent`` is [R, H, 512], ``query_rope``
    [R, H, 64]. The softmax is float32, over the entries that are not empty; a row with none gives 0. A row that several
    queries selected is read and decoded once.
    """
    heads, keys = query_latent.shape[1], addresses.shape[1]
    addresses = pad(addresses, (0, round_up(keys, _KEYS) - keys))
    valid = addresses != 0  # [R, k]
    distinct, entry = torch.unique(addresses, return_inverse=True)
    shift = layer_in_group * layout.row_bytes
    rows = decode_joined(memory.read((distinct + shift).where(distinct != 0, 0), layout.row_bytes), layout)  # [u, 576]
    query = torch.cat((query_latent, query_rope), dim=2).float()  # [R, H, 576]
    query = pad(query, (0, 0, 0, round_up(heads, _HEADS) - heads))
    masked = torch.zeros_like(valid, dtype=torch.float32).masked_fill_(~valid, -torch.inf)
    empty = ~valid.any(1)
    out = torch.empty((*query.shape[:2], LATENT_DIM), device=query.device)
    for first in range(0, query.shape[0], QUERY_ROWS):
        part = slice(first, first + QUERY_ROWS)
        picked = rows[entry[part]]  # [<=16, k, 576]
        scores = torch.bmm(query[part], picked.transpose(1, 2)).mul_(scale)  # [<=16, H, k]
        weights = torch.softmax(scores.add_(masked[part, None, :]), dim=2)
        weights.masked_fill_(empty[part, None, None], 0.0)
        torch.bmm(weights, picked[..., :LATENT_DIM], out=out[part])
    return out[:, :heads]
