"""Selections that are drawn instead of scored, with a locality and a part of misses that are chosen.

Synthetic: the scores of random keys jump about. Each index group has a working set, of which most of a selection is
drawn; the misses are positions that no cache holds, uniform over the history, which then replace the oldest of the
working set. The query rows of a step share nine tenths of their selections.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from protocol.errors import InvalidValue

SHARED = 0.9
"""Part of a selection that all query rows of a step have."""


@dataclass(frozen=True)
class Locality:
    """``topk`` selected of each of ``groups``, over ``steps`` steps, with caches of ``slots`` rows."""

    groups: int
    topk: int
    slots: int
    working_set: int
    steps: int

    def __post_init__(self) -> None:
        if not self.topk <= self.working_set <= self.slots:
            raise InvalidValue("working set", self.working_set, f"{self.topk} to {self.slots}, the hot rows")

    def draw(
        self, positions: int, rows: int, percent: float, device: torch.device, seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Selections int32 [steps, groups, rows, topk] of positions below ``positions``, and what slots hold before.

        The latter is int64 [groups, slots], in the order in which a cursor from slot 0 on evicts it: strangers first,
        then the working set, its oldest first. ``percent`` of each row's selection is in no slot by then. Raises
        `InvalidValue` where there are too few positions for so many misses.
        """
        generator = torch.Generator(device).manual_seed(seed)

        def shuffled(count: int) -> Tensor:
            return torch.rand((self.groups, count), generator=generator, device=device).argsort(dim=1)

        slots, topk = self.slots, self.topk
        misses = round(topk * percent / 100)
        shared = topk if rows == 1 else round(SHARED * topk)
        shared_misses = round(misses * shared / topk)
        own_misses = misses - shared_misses
        shared_hits, own_hits = shared - shared_misses, topk - shared - own_misses
        new = shared_misses + rows * own_misses
        least = slots + max(new * self.steps - (slots - self.working_set), 0)
        if positions < least:
            raise InvalidValue("positions to select from", positions, f"at least {least}, for {new} misses a step")

        order = shuffled(positions)
        working = order[:, : self.working_set].clone()
        strangers = order[:, self.working_set : slots]
        fresh = torch.cat((order[:, slots:], strangers), dim=1)
        cached = torch.cat((strangers, working), dim=1)
        steps = []
        for step in range(self.steps):
            hits = working.gather(1, shuffled(self.working_set)[:, : shared_hits + rows * own_hits])
            missed = fresh[:, step * new : (step + 1) * new]
            picked = [
                torch.cat(
                    (
                        hits[:, :shared_hits],
                        missed[:, :shared_misses],
                        hits[:, shared_hits + row * own_hits :][:, :own_hits],
                        missed[:, shared_misses + row * own_misses :][:, :own_misses],
                    ),
                    dim=1,
                )
                for row in range(rows)
            ]
            steps.append(torch.stack(picked, dim=1).sort(dim=2)[0].int())
            working[:, (step * new + torch.arange(new, device=device)) % self.working_set] = missed
        return torch.stack(steps), cached
