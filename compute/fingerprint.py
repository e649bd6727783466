"""The model fingerprint: what pages must share to be read by the same worker.

A hash of the canonical config, the encoding, and what the weights are: every tensor's name, dtype, shape and content,
or the seed of random ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from protocol.errors import InvalidValue
from protocol.layout import Encoding
from protocol.model import ModelConfig


def seed_identity(seed: int) -> bytes:
    """The identity of random weights."""
    return f"random weights, seed {seed}".encode()


def file_identity(path: Path) -> bytes:
    """The identity of the weights in a safetensors file, or in all such files of a folder: names and contents."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise InvalidValue("weights", str(path), "a safetensors file, or a folder with some")
    return b"".join(_content(file) for file in files)


def fingerprint(config: ModelConfig, encoding: Encoding, weights: bytes) -> bytes:
    """32 bytes that differ where the config, the encoding or the weights do."""
    parts: Iterable[bytes] = (json.dumps(asdict(config), sort_keys=True).encode(), encoding.name.encode(), weights)
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def _content(file: Path) -> bytes:
    # A safetensors file is a header of names, dtypes, shapes and offsets, then the bytes: its hash covers all of them.
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").digest()
