"""Names of blocks by content: a chain of hashes over token ids, the same in every process and after every restart.

    start       SHA-256 of "kvd blocks 1", NUL, the space's fingerprint, the salt
    block i     SHA-256 of the key before it, the number of its token ids (u32), the ids (i32 each), its extra bytes

Numbers are little-endian. Equal keys mean equal tokens and equal extra bytes in all blocks up to this one, of the same
model in the same layout. What an engine hashes itself does not do: its chains begin with a random number.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence

KEY_BYTES = 32
FINGERPRINT_BYTES = 32
_LENGTH = struct.Struct("<I")


def fingerprint(facts: Mapping[str, str | int | bytes]) -> bytes:
    """The 32 bytes that stand for everything that a block's bytes depend on beside its tokens.

    ``facts`` are such as the hashes of the checkpoint's files, the dtypes, the layout, rank and size of a tensor
    parallel group, adapters. In any order; another name, value or type makes another fingerprint.
    """
    digest = hashlib.sha256(b"kvd fingerprint 1\0")
    for name in sorted(facts):
        value = facts[name]
        data = value if isinstance(value, bytes) else str(value).encode()
        for part in (name.encode(), type(value).__name__.encode(), data):
            digest.update(_LENGTH.pack(len(part)) + part)
    return digest.digest()


def chain_start(space_fingerprint: bytes, salt: bytes = b"") -> bytes:
    """The key before that of the first block. Chains of another ``salt`` have no key in common."""
    return hashlib.sha256(b"kvd blocks 1\0" + space_fingerprint + salt).digest()


def extend_chain(before: bytes, tokens: bytes, block_tokens: int, extra: Sequence[bytes] = ()) -> list[bytes]:
    """The keys of the full blocks of ``tokens`` (int32 each, little-endian) that follow the block of key ``before``.

    ``extra`` has, from the first of these blocks on, what else a block's content depends on: an adapter, an image.
    """
    size = 4 * block_tokens
    length = _LENGTH.pack(block_tokens)
    keys = []
    for index, start in enumerate(range(0, len(tokens) - size + 1, size)):
        beside = extra[index] if index < len(extra) else b""
        before = hashlib.sha256(before + length + tokens[start : start + size] + beside).digest()
        keys.append(before)
    return keys
