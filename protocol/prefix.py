"""Prefixes by content: a chain of hashes, one per page of tokens, the same in every process and after every restart.

    start       SHA-256 of "kvd prefix 1", NUL, the model's fingerprint, the encoding's name
    page p      SHA-256 of the hash before it and the page's 64 token ids, int32 each, little-endian

Equal hashes of page p mean equal tokens in all pages up to p, of the same model in the same encoding.
"""

from __future__ import annotations

import hashlib

from protocol.layout import PAGE_TOKENS

DIGEST_BYTES = 32
_PAGE_BYTES = 4 * PAGE_TOKENS


def chain_start(fingerprint: bytes, encoding: str) -> bytes:
    """The hash before that of the first page."""
    return hashlib.sha256(b"kvd prefix 1\0" + fingerprint + encoding.encode()).digest()


def extend_chain(before: bytes, tokens: bytes) -> list[bytes]:
    """The hashes of the full pages of ``tokens`` (int32 each, little-endian) that follow the page of ``before``."""
    hashes = []
    for start in range(0, len(tokens) - _PAGE_BYTES + 1, _PAGE_BYTES):
        before = hashlib.sha256(before + tokens[start : start + _PAGE_BYTES]).digest()
        hashes.append(before)
    return hashes
