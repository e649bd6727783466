"""Projections by weights in bfloat16 or in e4m3 with a scale for each block of 128 x 128: ``y = x @ W.T``.

Products are exact, sums are float32. Rows are computed in tiles of one shape (`compute.kernels.tiles`), so that a row's
bits do not depend on its company.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compute.kernels import tiles
from compute.kernels.matrix import BLOCK, Matrix


def dequantise(weight: Matrix) -> Tensor:
    """The weight's values, float32 [..., N, K]."""
    values = weight.values.float()
    if weight.scales is None:
        return values
    scales = weight.scales.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    return values.mul_(scales[..., : values.shape[-2], : values.shape[-1]])


def linear(x: Tensor, weight: Matrix) -> Tensor:
    """``x`` [M, K] times ``weight`` [N, K]: float32 [M, N]."""
    return tiles.Linear(dequantise(weight))(tiles.pad_rows(x.float()))[: x.shape[0]]


def head_linear(x: Tensor, weight: Matrix) -> Tensor:
    """Each head by its own matrix: ``x`` [M, H, K], ``weight`` [H, N, K]: float32 [M, H, N]."""
    return tiles.head_products(tiles.pad_rows(x.float()), dequantise(weight).transpose(1, 2))[: x.shape[0]]


def quantise(values: Tensor) -> Matrix:
    """``values`` [..., N, K] as e4m3: each block of 128 x 128 by the scale that takes its largest value to 448."""
    n, k = values.shape[-2:]
    rows, columns = -(-n // BLOCK), -(-k // BLOCK)
    padded = values.new_zeros(*values.shape[:-2], rows * BLOCK, columns * BLOCK, dtype=torch.float32)
    padded[..., :n, :k] = values
    blocks = padded.unflatten(-1, (columns, BLOCK)).unflatten(-3, (rows, BLOCK))  # [..., rows, 128, columns, 128]
    largest = blocks.abs().amax((-3, -1))
    scales = torch.where(largest > 0, largest / 448.0, 1.0)
    encoded = (blocks / scales[..., :, None, :, None]).clamp_(-448.0, 448.0).to(torch.float8_e4m3fn)
    return Matrix(encoded.flatten(-4, -3).flatten(-2)[..., :n, :k].contiguous(), scales)
