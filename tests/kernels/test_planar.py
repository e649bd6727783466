"""The planar export of a selection: each row in its place, byte for byte, and an engine's view of it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from compute.kernels import reference
from compute.kernels.planar import planar_blocks, planar_rows, reference_planar_rows
from protocol.errors import InvalidValue
from protocol.layout import FP8_DS_MLA, Q8G64, Encoding
from tests.kernels.pages import DEVICE, Pages, format_of

ENCODINGS = pytest.mark.parametrize("encoding", [Q8G64, FP8_DS_MLA], ids=lambda encoding: encoding.name)
TOKENS = 300
BFLOAT16_ERROR = 1e-2
"""Bound on the norm of the error of a kernel whose rows, weights and outputs are bfloat16, relative to the output's."""


def session(encoding: Encoding) -> tuple[Pages, Tensor, Tensor]:
    """A history with random rows in layer 2 of group 1."""
    pages = Pages.random(format_of(encoding), 5, length=TOKENS)
    generator = torch.Generator().manual_seed(3)
    latent = torch.randn(TOKENS, 512, generator=generator).to(DEVICE)
    rope = torch.randn(TOKENS, 64, generator=generator).to(DEVICE)
    reference.append_rows(pages.memory, pages.page_map, 1, 2, torch.arange(TOKENS, device=DEVICE), latent, rope)
    return pages, latent, rope


def selections(rows: int, k: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + k)
    chosen = torch.stack([torch.randperm(TOKENS, generator=generator)[:k].sort().values for _ in range(rows)]).int()
    chosen[0, k // 2 :] = -1
    return chosen.to(DEVICE)


@ENCODINGS
@pytest.mark.parametrize(("rows", "k"), [(1, 1), (1, 64), (3, 100), (4, 33)])
def test_it_is_the_reference_s(encoding: Encoding, rows: int, k: int) -> None:
    pages, _, _ = session(encoding)
    addresses = reference.row_addresses(pages.page_map, 1, selections(rows, k))
    shape = (planar_blocks(rows, k), 64, encoding.rows.row_bytes)
    got, expected = (torch.full(shape, 0xA5, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    indices, right = (torch.full((rows, k), 7, dtype=torch.int32, device=DEVICE) for _ in range(2))
    planar_rows(addresses, 2 * encoding.rows.row_bytes, got, indices)
    reference_planar_rows(pages.memory, addresses, 2 * encoding.rows.row_bytes, expected, right)
    assert torch.equal(got, expected), "rows that nobody selected are left as they were"
    assert torch.equal(indices, right)


@ENCODINGS
def test_an_engine_attends_to_it_as_we_do(encoding: Encoding) -> None:
    """Reading blocks by indices only, as a sparse decode kernel of theirs does."""
    pages, _, _ = session(encoding)
    rows, k, heads = 3, 100, 4
    addresses = reference.row_addresses(pages.page_map, 1, selections(rows, k))
    blocks = torch.zeros((planar_blocks(rows, k), 64, 656), dtype=torch.uint8, device=DEVICE)
    indices = torch.empty((rows, k), dtype=torch.int32, device=DEVICE)
    planar_rows(addresses, 2 * 656, blocks, indices)

    generator = torch.Generator().manual_seed(9)
    query = torch.randn(rows, heads, 576, generator=generator).to(DEVICE)
    ours = reference.attend(pages.memory, addresses, 2, encoding.rows, query[..., :512], query[..., 512:], 0.1)
    gathered = blocks.view(-1, 656)[indices.clamp_min(0).long()]
    keys = torch.cat(reference.decode_rows(gathered, encoding.rows), dim=-1).double()
    scores = torch.einsum("rhd,rkd->rhk", query.double(), keys) * 0.1
    weights = scores.masked_fill((indices < 0)[:, None], -torch.inf).softmax(-1)
    theirs = torch.einsum("rhk,rkd->rhd", weights, keys[..., :512])
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(
    importlib.util.find_spec("flash_mla") is None, reason="needs flash_mla, of the package sgl-flash-mla"
)
@pytest.mark.parametrize("heads", [64, 128])
def test_a_public_kernel_attends_to_it_as_we_do(heads: int, record_property: Callable[[str, object], None]) -> None:
    """FlashMLA's sparse decode, of one query row for each place of a batch; it takes indices by 64."""
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata

    pages, _, _ = session(FP8_DS_MLA)
    rows, k = 5, 128
    addresses = reference.row_addresses(pages.page_map, 1, selections(rows, k))
    blocks = torch.zeros((planar_blocks(rows, k), 64, 656), dtype=torch.uint8, device=DEVICE)
    indices = torch.empty((rows, k), dtype=torch.int32, device=DEVICE)
    planar_rows(addresses, 2 * 656, blocks, indices)

    query = torch.randn(rows, heads, 576, generator=torch.Generator().manual_seed(9)).bfloat16().to(DEVICE)
    out, _ = flash_mla_with_kvcache(
        query[:, None],
        blocks.view(torch.float8_e4m3fn)[:, :, None],
        None,
        None,
        512,
        get_mla_metadata()[0],
        softmax_scale=0.1,
        is_fp8_kvcache=True,
        indices=indices[:, None],
        use_legacy=True,  # where Hopper and this layout are
    )
    latent, rope = query[..., :512].float(), query[..., 512:].float()
    ours = reference.attend(pages.memory, addresses, 2, FP8_DS_MLA.rows, latent, rope, 0.1).double()
    error = float((out[:, 0].double() - ours).norm() / ours.norm())
    record_property("relative error", error)
    assert error < BFLOAT16_ERROR


def test_what_does_not_fit_is_refused() -> None:
    addresses, indices = torch.zeros((2, 50), dtype=torch.int64), torch.zeros((2, 50), dtype=torch.int32)
    blocks = torch.zeros((2, 64, 656), dtype=torch.uint8)
    with pytest.raises(InvalidValue, match="at least 2"):
        planar_rows(addresses, 0, blocks[:1], indices)
    with pytest.raises(InvalidValue, match="addresses and indices"):
        planar_rows(addresses, 0, blocks, indices[:1])
    with pytest.raises(InvalidValue, match="blocks"):
        planar_rows(addresses, 0, blocks[:, :, :650].contiguous(), indices)
