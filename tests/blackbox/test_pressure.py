"""A host tier that is short: idle sessions go to disk and come back whole, what cannot fit is refused by name."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from compute.client import Client
from kvd.control import Control
from protocol.daemon_block import read_daemon_block
from protocol.errors import Draining, OsFailure, OutOfCapacity, SavedRefused, SessionExists
from protocol.messages import Done, EndSession, SessionOpened
from protocol.session_state import WorkerBlock, WorkerBlockLayout, unpack_frame
from tests.blackbox.daemon_process import DaemonProcess
from tests.blackbox.test_saving import kvd
from tests.saved_files import Parts

PRINT = bytes(32)
STRIDE = 1 << 20
PAGES = 16
"""Of each session: five of them are more than the host tier has."""


@pytest.fixture
def daemon(run_dir: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(run_dir, drain_timeout_s="0", disk_state_dir=str(run_dir / "state")) as process:
        yield process.wait_ready()
        if process.process.poll() is None:
            assert process.stat().ledger == "balanced"
            assert process.stop() == 0
        assert '"exception"' not in process.log


class Writer(Client):
    """A client that keeps the descriptors of extents, to write pages by."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self._extents: dict[int, int] = {}

    def close(self) -> None:
        for fd in self._extents.values():
            os.close(fd)
        self._extents.clear()
        super().close()

    def store(self, name: str, pages: int = PAGES) -> None:
        """A stored session whose pages say whose they are."""
        opened = self.create_session(
            name, fingerprint=PRINT, encoding="q8g64", page_bytes=STRIDE, token_capacity=64 * 64, commit_bytes=8
        )
        changed = self.extend_session(opened.session, opened.generation, pages)
        self._extents |= {extent.number: self.claim(extent.memory) for extent in [*opened.extents, *changed.extents]}
        self._fill(opened, name, pages)
        self.detach_session(opened.session, opened.generation)

    def _fill(self, opened: SessionOpened, name: str, pages: int) -> None:
        daemon_fd, worker_fd = self.claim(opened.daemon_block), self.claim(opened.worker_block)
        header, frames = read_daemon_block(os.pread(daemon_fd, opened.daemon_block.nbytes, 0))
        for page, (extent, index) in enumerate(map(unpack_frame, frames)):
            os.pwrite(self._extents[extent], f"{name} {page}".encode().ljust(64), index * header.page_stride)
        with mmap.mmap(worker_fd, opened.worker_block.nbytes) as mapped:
            block = WorkerBlock(memoryview(mapped), WorkerBlockLayout(64 * 64, 8), opened.session)
            block.append_tokens(list(range(64 * pages)), b"sampler")
            block.publish_commit(opened.generation, 64 * pages, name.encode()[:8])
            block.release()
        os.close(daemon_fd)
        os.close(worker_fd)


def content(run_dir: Path, name: str) -> list[str]:
    """Whose bytes the pages of a saved session have."""
    data = (run_dir / "state" / f"{os.getuid()}-{name}.kvd").read_bytes()
    parts = Parts(data)
    starts = range(parts.pages_at, parts.sums_at, parts.stride)
    return [data[start : start + 64].rstrip().decode() for start in starts]


def names(daemon: DaemonProcess) -> list[str]:
    return sorted(session.name for session in daemon.stat().sessions)


def test_idle_sessions_make_room_and_come_back_when_they_are_opened(daemon: DaemonProcess) -> None:
    with Writer(daemon.run_dir) as client:
        for name in "abcdef":
            client.store(name, 12)
        assert names(daemon) == list("bcdef"), "the one that was idle longest went to disk"
        with pytest.raises(SessionExists, match="on disk"):
            client.store("a", 1)
        assert "(spilled)" in kvd(daemon, "ls").stdout
        for name in "abcdefa":
            opened = client.open_session(name, fingerprint=PRINT, encoding="q8g64")
            assert opened.page_count == 12
            client.detach_session(opened.session, opened.generation)
            client.save_session(name)
            assert content(daemon.run_dir, name) == [f"{name} {page}" for page in range(12)]
    spilled = [path.name for path in (daemon.run_dir / "state").glob("*.spilled")]
    assert len(spilled) + len(names(daemon)) == 6


def test_what_cannot_fit_is_refused_and_spills_nothing(daemon: DaemonProcess) -> None:
    with Writer(daemon.run_dir) as client:
        client.store("idle", 10)
        opened = client.create_session(
            "large", fingerprint=PRINT, encoding="q8g64", page_bytes=STRIDE, token_capacity=64 * 100
        )
        with pytest.raises(OutOfCapacity) as refused:
            client.extend_session(opened.session, opened.generation, 65)
        assert refused.value.facts["tier"] == "host"
        assert refused.value.facts["asked"] == 65 * STRIDE
        assert refused.value.facts["holders"]
        assert names(daemon) == ["idle", "large"]
        client.extend_session(opened.session, opened.generation, 60)
        assert names(daemon) == ["large"]
        with pytest.raises(OutOfCapacity):
            client.open_session("idle", fingerprint=PRINT, encoding="q8g64")
        client.truncate_session(opened.session, opened.generation, 0)
        client.open_session("idle", fingerprint=PRINT, encoding="q8g64")


def test_a_spilled_file_that_is_damaged_is_refused(daemon: DaemonProcess) -> None:
    with Writer(daemon.run_dir) as client:
        for name in "abcde":
            client.store(name)
        [path] = (daemon.run_dir / "state").glob("*.spilled")
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        for _ in range(2):
            with pytest.raises(SavedRefused):
                client.open_session("a", fingerprint=PRINT, encoding="q8g64")


def test_drain_and_save_then_start_and_go_on(run_dir: Path) -> None:
    """Held, stored and spilled sessions: all are there for the next daemon."""
    settings = {"drain_timeout_s": "0.2", "disk_state_dir": str(run_dir / "state")}
    with DaemonProcess(run_dir, **settings) as process:
        process.wait_ready()
        with Writer(run_dir) as client:
            for name in "abcde":
                client.store(name)
            held = client.open_session("e", fingerprint=PRINT, encoding="q8g64")
            assert held.page_count == PAGES
            drained = kvd(process, "drain", "--save")
            assert drained.returncode == 0, drained.stderr
        assert process.wait() == 0
        assert '"exception"' not in process.log
    with DaemonProcess(run_dir, **settings) as process:
        process.wait_ready()
        with Writer(run_dir) as client:
            for name in "abcde":
                opened = client.open_session(name, fingerprint=PRINT, encoding="q8g64")
                client.detach_session(opened.session, opened.generation)
                client.save_session(name)
                assert content(run_dir, name) == [f"{name} {page}" for page in range(PAGES)]
        assert process.stop() == 0


def test_a_drain_that_cannot_save_a_session_names_it_and_loses_nothing(run_dir: Path) -> None:
    """Each time another one does not fit the disk; the command says so, and the daemon goes on until there is room."""
    settings = {"drain_timeout_s": "0.2", "disk_state_dir": str(run_dir / "state"), "disk_capacity": "18MiB"}
    with DaemonProcess(run_dir, **settings) as process:
        process.wait_ready()
        with Writer(run_dir) as client:
            client.store("small", 4)
            client.store("large", 16)
            before = [session.name for session in process.stat().sessions]
            refused = kvd(process, "drain", "--save")
            assert refused.returncode == OsFailure.exit_status
            assert "goes on, and nothing is lost: 1 sessions could not be saved: large" in refused.stderr
            stats = process.stat()
            assert (stats.draining, [session.name for session in stats.sessions]) == (True, before)
            assert stats.drain_failure == "1 sessions could not be saved: large"
            assert stats.ledger == "balanced"
            assert not list((run_dir / "state").iterdir()), "what is in memory goes on: no copy of it is left"
            assert "out_of_capacity" in process.log, "the log says why"
            with pytest.raises(Draining):
                client.open_session("large", fingerprint=PRINT, encoding="q8g64")
        with Control(run_dir, "test") as control:
            control.ask(partial(EndSession, uid=os.getuid(), name="small"), Done)
        again = kvd(process, "drain", "--save")
        assert again.returncode == 0, again.stderr
        assert process.wait() == 0
    with DaemonProcess(run_dir, **settings) as process, Writer(process.wait_ready().run_dir) as client:
        opened = client.open_session("large", fingerprint=PRINT, encoding="q8g64")
        client.close_session(opened.session, opened.generation)
        assert process.stat().sessions == []


def test_the_daemon_answers_while_it_saves(daemon: DaemonProcess) -> None:
    """Several sessions are saved at once by clients that wait; another one is answered in between."""
    with Writer(daemon.run_dir) as client, ThreadPoolExecutor(3) as pool:
        for name in "abc":
            client.store(name)
        saves = [pool.submit(kvd, daemon, "save", name) for name in "abc"]
        answered = 0
        while not all(save.done() for save in saves):
            client.stat()
            answered += 1
            time.sleep(0.01)
        assert answered > 3
        assert [save.result().returncode for save in saves] == [0, 0, 0]
