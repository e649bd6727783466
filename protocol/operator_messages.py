"""What operators ask of the daemon, and how it answers where more than `Done` is to be said.

Whoever needs a message takes it from `protocol.messages`, which has all of them.
"""

from __future__ import annotations

import msgspec

from protocol.tagged import Tagged


class Drain(Tagged, frozen=True, tag="drain"):
    """Have the daemon drain and stop; with ``save``, when every session is on disk."""

    seq: int
    save: bool


class RevokeLease(Tagged, frozen=True, tag="revoke_lease"):
    """Have a lease lose its connection; what it holds is in quarantine until its process is dead. For operators."""

    seq: int
    number: int


class EndSession(Tagged, frozen=True, tag="end_session"):
    """End a session of any uid that no lease holds. For operators."""

    seq: int
    uid: int
    name: str


class Resize(Tagged, frozen=True, tag="resize"):
    """Give a tier another limit until the daemon is stopped: ``key`` is the setting of it. For operators."""

    seq: int
    key: str
    nbytes: int


class ReloadReport(Tagged, frozen=True, tag="reload_report"):
    """Ask what came of the latest reading of the settings. For operators."""

    seq: int


class Resized(Tagged, frozen=True, tag="resized"):
    """A tier has another limit, in bytes."""

    seq: int
    key: str
    before: int
    after: int


class SettingChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A setting that was found different, both values as a file would have them. ``refused`` is why it stays."""

    key: str
    before: str
    after: str
    refused: str


class ReloadReported(Tagged, frozen=True, tag="reload_reported"):
    """The latest reading of the settings: when, in seconds since 1970, 0 for never. With ``error`` nothing changed."""

    seq: int
    time_s: float
    error: str
    changes: list[SettingChange]


OperatorRequest = Drain | RevokeLease | EndSession | Resize | ReloadReport
"""Those that only root, the daemon's uid and members of its admin group may make."""
