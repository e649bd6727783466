"""Projection weights in the two types that they are kept in: bfloat16, and e4m3 with one scale per 128 x 128 block."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from compute.kernels.matrix import BLOCK, Matrix
from compute.kernels.reference_linear import quantise
from protocol.errors import InvalidValue

WeightType = Literal["bf16", "fp8"]
WEIGHT_TYPES: tuple[WeightType, ...] = get_args(WeightType)


def scales_shape(rows: int, columns: int) -> tuple[int, int]:
    """Shape of the scales of an e4m3 matrix [rows, columns]."""
    return -(-rows // BLOCK), -(-columns // BLOCK)


def empty_matrix(shape: tuple[int, ...], kind: WeightType, device: torch.device) -> Matrix:
    """Zeros [..., N, K] on ``device``, with scales of 1 [..., ceil(N / 128), ceil(K / 128)] if ``kind`` is fp8."""
    *lead, rows, columns = shape
    if kind == "bf16":
        return Matrix(torch.zeros(shape, dtype=torch.bfloat16, device=device), None)
    values = torch.zeros(shape, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    return Matrix(values, torch.ones((*lead, *scales_shape(rows, columns)), device=device))


def rows_of(matrix: Matrix, first: int, count: int) -> Matrix:
    """A view of rows ``first`` to ``first + count - 1``; ``first`` is a multiple of 128 where there are scales."""
    values = matrix.values[first : first + count]
    if matrix.scales is None:
        return Matrix(values, None)
    if first % BLOCK:
        raise InvalidValue("first row of an FP8 matrix's part", first, f"a multiple of {BLOCK}")
    return Matrix(values, matrix.scales[first // BLOCK : -(-(first + count) // BLOCK)])


def store(weight: Tensor, out: Matrix) -> None:
    """Write ``weight`` float [N, K] to ``out``: rounded to bfloat16, or quantised block by block."""
    if out.scales is None:
        out.values.copy_(weight)
        return
    quantised = quantise(weight)
    assert quantised.scales is not None
    out.values.copy_(quantised.values)
    out.scales.copy_(quantised.scales)
