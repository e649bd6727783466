"""The worker's side of the simulation: a process that holds sessions by what the daemon granted it."""

from __future__ import annotations

import ctypes
import itertools
import os
from dataclasses import dataclass

from kvd.tiers.mapping import SharedMapping
from protocol.daemon_block import read_daemon_block, split_entries
from protocol.handles import DeviceMemory, Extent, LeaseRef, SharedMemory
from protocol.messages import Claim, Claimed, SessionOpened
from protocol.session_state import WorkerBlock, WorkerBlockLayout
from tests.simulation.daemon import Connection, SimulatedDaemon, SimulatedProcess
from tests.simulation.model import COMMIT_BYTES, MARK, Page

_names = itertools.count(1)


class Speaker:
    """Who makes requests: a connection to the control socket."""

    def __init__(self, process: SimulatedProcess) -> None:
        self.process = process
        self.hang_up()

    def hang_up(self) -> None:
        """The next request goes over another connection."""
        self.identity = b"%d-%d" % (self.process.peer.pid, next(_names))
        self.seq = 0


@dataclass
class Held:
    """A session as its worker has it. ``is_sealed``: its rows moved back, and the daemon has not truncated it yet."""

    number: int
    generation: int
    block: WorkerBlock
    mapping: SharedMapping
    fds: list[int]
    is_sealed: bool = False

    def table(self) -> tuple[tuple[int, ...], set[int]]:
        """The frames of its pages, and which pages are absent, as the daemon's block has it."""
        size = os.fstat(self.fds[0]).st_size
        return split_entries(read_daemon_block(os.pread(self.fds[0], size, 0))[1])

    def frames(self) -> tuple[int, ...]:
        return self.table()[0]

    def release(self) -> None:
        self.block.release()
        self.mapping.close()
        for fd in self.fds:
            os.close(fd)


@dataclass
class Vram:
    """Device memory that was claimed: what it is needed for to hand it over."""

    fd: int
    requested: int
    committed: int


class SimulatedWorker:
    """One process with at most one live lease. Raises `AssertionError` where the daemon does not give what it said."""

    def __init__(self, process: SimulatedProcess) -> None:
        self.process = process
        self.uid = process.peer.uid
        self.speaker = Speaker(process)
        self.connection = Connection(process)
        self.lease = LeaseRef(0, 0)
        self.held: dict[str, Held] = {}
        self.extents: dict[int, int] = {}
        self.vram: dict[int, Vram] = {}
        self.lost_vram: list[Vram] = []
        self.is_orphan = False
        """Whether the daemon of its lease is dead."""
        self.spent: list[int] = []
        """Grants that are used up, or revoked."""

    @property
    def fds(self) -> set[int]:
        every = [*self.extents.values(), *(vram.fd for vram in [*self.vram.values(), *self.lost_vram])]
        return {*every, *(fd for held in self.held.values() for fd in held.fds)}

    def claim(self, daemon: SimulatedDaemon, memory: SharedMemory | DeviceMemory) -> int:
        """A descriptor of what was granted."""
        reply, fds = daemon.send(self.connection, Claim(memory.grant), [])
        assert isinstance(reply, Claimed), reply
        assert (reply.handle, len(fds)) == (memory.handle, 1)
        self.spent.append(memory.grant)
        return fds[0]

    def adopt(self, daemon: SimulatedDaemon, extents: list[Extent]) -> None:
        for extent in extents:
            fd = self.claim(daemon, extent.memory)
            if extent.number in self.extents:
                os.close(self.extents[extent.number])
            self.extents[extent.number] = fd

    def take(self, daemon: SimulatedDaemon, name: str, opened: SessionOpened, capacity: int) -> Held:
        """Have the session that the daemon has opened."""
        self.adopt(daemon, opened.extents)
        if name in self.held:  # it was reattached
            self.let_go(name)
        fds = [self.claim(daemon, opened.daemon_block), self.claim(daemon, opened.worker_block)]
        layout = WorkerBlockLayout(capacity, COMMIT_BYTES)
        assert os.fstat(fds[1]).st_size == opened.worker_block.nbytes == layout.block_bytes
        mapping = SharedMapping(fds[1], layout.block_bytes)
        view = memoryview((ctypes.c_char * layout.block_bytes).from_address(mapping.address)).cast("B")
        block = WorkerBlock(view, layout, opened.session)
        self.held[name] = Held(opened.session, opened.generation, block, mapping, fds)
        return self.held[name]

    def let_go(self, name: str) -> None:
        self.held.pop(name).release()

    def read(self, frame: int, stride: int) -> tuple[bytes, bytes]:
        """The marks at both ends of a page."""
        fd, start = self.extents[frame >> 32], (frame & 0xFFFFFFFF) * stride
        return os.pread(fd, MARK, start), os.pread(fd, MARK, start + stride - MARK)

    def write(self, page: Page, stride: int, mark: bytes, *, tail: bool) -> None:
        fd, start = self.extents[page.frame >> 32], (page.frame & 0xFFFFFFFF) * stride
        os.pwrite(fd, mark, start + (stride - MARK if tail else 0))
        if tail:
            page.tail = mark
        else:
            page.head = mark

    def end(self) -> None:
        """The process ends: the kernel unmaps and closes everything."""
        self.process.alive = False
        for name in list(self.held):
            self.let_go(name)
        for fd in self.fds:
            os.close(fd)
        self.extents.clear()
        self.vram.clear()
        self.lost_vram.clear()
