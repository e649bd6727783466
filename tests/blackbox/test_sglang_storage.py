"""SGLang's storage backend with a real daemon and a stand-in for SGLang: what is loaded is right, or not loaded."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compute.block_store import BlockStore
from compute.integrations.sglang.pages import Pages
from tests.blackbox.daemon_process import DaemonProcess
from tests.engines.sglang_world import PAGES, Engines, Rank, engines, hashes
from tests.leaks import orphans_expected

WAIT_S = 60


@pytest.fixture(autouse=True)
def _memory_of_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def world(daemon: DaemonProcess, tmp_path: Path) -> Iterator[Engines]:
    with engines(daemon.run_dir, tmp_path / "model") as world:
        yield world


class Node:
    """Daemons in one run directory, one after the other."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._daemons: list[DaemonProcess] = []

    def start(self) -> DaemonProcess:
        self._daemons.append(DaemonProcess(self._run_dir, drain_timeout_s="0"))
        return self._daemons[-1].wait_ready()

    def kill(self) -> None:
        """As by the kernel: what it has in shared memory stays for the next one."""
        self._daemons[-1].process.kill()
        self._daemons[-1].process.wait()

    def close(self) -> None:
        if not self._daemons or self._daemons[-1].process.poll() is not None:
            self.start()  # it takes up what the last one has left, and gives it back
        assert self._daemons[-1].stat().ledger == "balanced"
        assert self._daemons[-1].stop() == 0
        for daemon in self._daemons:
            daemon.__exit__(None, None, None)


@pytest.fixture
def node(run_dir: Path) -> Iterator[Node]:
    with orphans_expected():
        node = Node(run_dir)
        yield node
        node.close()


@pytest.fixture
def killable(node: Node, run_dir: Path, tmp_path: Path) -> Iterator[Engines]:
    """Engines on a node that has no daemon yet."""
    with engines(run_dir, tmp_path / "model") as world:
        yield world


def until_found(rank: Rank, keys: list[str]) -> None:
    """Wait until kvd is used again."""
    deadline = time.monotonic() + WAIT_S
    while rank.found(keys) != len(keys):
        assert time.monotonic() < deadline
        time.sleep(0.02)


class TestPages:
    @pytest.mark.parametrize("is_mla", [False, True], ids=["mha", "mla"])
    @pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
    def test_they_come_back_byte_for_byte_in_another_engine(self, world: Engines, layout: str, is_mla: bool) -> None:
        keys = hashes(10)
        before, after = (world.rank(layout, is_mla_model=is_mla, pool={"width": 256}) for _ in range(2))
        assert before.found(keys) == 0
        assert before.put(keys, range(10)) == [True] * 10
        assert after.found(hashes(20)) == 10
        untouched = after.read([0, 1, 2, 3, 14, 15])
        assert after.get(keys[2:8], [9, 8, 7, 6, 5, 4]) == [True] * 6
        assert after.read([9, 8, 7, 6, 5, 4]) == before.read(range(2, 8))
        assert len(set(after.read([9, 8, 7, 6, 5, 4]))) == 6
        assert after.read([0, 1, 2, 3, 14, 15]) == untouched

    def test_what_is_stored_already_is_not_written_again(self, world: Engines, daemon: DaemonProcess) -> None:
        rank = world.rank()
        rank.put(hashes(4), range(4))
        assert rank.put(hashes(6), range(6)) == [True] * 6
        assert [space.published for space in daemon.stat().blocks] == [6]

    def test_only_those_are_reported_that_are_there(self, world: Engines) -> None:
        rank = world.rank()
        rank.put(hashes(5), range(5))
        before = rank.read(range(25, 28))
        assert rank.get(hashes(8), range(20, 28)) == [True] * 5 + [False] * 3
        assert rank.read(range(20, 25)) == rank.read(range(5))
        assert rank.read(range(25, 28)) == before

    def test_pages_behind_one_that_is_missing_are_neither_found_nor_loaded(self, world: Engines) -> None:
        rank = world.rank()
        keys = hashes(5)
        rank.put(keys[:2] + keys[3:], [0, 1, 3, 4])
        assert rank.found(keys) == 2
        assert rank.get(keys, range(20, 25)) == [True, True, False, False, False]

    def test_pages_of_several_batches(self, world: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
        rank = world.rank()
        monkeypatch.setattr(rank.storage._spaces["kv"], "_batch", 3)
        rank.put(hashes(10), range(10))
        assert rank.get(hashes(12), range(20, 32)) == [True] * 10 + [False] * 2
        assert rank.read(range(20, 30)) == rank.read(range(10))

    def test_indices_of_another_number_of_tokens_move_nothing(self, world: Engines) -> None:
        rank = world.rank()
        rank.put(hashes(2), range(2))
        before = rank.read(range(PAGES))
        assert rank.storage.batch_get_v1(hashes(2), rank.pool.indices([5, 6, 7])) == [False, False]
        assert rank.storage.batch_set_v1(hashes(2, "other"), rank.pool.indices([5])) == [False, False]
        assert rank.read(range(PAGES)) == before
        assert rank.found(hashes(1, "other")) == 0

    def test_what_comes_before_counts_as_used(self, world: Engines, daemon: DaemonProcess) -> None:
        from tests.engines.sglang_stand_in import HiCacheStorageExtraInfo

        rank = world.rank()
        rank.put(hashes(4), range(4))
        (space,) = daemon.stat().blocks
        rank.storage.batch_exists(hashes(6)[4:], HiCacheStorageExtraInfo(prefix_keys=hashes(4)))
        assert daemon.stat().blocks[0].found - space.found == 4

    def test_three_threads_at_once(self, world: Engines) -> None:
        rank, other = world.rank(), world.rank()
        texts = [hashes(8, f"text {number}") for number in range(12)]
        wrong: list[object] = []

        def store() -> None:
            for number, keys in enumerate(texts):
                rank.put(keys, range(8), 100 * number)

        def load() -> None:
            for number, keys in enumerate(texts):
                good = sum(other.get(keys, range(8, 16)))
                for page in range(good):
                    other.pool.fill(20, 100 * number + page)
                    if other.pool.read(8 + page) != other.pool.read(20):
                        wrong.append((number, page))

        def find() -> None:
            wrong.extend(keys for keys in texts if not 0 <= rank.found(keys) <= 8)

        threads = [threading.Thread(target=target) for target in (store, load, find, find)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert wrong == []
        load()
        assert wrong == []
        assert other.found(texts[-1]) == 8


class TestOutages:
    def test_without_a_daemon_all_is_missed_and_said_once(
        self, killable: Engines, node: Node, caplog: pytest.LogCaptureFixture
    ) -> None:
        rank = killable.rank()
        with caplog.at_level(logging.INFO, "sglang.kvd"):
            for _ in range(3):
                assert rank.found(hashes(3)) == 0
                assert rank.put(hashes(3), range(3)) == [False] * 3
                assert rank.get(hashes(3), range(20, 23)) == [False] * 3
            assert [record.levelname for record in caplog.records] == ["WARNING"]
            node.start()
            deadline = time.monotonic() + WAIT_S
            while not all(rank.put(hashes(3), range(3))):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            assert rank.found(hashes(3)) == 3
        assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]

    def test_a_daemon_that_was_killed_is_missed_once_and_found_again(
        self, killable: Engines, node: Node, caplog: pytest.LogCaptureFixture
    ) -> None:
        node.start()
        rank = killable.rank()
        keys = hashes(4)
        rank.put(keys, range(4))
        assert rank.get(keys, range(10, 14)) == [True] * 4
        node.kill()
        with caplog.at_level(logging.INFO, "sglang.kvd"):
            assert rank.found(keys) == 0
            assert rank.put(hashes(2, "more"), range(2)) == [False] * 2
            assert rank.get(keys, range(20, 24)) == [False] * 4
            assert [record.levelname for record in caplog.records] == ["WARNING"]
            node.start()
            until_found(rank, keys)
            rank.pool.fill(20, 1000)
            assert rank.get(keys, range(20, 24)) == [True] * 4
            assert rank.read(range(20, 24)) == rank.read(range(10, 14))
            assert rank.put(hashes(2, "more"), range(2)) == [True] * 2
        assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]

    def test_a_daemon_that_was_restarted_between_two_calls_is_used_at_once(self, killable: Engines, node: Node) -> None:
        node.start()
        rank = killable.rank(extra={"retry_s": 600.0, "longest_retry_s": 600.0})
        keys = hashes(4)
        rank.put(keys, range(4))
        rank.get(keys, range(10, 14))
        assert rank.found(keys) == 4
        node.kill()
        node.start()
        assert rank.found(keys) == 4
        assert rank.get(keys, range(20, 24)) == [True] * 4
        assert rank.read(range(20, 24)) == rank.read(range(4))
        assert rank.put(hashes(2, "more"), range(2)) == [True] * 2

    @pytest.mark.parametrize("page", [0, 2])
    def test_a_daemon_killed_while_pages_are_loaded(
        self, killable: Engines, node: Node, monkeypatch: pytest.MonkeyPatch, page: int
    ) -> None:
        """What is pinned outlives it: the batch that is being copied is right, the next if it was pinned already."""
        node.start()
        rank = killable.rank()
        keys = hashes(9)
        rank.put(keys, range(9))
        monkeypatch.setattr(rank.storage._spaces["kv"], "_batch", 3)
        load, loaded = Pages.load, list[object]()

        def kill_first(self: Pages, *given: Any) -> None:
            if len(loaded) == page:
                node.kill()
            loaded.append(given)
            load(self, *given)

        monkeypatch.setattr(Pages, "load", kill_first)
        held = rank.get(keys, range(20, 29))
        count = held.count(True)
        assert count in (3, 6)
        assert held == [True] * count + [False] * (9 - count)
        assert rank.read(range(20, 20 + count)) == rank.read(range(count))

    def test_a_daemon_killed_while_pages_are_stored_has_none_of_them(
        self, killable: Engines, node: Node, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        node.start()
        rank = killable.rank()
        keys = hashes(4)
        rank.put(hashes(1, "first"), [0])
        store, stored = Pages.store, list[object]()

        def kill_first(self: Pages, *given: Any) -> None:
            if not stored:
                node.kill()
            stored.append(given)
            store(self, *given)

        monkeypatch.setattr(Pages, "store", kill_first)
        assert rank.put(keys, range(4)) == [False] * 4
        node.start()
        until_found(rank, hashes(1, "first"))
        assert rank.found(keys) == 0
        assert rank.put(keys, range(4)) == [True] * 4

    def test_a_stopped_daemon_is_waited_for_once(
        self, world: Engines, daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rank = world.rank(extra={"timeout_s": 2.0, "retry_s": 600.0, "longest_retry_s": 600.0})
        keys = hashes(3)
        assert rank.put(keys, range(3)) == [True] * 3
        assert rank.found(keys) == 3
        assert rank.get(keys, range(20, 23)) == [True] * 3
        asked = []
        for name in ("find", "pin_each", "reserve_each"):
            original = getattr(BlockStore, name)

            def count(store: BlockStore, *given: Any, original: Any = original, **options: Any) -> Any:
                asked.append(original.__name__)
                return original(store, *given, **options)

            monkeypatch.setattr(BlockStore, name, count)
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            begin = time.monotonic()
            assert rank.put(hashes(3, "more"), range(3)) == [False] * 3
            assert rank.found(keys) == 0
            assert rank.get(keys, range(20, 23)) == [False] * 3
            assert time.monotonic() - begin < WAIT_S  # and not for as long as it is stopped
            assert asked == ["find", "reserve_each"]  # the pages before, of which there are none, and then no more
        finally:
            daemon.process.send_signal(signal.SIGCONT)

    def test_a_daemon_that_goes_on_is_used_again(self, world: Engines, daemon: DaemonProcess) -> None:
        rank = world.rank(extra={"timeout_s": 2.0})
        keys = hashes(3)
        assert rank.put(keys, range(3)) == [True] * 3
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            assert rank.get(keys, range(20, 23)) == [False] * 3
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        until_found(rank, keys)
        assert rank.get(keys, range(20, 23)) == [True] * 3
        assert rank.read(range(20, 23)) == rank.read(range(3))

    def test_a_full_store_takes_no_more_until_there_is_room(self, run_dir: Path, tmp_path: Path) -> None:
        with DaemonProcess(run_dir, host_capacity="4MiB", drain_timeout_s="0") as daemon:
            daemon.wait_ready()
            with engines(run_dir, tmp_path / "model") as world:
                rank = world.rank(pool={"width": 4096})  # a page has 384 KiB
                texts = [hashes(4, f"text {number}") for number in range(5)]
                for number, keys in enumerate(texts):
                    assert rank.put(keys, range(4), 100 * number) == [True] * 4  # what was used longest ago goes
                assert rank.found(texts[0]) < 4
                assert rank.get(texts[-1], range(20, 24)) == [True] * 4
                assert rank.read(range(20, 24)) == rank.read(range(4))
                (space,) = daemon.stat().blocks
                fingerprint = bytes.fromhex(space.fingerprint)
                with BlockStore(run_dir, fingerprint=fingerprint, block_bytes=space.block_bytes, timeout_s=20) as user:
                    pins = [user.pin([bytes.fromhex(key) for key in keys]) for keys in texts]
                    assert rank.put(hashes(10, "more"), range(10)) == [False] * 10
                    assert rank.get(texts[-1], range(20, 24)) == [True] * 4
                    for pin in pins:
                        pin.release()
                assert rank.put(hashes(4, "more"), range(4)) == [True] * 4
            assert daemon.stat().ledger == "balanced"
