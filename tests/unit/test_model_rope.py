"""Rotary embedding by complex numbers, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from compute.kernels.tiles import ROW_TILE
from compute.model.rope import Rope, rotate_half_split, rotate_interleaved
from protocol.errors import InvalidValue
from protocol.model import DEMO

CPU = torch.device("cpu")


def test_pairs_are_turned_by_their_angle() -> None:
    x = torch.randn(ROW_TILE, 64, generator=torch.Generator().manual_seed(1))
    angles = torch.rand(ROW_TILE, 32, generator=torch.Generator().manual_seed(2))
    turn = torch.polar(torch.ones_like(angles), angles)
    neighbours = torch.view_as_complex(x.view(-1, 32, 2)) * turn
    halves = torch.complex(x[:, :32], x[:, 32:]) * turn
    interleaved = rotate_interleaved(x, angles.cos(), angles.sin())
    split = rotate_half_split(x, angles.cos(), angles.sin())
    torch.testing.assert_close(interleaved, torch.view_as_real(neighbours).flatten(1))
    torch.testing.assert_close(split, torch.cat((halves.real, halves.imag), dim=1))


def test_position_zero_turns_nothing_and_the_first_pair_turns_by_the_position() -> None:
    positions = torch.arange(ROW_TILE)
    cos, sin = Rope(DEMO, CPU).tables(positions)
    assert cos.shape == sin.shape == (ROW_TILE, 32)
    assert bool((cos[0] == 1).all())
    assert not sin[0].any()
    torch.testing.assert_close(cos[:, 0], positions.float().cos())


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"rope_type": "llama3", "factor": 2.0}, "rope scaling is 'llama3'"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 4096}, "factor is None"),
        ({"rope_type": "yarn", "factor": 40.0}, "original_max_position_embeddings is None"),
        ({"rope_type": "yarn", "factor": "40", "original_max_position_embeddings": 4096}, "factor is '40'"),
        ({"rope_type": "yarn", "factor": -1.0, "original_max_position_embeddings": 4096}, "factor is -1.0"),
    ],
)
def test_scaling_that_is_unknown_or_incomplete_is_refused(scaling: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidValue, match=named):
        Rope(replace(DEMO, rope_scaling=scaling), CPU)
