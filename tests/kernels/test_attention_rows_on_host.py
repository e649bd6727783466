"""Attention of many query rows as a program of the host (`tests.kernels.host_program`).

The sanitizers see what runs past the ends of tensors, rows and arrays in shared memory; the words of ``on_host``,
operands that are given up before they are multiplied.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compute.kernels import reference
from compute.kernels.attention_rows import DEFINES
from compute.kernels.reference import Memory
from protocol.layout import Q8G64
from tests.kernels.host_program import build, needs_compiler, run
from tests.kernels.test_half_rows import halves_of

LAYERS, LAYER, SCALE = 2, 1, 0.1
RELATIVE_ERROR = 2e-3

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int, int], Path]:
    """The program for some splits, blocks of heads, and whether queries are bfloat16; it is built once."""
    folder = tmp_path_factory.mktemp("attention")

    @functools.cache
    def built(splits: int, blocks: int, bfloat16: int) -> Path:
        changed = {"SPLITS": splits, "BLOCKS": blocks, "BFLOAT16_QUERY": bfloat16}
        return build(folder, f"{splits}-{blocks}-{bfloat16}", "attention_rows.cpp", DEFINES | changed)

    return built


@pytest.mark.parametrize(
    ("heads", "k", "count", "launched", "dtype", "seed"),
    [
        pytest.param(16, 300, 3, 2, torch.bfloat16, 1, id="nine splits for two blocks, some short"),
        pytest.param(64, 129, 3, 1, torch.float16, 2, id="all rows by one block"),
        pytest.param(80, 40, 1, 2, torch.bfloat16, 0, id="more than 64 heads"),
        pytest.param(64, 500, 3, 5, torch.bfloat16, 3, id="blocks that begin within rows"),
        pytest.param(80, 129, 2, 3, torch.float16, 4, id="more than 64 heads, float16"),
    ],
)
def test_attention(
    program: Callable[[int, int, int], Path],
    heads: int,
    k: int,
    count: int,
    launched: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    latent, rope = (torch.randn((50 * LAYERS, width), generator=generator) for width in (512, 64))
    latent[::7] *= 30
    rows = reference.encode_rows(latent, rope, Q8G64.rows).view(50, -1)
    numbers = torch.randint(0, 50, (count, k), generator=generator)
    numbers[-1, ::3] = -1
    numbers[0, k // 2 :] = -1
    if count > 2:
        numbers[1] = -1
    queries = [(torch.randn((count, heads, width), generator=generator) * 0.3).to(dtype) for width in (512, 64)]

    head = (len(rows), count, heads, k, launched, seed, SCALE * math.log2(math.e))
    halves = halves_of(rows[:, LAYER * Q8G64.rows.row_bytes :])
    tensors = (halves.view(torch.int16), numbers.int(), *(query.view(torch.int16) for query in queries))
    given = struct.pack("6if", *head) + b"".join(tensor.numpy().tobytes() for tensor in tensors)
    splits = -(-k // 128)
    written = bytearray(run(program(splits, -(-heads // 64), int(dtype == torch.bfloat16)), given))
    entries = count * splits * heads
    partial = torch.frombuffer(written, dtype=torch.float16, count=entries * 512).view(count, splits, heads, 512)
    softmax = torch.frombuffer(written, dtype=torch.float32, offset=entries * 512 * 2).view(count, splits, heads, 2)
    actual = _joined(partial, *softmax.unbind(3))
    memory = rows.flatten()
    addresses = torch.where(numbers < 0, 0, memory.data_ptr() + numbers * rows.shape[1])
    expected = reference.attend(Memory(memory), addresses, LAYER, Q8G64.rows, queries[0], queries[1], SCALE)
    assert (actual - expected).norm() < RELATIVE_ERROR * expected.norm()


def _joined(partial: Tensor, tops: Tensor, totals: Tensor) -> Tensor:
    """The mean of splits, whose dimensions are in operand order."""
    best = tops.amax(1, keepdim=True)
    weights = torch.where(totals > 0, (tops - best).exp2() * totals, 0.0)
    mean = (partial.float() * weights[..., None]).sum(1) / weights.sum(1).clamp(min=1e-30)[..., None]
    n = torch.arange(512)
    return torch.empty_like(mean).index_copy_(2, n // 64 * 64 + n // 2 % 4 * 16 + n // 8 % 8 * 2 + n % 2, mean)
