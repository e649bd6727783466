"""What the daemon must have and say, in plain dicts and lists: the oracle of the simulation.

Written from ``protocol/SPEC.md``. Physical pages are objects: sessions that share one have the same object, so what is
shared, and what memory that takes, is seen without counting references.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvd.config import LimitsConfig

Key = tuple[int, str]
"""Uid and name of a session."""

PAGE_TOKENS = 64
MARK = 32
"""Bytes that are written at the start and at the end of a page."""


@dataclass(frozen=True)
class Kind:
    """A model: how large its pages are, and what it is called."""

    page_bytes: int
    stride: int
    fingerprint: bytes
    encoding: str


KINDS = (
    Kind(60_000, 61_440, b"a" * 32, "q8g64"),
    Kind(150_000, 151_552, b"b" * 32, "q8g64"),
    Kind(150_000, 151_552, b"c" * 32, "bf16"),
)


@dataclass(eq=False)
class Page:
    """A physical page. ``head`` is written with its first row, ``tail`` with its last; None for never written."""

    frame: int
    head: bytes | None = None
    tail: bytes | None = None


Marks = tuple[bytes | None, bytes | None]

ABSENT: Marks = (b"absent", b"absent")
"""Of a page whose bytes are still to come from a file."""


def agree(found: tuple[Marks, ...], wanted: tuple[Marks, ...]) -> bool:
    """Whether all pages that are there are as they should be."""
    pairs = zip(found, wanted, strict=False)
    return len(found) == len(wanted) and all(have in (want, ABSENT) for have, want in pairs)


@dataclass(frozen=True)
class Image:
    """All that a session is, as a file keeps it."""

    kind: Kind
    capacity: int
    generation: int
    rows: int
    tokens: tuple[int, ...]
    payload: bytes
    sampler: bytes
    pages: tuple[Marks, ...]

    @property
    def file_bytes(self) -> int:
        state = 4 * len(self.tokens) + len(self.payload) + len(self.sampler)
        return 4096 + -(-state // 4096) * 4096 + len(self.pages) * (self.kind.stride + 8) + 32


def page_count(rows: int) -> int:
    return -(-rows // PAGE_TOKENS)


def last_page(rows: int) -> int:
    """The first page that may still be written when there are ``rows`` committed rows."""
    return max(rows - 1, 0) // PAGE_TOKENS


@dataclass(eq=False)
class Session:
    """A session in memory. ``holder`` is its lease's number, 0 for none; ``stored_at`` orders the idle ones."""

    uid: int
    name: str
    number: int
    kind: Kind
    capacity: int
    generation: int = 1
    holder: int = 0
    pages: list[Page] = field(default_factory=list)
    rows: int = 0
    logical: int = 0
    tokens: list[int] = field(default_factory=list)
    payload: bytes = b""
    sampler: bytes = b""
    is_damaged: bool = False
    stored_at: int = 0
    busy: str = ""
    busy_since: int = 0
    """The step in which it became busy; what was answered in that step may have been done before."""
    absent: set[int] = field(default_factory=set)

    @property
    def key(self) -> Key:
        return self.uid, self.name

    @property
    def is_empty(self) -> bool:
        return not self.is_damaged and not self.rows and not self.tokens

    @property
    def block_bytes(self) -> int:
        """Both state blocks: SPEC.md, sections 8 and 9."""
        copy = -(-(4096 + 8 * page_count(self.capacity)) // 4096) * 4096
        record = -(-(40 + COMMIT_BYTES) // 64) * 64
        log = -(-(4096 + 2 * record) // 4096) * 4096
        return 4096 + 2 * copy + -(-(log + 4 * self.capacity) // 4096) * 4096

    def marks(self) -> tuple[Marks, ...]:
        """What committed rows say of their pages."""
        pages = self.pages[: page_count(self.rows)]
        full = self.rows // PAGE_TOKENS
        return tuple((page.head, page.tail if number < full else None) for number, page in enumerate(pages))

    def image(self) -> Image:
        state = self.rows, tuple(self.tokens), self.payload, self.sampler
        return Image(self.kind, self.capacity, self.generation, *state, self.marks())

    def first(self, rows: int) -> Image:
        """A fork's content."""
        if rows == self.rows:
            return self.image()
        marks = self.marks()[: page_count(rows)]
        if rows % PAGE_TOKENS:
            marks = (*marks[:-1], (marks[-1][0], None))
        return Image(self.kind, self.capacity, 1, rows, tuple(self.tokens[:rows]), b"", b"", marks)


COMMIT_BYTES = 24


@dataclass
class Lease:
    """A worker's hold on memory. It ends when the process is known dead."""

    number: int
    uid: int
    pid: int
    quarantined: bool = False
    extents: set[int] = field(default_factory=set)
    handles: dict[int, int] = field(default_factory=dict)
    """Committed bytes of VRAM by handle."""


class Model:
    """Everything at one moment."""

    def __init__(self, *, extents: int, extent_bytes: int, state_bytes: int, vram_bytes: int, disk_bytes: int) -> None:
        self.extent_bytes = extent_bytes
        self.state_bytes = state_bytes
        self.vram_bytes = vram_bytes
        self.disk_bytes = disk_bytes
        self.limits = LimitsConfig()
        self.leases: dict[int, Lease] = {}
        self.memory: dict[Key, Session] = {}
        self.spilled: dict[Key, Image] = {}
        self.saved: dict[Key, Image] = {}
        self.saved_order: list[Key] = []
        """Least recently used first."""
        self.extent_uid: dict[int, int | None] = dict.fromkeys(range(extents))
        """Whose bytes an extent has: None for nobody's, -1 where that is not known."""
        self.clock = 0

    # Look-ups

    def numbered(self, number: int) -> Session | None:
        return next((session for session in self.memory.values() if session.number == number), None)

    def held_by(self, lease: int) -> list[Session]:
        return [session for session in self.memory.values() if session.holder == lease]

    def pages(self) -> set[Page]:
        return {page for session in self.memory.values() for page in session.pages}

    def is_shared(self, page: Page) -> bool:
        return sum(page in session.pages for session in self.memory.values()) > 1

    def page_bytes(self) -> int:
        """Committed bytes of pages, each counted once."""
        by_page = {page: session.kind.stride for session in self.memory.values() for page in session.pages}
        return sum(by_page.values())

    def block_bytes(self) -> int:
        return sum(session.block_bytes for session in self.memory.values())

    def vram_in_use(self) -> int:
        return sum(sum(lease.handles.values()) for lease in self.leases.values())

    # Capacity

    def frames_for(self, uid: int, stride: int) -> int:
        """Frames of this size that the uid could have."""
        used: dict[int, tuple[int, int, set[int]]] = {}
        for session in self.memory.values():
            for page in session.pages:
                entry = used.setdefault(page.frame >> 32, (session.uid, session.kind.stride, set()))
                entry[2].add(page.frame)
        each = self.extent_bytes // stride
        granted = {extent for lease in self.leases.values() for extent in lease.extents}
        free = 0
        for extent, owner in self.extent_uid.items():
            if extent in used:
                same = used[extent][:2] == (uid, stride)
                free += each - len(used[extent][2]) if same else 0
            elif owner == uid or extent not in granted:
                free += each
        return free

    def uid_bytes(self, uid: int) -> int:
        by_page = {
            page: session.kind.stride
            for session in self.memory.values()
            if session.uid == uid
            for page in session.pages
        }
        return sum(by_page.values())

    def has_no_room(self, uid: int, stride: int, pages: int, blocks: int = 0) -> bool:
        """Whether that many new pages, or bytes of blocks, cannot be had."""
        if blocks and self.block_bytes() + blocks > self.state_bytes:
            return True
        if not pages:
            return False
        limit = self.limits.host_per_uid
        over = bool(limit) and self.uid_bytes(uid) + pages * stride > limit
        return over or self.frames_for(uid, stride) < pages

    # Changes

    def next_time(self) -> int:
        self.clock += 1
        return self.clock

    def add(self, session: Session) -> None:
        assert session.key not in self.memory
        self.memory[session.key] = session
        self.note_frames(session)

    def note_frames(self, session: Session) -> None:
        """The session has new frames: their extents are its uid's."""
        for page in session.pages:
            self.extent_uid[page.frame >> 32] = session.uid

    def store(self, session: Session) -> None:
        """Nobody holds it any more."""
        session.holder, session.stored_at = 0, self.next_time()

    def end_lease(self, number: int, now: int) -> None:
        """The process is dead: its sessions are stored, at one time, or end if they never held anything."""
        for session in self.held_by(number):
            if session.is_empty:
                del self.memory[session.key]
            else:
                session.holder, session.stored_at = 0, now
        del self.leases[number]

    def use_saved(self, key: Key) -> None:
        if key in self.saved_order:
            self.saved_order.remove(key)
        self.saved_order.append(key)

    def prefix_pages(self, uid: int, kind: Kind, digests: list[bytes]) -> int:
        """The most leading pages that a session of the uid has of those that the hashes stand for."""
        most = 0
        for session in self.memory.values():
            if session.uid != uid or session.kind != kind or session.is_damaged:
                continue
            full = min(session.rows, len(session.tokens)) // PAGE_TOKENS
            mine = prefix_hashes(kind, session.tokens[: full * PAGE_TOKENS])
            same = 0
            while same < min(len(mine), len(digests)) and mine[same] == digests[same]:
                same += 1
            most = max(most, same)
        return most


def prefix_hashes(kind: Kind, tokens: Iterable[int]) -> list[bytes]:
    """SPEC.md: a chain of SHA-256, one for each page of tokens."""
    digest = hashlib.sha256(b"kvd prefix 1\0" + kind.fingerprint + kind.encoding.encode()).digest()
    words = list(tokens)
    hashes = []
    for start in range(0, len(words) - PAGE_TOKENS + 1, PAGE_TOKENS):
        page = b"".join(token.to_bytes(4, "little", signed=True) for token in words[start : start + PAGE_TOKENS])
        digest = hashlib.sha256(digest + page).digest()
        hashes.append(digest)
    return hashes
