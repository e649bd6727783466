"""The two blocks of shared memory that hold a session's state (`protocol.session_state`), from the daemon's side.

Workers can write and cut the worker block at any time, so both are touched through descriptors, never through a
mapping. Workers get the daemon block read-only; it stays owned by the daemon's uid, so that another uid cannot open it
for writing through ``/proc``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from kvd.hostcheck import SmallSizes
from kvd.tiers.segment import Segment
from protocol.daemon_block import daemon_block_bytes, first_writes, source_write, switch_writes
from protocol.errors import OsFailure, SessionDamaged
from protocol.session_state import (
    RECORDS_OFFSET,
    SessionHeader,
    WorkerBlockLayout,
    WorkerState,
    read_worker_state,
)

_SIZES = SmallSizes()


class SessionBlocks:
    """The blocks of one session, in segments made by `create` or left by an earlier run of the daemon.

    ``sequence`` is the number of the daemon block's copy that is in force.
    """

    def __init__(self, header: SessionHeader, daemon: Segment, worker: Segment, sequence: int) -> None:
        self._session = header.session
        self._layout = _worker_layout(header)
        self._sequence = sequence
        self.daemon = daemon
        self.worker = worker
        with ExitStack() as undo:
            self._daemon_fd = _open(undo, daemon)
            self._worker_fd = _open(undo, worker)
            undo.pop_all()

    @classmethod
    def create(cls, prefix: str, header: SessionHeader) -> SessionBlocks:
        """New blocks, filled with what the daemon writes.

        Raises `OutOfCapacity` where the system has no room for them, `OsFailure` for other refusals; then none is left.
        """
        with ExitStack() as undo:
            sizes = daemon_block_bytes(header), _worker_layout(header).block_bytes
            _SIZES.require(sum(sizes))
            segments = []
            for name, nbytes in zip(block_names(prefix, header.session), sizes, strict=True):
                segments.append(Segment(name, nbytes))
                undo.callback(segments[-1].destroy)
                segments[-1].allocate()
            daemon, worker = segments
            blocks = cls(header, daemon, worker, sequence=0)
            undo.callback(blocks._close)
            _write(blocks._worker_fd, 0, blocks._layout.pack_header(header.session))
            for offset, data in first_writes(header):
                _write(blocks._daemon_fd, offset, data)
            blocks.write(header, ())
            undo.pop_all()
        return blocks

    @staticmethod
    def bytes_needed(header: SessionHeader) -> int:
        """Bytes of both blocks."""
        return daemon_block_bytes(header) + _worker_layout(header).block_bytes

    @property
    def nbytes(self) -> int:
        return self.daemon.nbytes + self.worker.nbytes

    def taken_bytes(self) -> int:
        """What the operating system says that they take. A block that its worker cut counts in full: it is not ours
        to give to another before the session is closed."""
        worker = self.worker.committed if self.worker.is_intact() else self.worker.nbytes
        return self.daemon.committed + worker

    def write(self, header: SessionHeader, frames: Sequence[int]) -> None:
        """Put header and page table in force. Raises `OsFailure`, and those from before stay."""
        for offset, data in switch_writes(header, frames, self._sequence + 1):
            _write(self._daemon_fd, offset, data)
        self._sequence += 1

    def write_source(self, source: bytes) -> None:
        """Name the saved file that absent pages are in. Raises `OsFailure`."""
        _write(self._daemon_fd, *source_write(source))

    @property
    def worker_fd(self) -> int:
        """The worker block's descriptor, to read it by; open until `destroy`."""
        return self._worker_fd

    @property
    def log_offset(self) -> int:
        """Where the token log begins in the worker block."""
        return self._layout.log_offset

    def worker_state(self) -> WorkerState:
        """What the worker last published; raises `SessionDamaged` if its block is cut or makes no sense."""
        return read_worker_state(self._worker_fd, self._layout, self._session)

    def copy_log(self, source: SessionBlocks, tokens: int) -> None:
        """Copy the first ``tokens`` tokens of another session's log, without a way round through this process.

        Raises `SessionDamaged` if they are not there, `OsFailure`.
        """
        done, size = 0, 4 * tokens
        while done < size:
            at = source.log_offset + done, self.log_offset + done
            try:
                copied = os.copy_file_range(source.worker_fd, self._worker_fd, size - done, *at)
            except OSError as error:
                raise OsFailure(f"copying a token log: {error.strerror}", errno=error.errno) from error
            if not copied:
                raise SessionDamaged(f"the token log of session {source._session} is cut", session=source._session)
            done += copied

    def fill_worker(self, start: memoryview, tokens: bytes) -> None:
        """Write the token log and what comes before it in the worker block, the counts last.

        Only before a worker sees the block.
        """
        _write(self._worker_fd, self.log_offset, tokens)
        _write(self._worker_fd, RECORDS_OFFSET, start[RECORDS_OFFSET:])
        _write(self._worker_fd, 0, start[:RECORDS_OFFSET])

    def destroy(self) -> None:
        """Give the memory back at once. Whoever still maps a block must not touch it any more."""
        for fd, segment in ((self._daemon_fd, self.daemon), (self._worker_fd, self.worker)):
            with suppress(OSError):  # then its pages go when the last process that maps them does
                os.ftruncate(fd, 0)
            segment.destroy()
        self._close()

    def _close(self) -> None:
        os.close(self._daemon_fd)
        os.close(self._worker_fd)


def block_names(prefix: str, session: int) -> tuple[str, str]:
    """The names of the daemon block's and the worker block's segments."""
    return f"{prefix}-session-{session}-daemon", f"{prefix}-session-{session}-worker"


def _worker_layout(header: SessionHeader) -> WorkerBlockLayout:
    return WorkerBlockLayout(header.token_capacity, header.commit_bytes)


def _open(undo: ExitStack, segment: Segment) -> int:
    fd = segment.open_fd(read_only=False)
    undo.callback(os.close, fd)
    return fd


def _write(fd: int, offset: int, data: bytes | memoryview) -> None:
    try:
        written = os.pwrite(fd, data, offset)
    except OSError as error:
        raise OsFailure(f"writing a session's block: {error.strerror}", errno=error.errno) from error
    if written != len(data):
        raise OsFailure(f"writing a session's block: {written} of {len(data)} bytes")
