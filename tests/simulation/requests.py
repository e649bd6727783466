"""What requests are made of, and what stands against them by the model."""

from __future__ import annotations

from dataclasses import replace

from protocol import messages
from protocol.handles import LeaseRef
from protocol.messages import Reply
from tests.simulation.audit import UIDS, Operation
from tests.simulation.model import (
    MARK,
    Image,
    Key,
    Page,
    Session,
    last_page,
)
from tests.simulation.worker import Held, SimulatedWorker, Speaker
from tests.simulation.world import World

NAMES = 9
"""Names that the workers of one uid use."""
CAPACITIES = (64, 300, 768, 768)


def empty(image: Image) -> Image:
    """What a death amid the making of a session may leave of it."""
    return replace(image, rows=0, tokens=(), payload=b"", sampler=b"", pages=())


def a_name(world: World) -> str:
    return f"s{world.chance.randrange(NAMES)}"


def a_free_name(world: World, uid: int) -> str:
    """Mostly one that the uid has no session of."""
    taken = {key[1] for key in [*world.model.memory, *world.model.spilled] if key[0] == uid}
    free = [f"s{number}" for number in range(NAMES) if f"s{number}" not in taken]
    return world.chance.choice(free) if free and world.chance.random() < 0.85 else a_name(world)


def a_lease(world: World, worker: SimulatedWorker) -> LeaseRef:
    """The worker's reference to its lease, or now and then a wrong one."""
    reference, lot = worker.lease, world.chance.random()
    if lot < 0.01:
        reference = LeaseRef(reference.epoch ^ 1, reference.number)
    elif lot < 0.02:
        reference = LeaseRef(reference.epoch, reference.number + world.chance.randint(1, 3))
    return reference


def refusal(world: World, worker: SimulatedWorker, reference: LeaseRef) -> set[str]:
    """What must be said to a request with this reference."""
    if reference.epoch != world.daemon.epoch:
        return {"stale_epoch"}
    lease = world.model.leases.get(reference.number)
    if lease is None or lease.quarantined or lease.pid != worker.process.peer.pid:
        return {"unknown_lease"}
    return set()


def a_target(world: World, worker: SimulatedWorker) -> tuple[int, int]:
    """Number and generation of a session: mostly one that the worker holds, and its own generation."""
    held = list(worker.held.values())
    if not held or world.chance.random() < 0.04:
        numbers = [session.number for session in world.model.memory.values()] + [0, 1 << 40]
        number = world.chance.choice(numbers)
        known = world.model.numbered(number)
        return number, known.generation if known else 1
    chosen = world.chance.choice(held)
    stale = world.chance.random() < 0.03
    return chosen.number, chosen.generation + (world.chance.choice((-1, 1)) if stale else 0)


def against_verb(
    world: World, worker: SimulatedWorker, number: int, generation: int, *, closing: bool = False
) -> tuple[Session | None, set[str]]:
    """The session, and what stands against a verb of its holder's."""
    session = world.model.numbered(number)
    if session is None or session.uid != worker.uid:
        return None, {"unknown_session"}
    must: set[str] = set()
    if not (closing and session.is_damaged and not session.holder):
        if session.holder != worker.lease.number:
            must.add("session_busy")
        if session.generation != generation:
            must.add("stale_generation")
    if world.is_busy(session):
        must.add("session_busy")
    if session.is_damaged and not closing:
        must.add("session_damaged")
    return session, must


def against_name(world: World, key: Key) -> set[str]:
    """What stands against one session more, of this name."""
    model, must = world.model, set()
    if len(model.memory) + 1 > model.limits.max_sessions:
        must.add("invalid_value")
    if key in model.memory or key in model.spilled:
        must.add("session_exists")
    return must


def grant_extents(world: World, worker: SimulatedWorker, session: Session) -> None:
    world.model.leases[worker.lease.number].extents |= {page.frame >> 32 for page in session.pages}


def require_clean(world: World, worker: SimulatedWorker, session: Session, pages: list[Page]) -> None:
    """New pages have zeros, or old bytes of the same uid."""
    mine = b"%d|" % session.uid
    for page in pages:
        for mark in worker.read(page.frame, session.kind.stride):
            world.require(mark == bytes(MARK) or mark.startswith(mine), f"{session.key} was given {mark!r}")


def take_table(world: World, session: Session, held: Held, kept: list[Page]) -> list[Page]:
    """Have the page table that the daemon's block shows, which begins with ``kept``; returns the new pages."""
    frames = held.frames()
    world.require(frames[: len(kept)] == tuple(page.frame for page in kept), f"{session.key} has lost pages")
    new = world.new_pages(session, frames[len(kept) :])
    session.pages = [*kept, *new]
    world.model.note_frames(session)
    return new


def preparing(world: World, key: Key) -> set[str]:
    """What may stand against a name while something is being read from disk."""
    return {"session_exists", "session_busy", "invalid_value"} if world.pending else set()


def opened(world: World, worker: SimulatedWorker, session: Session, reply: Reply) -> Held:
    """The session is new, and held by the worker."""
    assert isinstance(reply, messages.SessionOpened)
    session.number = reply.session
    world.require(world.model.numbered(reply.session) is None, f"number {reply.session} is given twice")
    world.model.add(session)
    held = worker.take(world.daemon, session.name, reply, session.capacity)
    world.require(reply.page_count == len(held.frames()), f"{session.key} opened with {reply.page_count} pages")
    return held


def shared_from(world: World, session: Session, pages: int) -> list[int]:
    """The pages, of the first ``pages``, that a holder may write and that are shared."""
    return [number for number in range(last_page(session.rows), pages) if world.model.is_shared(session.pages[number])]


def replace_shared(world: World, session: Session, worker: SimulatedWorker, held: Held, pages: int) -> None:
    """Pages that the holder may write and that were shared are its own now; that of the last row is a copy."""
    first, new = last_page(session.rows), shared_from(world, session, pages)
    frames = held.frames()
    world.require(len(frames) == pages, f"{session.key} has {len(frames)} pages instead of {pages}")
    old = session.pages
    fresh = dict(zip(new, world.new_pages(session, tuple(frames[number] for number in new)), strict=True))
    session.pages = [fresh.get(number, old[number]) for number in range(pages)]
    world.require(frames == tuple(page.frame for page in session.pages), f"{session.key}: {frames}")
    if first in fresh and session.rows:
        fresh[first].head, fresh[first].tail = old[first].head, old[first].tail
    world.model.note_frames(session)


def touch(world: World, operation: Operation, number: int) -> None:
    """A death may have done the verb or not: the session's content is the same."""
    session = world.model.numbered(number)
    if session is not None:
        operation.touched[session.key] = []


def any_key(world: World) -> Key:
    keys = [*world.model.memory, *world.model.saved, *world.model.spilled]
    return world.chance.choice(keys) if keys and world.chance.random() < 0.9 else (UIDS[0], a_name(world))


def a_speaker(world: World, uid: int) -> Speaker:
    """Whoever asks for the uid: one of its workers, or a command."""
    workers = [worker.speaker for worker in world.workers if worker.uid == uid]
    return world.chance.choice([*workers, *(each for each in world.speakers if each.process.peer.uid == uid)])
