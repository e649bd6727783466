"""Parts of chains that are written and read in turn: the daemon is at the next one meanwhile, and nothing is left."""

from __future__ import annotations

import hashlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from compute.block_store import BlockStore, Reservation
from protocol.errors import DaemonUnavailable, OutOfCapacity, UnknownBlocks
from tests.blackbox.daemon_process import DaemonProcess

BLOCK = 8192
FINGERPRINT = bytes(32)


def parts(name: str, count: int, each: int) -> list[list[bytes]]:
    return [
        [hashlib.sha256(f"{name} {part} {index}".encode()).digest() for index in range(each)] for part in range(count)
    ]


def content(key: bytes) -> bytes:
    return hashlib.shake_256(key).digest(BLOCK)


def opened(daemon: DaemonProcess) -> BlockStore:
    return BlockStore(daemon.run_dir, fingerprint=FINGERPRINT, block_bytes=BLOCK, timeout_s=20)


def put(store: BlockStore, chain: list[list[bytes]]) -> None:
    for reservation in store.reserve_each(chain):
        for key, view in zip(reservation.keys, reservation.views, strict=True):
            view[:] = content(key)
        reservation.publish()


@pytest.fixture
def store(daemon: DaemonProcess) -> Iterator[BlockStore]:
    with opened(daemon) as store:
        yield store


def in_use(daemon: DaemonProcess) -> tuple[int, int]:
    """Blocks that are pinned, and that are being written."""
    space = daemon.stat().blocks[0]
    return space.pinned, space.writing


def test_all_parts_are_stored_and_come_back(daemon: DaemonProcess, store: BlockStore) -> None:
    chain = parts("a", 5, 20)
    put(store, chain)
    with opened(daemon) as other:
        assert other.find([key for keys in chain for key in keys]) == 100
        found = [[bytes(view) for view in pinned.views] for pinned in other.pin_each(chain)]
        assert found == [[content(key) for key in keys] for keys in chain]
        assert other.stats().pinned == 0


def test_the_next_part_is_asked_for_while_one_is_the_callers(daemon: DaemonProcess, store: BlockStore) -> None:
    chain = parts("a", 3, 20)
    seen = []
    for reservation in store.reserve_each(chain):
        store.find(chain[0])  # requests are served in order: what was asked for before is done
        seen.append(in_use(daemon)[1])
        reservation.publish()
    assert seen == [40, 40, 20]
    seen.clear()
    for _ in store.pin_each(chain):
        store.find(chain[0])
        seen.append(in_use(daemon)[0])
    assert seen == [40, 40, 20]


def test_publishing_does_not_wait_and_the_end_of_the_loop_does(daemon: DaemonProcess, store: BlockStore) -> None:
    chain = parts("a", 2, 20)
    reservations = []
    for reservation in store.reserve_each(chain):
        reservations.append(reservation)
        daemon.process.send_signal(signal.SIGSTOP)
        begin = time.monotonic()
        reservation.publish()
        assert time.monotonic() - begin < 10
        assert not reservation.is_stored
        daemon.process.send_signal(signal.SIGCONT)
    assert all(reservation.is_stored for reservation in reservations)
    with opened(daemon) as other:
        assert other.find([key for keys in chain for key in keys]) == 40


def test_parts_go_in_turn_where_there_is_room_for_one_only(daemon: DaemonProcess, store: BlockStore) -> None:
    """The daemon has 64 MiB."""
    chain = parts("a", 3, 5000)
    put(store, chain)
    assert store.find(chain[2]) == 5000
    assert (store.stats().stored, store.stats().refused) == (8192, 2)
    with pytest.raises(OutOfCapacity):
        put(store, parts("b", 1, 8193))
    assert in_use(daemon) == (0, 0)


def test_what_was_published_before_a_refusal_is_stored(daemon: DaemonProcess, store: BlockStore) -> None:
    chain = [*parts("a", 2, 20), *parts("b", 1, 8193)]
    reservations: list[Reservation] = []

    def write() -> None:
        for reservation in store.reserve_each(chain):
            reservations.append(reservation)
            reservation.publish()

    with pytest.raises(OutOfCapacity):
        write()
    assert [reservation.is_stored for reservation in reservations] == [True, True]


def test_a_chain_ends_with_the_part_that_is_not_whole(daemon: DaemonProcess, store: BlockStore) -> None:
    chain = parts("a", 4, 20)
    put(store, [chain[0], chain[1][:5], chain[2]])
    found = [(pinned.count, pinned.is_whole) for pinned in store.pin_each(chain)]
    assert found == [(20, True), (5, False)]
    assert in_use(daemon) == (0, 0)


def test_a_part_that_was_not_whole_is_asked_for_again(daemon: DaemonProcess, store: BlockStore) -> None:
    chain = parts("a", 2, 20)
    put(store, chain[:1])
    found = []
    with opened(daemon) as other:
        for pinned in store.pin_each(chain):
            store.find(chain[0])  # so that the second part has been asked for
            put(other, chain[1:])
            found.append(pinned.count)
    assert found == [20, 20]
    assert in_use(daemon) == (0, 0)


@pytest.mark.parametrize("ends", ["break", "raise"])
def test_a_loop_that_is_left_leaves_nothing(daemon: DaemonProcess, store: BlockStore, ends: str) -> None:
    chain = parts("a", 3, 20)

    def leave() -> None:
        for _ in store.reserve_each(chain):
            if ends == "break":
                break
            raise KeyError

    if ends == "raise":
        with pytest.raises(KeyError):
            leave()
    else:
        leave()
    assert store.stats().writing == 0
    put(store, chain)
    for _ in store.pin_each(chain):
        break
    assert store.stats().pinned == 0


def test_what_is_not_published_is_given_up(daemon: DaemonProcess, store: BlockStore) -> None:
    chain = parts("a", 2, 20)
    for reservation in store.reserve_each(chain):
        reservation.publish(reservation.keys[:7])
        assert store.find(reservation.keys) == 7, "a publication of some keys is waited for"
    assert store.stats().abandoned == 26
    assert in_use(daemon) == (0, 0)


def test_a_daemon_that_dies_has_not_said_that_it_is_stored(run_dir: Path) -> None:
    reservations: list[Reservation] = []

    def write() -> None:
        for reservation in store.reserve_each(parts("a", 4, 20)):
            reservations.append(reservation)
            if len(reservations) == 3:
                daemon.process.kill()
                daemon.process.wait()
            reservation.publish()

    with DaemonProcess(run_dir, drain_timeout_s="0") as daemon:
        daemon.wait_ready()
        with opened(daemon) as store:
            with pytest.raises(DaemonUnavailable):
                write()
            assert store.is_lost
    assert [reservation.is_stored for reservation in reservations[::2]] == [True, False]
    with DaemonProcess(run_dir, drain_timeout_s="0") as second:  # which takes up what the first has left
        second.wait_ready()


def test_a_store_that_is_connected_again_meanwhile_goes_on(daemon: DaemonProcess, store: BlockStore) -> None:
    chain = parts("a", 3, 20)
    turns = 0
    for reservation in store.reserve_each(chain):
        turns += 1
        if turns == 1:
            store.reconnect()
            with pytest.raises(UnknownBlocks, match="connected again"):
                reservation.publish()
            continue
        reservation.publish()
    assert [store.find(keys) for keys in chain] == [0, 20, 20]

    def write() -> None:
        for reservation in store.reserve_each(parts("b", 3, 20)):
            reservation.publish()
            store.reconnect()  # whether it is stored nobody has said

    with pytest.raises(UnknownBlocks, match="connected again"):
        write()
    assert not store.is_lost
    assert in_use(daemon) == (0, 0)
