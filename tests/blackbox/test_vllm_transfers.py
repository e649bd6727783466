"""The connector's worker side with a real daemon: this process's memory stands in for the engine's cache."""

from __future__ import annotations

import ctypes
import hashlib
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from compute.block_store import BlockStore, MappedExtent
from compute.integrations.vllm.copies import CpuCopies, CudaCopies
from compute.integrations.vllm.lookups import Lookups
from compute.integrations.vllm.plan import Load, Save, Space
from compute.integrations.vllm.regions import Region
from compute.integrations.vllm.settings import Settings
from compute.integrations.vllm.transfers import Results, Transfers
from tests.blackbox.daemon_process import DaemonProcess

BLOCK = 24_576
LAYERS = 3
BLOCKS = 64
FINGERPRINT = b"f" * 32


class _Cache:
    """An engine's cache of three layers, in which every block of every layer is different."""

    def __init__(self) -> None:
        self._layers = [ctypes.create_string_buffer(BLOCKS * BLOCK // LAYERS) for _ in range(LAYERS)]
        piece = BLOCK // LAYERS
        self.regions = [Region(ctypes.addressof(layer), piece, piece) for layer in self._layers]

    def fill(self, block: int, seed: int) -> None:
        for number, layer in enumerate(self._layers):
            piece = BLOCK // LAYERS
            content = hashlib.shake_128(f"{seed} {number}".encode()).digest(piece)
            ctypes.memmove(ctypes.addressof(layer) + block * piece, content, piece)

    def read(self, block: int) -> bytes:
        piece = BLOCK // LAYERS
        return b"".join(layer.raw[block * piece : (block + 1) * piece] for layer in self._layers)


def _keys(count: int, first: int = 0) -> list[bytes]:
    return [hashlib.sha256(f"block {index}".encode()).digest() for index in range(first, first + count)]


def _settings(run_dir: Path, **settings: float) -> Settings:
    return Settings.of({"run_dir": str(run_dir), "retry_s": 0.1, "longest_retry_s": 0.2, **settings})


@contextmanager
def _transfers(
    cache: _Cache, settings: Settings, copies: type[CpuCopies] = CpuCopies, **options: bool
) -> Iterator[Transfers]:
    def open_store() -> BlockStore:
        timeout_s = settings.transfer_timeout_s
        return BlockStore(settings.run_dir, fingerprint=FINGERPRINT, block_bytes=BLOCK, timeout_s=timeout_s)

    transfers = Transfers(open_store, copies(cache.regions), BLOCK, settings, **options)
    try:
        yield transfers
    finally:
        transfers.close()


def _until_done(transfers: Transfers, saves: Sequence[int] = (), loads: Sequence[str] = ()) -> Results:
    """What comes until all of these have ended."""
    all_of_it = Results()
    deadline = time.monotonic() + 60
    while not (set(saves) <= set(all_of_it.saves) and set(loads) <= all_of_it.loads):
        assert time.monotonic() < deadline
        new = transfers.take_results(0.05)
        all_of_it.saves += new.saves
        all_of_it.loads |= new.loads
        all_of_it.failed_blocks |= new.failed_blocks
        for name, by in new.counts.items():
            all_of_it.counts[name] = all_of_it.counts.get(name, 0) + by
    return all_of_it


def _save(transfers: Transfers, cache: _Cache, number: int, blocks: list[int], keys: list[bytes]) -> Results:
    for block in blocks:
        cache.fill(block, block)
    transfers.save(Save(number, blocks, keys))
    return _until_done(transfers, saves=[number])


def test_blocks_come_back_byte_for_byte_in_another_engine(daemon: DaemonProcess) -> None:
    cache, other = _Cache(), _Cache()
    with _transfers(cache, _settings(daemon.run_dir)) as transfers:
        results = _save(transfers, cache, 1, list(range(10)), _keys(10))
        assert results.counts == {"saved_blocks": 10, "saved_bytes": 10 * BLOCK}
        assert "saved_blocks" not in _save(transfers, cache, 2, list(range(10)), _keys(10)).counts
    with _transfers(other, _settings(daemon.run_dir)) as transfers:
        transfers.load(Load("r", [20, 22, 21, 30], _keys(4, first=3)))
        results = _until_done(transfers, loads=["r"])
        assert not results.failed_blocks
        assert results.counts["loaded_bytes"] == 4 * BLOCK
    for block, source in zip([20, 22, 21, 30], range(3, 7), strict=True):
        assert other.read(block) == cache.read(source)


def test_what_is_not_stored_any_more_is_reported_block_by_block(daemon: DaemonProcess) -> None:
    cache = _Cache()
    with _transfers(cache, _settings(daemon.run_dir)) as transfers:
        _save(transfers, cache, 1, [0, 1], _keys(2))
        transfers.load(Load("r", [10, 11, 12, 13], _keys(4)))
        assert _until_done(transfers, loads=["r"]).failed_blocks == {12, 13}
    assert cache.read(11) == cache.read(1)


def test_only_one_of_several_workers_with_the_same_cache_writes(daemon: DaemonProcess) -> None:
    cache = _Cache()
    with _transfers(cache, _settings(daemon.run_dir), writes=False) as transfers:
        assert _save(transfers, cache, 1, [0], _keys(1)).counts == {}
    with BlockStore(daemon.run_dir, fingerprint=FINGERPRINT, block_bytes=BLOCK) as store:
        assert store.find(_keys(1)) == 0


def test_without_a_daemon_everything_ends_at_once_and_later_works(run_dir: Path) -> None:
    cache = _Cache()
    with _transfers(cache, _settings(run_dir)) as transfers:
        transfers.load(Load("r", [1, 2], _keys(2)))
        assert _until_done(transfers, loads=["r"]).failed_blocks == {1, 2}
        assert _save(transfers, cache, 1, [1, 2], _keys(2)).counts == {"dropped_save_blocks": 2}
        with DaemonProcess(run_dir, drain_timeout_s="0") as daemon:
            daemon.wait_ready()
            numbers = iter(range(2, 200))
            while "saved_blocks" not in _save(transfers, cache, next(numbers), [1, 2], _keys(2)).counts:
                time.sleep(0.1)  # it is left alone for a while


def test_a_stopped_daemon_costs_one_time_out_and_is_used_again(daemon: DaemonProcess) -> None:
    cache = _Cache()
    with _transfers(cache, _settings(daemon.run_dir, transfer_timeout_s=0.3)) as transfers:
        _save(transfers, cache, 1, [0, 1], _keys(2))
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            begin = time.monotonic()
            transfers.load(Load("r", [10, 11], _keys(2)))
            assert _until_done(transfers, loads=["r"]).failed_blocks == {10, 11}
            assert time.monotonic() - begin < 25  # and not for as long as it is stopped
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + 30
        while True:
            transfers.load(Load("s", [10, 11], _keys(2)))
            if not _until_done(transfers, loads=["s"]).failed_blocks:
                break
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert cache.read(10) == cache.read(0)


def test_what_a_stopped_daemon_did_not_store_is_logged_and_counted(
    daemon: DaemonProcess, caplog: pytest.LogCaptureFixture
) -> None:
    cache = _Cache()
    with _transfers(cache, _settings(daemon.run_dir, transfer_timeout_s=0.3)) as transfers:
        _save(transfers, cache, 1, [0, 1], _keys(2))
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            counts = _save(transfers, cache, 2, [2, 3, 4], _keys(3, first=2)).counts
        finally:
            daemon.process.send_signal(signal.SIGCONT)
    assert counts["dropped_save_blocks"] == 3
    assert counts.get("saved_blocks", 0) == 0
    assert "not saved: 3 blocks, no answer from" in caplog.text


def test_a_load_whose_turn_does_not_come_is_given_up(daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = _Cache()
    settings = _settings(daemon.run_dir, load_timeout_s=0.2)
    begun, going_on = threading.Event(), threading.Event()
    with _transfers(cache, settings) as transfers:
        _save(transfers, cache, 1, [0, 1], _keys(2))
        save = transfers._copies.save

        def slow(*given: Any) -> None:
            begun.set()
            assert going_on.wait(60)
            save(*given)

        monkeypatch.setattr(transfers._copies, "save", slow)
        transfers.save(Save(2, [5], _keys(1, first=20)))
        assert begun.wait(60)
        transfers.load(Load("r", [10], _keys(1)))
        assert _until_done(transfers, loads=["r"]).failed_blocks == {10}
        going_on.set()
        assert _until_done(transfers, saves=[2]).counts["saved_blocks"] == 1


def test_memory_is_got_ready_before_anything_is_loaded(daemon: DaemonProcess) -> None:
    """An extent at a time, when there is nothing else to do."""
    cache = _Cache()
    with _transfers(cache, _settings(daemon.run_dir)) as transfers:
        for number in range(4):
            _save(transfers, cache, number, list(range(60)), _keys(60, first=60 * number))
    ready, all_of_it = set(), threading.Event()
    with BlockStore(daemon.run_dir, fingerprint=FINGERPRINT, block_bytes=BLOCK) as store:
        store.map_all()
        wanted = {extent.number for extent in store.extents()}
    assert len(wanted) > 1

    class Noting(CpuCopies):
        def adopt(self, known: Sequence[MappedExtent], needed: Sequence[MappedExtent]) -> None:
            assert len(needed) == 1
            assert needed[0] in known
            ready.add(needed[0].number)
            if ready == wanted:
                all_of_it.set()

    with _transfers(cache, _settings(daemon.run_dir), Noting):
        assert all_of_it.wait(60)


def test_what_a_gpu_has_registered_is_what_was_needed_and_is_still_known(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, int]] = []
    monkeypatch.setattr(CudaCopies, "_register", lambda _, nbytes, address: events.append(("register", address)))
    monkeypatch.setattr(CudaCopies, "_unregister", lambda _, nbytes, address: events.append(("unregister", address)))
    copies = object.__new__(CudaCopies)
    copies._registered = {}
    one, two, three = (MappedExtent(number, 4096 * number, 4096, object()) for number in (1, 2, 3))
    copies.adopt([one, two], [one])
    copies.adopt([one, two], [one, two])
    copies.adopt([two, three], [three])
    assert events == [("register", 4096), ("register", 8192), ("unregister", 4096), ("register", 12288)]


def test_a_copy_that_fails_is_a_block_that_is_computed(daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = _Cache()
    with _transfers(cache, _settings(daemon.run_dir)) as transfers:
        _save(transfers, cache, 1, [0, 1], _keys(2))

        def fail(*_: object) -> None:
            raise RuntimeError("no such memory")

        monkeypatch.setattr(transfers._copies, "load", fail)
        transfers.load(Load("r", [10, 11], _keys(2)))
        assert _until_done(transfers, loads=["r"]).failed_blocks == {10, 11}


def test_a_full_store_makes_room_and_never_waits(run_dir: Path) -> None:
    cache = _Cache()
    with DaemonProcess(run_dir, host_capacity="4MiB", drain_timeout_s="0") as daemon:
        daemon.wait_ready()
        with _transfers(cache, _settings(daemon.run_dir)) as transfers:
            for turn in range(6):
                results = _save(transfers, cache, turn, list(range(60)), _keys(60, first=60 * turn))
                assert results.counts["saved_blocks"] + results.counts.get("dropped_save_blocks", 0) == 60
            transfers.load(Load("r", [0], _keys(1, first=300)))
            assert not _until_done(transfers, loads=["r"]).failed_blocks
        assert daemon.stat().ledger == "balanced"


def test_lookups_need_all_workers_and_leave_a_daemon_alone_that_does_not_answer(daemon: DaemonProcess) -> None:
    spaces = [Space(b"m" * 32, FINGERPRINT, BLOCK), Space(b"m" * 32, b"g" * 32, BLOCK)]
    counts: dict[str, float] = {}
    times: list[float] = []

    def count(name: str, by: float) -> None:
        counts[name] = counts.get(name, 0) + by

    cache = _Cache()
    settings = _settings(daemon.run_dir, lookup_timeout_s=3, retry_s=5, longest_retry_s=5)
    with _transfers(cache, settings) as transfers:
        _save(transfers, cache, 1, [0, 1], _keys(2))
    both = Lookups(spaces, settings, count, lambda _, seconds: times.append(seconds))
    one = Lookups([spaces[0], spaces[0]], settings, count, lambda _, seconds: times.append(seconds))
    try:
        assert one.find(_keys(3)) == 2
        assert both.find(_keys(3)) == 0
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            times.clear()
            assert one.find(_keys(3)) is None
            assert one.find(_keys(3)) is None  # was not asked
            assert counts["failed_lookups"] == 2
            assert len(times) == 1
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + 30
        while one.find(_keys(3)) != 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        both.close()
        one.close()


def test_a_daemon_that_was_killed_and_started_again_is_used_at_once(run_dir: Path) -> None:
    cache = _Cache()
    settings = _settings(run_dir, lookup_timeout_s=10, retry_s=60, longest_retry_s=60)
    space = Space(b"m" * 32, FINGERPRINT, BLOCK)
    lookups = Lookups([space], settings, lambda _, by: None, lambda _, seconds: None)
    daemon = DaemonProcess(run_dir, drain_timeout_s="0")
    try:
        daemon.wait_ready()
        with _transfers(cache, settings) as transfers:
            _save(transfers, cache, 1, [0, 1], _keys(2))
            assert lookups.find(_keys(2)) == 2
            daemon.process.kill()
            daemon.process.wait()
            daemon = DaemonProcess(run_dir, drain_timeout_s="0").wait_ready()
            assert lookups.find(_keys(2)) == 2
            transfers.load(Load("r", [10, 11], _keys(2)))
            assert not _until_done(transfers, loads=["r"]).failed_blocks
        assert cache.read(10) == cache.read(0)
    finally:
        lookups.close()
        daemon.__exit__(None, None, None)
