"""The mixture of experts against its reference, rows in any company, and the router's choice."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from compute.kernels import reference_experts, reference_linear
from compute.kernels.experts import Experts, experts, route
from compute.kernels.linear import Workspace
from compute.kernels.matrix import Matrix
from compute.kernels.triton_many_experts import sorted_pairs
from protocol.errors import InvalidValue
from protocol.model import DEEPSEEK_V3_2, DEMO, GLM_5_3, ModelConfig
from tests.conftest import CUDA
from tests.kernels.pages import DEVICE

RELATIVE_ERROR = 2e-3 if CUDA else 8e-3
"""Bound on the norm of the difference from the reference: a few values between the products round to the other side.
The interpreter truncates to bfloat16."""
HIDDEN, INNER = 128, 128
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered")  # by the interpreter's numpy


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _matrix(kind: str, *shape: int, seed: int) -> Matrix:
    values = _normal(*shape, seed=seed) * 0.1
    made = reference_linear.quantise(values) if kind == "e4m3" else Matrix(values.bfloat16())
    return Matrix(made.values.to(DEVICE), None if made.scales is None else made.scales.to(DEVICE))


class World:
    """Experts, and rows that chose some of them."""

    def __init__(
        self, kind: str, count: int, choices: int, rows: int, *, inner: int = INNER, shared: bool = True
    ) -> None:
        self.experts = Experts(
            _matrix(kind, count, 2 * inner, HIDDEN, seed=1), _matrix(kind, count, HIDDEN, inner, seed=2)
        )
        self.shared = (
            (_matrix(kind, 2 * inner, HIDDEN, seed=3), _matrix(kind, HIDDEN, inner, seed=4)) if shared else None
        )
        self.x = _normal(rows, HIDDEN, seed=5).bfloat16().to(DEVICE)
        order = torch.rand((rows, count), generator=torch.Generator().manual_seed(6)).argsort(1)
        self.chosen = order[:, :choices].sort(1).values.int().to(DEVICE)
        self.weights = _normal(rows, choices, seed=7).abs().to(DEVICE)
        self.workspace = Workspace(rows, DEVICE, kernels="triton", nbytes=2 << 20)

    def run(self, rows: Tensor) -> Tensor:
        self.workspace.scratch.memory.fill_(torch.nan)
        out = torch.full((len(rows), HIDDEN), torch.nan, device=DEVICE)
        chosen, weights = self.chosen[rows], self.weights[rows]
        experts(self.x[rows], chosen, weights, self.experts, self.shared, out, self.workspace)
        assert not bool(self.workspace.scratch.tickets.any())
        return out

    def reference(self) -> Tensor:
        gate_up, down = self.experts.gate_up, self.experts.down
        return reference_experts.experts(self.x, self.chosen, self.weights, gate_up, down, self.shared)


def _same(actual: Tensor, expected: Tensor) -> None:
    for row, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert float((ours - theirs).norm() / theirs.norm()) < RELATIVE_ERROR, row


@pytest.mark.parametrize(
    ("kind", "count", "choices", "rows", "shared"),
    [("e4m3", 4, 4, 1, True), ("bfloat16", 24, 2, 3, True), ("e4m3", 24, 3, 2, False), ("e4m3", 3, 2, 66, True)],
)
def test_as_the_reference(kind: str, count: int, choices: int, rows: int, shared: bool) -> None:
    """All experts used; a few of many; without a shared one; more rows than the launch of few takes."""
    world = World(kind, count, choices, rows, shared=shared)
    _same(world.run(torch.arange(rows)), world.reference())


@pytest.mark.parametrize(("kind", "inner"), [("bfloat16", 96), ("e4m3", 192)])
def test_sizes_that_fill_no_tile(kind: str, inner: int) -> None:
    world = World(kind, 3, 2, 3, inner=inner)
    _same(world.run(torch.arange(3)), world.reference())


@pytest.mark.parametrize("kind", ["bfloat16", "e4m3"])
def test_a_row_alone_in_a_batch_and_at_any_place(kind: str) -> None:
    """Also among many, which other kernels compute; the interpreter's products depend on the tile."""
    rows = 150 if CUDA else 16
    world = World(kind, 6 if CUDA else 3, 2, rows)
    together = world.run(torch.arange(rows))
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(8))
    assert torch.equal(world.run(order), together[order.to(DEVICE)])
    for few in (1, 4, 16, 17, 64, 65):
        if few <= rows:
            assert torch.equal(world.run(torch.arange(rows - few, rows)), together[-few:]), few


def test_a_row_of_nan_touches_no_other() -> None:
    world = World("e4m3", 3, 2, 4)
    expected = world.run(torch.arange(4))
    world.x[1] = torch.nan
    actual = world.run(torch.arange(4))
    assert torch.equal(actual[[0, 2, 3]], expected[[0, 2, 3]])
    assert bool(actual[1].isnan().all())


def test_few_rows_that_the_scratch_has_no_room_for() -> None:
    """They go the way of many."""
    world = World("bfloat16", 3, 2, 3)
    expected = world.run(torch.arange(3))
    world.workspace = Workspace(3, DEVICE, kernels="triton", nbytes=3 * 3 * (INNER // 2 + HIDDEN) * 4)
    actual = world.run(torch.arange(3))
    if CUDA:
        assert torch.equal(actual, expected)
    _same(actual, expected)


def test_many_rows_in_parts_of_a_small_scratch() -> None:
    world = World("bfloat16", 3, 2, 70)
    expected = world.run(torch.arange(70))
    world.workspace = Workspace(70, DEVICE, kernels="triton", nbytes=40 * 3 * (INNER // 2 + HIDDEN) * 4)
    _same(world.run(torch.arange(70)), expected)
    world.workspace = Workspace(70, DEVICE, kernels="triton", nbytes=1 << 10)
    with pytest.raises(InvalidValue, match="for one row"):
        world.run(torch.arange(70))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("rows", "choices", "count"), [(1, 1, 1), (66, 3, 40), (170, 8, 8), (700, 6, 7)])
def test_pairs_are_sorted_by_expert_then_by_number(rows: int, choices: int, count: int, shared: bool) -> None:
    """Of less than one part of the choices, and of several; experts that nobody chose."""
    order = torch.rand((rows, count), generator=torch.Generator().manual_seed(rows)).argsort(1)
    chosen = order[:, :choices].sort(1).values.int()
    numbers = torch.cat((chosen.new_full((rows, 1), count), chosen), 1) if shared else chosen
    order, ends = sorted_pairs(chosen.to(DEVICE), count, shared)
    assert torch.equal(order.cpu(), numbers.flatten().argsort(stable=True).int())
    assert torch.equal(ends.cpu(), numbers.flatten().bincount(minlength=count + 1).cumsum(0).int())


def test_what_does_not_fit_is_refused() -> None:
    world = World("bfloat16", 3, 2, 2)
    with pytest.raises(InvalidValue, match="experts' down"):
        Experts(world.experts.gate_up, world.experts.gate_up)
    world.chosen = world.chosen.long()
    with pytest.raises(InvalidValue, match="chosen"):
        world.run(torch.arange(2))
    world = World("bfloat16", 3, 2, 2)
    world.shared = (_matrix("bfloat16", 4 * INNER, HIDDEN, seed=1), _matrix("bfloat16", HIDDEN, 2 * INNER, seed=1))
    with pytest.raises(InvalidValue, match="shared expert's gate_up"):
        world.run(torch.arange(2))
    with pytest.raises(InvalidValue, match="inner size of e4m3 experts"):
        World("e4m3", 3, 2, 2, inner=96).run(torch.arange(2))


def _logits(rows: int, count: int) -> tuple[Tensor, Tensor]:
    """With many equal scores, far ones, and a bias that changes the order."""
    logits, bias = _normal(rows, count, seed=1) * 3, _normal(count, seed=2) * 0.3
    logits[:, ::3], bias[::3] = logits[:, :1], 0.0
    logits[0], logits[1, 1::2] = 0.0, -200.0
    return logits.to(DEVICE), bias.to(DEVICE)


@pytest.mark.parametrize(
    ("config", "count"),
    [(DEMO, 8), (GLM_5_3, 256), (GLM_5_3, 9), (DEEPSEEK_V3_2, 256), (dataclasses.replace(DEMO, n_group=2), 8)],
)
def test_the_routers_choice(config: ModelConfig, count: int) -> None:
    logits, bias = _logits(5, count)
    chosen, weights = route(logits, bias, config, kernels="triton")
    numbers, shares = reference_experts.route(logits, bias, config)
    assert torch.equal(chosen, numbers)
    torch.testing.assert_close(weights, shares, rtol=5e-6, atol=0.0)
    out = (torch.empty_like(chosen), torch.empty_like(weights))
    for row in range(5):
        one = slice(row, row + 1)
        assert route(logits[one], bias, config, (out[0][one], out[1][one]), kernels="triton")[0].shape[0] == 1
    assert torch.equal(out[0], chosen)
    assert torch.equal(out[1], weights)


def test_what_cannot_be_routed_is_refused() -> None:
    logits, bias = _logits(2, 8)
    with pytest.raises(InvalidValue, match="logits and bias"):
        route(logits, bias[:4], DEMO)
    with pytest.raises(InvalidValue, match="experts is"):
        route(logits[:, :1].contiguous(), bias[:1].contiguous(), DEMO)
