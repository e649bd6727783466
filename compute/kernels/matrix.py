"""A projection's weight, as kernels and checkpoints know it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from protocol.errors import InvalidValue

BLOCK = 128
"""Rows and columns of a weight that share one scale."""


@dataclass(frozen=True)
class Matrix:
    """The weight of ``y = x @ W.T``, or one for each expert or head.

    ``values`` is bfloat16 or float8_e4m3fn [N, K] (or [E, N, K]), contiguous. ``scales`` is float32
    [ceil(N / 128), ceil(K / 128)] (or [E, ...]) for e4m3, where W = values * scale, and None for bfloat16.
    Raises `InvalidValue` for anything else.
    """

    values: Tensor
    scales: Tensor | None = None

    def __post_init__(self) -> None:
        values, scales = self.values, self.scales
        if values.dim() not in (2, 3) or not values.is_contiguous():
            raise InvalidValue("weight", tuple(values.shape), "contiguous [N, K] or [E, N, K]")
        if values.dtype not in (torch.bfloat16, torch.float8_e4m3fn):
            raise InvalidValue("dtype of a weight", str(values.dtype), "torch.bfloat16 or torch.float8_e4m3fn")
        if (scales is None) != (values.dtype == torch.bfloat16):
            raise InvalidValue(f"scales of a {values.dtype} weight", "given" if scales is not None else None, "of e4m3")
        if scales is not None:
            n, k = values.shape[-2:]
            shape = (*values.shape[:-2], -(-n // BLOCK), -(-k // BLOCK))
            if scales.shape != shape or scales.dtype != torch.float32 or not scales.is_contiguous():
                found = f"{scales.dtype} {tuple(scales.shape)}"
                raise InvalidValue("scales of a weight", found, f"contiguous torch.float32 {shape}")

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales: what a product reads."""
        return self.values.nbytes + (self.scales.nbytes if self.scales is not None else 0)

    @property
    def e4m3(self) -> tuple[Tensor, Tensor]:
        """Values and scales of an e4m3 weight."""
        assert self.scales is not None
        return self.values, self.scales

    def __getitem__(self, index: int) -> Matrix:
        """The matrix of one expert or head; shares memory."""
        return Matrix(self.values[index], None if self.scales is None else self.scales[index])
