"""Every message, as types. SPEC.md says what each field means, its unit and its limits.

Control messages travel over ZeroMQ; those named ``Lease…`` and ``Claim…`` travel over the handle socket, whose
connection is the lease. Each request carries ``seq``, which rises on a connection and comes back in the reply.
"""

from __future__ import annotations

import msgspec

from protocol.errors import Fact
from protocol.handles import DeviceMemory, DevicePurpose, Extent, LeaseRef, SharedMemory
from protocol.stats import NodeStats

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 1


class _Tagged(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    pass


# Requests on the control socket


class Hello(_Tagged, frozen=True, tag="hello"):
    """The first message of a connection: which protocol the client speaks, and who it says it is."""

    seq: int
    major: int
    minor: int
    client: str


class Stat(_Tagged, frozen=True, tag="stat"):
    """Ask for `NodeStats`."""

    seq: int


class CreateSession(_Tagged, frozen=True, tag="create_session"):
    """Make a session of no pages, held by the lease.

    ``token_capacity`` is the most tokens that it may ever hold; ``commit_bytes`` the size of the worker's payload in a
    commit record (hidden state and MTP state).
    """

    seq: int
    lease: LeaseRef
    name: str
    fingerprint: bytes
    encoding: str
    page_bytes: int
    token_capacity: int
    commit_bytes: int


class OpenSession(_Tagged, frozen=True, tag="open_session"):
    """Take over a stored session of the same uid. Its ``fingerprint`` and ``encoding`` must be the caller's."""

    seq: int
    lease: LeaseRef
    name: str
    fingerprint: bytes
    encoding: str


class ReattachSession(_Tagged, frozen=True, tag="reattach_session"):
    """Hold on, after the daemon was started again, to a session that the calling process has held all along."""

    seq: int
    lease: LeaseRef
    name: str


class ExtendSession(_Tagged, frozen=True, tag="extend_session"):
    """Add ``pages`` pages at the session's end."""

    seq: int
    lease: LeaseRef
    session: int
    generation: int
    pages: int


class TruncateSession(_Tagged, frozen=True, tag="truncate_session"):
    """Keep ``pages`` pages; the generation rises. The worker has moved its commit record back before."""

    seq: int
    lease: LeaseRef
    session: int
    generation: int
    pages: int


class DetachSession(_Tagged, frozen=True, tag="detach_session"):
    """Let go of the session; it stays stored for another worker."""

    seq: int
    lease: LeaseRef
    session: int
    generation: int


class CloseSession(_Tagged, frozen=True, tag="close_session"):
    """End the session and give its memory back."""

    seq: int
    lease: LeaseRef
    session: int
    generation: int


class AllocateDevice(_Tagged, frozen=True, tag="allocate_device"):
    """Take VRAM. ``session`` is 0 or a session that the lease holds, on whose account it stands."""

    seq: int
    lease: LeaseRef
    device: str
    nbytes: int
    purpose: DevicePurpose
    session: int = 0


class FreeDevice(_Tagged, frozen=True, tag="free_device"):
    """Give VRAM back, after unmapping it."""

    seq: int
    lease: LeaseRef
    handle: int


class ForkSession(_Tagged, frozen=True, tag="fork_session"):
    """Make a session of the first ``rows`` committed rows of another, held by the lease. They share pages."""

    seq: int
    lease: LeaseRef
    session: int
    generation: int
    rows: int
    name: str


class FindPrefix(_Tagged, frozen=True, tag="find_prefix"):
    """Look for a session that begins with the pages that ``digests`` stand for (`protocol.prefix`)."""

    seq: int
    lease: LeaseRef
    fingerprint: bytes
    encoding: str
    digests: list[bytes]


class Drain(_Tagged, frozen=True, tag="drain"):
    """Have the daemon drain and stop; with ``save``, when every session is on disk."""

    seq: int
    save: bool


class SaveSession(_Tagged, frozen=True, tag="save_session"):
    """Write a session of the caller's uid to disk, in place of what was saved under its name before."""

    seq: int
    name: str


class RestoreSession(_Tagged, frozen=True, tag="restore_session"):
    """Make a stored session of what was saved; ``fingerprint`` and ``encoding`` must be its own, or empty."""

    seq: int
    name: str
    fingerprint: bytes
    encoding: str


class ListSaved(_Tagged, frozen=True, tag="list_saved"):
    """Ask for the caller's saved sessions."""

    seq: int


class RemoveSaved(_Tagged, frozen=True, tag="remove_saved"):
    """Remove a saved session from disk."""

    seq: int
    name: str


class RevokeLease(_Tagged, frozen=True, tag="revoke_lease"):
    """Have a lease lose its connection; what it holds is in quarantine until its process is dead. For operators."""

    seq: int
    number: int


class EndSession(_Tagged, frozen=True, tag="end_session"):
    """End a session of any uid that no lease holds. For operators."""

    seq: int
    uid: int
    name: str


LeaseRequest = (
    CreateSession
    | OpenSession
    | ReattachSession
    | ExtendSession
    | TruncateSession
    | DetachSession
    | CloseSession
    | AllocateDevice
    | FreeDevice
    | ForkSession
    | FindPrefix
)
"""Those that name a lease."""

OperatorRequest = Drain | RevokeLease | EndSession
"""Those that only root, the daemon's uid and members of its admin group may make."""

Request = Hello | Stat | OperatorRequest | SaveSession | RestoreSession | ListSaved | RemoveSaved | LeaseRequest

# Replies on the control socket


class DeviceInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A device whose VRAM the daemon gives: its UUID (or ``cpu``), the capacity and granularity in bytes."""

    device: str
    name: str
    capacity: int
    granularity: int


class Welcome(_Tagged, frozen=True, tag="welcome"):
    """The answer to `Hello`: the protocol in use, the daemon's epoch, and where its handle socket is."""

    seq: int
    major: int
    minor: int
    daemon_version: str
    epoch: int
    handle_socket: str
    extent_bytes: int
    devices: list[DeviceInfo]


class Stats(_Tagged, frozen=True, tag="stats"):
    seq: int
    stats: NodeStats


class SessionOpened(_Tagged, frozen=True, tag="session_opened"):
    """A session that the lease now holds. ``daemon_block`` has the page table, ``worker_block`` is the worker's."""

    seq: int
    session: int
    generation: int
    page_count: int
    daemon_block: SharedMemory
    worker_block: SharedMemory
    extents: list[Extent]


class PagesChanged(_Tagged, frozen=True, tag="pages_changed"):
    """The session's pages after an extension or truncation; ``extents`` are those that this lease has not seen."""

    seq: int
    session: int
    generation: int
    page_count: int
    extents: list[Extent]


class PrefixFound(_Tagged, frozen=True, tag="prefix_found"):
    """The session with most of the pages that were looked for, and how many; 0 for none."""

    seq: int
    session: int
    generation: int
    name: str
    pages: int


class DeviceAllocated(_Tagged, frozen=True, tag="device_allocated"):
    seq: int
    memory: DeviceMemory


class Saved(_Tagged, frozen=True, tag="saved"):
    """A session that was saved or restored: what there is of it, bytes of its file, and how long that took."""

    seq: int
    name: str
    rows: int
    tokens: int
    nbytes: int
    seconds: float


class SavedSession(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A session on disk: bytes of its file, and when that was last written or restored, in seconds since 1970.

    A ``spilled`` one had to make room in memory; opening it brings it back.
    """

    name: str
    spilled: bool
    nbytes: int
    used_s: float


class SavedSessions(_Tagged, frozen=True, tag="saved_sessions"):
    """The caller's saved sessions, least recently used first."""

    seq: int
    sessions: list[SavedSession]


class Done(_Tagged, frozen=True, tag="done"):
    seq: int


class ErrorReply(_Tagged, frozen=True, tag="error"):
    """A refusal. ``seq`` is 0 where the request could not be read."""

    seq: int
    code: str
    message: str
    facts: dict[str, Fact]


Reply = (
    Welcome
    | Stats
    | SessionOpened
    | PagesChanged
    | PrefixFound
    | DeviceAllocated
    | Saved
    | SavedSessions
    | Done
    | ErrorReply
)


# Packets on the handle socket


class LeaseOpen(_Tagged, frozen=True, tag="lease_open"):
    """The first packet of a handle connection."""

    major: int
    minor: int
    client: str


class Claim(_Tagged, frozen=True, tag="claim"):
    """Present a grant."""

    grant: int


class HandOver(_Tagged, frozen=True, tag="hand_over"):
    """Give the daemon VRAM that an earlier run of it had given to this process; its file descriptor comes along."""

    device: str
    requested: int
    committed: int
    purpose: DevicePurpose
    session: int


HandleRequest = LeaseOpen | Claim | HandOver


class LeaseOpened(_Tagged, frozen=True, tag="lease_opened"):
    lease: LeaseRef


class Claimed(_Tagged, frozen=True, tag="claimed"):
    """The grant's handle; one file descriptor comes with the packet."""

    handle: int


class HandedOver(_Tagged, frozen=True, tag="handed_over"):
    """The handle that the memory has from now on."""

    handle: int


HandleReply = LeaseOpened | Claimed | HandedOver | ErrorReply
