"""The daemon's death and its successor: what must be there again, and what may have been done or not."""

from __future__ import annotations

from protocol.errors import KvdError
from protocol.handles import LeaseRef
from tests.simulation.audit import EXTENTS, FAULTS, Operation
from tests.simulation.daemon import Connection, bury
from tests.simulation.model import Image, Key, Lease, Page, Session, agree
from tests.simulation.system import Killed
from tests.simulation.world import World


def restart_after_death(world: World, operation: Operation | None) -> None:
    """Bury the daemon, start the next one, and hold what it has against the model."""
    under_way = [*world.pending.values(), *([operation] if operation else [])]
    world.pending.clear()
    bury(world.keep(), world.daemon)
    world.system.lost()
    _lose_daemon(world)
    for _ in range(3):
        if not _try_start(world):
            break
    else:
        world.start()
    world.daemon_starts += 1
    touched: dict[Key, list[Image | None]] = {}
    for each in under_way:
        for key, images in each.touched.items():
            touched.setdefault(key, []).extend(images)
    names = {each.name for each in under_way}
    before = world.model.memory
    _take_leases(world)
    _take_sessions(world, before, touched)
    _take_files(world, before, touched, names)
    world.check_deep()


def _lose_daemon(world: World) -> None:
    """Workers lose their leases; some die before there is another daemon."""
    for worker in list(world.workers):
        if world.chance.random() < 0.3:
            worker.end()
            world.workers.remove(worker)
            continue
        worker.connection = Connection(worker.process)
        worker.lease = LeaseRef(worker.lease.epoch, worker.lease.number)
        worker.speaker.hang_up()
        worker.lost_vram += worker.vram.values()
        worker.vram.clear()
        worker.is_orphan = True
    for speaker in world.speakers:
        speaker.hang_up()


def _try_start(world: World) -> bool:
    """Start a daemon that may die or fail as it starts; whether it did."""
    lot = world.chance.random()
    kill_in = world.chance.randint(1, 20) if lot < 0.1 else 0
    failing = world.chance.choice(FAULTS) if 0.1 < lot < 0.2 else ""
    try:
        with world.system.armed(failing, world.chance.randint(1, 5), kill_in=kill_in):
            world.start()
    except Killed:
        pass
    except KvdError:
        world.require(world.system.fired > 0, "a daemon does not start")
    else:
        return False
    bury(world.keep(), None)
    world.system.lost()
    return True


def _take_leases(world: World) -> None:
    """Those that live on are in quarantine until their processes say more."""
    world.model.leases.clear()
    for lease in world.daemon.node.leases:
        process = world.processes[lease.peer.pid]
        world.require(process.alive and lease.quarantined, f"lease of process {lease.peer.pid} goes on")
        world.model.leases[lease.number] = Lease(lease.number, lease.peer.uid, lease.peer.pid, quarantined=True)


def _take_sessions(world: World, before: dict[Key, Session], touched: dict[Key, list[Image | None]]) -> None:
    """Have the model be what is there, as far as that is one of the things that may be."""
    model, actual = world.model, world.actual()
    pages = {page.frame: page for session in before.values() for page in session.pages}
    alive = {worker.process.peer.pid: worker for worker in world.workers}
    model.memory = {}
    model.extent_uid = dict.fromkeys(range(EXTENTS), -1)
    for key in sorted(before.keys() - actual.keys()):
        session = before[key]
        held = any(worker.uid == key[0] and key[1] in worker.held for worker in alive.values())
        may_end = session.is_damaged or None in touched.get(key, []) or (session.is_empty and not held)
        if key in world.registry.spilled and not (may_end and key in world.zombies):
            world.require(bool(session.busy), f"{key} is on disk only, and nobody spilled it")
            model.spilled[key] = session.image()
            continue
        world.require(may_end, f"{key} is gone: {session}")
    for key, session in sorted(actual.items(), key=lambda entry: entry[1].number):
        known = before.get(key)
        header, frames, found = world.observer.session(session.number)
        candidates = [image for image in touched.get(key, []) if image is not None]
        candidates += [known.image()] if known else []
        same_images = [image for image in candidates if _is_same(found, image)]
        world.require(bool(same_images), f"{key} is {found}; may be {candidates}")
        fresh = Session(key[0], key[1], session.number, found.kind, found.capacity, header.generation)
        fresh.pages = [pages.get(frame) or Page(frame) for frame in frames]
        if known and key not in touched:
            same = (known.number, known.generation, [page.frame for page in known.pages])
            world.require((session.number, header.generation, list(frames)) == same, f"{key} is another than {same}")
        for page, marks in zip(fresh.pages, same_images[0].pages, strict=False):
            if page.frame not in pages:
                page.head, page.tail = marks
        fresh.rows, fresh.tokens = found.rows, list(found.tokens)
        fresh.logical = known.logical if known else found.rows
        fresh.payload, fresh.sampler = found.payload, found.sampler
        fresh.holder = session.lease.number if session.lease else 0
        fresh.stored_at = model.next_time()
        if fresh.holder:
            lease = model.leases[fresh.holder]
            world.require(lease.uid == key[0], f"{key} is held by another uid")
            lease.extents |= {frame >> 32 for frame in frames}
        world.require(not session.busy, f"{key} is {session.busy} after a start")
        model.add(fresh)
    for key in touched:
        if key in model.memory:
            model.spilled.pop(key, None)


def _is_same(one: Image, other: Image) -> bool:
    """Whether what was found is ``other``, as far as its pages are there."""
    parts = "kind", "rows", "tokens", "payload", "sampler"
    return agree(one.pages, other.pages) and all(getattr(one, part) == getattr(other, part) for part in parts)


def _take_files(
    world: World, before: dict[Key, Session], touched: dict[Key, list[Image | None]], names: set[str]
) -> None:
    """Saved files are old or new, and whole; spilled ones are there if their session is not in memory."""
    model, files = world.model, world.observer.files("kvd")
    is_saving = bool(names & {"save", "append"}) or any(session.busy for session in before.values())
    for key in list(model.saved):
        if key not in files:
            world.require(is_saving or key in touched, f"saved file of {key} is gone")
            del model.saved[key]
    for key in files:
        image, known = world.observer.file(key, "kvd"), model.saved.get(key)
        if known is not None and image == known:
            continue
        session = before.get(key)
        world.require(is_saving and session is not None and _is_same(image, session.image()), f"file of {key}: {image}")
        model.saved[key] = image
    model.saved_order = sorted(model.saved, key=lambda key: world.observer.used_ns(key))
    for key in world.registry.spilled - model.spilled.keys():
        world.require(key in world.zombies, f"{key} is on disk, and was never spilled")
        model.spilled[key] = world.zombies[key]
    left = world.observer.files("spilled").keys() - world.registry.spilled
    whole = {key for key in left if key not in model.memory or not world.actual()[key].absent}
    world.require(not whole, f"{whole} are on disk although no page is to come from there")
    coming = {key for key in world.returning - touched.keys() if key in model.memory and world.actual()[key].absent}
    world.require(coming <= left, f"{coming - left} are not on disk any more, where pages are to come from")
    world.zombies = {key: world.observer.file(key, "spilled") for key in left}
    world.returning = set(left)
    gone = model.spilled.keys() - world.registry.spilled
    world.require(not gone, f"spilled sessions are gone: {gone}")
