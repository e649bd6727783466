"""Rows brought into VRAM for a pass: the same bytes at other addresses, group by group; pages in the ring stay."""

from __future__ import annotations

import pytest
import torch

from compute.kernels.kernel_set import ReferenceKernels
from compute.kernels.reference import Memory
from compute.kernels.stage import Stage
from compute.kernels.triton_set import TritonKernels
from protocol.layout import PAGE_TOKENS
from tests.kernels.pages import DEVICE, Pages, format_of

PAGES, RING_FIRST, LENGTH, K = 7, 4 * PAGE_TOKENS, 400, 64


def _selection(rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    chosen = [torch.randperm(LENGTH, generator=generator)[:K].sort().values for _ in range(rows)]
    selection = torch.stack(chosen).int()
    selection[0, -5:] = -1
    return selection.to(DEVICE)


@pytest.mark.parametrize("passes", [1, 2])
def test_streamed_rows_are_those_at_home(passes: int) -> None:
    pages = Pages.random(format_of(), PAGES, length=LENGTH, ring_first=RING_FIRST)
    kernels = TritonKernels(pages.page_map, [], K)
    truth = ReferenceKernels(pages.memory, pages.page_map, [], K)
    for turn in range(passes):
        for group in range(2):
            selection = _selection(6)
            streamed = kernels.streamed(group, selection, RING_FIRST // PAGE_TOKENS)
            stage = kernels._stage
            assert stage is not None
            nbytes = format_of().group_row_bytes(group)
            expected = pages.memory.read(truth.in_place(group, selection), nbytes)
            memory = Memory(stage._rows.view(-1), pages.ring)  # not a byte at home is read
            assert torch.equal(memory.read(streamed, nbytes), expected)
        pages.home.copy_(pages.home.roll(16 * (turn + 1)))  # the next pass brings the rows anew


def test_room_grows_with_the_history_and_is_given_back() -> None:
    pages = Pages.random(format_of(), PAGES, length=LENGTH, ring_first=RING_FIRST)
    kernels = TritonKernels(pages.page_map, [], K)
    kernels.streamed(0, _selection(6), 1)
    assert kernels._stage is not None
    assert kernels._stage.pages == 256
    small = Stage(pages.page_map, kernels._records, 2)  # what there is no room for is left out
    small.record(0)
    kernels.release()
    assert kernels._stage is None
