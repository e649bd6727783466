"""What attention takes of joint projections: the kernels against the reference, and rows against their company."""

from __future__ import annotations

from dataclasses import dataclass, fields

import pytest
import torch
from torch import Tensor

from compute.kernels.choice import KernelsName
from compute.kernels.descriptors import FIELDS, describe
from compute.kernels.hidden import store_hidden
from compute.kernels.inputs import Angles, IndexerRows, hidden_inputs, query_inputs
from protocol.errors import InvalidValue
from protocol.layout import PAGE_TOKENS, PageFormat
from tests.kernels.pages import DEVICE, Pages, format_of

QUERY, HEADS, INDEX_HEADS, NOPE = 96, 5, 6, 40
HIDDEN_STARTS = (0, 128, 768, 896)
INDEX_START = 640


@dataclass
class Made:
    """All outputs, NaN before they are written."""

    query_latent: Tensor
    latent: Tensor
    rope: Tensor
    keys: Tensor
    weights: Tensor
    query_rope: Tensor
    index_query: Tensor

    @classmethod
    def empty(cls, rows: int) -> Made:
        def nan(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full((rows, *sizes), torch.nan, dtype=dtype, device=DEVICE)

        half = torch.bfloat16
        return cls(
            nan(QUERY, dtype=half),
            nan(512),
            nan(64),
            nan(128),
            nan(INDEX_HEADS),
            nan(HEADS, 64, dtype=half),
            nan(INDEX_HEADS, 128, dtype=half),
        )


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def _make(kernels: KernelsName, rows: slice, *, interleaved: bool = True, indexer: bool = True) -> Made:
    """Outputs of ``rows`` of 70 rows."""
    hidden, latent = _normal(70, 928, seed=0)[rows], _normal(70, INDEX_START + INDEX_HEADS * 128, seed=1)[rows]
    turns = _normal(70, 32, seed=2)[rows]
    angles = Angles(turns.cos(), turns.sin())
    made = Made.empty(len(hidden))
    norm = (_normal(128, seed=3), _normal(128, seed=4))
    index = IndexerRows(norm, interleaved, made.keys, made.weights) if indexer else None
    starts = HIDDEN_STARTS if indexer else HIDDEN_STARTS[:2]
    norms = (_normal(QUERY, seed=5), _normal(512, seed=6))
    hidden_inputs(hidden, starts, norms, angles, made.query_latent, made.latent, made.rope, index, kernels)
    query = made.index_query if indexer else None
    query_inputs(latent.bfloat16(), INDEX_START, NOPE, angles, made.query_rope, query, kernels, interleaved=interleaved)
    return made


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rows", [1, 4, 23, 66])
def test_kernels_against_the_reference(rows: int, interleaved: bool) -> None:
    made, expected = (_make(name, slice(0, rows), interleaved=interleaved) for name in ("triton", "reference"))
    for item in fields(Made):
        ours, theirs = getattr(made, item.name), getattr(expected, item.name)
        tolerance = 1e-2 if ours.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("kernels", ["triton", "reference"])
def test_a_row_is_the_same_alone_and_among_many(kernels: KernelsName, interleaved: bool) -> None:
    together = _make(kernels, slice(0, 70), interleaved=interleaved)
    for row in (0, 15, 69):
        alone = _make(kernels, slice(row, row + 1), interleaved=interleaved)
        for item in fields(Made):
            assert torch.equal(getattr(alone, item.name)[0], getattr(together, item.name)[row]), item.name


@pytest.mark.parametrize("kernels", ["triton", "reference"])
def test_without_an_indexer_its_outputs_stay_as_they_are(kernels: KernelsName) -> None:
    made, with_one = _make(kernels, slice(0, 3), indexer=False), _make(kernels, slice(0, 3))
    assert all(bool(tensor.isnan().all()) for tensor in (made.keys, made.weights, made.index_query))
    assert torch.equal(made.latent, with_one.latent)
    assert torch.equal(made.query_rope, with_one.query_rope)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidValue, match="projection of the query's latent"):
        query_inputs(
            torch.zeros(1, 700, device=DEVICE),
            INDEX_START,
            NOPE,
            Angles(torch.zeros(1, 32), torch.zeros(1, 32)),
            torch.zeros((1, HEADS, 64), dtype=torch.bfloat16),
            None,
            "triton",
            interleaved=True,
        )


def test_the_hidden_of_a_pages_last_row_is_stored_and_no_other() -> None:
    page_format = PageFormat(format_of().encoding, format_of().groups, hidden_size=48)
    pages = Pages.random(page_format, 4, length=200, ring_first=2 * PAGE_TOKENS)
    records = torch.stack([describe(pages.page_map, 0), torch.zeros(FIELDS, dtype=torch.int64)]).to(DEVICE)
    positions = torch.tensor([[62, 63, 64, 191], [63, 63, 63, 63]], device=DEVICE)
    hidden = _normal(2, 4, 48, seed=7)
    home, ring = pages.home.clone(), pages.ring.clone()
    store_hidden(records, page_format, positions, hidden)
    at_home = int(pages.page_map.page_address[0]) - pages.home.data_ptr() + page_format.hidden_offset
    in_ring = 2 % pages.page_map.ring_pages * page_format.stride + page_format.hidden_offset
    home[at_home : at_home + 192] = hidden[0, 1].view(torch.uint8)
    ring[in_ring : in_ring + 192] = hidden[0, 3].view(torch.uint8)
    assert torch.equal(pages.home, home)
    assert torch.equal(pages.ring, ring)
