"""Index scores against exact arithmetic: values, class maxima, and what may not be read or written."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from compute.kernels import reference
from compute.kernels.descriptors import FIELDS, describe
from compute.kernels.index_score import index_scores
from compute.kernels.ptx import halves_of_e4m3
from compute.kernels.topk import TopK
from compute.kernels.topk_collect import CLASSES, NO_SCORE
from protocol.errors import InvalidValue
from tests.kernels.pages import DEVICE, Pages, format_of

GROUP = 1
PAGES = 5
RELATIVE_ERROR = 1e-6
"""Bound on the norm of the error against float64, relative to that of the scores: float32 sums of 128 and 64 terms."""


def _session(tokens: int, seed: int = 0) -> Pages:
    """Keys for ``tokens`` positions; NaN in all other keys and scales, and no address where no key is."""
    pages = Pages.random(format_of(), PAGES, length=max(tokens, 1), seed=seed)
    pages.key_blocks.fill_(0xFF)
    used = -(-tokens // 64)
    keys = torch.randn((tokens, 128), generator=torch.Generator().manual_seed(seed + 100)).to(DEVICE)
    if tokens:
        keys[tokens // 2] = 0
        reference.append_keys(pages.memory, pages.page_map, GROUP, torch.arange(tokens, device=DEVICE), keys)
    pages.page_map.key_block_address[:, used:] = 0
    return pages


def _queries(*shape: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn((*shape, 128), generator=generator).bfloat16()
    weights = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
    return query.to(DEVICE), weights.to(DEVICE)


def _score(
    sessions: list[Pages], query: Tensor, weights: Tensor, positions: Tensor, maxima: Tensor | None = None
) -> Tensor:
    records = torch.stack([describe(pages.page_map, GROUP) for pages in sessions]).to(DEVICE)
    scores = torch.full((*positions.shape, PAGES * 64), 123456.0, device=DEVICE)
    index_scores(records, query, weights, positions, scores, maxima)
    return scores


def _exact(pages: Pages, query: Tensor, weights: Tensor, tokens: int) -> Tensor:
    """float64 scores [heads' row, tokens] of one query row [heads, 128]."""
    layout = pages.page_map.format.encoding.keys
    used = -(-tokens // 64)
    blocks = pages.memory.read(pages.page_map.key_block_address[GROUP, :used], layout.block_bytes)
    values, scales = reference.decode_key_block(blocks, layout)
    keys, scales = values.view(-1, 128)[:tokens].double(), scales.view(-1)[:tokens].double()
    return weights.double() @ (query.double() @ keys.T * 128**-0.5).relu() * scales


@pytest.mark.parametrize(("rows", "heads"), [(1, 32), (2, 32), (3, 32), (4, 32), (1, 64), (2, 64), (4, 64)])
def test_lengths_that_differ_within_a_batch(rows: int, heads: int) -> None:
    lengths = [1, 64, 65, 200]
    sessions = [_session(length, seed) for seed, length in enumerate(lengths)]
    query, weights = _queries(len(lengths), rows, heads)
    positions = torch.tensor([[length - rows + row for row in range(rows)] for length in lengths]).clamp(min=-1)
    scores = _score(sessions, query, weights, positions.to(DEVICE))
    for session, length in enumerate(lengths):
        for row in range(rows):
            seen = int(positions[session, row]) + 1
            actual = scores[session, row]
            exact = _exact(sessions[session], query[session, row], weights[session, row], seen)
            error = float((actual[:seen].double() - exact).norm() / exact.norm().clamp(min=1e-30))
            assert error < RELATIVE_ERROR, f"session {session}, row {row}: {error:.1e}"
            assert bool((actual[seen:length] == -torch.inf).all())
            assert bool((actual[length:] == 123456.0).all()), "written beyond the history"


def test_the_error_is_no_larger_than_the_references() -> None:
    pages = _session(300)
    query, weights = _queries(1, 1, 32)
    positions = torch.tensor([[299]], device=DEVICE)
    exact = _exact(pages, query[0, 0], weights[0, 0], 300)
    expected = reference.index_scores(pages.memory, pages.page_map, GROUP, query[0], weights[0], positions[0])[0]
    actual = _score([pages], query, weights, positions)[0, 0, :300]
    assert (actual.double() - exact).norm() < 2 * (expected.double() - exact).norm() + 1e-7 * exact.norm()


def test_a_query_of_any_magnitude_is_exact() -> None:
    """Heads are scaled before they become float16, each by itself."""
    pages = _session(130)
    query, weights = _queries(1, 4, 32)
    query[0, 0] *= 1e-30
    query[0, 1] *= 1e30
    query[0, 2, ::2] *= 1e-12
    query[0, 2, 1] = 0
    query[0, 3] = 0
    scores = _score([pages], query, weights, torch.full((1, 4), 129, device=DEVICE))
    for row in range(3):
        exact = _exact(pages, query[0, row], weights[0, row], 130)
        error = float((scores[0, row, :130].double() - exact).norm() / exact.norm())
        assert error < RELATIVE_ERROR, f"row {row}: {error:.1e}"
    assert bool((scores[0, 3, :130] == 0).all())


def test_class_maxima_are_those_of_the_scores() -> None:
    lengths = [200, 63]
    sessions = [_session(length, seed) for seed, length in enumerate(lengths)]
    top = TopK(4, PAGES * 64, 48, DEVICE)
    query, weights = _queries(2, 2, 32)
    positions = torch.tensor([[198, 199], [-1, 62]], device=DEVICE)
    scores = _score(sessions, query, weights, positions, top.maxima)
    bits = (scores.view(4, -1) + 0.0).view(torch.int32)
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    seen = torch.arange(PAGES * 64, device=DEVICE) <= positions.view(4, 1)
    expected = torch.full((4, CLASSES), NO_SCORE, dtype=torch.int32, device=DEVICE)
    expected[:, : PAGES * 64] = keys.where(seen, NO_SCORE)
    assert torch.equal(top.maxima, expected)
    selection = torch.empty(4, 48, dtype=torch.int32, device=DEVICE)
    top.select(scores.view(4, -1), positions.view(4) + 1, selection, maxima_known=True)
    assert torch.equal(selection, reference.select_topk(scores.view(4, -1), positions.view(4) + 1, 48))


def _same_bits(actual: Tensor, expected: Tensor) -> bool:
    """In the interpreter a product is numpy's, whose rounding depends on the shape: there only almost the same."""
    return torch.equal(actual, expected) if DEVICE.type == "cuda" else torch.allclose(actual, expected, atol=1e-5)


def test_a_row_alone_among_others_and_at_any_place() -> None:
    sessions = [_session(length, seed) for seed, length in enumerate((190, 64))]
    query, weights = _queries(2, 4, 32)
    positions = torch.tensor([[189, 100, 188, 64], [3, 60, 61, 63]], device=DEVICE)
    together = _score(sessions, query, weights, positions)
    swapped = _score(sessions[::-1], query.flip(0).contiguous(), weights.flip(0).contiguous(), positions.flip(0))
    order = torch.tensor([2, 0, 3, 1], device=DEVICE)
    mixed = _score(sessions, query[:, order].contiguous(), weights[:, order].contiguous(), positions[:, order])
    for session in range(2):
        for row in range(4):
            seen = int(positions[session, row]) + 1
            one = (slice(session, session + 1), slice(row, row + 1))
            alone = _score(
                [sessions[session]], query[one].contiguous(), weights[one].contiguous(), positions[one].contiguous()
            )
            expected = together[session, row, :seen]
            assert _same_bits(alone[0, 0, :seen], expected)
            assert _same_bits(swapped[1 - session, row, :seen], expected)
            assert _same_bits(mixed[session, order.tolist().index(row), :seen], expected)


def test_an_idle_place_and_a_position_beyond_the_map() -> None:
    pages = _session(PAGES * 64)
    records = torch.stack([torch.zeros(FIELDS, dtype=torch.int64), describe(pages.page_map, GROUP)]).to(DEVICE)
    query, weights = _queries(2, 1, 32)
    scores = torch.full((2, 1, PAGES * 64), 123456.0, device=DEVICE)
    index_scores(records, query, weights, torch.tensor([[40], [2**40]], device=DEVICE), scores)
    assert bool((scores[0] == 123456.0).all())
    last = torch.tensor([[PAGES * 64 - 1]], device=DEVICE)
    assert torch.equal(scores[1], _score([pages], query[1:], weights[1:], last)[0])


def test_wrong_shapes_are_refused() -> None:
    records = torch.zeros(1, FIELDS, dtype=torch.int64, device=DEVICE)
    scores, positions = torch.zeros(1, 1, 64, device=DEVICE), torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    for heads in (12, 8, 512):
        with pytest.raises(InvalidValue, match="heads"):
            index_scores(records, *_queries(1, 1, heads), positions, scores)
    query, weights = _queries(1, 1, 32)
    with pytest.raises(InvalidValue, match="query"):
        index_scores(records, query.float(), weights, positions, scores)
    with pytest.raises(InvalidValue, match="records"):
        index_scores(records[:, :4], query, weights, positions, scores)
    with pytest.raises(InvalidValue, match="scores"):
        index_scores(records, query, weights, positions, scores[:, :, ::2])


def test_e4m3_without_the_gpus_own_conversion() -> None:
    finite = torch.tensor([byte for byte in range(256) if byte & 0x7F != 0x7F], dtype=torch.uint8, device=DEVICE)
    values = torch.zeros(256, dtype=torch.uint8, device=DEVICE)
    values[: len(finite)] = finite
    out = torch.empty(256, dtype=torch.float16, device=DEVICE)
    _convert[(1,)](values, out)
    assert torch.equal(out[: len(finite)].float(), finite.view(torch.float8_e4m3fn).float())


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [4095, 51_200])
def test_long_histories_with_tables_and_blocks_all_over_memory(tokens: int) -> None:
    """Key blocks lie more than 2**31 bytes apart; four rows and one give the same bits."""
    blocks = -(-tokens // 64)
    memory = torch.full(((5 << 30) // 4,), -1, dtype=torch.int32, device=DEVICE).view(torch.uint8)
    layout = format_of().encoding.keys
    spread = memory.numel() // blocks // 256 * 256
    table = memory.data_ptr() + torch.randperm(blocks, device=DEVICE) * spread
    values, scales = reference.encode_keys(torch.randn(blocks * 64, 128, device=DEVICE), layout)
    for block in range(blocks):
        at = int(table[block]) - memory.data_ptr()
        memory[at : at + 8192] = values[block * 64 : block * 64 + 64].view(torch.uint8).view(-1)
        memory[at + 8192 : at + 8448] = scales[block * 64 : block * 64 + 64].view(torch.uint8)
    pages = Pages.random(format_of(), 1, length=tokens)
    record = describe(pages.page_map, GROUP)
    record[1], record[2] = blocks * 64, table.data_ptr()
    query, weights = _queries(1, 4, 32)
    scores = torch.empty(1, 4, blocks * 64, device=DEVICE)
    positions = torch.full((1, 4), tokens - 1, device=DEVICE)
    index_scores(record[None].to(DEVICE), query, weights, positions, scores)
    exact = (query[0].double() @ values[:tokens].double().T * 128**-0.5).relu()
    exact = torch.einsum("rh,rht->rt", weights[0].double(), exact) * scales[:tokens].double()
    error = float((scores[0, :, :tokens].double() - exact).norm() / exact.norm())
    assert error < RELATIVE_ERROR, f"{error:.1e}"
    alone = torch.empty(1, 1, blocks * 64, device=DEVICE)
    index_scores(
        record[None].to(DEVICE), query[:, 2:3].contiguous(), weights[:, 2:3].contiguous(), positions[:, :1], alone
    )
    assert torch.equal(alone[0, 0, :tokens], scores[0, 2, :tokens])


@triton.jit
def _convert(values, out):
    at = tl.arange(0, 256)
    tl.store(out + at, halves_of_e4m3(tl.load(values + at), False))
