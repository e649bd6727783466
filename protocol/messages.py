"""Every message, as types. SPEC.md says what each field means, its unit and its limits.

Control messages travel over ZeroMQ; those named ``Lease…`` and ``Claim…`` travel over the handle socket, whose
connection is the lease. Each request carries ``seq``, which rises on a connection and comes back in the reply.
"""

from __future__ import annotations

import msgspec

from protocol.block_messages import BlockReply as BlockReply
from protocol.block_messages import BlockRequest as BlockRequest
from protocol.block_messages import BlocksFound as BlocksFound
from protocol.block_messages import BlocksMapped as BlocksMapped
from protocol.block_messages import BlocksOpened as BlocksOpened
from protocol.block_messages import BlocksPinned as BlocksPinned
from protocol.block_messages import BlocksReserved as BlocksReserved
from protocol.block_messages import FindBlocks as FindBlocks
from protocol.block_messages import MapBlocks as MapBlocks
from protocol.block_messages import OpenBlocks as OpenBlocks
from protocol.block_messages import PinBlocks as PinBlocks
from protocol.block_messages import PublishBlocks as PublishBlocks
from protocol.block_messages import ReleaseBlocks as ReleaseBlocks
from protocol.block_messages import ReserveBlocks as ReserveBlocks
from protocol.errors import Fact
from protocol.handles import DeviceMemory, DevicePurpose, Extent, LeaseRef, SharedMemory
from protocol.operator_messages import Drain as Drain
from protocol.operator_messages import EndSession as EndSession
from protocol.operator_messages import OperatorRequest as OperatorRequest
from protocol.operator_messages import ReloadReport as ReloadReport
from protocol.operator_messages import ReloadReported as ReloadReported
from protocol.operator_messages import Resize as Resize
from protocol.operator_messages import Resized as Resized
from protocol.operator_messages import RevokeLease as RevokeLease
from protocol.operator_messages import SettingChange as SettingChange
from protocol.packets import Claim as Claim
from protocol.packets import Claimed as Claimed
from protocol.packets import HandedOver as HandedOver
from protocol.packets import HandOver as HandOver
from protocol.packets import LeaseOpen as LeaseOpen
from protocol.packets import LeaseOpened as LeaseOpened
from protocol.packets import OpenReport as OpenReport
from protocol.packets import ReportOpened as ReportOpened
from protocol.stats import NodeStats
from protocol.tagged import Tagged

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 3


# Requests on the control socket


class Hello(Tagged, frozen=True, tag="hello"):
    """The first message of a connection: which protocol the client speaks, and who it says it is."""

    seq: int
    major: int
    minor: int
    client: str


class Stat(Tagged, frozen=True, tag="stat"):
    """Ask for `NodeStats`."""

    seq: int


class CreateSession(Tagged, frozen=True, tag="create_session"):
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


class OpenSession(Tagged, frozen=True, omit_defaults=True, tag="open_session"):
    """Take over a stored session of the same uid. Its ``fingerprint`` and ``encoding`` must be the caller's.

    With ``lazy`` pages of it may be absent, and are to be had by `FetchPages`; otherwise they are waited for.
    """

    seq: int
    lease: LeaseRef
    name: str
    fingerprint: bytes
    encoding: str
    lazy: bool = False


class FetchPages(Tagged, frozen=True, tag="fetch_pages"):
    """Answered when the bytes of ``pages`` pages from ``first_page`` on are there."""

    seq: int
    lease: LeaseRef
    session: int
    generation: int
    first_page: int
    pages: int


class ViewSession(Tagged, frozen=True, tag="view_session"):
    """Ask to read a session that another lease of the uid holds. Answered as an opening is, all of it read-only."""

    seq: int
    lease: LeaseRef
    session: int
    generation: int


class ReattachSession(Tagged, frozen=True, tag="reattach_session"):
    """Hold on, after the daemon was started again, to a session that the calling process has held all along."""

    seq: int
    lease: LeaseRef
    name: str


class ExtendSession(Tagged, frozen=True, tag="extend_session"):
    """Add ``pages`` pages at the session's end."""

    seq: int
    lease: LeaseRef
    session: int
    generation: int
    pages: int


class TruncateSession(Tagged, frozen=True, tag="truncate_session"):
    """Keep ``pages`` pages; the generation rises. The worker has moved its commit record back before."""

    seq: int
    lease: LeaseRef
    session: int
    generation: int
    pages: int


class DetachSession(Tagged, frozen=True, tag="detach_session"):
    """Let go of the session; it stays stored for another worker."""

    seq: int
    lease: LeaseRef
    session: int
    generation: int


class CloseSession(Tagged, frozen=True, tag="close_session"):
    """End the session and give its memory back."""

    seq: int
    lease: LeaseRef
    session: int
    generation: int


class AllocateDevice(Tagged, frozen=True, tag="allocate_device"):
    """Take VRAM. ``session`` is 0 or a session that the lease holds, on whose account it stands."""

    seq: int
    lease: LeaseRef
    device: str
    nbytes: int
    purpose: DevicePurpose
    session: int = 0


class FreeDevice(Tagged, frozen=True, tag="free_device"):
    """Give VRAM back, after unmapping it."""

    seq: int
    lease: LeaseRef
    handle: int


class ForkSession(Tagged, frozen=True, tag="fork_session"):
    """Make a session of the first ``rows`` committed rows of another, held by the lease. They share pages."""

    seq: int
    lease: LeaseRef
    session: int
    generation: int
    rows: int
    name: str


class FindPrefix(Tagged, frozen=True, tag="find_prefix"):
    """Look for a session that begins with the pages that ``digests`` stand for (`protocol.prefix`)."""

    seq: int
    lease: LeaseRef
    fingerprint: bytes
    encoding: str
    digests: list[bytes]


class SaveSession(Tagged, frozen=True, tag="save_session"):
    """Write a session of the caller's uid to disk, in place of what was saved under its name before."""

    seq: int
    name: str


class RestoreSession(Tagged, frozen=True, omit_defaults=True, tag="restore_session"):
    """Make a stored session of what was saved; ``fingerprint`` and ``encoding`` must be its own, or empty.

    With ``lazy`` it is there at once, and its pages come later.
    """

    seq: int
    name: str
    fingerprint: bytes
    encoding: str
    lazy: bool = False


class ListSaved(Tagged, frozen=True, tag="list_saved"):
    """Ask for the caller's saved sessions."""

    seq: int


class RemoveSaved(Tagged, frozen=True, tag="remove_saved"):
    """Remove a saved session from disk."""

    seq: int
    name: str


VerbOfLease = (
    CreateSession
    | OpenSession
    | ViewSession
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
"""Those that name a lease and are answered at once, unless they find no room or pages that are absent."""

LeaseRequest = VerbOfLease | FetchPages | BlockRequest
"""Those that name a lease."""

Request = Hello | Stat | OperatorRequest | SaveSession | RestoreSession | ListSaved | RemoveSaved | LeaseRequest

# Replies on the control socket


class DeviceInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A device whose VRAM the daemon gives: its UUID (or ``cpu``), the capacity and granularity in bytes."""

    device: str
    name: str
    capacity: int
    granularity: int


class Welcome(Tagged, frozen=True, tag="welcome"):
    """The answer to `Hello`: the protocol in use, the daemon's epoch, and where its handle socket is."""

    seq: int
    major: int
    minor: int
    daemon_version: str
    epoch: int
    handle_socket: str
    extent_bytes: int
    devices: list[DeviceInfo]


class Stats(Tagged, frozen=True, tag="stats"):
    seq: int
    stats: NodeStats


class SessionOpened(Tagged, frozen=True, tag="session_opened"):
    """A session that the lease now holds. ``daemon_block`` has the page table, ``worker_block`` is the worker's."""

    seq: int
    session: int
    generation: int
    page_count: int
    daemon_block: SharedMemory
    worker_block: SharedMemory
    extents: list[Extent]


class PagesChanged(Tagged, frozen=True, tag="pages_changed"):
    """The session's pages after an extension or truncation; ``extents`` are those that this lease has not seen."""

    seq: int
    session: int
    generation: int
    page_count: int
    extents: list[Extent]


class PrefixFound(Tagged, frozen=True, tag="prefix_found"):
    """The session with most of the pages that were looked for, and how many; 0 for none."""

    seq: int
    session: int
    generation: int
    name: str
    pages: int


class DeviceAllocated(Tagged, frozen=True, tag="device_allocated"):
    seq: int
    memory: DeviceMemory


class Saved(Tagged, frozen=True, tag="saved"):
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


class SavedSessions(Tagged, frozen=True, tag="saved_sessions"):
    """The caller's saved sessions, least recently used first."""

    seq: int
    sessions: list[SavedSession]


class Done(Tagged, frozen=True, tag="done"):
    seq: int


class ErrorReply(Tagged, frozen=True, tag="error"):
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
    | BlockReply
    | Resized
    | ReloadReported
    | Done
    | ErrorReply
)

# On the handle socket

HandleRequest = LeaseOpen | Claim | HandOver | OpenReport
HandleReply = LeaseOpened | Claimed | HandedOver | ReportOpened | ErrorReply
