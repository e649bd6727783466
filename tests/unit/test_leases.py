"""Leases and grants without sockets: who may speak, and what may be claimed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvd.leases import Lease, Leases
from kvd.peers import Peer, Process, peer_of_address, peer_of_socket
from protocol.errors import GrantRefused, InvalidValue, PermissionRefused, StaleEpoch, UnknownLease
from protocol.handles import LeaseRef

EPOCH = 7


@pytest.fixture
def leases() -> Iterator[Leases]:
    registry = Leases(EPOCH, limit=2)
    yield registry
    for lease in registry:
        registry.end(lease)


def open_lease(leases: Leases, client: str = "worker") -> Lease:
    """A lease of this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        peer = peer_of_socket(ours)
        process = Process(ours, peer)
    try:
        return leases.open(peer, process, client)
    except InvalidValue:
        process.close()
        raise


def test_identity_comes_from_the_kernel() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        peer = peer_of_socket(ours)
        assert peer == Peer(os.getuid(), os.getgid(), os.getpid())
        process = Process(ours, peer)
        assert not process.is_dead()
        assert not os.get_inheritable(process.pidfd)
        with open("/proc/self/stat") as stat:
            assert process.start == int(stat.read().rpartition(")")[2].split()[19])
        process.close()
    assert peer_of_address("localhost:1000:100:4242") == Peer(1000, 100, 4242)


def test_process_that_ended_or_is_out_of_sight_gets_no_lease() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        with pytest.raises(PermissionRefused, match="has ended already"):
            Process(ours, Peer(os.getuid(), os.getgid(), child.pid))
        with pytest.raises(PermissionRefused, match="pid namespace"):
            Process(ours, Peer(os.getuid(), os.getgid(), 0))


def test_only_its_process_speaks_for_a_live_lease(leases: Leases) -> None:
    lease = open_lease(leases)
    reference = leases.reference(lease)
    assert leases.find(reference, lease.peer) is lease
    with pytest.raises(StaleEpoch, match="epoch 6; this daemon's is 7"):
        leases.find(LeaseRef(EPOCH - 1, lease.number), lease.peer)
    for stranger in (Peer(lease.peer.uid + 1, 0, lease.peer.pid), Peer(lease.peer.uid, 0, lease.peer.pid + 1)):
        with pytest.raises(UnknownLease):
            leases.find(reference, stranger)
    for number in (0, -1, lease.number + 1):
        with pytest.raises(UnknownLease):
            leases.find(LeaseRef(EPOCH, number), lease.peer)
    lease.quarantined = True
    with pytest.raises(UnknownLease):
        leases.find(reference, lease.peer)


def test_numbers_are_never_used_again(leases: Leases) -> None:
    numbers = []
    for _ in range(3):
        lease = open_lease(leases)
        numbers.append(lease.number)
        leases.end(lease)
    assert numbers == [1, 2, 3]
    assert len(leases) == 0


def test_limit_and_names(leases: Leases) -> None:
    for bad in ("", "x" * 65, "a\nb", "a\x1b[31m"):
        with pytest.raises(InvalidValue, match="client"):
            open_lease(leases, bad)
    open_lease(leases)
    open_lease(leases)
    with pytest.raises(InvalidValue, match="number of leases is 3; allowed: at most 2"):
        open_lease(leases)


def test_a_grant_is_used_once_and_only_by_its_lease(leases: Leases) -> None:
    mine, other = open_lease(leases), open_lease(leases)
    number = mine.grant(5, lambda: 42)
    with pytest.raises(GrantRefused):
        other.redeem(number)
    grant = mine.redeem(number)
    assert (grant.handle, grant.open()) == (5, 42)
    with pytest.raises(GrantRefused):
        mine.redeem(number)


def test_revoked_grants_are_refused_like_unknown_ones(leases: Leases) -> None:
    lease = open_lease(leases)
    kept, revoked, used = (lease.grant(handle, lambda: 0) for handle in range(3))
    lease.redeem(used)
    lease.revoke(revoked, used)
    words = set()
    for number in (revoked, used, revoked ^ 1, 0):
        with pytest.raises(GrantRefused) as refused:
            lease.redeem(number)
        words.add(refused.value.message)
    assert len(words) == 1, "the answer does not tell which of them it was"
    assert lease.redeem(kept).handle == 0
    last = lease.grant(9, lambda: 0)
    lease.revoke_all()
    with pytest.raises(GrantRefused):
        lease.redeem(last)


def test_grants_are_not_guessed_from_one_another(leases: Leases) -> None:
    lease = open_lease(leases)
    numbers = [lease.grant(1, lambda: 0) for _ in range(1000)]
    assert len(set(numbers)) == 1000
    assert all(1 <= number < 1 << 64 for number in numbers)
    assert sum(number >> 32 == numbers[0] >> 32 for number in numbers) == 1
