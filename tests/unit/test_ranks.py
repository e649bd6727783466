"""What ranks do together, and what they keep of a session that another one holds: without other processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compute import cli
from compute.device_cpu import CpuDevice
from compute.parallel.peers import Peers
from compute.parallel.team import Team
from compute.parallel.views import SessionView, ViewedBlock
from compute.serve.ranks import SharedInbox
from protocol.daemon_block import Write, daemon_block_bytes, first_writes, switch_writes
from protocol.errors import InvalidValue, PeerLost, UnknownSaved
from protocol.layout import PAGE_TOKENS
from protocol.session_state import SessionHeader, WorkerBlock, WorkerBlockLayout


class OtherRank(Peers):
    """Rank 1 as rank 0 hears of it: it says what rank 0 says, but as ``said`` changes it."""

    def __init__(self, said: Callable[[int, bytes], bytes]) -> None:
        self.index, self.timeout_s = 0, 0.004
        self.messages = 0
        self._said = said

    def exchange(self, message: bytes) -> list[bytes]:
        self.messages += 1
        return [message, self._said(self.messages, message)]


def silent_from(first: int, lost: threading.Event) -> Callable[[int, bytes], bytes]:
    """It is ``lost`` at message ``first``."""

    def said(number: int, message: bytes) -> bytes:
        if number >= first:
            lost.set()
            raise PeerLost("rank 1 is gone")
        return message

    return said


@pytest.mark.parametrize("lost_at", [1, 3])
def test_what_takes_long_is_undone_where_a_rank_is_lost_meanwhile(lost_at: int) -> None:
    lost, undone = threading.Event(), list[bool]()
    other = OtherRank(silent_from(lost_at, lost))
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        Team(other, 1).patiently(lambda: lost.wait(60), undone.append)
    assert undone == [True]
    assert other.messages == lost_at


def test_nothing_is_undone_that_was_not_done() -> None:
    def act() -> None:
        raise UnknownSaved("nothing is saved")

    def undo(_: None) -> None:
        raise AssertionError

    with pytest.raises(PeerLost):
        Team(OtherRank(silent_from(1, threading.Event())), 1).patiently(act, undo)


def test_ranks_hear_of_each_other_while_one_takes_long() -> None:
    go_on = threading.Event()

    def said(number: int, message: bytes) -> bytes:
        if number == 5:
            go_on.set()
        return message

    other = OtherRank(said)
    assert Team(other, 1).patiently(lambda: go_on.wait(60)) is True
    assert other.messages > 5


def test_what_ranks_must_agree_on_is_named() -> None:
    team = Team(OtherRank(lambda _, message: message.replace(b"triton", b"stones")), 1)
    team.agree({"argument tokens": "4", "argument kernels": "none"})
    with pytest.raises(InvalidValue, match="argument kernels of rank 1 is 'stones'; allowed: that of rank 0: triton"):
        team.agree({"argument tokens": "4", "argument kernels": "triton"})


@pytest.mark.parametrize(
    ("argv", "world"),
    [(["serve"], "2"), (["serve", "--pipeline-parallel", "2"], "1"), (["generate"], "2")],
    ids=["serve", "serve-with-stages", "generate-with-neither"],
)
def test_commands_of_one_process_are_not_started_on_several_ranks(
    argv: list[str], world: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    assert cli.main(argv) == 64
    error = capsys.readouterr().err
    assert f"ranks of kvd-worker {argv[0]} is '2'; allowed: 1" in error
    assert "serve with --tensor-parallel, and generate with that or --pipeline-parallel, under torchrun" in error


def test_a_server_without_requests_is_heard_of_within_the_time_out_of_peers() -> None:
    """Else the other ranks would take rank 0 for lost."""
    worker: Any = SimpleNamespace(reports=True, team=OtherRank(lambda _, message: message), shared=lambda turn, _: turn)
    begin = time.monotonic()
    assert SharedInbox(worker).wait(60.0, busy=False)
    assert time.monotonic() - begin < 30.0


HEADER = SessionHeader(
    epoch=1,
    session=9,
    generation=3,
    uid=1000,
    holder_pid=77,
    holder_start=88,
    page_bytes=5000,
    page_stride=8192,
    extent_bytes=1 << 20,
    token_capacity=300,
    page_count=0,
    commit_bytes=0,
    encoding="q8g64",
    fingerprint=b"f" * 32,
    name="viewed",
)


class Commits(SessionView):
    """A session of which the owner commits a page whenever somebody looks, up to ``most`` rows. Then it may be lost."""

    name = "viewed"

    def __init__(self, most: int, timeout_s: float, *, lost: bool = False) -> None:
        self._team = Team(OtherRank(lambda _, message: message), 1)
        self._team.timeout_s = timeout_s
        self._daemon_map: Any = bytearray(daemon_block_bytes(HEADER))
        self.write(first_writes(HEADER) + switch_writes(HEADER, (), 1))
        self.looked = 0
        self._most, self._lost = most, lost

    def write(self, writes: list[Write]) -> None:
        for at, data in writes:
            self._daemon_map[at : at + len(data)] = data

    @property
    def committed_rows(self) -> int:
        self.looked += 1
        if self._lost and self.looked * PAGE_TOKENS > self._most:
            self.write(switch_writes(replace(HEADER, holder_pid=0, holder_start=0), (), 2))
        return min(self.looked * PAGE_TOKENS, self._most)


def test_a_viewed_page_is_at_home_when_its_owner_has_committed_it() -> None:
    session, page = Commits(2 * PAGE_TOKENS, 0.004), torch.empty(0)
    copyback = session.copyback(CpuDevice(), lambda _: None)
    for number in range(3):
        copyback.submit(number, page, page)
    copyback.poll()
    assert copyback.committed_pages == session.looked == 0
    copyback.wait_through(2)
    copyback.wait_through(1)
    assert copyback.committed_pages == session.looked == 2
    with pytest.raises(PeerLost, match=r"has committed 128 rows, and not 192 within 0\.004 s"):
        copyback.wait_through(3)
    assert copyback.committed_pages == 2


def test_an_owner_that_dies_is_not_waited_for() -> None:
    session = Commits(2 * PAGE_TOKENS, 1e9, lost=True)
    session.publish_commit(2 * PAGE_TOKENS)
    with pytest.raises(PeerLost, match="session 'viewed' has lost its owner: 128 rows are committed, not 192"):
        session.publish_commit(3 * PAGE_TOKENS)


def test_a_viewed_session_has_the_room_of_the_session() -> None:
    layout = WorkerBlockLayout(token_capacity=5, commit_bytes=0)
    buffer = bytearray(layout.block_bytes)
    header = layout.pack_header(9)
    buffer[: len(header)] = header
    for block in (WorkerBlock(memoryview(buffer), layout, 9), ViewedBlock(memoryview(buffer), layout, 9, [])):
        block.append_tokens([1, 2, 3])
        with pytest.raises(InvalidValue, match="tokens of the session is 6; allowed: at most 5"):
            block.append_tokens([4, 5, 6])
        assert block.tokens() == [1, 2, 3]
        block.append_tokens([4, 5])
        assert block.token_count == 5
