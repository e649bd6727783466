"""Products of many rows by panels as programs of the host (`tests.kernels.host_program`), launched by `panels` itself.

The sanitizers see what runs past the ends of tensors and of shared memory, and what is read before it was copied; the
words of ``on_host``, a barrier that nobody reaches, and operands that change before a product of them is done.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from compute.kernels import panels, reference_linear
from compute.kernels.reference_norms import silu_mul
from tests.conftest import CUDA
from tests.kernels.host_program import host_kernel, needs_compiler, programs
from tests.kernels.products import normal, scaled_matrix

SUMS = 1e-5
"""What values of about 1 may differ by: sums are float32, in another order than the reference's."""
ROUNDED = 2**-7
"""They may be rounded to the next bfloat16."""

pytestmark = [
    needs_compiler,
    pytest.mark.skipif(CUDA, reason="here Triton fills panels on the GPU, and a program of the host cannot read those"),
    pytest.mark.usefixtures("_on_host"),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    return programs(tmp_path_factory.mktemp("panels"))


@pytest.fixture(params=[0, 1])
def _on_host(request: pytest.FixtureRequest, program: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Has `panels` launch programs of two clusters, in two orders of the threads."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(panels, "_blocks", lambda _: 4)
    monkeypatch.setattr(panels, "_compiled", panels._compiled.__wrapped__)
    monkeypatch.setattr(panels, "CudaKernel", host_kernel(program, request.param))


@pytest.mark.parametrize(
    ("rows", "n", "k", "splits", "dtype"),
    [
        (270, 390, 384, 2, torch.float32),  # three tiles of rows and four of the weight, of which clusters have two
        (70, 128, 640, 3, torch.bfloat16),  # a tile of 96
        (165, 258, 256, 1, torch.bfloat16),
    ],
)
def test_products(rows: int, n: int, k: int, splits: int, dtype: torch.dtype) -> None:
    """Rows of a wider tensor, into rows of one, with NaN around both; and a row of NaN, which touches no other."""
    weight = scaled_matrix(n, k, seed=1)
    x = torch.full((rows, k + 16), torch.nan, dtype=torch.bfloat16)[:, 8:-8]
    x.copy_(normal(rows, k, seed=rows))
    x[1] = torch.nan
    out = torch.full((rows, n + 8), torch.nan, dtype=dtype)
    panels.linear(x, weight, out[:, :n], splits)
    expected, tolerance = reference_linear.linear(x, weight), SUMS if dtype == torch.float32 else ROUNDED
    torch.testing.assert_close(out[:, :n].float(), expected, rtol=tolerance, atol=SUMS, equal_nan=True)
    assert bool(out[:, n:].isnan().all())


@pytest.mark.parametrize(("counts", "each"), [((131, 0, 5, 3, 70), 128), ((0, 0, 1, 200, 0), 90), ((70, 3, 5), 10)])
def test_experts(counts: tuple[int, ...], each: int) -> None:
    """Of sorted pairs, some with none, some whose first row shares eight rows with another's; the last is shared."""
    hidden, inner, places = 384, 128, 2
    count, pairs = len(counts) - 1, sum(counts)
    gate_up, down = scaled_matrix(count, 2 * inner, hidden, seed=1), scaled_matrix(count, hidden, inner, seed=2)
    shared_gate_up, shared_down = scaled_matrix(2 * inner, hidden, seed=3), scaled_matrix(hidden, inner, seed=4)
    x = normal(-(-pairs // places), hidden, seed=5).bfloat16()
    x[2] = torch.nan
    order = torch.randperm(pairs, generator=torch.Generator().manual_seed(6)).int()
    ends = torch.tensor(counts).cumsum(0).int()
    rows = torch.full((panels.panel_rows(pairs) * hidden,), torch.nan, dtype=torch.bfloat16)
    gated = torch.full((panels.panel_rows(pairs) * inner,), torch.nan, dtype=torch.bfloat16)
    outputs = torch.full((pairs, hidden), torch.nan)
    panels.fill_panels(x, rows, order, places)
    panels.gate_up(rows, ends, gate_up, shared_gate_up, gated, pairs, each, 2)
    panels.down(gated, order, ends, down, shared_down, outputs, each, 1)
    for expert, of in enumerate(order.long().split(counts)):
        first, second = (shared_gate_up, shared_down) if expert == count else (gate_up[expert], down[expert])
        if not len(of):
            continue
        between = silu_mul(reference_linear.linear(x[of // places], first)).bfloat16()
        expected = reference_linear.linear(between, second)
        torch.testing.assert_close(outputs[of], expected, rtol=1e-2, atol=1e-2, equal_nan=True)
