"""Attention over addresses against float64, and bits that depend on the query row alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from compute.kernels import reference
from protocol.layout import F32, FP8_DS_MLA, LATENT_DIM, Q8G64, ROPE_DIM, Encoding
from tests.kernels.pages import DEVICE, Pages, format_of

ENCODINGS = pytest.mark.parametrize("encoding", [Q8G64, FP8_DS_MLA, F32], ids=lambda encoding: encoding.name)
SCALE = 256**-0.5
LAYER = 2
TOKENS = 300


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def session(encoding: Encoding, *, layer: int = LAYER) -> tuple[Pages, Tensor, Tensor]:
    """A session with rows of one layer; every other byte of it is a NaN. Also its rows as they were given."""
    pages = Pages.random(format_of(encoding), 6, length=TOKENS)
    pages.home.fill_(0xFF)
    latent, rope = noise(TOKENS, LATENT_DIM, seed=1), noise(TOKENS, ROPE_DIM, seed=2)
    positions = torch.arange(TOKENS, device=DEVICE)
    reference.append_rows(pages.memory, pages.page_map, 1, layer, positions, latent, rope)
    return pages, latent, rope


def selections(rows: int, k: int, seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    picked = [torch.randperm(TOKENS, generator=generator)[:k].sort().values for _ in range(rows)]
    return torch.stack(picked).int().to(DEVICE)


def attend(pages: Pages, selection: Tensor, query: tuple[Tensor, Tensor], layer: int = LAYER) -> Tensor:
    addresses = reference.row_addresses(pages.page_map, 1, selection)
    layout = pages.page_map.format.encoding.rows
    return reference.attend(pages.memory, addresses, layer, layout, *query, SCALE)


def queries(rows: int, heads: int, seed: int = 4) -> tuple[Tensor, Tensor]:
    return noise(rows, heads, LATENT_DIM, seed=seed), noise(rows, heads, ROPE_DIM, seed=seed + 1)


def exact(selection: Tensor, latent: Tensor, rope: Tensor, query: tuple[Tensor, Tensor]) -> Tensor:
    """In float64, a row at a time, over the valid entries only."""
    out = []
    for row, picked in enumerate(selection.long()):
        chosen = picked[picked >= 0]
        c, p = latent.double()[chosen], rope.double()[chosen]
        scores = (query[0][row].double() @ c.T + query[1][row].double() @ p.T) * SCALE
        out.append(scores.softmax(1) @ c)
    return torch.stack(out)


@ENCODINGS
@pytest.mark.parametrize(("heads", "k"), [(4, 16), (64, 128), (5, 17), (1, 1), (3, 300)])
def test_equals_the_softmax_in_float64(encoding: Encoding, heads: int, k: int) -> None:
    pages, latent, rope = session(encoding)
    selection, query = selections(6, k), queries(6, heads)
    selection[1, k // 2 + 1 :] = -1
    stored = reference.decode_rows(reference.encode_rows(latent, rope, encoding.rows), encoding.rows)
    expected = exact(selection, *stored, query)
    torch.testing.assert_close(attend(pages, selection, query).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("encoding", "least", "most"), [(Q8G64, 0.001, 0.01), (FP8_DS_MLA, 0.01, 0.04)])
def test_how_far_an_encoding_errs(encoding: Encoding, least: float, most: float) -> None:
    pages, latent, rope = session(encoding)
    selection, query = selections(8, 256), queries(8, 16)
    expected = exact(selection, latent, rope, query)
    error = float((attend(pages, selection, query).double() - expected).norm() / expected.norm())
    assert least < error < most


def test_a_row_without_a_valid_entry_is_zero() -> None:
    pages, _, _ = session(Q8G64)
    selection, query = selections(5, 16), queries(5, 4)
    whole = attend(pages, selection, query)
    selection[2] = -1
    with_hole = attend(pages, selection, query)
    assert not with_hole[2].any()
    assert torch.equal(with_hole[[0, 1, 3, 4]], whole[[0, 1, 3, 4]])


def test_entries_that_are_no_position_change_nothing() -> None:
    pages, _, _ = session(Q8G64)
    selection, query = selections(1, 8), queries(1, 4)
    int32 = torch.iinfo(torch.int32)
    hostile = torch.tensor([[int32.min, -2, TOKENS, TOKENS + 64, 6 * 64, int32.max, -1, -1]], device=DEVICE).int()
    padded = torch.cat((selection, torch.full_like(selection, -1)), dim=1)
    assert torch.equal(
        attend(pages, torch.cat((selection, hostile), dim=1), query),
        attend(pages, padded, query),
    )


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """A library may divide the products of a batch among threads, and the rows of a single product."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@ENCODINGS
@pytest.mark.parametrize(("heads", "k"), [(4, 256), (5, 17), (64, 32)])
def test_a_row_has_the_same_bits_alone_in_a_batch_and_at_every_place(encoding: Encoding, heads: int, k: int) -> None:
    pages, _, _ = session(encoding)
    selection, query = selections(256, k), queries(256, heads)
    selection[::3, k // 2 :] = -1
    together = attend(pages, selection, query)
    for size in (1, 4, 16):
        for start in (0, 16, 240):
            part = slice(start, start + size)
            assert torch.equal(attend(pages, selection[part], (query[0][part], query[1][part])), together[part])
    one = slice(7, 8)
    repeated = attend(pages, selection[one].repeat(16, 1), tuple(part[one].repeat(16, 1, 1) for part in query))  # type: ignore[arg-type]
    assert torch.equal(repeated, together[one].expand(16, -1, -1))
