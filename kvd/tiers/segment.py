"""Segments of POSIX shared memory: created exclusively, populated in full, passed on by descriptor, unlinked.

A segment is mapped here only while it is being made. Whoever it is granted to can cut it, and touching a mapping that
was cut is SIGBUS: afterwards it is looked at through its descriptor alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from pathlib import Path
from stat import S_IMODE, S_ISREG

import posix_ipc

from kvd.alloc.sizes import require_size
from kvd.hostcheck import require_memory
from kvd.tiers.mapping import SharedMapping, allocation_failure
from protocol.errors import InvalidValue, OsFailure

SHM_DIRECTORY = Path("/dev/shm")
POPULATE_CHUNK = 64 * 1024 * 1024
"""Bytes that one thread populates at a time: what lies between two reports of progress."""

_NAME = re.compile(r"/[A-Za-z0-9][A-Za-z0-9_.-]{0,199}")

Progress = Callable[[int, int], None]
"""Called with the bytes populated so far and the bytes there will be, in the thread that asked for them."""


class Segment:
    """One segment that this process made: ``nbytes`` at ``name``, mode 0600.

    Raises `OsFailure` if the name is taken or the system refuses. Its pages are not there before `populate_segments`.
    """

    def __init__(self, name: str, nbytes: int) -> None:
        self.name = require_name(name)
        self.nbytes = require_size(f"bytes of shared memory {name}", nbytes)
        try:
            self._fd: int = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600).fd
        except (posix_ipc.Error, OSError) as error:
            raise OsFailure(f"creating shared memory {name}: {error}", name=name) from error
        try:
            os.ftruncate(self._fd, nbytes)
        except OSError as error:
            self.destroy()
            raise OsFailure(f"sizing shared memory {name} to {nbytes} bytes: {error.strerror}", name=name) from error

    @classmethod
    def existing(cls, name: str) -> Segment:
        """A segment that an earlier run of this program made, with whatever size and pages it has now.

        Raises `OsFailure` unless it is a regular file of this uid alone, mode 0600, under this one name.
        """
        path = SHM_DIRECTORY / require_name(name)[1:]
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise OsFailure(f"opening shared memory {name}: {error.strerror}", name=name) from error
        status = os.fstat(fd)
        if not (S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink == 1) or (
            S_IMODE(status.st_mode) != 0o600
        ):
            os.close(fd)
            raise OsFailure(f"shared memory {name} is not as the daemon makes it", name=name)
        segment = cls.__new__(cls)
        segment.name, segment.nbytes, segment._fd = name, status.st_size, fd
        return segment

    def allocate(self) -> None:
        """Have every page of it allocated and zero, in this thread and in small pages: for segments of a few MiB.

        Raises `OutOfCapacity` where there is no room, `OsFailure` for other refusals.
        """
        try:
            os.posix_fallocate(self._fd, 0, self.nbytes)
        except OSError as error:
            raise allocation_failure(f"allocating shared memory {self.name}", self.nbytes, error.errno or 0) from error

    @property
    def committed(self) -> int:
        """Bytes that the operating system has allocated for it, now."""
        return os.fstat(self._fd).st_blocks * 512

    def is_intact(self) -> bool:
        """Whether it still has its size and all its pages: those it is granted to can take both away."""
        status = os.fstat(self._fd)
        return status.st_size == self.nbytes and status.st_blocks * 512 == self.nbytes

    def fileno(self) -> int:
        """Its descriptor, for reading and writing in this process; open until `destroy`."""
        return self._fd

    def map(self) -> SharedMapping:
        """A mapping of all of it. Only before it is granted to anybody."""
        return SharedMapping(self._fd, self.nbytes)

    def open_fd(self, *, read_only: bool) -> int:
        """A new close-on-exec descriptor to pass on; the caller closes it. It opens the same memory for ever.

        A descriptor opened read-only cannot be made writable by a process of another uid than this one's.
        """
        mode = os.O_RDONLY if read_only else os.O_RDWR
        try:
            return os.open(f"/proc/self/fd/{self._fd}", mode | os.O_CLOEXEC)
        except OSError as error:
            raise OsFailure(f"opening shared memory {self.name}: {error.strerror}", name=self.name) from error

    def close(self) -> None:
        """Let go of it; it stays under its name."""
        os.close(self._fd)

    def unlink(self) -> None:
        """Take its name away. Its memory is free when no process has it open or maps it any more."""
        with suppress(posix_ipc.ExistentialError):  # somebody has removed the file already
            posix_ipc.unlink_shared_memory(self.name)

    def destroy(self) -> None:
        """Unlink and close it, once."""
        self.unlink()
        os.close(self._fd)


def create_segments(
    names: Sequence[str],
    nbytes: int,
    *,
    threads: int,
    numa_node: int | None = None,
    progress: Progress | None = None,
) -> list[Segment]:
    """Segments of ``nbytes`` each (whole huge pages), every page of them allocated and zero, by ``threads`` threads.

    Raises `OutOfCapacity` where there is no room (never SIGBUS), `OsFailure` for anything else; then none is left.
    """
    total = require_size("bytes of shared memory", len(names) * nbytes)
    require_memory(total)
    segments: list[Segment] = []
    with ExitStack() as undo:
        # In batches: to have all of a large pool mapped at once would cost gigabytes of page tables.
        for first in range(0, len(names), threads):
            batch: list[Segment] = []
            for name in names[first : first + threads]:
                batch.append(Segment(name, nbytes))
                undo.callback(batch[-1].destroy)
            _populate(batch, threads, numa_node, _advance(progress, first * nbytes, total))
            for segment in batch:
                if segment.committed != nbytes:
                    raise OsFailure(f"{segment.name}: the system gave {segment.committed} bytes for {nbytes}")
            segments += batch
        undo.pop_all()
    return segments


def existing_names(prefix: str) -> list[str]:
    """This uid's segments whose names begin with ``prefix`` and ``-``, sorted."""
    start = require_name(prefix)[1:] + "-"
    return sorted(f"/{path.name}" for path in SHM_DIRECTORY.glob(f"{start}*") if _is_ours(path))


def remove_segment(name: str) -> None:
    """Unlink a segment, whoever may have it open."""
    with suppress(posix_ipc.ExistentialError):
        posix_ipc.unlink_shared_memory(name)


def require_name(name: str) -> str:
    """``name``, which must be a slash and then at most 200 letters, digits, dots, dashes and underscores."""
    if not _NAME.fullmatch(name):
        raise InvalidValue("name of shared memory", name, f"what matches {_NAME.pattern}")
    return name


def _is_ours(path: Path) -> bool:
    status = path.lstat()
    return S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def _advance(progress: Progress | None, done: int, total: int) -> Callable[[int], None]:
    """A function that counts bytes on from ``done`` and reports them."""

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    return advance


def _populate(segments: Sequence[Segment], threads: int, numa_node: int | None, advance: Callable[[int], None]) -> None:
    """Populate all of ``segments`` side by side. If it raises, no thread is still at it."""
    nbytes = segments[0].nbytes
    with ExitStack() as entered:
        mappings = [entered.enter_context(segment.map()) for segment in segments]
        for mapping in mappings:
            mapping.advise_huge_pages()
            if numa_node is not None:
                mapping.bind(numa_node)
        if threads == 1:
            for mapping in mappings:
                for offset in range(0, nbytes, POPULATE_CHUNK):
                    size = min(POPULATE_CHUNK, nbytes - offset)
                    mapping.populate(offset, size)
                    advance(size)
            return
        # Entered after the mappings, so left before them: nothing is unmapped under a thread.
        workers = entered.enter_context(ThreadPoolExecutor(threads, thread_name_prefix="populate"))
        futures: dict[Future[None], int] = {}
        entered.callback(_cancel, futures)
        for offset in range(0, nbytes, POPULATE_CHUNK):
            size = min(POPULATE_CHUNK, nbytes - offset)
            futures |= {workers.submit(mapping.populate, offset, size): size for mapping in mappings}
        for future in as_completed(futures):
            future.result()
            advance(futures[future])


def _cancel(futures: Iterable[Future[None]]) -> None:
    for future in futures:
        future.cancel()
