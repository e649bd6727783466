"""Products and functions whose rows do not depend on their company.

A row's bits must be the same alone and in a batch, in a chunk of 256 and in a decode step of one: otherwise a
speculated token differs from a decoded one, and a session that moved differs from one that stayed. Libraries do not
promise that. A matrix library picks its blocking, and with it the order in which it adds, by the shape of the call; an
elementwise function on a CPU has a vector form and, for what is left over at the end, a scalar form that rounds
otherwise. So the shape of every call is fixed here: rows are padded to tiles of `ROW_TILE`, and one call handles one
tile. What remains to trust is that a library treats all places of one call alike: `check_linear` and
`check_batched` try it out on the machine at hand.

Additions, multiplications, divisions and square roots are exact to the last bit in any form and need none of this.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from protocol.errors import InvalidValue, NoDevice
from protocol.layout import round_up

ROW_TILE = 16
"""Rows of one product. Decoding one token computes this many, so it is no larger than the vector units want."""

_COLUMNS = 1024
"""Columns given to an elementwise function at once: 16 x 1024 is too little for torch to divide among threads."""


def pad_rows(x: Tensor) -> Tensor:
    """``x`` [M, ...] with zero rows appended up to a multiple of `ROW_TILE`."""
    missing = round_up(x.shape[0], ROW_TILE) - x.shape[0]
    return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T``: float32 [16 n, K], [N, K] -> [16 n, N]."""
    _check_tiles(x)
    out = x.new_empty(x.shape[0], weight.shape[0])
    for rows, result in zip(x.split(ROW_TILE), out.split(ROW_TILE), strict=True):
        torch.mm(rows, weight.T, out=result)
    return out


def head_products(x: Tensor, weight: Tensor) -> Tensor:
    """Each head by its own matrix: float32 [16 n, H, K], [H, K, N] -> [16 n, H, N]."""
    _check_tiles(x)
    out = x.new_empty(x.shape[0], weight.shape[0], weight.shape[2])
    for rows, result in zip(x.split(ROW_TILE), out.split(ROW_TILE), strict=True):
        result.copy_(torch.bmm(rows.transpose(0, 1), weight).transpose(0, 1))
    return out


def elementwise(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    """``function(x)`` of float32 [16 n, K], for a function such as `torch.sigmoid` that takes ``out``."""
    _check_tiles(x)
    if x.is_cuda:  # one thread computes one element, all in the same way
        return function(x)
    out = torch.empty_like(x)
    for rows, result in zip(x.split(ROW_TILE), out.split(ROW_TILE), strict=True):
        for columns, place in zip(rows.split(_COLUMNS, dim=1), result.split(_COLUMNS, dim=1), strict=True):
            function(columns, out=place)
    return out


def silu(x: Tensor) -> Tensor:
    """``x * sigmoid(x)`` of float32 [16 n, K]."""
    return elementwise(torch.sigmoid, x).mul_(x)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def check_linear(weight: Tensor) -> None:
    """Raise `NoDevice` unless `linear` with ``weight`` [N, K] gives a row the same bits at every place in a tile."""
    row = torch.randn(weight.shape[1], generator=torch.Generator().manual_seed(1)).to(weight.device)
    alone = torch.zeros(ROW_TILE, weight.shape[1], device=weight.device)
    alone[0] = row
    expected = linear(alone, weight)[0]
    if not torch.equal(linear(row.repeat(ROW_TILE, 1), weight), expected.expand(ROW_TILE, -1)):
        raise _not_invariant(weight.device, f"[{ROW_TILE}, {weight.shape[1]}] x {list(weight.T.shape)}")


def check_batched(rows: int, inner: int, columns: int, device: torch.device, *, most: int = ROW_TILE) -> None:
    """Raise `NoDevice` unless batches of 1 to ``most`` products [rows, inner] x [inner, columns] give the same bits.

    Attention and index scores have one matrix for each query row, so a batch is as long as the rows are many.
    """
    generator = torch.Generator().manual_seed(1)
    left = torch.randn(rows, inner, generator=generator).to(device)
    right = torch.randn(columns, inner, generator=generator).to(device).T
    expected = torch.bmm(left[None], right[None])
    for batch in {2, 3, most - 1, most}:
        product = torch.bmm(left.repeat(batch, 1, 1), right.T.repeat(batch, 1, 1).transpose(1, 2))
        if not torch.equal(product, expected.expand(batch, -1, -1)):
            raise _not_invariant(device, f"{batch} of [{rows}, {inner}] x [{inner}, {columns}]")


def check_precision() -> None:
    """Raise `InvalidValue` if torch may compute float32 products in a shorter type (TF32, bfloat16)."""
    precision = torch.get_float32_matmul_precision()
    if precision != "highest":
        raise InvalidValue("torch.get_float32_matmul_precision()", precision, "highest")


def _check_tiles(x: Tensor) -> None:
    if x.shape[0] % ROW_TILE:
        raise InvalidValue("rows of a tiled product", x.shape[0], f"a multiple of {ROW_TILE}")


def _not_invariant(device: torch.device, product: str) -> NoDevice:
    return NoDevice(
        f"{device} cannot be used: the matrix library of this machine gives equal rows of the product {product} "
        "different bits",
        device=str(device),
        product=product,
    )
