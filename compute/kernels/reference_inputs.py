"""What a layer's attention takes of its joint projections: norms and rotations, row by row, in float32.

Rows are padded to tiles (`compute.kernels.tiles`), as elementwise functions and sums may treat the end of a tensor
otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from compute.kernels import tiles
from protocol.layout import INDEX_DIM, LATENT_DIM, ROPE_DIM

LATENT_EPS = 1e-6
"""Of the norms of both latents and of the index keys, whatever ``rms_norm_eps`` says, as in ``transformers``."""


def latents(row: Tensor, norm: Tensor) -> Tensor:
    """RMS norm of ``row`` float32 [M, K]: float32 [M, K]."""
    return tiles.rms_norm(tiles.pad_rows(row), norm, LATENT_EPS)[: row.shape[0]]


def keys(projected: Tensor, norm: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Index keys, float32 [M, 128], of ``projected`` [M, 128]: LayerNorm, then the first 64 dimensions rotated."""
    rows = projected.shape[0]
    normed = layer_norm(tiles.pad_rows(projected), (INDEX_DIM,), *norm, LATENT_EPS)[:rows]
    return torch.cat((rotate(normed[:, :ROPE_DIM], cos, sin, interleaved=interleaved), normed[:, ROPE_DIM:]), dim=1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """``x`` [..., 64] rotated in float32, by pairs of neighbours or of one element from each half.

    ``cos`` and ``sin`` broadcast to [..., 32].
    """
    x = x.float()
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def row_inputs(row: Tensor, norm: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Latent float32 [M, 512] and rope float32 [M, 64] of ``row``, kv_a's output [M, 576]."""
    return latents(row[:, :LATENT_DIM], norm), rotate(row[:, LATENT_DIM:], cos, sin, interleaved=True)
