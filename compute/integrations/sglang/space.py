"""The pages of one of SGLang's host pools in the store: looked for, loaded and stored by three threads of its own."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from typing import Any

from compute.block_store import BlockStore, Reservation
from compute.integrations.sglang.connection import Availability, Connection
from compute.integrations.sglang.pages import Pages
from compute.integrations.sglang.settings import Settings
from protocol.block_messages import MOST_KEYS

BATCH_BYTES = 64 << 20
"""Bytes under one pin or reservation: what is read back from disk before the first copy, and not evicted meanwhile."""


class PageSpace:
    """Pages by SGLang's hashes, which are SHA-256 in hexadecimal. Nothing here raises because of the daemon.

    A hash stands for all tokens up to its page's end, so pages are found and loaded as the beginning of what is asked
    for. ``salt`` sets the pages of one engine apart.
    """

    def __init__(self, pages: Pages, fingerprint: bytes, settings: Settings, availability: Availability) -> None:
        self._pages = pages
        self._batch = max(1, min(MOST_KEYS, BATCH_BYTES // pages.nbytes))
        self._salt = b""
        self.loaded = Transfers(pages.nbytes)
        self.stored = Transfers(pages.nbytes)

        def connection(name: str) -> Connection:
            open_store = partial(
                BlockStore,
                settings.run_dir,
                fingerprint=fingerprint,
                block_bytes=pages.nbytes,
                name=f"sglang-{name}",
                timeout_s=settings.timeout_s,
            )
            return Connection(open_store, availability, settings.timeout_s)

        self._finding, self._loading, self._storing = map(connection, ("find", "load", "store"))

    def find(self, hashes: Sequence[str], before: Sequence[str] = ()) -> int:
        """How many of the first pages are stored; 0 where that is not known. They count as used, as does ``before``."""

        def find(store: BlockStore) -> int:
            store.find(self._keys(before))
            return store.find(self._keys(hashes))

        return self._finding.call(find) or 0

    def load(self, hashes: Sequence[str], indices: Any) -> list[bool]:
        """Copy pages to where ``indices`` say; which of them are there, byte for byte. The others are as they were."""
        count, begin = 0, time.monotonic()

        def load(store: BlockStore) -> None:
            nonlocal count
            places = self._pages.addresses(indices, len(hashes))
            keys = self._keys(hashes)
            for pinned in store.pin_each(self._parts(keys[count:]), from_disk=BATCH_BYTES):
                for place, address in zip(places[count : count + pinned.count], pinned.addresses, strict=True):
                    self._pages.load(place, address)
                count += pinned.count  # even if the daemon is gone: what is pinned outlives it

        self._loading.call(load)
        self.loaded.count(count, time.monotonic() - begin)
        return [True] * count + [False] * (len(hashes) - count)

    def store(self, hashes: Sequence[str], indices: Any, before: Sequence[str] = ()) -> list[bool]:
        """Copy pages from where ``indices`` say; which of them are stored. ``before`` counts as used."""
        done: list[tuple[Reservation, int]] = []
        begin = time.monotonic()

        def write(store: BlockStore) -> None:
            places = self._pages.addresses(indices, len(hashes))
            keys = self._keys(hashes)
            place_of = dict(zip(keys, places, strict=True))
            store.find(self._keys(before))
            done.clear()  # if it is the second time: what is stored already is not written again
            parts = self._parts(keys)
            for reservation, part in zip(store.reserve_each(parts), parts, strict=True):
                for key, address in zip(reservation.keys, reservation.addresses, strict=True):
                    self._pages.store(place_of[key], address)
                reservation.publish()
                done.append((reservation, len(part)))

        self._storing.call(write)
        stored = list(takewhile(lambda part: part[0].is_stored, done))
        count = sum(pages for _, pages in stored)
        self.stored.count(sum(len(reservation.keys) for reservation, _ in stored), time.monotonic() - begin)
        return [True] * count + [False] * (len(hashes) - count)

    def set_apart(self, salt: bytes) -> None:
        """Find nothing any more that was stored under another salt."""
        self._salt = salt

    def close(self) -> None:
        for connection in (self._finding, self._loading, self._storing):
            connection.close()

    def _parts(self, keys: list[bytes]) -> list[list[bytes]]:
        return [keys[first : first + self._batch] for first in range(0, len(keys), self._batch)]

    def _keys(self, hashes: Sequence[str]) -> list[bytes]:
        keys = [bytes.fromhex(each) for each in hashes]
        return [hashlib.sha256(self._salt + key).digest() for key in keys] if self._salt else keys


class Transfers:
    """Pages and GB/s of each transfer since they were last taken. For use from several threads."""

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._lock = threading.Lock()
        self._each: list[tuple[int, float]] = []

    def count(self, pages: int, seconds: float) -> None:
        if pages:
            with self._lock:
                self._each.append((pages, seconds))

    def take(self) -> tuple[list[int], list[float]]:
        with self._lock:
            each, self._each = self._each, []
        return [pages for pages, _ in each], [pages * self._page_bytes / seconds / 1e9 for pages, seconds in each]
