"""Blended index queries: the kernel against its reference, and the state against rejected rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compute.kernels.blend import blend
from compute.kernels.choice import KernelsName
from compute.kernels.triton_support import INTERPRETED
from protocol.errors import InvalidValue
from tests.kernels.pages import DEVICE

HEADS, SIZE = 5, 128
WIDTH = HEADS * (SIZE + 1)
TRITON = DEVICE.type == "cuda" or INTERPRETED
KERNELS: list[KernelsName] = ["reference", "triton"] if TRITON else ["reference"]


def queries(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Of one place: bfloat16 [rows, heads, 128] and float32 [rows, heads]."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, HEADS, SIZE, generator=generator).bfloat16()
    return values.to(DEVICE), torch.randn(rows, HEADS, generator=generator).to(DEVICE)


def run(kernels: KernelsName, steps: list[tuple[list[int], int]], rows: int, keep: float) -> list[Tensor]:
    """Blend rows by number, ``(numbers of a step's rows, how many stay)``; the outputs of the rows that stay."""
    state = torch.full((1, rows + 1, WIDTH), float("nan"), device=DEVICE)
    values, head_weights = queries(64, 0)
    accepted = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    out: list[Tensor] = []
    for numbers, stay in steps:
        query, weights = values[numbers][None].clone(), head_weights[numbers][None].clone()
        blend(state, query, weights, accepted, keep, kernels=kernels)
        out += [torch.cat((query[0, row].float().flatten(), weights[0, row])) for row in range(stay)]
        accepted.fill_(stay)
    return out


@pytest.mark.parametrize("kernels", KERNELS)
def test_rejected_rows_leave_no_trace(kernels: KernelsName) -> None:
    alone = run(kernels, [([number], 1) for number in range(8)], 1, 0.9)
    drafted = run(
        kernels,
        [([0, 50, 51, 52], 1), ([1, 2, 3, 53], 3), ([4, 5, 6, 7], 4)],
        4,
        0.9,
    )
    assert len(alone) == len(drafted) == 8
    for number, (left, right) in enumerate(zip(alone, drafted, strict=True)):
        assert torch.equal(left, right), f"row {number}"
    other = run(kernels, [([0, 50, 51, 52], 2), ([2, 3, 4, 5], 1)], 4, 0.9)
    assert not torch.equal(other[2], alone[2])  # it follows row 50, not row 1


@pytest.mark.parametrize("kernels", KERNELS)
def test_the_first_query_stays_and_the_next_ones_keep_length_and_correlation(kernels: KernelsName) -> None:
    values, head_weights = queries(64, 0)
    out = run(kernels, [([number], 1) for number in range(64)], 1, 0.95)
    assert torch.equal(out[0], torch.cat((values[0].float().flatten(), head_weights[0])))
    stacked = torch.stack(out)
    assert float(stacked.std()) == pytest.approx(1.0, abs=0.05)
    similar = torch.nn.functional.cosine_similarity(stacked[1:], stacked[:-1])
    assert float(similar.mean()) == pytest.approx(0.95, abs=0.02)


@pytest.mark.skipif(not TRITON, reason="needs a GPU, or Triton's interpreter")
@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (1, 4), (3, 4), (16, 1)])
def test_the_kernel_against_the_reference(batch: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(batch * rows)
    state = torch.randn(batch, rows + 1, WIDTH, generator=generator).to(DEVICE)
    accepted = torch.randint(0, rows + 1, (batch,), generator=generator).to(DEVICE)
    query = torch.randn(batch, rows, HEADS, SIZE, generator=generator).bfloat16().to(DEVICE)
    weights = torch.randn(batch, rows, HEADS, generator=generator).to(DEVICE)
    results = []
    for kernels in KERNELS:
        tensors = (state.clone(), query.clone(), weights.clone())
        blend(*tensors, accepted, 0.75, kernels=kernels)
        results.append(tensors)
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-2 if left.dtype == torch.bfloat16 else 1e-6, atol=1e-6)


def test_what_does_not_fit_is_refused() -> None:
    query, weights = (tensor[None] for tensor in queries(2, 0))
    with pytest.raises(InvalidValue, match="state, queries"):
        blend(torch.zeros(1, 2, WIDTH), query, weights, torch.zeros(1, dtype=torch.int64), 0.5)
