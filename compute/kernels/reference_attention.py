"""Absorbed MLA over selected rows, read in place by address.

    s_ht = (query_latent_h . c_t + query_rope_h . p_t) * scale,    o_h = softmax(s_h) @ c

The caller has multiplied the query by ``Wk`` and multiplies the output by ``Wv``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from compute.kernels import tiles
from compute.kernels.memory import Memory
from compute.kernels.reference_rows import decode_joined
from protocol.layout import LATENT_DIM, RowLayout, round_up

QUERY_ROWS = 4
"""Query rows whose selected rows are gathered at a time: few, so that they are still in a cache when they are read.
The result does not depend on it."""

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
    padded = round_up(keys, _KEYS)
    addresses = pad(addresses, (0, padded - keys))
    query = torch.cat((query_latent, query_rope), dim=2).float()  # [R, H, 576]
    query = pad(query, (0, 0, 0, round_up(heads, _HEADS) - heads))

    distinct, entry = torch.unique(addresses, return_inverse=True)
    first = distinct + layer_in_group * layout.row_bytes
    rows = decode_joined(memory.read(first.where(distinct != 0, 0), layout.row_bytes), layout)  # [distinct, 576]
    empty = addresses == 0
    mask = torch.zeros(addresses.shape, device=query.device).masked_fill_(empty, -torch.inf)
    picked = rows.new_empty(QUERY_ROWS * padded, rows.shape[1])
    out = query.new_empty(*query.shape[:2], LATENT_DIM)
    for start in range(0, query.shape[0], QUERY_ROWS):
        part = slice(start, start + QUERY_ROWS)
        wanted = entry[part]
        gathered = torch.index_select(rows, 0, wanted.view(-1), out=picked[: wanted.numel()]).view(*wanted.shape, -1)
        scores = query.new_empty(len(wanted), query.shape[1], padded)  # [<=4, H, k]
        tiles.batched(query[part], gathered.transpose(1, 2), out=scores).mul_(scale).add_(mask[part, None])
        tiles.batched(torch.softmax(scores, dim=2), gathered[..., :LATENT_DIM], out=out[part])
    out.masked_fill_(empty.all(1)[:, None, None], 0.0)
    return out[:, :heads]
