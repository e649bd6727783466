"""Tensor parallelism: every shard has the same tokens, rows and selections, of one host copy."""

from __future__ import annotations

import signal

import pytest

from tests.blackbox.daemon_process import DaemonProcess
from tests.parallel.launcher import PATIENT_S, Launcher, free_address
from tests.parallel.test_pipeline import COUNT, LENGTH

pytestmark = [pytest.mark.leaks_per_module, pytest.mark.timeout(600)]


def tokens_of(launcher: Launcher, daemon: DaemonProcess, world: int, **shape: int) -> list[int]:
    """The tokens of all ranks, offloaded; those of resident histories are the same."""
    launcher.start(
        "decodes",
        range(world),
        world,
        free_address(),
        run_dirs=[str(daemon.run_dir)],
        length=LENGTH,
        count=COUNT,
        resident=True,
        **shape,
    )
    results = launcher.results()
    first = results[0]
    for result in results:
        assert result["resident"] == result["offloaded"] == first["offloaded"]
        assert result["committed"] == LENGTH + COUNT - 1
    assert len(set(first["offloaded"])) > 8, "an output of few distinct tokens shows nothing"
    tokens: list[int] = first["offloaded"]
    return tokens


def test_four_shards_are_one_model_with_one_host_copy(launcher: Launcher, daemon: DaemonProcess) -> None:
    launcher.start("copies", [0], 1, free_address(), run_dirs=[str(daemon.run_dir)], length=LENGTH, count=12)
    [one] = launcher.results()
    launcher.start(
        "copies", range(4), 4, free_address(), run_dirs=[str(daemon.run_dir)], length=LENGTH, count=12, tensor=4
    )
    results = launcher.results()
    for result in results:
        assert result["host bytes"] == one["host bytes"] > 0
        assert result["sessions"] == 1
        for name in ("resident", "offloaded", "selections", "rows", "counters"):
            assert result[name] == results[0][name], name
        assert result["resident"] == result["offloaded"]
        assert min(result["counters"][name] for name in ("hits", "misses", "ring_hits")) > 0
    assert len(set(results[0]["offloaded"])) > 8, "an output of few distinct tokens shows nothing"
    assert [result["copybacks"] > 0 for result in results] == [True, False, False, False]


def test_sums_are_added_in_the_order_of_the_shards(launcher: Launcher) -> None:
    launcher.start("adds", range(3), 3, free_address())
    for result in launcher.results():
        assert result == {"in order": True, "rows alone": True, "logits": True, "rows at a time": [64, 64, 2]}


def test_what_a_shard_keeps_for_logits_is_bounded(launcher: Launcher) -> None:
    launcher.start("scratch", range(2), 2, free_address())
    for few, many in launcher.results():
        assert few == many


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.torture)], ids=["owner", "peer"])
def test_a_lost_shard_is_seen_and_nothing_is_lost(launcher: Launcher, daemon: DaemonProcess, victim: int) -> None:
    where = {"run_dirs": [str(daemon.run_dir)], "name": "lost", "length": LENGTH, "tensor": 2}
    launcher.start("begins", [0, 1], 2, free_address(), count=300, timeout_s=PATIENT_S, **where)
    seen = launcher.lose(victim, after=12)
    launcher.start("goes_on", [0, 1], 2, free_address(), count=COUNT, **where)
    first, second = launcher.results()
    assert first == second
    assert LENGTH + seen <= first["logged"] <= LENGTH + seen + 2
    launcher.start("fresh", [0, 1], 2, free_address(), count=COUNT, **where)
    assert launcher.results() == [first["output"]] * 2


@pytest.mark.torture
def test_a_shard_that_hangs_is_seen(launcher: Launcher, daemon: DaemonProcess) -> None:
    where = {"run_dirs": [str(daemon.run_dir)], "name": "hung", "length": LENGTH, "tensor": 2}
    launcher.start("begins", [0, 1], 2, free_address(), count=300, timeout_s=6.0, **where)
    seen = launcher.lose(1, after=12, by=signal.SIGSTOP)
    assert "with a time-out of 6 s" in (launcher.ranks[0].error or {})["message"]
    launcher.start("goes_on", [0, 1], 2, free_address(), count=COUNT, **where)
    assert all(result["logged"] >= LENGTH + seen for result in launcher.results())


def test_a_number_of_shards_that_does_not_divide_the_heads(launcher: Launcher, daemon: DaemonProcess) -> None:
    launcher.start(
        "fresh", range(3), 3, free_address(), run_dirs=[str(daemon.run_dir)], name="odd", length=8, count=1, tensor=3
    )
    for error in launcher.refusals():
        assert error.startswith("invalid_value: ")
        assert "num_attention_heads is 4" in error


def test_a_page_that_is_under_way_when_a_session_ends(launcher: Launcher, daemon: DaemonProcess) -> None:
    """The last row fills the page, and whoever looks whether its copy is done hears that it is not."""
    where = {"run_dirs": [str(daemon.run_dir)], "name": "late", "tensor": 2}
    launcher.start("fresh", [0, 1], 2, free_address(), length=104, count=25, late=True, **where)
    first, second = launcher.results()
    assert first == second


def test_a_page_that_its_owner_cannot_commit(launcher: Launcher, daemon: DaemonProcess) -> None:
    """Those who view it hear why, rather than wait for the commit."""
    launcher.start("cannot_commit", [0, 1], 2, free_address(), run_dirs=[str(daemon.run_dir)], tensor=2)
    own, heard = launcher.refusals()
    assert own == heard == "os_failure: rank 0: the copy failed"


@pytest.mark.torture
def test_stages_of_shards_and_drafts(launcher: Launcher, daemon: DaemonProcess) -> None:
    """Two stages of two shards give the tokens of two shards, and so do drafts."""
    truth = tokens_of(launcher, daemon, 2, tensor=2)
    assert tokens_of(launcher, daemon, 4, tensor=2, pipeline=2) == truth
    assert tokens_of(launcher, daemon, 2, tensor=2, mtp=2) == truth
