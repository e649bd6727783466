"""The leak fixture itself: it sees what it is there to see."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests import leaks
from tests.leaks import Holdings


@pytest.fixture(autouse=True)
def _impatient(monkeypatch, tmp_path_factory, request) -> None:
    monkeypatch.setattr(leaks, "GRACE_SECONDS", 0.0)
    if "another_process" not in request.node.name:  # away from what tests beside this one do
        monkeypatch.setattr(leaks, "_SHM", tmp_path_factory.mktemp("shm"))


# Some of these leave a segment behind on purpose: side by side, each would see the other's.
pytestmark = pytest.mark.xdist_group("leaks")


def test_nothing_is_left_behind_by_nothing() -> None:
    assert Holdings.now().left_behind() == []


def test_an_open_file_is_named(tmp_path) -> None:
    before = Holdings.now()
    with open(tmp_path / "open", "w"):
        assert before.left_behind() == [f"1 open {tmp_path}/open"]


def test_a_second_descriptor_of_a_kind_is_counted() -> None:
    ends = os.pipe()
    before = Holdings.now()
    more = os.pipe()
    assert before.left_behind() == ["2 open pipe:"]
    for descriptor in ends + more:
        os.close(descriptor)


def test_a_segment_in_shared_memory_is_named() -> None:
    before = Holdings.now()
    path = leaks._SHM / "kvd-leak"
    path.touch()
    try:
        assert before.left_behind() == [f"shared memory {path.name}"]
    finally:
        path.unlink()


def test_a_segment_that_another_process_holds_is_that_processes_own(run_dir) -> None:
    """The holder is started by a shell that ends at once, so that it is nobody's child here."""
    path = Path(f"/dev/shm/kvd-other-{os.getpid()}")
    ready, stop = run_dir / "ready", run_dir / "stop"
    os.mkfifo(stop)
    holder = f"exec 9>{path}; touch {ready}; read line < {stop}"
    before = Holdings.now()
    subprocess.run(["sh", "-c", f'setsid sh -c "{holder}" > /dev/null 2>&1 &'], check=True)
    try:
        while not ready.exists():
            time.sleep(0.01)
        assert before.left_behind() == []
    finally:
        stop.write_text("end\n")
        path.unlink()


def test_a_thread_and_a_child_process_are_named() -> None:
    before = Holdings.now()
    go = threading.Event()
    thread = threading.Thread(target=go.wait, name="lingering")
    thread.start()
    child = subprocess.Popen(["sleep", "60"])
    try:
        left = [what for what in before.left_behind() if not what.startswith("shared memory")]  # of tests beside this
        assert left == ["thread lingering", f"child process {child.pid} sleep 60"]
    finally:
        go.set()
        thread.join()
        child.kill()
        child.wait()
