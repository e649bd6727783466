"""Random weights from a seed, made where they are used.

Deviations are chosen by a tensor's part in the model, so that a deep stack stays sane: activations neither grow nor
vanish through the layers, attention has a few rows that it looks at rather than an average over all, and what is said
next depends on the history. Outputs of such a model are not one token over and over.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from compute.decode.matrices import store
from compute.kernels.matrix import Matrix

_GAINS = {"self_attn.q_b_proj.weight": 4.0, "down_proj.weight": 2.0}
"""Deviation of an output for inputs of deviation 1, where it is not 1. Attention's logits have that of ``q_b_proj``.
With less, layers average over many rows, and after some dozens of them all tokens look alike."""


class RandomSource:
    """A `compute.decode.weights.Source`. A tensor depends on the seed, its name and the kind of device only."""

    def __init__(self, seed: int, shapes: dict[str, tuple[int, ...]], device: torch.device) -> None:
        self._seed = seed
        self._shapes = shapes
        self._device = device

    def vector(self, name: str) -> Tensor:
        """Ones for norms, zeros for biases."""
        return torch.full(self._shapes[name], 0.0 if name.endswith("bias") else 1.0, device=self._device)

    def matrix(self, name: str, out: Matrix) -> None:
        """Normal values in the order of the rows, of a generator of the tensor's own."""
        shape = self._shapes[name]
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        weight = torch.randn(shape, generator=generator, device=self._device)
        if name != "model.embed_tokens.weight":
            gain = next((gain for part, gain in _GAINS.items() if name.endswith(part)), 1.0)
            weight.mul_(gain * shape[1] ** -0.5)
        store(weight, out)
