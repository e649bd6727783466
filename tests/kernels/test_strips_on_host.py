"""Products of few rows by strips as programs of the host (`tests.kernels.host_program`), launched by `strips` itself.

The sanitizers see what runs past the ends of tensors, of shared memory and of each array in it, and what reads an
operand before the thread has waited for its copy; the words of ``on_host``, copies of what the kernel before may still
be writing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compute.kernels import reference_experts, reference_linear, strips
from compute.kernels.triton_products import Scratch
from tests.kernels.host_program import host_kernel, needs_compiler, programs
from tests.kernels.products import normal, scaled_matrix

SUMS = 1e-5
"""What values of about 1 may differ by: sums are float32, in another order than the reference's."""
ROUNDED = 2**-7
"""They may be rounded to the next bfloat16."""
GATED = 1e-3
"""Some of what is summed may be rounded to the next bfloat16."""

pytestmark = [needs_compiler, pytest.mark.usefixtures("_on_host")]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    return programs(tmp_path_factory.mktemp("strips"))


@pytest.fixture(params=[0, 1])
def _on_host(request: pytest.FixtureRequest, program: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Has `strips` launch programs, in two orders of the threads."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(strips, "_compiled", strips._compiled.__wrapped__)
    monkeypatch.setattr(strips, "CudaKernel", host_kernel(program, request.param))


def _rows(count: int, k: int) -> Tensor:
    x = normal(count, k, seed=count).bfloat16()
    if count % 2 == 0:
        x[1] = torch.nan
    return x


def _scratch() -> Scratch:
    scratch = Scratch.empty(1 << 20, torch.device("cpu"))
    scratch.memory.fill_(torch.nan)
    return scratch


@pytest.mark.parametrize(
    ("n", "k", "splits", "counts", "dtype"),
    [
        (40, 640, 2, (3, 4, 9), torch.float32),
        (150, 1024, 1, (5, 8, 16), torch.bfloat16),
        (200, 512, 1, (2,), torch.float32),
        (17, 384, 3, (1,), torch.bfloat16),
    ],
)
def test_products(n: int, k: int, splits: int, counts: tuple[int, ...], dtype: torch.dtype) -> None:
    """Rows of a wider tensor, into rows of one, with NaN around both; one of two or four rows is NaN, too."""
    weight = scaled_matrix(n, k, seed=1)
    for rows in counts:
        x = torch.full((rows, k + 16), torch.nan, dtype=torch.bfloat16)[:, 8:-8]
        x.copy_(_rows(rows, k))
        out = torch.full((rows, n + 8), torch.nan, dtype=dtype)
        strips.linear(x, weight, out[:, :n], splits, _scratch())
        expected, tolerance = reference_linear.linear(x, weight), SUMS if dtype == torch.float32 else ROUNDED
        torch.testing.assert_close(out[:, :n].float(), expected, rtol=tolerance, atol=SUMS, equal_nan=True)
        assert bool(out[:, n:].isnan().all())


@pytest.mark.parametrize(
    ("count", "choices", "shared", "hidden", "inner", "splits", "counts"),
    [
        (40, 2, True, 256, 256, 2, (3, 4)),
        (12, 2, True, 256, 128, 2, (5, 9, 16)),
        pytest.param(20, 18, False, 256, 128, 1, (1, 2), id="more experts than warps"),
    ],
)
def test_experts(
    count: int, choices: int, shared: bool, hidden: int, inner: int, splits: int, counts: tuple[int, ...]
) -> None:
    """The second row chooses what the first does; of two or four rows it is NaN."""
    gate_up, down = scaled_matrix(count, 2 * inner, hidden, seed=1), scaled_matrix(count, hidden, inner, seed=2)
    common = (scaled_matrix(2 * inner, hidden, seed=3), scaled_matrix(hidden, inner, seed=4)) if shared else None
    for rows in counts:
        x, weights = _rows(rows, hidden), normal(rows, choices, seed=6).abs()
        chosen = normal(rows, count, seed=rows).argsort(1)[:, :choices].sort(1).values.int()
        chosen[-1, -1] = count - 1
        if rows > 1:
            chosen[1] = chosen[0]
        slots = int(shared) + min(count, rows * choices)
        gated = torch.full((slots, rows, inner), torch.nan, dtype=torch.bfloat16)
        out = torch.full((rows, hidden), torch.nan)
        strips.experts(x, chosen, weights, gate_up, down, common, out, gated, splits, _scratch())
        expected = reference_experts.experts(x, chosen, weights, gate_up, down, common)
        torch.testing.assert_close(out, expected, rtol=GATED, atol=GATED, equal_nan=True)
