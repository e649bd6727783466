"""Handles: what names a piece of memory in a message. The file descriptor behind one travels on the handle socket.

A *grant* is a single-use number that the daemon puts beside a handle; the lease that it was made for presents it on
its handle connection and receives the descriptor (SPEC.md, "The lifecycle of a grant").
"""

from __future__ import annotations

from typing import Literal

import msgspec

DevicePurpose = Literal["arena", "hot_cache", "ring", "index_keys", "tables", "resident_pages", "temporary"]
"""What a piece of VRAM is for. ``temporary`` comes from a pool that reuses blocks, all else from one that does not."""


class LeaseRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which lease a request speaks for. ``epoch`` names the run of the daemon that gave it."""

    epoch: int
    number: int


class SharedMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="shared_memory"):
    """A POSIX shared memory segment of ``nbytes``; map it read-only if ``read_only``."""

    handle: int
    nbytes: int
    read_only: bool
    grant: int


class DeviceMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="device_memory"):
    """VRAM of ``device`` (a UUID, or ``cpu``): ``requested`` bytes asked for, ``committed`` given; map it whole."""

    handle: int
    device: str
    requested: int
    committed: int
    grant: int


class Extent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An extent of host RAM: page table entries name ``number``; ``memory`` is its segment."""

    number: int
    memory: SharedMemory
