"""The rows of one index group, brought from their home in host RAM into VRAM for a pass with many query rows.

A pass of a thousand query rows selects each row of a long history many times over: read in place, the bus would carry
each of these reads. So a group's rows come over once, all of them, while the group before is computed: there is room
for two groups, whatever the number of layers. Copy engines bring them: a kernel that keeps the bus busy takes
multiprocessors from the pass.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from compute.kernels import descriptors as field
from compute.kernels.cuda_source import bindings, call
from compute.kernels.side_stream import SideStream
from compute.kernels.state import PageMap, PageRun
from protocol.layout import PAGE_TOKENS

GROWTH_PAGES = 256
"""Room is made for multiples of so many pages."""


class Stage:
    """Room for the rows that up to ``pages`` pages hold of any two groups. One stream fills it while another reads.

    ``records`` int64 [groups, `descriptors.FIELDS`] are the session's. To be dropped after a `join`.
    """

    def __init__(self, page_map: PageMap, records: Tensor, pages: int) -> None:
        self.pages = pages
        self._format, self._records = page_map.format, records
        device = records.device
        self._nbytes = [PAGE_TOKENS * page_map.format.group_row_bytes(group) for group in range(len(records))]
        self._rows = torch.empty((2, pages * max(self._nbytes)), dtype=torch.uint8, device=device)
        self._order = torch.arange(len(page_map.page_address), device=device)
        self._tables = torch.empty((2, len(self._order)), dtype=torch.int64, device=device)
        self._copies = SideStream(device)
        self._place = 0
        """Which half of the room is filled next, or being filled."""
        self._coming, self._copied = -1, 0
        """The group that is being brought to that place, and how many pages of it."""
        self._last = -1
        self._following: dict[int, int] = {}
        """The group that came after each in the pass before: the first comes after the last."""

    def record(self, group: int, home: Sequence[PageRun]) -> Tensor:
        """The session's record of ``group``, int64 [1, `descriptors.FIELDS`], in which pages at ``home`` are read here.

        Launches from now on find the rows. Those of the group that is expected next begin to come now, over those of
        the one before.
        """
        self._following[self._last], self._last = group, group
        if group != self._coming:
            self._copied = 0
        self._copy(group, home)
        self.join()
        table = self._tables[self._place]
        first = self._rows[self._place].data_ptr() - self._format.group_offset(group)
        torch.mul(self._order, self._nbytes[group], out=table).add_(first)
        record = self._records[group : group + 1].clone()
        record[:, field.PAGE_ADDRESS.value] = table.data_ptr()
        self._place = 1 - self._place
        self._coming, self._copied = self._following.get(group, group + 1), 0
        if self._coming < len(self._records):
            self._copy(self._coming, home)
        return record

    def join(self) -> None:
        """What is enqueued from now on comes after the copies."""
        self._copies.join()

    def _copy(self, group: int, home: Sequence[PageRun]) -> None:
        """Bring what has not come of ``group``."""
        nbytes, offset, first = self._nbytes[group], self._format.group_offset(group), 0
        with self._copies.beside():
            for run in home:
                skipped = min(max(self._copied - first, 0), run.pages)
                target = self._rows[self._place].data_ptr() + (first + skipped) * nbytes
                source = run.address + skipped * self._format.stride + offset
                if skipped < run.pages:
                    self._copy_pages(target, source, nbytes, run.pages - skipped)
                first += run.pages
        self._copied = first

    def _copy_pages(self, target: int, source: int, nbytes: int, pages: int) -> None:
        """``nbytes`` of each of some pages that lie one behind the other."""
        if self._rows.device.type == "cpu":
            for page in range(pages):
                ctypes.memmove(target + page * nbytes, source + page * self._format.stride, nbytes)
            return
        driver = bindings()[0]
        copy = driver.CUDA_MEMCPY2D()
        copy.srcMemoryType = copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_UNIFIED
        copy.srcDevice, copy.srcPitch = source, self._format.stride
        copy.dstDevice, copy.dstPitch = target, nbytes
        copy.WidthInBytes, copy.Height = nbytes, pages
        call(driver.cuMemcpy2DAsync, copy, torch.cuda.current_stream().cuda_stream)
