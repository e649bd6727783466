"""Drawn selections in the place of scored ones, for many sessions in one step: by session and position.

Scores and selections are computed at full cost before. What a session selects depends on its own positions only, so it
selects the same in a batch, alone, resident and offloaded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compute.decode.reference_step import ReferenceStep
from compute.decode.step import DecodeStep
from compute.kernels.triton_support import await_kernel_before, launch_options

_LANES = 1024


class DrawnSelections:
    """``drawn`` int32 [sessions, steps, groups, k]: of the rows from ``first`` int64 [sessions] on, one a step.

    A ``choose`` of a `DecodeStep` of one query row. Rows that nothing was drawn for keep what they selected.
    """

    def __init__(self, places: int, device: torch.device) -> None:
        self._places = torch.full((places,), -1, dtype=torch.int64, device=device)
        self._drawn = torch.empty((0, 0, 0, 0), dtype=torch.int32, device=device)
        self._first = torch.zeros(places, dtype=torch.int64, device=device)
        self._address = torch.zeros(4, dtype=torch.int64, device=device)
        self._step: DecodeStep | None = None
        self._calls = 0

    def serve(self, step: DecodeStep) -> None:
        """Be the ``choose`` of ``step``, which was made with this."""
        self._step = step

    def use(self, drawn: Tensor, first: Tensor) -> None:
        """Draw from these from now on. Recorded steps read them by their address, so that they may change."""
        self._drawn, self._first = drawn, first
        sizes = [drawn.data_ptr(), first.data_ptr(), drawn.shape[1], drawn.shape[2]]
        self._address.copy_(torch.tensor(sizes))

    def place(self, place: int, session: int) -> None:
        """``session`` is in ``place``."""
        self._places[place] = session

    def __call__(self, group: int, selection: Tensor) -> None:
        assert self._step is not None, "selections serve the step that they are made for"
        positions = self._step.attention.positions
        if isinstance(self._step.attention, ReferenceStep):
            self._choose_one(group, selection, positions)
            return
        batch, _, k = selection.shape
        _choose_kernel[(triton.cdiv(k, _LANES), batch)](
            self._address, self._places, positions, selection, group, k, num_warps=4, **launch_options()
        )

    def _choose_one(self, group: int, selection: Tensor, positions: Tensor) -> None:
        """The reference goes from place to place, in the order in which they were taken: the first ones."""
        taken = int((positions[:, 0] >= 0).sum())
        place, self._calls = self._calls % taken, self._calls + 1
        session = int(self._places[place])
        step = int(positions[place, 0] - self._first[session])
        if 0 <= step < self._drawn.shape[1]:
            selection.copy_(self._drawn[session, step, group])


@triton.jit
def _choose_kernel(  # type: ignore[no-untyped-def]
    address, places, positions, selection, group, k, OVERLAPPED: tl.constexpr
):
    place = tl.program_id(1)
    lane = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    await_kernel_before(OVERLAPPED)
    drawn = tl.load(address).to(tl.pointer_type(tl.int32))
    first = tl.load(address + 1).to(tl.pointer_type(tl.int64))
    steps, groups = tl.load(address + 2), tl.load(address + 3)
    session, position = tl.load(places + place), tl.load(positions + place)
    step = position - tl.load(first + tl.maximum(session, 0))
    known = (step >= 0) & (step < steps) & (session >= 0) & (position >= 0)
    wanted = lane < tl.where(known, k, 0)
    source = ((session * steps + step) * groups + group) * k
    tl.store(selection + place * k + lane, tl.load(drawn + source + lane, mask=wanted, other=0), mask=wanted)
