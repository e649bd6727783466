"""Pipeline stages: the tokens of one process, and sessions that are there on all stages or on none."""

from __future__ import annotations

from typing import Any

import pytest

from compute.client import Client
from protocol.errors import OutOfCapacity
from tests.blackbox.daemon_process import DaemonProcess
from tests.parallel.launcher import PATIENT_S, Launcher, free_address

pytestmark = [pytest.mark.leaks_per_module, pytest.mark.timeout(600)]

LENGTH, COUNT = 120, 24
"""A page fills while tokens are decoded, and rows leave the ring of two pages."""


@pytest.fixture(scope="module")
def truth(launcher: Launcher, daemons: list[DaemonProcess]) -> list[int]:
    launcher.start("alone", [0], 1, free_address(), run_dir=str(daemons[0].run_dir), length=LENGTH, count=COUNT)
    [output] = launcher.results()
    assert len(set(output)) > 8, "an output of few distinct tokens shows nothing"
    return output


@pytest.mark.parametrize("stages", [pytest.param(2, marks=pytest.mark.torture), 4])
def test_stages_give_the_tokens_of_one_process(
    launcher: Launcher, daemons: list[DaemonProcess], truth: list[int], stages: int
) -> None:
    run_dirs = [str(daemon.run_dir) for daemon in daemons]
    launcher.start(
        "decodes", range(stages), stages, free_address(), run_dirs=run_dirs, length=LENGTH, count=COUNT, pipeline=stages
    )
    results = launcher.results()
    for result in results:
        assert result["offloaded"] == truth
        assert result["committed"] == LENGTH + COUNT - 1
        assert min(result["counters"][name] for name in ("hits", "misses", "ring_hits")) > 0
    assert sum(result["layers"] for result in results) == 5


def test_no_wait_is_longer_than_the_time_out_of_peers(launcher: Launcher) -> None:
    """What finds NCCL's ranks for each other, the store, has none of its own."""
    launcher.start("limits", [0, 1], 2, free_address())
    assert launcher.results() == [[7.0] * 4] * 2


def shape_of(daemons: list[DaemonProcess]) -> dict[str, Any]:
    return {"run_dirs": [str(daemon.run_dir) for daemon in daemons], "pipeline": len(daemons)}


def names(daemon: DaemonProcess) -> list[str]:
    return [session.name for session in daemon.stat().sessions]


def test_a_session_lives_on_all_stages(launcher: Launcher, daemons: list[DaemonProcess], truth: list[int]) -> None:
    launcher.start("lives", [0, 1], 2, free_address(), length=LENGTH, count=COUNT, **shape_of(daemons))
    for result in launcher.results():
        assert result["outputs"] == dict.fromkeys(("forked", "taken over", "restored", "truncated"), truth)
        assert result["saved rows"] == [LENGTH + COUNT // 2 - 1] * 2
    assert [names(daemon) for daemon in daemons] == [[], []]


def test_what_one_stage_refuses_is_refused_by_all(launcher: Launcher, daemons: list[DaemonProcess]) -> None:
    with Client(daemons[1].run_dir) as client:
        held = client.create_session(
            "taken.stage1", fingerprint=bytes(32), encoding="q8g64", page_bytes=100_000, token_capacity=1 << 20
        )
        while True:
            try:
                client.extend_session(held.session, held.generation, 1)
            except OutOfCapacity:
                break
        launcher.start("refused", [0, 1], 2, free_address(), **shape_of(daemons))
        for result in launcher.results():
            assert result["create"].startswith("session_exists: rank 1: ")
            assert result["open"].startswith("unknown_session: rank 0: ")
            assert result["restore"].startswith("unknown_saved: rank 0: ")
            assert result["fork"].startswith("session_exists: rank 1: ")
            assert result["extend"].startswith("out_of_capacity: rank 1: ")
            for name, what in (
                ("resident copy", "a resident copy"),
                ("store", "a history to store"),
            ):
                assert result[name].startswith(f"invalid_value: ranks of {what} is 2; allowed: 1")
            assert result["prefix"].startswith("invalid_value: pipeline stages of a fork by prefix is 2; allowed: 1")
        assert names(daemons[0]) == []
        client.close_session(held.session, held.generation)


def test_ranks_of_different_models_do_not_start(launcher: Launcher, daemons: list[DaemonProcess]) -> None:
    launcher.start("differs", [0, 1], 2, free_address(), run_dirs=shape_of(daemons)["run_dirs"])
    assert all(error.startswith("invalid_value: model of rank 1 is ") for error in launcher.refusals())


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.torture), 1])
def test_a_lost_rank_is_seen_and_nothing_is_lost(
    launcher: Launcher, daemons: list[DaemonProcess], truth: list[int], victim: int
) -> None:
    where = {"name": "lost", "length": LENGTH, **shape_of(daemons)}
    launcher.start("begins", [0, 1], 2, free_address(), count=300, timeout_s=PATIENT_S, **where)
    seen = launcher.lose(victim, after=12)
    launcher.start("goes_on", [0, 1], 2, free_address(), count=COUNT, **where)
    results = launcher.results()
    for result in results:
        assert result["output"] == truth
        assert result["rows"] == results[0]["rows"]
    assert LENGTH + seen <= results[0]["logged"] <= LENGTH + seen + 2
    assert [names(daemon) for daemon in daemons] == [[], []]


@pytest.mark.torture
def test_a_rank_lost_amid_a_save(launcher: Launcher, daemons: list[DaemonProcess], truth: list[int]) -> None:
    """One node has saved, the other has what it saved before: all go back to that, and on."""
    half = COUNT // 2
    where = {"name": "save", "length": LENGTH, **shape_of(daemons)}
    launcher.start("begins_and_saves", [0, 1], 2, free_address(), count=half, dies=1, **where)
    survivor = launcher.wait()[0]
    assert survivor.error is not None
    assert survivor.error["code"] == "peer_lost"
    launcher.start("goes_on", [0, 1], 2, free_address(), count=COUNT, **where)
    assert [result["rows"] for result in launcher.results()] == [LENGTH + 2 * half - 1] * 2
    launcher.start("goes_on", [0, 1], 2, free_address(), count=COUNT, restored=True, **where)
    for result in launcher.results():
        assert result["rows"] == LENGTH + half - 1
        assert result["logged"] == LENGTH + 2 * half
        assert result["output"] == truth
