"""Positions of a step's rows, counted on the device: a sampler's decision reaches the next step without the host."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from compute.kernels import descriptors as field
from compute.kernels.triton_support import await_kernel_before, launch_options, load_pointer
from protocol.errors import InvalidValue


def begin_step(records: Tensor, accepted: Tensor, lengths: Tensor, positions: Tensor, seen: Tensor) -> None:
    """Add what the last step kept to each session's length, and give this step's rows their positions.

    ``records`` int64 [batch, `descriptors.FIELDS`] of any one group; ``accepted`` and ``lengths`` int64 [batch];
    ``positions`` int64 [batch, rows] become length, length + 1, …, and ``seen`` how many positions each row sees, one
    more. The session's window is moved to cover the rows. An idle place's rows get position -1 and see nothing. Raises
    `InvalidValue` for shapes that do not fit.
    """
    batch, rows = positions.shape
    if not len(records) == len(accepted) == len(lengths) == batch or seen.shape != positions.shape:
        raise InvalidValue("records, accepted, lengths", (len(records), len(accepted), len(lengths)), f"{batch} each")
    _begin_kernel[(batch,)](
        records,
        accepted,
        lengths,
        positions,
        seen,
        rows,
        FIELDS=field.FIELDS,
        ROWS=triton.next_power_of_2(rows),
        num_warps=1,
        **launch_options(),
    )


@triton.jit
def _begin_kernel(  # type: ignore[no-untyped-def]
    records,
    accepted,
    lengths,
    positions,
    seen,
    rows,
    FIELDS: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    place = tl.program_id(0)
    row = tl.arange(0, ROWS)
    await_kernel_before(OVERLAPPED)
    record = records + place * FIELDS
    active = tl.load(record + field.PAGE_ADDRESS) != 0
    length = tl.load(lengths + place) + tl.load(accepted + place)
    window = load_pointer(record, field.WINDOW, tl.int64)
    tl.store(lengths + place, length, mask=active)
    tl.store(window + 1, length + rows, mask=active)
    position = tl.where(active, length + row, -1)
    tl.store(positions + place * rows + row, position, mask=row < rows)
    tl.store(seen + place * rows + row, position + 1, mask=row < rows)
