"""Saved sessions: written, read, listed, removed."""

from __future__ import annotations

from protocol import messages
from tests.simulation.audit import DISK_BYTES, UIDS, Operation, Steps
from tests.simulation.model import KINDS, Image, Key, Session
from tests.simulation.requests import a_speaker, against_name, any_key, empty, preparing
from tests.simulation.world import World


def save(world: World, operation: Operation) -> Steps:
    key = any_key(world)
    speaker, model = a_speaker(world, key[0]), world.model
    operation.touched[key] = []
    session = model.memory.get(key)
    must: set[str] = set()
    if session is None:
        must = {"unknown_session"}
    else:
        holder = model.leases.get(session.holder)
        if holder is not None and (holder.quarantined or holder.pid != speaker.process.peer.pid):
            must |= {"session_busy"}
        must |= {"session_busy"} if session.busy else set()
        must |= {"session_damaged"} if session.is_damaged else set()
    reply = yield speaker, lambda seq: messages.SaveSession(seq, key[1])
    # It may have waited for pages, and an empty session ends with its holder.
    may = {"session_damaged", "unknown_session", "session_busy"} if operation.was_delayed else set()
    now = model.memory.get(key)
    is_its = now is session or operation.was_delayed  # while it waited for pages, another may have got the name
    image = now.image() if now is not None and is_its else None
    if image is not None and not must:
        fixed = sum(spilled.file_bytes for spilled in {**world.zombies, **model.spilled}.values())
        kept = world.kept_files | world.pinned()
        fixed += sum(model.saved[other].file_bytes for other in kept if other in model.saved and other != key)
        if image.file_bytes > DISK_BYTES - fixed or (operation.was_delayed and world.pending):
            may |= {"out_of_capacity"}
    files = world.observer.files("kvd")
    if not world.settle(operation, reply, must, may):
        failed_save(world, operation, key, image)
        return
    assert isinstance(reply, messages.Saved)
    assert image is not None
    world.system.require_safe()
    world.require((reply.rows, reply.tokens) == (image.rows, len(image.tokens)), f"saved {reply} of {image}")
    world.require(files.get(key) == reply.nbytes == image.file_bytes, f"{key} has {files.get(key)} bytes: {reply}")
    world.require(sum(files.values()) + sum(world.observer.files("spilled").values()) <= DISK_BYTES, "too many files")
    model.saved[key] = image
    model.use_saved(key)
    world.same_image(key, world.observer.file(key, "kvd"), image)


def failed_save(world: World, operation: Operation, key: Key, image: Image | None) -> None:
    """What is there now is the old file or the new one, whole."""
    world.forget_removed_files()
    files = world.observer.files("kvd")
    if key not in files:
        return
    found, known = world.observer.file(key, "kvd"), world.model.saved.get(key)
    if found != known:
        world.require(operation.fired and image is not None and found == image, f"file of {key} is {found}")
        world.model.saved[key] = found
    if operation.fired:
        # A file that made room while its session is being saved anew was the least recently used.
        world.model.saved_order = sorted(
            world.model.saved, key=lambda it: world.observer.used_ns(it) if it in files else 0
        )
    world.system.forget_unsafe()


def restore(world: World, operation: Operation) -> Steps:
    model = world.model
    keys = [key for key in model.saved if key not in model.memory and key not in model.spilled] or list(model.saved)
    key = world.chance.choice(keys) if keys and world.chance.random() < 0.9 else any_key(world)
    image = model.saved.get(key)
    kind = image.kind if image else KINDS[0]
    wrong = world.chance.random() < 0.05
    operation.touched[key] = [None, *([image, empty(image)] if image else [])]
    must = against_name(world, key)
    may = preparing(world, key) | {"saved_refused"} if world.pending else set()
    if not must:
        must = {"unknown_saved"} if image is None else {"fingerprint_mismatch"} if wrong else set()
    fingerprint = b"x" * 32 if wrong else world.chance.choice((b"", kind.fingerprint))
    arguments = key[1], fingerprint, world.chance.choice(("", kind.encoding)), world.chance.random() < 0.5
    reply = yield a_speaker(world, key[0]), lambda seq: messages.RestoreSession(seq, *arguments)
    if operation.was_delayed:
        may |= preparing(world, key) | against_name(world, key) | {"unknown_saved", "session_exists", "invalid_value"}
        may |= {"fingerprint_mismatch"} if model.saved.get(key) != image else set()
    if image is not None and model.has_no_room(key[0], kind.stride, len(image.pages), blocks_of(image)):
        may |= {"out_of_capacity"}
    if not world.settle(operation, reply, must, may):
        return
    assert isinstance(reply, messages.Saved)
    session = world.actual()[key]
    newer = model.saved.get(key)
    found = world.observer.session(session.number)[2]
    chosen = newer if newer is not None and newer.generation + 1 == found.generation and newer != image else image
    world.require(chosen is not None, f"{key} was restored from nothing")
    assert chosen is not None
    world.appear(key, session.number, chosen)
    if key in model.saved:
        model.use_saved(key)


def blocks_of(image: Image) -> int:
    return Session(0, "", 0, image.kind, image.capacity).block_bytes


def list_saved(world: World, operation: Operation) -> Steps:
    uid = world.chance.choice(UIDS)
    reply = yield a_speaker(world, uid), messages.ListSaved
    world.forget_removed_zombies()
    if not world.settle(operation, reply, set()) or world.pending:
        return
    assert isinstance(reply, messages.SavedSessions)
    found = {(entry.name, entry.spilled, entry.nbytes) for entry in reply.sessions}
    spilled = {**world.zombies, **world.model.spilled}
    want = {(key[1], False, image.file_bytes) for key, image in world.model.saved.items() if key[0] == uid}
    want |= {(key[1], True, image.file_bytes) for key, image in spilled.items() if key[0] == uid}
    world.require(found == want, f"saved: {found} instead of {want}")
    order = [entry.name for entry in reply.sessions if not entry.spilled]
    world.require(order == [key[1] for key in world.model.saved_order if key[0] == uid], f"saved in order {order}")


def remove(world: World, operation: Operation) -> Steps:
    key = any_key(world)
    operation.touched[key] = []
    reply = yield a_speaker(world, key[0]), lambda seq: messages.RemoveSaved(seq, key[1])
    is_gone = key not in world.observer.files("kvd")
    known = key in world.model.saved
    session = world.model.memory.get(key)
    pinned = {"session_busy"} if (session and session.absent) or operation.was_delayed else set()
    if world.settle(operation, reply, set() if known else {"unknown_saved"}, {"unknown_saved"} | pinned):
        world.require(is_gone, f"{key} was removed and is there")
    if known and is_gone:
        del world.model.saved[key]
        world.model.saved_order.remove(key)
