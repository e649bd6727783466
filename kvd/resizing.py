"""Tiers that grow and shrink while the daemon serves: host RAM by extents, VRAM, the state of sessions, the disk.

Growing takes the memory first and gives it out afterwards; shrinking gives back only what nobody holds and no living
process may have mapped. Either happens in full or not at all. Steps that take long run beside the loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from kvd.alloc.ledger import Ledger
from kvd.config import KEYS, Config
from kvd.saved.jobs import Jobs, Step
from kvd.sessions.session import HOST_TIER
from kvd.tiers.disk import StateDirectory
from kvd.tiers.extent import Extent
from kvd.tiers.host_ram import STATE_PURPOSES, HostRam
from kvd.tiers.segment import Segment, create_segments
from kvd.tiers.vram import Vram
from protocol.errors import Draining, InvalidValue, TierInUse

Steps = Generator[Step, Any, None]


class Resizing:
    """Changes one limit at a time. ``directory`` is None where nothing is saved. ``vacate`` has so many more
    extents be in nobody's use, as far as it can. For the loop's thread.
    """

    def __init__(
        self,
        ledger: Ledger,
        host: HostRam,
        vram: Vram,
        directory: StateDirectory | None,
        jobs: Jobs,
        numa_node: int | None,
        vacate: Callable[[int], None],
    ) -> None:
        self._ledger = ledger
        self._host = host
        self._vram = vram
        self._directory = directory
        self._jobs = jobs
        self._numa_node = numa_node
        self._vacate = vacate
        self._busy = False

    def change(self, running: Config, wanted: Config, key: str) -> Steps:
        """Have the limit of the setting ``key`` as in ``wanted``, all others being as in ``running``.

        Raises `TierInUse`, `OutOfCapacity`, `InvalidValue` or `OsFailure`; then nothing has changed.
        """
        nbytes = KEYS[key].value_in(wanted)
        if self._busy:
            raise InvalidValue(key, nbytes, "one change of a tier at a time; another is under way")
        self._busy = True
        try:
            match key:
                case "host.capacity":
                    yield from self._change_host((nbytes - running.host.capacity) // self._host.extent_bytes)
                case "host.state_capacity":
                    self._change_state(nbytes)
                case "vram.capacity":
                    self._vram.resize(nbytes)
                case _:
                    yield from self._change_disk(nbytes)
        finally:
            self._busy = False

    def _change_host(self, extents: int) -> Steps:
        capacity = self._ledger.capacity(HOST_TIER)
        changed = capacity + extents * self._host.extent_bytes
        if extents > 0:
            self._ledger.resize_tier(HOST_TIER, changed)
            try:
                yield from self._grow(extents)
            except BaseException:
                self._ledger.resize_tier(HOST_TIER, capacity)
                raise
        else:
            self._vacate(-extents - len(self._host.vacant))
            leaving = self._host.retire(-extents)
            try:
                yield partial(_empty, leaving)
            finally:
                self._host.forget(leaving)
            self._ledger.resize_tier(HOST_TIER, changed)

    def _grow(self, extents: int) -> Steps:
        names, reservation = self._host.begin_growth(extents)
        made: list[Segment] = []
        with reservation:
            try:
                yield partial(self._make, names, made)
                self._host.end_growth(made, reservation)
            except BaseException:
                for segment in made:
                    segment.destroy()
                raise

    def _make(self, names: Sequence[str], made: list[Segment]) -> None:
        """In a job's thread."""

        def go_on(_done: int, _total: int) -> None:
            if self._jobs.cancelled.is_set():
                raise Draining("the daemon is stopping: the host tier does not grow any more")

        made += create_segments(
            names,
            self._host.extent_bytes,
            threads=len(os.sched_getaffinity(0)),
            numa_node=self._numa_node,
            progress=go_on,
        )

    def _change_state(self, nbytes: int) -> None:
        purposes = self._ledger.purposes(HOST_TIER)
        parts = [part for purpose, part in purposes.items() if purpose in STATE_PURPOSES]
        least = sum(part.committed + part.reserved for part in parts)
        if nbytes < least:
            holders = [
                f"{entry.account}: {entry.balance.committed} bytes"
                for entry in self._ledger.entries(HOST_TIER)
                if entry.account.purpose in STATE_PURPOSES
            ]
            raise TierInUse("state of sessions and blocks", nbytes, least, holders[:8])
        self._ledger.resize_tier(HOST_TIER, self._host.capacity_bytes + nbytes)

    def _change_disk(self, nbytes: int) -> Steps:
        if self._directory is None:
            raise InvalidValue("disk.state_dir", "", "a directory; without one this daemon saves nothing")
        yield partial(self._directory.resize, nbytes)


def _empty(extents: Sequence[Extent]) -> None:
    """In a job's thread: have the system free the pages, which takes a while for many."""
    for extent in extents:
        if extent.segment is not None:
            with suppress(OSError):  # then they are freed with the segment
                os.ftruncate(extent.segment.fileno(), 0)
