"""Save and restore through a real daemon: the same bytes, the same tokens after them, and nothing from a bad file."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from compute.client import Client
from compute.histories import HistorySettings
from compute.worker import Worker
from protocol.errors import (
    FingerprintMismatch,
    InvalidValue,
    KvdError,
    SavedRefused,
    SessionBusy,
    SessionExists,
    UnknownSaved,
    UnknownSession,
)
from protocol.layout import Q8G64
from protocol.model import DEMO
from tests.blackbox.daemon_process import DaemonProcess, clean_environment
from tests.leaks import orphans_expected
from tests.saved_files import Parts, read, resealed

pytestmark = pytest.mark.leaks_per_module

CONFIG = replace(DEMO, index_topk=64, num_hidden_layers=2, hidden_size=64, index_n_heads=8, n_routed_experts=4)
SETTINGS = HistorySettings("offloaded", 512, 128, 4, "saved")


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    path = Path(tempfile.mkdtemp(prefix="kvd-test-", dir="/tmp"))
    sizes = {"host_capacity": "64MiB", "host_extent": "16MiB", "vram_capacity": "256MiB"}
    with DaemonProcess(path, **sizes, drain_timeout_s="0", disk_state_dir=str(path / "state")) as process:
        yield process.wait_ready()
        assert process.stat().ledger == "balanced"
        assert process.stop() == 0
        assert '"exception"' not in process.log
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def worker(daemon: DaemonProcess) -> Iterator[Worker]:
    with Worker(daemon.run_dir, "cpu", CONFIG, Q8G64, seed=3) as opened:
        yield opened


def file_of(daemon: DaemonProcess, name: str = "saved") -> Path:
    return daemon.run_dir / "state" / f"{os.getuid()}-{name}.kvd"


def prompt(length: int) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def forget(worker: Worker, name: str) -> None:
    """Close the live session, by whoever is to hold it."""
    opened = worker.client.open_session(name, fingerprint=worker.fingerprint, encoding="q8g64")
    worker.client.close_session(opened.session, opened.generation)


def restore(worker: Worker, name: str = "saved") -> None:
    worker.client.restore_session(name, fingerprint=worker.fingerprint, encoding="q8g64")


def test_case_11_a_restored_session_has_the_same_bytes_and_goes_on_to_the_same_tokens(
    worker: Worker, daemon: DaemonProcess
) -> None:
    tokens = prompt(333)
    history = worker.history(replace(SETTINGS, mode="resident"))
    truth = list(worker.decode(history, worker.prefill(history, tokens, 192), 96))
    history.close()

    history = worker.history(SETTINGS)
    session = history.session
    assert session is not None
    session.state.append_tokens(tokens)
    hidden = worker.prefill(history, tokens, 192)
    start = []
    for _ in range(40):
        start.append(int(worker.decoder.logits(hidden[None])[0].argmax()))
        session.state.append_tokens(start[-1:], b"sampler after %d" % len(start))
        hidden = worker.step(history, start[-1:], cached=True)[-1]
    history.barrier(hidden)
    pages = -(-history.length // 64)
    before = [session.page(page).numpy().tobytes() for page in range(pages)]
    commit, logged, sampler = session.commit, session.state.tokens(), session.state.sampler_state
    saved = worker.client.save_session("saved")
    assert (saved.rows, saved.tokens) == (373, 373)
    assert saved.nbytes == file_of(daemon).stat().st_size
    history.close()

    restore(worker)
    history = worker.stored_history(SETTINGS)
    session = history.session
    assert session is not None
    assert history.length == 373
    assert [session.page(page).numpy().tobytes() for page in range(pages)] == before
    assert (session.commit.rows, session.commit.payload) == (commit.rows, commit.payload)
    assert (
        (session.state.tokens(), session.state.sampler_state)
        == (logged, sampler)
        == (tokens + start, b"sampler after 40")
    )
    terminal = torch.from_numpy(np.frombuffer(session.commit.payload, dtype="<f4").copy())
    assert torch.equal(terminal, hidden.float())
    assert [*start, *worker.decode(history, terminal, 56)] == truth
    history.close()


def test_case_18_a_session_of_no_tokens_round_trips(worker: Worker) -> None:
    client = worker.client
    opened = client.create_session(
        "none", fingerprint=worker.fingerprint, encoding="q8g64", page_bytes=5000, token_capacity=100, commit_bytes=8
    )
    saved = client.save_session("none")
    assert (saved.rows, saved.tokens) == (0, 0)
    client.close_session(opened.session, opened.generation)
    restore(worker, "none")
    again = client.open_session("none", fingerprint=worker.fingerprint, encoding="q8g64")
    assert again.page_count == 0
    client.close_session(again.session, again.generation)


@pytest.fixture
def kept(worker: Worker) -> Iterator[bytes]:
    """A session of 150 rows that is stored and saved; what its file has."""
    history = worker.history(SETTINGS)
    assert history.session is not None
    history.session.state.append_tokens(prompt(150))
    history.barrier(worker.prefill(history, prompt(150), 64))
    history.close(keep=True)
    worker.client.save_session("saved")
    [path] = Path(worker.client.run_dir / "state").glob("*-saved.kvd")
    yield path.read_bytes()
    forget(worker, "saved")


def live_bytes(worker: Worker, daemon: DaemonProcess) -> bytes:
    """What the stored session has in memory, by saving it once more."""
    worker.client.save_session("saved")
    return file_of(daemon).read_bytes()


def test_case_18_a_bad_file_leaves_the_live_session_as_it_is(
    worker: Worker, daemon: DaemonProcess, kept: bytes
) -> None:
    parts = Parts(kept)
    named = bytearray(kept)
    named[152:160] = b"absent\0\0"
    whole = resealed(bytes(named))

    def changed(at: int, data: bytes) -> bytes:
        return whole[:at] + data + whole[at + len(data) :]

    bad = {
        "not a saved session": b"",
        "header stands for": whole[:-1],
        "it has version 9": changed(8, b"\x09"),
        "page 0 does not match": changed(parts.pages_at, bytes(4096)),
        "page 1 does not match": changed(parts.pages_at + parts.stride + 77, b"\xa5"),
        "it is session 'saved' of uid": kept,
    }
    before = live_bytes(worker, daemon)
    for reason, data in bad.items():
        file_of(daemon).write_bytes(data)
        with pytest.raises(SessionExists):
            restore(worker)
        file_of(daemon, "absent").write_bytes(data)
        with pytest.raises(SavedRefused, match=f"saved session absent is refused: .*{reason}"):
            restore(worker, "absent")
        with pytest.raises(UnknownSession):
            worker.client.open_session("absent", fingerprint=worker.fingerprint, encoding="q8g64")
        assert worker.client.stat().ledger == "balanced"
    assert live_bytes(worker, daemon) == before
    file_of(daemon, "absent").unlink()


def test_files_of_another_name_uid_or_model_are_refused(worker: Worker, daemon: DaemonProcess, kept: bytes) -> None:
    file_of(daemon, "other").write_bytes(kept)
    with pytest.raises(SavedRefused, match="it is session 'saved' of uid"):
        restore(worker, "other")
    foreign = bytearray(kept)
    foreign[24] ^= 1
    file_of(daemon, "saved").write_bytes(resealed(bytes(foreign)))
    forget_and_back = worker.client.open_session("saved", fingerprint=worker.fingerprint, encoding="q8g64")
    worker.client.close_session(forget_and_back.session, forget_and_back.generation)
    with pytest.raises(SavedRefused, match=f"it is session 'saved' of uid {os.getuid() ^ 1}"):
        restore(worker)
    file_of(daemon, "saved").write_bytes(kept)
    with pytest.raises(FingerprintMismatch):
        worker.client.restore_session("saved", fingerprint=bytes(32), encoding="q8g64")
    with pytest.raises(FingerprintMismatch):
        worker.client.restore_session("saved", fingerprint=worker.fingerprint, encoding="f32")
    restore(worker)
    file_of(daemon, "other").unlink()


@pytest.mark.parametrize("name", ["", "../saved", "a/b", "a\0b", "x" * 65, "é"])
def test_names_that_are_none_are_refused(worker: Worker, name: str) -> None:
    with pytest.raises(InvalidValue, match="session name"):
        restore(worker, name)
    with pytest.raises(UnknownSession):
        worker.client.save_session(name)


def test_what_is_held_is_saved_by_its_holder_only(worker: Worker, daemon: DaemonProcess) -> None:
    opened = worker.client.create_session(
        "held", fingerprint=worker.fingerprint, encoding="q8g64", page_bytes=5000, token_capacity=100
    )
    refused = kvd(daemon, "save", "held")
    assert (refused.returncode, refused.stdout) == (SessionBusy.exit_status, "")
    assert f"session 'held' is held by process {os.getpid()}, which has to save it itself" in refused.stderr
    worker.client.detach_session(opened.session, opened.generation)
    assert kvd(daemon, "save", "held").returncode == 0
    forget(worker, "held")


def kvd(daemon: DaemonProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvd", *arguments]
    if arguments[0] != "verify":
        command += ["--run-dir", str(daemon.run_dir)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, env=clean_environment())


def test_commands(worker: Worker, daemon: DaemonProcess, kept: bytes) -> None:
    saved = kvd(daemon, "save", "--all")
    assert saved.returncode == 0, saved.stderr
    assert "saved saved: 150 rows, 150 tokens" in saved.stdout
    listed = kvd(daemon, "ls")
    assert f"{len(kept):,}" in listed.stdout
    whole = kvd(daemon, "verify", str(file_of(daemon)))
    assert "whole: session saved of uid" in whole.stdout, whole.stderr
    assert kvd(daemon, "rm", "saved").returncode == 0
    gone = kvd(daemon, "restore", "gone")
    assert (gone.returncode, gone.stderr) == (
        UnknownSaved.exit_status,
        f"kvd: there is no saved file {file_of(daemon, 'gone').name}\n",
    )
    damaged = daemon.run_dir / "damaged"
    damaged.write_bytes(kept[:-9] + b"x" + kept[-8:])
    refused = kvd(daemon, "verify", str(damaged))
    assert refused.returncode == SavedRefused.exit_status
    assert f"saved session {damaged} is refused: its trailer" in refused.stderr


def test_a_daemon_without_a_directory_saves_nothing(run_dir: Path) -> None:
    with DaemonProcess(run_dir, drain_timeout_s="0") as process:
        process.wait_ready()
        with Client(run_dir) as client, pytest.raises(InvalidValue, match="state_dir"):
            client.save_session("x")


def save_for_ever(client: Client, name: str) -> None:
    while True:
        client.save_session(name, timeout_s=1.0)


def test_a_killed_daemon_leaves_whole_files(run_dir: Path) -> None:
    """Killed while it saves, again and again: what was acknowledged is whole, and nothing else is in the way."""
    state = run_dir / "state"
    acknowledged: list[str] = []
    for round_number in range(4):
        with orphans_expected(), DaemonProcess(run_dir, drain_timeout_s="0", disk_state_dir=str(state)) as process:
            process.wait_ready()
            with Client(run_dir) as client, ThreadPoolExecutor(1) as pool:
                for name in acknowledged:
                    header, _, _ = read((state / f"{os.getuid()}-{name}.kvd").read_bytes(), pool)
                    assert header.name == name
                if round_number == 3:
                    break
                name = f"s{round_number}"
                client.create_session(
                    name, fingerprint=bytes(32), encoding="q8g64", page_bytes=5000, token_capacity=1 << 20
                )
                client.save_session(name)
                acknowledged.append(name)
                killer = threading.Timer(0.002 * round_number, process.process.kill)
                killer.start()
                with pytest.raises(KvdError):
                    save_for_ever(client, name)
                killer.join()
                process.process.wait()
    assert {path.name for path in state.iterdir()} == {f"{os.getuid()}-{name}.kvd" for name in acknowledged}
