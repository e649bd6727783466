"""Spilled sessions: open before their pages have come, on disk while they must be, and the same after any death."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import pytest

from compute.client import Client
from protocol.errors import (
    DaemonUnavailable,
    OsFailure,
    SavedRefused,
)
from tests.blackbox.lazy_sessions import (
    FOREVER,
    PAGES,
    STRIDE,
    Holder,
    close_descriptors,
    content,
    forget_descriptors,
    kvd,
    lazy_daemon,
    make_saved,
    restore,
    table,
)
from tests.blackbox.raw import FINGERPRINT
from tests.leaks import orphans_expected
from tests.saved_files import Parts

__all__ = ["close_descriptors"]
"""Looked at by pytest."""


def make_spilled(run_dir: Path, *names: str) -> None:
    """Sessions that are on disk, as after the end of a daemon that was to save them, and no daemon.

    Of each there is a saved file as well, older by one generation.
    """
    with lazy_daemon(run_dir) as daemon, Client(run_dir) as client:
        for name in names:
            make_saved(client, name)
            restore(client, name, lazy=False)
        client.close()
        assert kvd(run_dir, "drain", "--save").returncode == 0
        assert daemon.wait() == 0
    forget_descriptors()
    assert {path.name for path in spilled_files(run_dir)} == {f"{os.getuid()}-{name}.spilled" for name in names}


def spilled_files(run_dir: Path) -> list[Path]:
    return list((run_dir / "state").glob("*.spilled"))


def until_removed(run_dir: Path) -> None:
    deadline = time.monotonic() + FOREVER
    while spilled_files(run_dir):
        assert time.monotonic() < deadline, "a spilled file of a whole session stays"
        time.sleep(0.01)


def test_a_spilled_session_opens_before_its_pages_have_come(run_dir: Path) -> None:
    make_spilled(run_dir, "long", "other")
    with lazy_daemon(run_dir, pause=0.1) as daemon, Client(run_dir) as client:
        holder = Holder(client)
        assert len(holder.absent) > PAGES // 2, "it was open before its pages came"
        holder.fetch(PAGES - 1)
        assert len(holder.absent) > 2, "the last page did not wait for all before it"
        assert holder.page(PAGES - 1) == content(PAGES - 1)
        assert f"{os.getuid()}-long.spilled" in {path.name for path in spilled_files(run_dir)}
        opened = client.open_session("other", fingerprint=FINGERPRINT, encoding="q8g64")
        assert table(client, opened)[1] == set(), "who does not wait for single pages gets the whole"
        client.close_session(opened.session, opened.generation)
        holder.fetch(0, PAGES)
        assert [holder.page(page) for page in range(PAGES)] == [content(page) for page in range(PAGES)]
        until_removed(run_dir)
        holder.let_go(close=False)
        assert [each.name for each in daemon.stat().sessions] == ["long"]


def test_a_spilled_session_that_is_closed_is_gone_from_disk(run_dir: Path) -> None:
    """Whatever becomes of the daemon once it has answered."""
    make_spilled(run_dir, "long", "other")
    with orphans_expected(), lazy_daemon(run_dir, pause=0.05) as daemon, Client(run_dir) as client:
        for name in ("long", "other"):
            holder = Holder(client, name)
            assert holder.absent
            holder.let_go()
        daemon.process.kill()
        daemon.process.wait()
    forget_descriptors()
    assert spilled_files(run_dir) == []
    with lazy_daemon(run_dir) as daemon:
        assert daemon.stat().sessions == []


@pytest.mark.parametrize("nth", [1, 5, PAGES])
def test_a_spilled_session_survives_the_daemon_at_any_page(run_dir: Path, nth: int) -> None:
    make_spilled(run_dir, "long")
    with orphans_expected():
        with lazy_daemon(run_dir, nth=nth) as daemon, Client(run_dir) as client:
            with suppress(DaemonUnavailable):
                Holder(client)
            daemon.process.wait(FOREVER)
        forget_descriptors()
        with lazy_daemon(run_dir, pause=0.02) as daemon, Client(run_dir) as client:
            assert bool(spilled_files(run_dir)) == (nth < PAGES), "its file stays as long as pages are to come from it"
            holder = Holder(client, again=True)
            holder.fetch(0, PAGES)
            assert [holder.page(page) for page in range(PAGES)] == [content(page) for page in range(PAGES)]
            until_removed(run_dir)
            holder.let_go()


def test_a_damaged_page_of_a_spilled_session_is_refused_and_its_file_stays(run_dir: Path) -> None:
    make_spilled(run_dir, "long")
    [file] = spilled_files(run_dir)
    whole = file.read_bytes()
    at = Parts(whole).pages_at + 5 * STRIDE + 77
    file.write_bytes(whole[:at] + b"\xa5" + whole[at + 1 :])
    with lazy_daemon(run_dir) as daemon, Client(run_dir) as client:
        with pytest.raises(SavedRefused, match="page 5"):
            client.open_session("long", fingerprint=FINGERPRINT, encoding="q8g64")
        assert daemon.stat().sessions == [], "who wants the whole gets nothing"
        holder = Holder(client)
        with pytest.raises(SavedRefused, match="page 5 does not match"):
            holder.fetch(0, PAGES)
        holder.fetch(6, PAGES - 6)
        assert holder.absent == {5}
        drained = kvd(run_dir, "drain", "--save")
        assert (drained.returncode, "could not be saved: long" in drained.stderr) == (OsFailure.exit_status, True)
        assert spilled_files(run_dir) == [file]
        file.write_bytes(whole)
        holder.fetch(5)
        assert holder.page(5) == content(5), "what was repaired is read again"
        until_removed(run_dir)
        holder.let_go()
