"""Cases of the decoder's products at GLM-5.3's dimensions, its mixture of experts, and the small kernels between them.

A product of few rows reads its weight once: its floor is the weight's bytes over the memory's rate, and its goal a
multiple of that. Weights are random, and as many of them as the L2 cache cannot hold.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.harness import Case, Floors, Work
from compute.kernels import reference_experts, reference_linear
from compute.kernels.experts import Experts, experts, route
from compute.kernels.linear import Workspace, head_linear, linear
from compute.kernels.matrix import BLOCK, Matrix
from compute.kernels.norms import add_rms_norm, silu_mul
from protocol.model import GLM_5_3

GOALS = {"bf16": 1.15, "fp8": 1.35}
"""Times the floor."""
_DEVICE = "cuda"
_ROWS = (1, 4, 16)
_MANY_ROWS = 2048
_CACHE_BYTES = 96 << 20
"""The weights of all runs together are larger than this: more than the L2 cache."""
_RUNS = 24


@dataclass(frozen=True)
class _Shape:
    """[N, K], or one for each head. ``many``: also measured with many rows."""

    n: int
    k: int
    heads: int = 1
    kinds: tuple[str, ...] = ("bf16", "fp8")
    many: bool = False


_HIDDEN, _INNER, _HEADS = GLM_5_3.hidden_size, GLM_5_3.moe_intermediate_size, GLM_5_3.num_attention_heads
_SHAPES = {
    "from hidden": _Shape(2624, _HIDDEN),
    "from hidden with indexer": _Shape(2848, _HIDDEN),
    "from latent": _Shape(16384, 2048, many=True),
    "from latent with indexer": _Shape(20480, 2048),
    "key absorbed": _Shape(512, 192, _HEADS, kinds=("bf16",)),
    "value absorbed": _Shape(256, 512, _HEADS, kinds=("bf16",)),
    "output": _Shape(_HIDDEN, 16384, many=True),
    "dense gate and up": _Shape(2 * GLM_5_3.intermediate_size, _HIDDEN),
    "dense down": _Shape(_HIDDEN, GLM_5_3.intermediate_size),
    "router": _Shape(GLM_5_3.n_routed_experts, _HIDDEN, kinds=("bf16",)),
    "head": _Shape(GLM_5_3.vocab_size, _HIDDEN, kinds=("bf16",)),
}


def cases() -> list[Case]:
    return [*_product_cases(), *_expert_cases(), *_small_cases()]


def _product_cases() -> list[Case]:
    made = []
    for name, shape in _SHAPES.items():
        for kind in shape.kinds:
            for rows in (*_ROWS, *([_MANY_ROWS] if shape.many else [])):
                case = f"product, {name} [{shape.n}, {shape.k}], {kind}: {_counted(rows)}"
                made.append(Case(case, functools.partial(_product, shape, kind, rows)))
    return made


def _expert_cases() -> list[Case]:
    return [
        Case(f"experts, 8 and the shared one, {kind}: {_counted(rows)}", functools.partial(_experts, kind, rows))
        for kind in GOALS
        for rows in (*_ROWS, _MANY_ROWS)
    ]


def _small_cases() -> list[Case]:
    return [
        Case("residual added and normed: 1 row", _add_rms_norm),
        Case("router's choice of 8 from 256: 1 row", _route),
        Case("dense gate: 1 row", _silu_mul),
    ]


def _counted(rows: int) -> str:
    return f"{rows:,} row{'s' * (rows > 1)}"


def _matrix(kind: str, *shape: int) -> Matrix:
    if kind == "bf16":
        return Matrix(torch.randn(shape, dtype=torch.bfloat16, device=_DEVICE).mul_(shape[-1] ** -0.5))
    values = torch.randint(0, 256, shape, dtype=torch.uint8, device=_DEVICE)
    values[(values & 0x7F) == 0x7F] = 0  # NaN
    scales = torch.rand((*shape[:-2], -(-shape[-2] // BLOCK), -(-shape[-1] // BLOCK)), device=_DEVICE) * 1e-3
    return Matrix(values.view(torch.float8_e4m3fn), scales)


def _goal(kind: str, rows: int, floor: float) -> float | None:
    return floor * GOALS[kind] if rows < _MANY_ROWS else None


def _product(shape: _Shape, kind: str, rows: int, floors: Floors) -> Work:
    dimensions = (shape.heads, shape.n, shape.k) if shape.heads > 1 else (shape.n, shape.k)
    first = _matrix(kind, *dimensions)
    weights = [first, *(_matrix(kind, *dimensions) for _ in range(_CACHE_BYTES // first.nbytes))]
    x = torch.randn((rows, shape.heads, shape.k), device=_DEVICE).bfloat16()
    out = torch.empty((rows, shape.heads, shape.n), dtype=torch.bfloat16, device=_DEVICE)
    workspace = Workspace(rows, _DEVICE)

    def launch(run: int) -> None:
        weight = weights[run % len(weights)]
        if shape.heads > 1:
            head_linear(x, weight, out, workspace)
        else:
            linear(x[:, 0], weight, out[:, 0], workspace)

    def check() -> None:
        launch(0)
        some = (first[0] if shape.heads > 1 else first).values[:256]
        scales = None if first.scales is None else first.scales[:2]
        exact = x[:, 0].double() @ reference_linear.dequantise(Matrix(some, scales)).double().T
        _check("a product", out[:, 0, :256], exact)

    def library(run: int) -> Tensor:
        values = weights[run % len(weights)].values
        if shape.heads > 1:
            return torch.bmm(x.transpose(0, 1), values.transpose(1, 2))
        return torch.mm(x[:, 0], values.T, out=out[:, 0])

    torch.cuda.synchronize()  # launches will be on another stream
    floor = floors.read_us(first.nbytes)
    runs = _RUNS if rows < _MANY_ROWS else 4
    goal = _goal(kind, rows, floor)
    return Work(launch, runs, floor=floor, check=check, torch=library if kind == "bf16" else None, goal=goal)


def _experts(kind: str, rows: int, floors: Floors) -> Work:
    count = 8
    routed = Experts(_matrix(kind, count, 2 * _INNER, _HIDDEN), _matrix(kind, count, _HIDDEN, _INNER))
    shared = (_matrix(kind, 2 * _INNER, _HIDDEN), _matrix(kind, _HIDDEN, _INNER))
    x = torch.randn((rows, _HIDDEN), device=_DEVICE).bfloat16()
    chosen = torch.arange(count, dtype=torch.int32, device=_DEVICE).repeat(rows, 1)
    weights = torch.rand((rows, count), device=_DEVICE)
    out = torch.empty((rows, _HIDDEN), device=_DEVICE)
    workspace = Workspace(rows, _DEVICE)

    def launch(_: int) -> None:
        experts(x, chosen, weights, routed, shared, out, workspace)

    def check() -> None:
        launch(0)
        first = slice(4)
        expected = reference_experts.experts(
            x[first], chosen[first], weights[first], routed.gate_up, routed.down, shared
        )
        _check("the experts' sum", out[first], expected.double())

    torch.cuda.synchronize()
    parts = (routed.gate_up, routed.down, *shared)
    floor = floors.read_us(sum(part.nbytes for part in parts))
    return Work(launch, 8 if rows < _MANY_ROWS else 2, floor=floor, check=check, goal=_goal(kind, rows, floor))


def _add_rms_norm(floors: Floors) -> Work:
    residual, delta = torch.randn((2, 1, _HIDDEN), device=_DEVICE)
    weight = torch.ones(_HIDDEN, device=_DEVICE)
    normed = torch.empty((1, _HIDDEN), dtype=torch.bfloat16, device=_DEVICE)
    return _small(lambda _: add_rms_norm(residual, delta, weight, 1e-5, normed), floors)


def _route(floors: Floors) -> Work:
    logits, bias = torch.randn((1, 256), device=_DEVICE), torch.zeros(256, device=_DEVICE)
    out = route(logits, bias, GLM_5_3)
    return _small(lambda _: route(logits, bias, GLM_5_3, out), floors)


def _silu_mul(floors: Floors) -> Work:
    gate_up = torch.randn((1, 2 * GLM_5_3.intermediate_size), device=_DEVICE).bfloat16()
    out = torch.empty((1, GLM_5_3.intermediate_size), dtype=torch.bfloat16, device=_DEVICE)
    return _small(lambda _: silu_mul(gate_up, out), floors)


def _small(launch: Callable[[int], object], floors: Floors) -> Work:
    torch.cuda.synchronize()
    return Work(launch, 200, floor=floors.empty_kernel_us)


def _check(name: str, actual: Tensor, exact: Tensor) -> None:
    error = float((actual.double() - exact).norm() / exact.norm())
    assert error < 4e-3, f"{name} is off by {error:.1e}"
