"""Products and functions whose rows do not depend on their company.

A row's bits must be the same alone and in a batch, in a chunk of 256 and in a decode step of one: otherwise a
speculated token differs from a decoded one, and a session that moved differs from one that stayed. Libraries do not
promise that. A matrix library picks its blocking, and with it the order in which it adds, by the shape of the call; an
elementwise function on a CPU has a vector form and, for what is left over at the end, a scalar form that rounds
otherwise. So the shape of every call is fixed here: rows are padded to tiles of `ROW_TILE`, and one call handles one
tile. What remains to trust is that a library treats all places of one call alike. That is tried out on the machine at
hand, once for each shape: by `Linear` when it is made, by `check_batched` for products whose batch grows.

Additions, multiplications, divisions and square roots are exact to the last bit in any form and need none of this.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from protocol.errors import InvalidValue, NoDevice
from protocol.layout import round_up

ROW_TILE = 16
"""Rows of one product. Decoding one token computes this many, so it is no larger than the vector units want."""

_BATCH = 16
"""Matrices in one batched product on a GPU."""

_COLUMNS = 1024
"""Columns given to an elementwise function at once: 16 x 1024 is too little for torch to divide among threads."""


def pad_rows(x: Tensor) -> Tensor:
    """``x`` [M, ...] with zero rows appended up to a multiple of `ROW_TILE`."""
    missing = round_up(x.shape[0], ROW_TILE) - x.shape[0]
    return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x


class Linear:
    """``x @ weight.T``. Several maps of one input, given together, are one product; the caller cuts the result."""

    def __init__(self, *weights: Tensor) -> None:
        """``weights`` are float32 [N, K], of one K.

        Raises `NoDevice` if the machine's library does not give a row the same bits at every place in a tile.
        """
        self._transposed = torch.cat(weights).T  # [K, N]
        inner, columns = self._transposed.shape
        _check_linear(inner, columns, self._transposed.device, torch.get_num_threads())

    def __call__(self, x: Tensor) -> Tensor:
        """float32 [16 n, K] -> [16 n, N]."""
        return _tile_by_tile(x, self._transposed)


def head_products(x: Tensor, weight: Tensor) -> Tensor:
    """Each head by its own matrix: float32 [16 n, H, K], [H, K, N] -> [16 n, H, N]."""
    _check_tiles(x)
    tiles = [torch.bmm(rows.transpose(0, 1), weight).transpose(0, 1) for rows in x.split(ROW_TILE)]
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles)


def batched(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """``left @ right`` of each pair: [B, M, K], [B, K, N] -> ``out`` [B, M, N], where B is not the same in every call.

    On a CPU the length of a batch does not matter (`check_batched` tries it out). A GPU's library picks its kernel by
    it, so there a batch is always one of `_BATCH`, with zeros behind what is given, and always laid out alike.
    """
    if not left.is_cuda:
        return torch.bmm(left, right, out=out)
    for start in range(0, left.shape[0], _BATCH):
        part = slice(start, min(start + _BATCH, left.shape[0]))
        count = part.stop - part.start
        full_left, full_right = left.new_zeros(_BATCH, *left.shape[1:]), right.new_zeros(_BATCH, *right.shape[1:])
        full_left[:count], full_right[:count] = left[part], right[part]
        out[part] = torch.bmm(full_left, full_right)[:count]
    return out


def elementwise(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    """``function(x)`` of float32 [16 n, K], for a function such as `torch.sigmoid` that takes ``out``."""
    _check_tiles(x)
    if x.is_cuda or x.shape <= (ROW_TILE, _COLUMNS):  # a GPU computes every element in the same way
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


def check_batched(rows: int, inner: int, columns: int, device: torch.device, *, most: int = ROW_TILE) -> None:
    """Raise `NoDevice` unless batches of 1 to ``most`` products [rows, inner] x [inner, columns] give the same bits.

    Attention and index scores have one matrix for each query row, so a batch is as long as the rows are many.
    """
    generator = torch.Generator().manual_seed(1)
    left = torch.randn(rows, inner, generator=generator).to(device)
    right = torch.randn(columns, inner, generator=generator).to(device).T

    def product(batch: int) -> Tensor:
        out = left.new_empty(batch, rows, columns)
        return batched(left.repeat(batch, 1, 1), right.T.repeat(batch, 1, 1).transpose(1, 2), out)

    expected = product(1)
    for batch in {2, 3, most - 1, most}:
        if not torch.equal(product(batch), expected.expand(batch, -1, -1)):
            raise _not_invariant(device, f"{batch} of [{rows}, {inner}] x [{inner}, {columns}]")


def check_precision() -> None:
    """Raise `InvalidValue` if torch may compute float32 products in a shorter type (TF32, bfloat16)."""
    precision = torch.get_float32_matmul_precision()
    if precision != "highest":
        raise InvalidValue("torch.get_float32_matmul_precision()", precision, "highest")


def _tile_by_tile(x: Tensor, transposed: Tensor) -> Tensor:
    _check_tiles(x)
    if x.shape[0] == ROW_TILE:
        return torch.mm(x, transposed)
    out = x.new_empty(x.shape[0], transposed.shape[1])
    for rows, result in zip(x.split(ROW_TILE), out.split(ROW_TILE), strict=True):
        torch.mm(rows, transposed, out=result)
    return out


@functools.cache
def _check_linear(inner: int, columns: int, device: torch.device, threads: int) -> None:
    """Raise `NoDevice` unless a row has the same bits at every place of a tile of [16, inner] x [inner, columns].

    ``threads`` is torch's number of threads: the library may divide a product among them.
    """
    generator = torch.Generator(device).manual_seed(threads)
    transposed = torch.randn(columns, inner, generator=generator, device=device).T
    row = torch.randn(inner, generator=generator, device=device)
    alone = torch.zeros(ROW_TILE, inner, device=device)
    alone[0] = row
    expected = _tile_by_tile(alone, transposed)[0]
    if not torch.equal(_tile_by_tile(row.repeat(ROW_TILE, 1), transposed), expected.expand(ROW_TILE, -1)):
        raise _not_invariant(device, f"[{ROW_TILE}, {inner}] x [{inner}, {columns}]")


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
