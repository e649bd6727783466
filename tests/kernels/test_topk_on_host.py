"""The cluster's selection as a program of the host (`tests.kernels.host_program`).

The sanitizers see what runs past the ends of global tensors, of shared memory and of each array in it, and wide
accesses that are not aligned; the words of ``on_host`` see bytes that nobody expects, and shared memory of a block that
has ended.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from compute.kernels.reference import select_topk
from compute.kernels.topk_cluster import DEFINES
from compute.kernels.topk_collect import CLASSES, NO_SCORE
from tests.kernels.host_program import build, needs_compiler, run

SMALL = {"THREADS": 128, "SHARED_BYTES": 90 << 10, "ROOM": 8, "CAPACITY": 512, "CLUSTER": 4}
"""Little room, so that warps run out of it, and candidates have to be counted in memory."""
COLUMNS, K = 1280, 200

pytestmark = needs_compiler


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(SMALL, id="small"),
        pytest.param(DEFINES | {"CLUSTER": 8}, id="as on a GPU", marks=pytest.mark.torture),
    ],
)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("topk"), "select", "topk_cluster.cpp", request.param)


def _select(program: Path, scores: Tensor, lengths: Tensor, k: int, *, seed: int) -> Tensor:
    rows, columns = scores.shape
    bits = (scores + 0.0).view(torch.int32)
    taken = (torch.arange(columns) < lengths[:, None]) & (scores > -torch.inf)
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).where(taken, NO_SCORE)
    maxima = torch.nn.functional.pad(keys, (0, CLASSES - columns), value=NO_SCORE)
    head = torch.tensor([rows, k, columns, seed], dtype=torch.int32)
    given = b"".join(part.numpy().tobytes() for part in (head, lengths, scores, maxima))
    out = torch.from_numpy(np.frombuffer(run(program, given), dtype=np.int32).copy())
    assert bool((out[rows * k :] == NO_SCORE).all()), "the maxima are not reset"
    return out[: rows * k].view(rows, k)


@pytest.mark.parametrize("seed", [0, 1])
def test_selections_touch_only_their_own(program: Path, seed: int) -> None:
    """In two orders of the threads: scores of all kinds, as many as there are places; too many; few; and none."""
    scores = torch.randn(6, COLUMNS, generator=torch.Generator().manual_seed(0))
    scores[2] = 1.0
    scores[3] = -torch.inf
    scores[4, ::2] = -0.0
    lengths = torch.tensor([COLUMNS, COLUMNS - 5, COLUMNS, COLUMNS, 131, 0])
    expected = select_topk(scores, lengths, K)
    assert torch.equal(_select(program, scores, lengths, K, seed=seed), expected)
    one = _select(program, scores[:1, :64].contiguous(), torch.tensor([63]), 1, seed=seed)
    assert one.item() == scores[0, :63].argmax()
