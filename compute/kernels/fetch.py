"""Fetch: the misses of a round, each one contiguous read of its group row from registered host RAM into its slot.

The definition is `compute.kernels.reference.fetch`. The grid is fixed; how many misses there are is device data, and
each program copies every ``PROGRAMS``-th one of its session.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compute.kernels.resolve import RoundBuffers
from compute.kernels.triton_support import await_kernel_before, launch_options

PROGRAMS = 512
"""Programs of a launch, shared out over the sessions of the batch."""
LEAST_PROGRAMS = 64
"""Programs of one session: enough reads in flight to fill the bus when one session has all the misses."""
WARPS = 1


def fetch(buffers: RoundBuffers, group_row_bytes: int) -> None:
    """Enqueue the copies of the round that was resolved into ``buffers``. ``group_row_bytes`` is a multiple of 16."""
    batch, capacity = buffers.source.shape
    programs = min(capacity, max(LEAST_PROGRAMS, PROGRAMS // batch))
    words = group_row_bytes // 4
    _fetch_kernel[(programs, batch)](
        buffers.source,
        buffers.target,
        buffers.misses,
        CAPACITY=capacity,
        WORDS=words,
        BLOCK=triton.next_power_of_2(words),
        PROGRAMS=programs,
        num_warps=WARPS,
        **launch_options(),
    )


@triton.jit
def _fetch_kernel(  # type: ignore[no-untyped-def]
    source,
    target,
    misses,
    CAPACITY: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    await_kernel_before(OVERLAPPED)
    session = tl.program_id(1).to(tl.int64)
    miss = tl.program_id(0)
    source += session * CAPACITY
    target += session * CAPACITY
    word = tl.arange(0, BLOCK)
    # Read before the count is known to save a trip; what lies beyond the count is not followed.
    home = tl.load(source + miss)
    slot = tl.load(target + miss)
    count = tl.load(misses + session)
    while miss < count:
        from_home = tl.multiple_of(home.to(tl.pointer_type(tl.int32)), 16)
        to_slot = tl.multiple_of(slot.to(tl.pointer_type(tl.int32)), 16)
        row = tl.load(from_home + word, mask=word < WORDS)
        miss += PROGRAMS
        more = miss < count
        home = tl.load(source + miss, mask=more, other=0)
        slot = tl.load(target + miss, mask=more, other=0)
        tl.store(to_slot + word, row, mask=word < WORDS)
