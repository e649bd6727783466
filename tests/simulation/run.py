"""Chooses what happens next, from the seed."""

from __future__ import annotations

from functools import partial

from tests.simulation import files, lifecycle, verbs
from tests.simulation.audit import UIDS, Operation, Steps
from tests.simulation.restart import restart_after_death
from tests.simulation.worker import SimulatedWorker
from tests.simulation.world import World, simulated_world

OF_A_WORKER = {
    verbs.create: 10,
    verbs.open_stored: 12,
    verbs.extend: 16,
    verbs.truncate: 10,
    verbs.detach: 6,
    verbs.close: 6,
    verbs.fork: 14,
    verbs.find_prefix: 5,
    verbs.fetch: 4,
    verbs.scribble: 0.3,
    lifecycle.allocate: 3,
    lifecycle.free: 2,
}
OF_NOBODY = {
    files.save: 8,
    files.restore: 8,
    files.list_saved: 1,
    files.remove: 1,
    lifecycle.end_session: 4,
    lifecycle.stat: 3,
    lifecycle.revoke: 1.5,
}
EVENTS = {
    "append": 36,
    "spawn": 4,
    "die": 2,
    "hang up": 0.5,
    "stale grant": 2,
    "limits": 0.8,
    "step": 30,
    "reconnect": 3,
    "drain": 0.05,
}
NEED_SESSIONS = {verbs.extend, verbs.truncate, verbs.detach, verbs.close}
MOST_PENDING = 3


def step(world: World) -> None:
    """One thing happens; afterwards everything must be as the model has it."""
    names = [*OF_A_WORKER, *OF_NOBODY, *EVENTS]
    weights = [*OF_A_WORKER.values(), *OF_NOBODY.values(), *EVENTS.values()]
    [what] = world.chance.choices(names, weights)
    worker = world.chance.choice(world.workers) if world.workers else None
    if worker and worker.is_orphan and world.chance.random() < 0.5:
        what = "reconnect"
    elif worker and not worker.held and what in NEED_SESSIONS and world.chance.random() < 0.8:
        what = world.chance.choice((verbs.create, verbs.open_stored))
    if len(world.pending) >= MOST_PENDING:
        what = "step"
    if what in OF_NOBODY:
        make_any = what
        world.begin(make_any.__name__, partial(make_any, world))
    elif worker is None or what == "spawn":
        lifecycle.spawn(world)
    elif what in OF_A_WORKER:
        make = what
        if is_waiting(world, worker):
            return

        def steps(operation: Operation) -> Steps:
            operation.speaker_of = worker.process.peer.pid
            return make(world, operation, worker)

        world.begin(make.__name__, steps)
    elif what in ("die", "step", "limits", "drain") or not is_waiting(world, worker):
        _event(world, what, worker)
    world.steps_done += 1
    world.check()


def is_waiting(world: World, worker: SimulatedWorker) -> bool:
    """Whether the worker has asked for something that is under way: it does nothing else meanwhile."""
    pid = worker.process.peer.pid
    return any(operation.speaker_of == pid for operation in world.pending.values())


def _event(world: World, what: object, worker: SimulatedWorker) -> None:
    match what:
        case "append":
            verbs.append(world, worker)
        case "die":
            operation = Operation("die")
            lifecycle.die(world, operation, worker)
            world.finish(operation, operation.code or "done")
        case "hang up":
            if not worker.is_orphan:
                lifecycle.hang_up(world, worker)
        case "stale grant":
            lifecycle.stale_grant(world, worker)
        case "limits":
            lifecycle.change_limits(world)
        case "step":
            world.run_step()
        case "reconnect":
            world.begin("reconnect", lambda operation: lifecycle.reconnect(world, operation, worker))
        case "drain":
            lifecycle.drain(world)


def simulate(seed: int, steps: int) -> World:
    """Run a world for so many steps. Raises `SimulationFailure` where it is not as the model has it."""
    with simulated_world(seed) as world:
        world.on_death = restart_after_death
        for uid in UIDS:
            world.speaker(uid)
        try:
            while world.steps_done < steps:
                step(world)
        except Exception as error:
            error.add_note(f"seed {seed}, step {world.steps_done}")
            raise
        return world
