"""Blocks of 64 index keys in VRAM, one for each page and index group, shared by the histories that share the page.

The indexer reads every key of the history at every step, so keys stay in VRAM whatever the mode. Blocks are cut from
slabs, which are larger the more there are, and a slab goes back with its last block. The blocks of a page are counted
together: a block that several histories have is written by none of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compute.attach import Attachment, DeviceBuffer
from compute.homes import Home
from protocol.layout import PageFormat, next_slab_bytes

LOADED_PAGES = 64
"""Pages whose keys are copied to VRAM at a time."""


class PageKeys:
    """The key blocks of one page: their addresses, by index group, and how many histories have them."""

    __slots__ = ("addresses", "references")

    def __init__(self, addresses: list[int]) -> None:
        self.addresses = addresses
        self.references = 1


class KeyBlocks:
    """The key blocks of one worker."""

    def __init__(self, attachment: Attachment, page_format: PageFormat) -> None:
        self._attachment = attachment
        self._groups = len(page_format.groups)
        self.block_bytes = page_format.encoding.keys.block_bytes
        self.place = slice(page_format.keys_offset(0), page_format.keys_offset(0) + page_format.keys_bytes)
        """Where a page at home has the keys of all groups."""
        self._slabs: dict[int, DeviceBuffer] = {}
        self._free: dict[int, list[int]] = {}
        self._slab_of: dict[int, int] = {}
        self._free_blocks = 0
        self._held_bytes = 0

    def take(self) -> PageKeys:
        """A page's blocks, for one history. What they hold is undefined. Raises `OutOfCapacity`, and takes none."""
        while self._free_blocks < self._groups:
            self._add_slab()
        self._free_blocks -= self._groups
        addresses: list[int] = []
        while len(addresses) < self._groups:
            slab, free = next(iter(self._free.items()))
            missing = self._groups - len(addresses)
            addresses += free[-missing:][::-1]
            del free[-missing:]
            if not free:
                del self._free[slab]
        return PageKeys(addresses)

    def drop(self, page: PageKeys) -> None:
        """Take a history away; with the last one the blocks are free, and a slab goes with its last block."""
        page.references -= 1
        if page.references:
            return
        self._free_blocks += self._groups
        for address in page.addresses:
            slab = self._slab_of[address]
            free = self._free.setdefault(slab, [])
            free.append(address)
            if len(free) == self._slabs[slab].tensor.nbytes // self.block_bytes:
                for block in self._free.pop(slab):
                    del self._slab_of[block]
                self._free_blocks -= len(free)
                self._held_bytes -= self._slabs[slab].tensor.nbytes
                self._slabs.pop(slab).free()

    def write(self, pages: list[PageKeys], keys: Tensor) -> None:
        """Fill the blocks of ``pages`` with ``keys`` uint8 [pages, groups × block bytes], as host pages have them."""
        addresses = torch.tensor([page.addresses for page in pages], device=keys.device).flatten()
        self._attachment.memory.write(addresses, keys.reshape(-1, self.block_bytes))

    def copy(self, source: PageKeys) -> PageKeys:
        """Blocks with the same keys, for one history. Kernels that write ``source`` are done."""
        page = self.take()
        addresses = torch.tensor(source.addresses, device=self._attachment.device.torch_device)
        self.write([page], self._attachment.memory.read(addresses, self.block_bytes).reshape(1, -1))
        return page

    def _add_slab(self) -> None:
        buffer = self._attachment.allocate(next_slab_bytes(self._held_bytes), "index_keys")
        blocks = [
            buffer.address + index * self.block_bytes for index in range(buffer.tensor.nbytes // self.block_bytes)
        ]
        self._slabs[buffer.address] = buffer
        self._held_bytes += buffer.tensor.nbytes
        self._free[buffer.address] = blocks[::-1]
        self._slab_of.update(dict.fromkeys(blocks, buffer.address))
        self._free_blocks += len(blocks)


class KeyTable:
    """The blocks of one history, page by page, and ``addresses`` int64 [groups, pages] that kernels find them by."""

    def __init__(self, blocks: KeyBlocks, addresses: Tensor) -> None:
        self._blocks = blocks
        self._addresses = addresses
        self._pages: list[PageKeys] = []

    def __len__(self) -> int:
        return len(self._pages)

    def share(self, source: KeyTable, pages: int) -> None:
        """Begin, empty, with the first ``pages`` pages of ``source``, as far as it has them."""
        assert not self._pages, "a table that has pages shares none"
        self._pages = source._pages[:pages]
        for page in self._pages:
            page.references += 1
        count = len(self._pages)
        self._addresses[:, :count] = source._addresses[:, :count]

    def extend(self, pages: int) -> None:
        """Have blocks for ``pages`` pages. Raises `OutOfCapacity`; those that there was room for stay."""
        first = len(self._pages)
        try:
            while len(self._pages) < pages:
                self._pages.append(self._blocks.take())
        finally:
            self._point(first, len(self._pages))

    def load(self, home: Home, pages: range) -> None:
        """Fill the blocks of ``pages``, none shared, from where they are at home, as they come there."""
        for first in range(pages.start, pages.stop, LOADED_PAGES):
            part = range(first, min(first + LOADED_PAGES, pages.stop))
            home.fetch(first, len(part))
            keys = torch.stack([home.page(page)[self._blocks.place] for page in part])
            self._blocks.write(self._pages[first : part.stop], keys)

    def own(self, page: int) -> None:
        """Have ``page`` alone, with the same keys: it is written from now on."""
        shared = self._pages[page]
        if shared.references > 1:
            self._pages[page] = self._blocks.copy(shared)
            self._blocks.drop(shared)
            self._point(page, page + 1)

    def truncate(self, pages: int) -> None:
        """Keep the first ``pages`` pages. No kernel uses the others any more."""
        for page in self._pages[pages:]:
            self._blocks.drop(page)
        del self._pages[pages:]

    def _point(self, first: int, end: int) -> None:
        if first < end:
            columns = torch.tensor([page.addresses for page in self._pages[first:end]], dtype=torch.int64)
            self._addresses[:, first:end] = columns.T.to(self._addresses.device)
