"""Which protocol versions this daemon speaks: any minor version of its own major one (SPEC.md, "Versions")."""

from __future__ import annotations

from protocol.errors import UnsupportedVersion
from protocol.messages import PROTOCOL_MAJOR, PROTOCOL_MINOR

SPOKEN_VERSIONS = f"{PROTOCOL_MAJOR}.0 to {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}"


def require_version(major: int, minor: int) -> None:
    """Raise `UnsupportedVersion` unless the client's version is spoken here."""
    if major != PROTOCOL_MAJOR or minor < 0:
        raise UnsupportedVersion(f"{major}.{minor}", SPOKEN_VERSIONS)
