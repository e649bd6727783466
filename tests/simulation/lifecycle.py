"""What happens beside the sessions' verbs: processes, leases, files, VRAM, operators, limits, and the daemon's end."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from kvd.config import LimitsConfig
from protocol import messages
from protocol.messages import PROTOCOL_MAJOR, PROTOCOL_MINOR, ErrorReply
from tests.simulation.audit import MIB, UIDS, VRAM_BYTES, Operation, Steps
from tests.simulation.daemon import Connection
from tests.simulation.model import Lease, Session
from tests.simulation.requests import a_lease, any_key, grant_extents, refusal
from tests.simulation.verbs import append
from tests.simulation.worker import SimulatedWorker, Vram
from tests.simulation.world import World

MOST_WORKERS = 4


# Processes and leases


def spawn(world: World) -> None:
    """A process begins, and opens a lease."""
    if len(world.workers) >= MOST_WORKERS:
        return
    worker = SimulatedWorker(world.new_process(world.chance.choice(UIDS)))
    if open_lease(world, worker):
        world.workers.append(worker)


def open_lease(world: World, worker: SimulatedWorker) -> bool:
    world.daemon.connect(worker.connection)
    packet = messages.LeaseOpen(PROTOCOL_MAJOR, PROTOCOL_MINOR, "sim")
    reply, _ = world.daemon.send(worker.connection, packet, [])
    is_full = len(world.model.leases) >= world.model.limits.max_leases
    if isinstance(reply, ErrorReply):
        world.require(is_full and reply.code == "invalid_value", f"no lease: {reply}")
        world.daemon.hang_up(worker.connection)
        worker.connection = Connection(worker.process)
        return False
    world.require(not is_full, "a lease too many")
    assert isinstance(reply, messages.LeaseOpened)
    worker.lease = reply.lease
    world.require(reply.lease.epoch == world.daemon.epoch, "epoch of a lease")
    world.require(reply.lease.number not in world.model.leases, "a lease's number is given twice")
    peer = worker.process.peer
    world.model.leases[reply.lease.number] = Lease(reply.lease.number, peer.uid, peer.pid)
    worker.is_orphan = False
    world.done["lease opened"] += 1
    return True


def die(world: World, operation: Operation, worker: SimulatedWorker) -> None:
    """The process is killed, perhaps amid decoding; the daemon hears of it."""
    if world.chance.random() < 0.5:
        append(world, worker, cut_short=True)
    worker.end()
    world.workers.remove(worker)
    leases = world.leases_of(worker.process.peer.pid)
    for lease in leases:
        for session in world.model.held_by(lease.number):
            operation.touched[session.key] = [None] if session.is_empty else []
    hangs_up_first = world.chance.random() < 0.5
    with world.faults(operation):
        if hangs_up_first:
            world.daemon.hang_up(worker.connection)
        for known in world.daemon.node.leases:
            if known.peer.pid == worker.process.peer.pid:
                world.daemon.loop.ready(known.process.pidfd)
    if operation.code == "killed":
        return
    world.require(worker.connection.is_closed or worker.is_orphan, "a dead process's connection is open")
    world.reconcile_spilled()
    now = world.model.next_time()
    for lease in leases:
        world.model.end_lease(lease.number, now)


def hang_up(world: World, worker: SimulatedWorker) -> None:
    """The process lives on without its connection: what it may still use is in quarantine."""
    world.daemon.hang_up(worker.connection)
    disconnected(world, worker)


def disconnected(world: World, worker: SimulatedWorker) -> None:
    lease = world.model.leases.get(worker.lease.number)
    if lease is not None and lease.pid == worker.process.peer.pid and not worker.is_orphan:
        if lease.extents or lease.handles or world.model.held_by(lease.number):
            lease.quarantined = True
        else:
            del world.model.leases[lease.number]
    world.require(worker.connection.is_closed, "the connection of a lost lease is open")
    worker.is_orphan = True
    worker.connection = Connection(worker.process)
    world.done["hung up"] += 1


def revoke(world: World, operation: Operation) -> Steps:
    number = world.chance.choice([*world.model.leases, 1 << 30])
    speaker = world.admin if world.chance.random() < 0.9 else world.speakers[-1]
    reply = yield speaker, lambda seq: messages.RevokeLease(seq, number)
    must = set() if speaker is world.admin else {"permission_refused"}
    if not must and number not in world.model.leases:
        must = {"unknown_lease"}
    if world.settle(operation, reply, must):
        for worker in world.workers:
            is_its = worker.lease.number == number and not worker.is_orphan
            if is_its and worker.lease.epoch == world.daemon.epoch:
                disconnected(world, worker)


def reconnect(world: World, operation: Operation, worker: SimulatedWorker) -> Steps:
    """After its lease was lost, or the daemon started anew: another lease, and what it still holds."""
    if not worker.is_orphan or not open_lease(world, worker):
        return
    for name in sorted(worker.held):
        key, held = (worker.uid, name), worker.held[name]
        operation.touched[key] = []
        reply = yield worker.speaker, partial(messages.ReattachSession, lease=worker.lease, name=name)
        session = world.model.memory.get(key)
        must: set[str] = set()
        if session is None:
            must = {"unknown_session"}
        elif not is_inherited(world, session, worker):
            must = {"session_busy"}
        elif session.is_damaged:
            must = {"session_damaged"}
        if not world.settle(operation, reply, must):
            if session is None or not is_own(world, session, worker):
                worker.let_go(name)
            continue
        assert isinstance(reply, messages.SessionOpened)
        assert session is not None
        session.holder = worker.lease.number
        sealed = held.is_sealed
        world.require((reply.session, reply.generation) == (session.number, session.generation), f"reattached {reply}")
        worker.take(world.daemon, name, reply, session.capacity).is_sealed = sealed
        grant_extents(world, worker, session)
        world.done["reattached"] += 1
    hand_over(world, worker)
    world.daemon.handles.drop_idle()
    for lease in [lease for lease in world.model.leases.values() if lease.quarantined]:
        inherited = all(not known.is_inherited or known.number != lease.number for known in world.daemon.node.leases)
        if inherited and not world.model.held_by(lease.number) and lease.number in world.inherited:
            del world.model.leases[lease.number]


def is_own(world: World, session: Session, worker: SimulatedWorker) -> bool:
    lease = world.model.leases.get(session.holder)
    return lease is not None and lease.pid == worker.process.peer.pid


def is_inherited(world: World, session: Session, worker: SimulatedWorker) -> bool:
    return is_own(world, session, worker) and session.holder in world.inherited


def hand_over(world: World, worker: SimulatedWorker) -> None:
    """VRAM of an earlier run of the daemon goes on its books."""
    for vram in worker.lost_vram:
        packet = messages.HandOver("cpu", vram.requested, vram.committed, "ring", 0)
        reply, _ = world.daemon.send(worker.connection, packet, [vram.fd])
        lease = world.model.leases[worker.lease.number]
        no_room = world.model.vram_in_use() + vram.committed > VRAM_BYTES
        if isinstance(reply, ErrorReply):
            full = len(lease.handles) >= world.model.limits.max_handles
            world.require((no_room and reply.code == "out_of_capacity") or full, f"not handed over: {reply}")
            os.close(vram.fd)
            continue
        world.require(not no_room, "more VRAM than there is")
        assert isinstance(reply, messages.HandedOver)
        lease.handles[reply.handle] = vram.committed
        worker.vram[reply.handle] = vram
        world.done["handed over"] += 1
    worker.lost_vram.clear()


# VRAM and grants


def allocate(world: World, operation: Operation, worker: SimulatedWorker) -> Steps:
    reference = a_lease(world, worker)
    nbytes = world.chance.choice((1, MIB, 2 * MIB, 2 * MIB + 1, 5 * MIB, 0))
    reply = yield worker.speaker, lambda seq: messages.AllocateDevice(seq, reference, "cpu", nbytes, "ring")
    refused = refusal(world, worker, reference)
    must = set(refused)
    committed = -(-nbytes // (2 * MIB)) * 2 * MIB
    if not refused:
        lease = world.model.leases[worker.lease.number]
        must |= {"invalid_value"} if not nbytes or len(lease.handles) >= world.model.limits.max_handles else set()
        must |= {"out_of_capacity"} if world.model.vram_in_use() + committed > VRAM_BYTES else set()
    if not world.settle(operation, reply, must):
        return
    assert isinstance(reply, messages.DeviceAllocated)
    memory = reply.memory
    world.require((memory.requested, memory.committed) == (nbytes, committed), f"VRAM {memory}")
    fd = worker.claim(world.daemon, memory)
    world.require(os.pread(fd, 4096, 0) == bytes(4096), "VRAM is not zero")
    os.pwrite(fd, b"%d|" % worker.uid, 0)
    world.model.leases[worker.lease.number].handles[memory.handle] = committed
    worker.vram[memory.handle] = Vram(fd, nbytes, committed)


def free(world: World, operation: Operation, worker: SimulatedWorker) -> Steps:
    everybody = [handle for each in world.workers for handle in each.vram] or [7]
    own = list(worker.vram)
    handle = world.chance.choice(own if own and world.chance.random() < 0.9 else everybody)
    reference = a_lease(world, worker)
    reply = yield worker.speaker, lambda seq: messages.FreeDevice(seq, reference, handle)
    refused = refusal(world, worker, reference)
    must = set(refused)
    if not refused and handle not in world.model.leases[worker.lease.number].handles:
        must = {"unknown_handle"}
    if world.settle(operation, reply, must):
        os.close(worker.vram.pop(handle).fd)
        del world.model.leases[worker.lease.number].handles[handle]


def stale_grant(world: World, worker: SimulatedWorker) -> None:
    """A grant that was used, or another's, or none at all, opens nothing."""
    others = [grant for each in world.workers for grant in each.spent]
    grant = world.chance.choice([*others, 12345])
    if worker.is_orphan:
        return
    reply, fds = world.daemon.send(worker.connection, messages.Claim(grant), [])
    for fd in fds:
        os.close(fd)
    world.require(isinstance(reply, ErrorReply) and reply.code == "grant_refused", f"stale grant: {reply}")
    world.done["grant refused"] += 1


# Operators


def end_session(world: World, operation: Operation) -> Steps:
    key = any_key(world)
    is_operator = world.chance.random() < 0.9
    operation.touched[key] = [None]
    speaker = world.admin if is_operator else world.speakers[-1]
    reply = yield speaker, lambda seq: messages.EndSession(seq, key[0], key[1])
    session = world.model.memory.get(key)
    must = set() if is_operator else {"permission_refused"}
    if operation.ended is not None:
        must = set()
    elif is_operator and session is None:
        must = {"unknown_session"}
    elif is_operator and session is not None and (session.holder or world.is_busy(session)):
        must = {"session_busy"}
    if world.settle(operation, reply, must):
        if operation.ended is None:
            del world.model.memory[key]
        world.has_ended(key)


def change_limits(world: World) -> None:
    limits = LimitsConfig(
        max_leases=world.chance.choice((2, 8, 8)),
        max_sessions=world.chance.choice((12, 40, 40)),
        host_per_uid=world.chance.choice((0, 0, 2 * MIB, 3 * MIB)),
        max_handles=world.chance.choice((1, 64, 64)),
    )
    world.model.limits = limits
    world.daemon.node.limit(world.config())
    world.done["limits changed"] += 1


def stat(world: World, operation: Operation) -> Steps:
    reply = yield world.admin, messages.Stat
    assert isinstance(reply, messages.Stats), reply
    stats: Any = reply.stats
    world.require(stats.ledger == "balanced", stats.ledger)
    for found in stats.sessions:
        session = world.model.memory[found.uid, found.name]
        want = "damaged" if session.is_damaged else "held" if session.holder else "stored"
        world.require(found.state == want and found.lease == session.holder, f"{session.key} is {found.state}")
        if not session.is_damaged:
            counts = found.pages, found.committed_rows, found.tokens, found.logical_rows
            mine = len(session.pages), session.rows, len(session.tokens), session.logical
            world.require(counts == mine, f"{session.key}: {counts} instead of {mine}")
    world.require(len(stats.sessions) == len(world.model.memory), f"{len(stats.sessions)} sessions")
    for lease in stats.leases:
        known = world.model.leases[lease.lease]
        world.require(lease.state == ("quarantined" if known.quarantined else "live"), f"{lease}")
        world.require(lease.sessions == len(world.model.held_by(lease.lease)), f"{lease}")


def drain(world: World) -> None:
    """All workers end, every session goes to disk, the daemon stops; and another starts."""
    while world.workers:
        die(world, Operation("die"), world.workers[0])
    while world.daemon.steps.waiting:
        world.run_step()
    outcome: list[Any] = []
    for session in list(world.actual().values()):
        if session.damage:
            world.daemon.node.end_stored(session.header.uid, session.name)
            del world.model.memory[session.header.uid, session.name]
    world.daemon.node.jobs.start(world.daemon.node.hibernate(), outcome.append)
    world.daemon.resume()
    while world.daemon.steps.waiting:
        world.daemon.run_step(0)
    if isinstance(outcome[0], Exception):
        world.require("could not be saved" in str(outcome[0]), f"not drained: {outcome[0]}")
        world.hibernation_failed()
        return
    world.forget_removed_zombies()
    world.daemon.close()
    left = world.observer.segments()
    world.require(not left, f"a daemon that drained left {left}")
    world.restarted_after_drain()
