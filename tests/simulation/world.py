"""Daemon, workers and faults from one seed, in one thread, held against the model after every step."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from kvd.config import Config, DiskConfig, HostConfig, LimitsConfig, VramConfig
from kvd.peers import Peer
from protocol.messages import PROTOCOL_MAJOR, PROTOCOL_MINOR, ErrorReply, Hello, Reply, Request, Stat, Welcome
from tests.simulation.audit import (
    DISK_BYTES,
    EXTENT_BYTES,
    EXTENTS,
    FAULTS,
    STATE_BYTES,
    VRAM_BYTES,
    Ask,
    Audit,
    Operation,
    Steps,
)
from tests.simulation.daemon import Processes, SimulatedDaemon, SimulatedProcess, bury, open_files
from tests.simulation.model import Image, Key, Lease, Model
from tests.simulation.observer import SHM, Observer
from tests.simulation.system import Killed, System, installed
from tests.simulation.worker import SimulatedWorker, Speaker

KILLED_WITHIN = {"fork": 16, "create": 12, "extend": 3, "truncate": 3, "open_stored": 3, "detach": 2, "step": 10}
"""How many calls that change anything these make, more or less: the daemon dies before one of them."""


class World(Audit):
    """Everything, and the steps that all operations are made of. Use `simulated_world` to make one."""

    def __init__(self, seed: int, folder: Path, system: System, processes: Processes) -> None:
        self.chance = random.Random(seed)
        self.system = system
        self.on_death: Callable[[World, Operation | None], None] = lambda _world, _operation: None
        """Starts the next daemon, after the operation amid which this one has died."""
        self.processes = processes
        self.folder = folder
        self.prefix = f"/simulated-kvd-{os.getpid()}"
        self.observer = Observer(self.prefix, folder / "state")
        self.model = Model(
            extents=EXTENTS,
            extent_bytes=EXTENT_BYTES,
            state_bytes=STATE_BYTES,
            vram_bytes=VRAM_BYTES,
            disk_bytes=DISK_BYTES,
        )
        self.workers: list[SimulatedWorker] = []
        self.speakers: list[Speaker] = []
        self.pending: dict[tuple[bytes, int], Operation] = {}
        self.done: Counter[str] = Counter()
        self.trace = xxhash.xxh3_64()
        self.zombies: dict[Key, Image] = {}
        """Spilled files that could not be removed when their session came back."""
        self.returning: set[Key] = set()
        self.incomplete: set[Key] = set()
        self.kept_files: set[Key] = set()
        self.has_come_back = False
        self.current: Operation | None = None
        self.serial = 0
        self.steps_done = 0
        self.daemon_starts = 0
        self.fault_share = 0.2
        self.kill_share = 0.03
        self._baseline = open_files()
        self.admin = self.speaker(0)
        self.start()

    def speaker(self, uid: int) -> Speaker:
        """A process that only asks."""
        speaker = Speaker(self.new_process(uid))
        self.speakers.append(speaker)
        return speaker

    def new_process(self, uid: int) -> SimulatedProcess:
        pid = 10_000_000 + len(self.processes)
        process = SimulatedProcess(Peer(uid, uid, pid), self.chance.randrange(1 << 40))
        self.processes[pid] = process
        return process

    def config(self) -> Config:
        return Config(
            run_dir=str(self.folder),
            device="cpu",
            host=HostConfig(EXTENTS * EXTENT_BYTES, EXTENT_BYTES, STATE_BYTES),
            vram=VramConfig(VRAM_BYTES),
            disk=DiskConfig(str(self.folder / "state"), DISK_BYTES),
            limits=self.model.limits,
        )

    def start(self) -> None:
        self.daemon = SimulatedDaemon(self.config(), self.prefix)
        self.model.limits = LimitsConfig()
        self.daemon.node.limit(self.config())
        self.inherited = {lease.number for lease in self.daemon.node.leases}

    # Operations

    def begin(self, name: str, make: Callable[[Operation], Steps]) -> None:
        """Start an operation, and see it through as far as it goes without waiting."""
        operation = Operation(name, failed_spills=self.daemon.log.warnings["session not spilled"])
        operation.steps = steps = make(operation)
        self.has_come_back = False
        try:
            ask = next(steps)
        except StopIteration:
            self.finish(operation, "nothing")
            return
        self._go_on(operation, ask)

    def _go_on(self, operation: Operation, ask: Ask) -> None:
        while True:
            speaker, build = ask
            reply: Reply | None = None
            with self.faults(operation):
                reply = self._ask(speaker, build)
            if reply is None and operation.code == "killed":
                return
            if reply is None:
                operation.was_delayed = True
                self.pending[speaker.identity, speaker.seq] = operation
                self.take_answers()
                return
            next_ask = self._answer(operation, reply)
            if next_ask is None:
                return
            ask = next_ask

    def _ask(self, speaker: Speaker, build: Callable[[int], Request]) -> Reply | None:
        peer = speaker.process.peer
        if not speaker.seq:
            speaker.seq = 1
            welcome = self.daemon.ask(speaker.identity, peer, Hello(1, PROTOCOL_MAJOR, PROTOCOL_MINOR, "sim"))
            self.require(isinstance(welcome, Welcome), f"hello answered with {welcome}")
        if self.chance.random() < 0.02:
            again = self.daemon.ask(speaker.identity, peer, Stat(speaker.seq))
            self.require(isinstance(again, ErrorReply) and again.code == "replayed", f"replayed request: {again}")
        speaker.seq += 1
        return self.daemon.ask(speaker.identity, peer, build(speaker.seq))

    def _answer(self, operation: Operation, reply: Reply) -> Ask | None:
        """Have the operation see its reply; returns what it asks next."""
        operation.fired = operation.fired or bool(self.system.fired)
        operation.code = reply.code if isinstance(reply, ErrorReply) else "done"
        self.reconcile_spilled()
        assert operation.steps is not None
        try:
            return operation.steps.send(reply)
        except StopIteration:
            self.finish(operation, operation.code)
            return None

    def finish(self, operation: Operation, code: str) -> None:
        self.done[f"{operation.name} {code}"] += 1
        self.trace.update(f"{operation.name} {code};".encode())

    @contextmanager
    def faults(self, operation: Operation | None) -> Iterator[None]:
        """Arm a fault or a death, or none. A death that has come is dealt with at the end."""
        self.current = operation
        lot = self.chance.random()
        failing, kill_in = "", 0
        calls = KILLED_WITHIN.get(operation.name if operation else "step", 0)
        kill_share = self.kill_share * (3 if calls else 1)
        if lot < kill_share:
            kill_in = self.chance.randint(1, calls or 4)
        elif lot < kill_share + self.fault_share:
            failing = self.chance.choice(FAULTS)
        nth, persistent = self.chance.choice((1, 1, 1, 2, 2, 3, 5)), self.chance.random() < 0.3
        try:
            with self.system.armed(failing, nth, persistent=persistent, kill_in=kill_in):
                yield
        except Killed:
            if operation is not None:
                operation.code = "killed"
                self.finish(operation, "killed")
            self.on_death(self, operation)

    def run_step(self) -> None:
        """Do one step of one of the jobs that wait."""
        waiting = self.daemon.steps.waiting
        if not waiting:
            return
        index = self.chance.randrange(len(waiting))
        self.has_come_back = False
        for operation in self.pending.values():
            operation.fired = False
        with self.faults(None):
            self.daemon.run_step(index)
        for operation in self.pending.values():
            operation.fired = operation.fired or bool(self.system.fired)
        self.take_answers()

    def take_answers(self) -> None:
        """Have operations see what jobs have answered, and take in what has changed by that."""
        self.reconcile_spilled()
        self.forget_removed_files()
        for key, reply in self.daemon.answers():
            operation = self.pending.pop(key)
            ask = self._answer(operation, reply)
            self.require(ask is None, f"{operation.name} asks again after it waited")
        self.reconcile_spilled()

    def restarted_after_drain(self) -> None:
        """The daemon has stopped with everything on disk: descriptors are as at first, and the next one begins."""
        left = describe(open_files() - self._baseline)
        self.require(not left, f"descriptors left: {left}")
        for key, session in list(self.model.memory.items()):
            if not session.is_empty:
                self.model.spilled[key] = session.image()
        self.model.memory.clear()
        self.require(not self.model.leases, f"leases {self.model.leases}")
        self.model.extent_uid = dict.fromkeys(self.model.extent_uid)
        self.forget_removed_files()
        self.zombies = {key: image for key, image in self.zombies.items() if key not in self.model.spilled}
        self.model.spilled.update(self.zombies)
        self.zombies.clear()
        self.returning.clear()
        for speaker in self.speakers:
            speaker.hang_up()
        self.daemon_starts += 1
        self.start()

    def leases_of(self, pid: int) -> list[Lease]:
        return [lease for lease in self.model.leases.values() if lease.pid == pid]

    def keep(self) -> set[int]:
        """Descriptors that are not the daemon's."""
        return self._baseline.union(*(worker.fds for worker in self.workers))


@contextmanager
def simulated_world(seed: int) -> Iterator[World]:
    """A world whose daemon ends, and leaves nothing, at the end of the block."""
    folder = SHM / f"simulated-kvd-files-{os.getpid()}"
    folder.mkdir(mode=0o700)
    processes, system = Processes(), System(seed)
    before = open_files()
    try:
        with installed(system, seed, processes.living):
            world = World(seed, folder, system, processes)
            try:
                yield world
            except BaseException:
                for worker in world.workers:
                    worker.end()
                bury(before, world.daemon)
                raise
            for worker in world.workers:
                worker.end()
            world.daemon.close()
            left = describe(open_files() - before)
            world.require(not left, f"descriptors left: {left}")
            world.require(not world.observer.segments(), f"left in shared memory: {world.observer.segments()}")
    finally:
        for name in os.listdir(SHM):
            if name.startswith(f"simulated-kvd-{os.getpid()}-"):
                (SHM / name).unlink()
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        folder.rmdir()


def describe(fds: set[int]) -> list[str]:
    return [os.readlink(f"/proc/self/fd/{fd}") for fd in sorted(fds)]
