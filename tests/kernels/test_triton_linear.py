"""Products against exact arithmetic, in any number of rows, and what they may neither read nor write."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compute.kernels import reference_linear, triton_linear
from compute.kernels.linear import Workspace, head_linear, linear
from compute.kernels.matrix import Matrix
from protocol.errors import InvalidValue
from tests.conftest import CUDA
from tests.kernels.pages import DEVICE

RELATIVE_ERROR = 4e-6
"""Bound on the norm of the error against float64, relative to that of the output: a matrix unit's float32 sums."""
ROUNDED_ERROR = 2**-7
"""The same of an output in bfloat16."""
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered")  # by the interpreter's numpy
KINDS = ["bfloat16", "e4m3"]


def _workspace() -> Workspace:
    workspace = Workspace(300, DEVICE, kernels="triton", nbytes=4 << 20)
    workspace.scratch.memory.fill_(torch.nan)
    return workspace


def _normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _matrix(kind: str, *shape: int, seed: int = 0) -> Matrix:
    values = _normal(*shape, seed=seed)
    made = reference_linear.quantise(values) if kind == "e4m3" else Matrix(values.bfloat16())
    return Matrix(made.values.to(DEVICE), None if made.scales is None else made.scales.to(DEVICE))


def _rows(*shape: int, seed: int = 1) -> Tensor:
    return _normal(*shape, seed=seed).bfloat16().to(DEVICE)


def _product(x: Tensor, weight: Matrix, dtype: torch.dtype = torch.float32) -> Tensor:
    """Into the middle of a buffer of NaN, which must stay NaN."""
    workspace, n = _workspace(), weight.shape[0]
    around = torch.full((len(x) + 2, n + 8), torch.nan, dtype=dtype, device=DEVICE)
    out = around[1:-1, :n]
    linear(x, weight, out, workspace)
    assert not bool(workspace.scratch.tickets.any())
    result = out.clone()
    out.fill_(torch.nan)
    assert bool(around.isnan().all())
    return result


def _error(actual: Tensor, x: Tensor, weight: Matrix) -> float:
    exact = x.double() @ reference_linear.dequantise(weight).double().T
    return float((actual.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k", "rows"), [(70, 256, 3), (128, 1536, 1), (200, 192, 20), (64, 80, 70)])
def test_the_error_stays_within_its_bound(kind: str, n: int, k: int, rows: int) -> None:
    weight, x = _matrix(kind, n, k), _rows(rows, k)
    assert _error(_product(x, weight), x, weight) < RELATIVE_ERROR
    assert _error(_product(x, weight, torch.bfloat16), x, weight) < ROUNDED_ERROR


@pytest.mark.parametrize("kind", KINDS)
def test_a_unit_row_gives_a_column_exactly(kind: str) -> None:
    """Every finite byte of e4m3, and bfloat16 over most of its range; each column comes from its own place."""
    n, k = 254, 128
    if kind == "e4m3":
        codes = torch.arange(256, dtype=torch.uint8)
        codes = codes[(codes & 0x7F) != 0x7F]
        values = codes[(torch.arange(n)[:, None] + torch.arange(k)) % n].contiguous().view(torch.float8_e4m3fn)
        weight = Matrix(values.to(DEVICE), torch.tensor([[0.5], [3.0]], device=DEVICE))
    else:
        exponents = torch.arange(n * k).view(n, k) % 200 - 100
        weight = Matrix((_normal(n, k) * 2.0**exponents).bfloat16().to(DEVICE))
    unit = torch.eye(k, dtype=torch.bfloat16, device=DEVICE)
    expected = reference_linear.dequantise(weight).T
    for rows in (slice(0, 16), slice(112, 128), slice(20, 90)):
        assert torch.equal(_product(unit[rows], weight), expected[rows])


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_alone_in_a_batch_and_at_any_place(kind: str) -> None:
    """Also through the tiles of many rows, where the matrix instruction is another; the interpreter has only one."""
    weight = _matrix(kind, 144, 1024)
    x = _rows(257 if CUDA else 16, 1024)
    together = _product(x, weight)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    assert torch.equal(_product(x[order], weight), together[order])
    for rows in (1, 4, 16, 17, 64, 65, 256):
        if rows <= len(x):
            assert torch.equal(_product(x[-rows:], weight), together[-rows:]), rows


@pytest.mark.parametrize("nbytes", [4 << 20, 1 << 16])
def test_many_rows_of_a_narrow_weight(nbytes: int) -> None:
    """Whose splits have programs of their own, or not, where the scratch has no room for them."""
    weight = Matrix(_normal(70, 1100).round().bfloat16().to(DEVICE))
    x, workspace = _rows(130, 1100).round(), Workspace(130, DEVICE, kernels="triton", nbytes=nbytes)
    out = torch.full((130, 70), torch.nan, device=DEVICE)
    for _ in range(2):
        linear(x, weight, out, workspace)
        assert torch.equal(out, (x.double() @ weight.values.double().T).float())
        assert not bool(workspace.scratch.tickets.any())


def test_a_row_of_heads_alone_and_among_many() -> None:
    weight, x = _matrix("bfloat16", 2, 144, 200), _rows(150, 2, 200).float()
    if not CUDA:  # the interpreter's products depend on the tile
        x, weight = x.round(), Matrix(weight.values.float().round().bfloat16())
    together, alone = torch.empty(150, 2, 144, device=DEVICE), torch.empty(5, 2, 144, device=DEVICE)
    head_linear(x, weight, together, _workspace())
    head_linear(x[-5:], weight, alone, _workspace())
    assert torch.equal(alone, together[-5:])


def test_operand_order() -> None:
    """Blocks of 128 columns, each permuted alike: more of them than one program takes, of a strided view."""
    wide = torch.arange(3 * 2 * 2432, device=DEVICE).view(3, 2, 2432).remainder(251).float()
    x = wide[..., 64:-64]
    p = torch.arange(128, device=DEVICE)
    column = p // 64 * 64 + p // 2 % 4 * 16 + p // 16 % 4 * 4 + p // 8 % 2 * 2 + p % 2
    expected = x.unflatten(2, (-1, 128))[..., column].flatten(2).bfloat16()
    assert torch.equal(triton_linear.in_operand_order(x), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_touch_each_other(kind: str) -> None:
    """NaN, infinity and the largest numbers in one row; NaN around the rows that are given."""
    weight = _matrix(kind, 64, 384)
    x = _rows(5, 384)
    expected = _product(x, weight)
    around = torch.full((9, 512), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    around[2:7, 64:448] = x
    assert torch.equal(_product(around[2:7, 64:448], weight), expected)
    for value in (torch.nan, torch.inf, 3e38):
        x[2] = value
        others = [0, 1, 3, 4]
        assert torch.equal(_product(x, weight)[others], expected[others])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "n", "k"), [(18, 80, 192), (150, 80, 200), (150, 260, 64)])
def test_heads(rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    """Of a strided view, float32 ones rounded first; many rows, in several tiles to a program."""
    heads = 3
    weight = _matrix("bfloat16", heads, n, k)
    wide = _normal(rows, heads, 256).to(DEVICE, dtype)
    wide[..., k:] = torch.nan
    out = torch.full((rows, heads, n + 16), torch.nan, device=DEVICE)
    head_linear(wide[..., :k], weight, out[..., :n], _workspace())
    assert bool(out[..., n:].isnan().all())
    for head in range(heads):
        x = wide[:, head, :k].bfloat16()
        bound = RELATIVE_ERROR if CUDA or dtype == torch.bfloat16 else ROUNDED_ERROR  # the interpreter truncates
        assert _error(out[:, head, :n], x, weight[head]) < bound


def test_no_rows_and_a_weight_of_one_row() -> None:
    weight = _matrix("bfloat16", 1, 128)
    assert _product(_rows(0, 128), weight).shape == (0, 1)
    x = _rows(2, 128)
    assert _error(_product(x, weight), x, weight) < RELATIVE_ERROR


def test_the_reference_gives_a_row_the_same_bits() -> None:
    weight, workspace = _matrix("e4m3", 96, 256), Workspace(40, DEVICE, kernels="reference")
    x = _rows(37, 256)
    together = torch.empty(37, 96, device=DEVICE)
    linear(x, weight, together, workspace)
    for rows in (1, 4, 16):
        out = torch.empty(rows, 96, device=DEVICE)
        linear(x[-rows:], weight, out, workspace)
        assert torch.equal(out, together[-rows:])


def test_what_does_not_fit_is_refused() -> None:
    workspace, weight = _workspace(), _matrix("bfloat16", 64, 128)
    out = torch.empty(2, 64, device=DEVICE)
    with pytest.raises(InvalidValue, match="x is"):
        linear(_rows(2, 64), weight, out, workspace)
    with pytest.raises(InvalidValue, match="x is"):
        linear(_rows(128, 2).T, weight, out, workspace)
    with pytest.raises(InvalidValue, match="out is"):
        linear(_rows(2, 128), weight, out.double(), workspace)
    with pytest.raises(InvalidValue, match="columns of an e4m3 weight"):
        linear(_rows(2, 72), _matrix("e4m3", 64, 72), out, workspace)
    small = Workspace(16, DEVICE, kernels="triton", nbytes=1 << 10)
    with pytest.raises(InvalidValue, match="scratch"):
        linear(_rows(2, 1024), _matrix("bfloat16", 64, 1024), out, small)


@pytest.mark.parametrize(
    ("values", "scales", "message"),
    [
        (torch.zeros(128), None, "weight is"),
        (torch.zeros(4, 4), None, "dtype of a weight"),
        (torch.zeros(4, 4, dtype=torch.bfloat16), torch.ones(1, 1), "scales of a torch.bfloat16 weight"),
        (torch.zeros(129, 4).to(torch.float8_e4m3fn), None, "scales of a torch.float8_e4m3fn weight"),
        (torch.zeros(129, 4).to(torch.float8_e4m3fn), torch.ones(1, 1), "scales of a weight"),
        (torch.zeros(4, 8, dtype=torch.bfloat16).T, None, "weight is"),
    ],
)
def test_a_weight_must_be_one(values: Tensor, scales: Tensor | None, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        Matrix(values, scales)


def test_quantised_blocks_keep_their_largest_value() -> None:
    values = _normal(130, 260) * torch.logspace(-20, 20, 260)
    values[:128, :128] = 0
    weight = reference_linear.quantise(values)
    found = reference_linear.dequantise(weight)
    assert bool((found[:128, :128] == 0).all())
    block, given = found[128:, 128:256], values[128:, 128:256]
    assert float(block.abs().max()) == pytest.approx(float(given.abs().max()), rel=1e-6)
    assert float((block - given).abs().max()) <= float(given.abs().max()) / 28 + 1e-30  # half a step of the top binade
