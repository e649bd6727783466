"""The kernels as one session's history calls them: the reference, or another set with the same meaning.

A set is bound to the session's page map and hot caches, whose tensors it changes in place. What each call means is
defined by ``compute.kernels.reference``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from compute.kernels import reference
from compute.kernels.memory import Memory
from compute.kernels.state import GroupCache, PageMap, PageRun


class KernelSet(Protocol):
    """Kernels over one session. Positions are int64 [n]; a query row belongs to each of them where there are any."""

    def append(self, group: int, layer_in_group: int, positions: Tensor, latent: Tensor, rope: Tensor) -> None:
        """Store rows; those of the group's anchor are forgotten by its hot cache first."""

    def append_keys(self, group: int, positions: Tensor, keys: Tensor) -> None:
        """Store index keys [n, 128], in VRAM and in the page."""

    def select(self, group: int, query: Tensor, weights: Tensor, positions: Tensor) -> Tensor:
        """The selection of each query row: int32 [n, k]."""

    def in_place(self, group: int, selection: Tensor, *, length: int = 0) -> Tensor:
        """Addresses of the selected group rows, int64 [n, k], in the ring or at home.

        With the ``length`` of the history, what is returned is attended to by a pass: see `attend`.
        """

    def streamed(self, group: int, selection: Tensor, home: Sequence[PageRun], *, length: int) -> Tensor:
        """The same for passes with many query rows, after what lies in the first pages, those of ``home``, none of
        which is in the ring, was brought nearer. The groups of a pass come in ascending order; rows that were at home
        in a pass before have not changed.
        """

    def end_pass(self) -> None:
        """What was selected last is attended to no more."""

    def release(self) -> None:
        """No pass follows: give the memory back that `streamed` keeps for it."""

    def beside(self) -> AbstractContextManager[None]:
        """What is enqueued within comes after what is enqueued now, and may be under way beside what follows."""

    def join(self) -> None:
        """What is enqueued from now on comes after all that was enqueued `beside`."""

    def round(self, group: int, selection: Tensor) -> Tensor:
        """Like `in_place`, through one round of the hot cache: in the ring, or in a slot that the row is in by then."""

    def attend(
        self, addresses: Tensor, layer_in_group: int, query_latent: Tensor, query_rope: Tensor, scale: float
    ) -> Tensor:
        """Attention output in the latent space: float32 [n, heads, 512].

        The very ``addresses`` of a pass may be attended to in another way, with the same bits.
        """


class ReferenceKernels:
    """Plain torch, on any device."""

    def __init__(self, memory: Memory, page_map: PageMap, caches: Sequence[GroupCache], topk: int) -> None:
        self._memory = memory
        self._map = page_map
        self._caches = caches
        self._topk = topk

    def append(self, group: int, layer_in_group: int, positions: Tensor, latent: Tensor, rope: Tensor) -> None:
        if layer_in_group == 0 and self._caches:
            reference.forget(self._caches[group], positions)
        reference.append_rows(self._memory, self._map, group, layer_in_group, positions, latent, rope)

    def append_keys(self, group: int, positions: Tensor, keys: Tensor) -> None:
        reference.append_keys(self._memory, self._map, group, positions, keys)

    def select(self, group: int, query: Tensor, weights: Tensor, positions: Tensor) -> Tensor:
        scores = reference.index_scores(self._memory, self._map, group, query, weights, positions)
        return reference.select_topk(scores, positions + 1, self._topk)

    def in_place(self, group: int, selection: Tensor, *, length: int = 0) -> Tensor:  # noqa: ARG002
        return reference.row_addresses(self._map, group, selection)

    def streamed(self, group: int, selection: Tensor, home: Sequence[PageRun], *, length: int) -> Tensor:  # noqa: ARG002
        assert home, "nothing lies at home"
        return self.in_place(group, selection)  # on a CPU all memory is near

    def end_pass(self) -> None:
        pass

    def release(self) -> None:
        pass

    def beside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def join(self) -> None:
        pass

    def round(self, group: int, selection: Tensor) -> Tensor:
        decided = reference.resolve(self._caches[group], self._map, group, selection)
        reference.fetch(self._memory, self._caches[group], self._map, group, decided)
        return decided.addresses

    def attend(
        self, addresses: Tensor, layer_in_group: int, query_latent: Tensor, query_rope: Tensor, scale: float
    ) -> Tensor:
        rows = self._map.format.encoding.rows
        return reference.attend(self._memory, addresses, layer_in_group, rows, query_latent, query_rope, scale)
