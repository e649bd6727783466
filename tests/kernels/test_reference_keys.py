"""Index keys and scores: bytes by hand, sums in float64, and bits that depend on the row and the key alone."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from compute.kernels import reference
from compute.kernels.reference_keys import KEY_TILE
from protocol.errors import InvalidValue
from protocol.layout import F32, INDEX_DIM, PAGE_TOKENS, Q8G64, Encoding, PageFormat
from tests.kernels.pages import DEVICE, GROUPS, Pages, assert_same_bytes, format_of

ENCODINGS = pytest.mark.parametrize("encoding", [Q8G64, F32], ids=lambda encoding: encoding.name)
HEADS = 32


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def e4m3(value: Fraction) -> float:
    """The nearest value of e4m3, ties to even, by looking at all of them."""
    magnitudes = [Fraction(m, 2**9) for m in range(8)]
    magnitudes += [
        Fraction(8 + m, 8) * Fraction(2) ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)
    ]
    code = min(range(127), key=lambda code: (abs(magnitudes[code] - abs(value)), code % 2))
    return math.copysign(float(magnitudes[code]), value)


def filled(encoding: Encoding, tokens: int, keys: Tensor, *, max_pages: int | None = None) -> Pages:
    """A session whose group 1 has ``keys``; every byte that was not written is a NaN."""
    pages = Pages.random(format_of(encoding), max_pages or -(-tokens // PAGE_TOKENS), length=tokens)
    pages.key_blocks.fill_(0xFF)
    reference.append_keys(pages.memory, pages.page_map, 1, torch.arange(tokens, device=DEVICE), keys)
    return pages


def test_scale_and_values_are_those_worked_out_by_hand() -> None:
    keys = noise(12, INDEX_DIM) * torch.logspace(-9, 9, 12, device=DEVICE)[:, None]
    keys[0] = 0.0
    keys[1], keys[1, 5] = 0.0, 448.0  # the quotient is a power of two
    keys[2], keys[2, 5] = 0.0, -448.0 * 2**-7
    keys[3], keys[3, 5] = 0.0, math.nextafter(448.0, math.inf) + 2**-15
    keys[4] = 3e38
    values, scales = reference.encode_keys(keys, Q8G64.keys)
    assert values.dtype == torch.float8_e4m3fn
    for row, got, scale in zip(keys.tolist(), values.float().tolist(), scales.tolist(), strict=True):
        quotient = max(torch.tensor(max(map(abs, row))).item(), torch.tensor(1e-4).item()) / 448
        mantissa, exponent = math.frexp(torch.tensor(quotient).item())
        assert scale == 2.0 ** (exponent - (mantissa == 0.5))
        assert got == [e4m3(Fraction(value) / Fraction(scale)) for value in row]


def test_unquantised_keys_are_kept() -> None:
    keys = noise(5, INDEX_DIM)
    values, scales = reference.encode_keys(keys, F32.keys)
    assert torch.equal(values, keys)
    assert scales.tolist() == [1.0] * 5


@ENCODINGS
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_are_refused(encoding: Encoding, bad: float) -> None:
    keys = noise(3, INDEX_DIM)
    keys[1, 7] = bad
    with pytest.raises(InvalidValue, match="NaN or infinite"):
        reference.encode_keys(keys, encoding.keys)
    with pytest.raises(InvalidValue, match="index keys"):
        reference.encode_keys(noise(3, 127), encoding.keys)


def test_every_code_of_e4m3_decodes_as_torch_decodes_it() -> None:
    block = torch.zeros(Q8G64.keys.block_bytes, dtype=torch.uint8, device=DEVICE)
    block[:256] = torch.arange(256)
    values, scales = reference.decode_key_block(block, Q8G64.keys)
    expected = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn).float()
    assert values.shape == (64, 128)
    assert torch.equal(values.view(torch.int32).flatten()[:256], expected.view(torch.int32))
    assert scales.tolist() == [0.0] * 64


@ENCODINGS
def test_keys_are_written_to_their_block_and_to_the_page_and_nowhere_else(encoding: Encoding) -> None:
    form = format_of(encoding)
    pages = Pages.random(form, 8, length=400, ring_first=256, ring_pages=4)
    positions = torch.tensor([399, 0, 255, 256, 70, 320], device=DEVICE)
    keys = noise(6, INDEX_DIM)
    values, scales = reference.encode_keys(keys, encoding.keys)
    expected = pages.snapshot()
    for index, position in enumerate(positions.tolist()):
        page, token = divmod(position, 64)
        block = int(pages.page_map.key_block_address[1, page]) - pages.key_blocks.data_ptr()
        if position >= 256:
            tensor, first = expected[1], page % 4 * form.stride
        else:
            tensor, first = expected[0], int(pages.page_map.page_address[page]) - pages.home.data_ptr()
        for place, at in ((expected[2], block), (tensor, first + form.keys_offset(1))):
            key = values[index].contiguous().view(torch.uint8)
            place[at + token * len(key) :][: len(key)] = key
            if encoding.keys.has_scales:
                place[at + 8192 + 4 * token :][:4] = scales[index : index + 1].view(torch.uint8)
    reference.append_keys(pages.memory, pages.page_map, 1, positions, keys)
    assert_same_bytes(pages.snapshot(), expected)


@ENCODINGS
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, KEY_TILE, KEY_TILE + 1, 8 * KEY_TILE + 70])
def test_scores_are_the_sum_over_heads_in_float64(encoding: Encoding, tokens: int) -> None:
    keys = noise(tokens, INDEX_DIM, seed=1)
    pages = filled(encoding, tokens, keys)
    query, weights = noise(3, HEADS, INDEX_DIM, seed=2), noise(3, HEADS, seed=3) * HEADS**-0.5
    if encoding is Q8G64:
        query = query.bfloat16()
    positions = torch.tensor([tokens - 1, 0, tokens // 2], device=DEVICE)
    got = reference.index_scores(pages.memory, pages.page_map, 1, query, weights, positions)
    assert got.shape == (3, tokens)
    values, scales = reference.encode_keys(keys, encoding.keys)
    stored = values.double() * scales.double()[:, None]
    dots = torch.einsum("rhd,td->rht", query.double(), stored) * INDEX_DIM**-0.5
    expected = torch.einsum("rh,rht->rt", weights.double(), dots.relu())
    later = torch.arange(tokens, device=DEVICE) > positions[:, None]
    torch.testing.assert_close(got.double(), expected.masked_fill(later, -torch.inf), rtol=1e-5, atol=1e-5)


@ENCODINGS
def test_a_score_has_the_same_bits_whatever_the_rows_and_the_length(encoding: Encoding) -> None:
    tokens = 9 * KEY_TILE + 5
    pages = filled(encoding, tokens, noise(tokens, INDEX_DIM, seed=1))
    query, weights = noise(16, HEADS, INDEX_DIM, seed=2).bfloat16(), noise(16, HEADS, seed=3)
    positions = torch.tensor(
        [tokens - 1, 3, 64, 511, 512, 700, 4095, 4096, *range(tokens - 9, tokens - 1)], device=DEVICE
    )
    together = reference.index_scores(pages.memory, pages.page_map, 1, query, weights, positions)
    for row in range(16):
        one = slice(row, row + 1)
        alone = reference.index_scores(pages.memory, pages.page_map, 1, query[one], weights[one], positions[one])
        assert torch.equal(alone[0], together[row, : alone.shape[1]])
        assert bool((together[row, alone.shape[1] :] == -torch.inf).all())
    repeated = reference.index_scores(
        pages.memory, pages.page_map, 1, query[[1, 0]], weights[[1, 0]], positions[[1, 0]].contiguous()
    )
    assert torch.equal(repeated[0], together[1])


def test_what_lies_beyond_the_history_is_never_seen() -> None:
    keys = noise(100, INDEX_DIM)
    query, weights = noise(1, HEADS, INDEX_DIM).bfloat16(), noise(1, HEADS)
    positions = torch.tensor([99], device=DEVICE)
    poisoned, clean = (filled(Q8G64, 100, keys, max_pages=16) for _ in range(2))
    used = clean.page_map.key_block_address[1, 1] - clean.key_blocks.data_ptr()
    clean.key_blocks[used + 36 * 128 : used + 8192] = 0
    scores = [reference.index_scores(p.memory, p.page_map, 1, query, weights, positions) for p in (poisoned, clean)]
    assert torch.equal(*scores)
    assert bool(scores[0].isfinite().all())


def test_positions_outside_the_map_are_refused() -> None:
    pages = Pages.random(PageFormat(Q8G64, GROUPS), 4, length=256)
    before = pages.snapshot()
    query, weights = noise(2, HEADS, INDEX_DIM), noise(2, HEADS)
    for bad in (-1, 256, torch.iinfo(torch.int32).min, 2**62):
        positions = torch.tensor([5, bad], device=DEVICE)
        with pytest.raises(InvalidValue, match=str(bad)):
            reference.append_keys(pages.memory, pages.page_map, 0, positions, noise(2, INDEX_DIM))
        with pytest.raises(InvalidValue, match=str(bad)):
            reference.index_scores(pages.memory, pages.page_map, 0, query, weights, positions)
    assert_same_bytes(pages.snapshot(), before)
