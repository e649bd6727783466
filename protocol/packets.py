"""What travels over the handle socket, whose connection is the lease.

Whoever needs a message takes it from `protocol.messages`, which has all of them.
"""

from __future__ import annotations

from protocol.handles import DevicePurpose, LeaseRef
from protocol.tagged import Tagged


class LeaseOpen(Tagged, frozen=True, tag="lease_open"):
    """The first packet of a handle connection."""

    major: int
    minor: int
    client: str


class Claim(Tagged, frozen=True, tag="claim"):
    """Present a grant."""

    grant: int


class HandOver(Tagged, frozen=True, tag="hand_over"):
    """Give the daemon VRAM that an earlier run of it had given to this process; its file descriptor comes along."""

    device: str
    requested: int
    committed: int
    purpose: DevicePurpose
    session: int


class OpenReport(Tagged, frozen=True, tag="open_report"):
    """Ask for the lease's report block (`protocol.lease_report`), of this version."""

    version: int


class LeaseOpened(Tagged, frozen=True, tag="lease_opened"):
    lease: LeaseRef


class Claimed(Tagged, frozen=True, tag="claimed"):
    """The grant's handle; one file descriptor comes with the packet."""

    handle: int


class HandedOver(Tagged, frozen=True, tag="handed_over"):
    """The handle that the memory has from now on."""

    handle: int


class ReportOpened(Tagged, frozen=True, tag="report_opened"):
    """The block's size; one file descriptor comes with the packet."""

    nbytes: int
