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


def _check(kernels: TritonKernels, pages: Pages, group: int, home_pages: int) -> None:
    """All rows of ``group`` are found, without a byte that is read at home."""
    selection = _selection(6)
    streamed = kernels.streamed(group, selection, pages.at_home(home_pages), length=LENGTH)
    assert kernels._stage is not None
    nbytes = format_of().group_row_bytes(group)
    truth = ReferenceKernels(pages.memory, pages.page_map, [], K)
    expected = pages.memory.read(truth.in_place(group, selection), nbytes)
    assert torch.equal(Memory(kernels._stage._rows.view(-1), pages.ring).read(streamed, nbytes), expected)


@pytest.mark.parametrize("order", [(0, 1, 0, 1, 0), (0, 0, 0), (1, 0, 1)], ids=str)
def test_streamed_rows_are_those_at_home(order: tuple[int, ...]) -> None:
    pages = Pages.random(format_of(), PAGES, length=LENGTH, ring_first=RING_FIRST)
    kernels = TritonKernels(pages.page_map, [], K)
    for group in order:
        _check(kernels, pages, group, RING_FIRST // PAGE_TOKENS)


def test_a_pass_that_left_the_ring_comes_behind_what_was_brought_ahead() -> None:
    pages = Pages.random(format_of(), PAGES, length=LENGTH, ring_first=2 * PAGE_TOKENS)
    kernels = TritonKernels(pages.page_map, [], K)
    for home_pages in (2, 3, 3, 5):
        pages.page_map.window[0] = home_pages * PAGE_TOKENS
        _check(kernels, pages, 0, home_pages)
        _check(kernels, pages, 1, home_pages)


def test_changed_pages_are_brought_anew_after_a_release() -> None:
    pages = Pages.random(format_of(), PAGES, length=LENGTH, ring_first=RING_FIRST)
    kernels = TritonKernels(pages.page_map, [], K)
    for turn in range(2):
        for group in (0, 1, 0, 1):
            _check(kernels, pages, group, RING_FIRST // PAGE_TOKENS)
        kernels.release()
        pages.home.copy_(pages.home.roll(16 * (turn + 1)))


def test_copies_are_whole_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that lie one behind the other are one copy, of what has not come yet."""
    pages = Pages.random(format_of(), PAGES, length=LENGTH, ring_first=RING_FIRST)
    stride = format_of().stride
    pages.page_map.page_address.copy_(pages.home.data_ptr() + torch.arange(PAGES, device=DEVICE) * stride)
    kernels = TritonKernels(pages.page_map, [], K)
    kernels._stage = Stage(pages.page_map, kernels._records, PAGES)
    copies: list[int] = []
    copied = Stage._copy_pages

    def counting(stage: Stage, target: int, source: int, nbytes: int, pages: int) -> None:
        copies.append(pages)
        copied(stage, target, source, nbytes, pages)

    monkeypatch.setattr(Stage, "_copy_pages", counting)
    for group, home_pages in ((0, 3), (1, 3), (0, 4)):
        pages.page_map.window[0] = home_pages * PAGE_TOKENS
        _check(kernels, pages, group, home_pages)
    assert copies == [3, 3, 4, 4], "of each group, then of the one that is expected next"


def test_room_grows_with_the_history_and_is_given_back() -> None:
    pages = Pages.random(format_of(), PAGES, length=LENGTH, ring_first=RING_FIRST)
    kernels = TritonKernels(pages.page_map, [], K)
    kernels.streamed(0, _selection(6), pages.at_home(1), length=LENGTH)
    assert kernels._stage is not None
    assert kernels._stage.pages == 256
    kernels.release()
    assert kernels._stage is None
