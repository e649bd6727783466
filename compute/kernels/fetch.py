"""Fetch: the misses of a round, each one contiguous read of its group row from registered host RAM into its slot.

The definition is `compute.kernels.reference.fetch`. The grid is fixed; how many misses there are is device data. All
sessions' misses are one list, of which program p copies the p-th, then every ``PROGRAMS``-th, ``ROWS`` at a time.

The bus is full with some hundred rows under way, wherever they are asked for. But a multiprocessor that waits for the
host answers its other programs late, and the products beside a fetch are as slow as their slowest one: so the rows
are asked for from few multiprocessors (docs/decisions/016).
"""

from __future__ import annotations

import triton
import triton.language as tl

from compute.kernels.resolve import RoundBuffers
from compute.kernels.triton_support import await_kernel_before, launch_options

PROGRAMS = 24
"""Programs of a launch, for all sessions."""
ROWS = 4
"""Rows that a program copies at a time."""
WARPS = 4


def fetch(buffers: RoundBuffers, group_row_bytes: int) -> None:
    """Enqueue the copies of the round that was resolved into ``buffers``. ``group_row_bytes`` is a multiple of 16."""
    batch, capacity = buffers.source.shape
    words = group_row_bytes // 4
    _fetch_kernel[(PROGRAMS,)](
        buffers.source,
        buffers.target,
        buffers.misses,
        batch,
        CAPACITY=capacity,
        PLACES=triton.next_power_of_2(batch),
        WORDS=words,
        BLOCK=triton.next_power_of_2(words),
        ROWS=ROWS,
        PROGRAMS=PROGRAMS,
        num_warps=WARPS,
        **launch_options(),
    )


@triton.jit
def _fetch_kernel(  # type: ignore[no-untyped-def]
    source,
    target,
    misses,
    batch,
    CAPACITY: tl.constexpr,
    PLACES: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    place = tl.arange(0, PLACES)
    word = tl.arange(0, BLOCK)
    first = tl.program_id(0)
    await_kernel_before(OVERLAPPED)
    count = tl.load(misses + place, mask=place < batch, other=0)
    end = tl.cumsum(count)
    total = tl.sum(count)
    while first < total:
        miss = first + tl.arange(0, ROWS) * PROGRAMS
        before = end[None, :] <= miss[:, None]
        session = tl.sum(before.to(tl.int64), 1)
        at = session * CAPACITY + miss - tl.sum(tl.where(before, count[None, :], 0), 1)
        wanted = miss < total
        home = tl.load(source + at, mask=wanted, other=0).to(tl.pointer_type(tl.int32))
        slot = tl.load(target + at, mask=wanted, other=0).to(tl.pointer_type(tl.int32))
        in_row = wanted[:, None] & (word < WORDS)[None, :]
        row = tl.load(tl.multiple_of(home[:, None] + word[None, :], [1, 16]), mask=in_row)
        tl.store(tl.multiple_of(slot[:, None] + word[None, :], [1, 16]), row, mask=in_row)
        first += ROWS * PROGRAMS
