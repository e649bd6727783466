"""Copying pieces by address."""

from __future__ import annotations

import pytest
import torch

from compute.kernels.pieces import copy_pieces
from protocol.errors import InvalidValue
from tests.conftest import CUDA

DEVICE = "cuda" if CUDA else "cpu"


@pytest.mark.parametrize("sizes", [[16], [4096, 16, 65536], [48] * 400])
def test_every_piece_is_copied_and_nothing_else(sizes: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    total = sum(sizes)
    source = torch.randint(0, 256, (total + 64,), dtype=torch.uint8, generator=generator).to(DEVICE)
    target = torch.full((2 * total + 64,), 7, dtype=torch.uint8, device=DEVICE)
    expected = target.clone()
    moves, at_source, at_target = [], 16, 32
    for size in sizes:
        moves.append((source.data_ptr() + at_source, target.data_ptr() + at_target, size))
        expected[at_target : at_target + size] = source[at_source : at_source + size]
        at_source += size
        at_target += size + 16
    copy_pieces(torch.tensor(moves, dtype=torch.int64, device=DEVICE))
    assert torch.equal(target, expected)


def test_no_pieces_and_another_table() -> None:
    copy_pieces(torch.empty((0, 3), dtype=torch.int64, device=DEVICE))
    with pytest.raises(InvalidValue, match="table of pieces"):
        copy_pieces(torch.zeros((1, 2), dtype=torch.int64))
