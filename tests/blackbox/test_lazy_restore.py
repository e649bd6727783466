"""Sessions restored page by page: there at once, never an unverified byte, and the same after any death."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Timer

import pytest
import torch

from compute.client import Client
from compute.histories import HistorySettings
from compute.worker import Worker
from protocol.errors import (
    FingerprintMismatch,
    InvalidValue,
    SavedRefused,
    SessionBusy,
    SessionExists,
    UnknownSaved,
)
from protocol.layout import PAGE_TOKENS, Q8G64
from protocol.model import DEMO
from tests.blackbox.lazy_sessions import (
    FOREVER,
    OLD,
    PAGES,
    ROWS,
    STRIDE,
    Holder,
    close_descriptors,
    content,
    forget_descriptors,
    kvd,
    lazy_daemon,
    make_saved,
    restore,
    session,
    state_file,
    table,
    until_whole,
)
from tests.blackbox.raw import FINGERPRINT
from tests.leaks import orphans_expected
from tests.saved_files import Parts, resealed

__all__ = ["close_descriptors"]
"""Looked at by pytest."""


def test_it_opens_at_once_and_what_is_wanted_comes_first(run_dir: Path) -> None:
    with lazy_daemon(run_dir, pause=0.15) as daemon, Client(run_dir) as client:
        make_saved(client)
        restore(client)
        holder = Holder(client)
        assert len(holder.absent) > PAGES // 2, "it was open before its pages came"
        stats = session(daemon)
        assert (stats.state, stats.committed_rows, stats.tokens) == ("held", ROWS, ROWS)
        holder.fetch(PAGES - 1)
        assert PAGES - 1 not in holder.absent
        assert len(holder.absent) > 2, "the last page did not wait for all before it"
        assert holder.page(PAGES - 1) == content(PAGES - 1)
        holder.fetch(0, PAGES)
        assert not holder.absent
        assert [holder.page(page) for page in range(PAGES)] == [content(page) for page in range(PAGES)]
        assert session(daemon).absent_pages == 0
        for first, pages in ((0, 0), (-1, 1), (PAGES, 1), (3, PAGES)):
            with pytest.raises(InvalidValue, match="pages"):
                holder.fetch(first, pages)
        holder.let_go()


def test_who_cannot_wait_for_pages_gets_the_whole(run_dir: Path) -> None:
    """An opening of the kind before, a fork and a saving wait; a closing does not, and nothing is left of it."""
    with lazy_daemon(run_dir, pause=0.05) as daemon, Client(run_dir) as client:
        make_saved(client)
        make_saved(client, "other")
        restore(client)
        opened = client.open_session("long", fingerprint=FINGERPRINT, encoding="q8g64")
        assert (table(client, opened)[1], session(daemon).absent_pages) == (set(), 0)
        client.close_session(opened.session, opened.generation)
        restore(client)
        holder = Holder(client)
        fork = client.fork_session(holder.opened.session, holder.opened.generation, 130, "fork")
        assert table(client, fork)[1] == set()
        assert holder.absent, "the fork needed three pages only"
        saved = client.save_session("long")
        assert (saved.rows, session(daemon).absent_pages) == (ROWS, 0)
        client.close_session(fork.session, fork.generation)
        holder.let_go()
        restore(client)
        holder = Holder(client)
        assert holder.absent
        holder.let_go()
        restore(client, "other")
        again = Holder(client, "other")
        again.fetch(0, PAGES)
        assert [again.page(page) for page in range(PAGES)] == [content(page, "other") for page in range(PAGES)]
        again.let_go()
        deadline = time.monotonic() + FOREVER
        while any(tier.requested for tier in daemon.stat().tiers):
            assert time.monotonic() < deadline, daemon.stat().tiers
            time.sleep(0.02)
        assert not daemon.stat().sessions


def test_a_damaged_page_is_refused_and_all_else_goes_on(run_dir: Path) -> None:
    with lazy_daemon(run_dir) as daemon, Client(run_dir) as client:
        make_saved(client)
        whole = state_file(run_dir).read_bytes()
        at = Parts(whole).pages_at + 5 * STRIDE + 77
        state_file(run_dir).write_bytes(whole[:at] + b"\xa5" + whole[at + 1 :])
        with pytest.raises(SavedRefused, match="page 5 does not match"):
            restore(client, lazy=False)
        restore(client)
        with pytest.raises(SavedRefused, match="page 5 does not match"):
            client.open_session("long", fingerprint=FINGERPRINT, encoding="q8g64")
        holder = Holder(client)
        for page in range(PAGES):
            if page == 5:
                with pytest.raises(SavedRefused, match="saved session long is refused: page 5 does not match"):
                    holder.fetch(page)
            else:
                holder.fetch(page)
                assert holder.page(page) == content(page)
        assert holder.absent == {5}
        assert holder.page(5) in (OLD, bytes(STRIDE)), "not a byte of it was written"
        reference = holder.opened.session, holder.opened.generation
        with pytest.raises(SavedRefused, match="page 5"):
            client.save_session("long")
        with pytest.raises(SavedRefused, match="page 5"):
            client.fork_session(*reference, 5 * PAGE_TOKENS + 1, "fork")
        fork = client.fork_session(*reference, 5 * PAGE_TOKENS, "fork")
        client.close_session(fork.session, fork.generation)
        removal = kvd(run_dir, "rm", "long")
        assert (removal.returncode, "still being restored from" in removal.stderr) == (SessionBusy.exit_status, True)
        assert client.stat().ledger == "balanced"
        state_file(run_dir).write_bytes(whole)
        holder.fetch(0, PAGES)
        assert holder.page(5) == content(5), "what was repaired is read again"
        assert session(daemon).absent_pages == 0
        holder.let_go()
        assert kvd(run_dir, "rm", "long").returncode == 0
        with pytest.raises(UnknownSaved):
            restore(client)


def test_a_file_that_was_changed_or_went_away_gives_no_page(run_dir: Path) -> None:
    """The pages that were not read before are refused, whatever a file of that name has now."""
    with lazy_daemon(run_dir, pause=0.1) as daemon, Client(run_dir) as client:
        make_saved(client)
        make_saved(client, "two")
        restore(client)
        restore(client, "two")
        holder, second = Holder(client), Holder(client, "two")
        whole = state_file(run_dir, "two").read_bytes()
        other = bytearray(whole)
        other[4096:4100] = b"\x07\0\0\0"
        state_file(run_dir, "two").write_bytes(resealed(bytes(other)))
        with pytest.raises(SavedRefused, match="not the file any more"):
            second.fetch(0, PAGES)
        holder.fetch(0, PAGES)
        state_file(run_dir, "two").unlink()
        # A batch that was begun before it went still found another file.
        with pytest.raises(SavedRefused, match=r"there is no saved file|not the file any more"):
            second.fetch(0, PAGES)
        second.let_go()
        holder.let_go()
        assert daemon.stat().sessions == []


HOLDER = """
import sys
from compute.client import Client
from tests.blackbox.raw import FINGERPRINT

client = Client(sys.argv[1])
opened = client.open_session("long", fingerprint=FINGERPRINT, encoding="q8g64", lazy=True)
print("waiting", flush=True)
client.fetch_pages(opened.session, opened.generation, 0, opened.page_count)
"""


def test_case_02_statistics_while_a_worker_is_killed_amid_the_copies_it_waits_for(run_dir: Path) -> None:
    with lazy_daemon(run_dir, pause=0.5) as daemon, Client(run_dir) as client:
        make_saved(client)
        restore(client)
        with subprocess.Popen([sys.executable, "-c", HOLDER, str(run_dir)], stdout=subprocess.PIPE) as victim:
            assert victim.stdout is not None
            assert victim.stdout.readline() == b"waiting\n"
            victim.kill()
            started = time.monotonic()
            [left] = client.stat().sessions
            assert time.monotonic() - started < 1.0
        assert left.absent_pages, "they were still being copied"
        until_whole(daemon)
        assert session(daemon).state == "stored"
        holder = Holder(client)
        assert [holder.page(page) for page in range(PAGES)] == [content(page) for page in range(PAGES)]
        holder.let_go()


def test_what_a_lazy_restore_refuses_at_once(run_dir: Path) -> None:
    with lazy_daemon(run_dir) as daemon, Client(run_dir) as client:
        make_saved(client)
        with pytest.raises(UnknownSaved):
            restore(client, "none")
        with pytest.raises(FingerprintMismatch):
            client.restore_session("long", fingerprint=bytes(32), encoding="q8g64", lazy=True)
        data = state_file(run_dir).read_bytes()
        state_file(run_dir).write_bytes(data[:-1] + b"x")
        with pytest.raises(SavedRefused, match="trailer"):
            restore(client)
        state_file(run_dir).write_bytes(data)
        assert not daemon.stat().sessions
        restore(client)
        with pytest.raises(SessionExists):
            restore(client)


@pytest.mark.parametrize("nth", [1, 5, PAGES])
def test_it_survives_the_daemon_at_any_page(run_dir: Path, nth: int) -> None:
    with orphans_expected():
        with lazy_daemon(run_dir, nth=nth) as daemon, Client(run_dir) as client:
            make_saved(client)
            restore(client)
            daemon.process.wait(FOREVER)
        if nth == 5:
            with lazy_daemon(run_dir, pause=0.02, nth=2) as daemon:
                daemon.process.wait(FOREVER)
        forget_descriptors()
        with lazy_daemon(run_dir, pause=0.02) as daemon, Client(run_dir) as client:
            assert session(daemon).state == "stored"
            holder = Holder(client)
            holder.fetch(0, PAGES)
            assert [holder.page(page) for page in range(PAGES)] == [content(page) for page in range(PAGES)]
            holder.let_go(close=False)
            until_whole(daemon)


def test_drain_with_save_waits_for_the_pages(run_dir: Path) -> None:
    with lazy_daemon(run_dir, pause=0.05) as daemon, Client(run_dir) as client:
        make_saved(client)
        restore(client)
        client.close()
        assert kvd(run_dir, "drain", "--save").returncode == 0
        assert daemon.wait() == 0
    forget_descriptors()
    with lazy_daemon(run_dir) as daemon, Client(run_dir) as client:
        holder = Holder(client)
        holder.fetch(0, PAGES)
        assert [holder.page(page) for page in range(PAGES)] == [content(page) for page in range(PAGES)]
        holder.let_go()


CONFIG = replace(DEMO, index_topk=64, num_hidden_layers=2, hidden_size=64, index_n_heads=8, n_routed_experts=4)


@pytest.mark.leaks_per_module
@pytest.mark.parametrize("nth", [0, 2], ids=["one daemon", "a daemon that dies"])
def test_a_worker_goes_on_to_the_same_tokens(run_dir: Path, nth: int) -> None:
    """It waits for its pages while they come, and for another daemon if this one dies amid them."""
    settings = HistorySettings("offloaded", 512, 128, 4, "saved")
    tokens = torch.randint(0, 256, (333,), generator=torch.Generator().manual_seed(1)).tolist()
    with (
        orphans_expected(),
        lazy_daemon(run_dir, pause=0.3 if nth else 0.02, nth=nth) as daemon,
        Worker(run_dir, "cpu", CONFIG, Q8G64, seed=3, daemon_wait_s=FOREVER) as worker,
        ExitStack() as daemons,
    ):
        history = worker.history(settings)
        assert history.session is not None
        history.session.state.append_tokens(tokens)
        hidden = worker.prefill(history, tokens, 192)
        history.barrier(hidden)
        worker.client.save_session("saved")
        truth = list(worker.decode(history, hidden, 40))
        history.close()
        if not nth:
            restored = kvd(run_dir, "restore", "--lazy", "saved")
            assert "restored saved: 333 rows, 333 tokens" in restored.stdout
            assert "whose pages come from now on" in restored.stdout
        else:  # soon enough to open it before that daemon dies
            fingerprint = worker.fingerprint
            worker.client.restore_session("saved", fingerprint=fingerprint, encoding=Q8G64.name, lazy=True)
            successor = Timer(0, lambda: (daemon.process.wait(), daemons.enter_context(lazy_daemon(run_dir))))
            successor.start()
            daemons.callback(successor.join)
        history, logged = worker.take_over(settings)
        assert logged == tokens
        assert list(worker.decode(history, worker.prefill(history, tokens[history.length :], 64), 40)) == truth
        history.close()


@pytest.mark.leaks_per_module
def test_a_copy_in_vram_waits_for_pages_that_are_still_to_come(run_dir: Path) -> None:
    settings = HistorySettings("offloaded", 512, 128, 4, "saved")
    tokens = torch.randint(0, 256, (333,), generator=torch.Generator().manual_seed(1)).tolist()
    with (
        lazy_daemon(run_dir, pause=0.3, vram="256MiB"),
        Worker(run_dir, "cpu", CONFIG, Q8G64, seed=3) as worker,
    ):
        history = worker.history(settings)
        assert history.session is not None
        history.session.state.append_tokens(tokens[:300])
        history.barrier(worker.prefill(history, tokens[:300], 192))
        worker.client.save_session("saved")
        truth = list(worker.decode(history, worker.prefill(history, tokens[300:], 64), 20))
        with torch.inference_mode():
            for page in range(history.session.page_count):
                history.session.page(page)[:] = 0xEE
        history.close()
        worker.client.restore_session("saved", fingerprint=worker.fingerprint, encoding=Q8G64.name, lazy=True)
        copy = worker.resident_copy(replace(settings, mode="resident"))
        assert list(worker.decode(copy, worker.prefill(copy, tokens[300:], 64), 20)) == truth
        copy.close()
