"""What the block store gives until it is ended: blocks that stay where they are, and frames to write blocks to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from compute.block_memory import MappedExtent
from protocol import messages
from protocol.errors import UnknownBlocks

if TYPE_CHECKING:
    from compute.block_store import BlockStore


class Blocks:
    """Some blocks under one hold, by their frames."""

    def __init__(self, store: BlockStore, hold: int, frames: Sequence[int]) -> None:
        self._store = store
        self._hold = hold
        self._frames = frames
        self._lease = store._client.lease

    @property
    def addresses(self) -> list[int]:
        """Where each block begins in this process."""
        return self._store._memory.addresses(self._frames)

    @property
    def extents(self) -> list[MappedExtent]:
        """Those that the blocks are in."""
        return self._store._memory.extents_of(self._frames)

    @property
    def is_whole(self) -> bool:
        """Whether it is all that was asked for."""
        return True

    def _end(self) -> None:
        hold, self._hold = self._hold, 0
        if hold and self._is_held:  # otherwise it ended with its lease, and its number may be another hold's
            self._store._end(hold)

    @property
    def _is_held(self) -> bool:
        return self._lease == self._store._client.lease

    def __enter__(self) -> Self:
        return self


class Pinned(Blocks):
    """The first ``count`` blocks of a chain, which stay as they are until `release`, or the end of the ``with`` block.

    They do so whatever becomes of the daemon, until the store is connected again.
    """

    def __init__(self, store: BlockStore, hold: int, frames: Sequence[int], asked: int = 0) -> None:
        super().__init__(store, hold, frames)
        self._asked = asked

    @property
    def count(self) -> int:
        return len(self._frames)

    @property
    def is_whole(self) -> bool:
        return self.count == self._asked

    @property
    def views(self) -> list[memoryview]:
        """The bytes of each block, read-only."""
        return self._store._memory.views(self._frames, read_only=True)

    def release(self) -> None:
        """They may go. No copy from them may be in flight. Raises `DaemonUnavailable` where the store is lost."""
        self._end()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


class Reservation(Blocks):
    """Frames for ``keys``, in their order, to be written and then published; nobody finds them before.

    What is not published at the end of the ``with`` block is given up.
    """

    def __init__(self, store: BlockStore, hold: int, keys: list[bytes], frames: Sequence[int]) -> None:
        super().__init__(store, hold, frames)
        self.keys = keys
        self._left = len(keys)
        self._stored = 0
        self._waits = True
        self._answer: Callable[[], messages.Done] | None = None

    @property
    def views(self) -> list[memoryview]:
        """The bytes of each block, to be written; what is in them before is undefined."""
        return self._store._memory.views(self._frames, read_only=False)

    @property
    def is_stored(self) -> bool:
        """Whether all of it is published, and the daemon has said so."""
        return self._stored == len(self.keys)

    def publish(self, keys: Iterable[bytes] | None = None) -> None:
        """All bytes of these blocks are written, or of all that are left: they are stored. No copy is in flight.

        Raises `UnknownBlocks` for a key that was not reserved here or is published already, or if the store was
        connected again since; `DaemonUnavailable`.
        """
        if not self._is_held:
            raise UnknownBlocks("the reservation ended when the store was connected again", hold=self._hold)
        chosen = None if keys is None else list(keys)
        count = self._left if chosen is None else len(chosen)
        if count:
            answer = self._ask_to_publish(b"".join(chosen or ()))
            if chosen is None and not self._waits:
                self._answer = answer
            else:
                answer()
                self._stored += count
            self._left -= count
        if not self._left:
            self._hold = 0

    def abandon(self) -> None:
        """Give up what is not published. No copy to it may be in flight. Raises as `Pinned.release` does."""
        self._left = 0
        self._end()

    def _ask_to_publish(self, keys: bytes) -> Callable[[], messages.Done]:
        hold, lease = self._hold, self._lease
        return self._store._begin(lambda seq: messages.PublishBlocks(seq, lease, hold, keys), messages.Done)

    def _settle(self) -> None:
        """Wait for what `publish` has not waited for."""
        if self._answer is not None:
            self._answer()
            self._answer = None
            self._stored = len(self.keys)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.abandon()
