"""What the scheduler's side tells the worker's side, and what comes back: plain data, of no engine's types."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Load:
    """Fill the engine's ``blocks`` with what is stored under ``keys``, for a request."""

    request: str
    blocks: list[int]
    keys: list[bytes]


@dataclass(frozen=True)
class Save:
    """Store the engine's ``blocks`` under ``keys``; they stay as they are until ``number`` is reported done."""

    number: int
    blocks: list[int]
    keys: list[bytes]


@dataclass(frozen=True)
class Space:
    """A worker's space: what its blocks are found under, and how large they are.

    Workers with the same replica of the cache have the same space. ``model`` is the same for all workers: keys begin
    with it.
    """

    model: bytes
    fingerprint: bytes
    block_bytes: int


@dataclass
class Step:
    """All of one engine step. ``idle`` says that no tokens are computed in it."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    idle: bool = False
