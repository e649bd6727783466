"""Rows as float16, beside plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compute.kernels.descriptors import describe
from compute.kernels.half_rows import HALF_ROW_DIMS, fill_half_rows
from compute.kernels.state import NO_RING
from protocol.errors import InvalidValue
from protocol.layout import FP8_DS_MLA, PAGE_TOKENS, Q8G64
from tests.kernels.pages import DEVICE, Pages, format_of

LAYERS, PAGES = 4, 5


def halves_of(rows: Tensor) -> Tensor:
    """float16 [n, 576] of rows of bytes."""
    layout = Q8G64.rows
    scales = rows[:, layout.scales_offset : layout.scales_offset + 16].contiguous().view(torch.bfloat16).half()
    latents = rows[:, :512].view(torch.int8).half().view(-1, 8, 64) * scales[:, :, None]
    ropes = rows[:, layout.rope_offset : layout.rope_offset + 128].contiguous().view(torch.bfloat16).half()
    return torch.cat([latents.view(-1, 512), ropes], 1)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # by numpy, of infinities
@pytest.mark.parametrize("layer", [0, LAYERS - 1])
@pytest.mark.parametrize(
    ("length", "ring_first", "room"),
    [(1, NO_RING, 7), (PAGES * PAGE_TOKENS, NO_RING, PAGES * PAGE_TOKENS), (300, 2 * PAGE_TOKENS, 301), (300, 70, 203)],
)
def test_rows_at_home_and_in_the_ring(length: int, ring_first: int, room: int, layer: int) -> None:
    pages = Pages.random(format_of(), PAGES, length=length, ring_first=ring_first)
    page_format, count = pages.page_map.format, min(length, room)
    tokens = {}
    for where, memory, number in (("home", pages.home, PAGES), ("ring", pages.ring, pages.page_map.ring_pages)):
        rows = memory.view(number, page_format.stride)[:, page_format.group_offset(1) :]
        tokens[where] = rows[:, : PAGE_TOKENS * page_format.group_row_bytes(1)].view(number, PAGE_TOKENS, LAYERS, -1)
    order = (pages.page_map.page_address - pages.home.data_ptr()) // page_format.stride
    position = torch.arange(count, device=DEVICE)
    page, token = position // PAGE_TOKENS, position % PAGE_TOKENS
    home = tokens["home"][order[page], token, layer]
    ring = tokens["ring"][page % pages.page_map.ring_pages, token, layer]
    expected = halves_of(torch.where((position >= ring_first)[:, None], ring, home))
    halves = torch.full((room, HALF_ROW_DIMS), -7.0, dtype=torch.float16, device=DEVICE)
    fill_half_rows(describe(pages.page_map, 1).to(DEVICE), page_format, 1, layer, halves)
    torch.testing.assert_close(halves[:count], expected, rtol=0, atol=0, equal_nan=True)
    assert bool((halves[count:] == -7.0).all())


def test_what_is_refused() -> None:
    page_format, record = format_of(), torch.zeros(16, dtype=torch.int64)
    halves = torch.empty((4, HALF_ROW_DIMS), dtype=torch.float16)
    with pytest.raises(InvalidValue, match="encoding"):
        fill_half_rows(record, format_of(FP8_DS_MLA), 1, 0, halves)
    for wrong in (halves.float(), halves[:, :-1], halves[:, :-1].contiguous()):
        with pytest.raises(InvalidValue, match="halves"):
            fill_half_rows(record, page_format, 1, 0, wrong)
