"""What the hot caches of a history begin decoding with: its newest rows, and what its last rows selected."""

from __future__ import annotations

from torch import Tensor

from compute.hot_cache import HotCaches
from compute.kernels.kernel_set import KernelSet

ROWS = 16
"""Last rows of a pass whose selections are fetched."""


class Warming:
    """The rounds that warm ``caches``, if there are any, beside the passes that select.

    ``end`` is a history's first position that is in the ring.
    """

    def __init__(self, caches: HotCaches | None, kernels: KernelSet) -> None:
        self._caches, self._kernels = caches, kernels
        self._selections: dict[int, Tensor] = {}
        self._under_way: list[Tensor] = []  # must outlive what reads them

    def keep(self, group: int, selection: Tensor) -> None:
        """Have the last rows' selections of a pass to warm with."""
        if self._caches is not None:
            self._selections[group] = selection[-ROWS:].clone()

    def begin(self, group: int, end: int) -> None:
        """Warm one group with what was kept of it, beside what is enqueued from now on."""
        selections = self._selections.pop(group, None)
        if selections is None or self._caches is None:
            return
        self._under_way.append(selections)
        with self._kernels.beside():
            for part in self._caches.warming(selections, end):
                self._kernels.round(group, part)

    def finish(self, end: int) -> None:
        """What is enqueued from now on finds every group warm of which something was kept."""
        for group in list(self._selections):
            self.begin(group, end)
        self.join()

    def join(self) -> None:
        """What is enqueued from now on comes after all rounds that were begun."""
        if self._under_way:
            self._kernels.join()
            self._under_way.clear()

    def forget(self) -> None:
        """Nothing is kept any more. No round may be under way."""
        self._selections.clear()
        self._under_way.clear()
