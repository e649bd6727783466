"""Rotary position embedding over 64 dimensions, plain or yarn, in both pairings.

Pairs are (0, 1), (2, 3), … where interleaved, and (0, 32), (1, 33), … where half-split. The rotated pair stays where it
was. MLA is always interleaved; the indexer is interleaved in GLM and half-split in DeepSeek-V3.2. The frequencies, and
the order of the float32 operations that make them, are those of ``transformers``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from compute.kernels import tiles
from protocol.errors import InvalidValue
from protocol.layout import ROPE_DIM
from protocol.model import ModelConfig


class Rope:
    """The angles of one model."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        """Raises `InvalidValue` for a kind of scaling other than yarn, or yarn without its numbers."""
        self._frequencies = _frequencies(config).to(device)
        self._factor = _attention_factor(config)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, float32 [16 n, 32], for int64 ``positions`` [16 n]."""
        angles = positions[:, None].float() * self._frequencies
        return (
            tiles.elementwise(torch.cos, angles) * self._factor,
            tiles.elementwise(torch.sin, angles) * self._factor,
        )


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` [..., 64] rotated by pairs of neighbours; ``cos`` and ``sin`` broadcast to [..., 32]."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def rotate_half_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` [..., 64] rotated by pairs of one element from each half; ``cos`` and ``sin`` broadcast to [..., 32]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _frequencies(config: ModelConfig) -> Tensor:
    """Radians per position of each of the 32 pairs; yarn blends long wavelengths into ones ``factor`` times longer."""
    base = config.rope_theta
    wavelengths = base ** (torch.arange(0, ROPE_DIM, 2).float() / ROPE_DIM)
    scaling = config.rope_scaling
    if not scaling:
        return 1.0 / wavelengths
    if scaling.get("rope_type", scaling.get("type")) != "yarn":
        raise InvalidValue("rope scaling", str(scaling.get("rope_type")), "yarn or default")
    original = _number(scaling, "original_max_position_embeddings")

    def pair_that_turns(times: float) -> float:
        """The pair, as a real number, that turns so often within the original context."""
        return ROPE_DIM * math.log(original / (times * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_that_turns(float(scaling.get("beta_fast") or 32))), 0)
    high = min(math.ceil(pair_that_turns(float(scaling.get("beta_slow") or 1))), ROPE_DIM - 1)
    ramp = (torch.arange(ROPE_DIM // 2).float() - low) / (high - low or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (_number(scaling, "factor") * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _attention_factor(config: ModelConfig) -> float:
    """What yarn multiplies cosines and sines by; 1 where both ``mscale`` are given and equal."""
    scaling = config.rope_scaling
    if not scaling:
        return 1.0
    if scaling.get("attention_factor") is not None:
        return _number(scaling, "attention_factor")
    factor = _number(scaling, "factor")

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(_number(scaling, "mscale")) / mscale(_number(scaling, "mscale_all_dim"))
    return mscale(1.0)


def _number(scaling: dict[str, object], name: str) -> float:
    value = scaling.get(name)
    if not isinstance(value, int | float) or value <= 0:
        raise InvalidValue(f"rope scaling's {name}", value, "a positive number")
    return float(value)
