"""What the daemon has, without its sockets: books, tiers, leases, sessions. Requests and ends of leases act on it."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from kvd.alloc.ledger import Ledger
from kvd.blocks.inheritance import take_up
from kvd.blocks.room import BlockLimits
from kvd.blocks.spaces import Spaces
from kvd.blocks.spilling import BlockSpilling
from kvd.blocks.store import Blocks
from kvd.config import Config
from kvd.device_memory import DeviceMemoryVerbs
from kvd.leases import Lease, Leases
from kvd.live_settings import LiveSettings
from kvd.logs import Log
from kvd.metrics.counters import Counters
from kvd.metrics.token_gaps import TokenGaps
from kvd.operators import Operators
from kvd.peers import Peer, Process
from kvd.resizing import Resizing
from kvd.saved.copies import Copies
from kvd.saved.jobs import Job, Jobs
from kvd.saved.lazy import LazyRestores
from kvd.saved.saving import Saving
from kvd.saved.spilling import Spilling
from kvd.sessions.forks import Forks
from kvd.sessions.inheritance import Inheritance
from kvd.sessions.registry import Sessions
from kvd.sessions.remains import look
from kvd.sessions.session import HOST_TIER
from kvd.tiers.disk import StateDirectory
from kvd.tiers.driver import DeviceDriver
from kvd.tiers.driver_cpu import CpuDriver
from kvd.tiers.driver_cuda import CudaDriver
from kvd.tiers.host_ram import HostRam
from kvd.tiers.segment import Progress
from kvd.tiers.vram import Vram
from protocol.errors import Draining, LedgerMismatch, SessionBusy
from protocol.messages import DeviceInfo

BALANCED = "balanced"
"""What a check says when the books add up."""


class Node:
    """Takes the memory of all tiers. ``prefix`` begins the names of all shared memory. ``slots`` is `HostRam`'s.

    Raises what the tiers raise, most of all `OutOfCapacity` and `NoDevice`; then nothing is left.
    """

    def __init__(self, config: Config, prefix: str, log: Log, progress: Progress, slots: int = 0) -> None:
        self._log = log
        self._started = time.monotonic()
        self.draining = False
        self.drain_failure = ""
        """Why the last draining did not come to its end, if it did not."""
        self.verdict = BALANCED
        self._checked = -1
        self.drain: Callable[[bool], None] = lambda _: None
        """Has the daemon drain and stop; with True, when every session is on disk. Set by whoever runs the loop."""
        self.revoke: Callable[[Lease], None] = lambda _: None
        """Ends a lease's connection. Set by whoever has the connections."""
        self.retire: Callable[[Lease], None] = lambda _: None
        """Ends a quarantined lease that holds nothing. Set by whoever has the connections."""
        self.operators = Operators(config)
        self.counters = Counters()
        self.gaps = TokenGaps()
        self.ledger = Ledger()
        driver = make_driver(config)
        self.vram = Vram(driver, self.ledger, {info.uuid: config.vram.capacity for info in driver.devices()})
        slots = max(slots, config.host.capacity // config.host.extent)
        remains = look(prefix, config.host.extent, slots, log)
        numa_node = None if config.host.numa_node < 0 else config.host.numa_node
        self.host = HostRam(
            self.ledger,
            capacity_bytes=config.host.capacity,
            extent_bytes=config.host.extent,
            prefix=prefix,
            numa_node=numa_node,
            progress=progress,
            tier=HOST_TIER,
            left=remains.extents,
            slots=slots,
        )
        self.ledger.resize_tier(HOST_TIER, config.host.capacity + config.host.state_capacity)
        self.leases = Leases(secrets.randbits(63), config.limits.max_leases)
        self.sessions = Sessions(self.leases.epoch, prefix, self.ledger, self.host, config.limits, log)
        self.spaces = Spaces(self.leases.epoch, prefix, self.ledger, self.host)
        self.sessions.frames.cached_bytes = self.spaces.nbytes
        self.sessions.frames.give_way = self.spaces.give_way
        self.inheritance = Inheritance(self.ledger, self.host, self.leases, self.sessions, log)
        self.inheritance.take_up(remains)
        left = set(remains.extents)
        self.jobs = Jobs()
        self.copies = None
        if config.disk.state_dir:
            directory = StateDirectory(Path(config.disk.state_dir), config.disk.capacity)
            self.copies = Copies(directory, self.sessions, self.host, self.jobs, log)
        self.lazy = LazyRestores(self.copies, self.sessions, self.jobs, log)
        self.spilling = Spilling(self.copies, self.sessions, self.lazy, log)
        self.saving = Saving(self.copies, self.sessions, self.spilling, self.lazy)
        self.forks = Forks(self.sessions)
        saved = self.copies.directory if self.copies else None
        self.block_spilling = BlockSpilling(saved, self.spaces, self.ledger, self.host, self.jobs, log)
        self.block_spilling.open_files()
        self.spaces.attach = self.block_spilling.attach
        self.blocks = Blocks(self.spaces, self.block_spilling, self.host, self.sessions.granter)
        self.blocks.quit = self._quit
        take_up(prefix, left, self.ledger, self.host, self.spaces, self.blocks, self.inheritance.holder, log)
        self.device_memory = DeviceMemoryVerbs(self.vram, config.limits.max_handles)
        self._driver = driver
        resizing = Resizing(self.ledger, self.host, self.vram, saved, self.jobs, numa_node, self.spaces.vacate)
        self.live = LiveSettings(config, resizing, log)
        self.limit(config)

    def devices(self) -> list[DeviceInfo]:
        """The devices, with what of their memory may be given."""
        capacity = self.live.config.vram.capacity
        return [
            DeviceInfo(info.uuid, info.name, capacity, self._driver.granularity(info.uuid))
            for info in self._driver.devices()
        ]

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self._started

    def require_accepting(self) -> None:
        """Raise `Draining` if the daemon takes no new work."""
        if self.draining:
            raise Draining("the daemon is shutting down: it takes no new leases, sessions, pages or device memory")

    def end_stored(self, uid: int, name: str) -> None:
        """End a session that nobody holds, damaged or not, whosever it is. For operators.

        Raises `UnknownSession`, or `SessionBusy`: whoever holds it may still write to its pages.
        """
        session = self.sessions.find(uid, name)
        self.sessions.require_idle(session)
        if session.lease is not None:
            number, pid = session.lease.number, session.lease.peer.pid
            raise SessionBusy(
                f"session {name!r} of uid {uid} is held by lease {number}, process {pid}: revoke it and end that first",
                session=session.number,
                lease=number,
                pid=pid,
            )
        self.sessions.end(session)

    def open_lease(self, peer: Peer, process: Process, client: str) -> Lease:
        """A new lease for ``process``, which is closed if it does not become one."""
        try:
            self.require_accepting()
            lease = self.leases.open(peer, process, client)
        except BaseException:
            process.close()
            raise
        self.counters.leases_opened += 1
        self._log.info("lease opened", lease=lease.number, peer=str(peer), client=client)
        return lease

    def lease_disconnected(self, lease: Lease) -> bool:
        """The lease's connection ended: it ends with it, or is quarantined. Returns whether it ended."""
        if lease.process.is_dead() or self._holds_nothing(lease):
            self.lease_ended(lease)
            return True
        lease.quarantined = True
        self.counters.leases_quarantined += 1
        lease.revoke_all()
        nbytes = self.ledger.quarantine(lease.number)
        self._log.info("lease quarantined", lease=lease.number, peer=str(lease.peer), committed=nbytes)
        return False

    def lease_ended(self, lease: Lease) -> None:
        """The lease's process is dead, or it holds nothing: all that it held goes back or is stored."""
        with ExitStack() as steps:  # each is taken even if another fails; the last one first
            steps.callback(self.leases.end, lease)
            steps.callback(self.gaps.lease_ended, lease)
            steps.callback(self.host.lease_gone, lease.number)
            steps.callback(self.blocks.lease_ended, lease)
            steps.callback(self.device_memory.lease_ended, lease)
            steps.callback(self.sessions.lease_ended, lease)
        self.counters.leases_ended += 1
        self._log.info("lease ended", lease=lease.number, peer=str(lease.peer), age_s=round(lease.age_s, 3))

    def limit(self, config: Config) -> None:
        """What is there stays, blocks apart; new leases, sessions and handles keep to these limits."""
        limits, blocks = config.limits, config.blocks
        self.block_spilling.limit(blocks.disk)
        self.spaces.limit(BlockLimits(blocks.capacity, blocks.per_uid), config.host.state_capacity // 2)
        self.leases.limit = limits.max_leases
        self.sessions.limit(limits)
        self.device_memory.limit = limits.max_handles

    def hibernate(self) -> Job:
        """Have every session on disk. Raises `OsFailure` naming those that could not be written."""
        yield from self.lazy.complete()
        done = yield from self.spilling.hibernate()
        yield from self.block_spilling.hibernate()
        return done

    def look(self) -> str:
        """`check`, but the books are not added up again if nothing in them has changed since they were."""
        self._inspect()
        return self.verdict if self.ledger.changes == self._checked else self._add_up()

    def check(self) -> str:
        """`BALANCED`, or the arithmetic of what does not add up; damaged sessions are flagged."""
        self._inspect()
        return self._add_up()

    def _inspect(self) -> None:
        cut = self.host.damaged_extents()
        self.sessions.inspect(cut)
        self.spaces.drop(cut)
        self.lazy.forget_ended()
        self.gaps.look(self.leases)

    def _add_up(self) -> str:
        self._checked = self.ledger.changes
        try:
            self.ledger.check()
        except LedgerMismatch as error:
            self._log.error("ledger does not add up", arithmetic=error.message)
            self.verdict = error.message
        else:
            self.verdict = BALANCED
        return self.verdict

    def close(self) -> None:
        """Give everything back, whoever holds it."""
        with ExitStack() as steps:  # each is taken even if another fails; the last one first
            for lease in self.leases:
                steps.callback(self.leases.end, lease)
            steps.callback(self.host.close)
            steps.callback(self.vram.close)
            steps.callback(self.blocks.close)
            steps.callback(self.sessions.close_all)
            if self.copies is not None:
                steps.callback(self.copies.close)
            steps.callback(self.block_spilling.close)
            steps.callback(self.jobs.close)

    def _quit(self, lease: Lease) -> None:
        """By its process's own word nothing that the lease had of blocks is used, and another has what it mapped."""
        if lease.quarantined and self.is_done(lease):
            self.retire(lease)

    def is_done(self, lease: Lease) -> bool:
        """Whether it has nothing, and no blocks are kept for its process."""
        return not (self.is_on_the_books(lease) or self.spaces.holders_of(lease))

    def is_on_the_books(self, lease: Lease) -> bool:
        """Whether any memory stands on the lease's accounts."""
        return any(entry.account.lease == lease.number for entry in self.ledger.entries())

    def _holds_nothing(self, lease: Lease) -> bool:
        """Whether there is no memory that its process might still use."""
        return not (self.host.has_mapped(lease.number) or self.is_on_the_books(lease))


def make_driver(config: Config) -> DeviceDriver:
    """The driver that the settings name; raises `NoDevice` if it cannot be used. Nothing else is tried."""
    if config.device == "cuda":
        return CudaDriver()
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return CpuDriver(max(physical, config.vram.capacity))
