"""Products of few rows by strips: the bits of the Triton kernels, in every case that is theirs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compute.kernels import reference_linear, strips, triton_linear
from compute.kernels.experts import Experts, experts
from compute.kernels.linear import Workspace, linear
from compute.kernels.matrix import Matrix
from compute.kernels.triton_products import Tiling
from tests.kernels.pages import DEVICE
from tests.kernels.products import matrix, needs_hopper, normal

ROWS = (1, 2, 3, 4, 5, 8, 9, 13, 16)
AGAIN = 20
"""Runs that must all give the same: warps go their own ways."""


def _by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strips, "fits_strips", lambda *_: False)


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("n", "k", "splits"),
    [(200, 1536, 1), (16, 128, 1), (17, 1024, 3), (1000, 2048, 11), (64, 2048, 16), (640, 6144, 4)],
)
def test_products(monkeypatch: pytest.MonkeyPatch, n: int, k: int, splits: int, dtype: torch.dtype) -> None:
    """Rows of a wider tensor, into rows of one; NaN around both, and in the rows that are not given."""
    monkeypatch.setattr(triton_linear, "tiling", lambda *_: Tiling(splits, 128, 8, 128, 4))
    weight, workspace = matrix(n, k, seed=1), Workspace(16, DEVICE, kernels="triton")
    wide = torch.full((18, k + 16), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    for rows in ROWS:
        x = wide[1 : 1 + rows, 8:-8]
        x.copy_(normal(rows, k, seed=rows))
        assert strips.fits_strips(x, weight, 4)
        results = []
        for _ in range(AGAIN):
            out = torch.full((rows + 2, n + 8), torch.nan, dtype=dtype, device=DEVICE)
            linear(x, weight, out[1:-1, :n], workspace)
            results.append(out[1:-1, :n].clone())
            out[1:-1, :n] = torch.nan
            assert bool(out.isnan().all())
            assert not bool(workspace.scratch.tickets.any())
        with monkeypatch.context() as patch:
            _by_triton(patch)
            expected = torch.empty((rows, n), dtype=dtype, device=DEVICE)
            linear(x, weight, expected, workspace)
        assert all(torch.equal(result, expected) for result in results)


@needs_hopper
@pytest.mark.parametrize(("count", "choices", "shared"), [(8, 8, True), (40, 3, True), (300, 2, False), (3, 1, True)])
def test_experts(monkeypatch: pytest.MonkeyPatch, count: int, choices: int, shared: bool) -> None:
    """All of them, some of many, with and without a shared one; and a row of NaN, which touches no other."""
    hidden, inner = 640, 256
    own = Experts(matrix(count, 2 * inner, hidden, seed=1), matrix(count, hidden, inner, seed=2))
    common = (matrix(2 * inner, hidden, seed=3), matrix(hidden, inner, seed=4)) if shared else None
    workspace = Workspace(16, DEVICE, kernels="triton", nbytes=64 << 20)
    for rows in ROWS:
        x = normal(rows, hidden, seed=5).bfloat16().to(DEVICE)
        order = torch.rand((rows, count), generator=torch.Generator().manual_seed(rows)).argsort(1)
        chosen = order[:, :choices].sort(1).values.int().contiguous().to(DEVICE)
        weights = normal(rows, choices, seed=7).abs().to(DEVICE)

        def run(x: Tensor, chosen: Tensor = chosen, weights: Tensor = weights) -> Tensor:
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
    """Rows that are not aligned, too many of them, K that is no whole number of blocks, weights that are not e4m3."""
    weight = matrix(64, 256, seed=1)
    x = normal(17, 264, seed=2).bfloat16().to(DEVICE)
    assert strips.fits_strips(x[:4, :256], weight, 4)
    assert not strips.fits_strips(x[:4, 1:257], weight, 4)
    assert not strips.fits_strips(x[:, :256], weight, 4)
    assert not strips.fits_strips(x[:4, :256], weight, 17)
    assert strips.fits_strips(x[:16, :256], weight, 17)
    assert not strips.fits_strips(x[:0, :256], weight, 4)
    assert not strips.fits_strips(x[:4, :192], matrix(64, 192, seed=1), 4)
    assert not strips.fits_strips(x[:4, :256], Matrix(normal(64, 256, seed=1).bfloat16().to(DEVICE)), 4)
    out = torch.empty(4, 64, device=DEVICE)
    linear(x[:4, 1:257], weight, out, Workspace(8, DEVICE, kernels="triton"))
    exact = x[:4, 1:257].double() @ reference_linear.dequantise(weight).double().T
    assert float((out.double() - exact).norm() / exact.norm()) < 1e-5
