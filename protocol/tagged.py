"""The base of every message."""

from __future__ import annotations

import msgspec


class Tagged(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """A message: a map with its name as ``type``; a field that it does not have is an error."""
