"""The two blocks of shared memory that hold a session's state (`protocol.session_state`), from the daemon's side.

Workers can write and cut the worker block at any time, so both are touched through descriptors, never through a
mapping. Workers get the daemon block read-only; it stays owned by the daemon's uid, so that another uid cannot open it
for writing through ``/proc``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack

from kvd.tiers.segment import Segment, create_segments
from protocol.errors import OsFailure
from protocol.session_state import (
    SessionHeader,
    WorkerBlockLayout,
    WorkerState,
    pack_daemon_block,
    read_worker_state,
)


class SessionBlocks:
    """The blocks of one session, made and filled with what the daemon writes.

    Raises `OutOfCapacity` where the system has no room for them, `OsFailure` for other refusals; then none is left.
    """

    def __init__(self, prefix: str, header: SessionHeader) -> None:
        self._session = header.session
        self._layout = WorkerBlockLayout(header.token_capacity, header.commit_bytes)
        name = f"{prefix}-session-{header.session}"
        with ExitStack() as undo:
            (self.daemon,) = create_segments([f"{name}-daemon"], header.block_bytes, threads=1)
            undo.callback(self.daemon.destroy)
            (self.worker,) = create_segments([f"{name}-worker"], self._layout.block_bytes, threads=1)
            undo.callback(self.worker.destroy)
            self._daemon_fd = _open(undo, self.daemon)
            self._worker_fd = _open(undo, self.worker)
            self.write(header, ())
            _write(self._worker_fd, self._layout.pack_header(header.session))
            undo.pop_all()

    @staticmethod
    def bytes_needed(header: SessionHeader) -> int:
        """Bytes of both blocks."""
        return header.block_bytes + WorkerBlockLayout(header.token_capacity, header.commit_bytes).block_bytes

    @property
    def nbytes(self) -> int:
        return self.daemon.nbytes + self.worker.nbytes

    def taken_bytes(self) -> int:
        """What the operating system says that they take. A block that its worker cut counts in full: it is not ours
        to give to another before the session is closed."""
        worker = self.worker.committed if self.worker.is_intact() else self.worker.nbytes
        return self.daemon.committed + worker

    def write(self, header: SessionHeader, frames: Sequence[int]) -> None:
        """Write the daemon block: header and page table. Raises `OsFailure`."""
        _write(self._daemon_fd, pack_daemon_block(header, frames))

    def worker_state(self) -> WorkerState:
        """What the worker last published; raises `SessionDamaged` if its block is cut or makes no sense."""
        return read_worker_state(self._worker_fd, self._layout, self._session)

    def destroy(self) -> None:
        """Give the memory back at once. Whoever still maps a block must not touch it any more."""
        for fd, segment in ((self._daemon_fd, self.daemon), (self._worker_fd, self.worker)):
            os.ftruncate(fd, 0)
            os.close(fd)
            segment.destroy()


def _open(undo: ExitStack, segment: Segment) -> int:
    fd = segment.open_fd(read_only=False)
    undo.callback(os.close, fd)
    return fd


def _write(fd: int, data: bytes) -> None:
    try:
        written = os.pwrite(fd, data, 0)
    except OSError as error:
        raise OsFailure(f"writing a session's block: {error.strerror}", errno=error.errno) from error
    if written != len(data):
        raise OsFailure(f"writing a session's block: {written} of {len(data)} bytes")
