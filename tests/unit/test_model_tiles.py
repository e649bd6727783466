"""Tiled products and functions: right against float64, and every row the same bits in any company."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from compute.kernels import tiles
from protocol.errors import InvalidValue, NoDevice

CPU = torch.device("cpu")
SIZES = (1, 4, 16, 256)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[1, 2, 3])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def linear(inner: int, columns: int) -> tuple[int, Callable[[Tensor], Tensor]]:
    return inner, tiles.Linear(noise(columns, inner, seed=columns))


def head_products() -> tuple[int, Callable[[Tensor], Tensor]]:
    weight = noise(4, 32, 512, seed=3)
    return 128, lambda x: tiles.head_products(x.unflatten(1, (4, 32)), weight).flatten(1)


def norm_of_keys(x: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x, (128,), torch.ones(128), torch.zeros(128), 1e-6)


# Each makes the width of an input and a function of float32 [16 n, width].
FUNCTIONS: dict[str, Callable[[], tuple[int, Callable[[Tensor], Tensor]]]] = {
    **{
        f"linear {inner} to {columns}": functools.partial(linear, inner, columns)
        for inner, columns in ((128, 832), (64, 4480), (128, 8), (256, 128), (6144, 256))
    },
    "head products": head_products,
    "silu": lambda: (256, tiles.silu),
    "silu of many columns": lambda: (3072, tiles.silu),
    "sigmoid of a few": lambda: (8, lambda x: tiles.elementwise(torch.sigmoid, x)),
    "cosine": lambda: (32, lambda x: tiles.elementwise(torch.cos, x * 1000)),
    "rms norm": lambda: (6144, lambda x: tiles.rms_norm(x, torch.ones(6144), 1e-5)),
    "layer norm": lambda: (128, norm_of_keys),
}


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_row_has_the_same_bits_alone_in_a_batch_and_at_every_place(name: str) -> None:
    width, function = FUNCTIONS[name]()
    x = noise(max(SIZES), width, seed=1)
    whole = function(x)
    for size in SIZES:
        for start in {0, 16, 256 - size, 5} if size < 256 else {0}:
            part = slice(start, start + size)
            assert torch.equal(function(tiles.pad_rows(x[part]))[:size], whole[part])
    # One row at every place, among copies of itself and among others.
    assert torch.equal(function(x[7].repeat(32, 1)), whole[7].expand(32, -1))
    for place in range(tiles.ROW_TILE):
        assert torch.equal(function(x.roll(place - 7, 0))[place], whole[7])


def test_every_product_has_one_shape_whatever_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason for the bits to be the same, where a library's choice of another shape happens not to show."""
    product, weight = tiles.Linear(noise(24, 64)), noise(4, 16, 32)
    shapes = set()

    def spied(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def spy(x: Tensor, y: Tensor, **out: Tensor) -> Tensor:
            shapes.add((tuple(x.shape), tuple(y.shape)))
            return product(x, y, **out)

        return spy

    monkeypatch.setattr(torch, "mm", spied(torch.mm))
    monkeypatch.setattr(torch, "bmm", spied(torch.bmm))
    for rows in SIZES:
        x = tiles.pad_rows(noise(rows, 64))
        product(x)
        tiles.head_products(x.unflatten(1, (4, 16)), weight)
    assert shapes == {((16, 64), (64, 24)), ((4, 16, 16), (4, 16, 32))}


def test_products_are_right() -> None:
    x, first, second = noise(32, 64), noise(24, 64, seed=1), noise(8, 64, seed=2)
    expected = x.double() @ torch.cat((first, second)).double().T
    torch.testing.assert_close(tiles.Linear(first, second)(x).double(), expected, rtol=1e-5, atol=1e-5)
    per_head, weight = noise(32, 3, 64), noise(3, 64, 16, seed=4)
    expected = torch.einsum("rhk,hkn->rhn", per_head.double(), weight.double())
    torch.testing.assert_close(tiles.head_products(per_head, weight).double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(tiles.silu(x), torch.nn.functional.silu(x))
    torch.testing.assert_close(
        tiles.rms_norm(x, first[0], 1e-5), torch.nn.functional.rms_norm(x, (64,), first[0], 1e-5), rtol=1e-5, atol=1e-6
    )


def test_padding_adds_zero_rows_up_to_a_tile() -> None:
    for rows in (1, 15, 16, 17):
        padded = tiles.pad_rows(torch.ones(rows, 3))
        assert padded.shape == (-(-rows // 16) * 16, 3)
        assert padded.sum() == rows * 3
    assert tiles.pad_rows(torch.arange(3)).tolist() == [0, 1, 2] + [0] * 13


def test_rows_that_are_no_tiles_are_refused() -> None:
    for call in (tiles.Linear(noise(8, 4)), tiles.silu, lambda x: tiles.head_products(x[:, None], noise(1, 4, 4))):
        with pytest.raises(InvalidValue, match="rows of a tiled product is 17"):
            call(noise(17, 4))


def test_a_library_that_treats_places_unlike_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks can fail: here the last row of a product, and all but the first of a batch, end one bit off."""
    product, batch = torch.mm, torch.bmm

    def off_at_the_end(x: Tensor, y: Tensor) -> Tensor:
        out = product(x, y)
        out[-1].view(torch.int32).bitwise_xor_(1)
        return out

    def off_in_company(x: Tensor, y: Tensor, *, out: Tensor) -> Tensor:
        batch(x, y, out=out)
        out[1:].view(torch.int32).bitwise_xor_(1)
        return out

    monkeypatch.setattr(torch, "mm", off_at_the_end)
    monkeypatch.setattr(torch, "bmm", off_in_company)
    with pytest.raises(NoDevice, match=r"cpu cannot be used: .*\[16, 37\] x \[37, 41\]"):
        tiles.Linear(noise(41, 37))
    with pytest.raises(NoDevice, match=r"\[4, 37\] x \[37, 41\]"):
        tiles.check_batched(4, 37, 41, CPU)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "inner", "columns"), [(4, 576, 256), (4, 256, 512), (32, 128, 512), (1, 32, 512)])
def test_batches_of_any_length_are_alike_on_a_gpu(rows: int, inner: int, columns: int) -> None:
    tiles.check_batched(rows, inner, columns, torch.device("cuda"), most=40)


def test_shortened_products_are_refused() -> None:
    tiles.check_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(InvalidValue, match="'high'; allowed: highest"):
            tiles.check_precision()
    finally:
        torch.set_float32_matmul_precision("highest")
