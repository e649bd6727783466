"""One small session for the kernel tests: pages at home in no order, a ring, key blocks, all reachable by address."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compute.kernels.reference import Memory
from compute.kernels.state import NO_RING, GroupCache, PageMap, PageRun
from protocol.layout import F32, FP8_DS_MLA, PAGE_TOKENS, Q8G64, Encoding, IndexGroup, PageFormat

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

GROUPS = (IndexGroup(0, 1), IndexGroup(1, 4))
ENCODINGS = (Q8G64, FP8_DS_MLA, F32)


def format_of(encoding: Encoding = Q8G64) -> PageFormat:
    return PageFormat(encoding, GROUPS)


@dataclass
class Pages:
    """A session of ``pages`` pages, ``ring_pages`` of them in a ring from position ``ring_first`` on."""

    home: Tensor
    ring: Tensor
    key_blocks: Tensor
    page_map: PageMap

    @classmethod
    def random(
        cls,
        page_format: PageFormat,
        pages: int,
        *,
        length: int,
        ring_first: int = NO_RING,
        ring_pages: int = 4,
        seed: int = 0,
    ) -> Pages:
        generator = torch.Generator().manual_seed(seed)

        def noise(nbytes: int) -> Tensor:
            return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).to(DEVICE)

        block = page_format.encoding.keys.block_bytes
        groups = len(page_format.groups)
        home, ring = noise(pages * page_format.stride), noise(ring_pages * page_format.stride)
        key_blocks = noise(groups * pages * block)
        order = torch.randperm(pages, generator=generator).to(DEVICE)
        blocks = torch.randperm(groups * pages, generator=generator).to(DEVICE).view(groups, pages)
        page_map = PageMap(
            page_address=home.data_ptr() + order * page_format.stride,
            key_block_address=key_blocks.data_ptr() + blocks * block,
            window=torch.tensor([ring_first, length], device=DEVICE),
            ring_base=ring.data_ptr(),
            ring_pages=ring_pages,
            format=page_format,
        )
        return cls(home, ring, key_blocks, page_map)

    @property
    def memory(self) -> Memory:
        return Memory(self.home, self.ring, self.key_blocks)

    def at_home(self, pages: int) -> list[PageRun]:
        """The first pages, as runs."""
        runs: list[PageRun] = []
        for address in self.page_map.page_address[:pages].tolist():
            if runs and address == runs[-1].address + runs[-1].pages * self.page_map.format.stride:
                runs[-1] = PageRun(runs[-1].address, runs[-1].pages + 1)
            else:
                runs.append(PageRun(address, 1))
        return runs

    def snapshot(self) -> list[Tensor]:
        return [self.home.clone(), self.ring.clone(), self.key_blocks.clone()]

    def restore(self, saved: list[Tensor]) -> None:
        for tensor, old in zip((self.home, self.ring, self.key_blocks), saved, strict=True):
            tensor.copy_(old)

    def cache(self, group: int, slots: int) -> GroupCache:
        layers, row_bytes = self.page_map.format.groups[group].layers, self.page_map.format.encoding.rows.row_bytes
        rows = torch.full((slots, layers, row_bytes), 0xFF, dtype=torch.uint8, device=DEVICE)  # NaN in every dtype
        return GroupCache.empty(rows, self.page_map.page_address.shape[0] * PAGE_TOKENS)


def assert_same_bytes(actual: list[Tensor], expected: list[Tensor]) -> None:
    """Every byte of every buffer; names the first that differs."""
    for index, (left, right) in enumerate(zip(actual, expected, strict=True)):
        different = (left != right).nonzero()
        assert not len(different), f"buffer {index}: {len(different)} bytes differ, first at {different[0].item()}"


def assert_inverse(cache: GroupCache) -> None:
    """``table`` and ``slot_position`` are inverse, and no claim is left behind."""
    filled = cache.slot_position >= 0
    assert torch.equal(cache.table[cache.slot_position[filled].long()].long(), filled.nonzero().squeeze(1))
    assert int((cache.table >= 0).sum()) == int(filled.sum())
    assert int(cache.table.min()) >= -1
