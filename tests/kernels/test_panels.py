"""Products of many rows by panels: the bits of the Triton kernels, in every case that is theirs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compute.kernels import panels, reference_linear, triton_linear
from compute.kernels.experts import Experts, experts
from compute.kernels.linear import Workspace, linear
from compute.kernels.matrix import Matrix
from compute.kernels.triton_products import Tiling
from tests.kernels.pages import DEVICE
from tests.kernels.products import matrix, needs_hopper, normal

AGAIN = 5
"""Runs that must all give the same: warp groups go their own ways."""


def _by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panels, "fits_panels", lambda *_: False)


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("n", "k", "splits"), [(200, 1536, 1), (2, 128, 1), (390, 1024, 3), (1000, 2048, 11), (640, 6144, 4)]
)
def test_products(monkeypatch: pytest.MonkeyPatch, n: int, k: int, splits: int, dtype: torch.dtype) -> None:
    """Rows of a wider tensor, into rows of one; NaN around both; and a row of NaN, which touches no other."""
    monkeypatch.setattr(triton_linear, "tiling", lambda *_: Tiling(splits, 128, 8, 128, 4))
    weight, workspace = matrix(n, k, seed=1), Workspace(8, DEVICE, kernels="triton")
    for rows in (65, 128, 161, 1030):
        x = torch.full((rows + 2, k + 16), torch.nan, dtype=torch.bfloat16, device=DEVICE)[1:-1, 8:-8]
        x.copy_(normal(rows, k, seed=rows))

        def run(x: Tensor) -> Tensor:
            out = torch.full((len(x) + 2, n + 8), torch.nan, dtype=dtype, device=DEVICE)
            assert panels.fits_output(out[1:-1, :n])
            linear(x, weight, out[1:-1, :n], workspace)
            result = out[1:-1, :n].clone()
            out[1:-1, :n] = torch.nan
            assert bool(out.isnan().all())
            return result

        results = [run(x) for _ in range(AGAIN)]
        poisoned = x.clone()
        poisoned[1] = torch.nan
        others = run(poisoned)
        with monkeypatch.context() as patch:
            _by_triton(patch)
            expected = run(x)
        assert all(torch.equal(result, expected) for result in results)
        assert bool(others[1].isnan().all())
        others[1] = expected[1]
        assert torch.equal(others, expected)


@needs_hopper
@pytest.mark.parametrize(
    ("count", "choices", "shared", "rows"),
    [(8, 8, True, 300), (40, 3, False, 65), (320, 2, True, 200), (3, 1, True, 1000), (321, 2, True, 70)],
)
def test_experts(monkeypatch: pytest.MonkeyPatch, count: int, choices: int, shared: bool, rows: int) -> None:
    """All of them, some of many, with and without a shared one; more than there is room for go another way."""
    hidden, inner = 640, 256
    own = Experts(matrix(count, 2 * inner, hidden, seed=1), matrix(count, hidden, inner, seed=2))
    common = (matrix(2 * inner, hidden, seed=3), matrix(hidden, inner, seed=4)) if shared else None
    workspace = Workspace(8, DEVICE, kernels="triton", nbytes=32 << 20)
    x = normal(rows, hidden, seed=5).bfloat16().to(DEVICE)
    order = torch.rand((rows, count), generator=torch.Generator().manual_seed(rows)).argsort(1)
    chosen = order[:, :choices].sort(1).values.int().contiguous().to(DEVICE)
    weights = normal(rows, choices, seed=7).abs().to(DEVICE)

    def run(x: Tensor) -> Tensor:
        workspace.scratch.memory.fill_(torch.nan)
        out = torch.full((len(x), hidden), torch.nan, device=DEVICE)
        experts(x, chosen, weights, own, common, out, workspace)
        return out

    results = [run(x) for _ in range(AGAIN)]
    poisoned = x.clone()
    poisoned[0] = torch.nan
    others = run(poisoned)
    with monkeypatch.context() as patch:
        _by_triton(patch)
        expected = run(x)
    assert bool(expected.isfinite().all())
    assert all(torch.equal(result, expected) for result in results)
    assert bool(others[0].isnan().all())
    assert torch.equal(others[1:], expected[1:])


@needs_hopper
def test_what_does_not_fit_goes_another_way() -> None:
    """K that is no whole number of blocks, an odd number of weight rows, outputs that are not aligned, bfloat16."""
    weight = matrix(64, 256, seed=1)
    assert panels.fits_panels(weight)
    assert not panels.fits_panels(matrix(64, 192, seed=1))
    assert not panels.fits_panels(matrix(63, 256, seed=1))
    assert not panels.fits_panels(Matrix(normal(64, 256, seed=1).bfloat16().to(DEVICE)))
    out = torch.empty(70, 66, device=DEVICE)
    assert panels.fits_output(out[:, 2:])
    assert not panels.fits_output(out[:, 1:65])
    assert not panels.fits_output(torch.empty(70, 65, device=DEVICE))
    x = normal(70, 256, seed=2).bfloat16().to(DEVICE)
    linear(x, weight, out[:, 1:65], Workspace(8, DEVICE, kernels="triton"))
    exact = x.double() @ reference_linear.dequantise(weight).double().T
    assert float((out[:, 1:65].double() - exact).norm() / exact.norm()) < 1e-5
