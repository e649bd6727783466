"""The rows of one index group, brought from their home in host RAM into VRAM for a pass with many query rows.

A pass of a thousand query rows selects each row of a long history many times over: read in place, the bus would carry
each of these reads. So a group's rows come over once, all of them, while the group before is computed: there is room
for two groups, whatever the number of layers. The copy is a kernel of few programs, which follows the page table on the
device; it needs nothing of the host.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from compute.kernels import descriptors as field
from compute.kernels.state import PageMap
from compute.kernels.triton_support import await_kernel_before, launch_options, load_pointer, whole_edges
from protocol.layout import PAGE_TOKENS

PROGRAMS = 24
"""Programs of a copy: 768 KiB of reads in flight, which is more than the bus takes, and the other SMs left alone."""
GROWTH_PAGES = 256
"""Room is made for multiples of so many pages."""

_WORDS = 4096  # of 8 bytes, copied by a program at a time
_PAGE_TOKENS = tl.constexpr(PAGE_TOKENS)


class Stage:
    """Room for the rows that up to ``pages`` pages hold of any two groups. One stream fills it while another reads.

    ``records`` int64 [groups, `descriptors.FIELDS`] are the session's. Drop it only when no work is enqueued.
    """

    def __init__(self, page_map: PageMap, records: Tensor, pages: int) -> None:
        self.pages = pages
        self._format, self._sources = page_map.format, records
        groups, device = len(records), records.device
        sizes = [PAGE_TOKENS * page_map.format.group_row_bytes(group) for group in range(groups)]
        self._rows = torch.empty((2, pages * max(sizes)), dtype=torch.uint8, device=device)
        order = torch.arange(len(page_map.page_address), device=device)
        starts = [self._rows[group % 2].data_ptr() - page_map.format.group_offset(group) for group in range(groups)]
        self._tables = torch.stack([start + order * size for start, size in zip(starts, sizes, strict=True)])
        self._records = records.clone()
        self._records[:, field.PAGE_ADDRESS.value] = self._tables.data_ptr() + torch.arange(groups, device=device) * (
            self._tables.stride(0) * 8
        )
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._coming = -1

    def record(self, group: int) -> Tensor:
        """The session's record of ``group``, int64 [1, `descriptors.FIELDS`], with pages at home read from here.

        Launches from now on find the rows. Groups of a pass are asked for in ascending order, from 0 on; the rows of
        the next one begin to come now, over those of the one before.
        """
        if group != self._coming:
            self._copy(group)
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._coming = group + 1
        if self._coming < len(self._records):
            self._copy(self._coming)
        return self._records[group : group + 1]

    def _copy(self, group: int) -> None:
        nbytes = PAGE_TOKENS * self._format.group_row_bytes(group)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext(), whole_edges():
            _copy_kernel[(PROGRAMS,)](
                self._sources[group],
                self._tables[group],
                self._format.group_offset(group),
                nbytes // 8,
                self.pages,
                WORDS=_WORDS,
                PARTS=triton.cdiv(nbytes // 8, _WORDS),
                PROGRAMS=PROGRAMS,
                num_warps=8,
                **launch_options(),
            )


@triton.jit
def _copy_kernel(  # type: ignore[no-untyped-def]
    record,
    table,
    group_offset,
    words,
    room,
    WORDS: tl.constexpr,
    PARTS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """All pages before the ring, as many as there is room for, in parts."""
    await_kernel_before(OVERLAPPED)
    window = load_pointer(record, field.WINDOW, tl.int64)
    homes = load_pointer(record, field.PAGE_ADDRESS, tl.int64)
    pages = tl.minimum(tl.load(window), tl.load(window + 1)) // _PAGE_TOKENS
    total = tl.minimum(pages, room) * PARTS
    part = tl.program_id(0).to(tl.int64)
    while part < total:
        page = part // PARTS
        word = (part % PARTS) * WORDS + tl.arange(0, WORDS)
        source = tl.multiple_of((tl.load(homes + page) + group_offset).to(tl.pointer_type(tl.int64)), 16)
        target = tl.multiple_of((tl.load(table + page) + group_offset).to(tl.pointer_type(tl.int64)), 16)
        tl.store(target + word, tl.load(source + word, mask=word < words), mask=word < words)
        part += PROGRAMS
