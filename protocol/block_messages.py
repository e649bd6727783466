"""Messages about blocks: pieces of one size that are stored and found by the hash of what they hold.

Whoever needs a message takes it from `protocol.messages`, which has all of them.
"""

from __future__ import annotations

from protocol.block_keys import KEY_BYTES as KEY_BYTES
from protocol.handles import Extent, LeaseRef
from protocol.tagged import Tagged

MOST_KEYS = 16384
"""Keys in one message."""

FRAME_BYTES = 8
"""Of one frame in a reply: u64, little-endian, the extent's number in the upper half, an index in the lower."""

NO_FRAME = (1 << 64) - 1
"""In place of a frame: the key is stored already, or somebody is writing it."""

NO_LEASE = LeaseRef(0, 0)


class OpenBlocks(Tagged, frozen=True, tag="open_blocks"):
    """Name a space: the blocks of this uid that have this fingerprint and size.

    ``previous`` is a lease that the calling process had, of which no copy is in flight any more; or `NO_LEASE`.
    """

    seq: int
    lease: LeaseRef
    fingerprint: bytes
    block_bytes: int
    previous: LeaseRef


class MapBlocks(Tagged, frozen=True, tag="map_blocks"):
    """Ask for the memory that blocks of a space are in, before any of them is wanted."""

    seq: int
    lease: LeaseRef
    space: int


class FindBlocks(Tagged, frozen=True, tag="find_blocks"):
    """Ask how many of the first keys of a chain are stored. ``keys`` are one behind the other, 32 bytes each."""

    seq: int
    lease: LeaseRef
    space: int
    keys: bytes


class PinBlocks(Tagged, frozen=True, tag="pin_blocks"):
    """Have the first blocks of a chain that are stored stay where they are until they are released.

    At most ``from_disk`` bytes of them are read from disk before.
    """

    seq: int
    lease: LeaseRef
    space: int
    keys: bytes
    from_disk: int


class ReserveBlocks(Tagged, frozen=True, tag="reserve_blocks"):
    """Take frames for those keys of a chain that are neither stored nor being written."""

    seq: int
    lease: LeaseRef
    space: int
    keys: bytes


class PublishBlocks(Tagged, frozen=True, tag="publish_blocks"):
    """Their bytes are written: have blocks of a reservation be stored. No ``keys`` means all that are left of it."""

    seq: int
    lease: LeaseRef
    hold: int
    keys: bytes


class ReleaseBlocks(Tagged, frozen=True, tag="release_blocks"):
    """End a hold: pinned blocks are pinned no more, reserved ones that were not published are given up."""

    seq: int
    lease: LeaseRef
    hold: int


BlockRequest = OpenBlocks | MapBlocks | FindBlocks | PinBlocks | ReserveBlocks | PublishBlocks | ReleaseBlocks


class BlocksOpened(Tagged, frozen=True, tag="blocks_opened"):
    """The space's number; frames of it lie ``stride`` bytes apart."""

    seq: int
    space: int
    stride: int


class BlocksMapped(Tagged, frozen=True, tag="blocks_mapped"):
    """Extents that the lease had not been sent; none where it has all."""

    seq: int
    extents: list[Extent]


class BlocksFound(Tagged, frozen=True, tag="blocks_found"):
    """How many of the first keys are stored, and how many of those on disk only."""

    seq: int
    count: int
    on_disk: int


class BlocksPinned(Tagged, frozen=True, tag="blocks_pinned"):
    """The frames of the first blocks, in order; ``hold`` is 0 for none."""

    seq: int
    hold: int
    frames: bytes
    extents: list[Extent]


class BlocksReserved(Tagged, frozen=True, tag="blocks_reserved"):
    """A frame or `NO_FRAME` for every key, in order; ``hold`` is 0 where all have none."""

    seq: int
    hold: int
    frames: bytes
    extents: list[Extent]


BlockReply = BlocksOpened | BlocksMapped | BlocksFound | BlocksPinned | BlocksReserved
