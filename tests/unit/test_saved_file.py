"""Saved sessions as bytes: what was written is read, and what is not whole is refused, whatever is wrong with it."""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import xxhash

from protocol.errors import SavedRefused
from tests.saved_files import FIELDS, Parts, make, mutated, read, read_page_by_page, resealed
from tests.trials import report

pytestmark = pytest.mark.leaks_per_module

SHORT, LONG = 500, 100_000


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


@pytest.mark.parametrize(("rows", "tokens"), [(0, 0), (0, 5), (1, 1), (64, 64), (65, 60), (4096, 4096)])
def test_what_was_written_is_read(pool: ThreadPoolExecutor, rows: int, tokens: int) -> None:
    data = make(rows, tokens, pool=pool)
    header, state, pages = read(data, pool)
    parts = Parts(data)
    assert len(data) == parts.end == header.size
    assert (state.tokens, state.commit, state.sampler, pages) == parts.content(data)
    assert (header.rows, header.tokens, header.name, header.generation) == (rows, tokens, "s", 3)


def test_a_file_is_what_the_specification_says(pool: ThreadPoolExecutor) -> None:
    data = make(pool=pool)
    assert data[:24] == b"KVDSAVED" + struct.pack("<IIQ", 1, 4096, xxhash.xxh3_64_intdigest(data[24:4096]))
    fields = FIELDS.unpack_from(data, 24)
    assert fields[:10] == (0, 5000, 4096, 64, 3, 300, 310, 64, 24, len(data))
    assert fields[10:] == (b"q8g64".ljust(16, b"\0"), bytes(range(32)), b"s".ljust(128, b"\0"))
    assert resealed(data) == data, "the second writer agrees on every checksum"


def test_other_versions_are_refused_by_name(pool: ThreadPoolExecutor) -> None:
    data = bytearray(make(pool=pool))
    data[8] = 2
    with pytest.raises(SavedRefused, match="saved session file is refused: it has version 2; version 1 is read here"):
        read(bytes(data), pool)
    for junk in (b"", b"KVDSAVED", bytes(5000), b"x" * 5000):
        with pytest.raises(SavedRefused, match="not a saved session"):
            read(junk, pool)


def check_pages(data: bytes, damaged: bytes, pool: ThreadPoolExecutor, *, sealed: bool) -> int:
    """Read page by page, each page is as it was, or refused. Returns 1 if there was any of each kind."""
    try:
        found = read_page_by_page(damaged, pool)
    except SavedRefused:
        return 0
    parts = Parts(damaged if sealed else data)
    pages = parts.content(damaged if sealed else data)[3]
    whole = [pages[start : start + parts.stride] for start in range(0, len(pages), parts.stride)]
    refused = [page for page, content in enumerate(found) if content != whole[page]]
    assert all(set(found[page]) == {0xEE} for page in refused), refused
    return int(0 < len(refused) < len(found))


@pytest.mark.parametrize(
    "count", [SHORT, pytest.param(LONG, marks=[pytest.mark.torture, pytest.mark.timeout(7200)])], ids=["short", "long"]
)
def test_no_damaged_file_is_accepted(pool: ThreadPoolExecutor, count: int) -> None:
    """Damage of all kinds, half of it with every checksum recomputed.

    A file whose checksums were recomputed may be whole again: then it is read as exactly what is in it, by the second
    reader's account, and never as anything else.
    """
    data, other = make(seed=1, pool=pool), make(seed=2, pool=pool)
    choice = random.Random(5)
    outcomes: Counter[str] = Counter()
    for trial in range(count):
        kind, damaged = mutated(data, other, choice)
        sealed = trial % 2 == 1
        if sealed:
            damaged = resealed(damaged)
        if damaged == data:
            continue
        outcomes["pages_alone"] += check_pages(data, damaged, pool, sealed=sealed)
        try:
            _, state, pages = read(damaged, pool)
        except SavedRefused:
            outcomes["refused"] += 1
            continue
        assert sealed, f"trial {trial}: {kind} was accepted"
        assert (state.tokens, state.commit, state.sampler, pages) == Parts(damaged).content(damaged), (trial, kind)
        outcomes["whole_again"] += 1
    report("damaged files accepted wrongly", count, **outcomes)
    assert outcomes["refused"] > count / 2
    assert outcomes["pages_alone"] > count / 10
    assert outcomes["whole_again"] > 0
