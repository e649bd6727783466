"""What tests of products need: values, e4m3 weights, and a GPU of Hopper's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compute.kernels import reference_linear
from compute.kernels.matrix import Matrix
from tests.conftest import CUDA
from tests.kernels.pages import DEVICE

needs_hopper = pytest.mark.skipif(
    not CUDA or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a GPU of compute capability 9.0: others use the Triton kernels",
)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def matrix(*shape: int, seed: int) -> Matrix:
    """An e4m3 weight on the device."""
    made = reference_linear.quantise(normal(*shape, seed=seed))
    assert made.scales is not None
    return Matrix(made.values.to(DEVICE), made.scales.to(DEVICE))


def scaled_matrix(*shape: int, seed: int) -> Matrix:
    """One whose products are about 1, and whose scales are unlike each other."""
    made = reference_linear.quantise(normal(*shape, seed=seed) / shape[-1] ** 0.5)
    assert made.scales is not None
    made.scales.mul_(normal(*made.scales.shape, seed=seed).exp2_())
    return made
