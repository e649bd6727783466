"""Who gets what: three uids, every verb, with what is their own, another's, forged and replayed. No wrong grant."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from protocol import messages
from protocol.block_messages import NO_LEASE
from protocol.handles import DeviceMemory, LeaseRef
from protocol.messages import DeviceAllocated, Done, ErrorReply, HandedOver, Reply, Request, SessionOpened
from tests.blackbox.daemon_process import DaemonProcess
from tests.blackbox.raw import FINGERPRINT, books
from tests.blackbox.uid_peer import UidPeer

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to run peers of other uids")

UIDS = (65534, 65533, 65532)
SAVED = ("save_session", "restore_session", "list_saved", "remove_saved")
KEY = bytes(range(32))
OPERATOR = {cls.__struct_config__.tag for cls in get_args(messages.OperatorRequest)}
PERMITTED = {"hello", "stat"}
"""Verbs that name nobody's things."""

ALL_VERBS = sorted(str(cls.__struct_config__.tag) for cls in get_args(messages.Request))
OF_OTHERS = [verb for verb in ALL_VERBS if verb not in PERMITTED]


@dataclass
class Owner:
    """A peer, and what it owns: a session that it holds, a stored one, VRAM, and blocks that it is writing."""

    peer: UidPeer
    held: SessionOpened
    stored: str
    memory: DeviceMemory
    space: int
    hold: int


def request(verb: str, asker: UidPeer, lease: LeaseRef, of: Owner) -> Request:
    """What ``asker`` sends under ``lease`` about what ``of`` owns."""
    seq, session, generation = asker.next_seq(), of.held.session, of.held.generation
    new = f"new-{asker.uid}-{seq}"
    requests: dict[str, Callable[[], Request]] = {
        "drain": lambda: messages.Drain(seq, False),
        "revoke_lease": lambda: messages.RevokeLease(seq, of.peer.lease.number),
        "end_session": lambda: messages.EndSession(seq, of.peer.uid, of.stored),
        "resize": lambda: messages.Resize(seq, "host.capacity", 1 << 26),
        "reload_report": lambda: messages.ReloadReport(seq),
        "create_session": lambda: messages.CreateSession(seq, lease, new, FINGERPRINT, "q8g64", 4096, 64, 0),
        "open_session": lambda: messages.OpenSession(seq, lease, of.stored, FINGERPRINT, "q8g64"),
        "fetch_pages": lambda: messages.FetchPages(seq, lease, session, generation, 0, 1),
        "view_session": lambda: messages.ViewSession(seq, lease, session, generation),
        "reattach_session": lambda: messages.ReattachSession(seq, lease, f"held-{of.peer.uid}"),
        "extend_session": lambda: messages.ExtendSession(seq, lease, session, generation, 1),
        "truncate_session": lambda: messages.TruncateSession(seq, lease, session, generation, 0),
        "detach_session": lambda: messages.DetachSession(seq, lease, session, generation),
        "close_session": lambda: messages.CloseSession(seq, lease, session, generation),
        "fork_session": lambda: messages.ForkSession(seq, lease, session, generation, 0, new),
        "find_prefix": lambda: messages.FindPrefix(seq, lease, FINGERPRINT, "q8g64", [bytes(32)]),
        "allocate_device": lambda: messages.AllocateDevice(seq, lease, "cpu", 1, "ring", session),
        "open_blocks": lambda: messages.OpenBlocks(seq, lease, FINGERPRINT, 4096, of.peer.lease),
        "map_blocks": lambda: messages.MapBlocks(seq, lease, of.space),
        "find_blocks": lambda: messages.FindBlocks(seq, lease, of.space, KEY),
        "pin_blocks": lambda: messages.PinBlocks(seq, lease, of.space, KEY, 0),
        "reserve_blocks": lambda: messages.ReserveBlocks(seq, lease, of.space, bytes(32)),
        "publish_blocks": lambda: messages.PublishBlocks(seq, lease, of.hold, b""),
        "release_blocks": lambda: messages.ReleaseBlocks(seq, lease, of.hold),
        "free_device": lambda: messages.FreeDevice(seq, lease, of.memory.handle),
        "save_session": lambda: messages.SaveSession(seq, of.stored),
        "restore_session": lambda: messages.RestoreSession(seq, of.stored, b"", ""),
        "remove_saved": lambda: messages.RemoveSaved(seq, of.stored),
        "list_saved": lambda: messages.ListSaved(seq),
    }
    return requests[verb]()


@pytest.fixture(scope="module")
def open_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon that every uid may connect to."""
    run_dir = Path(tempfile.mkdtemp(prefix="kvd-test-", dir="/tmp"))
    run_dir.chmod(0o755)
    state_dir = tmp_path_factory.mktemp("saved") / "state"
    with DaemonProcess(
        run_dir, socket_mode="0666", drain_timeout_s="0", disk_state_dir=str(state_dir), disk_capacity="64MiB"
    ) as process:
        yield process.wait_ready()
        assert process.stat().ledger == "balanced"
    shutil.rmtree(run_dir)


@pytest.fixture(scope="module")
def owners(open_daemon: DaemonProcess) -> Iterator[list[Owner]]:
    with ExitStack() as stack:
        found = []
        for uid in UIDS:
            peer = stack.enter_context(UidPeer(open_daemon.run_dir, uid))
            stored = create(peer, f"stored-{uid}")
            assert isinstance(peer.ask(messages.DetachSession(peer.next_seq(), peer.lease, stored.session, 1)), Done)
            held = create(peer, f"held-{uid}")
            allocated = peer.ask(messages.AllocateDevice(peer.next_seq(), peer.lease, "cpu", 1, "ring"))
            assert isinstance(allocated, DeviceAllocated)
            opened = peer.ask(messages.OpenBlocks(peer.next_seq(), peer.lease, FINGERPRINT, 4096, NO_LEASE))
            assert isinstance(opened, messages.BlocksOpened)
            reserved = peer.ask(messages.ReserveBlocks(peer.next_seq(), peer.lease, opened.space, KEY))
            assert isinstance(reserved, messages.BlocksReserved)
            found.append(Owner(peer, held, f"stored-{uid}", allocated.memory, opened.space, reserved.hold))
        yield found


def create(peer: UidPeer, name: str) -> SessionOpened:
    opened = peer.ask(messages.CreateSession(peer.next_seq(), peer.lease, name, FINGERPRINT, "q8g64", 4096, 640, 0))
    assert isinstance(opened, SessionOpened), opened
    return opened


def refused(daemon: DaemonProcess, act: Callable[[], Reply], *codes: str) -> None:
    """``act`` is answered by one of these errors and changes nothing."""
    before = books(daemon.stat())
    reply = act()
    assert isinstance(reply, ErrorReply), reply
    assert reply.code in codes, reply
    assert books(daemon.stat()) == before


def test_the_matrix_has_every_verb() -> None:
    assert set(ALL_VERBS) > PERMITTED
    assert set(OF_OTHERS) > OPERATOR


@pytest.mark.parametrize("verb", OF_OTHERS)
@pytest.mark.parametrize("how", ["foreign", "forged", "replayed", "stale"])
def test_what_is_not_ones_own_is_refused(open_daemon: DaemonProcess, owners: list[Owner], verb: str, how: str) -> None:
    """Of every pair of uids, under the asker's lease, the owner's, one of no number, and one of another epoch."""
    for asker in owners:
        for owner in owners:
            if owner is asker:
                continue
            _ask_for_anothers(open_daemon, asker, owner, verb, how)


def _ask_for_anothers(daemon: DaemonProcess, asker: Owner, owner: Owner, verb: str, how: str) -> None:
    lease = {
        "foreign": asker.peer.lease,
        "replayed": asker.peer.lease,
        "forged": owner.peer.lease,
        "stale": LeaseRef(owner.peer.lease.epoch ^ 1, asker.peer.lease.number),
    }[how]
    message = request(verb, asker.peer, lease, owner)
    if how == "replayed":
        message = msgspec.structs.replace(message, seq=1)
        refused(daemon, lambda: asker.peer.ask(message), "replayed")
    elif verb in OPERATOR:
        refused(daemon, lambda: asker.peer.ask(message), "permission_refused")
    elif verb in SAVED:
        if verb == "list_saved":
            reply = asker.peer.ask(message)
            assert isinstance(reply, messages.SavedSessions)
            assert not reply.sessions
        else:
            refused(daemon, lambda: asker.peer.ask(message), "unknown_session", "unknown_saved")
    elif how == "forged":
        refused(daemon, lambda: asker.peer.ask(message), "unknown_lease")
    elif how == "stale":
        refused(daemon, lambda: asker.peer.ask(message), "stale_epoch")
    elif verb == "find_prefix":
        found = asker.peer.ask(message)
        assert isinstance(found, messages.PrefixFound)
        assert found.session == 0
    elif verb == "open_blocks":  # of one's own, and the lease of another that is named with it is passed over
        before = daemon.stat().blocks
        assert isinstance(asker.peer.ask(message), messages.BlocksOpened)
        assert daemon.stat().blocks == before
    elif verb != "create_session":  # one of one's own under one's own lease is everybody's right
        refused(daemon, lambda: asker.peer.ask(message), "unknown_session", "unknown_handle", "unknown_blocks")


def test_grants_of_others_and_invented_ones(open_daemon: DaemonProcess, owners: list[Owner]) -> None:
    for asker in owners:
        for owner in owners:
            if owner is asker:
                continue
            for grant in (
                owner.memory.grant,
                owner.held.daemon_block.grant,
                owner.held.worker_block.grant,
                owner.memory.grant ^ 1,
                owner.memory.handle,
                0,
            ):
                reply, came = asker.peer.ask_handle(messages.Claim(grant))
                assert isinstance(reply, ErrorReply)
                assert (reply.code, came) == ("grant_refused", False)


def test_vram_is_not_handed_over_for_anothers_session(open_daemon: DaemonProcess, owners: list[Owner]) -> None:
    first, second = owners[:2]
    hand_over = messages.HandOver("cpu", 1, 2 << 20, "ring", second.held.session)
    reply, _ = first.peer.ask_handle(hand_over)
    assert not isinstance(reply, HandedOver)


def test_what_is_ones_own_is_granted_once(open_daemon: DaemonProcess, owners: list[Owner]) -> None:
    """Last in this file: it uses up what the others try to get at. Without it a daemon that refuses all would pass."""
    for owner in owners:
        peer = owner.peer
        claim = messages.Claim(owner.memory.grant)
        claimed, came = peer.ask_handle(claim)
        assert (isinstance(claimed, messages.Claimed), came) == (True, True)
        again, came = peer.ask_handle(claim)
        assert (isinstance(again, ErrorReply), came) == (True, False)
        for verb in (
            "extend_session",
            "find_prefix",
            "open_session",
            "allocate_device",
            "free_device",
            "open_blocks",
            "publish_blocks",
            "find_blocks",
            "pin_blocks",
            "close_session",
        ):
            reply = peer.ask(request(verb, peer, peer.lease, owner))
            assert not isinstance(reply, ErrorReply), reply
        assert owner.held.session not in [session.session for session in open_daemon.stat().sessions]
