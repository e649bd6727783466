"""What a session may be called and how large it may be; SPEC.md lists these limits beside the fields."""

from __future__ import annotations

import re

NAME_LIMIT = 64
NAME_PATTERN = re.compile(rf"[A-Za-z0-9._-]{{1,{NAME_LIMIT}}}")
ENCODING_PATTERN = re.compile(r"[a-z0-9._-]{1,16}")
FINGERPRINT_BYTES = 32
LARGEST_COMMIT = 1 << 24
"""Bytes of payload in a commit record."""
LARGEST_TOKEN_CAPACITY = (1 << 31) - 1
