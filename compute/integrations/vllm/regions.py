"""Where the engine's blocks lie: every block is a few pieces, one for each layer (or one for all, if packed so).

Addresses only: no tensor library is needed here. A block is stored as its pieces, one behind the other, in the order of
the regions; that order and the sizes are part of a space's fingerprint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

MOST_PITCH = 2**31 - 1
"""Bytes: what CUDA devices take (``CU_DEVICE_ATTRIBUTE_MAX_PITCH``)."""


@dataclass(frozen=True)
class Region:
    """Pieces of ``nbytes``, that of block b at ``address + b * stride``."""

    address: int
    stride: int
    nbytes: int


@dataclass(frozen=True)
class Run:
    """``count`` regions, the pieces of a block ``rows`` times ``pitch`` bytes apart: what a GPU copies in one go.

    ``region`` is the first of them, and its piece begins ``offset`` bytes into a frame.
    """

    region: Region
    count: int
    pitch: int
    rows: int
    offset: int


class Placement(Protocol):
    """How the engine has placed some layers in an allocation (its ``KVCacheTensor``), in bytes."""

    layers: list[str]
    layer_stride: int
    block_stride: int
    offset: int


def regions_of(placements: Sequence[Placement], bases: dict[str, int], num_blocks: int) -> list[Region]:
    """The regions of all layers. ``bases`` has, for a layer, where the allocation begins that it lies in.

    Layers whose blocks lie together make one region. Raises `ValueError` for a placement that is neither.
    """
    regions: list[Region] = []
    seen: set[int] = set()
    for placement in placements:
        named = [name for name in placement.layers if name in bases]
        if not named:
            continue
        base = bases[named[0]]
        stride = placement.block_stride
        span = num_blocks * stride
        starts = [base]  # every block has all layers, one behind the other
        if placement.layer_stride >= span:
            pieces, rest = divmod(placement.layer_stride, span)
            if rest:
                raise ValueError(
                    f"layers lie {placement.layer_stride} bytes apart, which is no multiple of {num_blocks} blocks "
                    f"of {stride} bytes"
                )
            first = base + placement.offset
            starts = [first + index * span for index in range(len(placement.layers) * pieces)]
        for start in starts:
            if start not in seen:  # groups of layers may lie over one another
                seen.add(start)
                regions.append(Region(start, stride, stride))
    return regions


def runs_of(regions: Sequence[Region]) -> list[Run]:
    """The regions in their order, as few runs. A pitch that a copy is given must be less than 2 GiB."""
    runs: list[Run] = []
    offset = 0
    for region in regions:
        longer = _longer(runs[-1], region) if runs else None
        if longer is not None:
            runs[-1] = longer
        else:
            runs.append(Run(region, 1, region.nbytes, 1, offset))
        offset += region.nbytes
    return runs


def _longer(run: Run, region: Region) -> Run | None:
    """The run with another region behind it, if that lies as far from its last one as they do from each other."""
    first = run.region
    if (region.nbytes, region.stride) != (first.nbytes, first.stride):
        return None
    apart, rest = divmod(region.address - first.address, run.count)
    if run.count == 1:
        run = replace(run, pitch=first.stride if apart % first.stride == 0 else apart)
        run = replace(run, rows=apart // run.pitch)
    if rest or apart <= 0 or apart != run.pitch * run.rows or not first.nbytes <= run.pitch <= MOST_PITCH:
        return None
    return replace(run, count=run.count + 1)


def block_bytes(regions: Sequence[Region]) -> int:
    return sum(region.nbytes for region in regions)
