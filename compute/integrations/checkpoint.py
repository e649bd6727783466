"""The content hash of a checkpoint's files, remembered for files that have not changed."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from protocol.errors import InvalidValue

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""Of files with weights. Where there are safetensors, the others are other copies."""
THREADS = 8
_BLOB = re.compile(r"[0-9a-f]{64}")

Known = dict[str, tuple[int, int, int, str]]
"""By path: size, time of change in ns, inode, SHA-256."""


def identity_of_folder(folder: Path, memory: Path | None = None) -> str:
    """A hash over names and contents of all weights in ``folder``, or of the one file that it is.

    Hashes are remembered in ``memory`` (by default in the user's cache folder), by path, size, time of change and
    inode. Raises `InvalidValue` where there are no weights.
    """
    memory = memory or _cache_folder() / "weights.json"
    if folder.is_file():
        files = [folder]
    else:
        files = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())
        safe = [path for path in files if path.suffix == ".safetensors"]
        files = safe or files
    if not files:
        raise InvalidValue("weights", str(folder), f"a folder with files of {', '.join(SUFFIXES)}")
    with _only_one(memory):  # of the ranks of an engine: the others find what it has read
        known = _read(memory)
        before = dict(known)
        with ThreadPoolExecutor(min(THREADS, len(files))) as pool:
            hashes = list(pool.map(lambda path: _hash_of(path, known), files))
        if known != before:
            _write(memory, known)
    digest = hashlib.sha256()
    for path, content in zip(files, hashes, strict=True):
        name = path.name if path == folder else str(path.relative_to(folder))
        digest.update(f"{name}\0{content}\n".encode())
    return digest.hexdigest()


def folder_of(name: str, revision: str | None = None) -> Path:
    """Where the files of a folder or of a name at the hub are. Raises `OSError` or `ValueError` where they are not."""
    if Path(name).exists():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=revision, local_files_only=True))


def _hash_of(path: Path, known: Known) -> str:
    real = path.resolve()
    if real.parent.name == "blobs" and _BLOB.fullmatch(real.name):
        return real.name  # the hub's cache names large files by the SHA-256 that it checked
    status = real.stat()
    seen = known.get(str(real))
    now = (status.st_size, status.st_mtime_ns, status.st_ino)
    if seen is not None and tuple(seen[:3]) == now:
        return seen[3]
    with real.open("rb") as opened:
        content = hashlib.file_digest(opened, "sha256").hexdigest()
    known[str(real)] = (*now, content)
    return content


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvd"


@contextlib.contextmanager
def _only_one(memory: Path) -> Iterator[None]:
    """While one process hashes, others wait; where no lock is to be had, each does it for itself."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            memory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            fcntl.flock(stack.enter_context(memory.with_suffix(".lock").open("w")), fcntl.LOCK_EX)
        yield


def _read(memory: Path) -> Known:
    try:
        return msgspec.json.decode(memory.read_bytes(), type=Known)
    except (OSError, msgspec.MsgspecError):
        return {}


def _write(memory: Path, known: Known) -> None:
    """As a whole, or not at all; a folder that cannot be written to costs the hashing next time."""
    new = memory.with_suffix(f".{os.getpid()}")
    try:
        new.write_bytes(msgspec.json.encode(known))
        os.replace(new, memory)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()
