"""Blocks of 64 index keys in VRAM.

The indexer reads every key of the history at every step, so keys stay in VRAM whatever the mode. Blocks are cut from
slabs of 2 MiB, the least that the driver gives, and a slab goes back with its last block. A block is counted: sessions
that share a page share its keys.
"""

from __future__ import annotations

from compute.attach import Attachment, DeviceBuffer
from protocol.layout import PageFormat

SLAB_BYTES = 2 << 20


class KeyBlocks:
    """The key blocks of one worker."""

    def __init__(self, attachment: Attachment, page_format: PageFormat) -> None:
        self._attachment = attachment
        self.block_bytes = page_format.encoding.keys.block_bytes
        self._slabs: dict[int, DeviceBuffer] = {}
        self._free: dict[int, list[int]] = {}
        self._slab_of: dict[int, int] = {}
        self._references: dict[int, int] = {}

    @property
    def blocks_per_slab(self) -> int:
        return SLAB_BYTES // self.block_bytes

    def take(self) -> int:
        """The address of a block with one reference. What it holds is undefined."""
        if not self._free:
            self._add_slab()
        slab, free = next(iter(self._free.items()))
        address = free.pop()
        if not free:
            del self._free[slab]
        self._references[address] = 1
        return address

    def share(self, address: int) -> None:
        """Add a reference."""
        self._references[address] += 1

    def drop(self, address: int) -> None:
        """Take a reference away; the last one frees the block, and the last block its slab."""
        self._references[address] -= 1
        if self._references[address]:
            return
        del self._references[address]
        slab = self._slab_of[address]
        free = self._free.setdefault(slab, [])
        free.append(address)
        if len(free) == self.blocks_per_slab:
            for block in self._free.pop(slab):
                del self._slab_of[block]
            self._slabs.pop(slab).free()

    def _add_slab(self) -> None:
        buffer = self._attachment.allocate(SLAB_BYTES, "index_keys")
        blocks = [buffer.address + index * self.block_bytes for index in range(self.blocks_per_slab)]
        self._slabs[buffer.address] = buffer
        self._free[buffer.address] = blocks[::-1]
        self._slab_of.update(dict.fromkeys(blocks, buffer.address))
