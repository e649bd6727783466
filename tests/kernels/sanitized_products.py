"""The product kernels once, on small weights; part of `tests.kernels.sanitized_run`."""

from __future__ import annotations

import torch

from compute.kernels import reference_linear
from compute.kernels.experts import Experts, experts, route
from compute.kernels.linear import Workspace, head_linear, linear
from compute.kernels.matrix import Matrix
from compute.kernels.norms import add_rms_norm, silu_mul
from protocol.model import DEMO
from tests.kernels.pages import DEVICE

MODULES = ("triton_linear", "triton_experts", "triton_many_experts", "triton_norms", "strips", "panels")
HIDDEN, INNER = 512, 128
COUNT, CHOICES = DEMO.n_routed_experts, DEMO.num_experts_per_tok
ROWS = (3, 9, 20, 70)
"""For the kernels of a few rows, of some, and of many."""


def main() -> None:
    """Raises what the kernels raise; results are the tests' business."""
    workspace = Workspace(max(ROWS), DEVICE, kernels="triton", nbytes=4 << 20)
    for e4m3 in (False, True):
        routed = Experts(_matrix(e4m3, COUNT, 2 * INNER, HIDDEN), _matrix(e4m3, COUNT, HIDDEN, INNER))
        shared = (routed.gate_up[0], routed.down[0])
        for rows in ROWS:
            x = torch.randn(rows, HIDDEN, device=DEVICE).bfloat16()
            linear(x, _matrix(e4m3, 200, HIDDEN), torch.empty(rows, 200, device=DEVICE), workspace)
            heads = torch.empty(rows, 2, INNER, device=DEVICE)
            for of_heads in (x, x.float()):
                head_linear(of_heads.view(rows, 2, -1), _matrix(False, 2, INNER, HIDDEN // 2), heads, workspace)
            linear(x.repeat(1, 2), _matrix(False, 40, 2 * HIDDEN), torch.empty(rows, 40, device=DEVICE), workspace)
            logits, bias = torch.randn(rows, COUNT, device=DEVICE), torch.zeros(COUNT, device=DEVICE)
            route(logits, bias, DEMO, kernels="triton")
            chosen = torch.arange(CHOICES, dtype=torch.int32, device=DEVICE).repeat(rows, 1)
            weights = torch.rand(rows, CHOICES, device=DEVICE)
            out = torch.empty(rows, HIDDEN, device=DEVICE)
            experts(x, chosen, weights, routed, shared, out, workspace)
            add_rms_norm(out, x, torch.ones(HIDDEN, device=DEVICE), 1e-5, x, kernels="triton")
            silu_mul(x, torch.empty(rows, HIDDEN // 2, dtype=torch.bfloat16, device=DEVICE), kernels="triton")


def _matrix(e4m3: bool, *shape: int) -> Matrix:
    values = torch.randn(shape, device=DEVICE) * 0.1
    return reference_linear.quantise(values) if e4m3 else Matrix(values.bfloat16())
