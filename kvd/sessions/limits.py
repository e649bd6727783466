"""What a session may be called and how large it may be; SPEC.md lists these limits beside the fields."""

from __future__ import annotations

import re

from protocol.errors import InvalidValue
from protocol.messages import CreateSession

NAME_LIMIT = 64
NAME_PATTERN = re.compile(rf"[A-Za-z0-9._-]{{1,{NAME_LIMIT}}}")
ENCODING_PATTERN = re.compile(r"[a-z0-9._-]{1,16}")
FINGERPRINT_BYTES = 32
LARGEST_COMMIT = 1 << 24
"""Bytes of payload in a commit record."""
LARGEST_TOKEN_CAPACITY = (1 << 31) - 1


def require_session_name(name: str) -> str:
    """``name``, if a session may have it; raises `InvalidValue` otherwise."""
    if not NAME_PATTERN.fullmatch(name):
        raise InvalidValue("session name", name[: 2 * NAME_LIMIT], f"what matches {NAME_PATTERN.pattern}")
    return name


def check_creation(request: CreateSession, extent_bytes: int) -> None:
    """Raise `InvalidValue` for a field outside its limits."""
    require_session_name(request.name)
    if len(request.fingerprint) != FINGERPRINT_BYTES:
        raise InvalidValue("bytes of the fingerprint", len(request.fingerprint), f"{FINGERPRINT_BYTES}")
    if not ENCODING_PATTERN.fullmatch(request.encoding):
        raise InvalidValue("encoding", request.encoding[:64], f"what matches {ENCODING_PATTERN.pattern}")
    limits = {
        "page_bytes": (request.page_bytes, 1, extent_bytes),
        "token_capacity": (request.token_capacity, 1, LARGEST_TOKEN_CAPACITY),
        "commit_bytes": (request.commit_bytes, 0, LARGEST_COMMIT),
    }
    for what, (value, least, most) in limits.items():
        if not least <= value <= most:
            raise InvalidValue(what, value, f"{least} to {most}")
