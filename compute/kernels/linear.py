"""Projections of the decoder into tensors of the caller. `compute.kernels.reference_linear` defines them.

A row's result depends on nothing but its own inputs: not on the number of rows, nor on their places.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compute.kernels import reference_linear
from compute.kernels.choice import KernelsName, default_kernels
from compute.kernels.matrix import Matrix
from protocol.errors import InvalidValue


class Workspace:
    """Scratch memory of products with up to ``rows`` rows; made once, as recorded graphs keep its addresses.

    One stream's products use it in turn. ``kernels`` chooses the implementation by name; by default it is that of the
    device (`compute.kernels.choice.default_kernels`). ``nbytes`` is what Triton's may use.
    """

    def __init__(
        self,
        rows: int,
        device: torch.device | str,
        *,
        kernels: KernelsName | None = None,
        nbytes: int = 256 << 20,
    ) -> None:
        self.rows = rows
        self.device = torch.device(device)
        self.kernels = kernels or default_kernels(self.device.type)
        if self.kernels == "triton":
            # Imported where it is used: a CPU worker needs no triton.
            from compute.kernels.triton_products import Scratch

            self.scratch = Scratch.empty(nbytes, self.device)


def linear(x: Tensor, weight: Matrix, out: Tensor, workspace: Workspace) -> None:
    """``out = x @ weight.T``, summed in float32.

    ``x`` is bfloat16 [M, K] and ``out`` bfloat16 or float32 [M, N], each with contiguous rows at any stride; ``weight``
    is [N, K]; the Triton kernels want K of e4m3 to be a multiple of 16. Raises `InvalidValue` for shapes or dtypes that
    do not fit.
    """
    n, k = weight.shape
    _check("x", x, (x.shape[0], k), (torch.bfloat16,))
    _check("out", out, (x.shape[0], n), (torch.bfloat16, torch.float32))
    if workspace.kernels == "reference":
        out.copy_(reference_linear.linear(x, weight))
        return
    from compute.kernels import triton_linear

    triton_linear.linear(x[:, None], weight, out[:, None], workspace.scratch)


def head_linear(x: Tensor, weight: Matrix, out: Tensor, workspace: Workspace) -> None:
    """Each head by its own matrix: ``out[:, h] = x[:, h] @ weight[h].T``.

    ``x`` is bfloat16 or float32, which is rounded, [M, H, K] and ``out`` bfloat16 or float32 [M, H, N], their last
    dimension contiguous; ``weight`` is [H, N, K]. Raises `InvalidValue` for shapes or dtypes that do not fit.
    """
    heads, n, k = weight.shape
    _check("x", x, (x.shape[0], heads, k), (torch.bfloat16, torch.float32))
    _check("out", out, (x.shape[0], heads, n), (torch.bfloat16, torch.float32))
    if workspace.kernels == "reference":
        out.copy_(reference_linear.head_linear(x.bfloat16(), weight))
        return
    from compute.kernels import triton_linear

    triton_linear.linear(x, weight, out, workspace.scratch)


def _check(name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.shape != shape or tensor.dtype not in dtypes or tensor.stride(-1) != 1:
        needed = f"{' or '.join(map(str, dtypes))} {shape}, the last dimension contiguous"
        raise InvalidValue(name, f"{tensor.dtype} {tuple(tensor.shape)}", needed)
