"""What all ranks do, or none: each acts, all hear how it went, and where one failed the others undo.

Errors travel as their code, message and facts, and come out as the same type on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import msgspec

from compute.parallel.peers import Peers
from protocol.errors import Fact, InvalidValue, KvdError, PeerLost, error_from

_T = TypeVar("_T")

_BEAT_S = 0.5
"""How often a rank says that it is still at it."""


class Outcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How it went on one rank: no ``code`` for well."""

    code: str = ""
    message: str = ""
    facts: dict[str, Fact] = {}


_encode = msgspec.msgpack.encode
_decode_outcome = msgspec.msgpack.Decoder(Outcome).decode


class Team:
    """All ranks. Every call is made by all of them, in the same order."""

    def __init__(self, control: Peers, shards: int) -> None:
        self._control = control
        self.shards = shards
        """Ranks of each stage."""
        self.owner = control.index // shards * shards
        """The rank that holds this stage's sessions."""
        self.timeout_s = control.timeout_s

    @property
    def is_owner(self) -> bool:
        return self.owner == self._control.index

    def together(self, act: Callable[[], _T], undo: Callable[[_T], object] | None = None) -> _T:
        """What ``act`` gives here, once it has gone well everywhere.

        Otherwise ``undo`` is called with it, and the error of the lowest rank that failed is raised on all ranks. A
        rank that is lost before it has said how it went counts as one that failed.
        """
        try:
            result = act()
        except KvdError as error:
            self._settle(Outcome(error.code, error.message, error.facts))
            raise  # of no use: the own outcome is among those that raise
        try:
            self._settle(Outcome())
        except KvdError:
            if undo is not None:
                undo(result)
            raise
        return result

    def patiently(self, act: Callable[[], _T], undo: Callable[[_T], object] | None = None) -> _T:
        """`together`, of what may take longer than the time-out. Ranks tell each other meanwhile that they live.

        Where one is lost meanwhile, ``act`` is waited for, and undone if it went well.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="kvd-patient") as thread:
            future = thread.submit(act)
            beat_s = min(_BEAT_S, self.timeout_s / 4)
            try:
                while not all(self.exchange(future.done(), bool)):
                    wait([future], beat_s)
            except PeerLost:
                if undo is not None and future.exception() is None:
                    undo(future.result())
                raise
        return self.together(future.result, undo)

    def agree(self, values: dict[str, str]) -> None:
        """Raise `InvalidValue` on all ranks, of the first of ``values`` by name that is not the same on all."""
        every = self.exchange(values, dict[str, str])
        for rank, found in enumerate(every):
            for what, expected in every[0].items():
                if found[what] != expected:
                    raise InvalidValue(f"{what} of rank {rank}", found[what], f"that of rank 0: {expected}")

    def share(self, message: Any, kind: type[_T], source: int = 0) -> _T:
        """The message of rank ``source``, checked to be a ``kind``."""
        return msgspec.msgpack.decode(self._control.share(_encode(message), source), type=kind)

    def exchange(self, message: _T, kind: type[_T]) -> list[_T]:
        """The messages of all ranks, in their order, checked to be a ``kind``."""
        return [msgspec.msgpack.decode(data, type=kind) for data in self._control.exchange(_encode(message))]

    def _settle(self, own: Outcome) -> None:
        outcomes = [_decode_outcome(data) for data in self._control.exchange(_encode(own))]
        failed = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome.code]
        if not failed:
            return
        # One that lost a peer says less than one that knows why the peer is gone.
        rank, first = min(failed, key=lambda entry: (entry[1].code == PeerLost.code, entry[0]))
        raise error_from(first.code, f"rank {rank}: {first.message}", first.facts)
