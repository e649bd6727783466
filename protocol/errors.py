"""Errors as types with facts.

Every error that crosses the wire has a ``code`` (SPEC.md lists them), a sentence that names the thing, the value and
the limit, and the same facts as data. ``exit_status`` is what a command exits with when it ends on the error.
"""

from __future__ import annotations

from typing import ClassVar

Fact = int | float | str | bool | None | list[str]

EXIT_USAGE = 64
EXIT_NO_DEVICE = 69
EXIT_INTERNAL = 70
EXIT_OS = 71
EXIT_PERMISSION = 77
EXIT_CONFIG = 78

_BY_CODE: dict[str, type[KvdError]] = {}


class KvdError(Exception):
    """Base of all errors that kvd raises on purpose."""

    code: ClassVar[str] = "internal"
    exit_status: ClassVar[int] = EXIT_INTERNAL

    def __init__(self, message: str, **facts: Fact) -> None:
        super().__init__(message)
        self.message = message
        self.facts: dict[str, Fact] = facts

    def __init_subclass__(cls) -> None:
        _BY_CODE[cls.code] = cls


class InvalidValue(KvdError):
    """A value outside its limits: of a field, an argument or a setting."""

    code = "invalid_value"
    exit_status = EXIT_USAGE

    def __init__(self, what: str, value: object, allowed: str) -> None:
        super().__init__(f"{what} is {value!r}; allowed: {allowed}", what=what, value=_plain(value), allowed=allowed)


class BadMessage(KvdError):
    """Bytes that are not a message of this protocol."""

    code = "bad_message"


class MessageTooLarge(KvdError):
    """A message above the limit of its socket."""

    code = "message_too_large"

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"message of {size} bytes; the limit is {limit}", size=size, limit=limit)


class UnsupportedVersion(KvdError):
    """A protocol version that the other side does not speak."""

    code = "unsupported_version"

    def __init__(self, asked: str, supported: str) -> None:
        super().__init__(
            f"protocol {asked} is not spoken here; supported: {supported}", asked=asked, supported=supported
        )


class Replayed(KvdError):
    """A sequence number that this connection has used already."""

    code = "replayed"

    def __init__(self, sequence: int, last: int) -> None:
        super().__init__(f"sequence number {sequence} is not above the last one, {last}", sequence=sequence, last=last)


class GrantRefused(KvdError):
    """A grant that is unknown, used, or another lease's."""

    code = "grant_refused"
    exit_status = EXIT_PERMISSION


class PermissionRefused(KvdError):
    """The peer's uid, gid or pid, as the kernel gave it, may not do this."""

    code = "permission_refused"
    exit_status = EXIT_PERMISSION


class UnknownLease(KvdError):
    """No living lease of this number belongs to the calling process."""

    code = "unknown_lease"


class UnknownSession(KvdError):
    """No session of this name or number belongs to the caller."""

    code = "unknown_session"
    exit_status = EXIT_USAGE


class UnknownHandle(KvdError):
    """No memory handle of this number belongs to the lease."""

    code = "unknown_handle"


class UnknownBlocks(KvdError):
    """No space of blocks, or hold on some, of this number belongs to the caller."""

    code = "unknown_blocks"
    exit_status = EXIT_USAGE


class SessionExists(KvdError):
    """The name is taken by another session of the same uid."""

    code = "session_exists"
    exit_status = EXIT_USAGE


class SessionBusy(KvdError):
    """The session is held by another lease whose process is not known to be dead."""

    code = "session_busy"
    exit_status = EXIT_USAGE


class SessionDamaged(KvdError):
    """A worker wrote or cut the session's memory so that it can no longer be read."""

    code = "session_damaged"


class StateVersion(KvdError):
    """State in shared memory that another version of the daemon left behind."""

    code = "state_version"
    exit_status = EXIT_CONFIG

    def __init__(self, found: int, supported: int) -> None:
        super().__init__(
            f"state of version {found} was left in shared memory; this daemon reads version {supported}. To keep the "
            f"sessions, start the daemon that wrote it and stop it with kvd drain --save",
            found=found,
            supported=supported,
        )


class CopybackLag(KvdError):
    """Rows of a history that are not committed although the barrier has waited for their copies."""

    code = "copyback_lag"

    def __init__(self, session: str, logical: int, committed: int) -> None:
        super().__init__(
            f"session {session} has {logical} rows, of which {committed} are committed: {logical - committed} behind",
            session=session,
            logical=logical,
            committed=committed,
        )


class FingerprintMismatch(KvdError):
    """The session's pages were made by another model, layout or encoding."""

    code = "fingerprint_mismatch"
    exit_status = EXIT_USAGE


class StaleEpoch(KvdError):
    """A reference to an earlier run of the daemon."""

    code = "stale_epoch"


class StaleGeneration(KvdError):
    """A reference to the session as it was before a truncation or another opening."""

    code = "stale_generation"

    def __init__(self, session: str, given: int, current: int) -> None:
        super().__init__(
            f"session {session} is at generation {current}, not {given}", session=session, given=given, current=current
        )


class OutOfCapacity(KvdError):
    """A tier cannot give what was asked. ``holders`` names who has the rest, largest first."""

    code = "out_of_capacity"
    exit_status = EXIT_OS

    def __init__(self, tier: str, asked: int, free: int, capacity: int, holders: list[str] | None = None) -> None:
        held = "; held by " + ", ".join(holders) if holders else ""
        super().__init__(
            f"{tier}: {asked} bytes asked, {free} free of {capacity}{held}",
            tier=tier,
            asked=asked,
            free=free,
            capacity=capacity,
            holders=holders or [],
        )


class TierInUse(KvdError):
    """A tier cannot be as small as was asked. ``least`` is the smallest that it can be now; ``holders`` say why."""

    code = "tier_in_use"
    exit_status = EXIT_OS

    def __init__(self, tier: str, asked: int, least: int, holders: list[str]) -> None:
        held = "; held by " + ", ".join(holders) if holders else ""
        super().__init__(
            f"{tier}: {asked} bytes asked; it can be as small as {least} now{held}",
            tier=tier,
            asked=asked,
            least=least,
            holders=holders,
        )


class UnknownSaved(KvdError):
    """No saved session of this name belongs to the caller."""

    code = "unknown_saved"
    exit_status = EXIT_USAGE


class SavedRefused(KvdError):
    """A saved session that is not whole, not of a version read here, or not what its name says."""

    code = "saved_refused"

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"saved session {name} is refused: {reason}", name=name, reason=reason)
        self.reason = reason


class NoDevice(KvdError):
    """The device that was asked for is not here, or its driver cannot be used."""

    code = "no_device"
    exit_status = EXIT_NO_DEVICE


class OsFailure(KvdError):
    """The operating system or a driver refused a call."""

    code = "os_failure"
    exit_status = EXIT_OS


class ConfigError(KvdError):
    """A setting that is unknown, malformed or outside its limits; names its origin."""

    code = "config"
    exit_status = EXIT_CONFIG


class DaemonRunning(KvdError):
    """Another daemon holds the run directory."""

    code = "daemon_running"
    exit_status = EXIT_OS


class DaemonUnavailable(KvdError):
    """No daemon answers at the socket, or it went away."""

    code = "daemon_unavailable"
    exit_status = EXIT_NO_DEVICE


class PeerLost(KvdError):
    """Another process of the same model died, or cannot be reached."""

    code = "peer_lost"
    exit_status = EXIT_NO_DEVICE


class Draining(KvdError):
    """The daemon is shutting down and takes no new work."""

    code = "draining"


class LedgerMismatch(KvdError):
    """The books do not add up. The message is the arithmetic."""

    code = "ledger_mismatch"


def error_from(code: str, message: str, facts: dict[str, Fact]) -> KvdError:
    """The error that a reply describes, as its own type; `KvdError` for a code unknown to this version."""
    cls = _BY_CODE.get(code, KvdError)
    error = cls.__new__(cls)
    KvdError.__init__(error, message, **facts)
    return error


def _plain(value: object) -> Fact:
    return value if isinstance(value, int | float | str) or value is None else str(value)
