"""Leases: which worker processes may hold memory, and the grants by which descriptors reach them.

A lease lives as long as its connection to the handle socket (`kvd.handle_socket`) *and* its process. When only the
connection ends, the process may still have everything mapped: the lease is in quarantine, and nothing that it holds is
reused, until its process is known dead. What a lease holds is in the ledger and in `kvd.sessions.registry`, not here.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvd.peers import Peer, Process
from kvd.report_block import ReportBlock
from protocol.errors import GrantRefused, InvalidValue, StaleEpoch, UnknownLease
from protocol.handles import LeaseRef

CLIENT_NAME_LIMIT = 64
"""Characters of the name that a client gives itself."""


@dataclass(frozen=True)
class Grant:
    """A promise of one descriptor of ``handle``. ``open`` makes the descriptor; whoever calls it closes it."""

    handle: int
    open: Callable[[], int]


class Lease:
    """One worker process. ``extents`` are those that it was given, and whether to read only, ``device_grants`` the last
    grant of each handle, ``report`` its report block, once it has asked for one.

    ``is_inherited``: an earlier run of the daemon gave it; its process has not said yet that it goes on.
    """

    def __init__(self, number: int, peer: Peer, process: Process, client: str) -> None:
        self.number = number
        self.peer = peer
        self.process = process
        self.client = client
        self.quarantined = False
        self.is_inherited = False
        self.extents: set[tuple[int, bool]] = set()
        self.device_grants: dict[int, int] = {}
        self.report: ReportBlock | None = None
        self._opened = time.monotonic()
        self._grants: dict[int, Grant] = {}

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._opened

    def grant(self, handle: int, open_descriptor: Callable[[], int]) -> int:
        """A new single-use grant of this lease."""
        number = 1 + secrets.randbelow((1 << 64) - 1)
        self._grants[number] = Grant(handle, open_descriptor)
        return number

    def redeem(self, number: int) -> Grant:
        """The grant of this number, which is used by that; raises `GrantRefused` if there is none."""
        grant = self._grants.pop(number, None)
        if grant is None:
            raise GrantRefused(f"grant is unknown, used, or not of lease {self.number}", lease=self.number)
        return grant

    def open_report(self) -> int:
        """A descriptor of its report block, made now if it has none; the caller closes it. Raises `OsFailure`."""
        if self.report is None:
            self.report = ReportBlock()
        return self.report.open()

    def revoke(self, *numbers: int) -> None:
        """Take grants back, those that were used already included."""
        for number in numbers:
            self._grants.pop(number, None)

    def revoke_all(self) -> None:
        self._grants.clear()


class Leases:
    """All leases of this run of the daemon, which ``epoch`` names. ``limit`` bounds those opened from now on."""

    def __init__(self, epoch: int, limit: int) -> None:
        self.epoch = epoch
        self.limit = limit
        self._numbers = itertools.count(1)
        self._leases: dict[int, Lease] = {}

    def __iter__(self) -> Iterator[Lease]:
        return iter(list(self._leases.values()))

    def __len__(self) -> int:
        return len(self._leases)

    def open(self, peer: Peer, process: Process, client: str) -> Lease:
        """A new lease, which owns ``process`` from now on. Raises `InvalidValue` for a bad name or one too many."""
        require_client_name(client)
        if len(self._leases) >= self.limit:
            raise InvalidValue("number of leases", len(self._leases) + 1, f"at most {self.limit} (limits.max_leases)")
        lease = Lease(next(self._numbers), peer, process, client)
        self._leases[lease.number] = lease
        return lease

    def inherit(self, peer: Peer, process: Process) -> Lease:
        """A quarantined lease for a living process that held sessions of an earlier run. Owns ``process``."""
        lease = Lease(next(self._numbers), peer, process, "from before the daemon started")
        lease.quarantined = lease.is_inherited = True
        self._leases[lease.number] = lease
        return lease

    def reference(self, lease: Lease) -> LeaseRef:
        """How requests name the lease."""
        return LeaseRef(self.epoch, lease.number)

    def find(self, reference: LeaseRef, peer: Peer) -> Lease:
        """The lease that ``peer``, as the kernel gave it, may speak for.

        Raises `StaleEpoch` for a lease of an earlier run, `UnknownLease` for one that is not live or another process's.
        """
        if reference.epoch != self.epoch:
            raise StaleEpoch(
                f"lease {reference.number} is of epoch {reference.epoch}; this daemon's is {self.epoch}",
                given=reference.epoch,
                current=self.epoch,
            )
        lease = self._leases.get(reference.number)
        if lease is None or lease.quarantined or (lease.peer.uid, lease.peer.pid) != (peer.uid, peer.pid):
            raise UnknownLease(f"{peer} has no live lease {reference.number}", lease=reference.number)
        return lease

    def numbered(self, number: int) -> Lease:
        """The lease of this number, whoever asks, quarantined or not; raises `UnknownLease`."""
        lease = self._leases.get(number)
        if lease is None:
            raise UnknownLease(f"there is no lease {number}", lease=number)
        return lease

    def end(self, lease: Lease) -> None:
        """Forget a lease whose process is dead, or which holds nothing."""
        del self._leases[lease.number]
        lease.revoke_all()
        lease.process.close()
        if lease.report is not None:
            lease.report.close()


def require_client_name(client: str) -> str:
    """``client``, which must be short and printable; raises `InvalidValue` otherwise."""
    if not 1 <= len(client) <= CLIENT_NAME_LIMIT or not client.isprintable():
        raise InvalidValue("client", client[: 2 * CLIENT_NAME_LIMIT], f"1 to {CLIENT_NAME_LIMIT} printable characters")
    return client
