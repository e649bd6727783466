"""Norms and the gate against their reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compute.kernels import reference_norms
from compute.kernels.norms import add_rms_norm, rms_norm, silu_mul
from protocol.errors import InvalidValue
from tests.kernels.pages import DEVICE

EPS = 1e-5
ROUNDED_ERROR = 2**-7
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")  # by the interpreter's numpy


def _normal(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("columns", [6144, 200])
@pytest.mark.parametrize("delta_dtype", [None, torch.bfloat16, torch.float32], ids=str)
def test_add_rms_norm(columns: int, delta_dtype: torch.dtype | None) -> None:
    residual, weight = _normal(5, columns), _normal(columns, seed=2)
    residual[1] = 0.0
    residual[2] *= 1e15
    delta = None if delta_dtype is None else _normal(5, columns, seed=3, dtype=delta_dtype)
    if delta is not None:
        delta[1] = 0.0
    total, expected = reference_norms.add_rms_norm(residual, delta, weight, EPS)
    before = residual.clone()
    normed = torch.full((5, columns), torch.nan, device=DEVICE)
    add_rms_norm(residual, delta, weight, EPS, normed, kernels="triton")
    assert torch.equal(residual, total)
    torch.testing.assert_close(normed, expected, rtol=5e-6, atol=1e-6)
    for row in range(5):
        one = slice(row, row + 1)
        alone = torch.empty(1, columns, device=DEVICE)
        own = None if delta is None else delta[one]
        add_rms_norm(before[one], own, weight, EPS, alone, kernels="triton")
        assert torch.equal(alone[0], normed[row])
    short = torch.empty(5, columns, dtype=torch.bfloat16, device=DEVICE)
    add_rms_norm(residual, None, weight, EPS, short, kernels="triton")
    torch.testing.assert_close(short.float(), expected, rtol=ROUNDED_ERROR, atol=0.0)


def test_rms_norm_of_part_of_a_row() -> None:
    wide, weight = _normal(3, 640, dtype=torch.bfloat16), _normal(512, seed=2)
    out = torch.full((3, 640), torch.nan, device=DEVICE)
    rms_norm(wide[:, 64:576], weight, EPS, out[:, :512], kernels="triton")
    _, expected = reference_norms.add_rms_norm(wide[:, 64:576].float(), None, weight, EPS)
    torch.testing.assert_close(out[:, :512], expected, rtol=5e-6, atol=1e-6)
    assert bool(out[:, 512:].isnan().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_silu_mul(dtype: torch.dtype) -> None:
    gate_up = _normal(3, 2600, dtype=dtype)
    gate_up[0, :4] = torch.tensor([0.0, -200.0, 90.0, -1e-30])
    out = torch.empty(3, 1300, dtype=torch.bfloat16, device=DEVICE)
    silu_mul(gate_up, out, kernels="triton")
    expected = reference_norms.silu_mul(gate_up)
    torch.testing.assert_close(out.float(), expected, rtol=ROUNDED_ERROR, atol=1e-36)


def test_the_reference_writes_where_it_is_told() -> None:
    residual, delta, weight = _normal(2, 64), _normal(2, 64, seed=2, dtype=torch.bfloat16), _normal(64, seed=3)
    total, expected = reference_norms.add_rms_norm(residual, delta, weight, EPS)
    normed = torch.empty(2, 64, device=DEVICE)
    add_rms_norm(residual, delta, weight, EPS, normed, kernels="reference")
    assert torch.equal(residual, total)
    assert torch.equal(normed, expected)


def test_what_does_not_fit_is_refused() -> None:
    residual, weight = _normal(2, 64), _normal(64)
    normed = torch.empty(2, 64, device=DEVICE)
    with pytest.raises(InvalidValue, match="delta"):
        add_rms_norm(residual, residual[:1], weight, EPS, normed)
    with pytest.raises(InvalidValue, match="norm's weight"):
        rms_norm(residual, weight[:32], EPS, normed)
    with pytest.raises(InvalidValue, match="residual"):
        add_rms_norm(residual.bfloat16(), None, weight, EPS, normed)
    with pytest.raises(InvalidValue, match="out"):
        silu_mul(residual, normed.bfloat16())
