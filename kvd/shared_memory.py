"""Shared memory as replies name it: a handle, and a grant for the lease that may claim the descriptor."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import partial

from kvd.leases import Lease
from kvd.sessions.session import Session
from kvd.tiers.host_ram import HostRam
from protocol.handles import Extent, SharedMemory


class SharedMemoryGranter:
    """Makes the grants for state blocks and extents."""

    def __init__(self, host: HostRam) -> None:
        self._host = host
        self._handles = itertools.count(1)

    def blocks(self, session: Session, lease: Lease) -> tuple[SharedMemory, SharedMemory]:
        """The daemon block, read-only, and the worker block. The session remembers the grants, to revoke them."""
        daemon, worker = session.blocks.daemon, session.blocks.worker
        shared = (
            self._share(lease, daemon.nbytes, True, partial(daemon.open_fd, read_only=True)),
            self._share(lease, worker.nbytes, False, partial(worker.open_fd, read_only=False)),
        )
        session.grants = [memory.grant for memory in shared]
        return shared

    def view_of_blocks(self, session: Session, lease: Lease) -> tuple[SharedMemory, SharedMemory]:
        """Both blocks, read-only, for a lease that does not hold the session.

        The session remembers these grants too, in place of the lease's earlier ones.
        """
        lease.revoke(*session.viewers.get(lease, ()))
        daemon, worker = (
            self._share(lease, segment.nbytes, True, partial(segment.open_fd, read_only=True))
            for segment in (session.blocks.daemon, session.blocks.worker)
        )
        session.viewers[lease] = [daemon.grant, worker.grant]
        return daemon, worker

    def extents(self, numbers: Iterable[int], lease: Lease, *, read_only: bool = False) -> list[Extent]:
        """Those extents that ``lease`` was not given before. They stay with their uid while its process may live."""
        new = []
        for number in sorted(set(numbers)):
            if (number, read_only) in lease.extents:
                continue
            open_descriptor = partial(self._host.open_fd, number, read_only=read_only)
            new.append(Extent(number, self._share(lease, self._host.extent_bytes, read_only, open_descriptor)))
            self._host.granted(number, lease.number)
            lease.extents.add((number, read_only))
        return new

    def _share(self, lease: Lease, nbytes: int, read_only: bool, open_descriptor: Callable[[], int]) -> SharedMemory:
        handle = next(self._handles)
        return SharedMemory(handle, nbytes, read_only, lease.grant(handle, open_descriptor))
