"""Blocks of a real daemon: written, published, found, pinned and given up, by one process and by several."""

from __future__ import annotations

import hashlib
import io
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from rich.console import Console

from compute.block_store import BlockStore
from kvd.stat.tables import print_tables
from protocol.block_keys import chain_start, extend_chain, fingerprint
from protocol.errors import DaemonUnavailable, InvalidValue, OutOfCapacity, UnknownBlocks
from tests.blackbox.daemon_process import DaemonProcess

FINGERPRINT = fingerprint({"checkpoint": "tiny", "kv_dtype": "bfloat16", "tp_size": 1})
BLOCK = 8192
MIB = 1 << 20


def chain(name: str, count: int) -> list[bytes]:
    tokens = hashlib.shake_256(name.encode()).digest(64 * count)
    return extend_chain(chain_start(FINGERPRINT), tokens, 16)


def content(key: bytes, nbytes: int = BLOCK) -> bytes:
    return hashlib.shake_256(key).digest(nbytes)


def put(store: BlockStore, keys: list[bytes]) -> list[bytes]:
    """Store what is not there; returns the keys that were written."""
    with store.reserve(keys) as reservation:
        for key, view in zip(reservation.keys, reservation.views, strict=True):
            view[:] = content(key, len(view))
        reservation.publish()
        return reservation.keys


def get(store: BlockStore, keys: list[bytes]) -> int:
    """How many are there, each with the right bytes."""
    with store.pin(keys) as pinned:
        assert [bytes(view) for view in pinned.views] == [
            content(key, store.block_bytes) for key in keys[: pinned.count]
        ]
        return pinned.count


@pytest.fixture
def store(daemon: DaemonProcess) -> Iterator[BlockStore]:
    with BlockStore(daemon.run_dir, fingerprint=FINGERPRINT, block_bytes=BLOCK, timeout_s=20) as opened:
        yield opened


def another(daemon: DaemonProcess, stack: ExitStack, block_bytes: int = BLOCK, name: str = "tiny") -> BlockStore:
    facts: dict[str, str | int | bytes] = {"checkpoint": name, "kv_dtype": "bfloat16", "tp_size": 1}
    opened = BlockStore(daemon.run_dir, fingerprint=fingerprint(facts), block_bytes=block_bytes, timeout_s=20)
    return stack.enter_context(opened)


class TestTwoPhases:
    def test_what_is_published_is_found_and_has_its_bytes(self, store: BlockStore) -> None:
        keys = chain("a", 100)
        assert store.find(keys) == 0
        assert put(store, keys) == keys
        assert store.find(keys) == 100
        assert get(store, keys) == 100
        assert put(store, keys) == []

    def test_nothing_is_seen_before_it_is_published(self, store: BlockStore) -> None:
        keys = chain("a", 10)
        reservation = store.reserve(keys)
        assert (store.find(keys), get(store, keys)) == (0, 0)
        reservation.publish(keys[:3])
        assert store.find(keys) == 3
        reservation.publish(keys[4:])
        assert store.find(keys) == 3
        reservation.publish()
        assert store.find(keys) == 10

    def test_what_is_given_up_is_gone(self, daemon: DaemonProcess, store: BlockStore) -> None:
        keys = chain("a", 10)
        reservation = store.reserve(keys)
        reservation.publish(keys[:4])
        reservation.abandon()
        reservation.abandon()
        assert store.find(keys) == 4
        assert store.stats().writing == 0
        assert put(store, keys) == keys[4:]

    def test_a_block_is_written_by_one(self, daemon: DaemonProcess, store: BlockStore) -> None:
        keys = chain("a", 10)
        with ExitStack() as stack:
            other = another(daemon, stack)
            with store.reserve(keys[:6]) as first, other.reserve(keys) as second:
                assert (first.keys, second.keys) == (keys[:6], keys[6:])
                for reservation in (first, second):
                    for key, view in zip(reservation.keys, reservation.views, strict=True):
                        view[:] = content(key)
                second.publish()
                assert other.find(keys) == 0
                first.publish()
            assert get(other, keys) == get(store, keys) == 10

    def test_a_key_that_comes_twice_has_one_frame(self, store: BlockStore) -> None:
        keys = chain("a", 3)
        assert put(store, [*keys, *keys, keys[1]]) == keys
        assert store.stats().stored == 3

    def test_keys_that_were_not_reserved_are_not_published(self, store: BlockStore) -> None:
        keys = chain("a", 4)
        with store.reserve(keys) as reservation:
            for bad in ([*keys, bytes(32)], [keys[0], keys[0]]):
                with pytest.raises(UnknownBlocks, match="has not reserved all of these"):
                    reservation.publish(bad)
            assert store.find(keys) == 0
            reservation.publish()
        assert store.find(keys) == 4

    def test_a_wrong_number_of_keys_is_refused(self, store: BlockStore) -> None:
        for keys in ([bytes(31)], [bytes(32), bytes(33)], [bytes(32)] * 16385):
            with pytest.raises(InvalidValue):
                store.reserve(keys)

    def test_no_keys_are_no_blocks(self, store: BlockStore) -> None:
        assert store.find([]) == 0
        with store.pin([]) as pinned, store.reserve([]) as reservation:
            assert (pinned.count, reservation.keys, pinned.views, reservation.addresses) == (0, [], [], [])
            reservation.publish()

    def test_chains_longer_than_a_message_are_found(self, store: BlockStore) -> None:
        with BlockStore(store._client.run_dir, fingerprint=bytes(32), block_bytes=4096, timeout_s=20) as small:
            keys = [index.to_bytes(32, "big") for index in range(16384)]
            small.reserve(keys[:8000]).publish()
            assert small.find([*keys, *keys]) == 8000


class TestSpaces:
    def test_another_fingerprint_or_size_never_hits(self, daemon: DaemonProcess, store: BlockStore) -> None:
        keys = chain("a", 10)
        put(store, keys)
        with ExitStack() as stack:
            others = [another(daemon, stack, name="huge"), another(daemon, stack, block_bytes=BLOCK + 4096)]
            assert [other.find(keys) for other in others] == [0, 0]
            for other in others:
                put(other, keys)
            assert [get(other, keys) for other in (store, *others)] == [10, 10, 10]

    def test_two_processes_of_a_space_share(self, daemon: DaemonProcess, store: BlockStore) -> None:
        keys = chain("a", 10)
        put(store, keys)
        with ExitStack() as stack:
            assert get(another(daemon, stack), keys) == 10

    def test_blocks_outlive_who_wrote_them(self, daemon: DaemonProcess) -> None:
        keys = chain("a", 10)
        with ExitStack() as stack:
            put(another(daemon, stack), keys)
        with ExitStack() as stack:
            assert get(another(daemon, stack), keys) == 10


class TestRoom:
    """The daemon has 64 MiB in extents of 4 MiB."""

    def test_what_was_used_longest_ago_goes_first(self, store: BlockStore) -> None:
        chains = [chain(str(index), 1024) for index in range(8)]
        for keys in chains:
            put(store, keys)  # together all that there is
        assert store.find(chains[0]) == 1024
        put(store, chain("new", 100))
        assert [store.find(keys) for keys in chains] == [1024, 924, *[1024] * 6]

    def test_of_a_chain_its_end_goes_first(self, store: BlockStore) -> None:
        keys = chain("a", 8192)
        for end in range(1024, 8193, 1024):
            put(store, keys[:end])
        put(store, chain("new", 3000))
        assert get(store, keys) == 8192 - 3000

    def test_pinned_blocks_stay(self, store: BlockStore) -> None:
        old, new = chain("old", 4096), chain("new", 4096)
        put(store, old)
        put(store, new)
        with store.pin(old) as pinned:
            put(store, chain("a", 1000))
            assert [bytes(view) for view in pinned.views] == [content(key) for key in old]
            with pytest.raises(OutOfCapacity):
                store.reserve(chain("b", 5000))
        assert store.find(new) < 4096
        put(store, chain("b", 5000))
        assert store.find(old) < 4096

    def test_more_than_there_is_room_for_evicts_nothing(self, store: BlockStore) -> None:
        keys = chain("a", 1000)
        put(store, keys)
        with store.pin(keys), pytest.raises(OutOfCapacity):
            store.reserve(chain("b", 7500))
        assert store.find(keys) == 1000
        assert store.stats().refused == 1

    def test_blocks_of_another_size_make_room(self, daemon: DaemonProcess, store: BlockStore) -> None:
        for index in range(8):
            put(store, chain(str(index), 1024))
        with ExitStack() as stack:
            large = another(daemon, stack, block_bytes=2 * MIB)
            put(large, chain("large", 10))
            assert get(large, chain("large", 10)) == 10
        assert store.stats().stored == 8192 - 5 * 512


def test_a_lost_lease_holds_on_while_its_process_lives(daemon: DaemonProcess, store: BlockStore) -> None:
    keys = chain("a", 10)
    put(store, keys)
    with ExitStack() as stack:
        other = another(daemon, stack)
        other.pin(keys)
        other.reserve(chain("b", 5))
        space = daemon.stat().blocks[0]
        assert (space.pinned, space.writing) == (10, 5)
    while [lease.state for lease in daemon.stat().leases] != ["live", "quarantined"]:
        time.sleep(0.01)
    # Its process, this one, lives: nothing of it is used by anybody else.
    space = daemon.stat().blocks[0]
    assert (space.pinned, space.writing) == (10, 5)


def test_a_store_that_is_connected_again_has_let_go(daemon: DaemonProcess, store: BlockStore) -> None:
    keys = chain("a", 10)
    put(store, keys)
    pinned = store.pin(keys)
    reserved = store.reserve(chain("b", 5))
    before = store.extents()
    store.reconnect()
    space = store.stats()
    assert (space.stored, space.pinned, space.writing, space.abandoned) == (10, 0, 0, 5)
    assert get(store, keys) == 10
    assert store.extents() == before
    assert [lease.state for lease in daemon.stat().leases] == ["live"]
    with store.pin(keys):
        with pytest.raises(UnknownBlocks, match="connected again"):
            reserved.publish()
        pinned.release()
        reserved.abandon()
        assert store.stats().pinned == 10, "those are of the lease before"


def test_memory_is_mapped_before_it_is_wanted(daemon: DaemonProcess, store: BlockStore) -> None:
    """All that has blocks, and nothing twice."""
    put(store, chain("a", 1024))
    with ExitStack() as stack:
        other = another(daemon, stack)
        other.map_all()
        before = other.extents()
        assert len(before) == len(store.extents()) > 1
        other.wait_mapped()
        other.map_all()
        with other.pin(chain("a", 1024)) as pinned:
            assert sorted(pinned.extents, key=lambda extent: extent.number) == before
        with other.pin(chain("a", 1)) as pinned:
            assert len(pinned.extents) == 1
        assert other.extents() == before
        other.reconnect()
        other.map_all()
        assert other.extents() == before
    with ExitStack() as stack:
        empty = another(daemon, stack, name="without a block of its own")
        empty.map_all()
        assert len(empty.extents()) == len(before), "a process of the uid may have all of its extents"


def test_memory_of_another_daemon_is_mapped_elsewhere(run_dir: Path) -> None:
    """What was mapped before stays, for as long as somebody has it: it may be registered with a GPU."""
    with DaemonProcess(run_dir, drain_timeout_s="0") as first:
        first.wait_ready()
        store = BlockStore(run_dir, fingerprint=bytes(32), block_bytes=BLOCK)
        put(store, chain("a", 10))
        before = store.extents()
        assert first.stop() == 0
    with store, DaemonProcess(run_dir, drain_timeout_s="0") as second:
        second.wait_ready()
        with pytest.raises(DaemonUnavailable):
            store.find(chain("a", 10))
        store.reconnect()
        assert store.find(chain("a", 10)) == 0
        put(store, chain("b", 10))
        after = store.extents()
        assert before
        assert after
        for old in before:
            assert all(
                new.address + new.nbytes <= old.address or old.address + old.nbytes <= new.address for new in after
            )
        assert get(store, chain("b", 10)) == 10


def test_the_tables_show_blocks_and_who_uses_them(daemon: DaemonProcess, store: BlockStore) -> None:
    put(store, chain("a", 3))
    get(store, chain("a", 3))
    shown = Console(width=200, file=io.StringIO())
    print_tables(daemon.stat(), shown)
    text = shown.file.getvalue()  # type: ignore[attr-defined]
    space, lease = re.findall(r"^.*(?:8 KiB each|lease \d+, engine).*$", text, re.MULTILINE)
    assert re.findall(r"[\d,.]+", space.partition("each")[2]) == [
        "3",
        "0",
        "0",
        "0",
        "24",
        "0",
        "0",
        "3",
        "3",
        "0",
        "0",
    ]
    assert re.findall(r"[\d,.]+", lease.partition("engine")[2]) == ["0", "0", "0", "0", "3", "3"]
