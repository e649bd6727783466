"""What lies in shared memory and on disk, read from outside as the protocol describes it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from protocol.daemon_block import read_daemon_block, split_entries
from protocol.session_state import (
    RECORDS_OFFSET,
    SessionHeader,
    WorkerBlockLayout,
    read_worker_state,
    sampler_state_after,
)
from tests.saved_files import Parts
from tests.simulation.model import ABSENT, KINDS, MARK, PAGE_TOKENS, Image, Key, Kind, Marks, page_count

SHM = Path("/dev/shm")


class Observer:
    """Looks at the segments whose names begin with ``prefix`` and at the files in ``directory``."""

    def __init__(self, prefix: str, directory: Path) -> None:
        self._prefix = prefix.removeprefix("/")
        self._directory = directory

    def segments(self) -> set[str]:
        return {name for name in os.listdir(SHM) if name.startswith(self._prefix)}

    def expected_segments(self, extents: int, sessions: Sequence[int]) -> set[str]:
        blocks = {f"{self._prefix}-session-{number}-{of}" for number in sessions for of in ("daemon", "worker")}
        return blocks | {f"{self._prefix}-e{number}" for number in range(extents)}

    def session(self, number: int) -> tuple[SessionHeader, tuple[int, ...], Image]:
        """Its header and page table, and what a successor would find of it."""
        name = f"{self._prefix}-session-{number}"
        header, entries = read_daemon_block((SHM / f"{name}-daemon").read_bytes())
        frames, absent = split_entries(entries)
        fd = os.open(SHM / f"{name}-worker", os.O_RDONLY)
        try:
            layout = WorkerBlockLayout(header.token_capacity, header.commit_bytes)
            state = read_worker_state(fd, layout, number)
            log = memoryview(os.pread(fd, 4 * state.tokens, layout.log_offset)).cast("i")
            sampler = sampler_state_after(state.tokens, os.pread(fd, RECORDS_OFFSET, 0))
        finally:
            os.close(fd)
        commit = state.commit
        marks = self._marks(frames[: page_count(commit.rows)], header.page_stride, commit.rows)
        pages = tuple(ABSENT if page in absent else mark for page, mark in enumerate(marks))
        kind = _kind(header.fingerprint, header.encoding, header.page_bytes)
        image = Image(
            kind, header.token_capacity, header.generation, commit.rows, tuple(log), commit.payload, sampler, pages
        )
        return header, frames, image

    def _marks(self, frames: Sequence[int], stride: int, rows: int) -> tuple[Marks, ...]:
        fds: dict[int, int] = {}
        marks: list[Marks] = []
        try:
            for number, frame in enumerate(frames):
                extent, start = frame >> 32, (frame & 0xFFFFFFFF) * stride
                if extent not in fds:
                    fds[extent] = os.open(SHM / f"{self._prefix}-e{extent}", os.O_RDONLY)
                tail = os.pread(fds[extent], MARK, start + stride - MARK) if number < rows // PAGE_TOKENS else None
                marks.append((os.pread(fds[extent], MARK, start), tail))
        finally:
            for fd in fds.values():
                os.close(fd)
        return tuple(marks)

    def files(self, kind: str) -> dict[Key, int]:
        """Bytes of the files of one kind (``kvd`` or ``spilled``)."""
        found = {}
        for path in self._directory.glob(f"*.{kind}"):
            uid, _, name = path.stem.partition("-")
            found[int(uid), name] = path.stat().st_size
        return found

    def used_ns(self, key: Key) -> int:
        """When a saved file was last used."""
        return (self._directory / f"{key[0]}-{key[1]}.kvd").stat().st_mtime_ns

    def file(self, key: Key, kind: str) -> Image:
        """What is in a file, by the second reader of the format, which looks at no checksum."""
        data = (self._directory / f"{key[0]}-{key[1]}.{kind}").read_bytes()
        parts = Parts(data)
        tokens, payload, sampler, pages = parts.content(data)
        marks: list[Marks] = []
        for number in range(parts.pages):
            page = pages[number * parts.stride : (number + 1) * parts.stride]
            marks.append((page[:MARK], page[-MARK:] if number < parts.rows // PAGE_TOKENS else None))
        fields = [int.from_bytes(data[at : at + 8], "little") for at in range(24, 104, 8)]
        encoding = data[104:120].rstrip(b"\0").decode()
        page_kind = _kind(data[120:152], encoding, parts.page_bytes)
        log = tuple(memoryview(tokens).cast("i"))
        return Image(page_kind, fields[2], fields[4], parts.rows, log, payload, sampler, tuple(marks))


def _kind(fingerprint: bytes, encoding: str, page_bytes: int) -> Kind:
    for kind in KINDS:
        if (kind.fingerprint, kind.encoding, kind.page_bytes) == (fingerprint, encoding, page_bytes):
            return kind
    raise AssertionError(f"no session has model {fingerprint!r}, {encoding}, {page_bytes} bytes")
