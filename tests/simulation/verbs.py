"""What workers ask of the daemon, and what the model says to that: the verbs about sessions."""

from __future__ import annotations

import os
from array import array

from protocol import messages
from tests.simulation.audit import Operation, Steps
from tests.simulation.model import (
    COMMIT_BYTES,
    KINDS,
    MARK,
    PAGE_TOKENS,
    Image,
    Session,
    last_page,
    page_count,
    prefix_hashes,
)
from tests.simulation.requests import (
    CAPACITIES,
    a_free_name,
    a_lease,
    a_name,
    a_target,
    against_name,
    against_verb,
    empty,
    grant_extents,
    opened,
    preparing,
    refusal,
    replace_shared,
    require_clean,
    shared_from,
    take_table,
    touch,
)
from tests.simulation.worker import Held, SimulatedWorker
from tests.simulation.world import World


def create(world: World, operation: Operation, worker: SimulatedWorker) -> Steps:
    name, kind = a_free_name(world, worker.uid), world.chance.choice(KINDS)
    if world.chance.random() < 0.02:
        name = world.chance.choice(("", "../s", "a" * 65, "s\0"))
    capacity, key = world.chance.choice(CAPACITIES), (worker.uid, name)
    reference = a_lease(world, worker)
    blank = Image(kind, capacity, 1, 0, (), b"", b"", ())
    operation.touched[key] = [None, blank]
    arguments = (reference, name, kind.fingerprint, kind.encoding, kind.page_bytes, capacity, COMMIT_BYTES)
    reply = yield worker.speaker, lambda seq: messages.CreateSession(seq, *arguments)
    refused = refusal(world, worker, reference)
    session = Session(worker.uid, name, 0, kind, capacity, holder=worker.lease.number)
    must = refused or against_name(world, key)
    if (not must and not name.startswith("s")) or "\0" in name:
        must = must | {"invalid_value"}
    if not refused and world.model.has_no_room(worker.uid, kind.stride, 0, session.block_bytes):
        must = must | {"out_of_capacity"}
    if not world.settle(operation, reply, must, preparing(world, key)):
        return
    world.require(isinstance(reply, messages.SessionOpened) and reply.generation == 1, f"created: {reply}")
    opened(world, worker, session, reply)


def open_stored(world: World, operation: Operation, worker: SimulatedWorker) -> Steps:
    keys = [key for key in [*world.model.memory, *world.model.spilled] if key[0] == worker.uid]
    name = world.chance.choice(keys)[1] if keys and world.chance.random() < 0.95 else a_name(world)
    key = worker.uid, name
    reference = a_lease(world, worker)
    spilled, known = world.model.spilled.get(key), world.model.memory.get(key)
    operation.touched[key] = [image for image in (spilled, empty(spilled) if spilled else None) if image]
    if spilled:
        operation.touched[key].append(None)
    wanted = known.kind if known else spilled.kind if spilled else KINDS[0]
    if world.chance.random() < 0.05:
        wanted = world.chance.choice(KINDS)
    is_lazy = world.chance.random() < 0.4
    arguments = reference, name, wanted.fingerprint, wanted.encoding, is_lazy
    reply = yield worker.speaker, lambda seq: messages.OpenSession(seq, *arguments)
    refused = refusal(world, worker, reference)
    session = world.model.memory.get(key)
    if session is None:
        may = {"unknown_session"} | preparing(world, key)
        if key in world.model.spilled:
            may = {"session_busy", "out_of_capacity", "invalid_value", "session_exists"}
        done = world.settle(operation, reply, refused or may, may)
        world.require(not done, f"{key} was opened out of nothing")
        return
    must = set(refused)
    if not refused:
        must |= {"session_busy"} if session.holder or world.is_busy(session) else set()
        must |= {"session_damaged"} if session.is_damaged else set()
        mine = session.kind.fingerprint, session.kind.encoding
        must |= {"fingerprint_mismatch"} if (wanted.fingerprint, wanted.encoding) != mine else set()
    new = shared_from(world, session, len(session.pages))
    if not must and world.model.has_no_room(session.uid, session.kind.stride, len(new)):
        must = {"out_of_capacity"}
    may = preparing(world, key) | ({"session_busy", "session_exists"} if operation.was_delayed else set())
    if not world.settle(operation, reply, must, may):
        return
    assert isinstance(reply, messages.SessionOpened)
    session.generation += 1
    session.holder = worker.lease.number
    world.require((reply.session, reply.generation) == (session.number, session.generation), f"opened: {reply}")
    held = worker.take(world.daemon, name, reply, session.capacity)
    replace_shared(world, session, worker, held, len(session.pages))
    grant_extents(world, worker, session)
    world.require(is_lazy or not held.table()[1], f"{key} was opened without pages {held.table()[1]}")
    mine_now = held.block
    world.require(
        (mine_now.commit.rows, mine_now.tokens(), mine_now.commit.payload, mine_now.sampler_state)
        == (session.rows, session.tokens, session.payload, session.sampler),
        f"{key} was opened with {mine_now.commit}",
    )
    world.require(mine_now.commit.generation < session.generation, f"{key}: commit of {mine_now.commit.generation}")
    held.block.logical_rows = session.logical = session.rows


def extend(world: World, operation: Operation, worker: SimulatedWorker) -> Steps:
    number, generation = a_target(world, worker)
    count = world.chance.choice((1, 1, 2, 3, 5, 8, 12, 0))
    reference = a_lease(world, worker)
    touch(world, operation, number)
    reply = yield worker.speaker, lambda seq: messages.ExtendSession(seq, reference, number, generation, count)
    refused = refusal(world, worker, reference)
    session, against = against_verb(world, worker, number, generation)
    must = refused or against
    if session is not None and not refused:
        if not 1 <= count <= page_count(session.capacity) - len(session.pages):
            must = must | {"invalid_value"}
        elif world.model.has_no_room(session.uid, session.kind.stride, count):
            must = must | {"out_of_capacity"}
    if not world.settle(operation, reply, must):
        return
    assert isinstance(reply, messages.PagesChanged)
    assert session is not None
    worker.adopt(world.daemon, reply.extents)
    new = take_table(world, session, worker.held[session.name], session.pages)
    world.require(len(new) == count and reply.page_count == len(session.pages), f"{session.key}: {len(new)} new pages")
    world.require(reply.generation == session.generation, f"{session.key} at {reply.generation}")
    grant_extents(world, worker, session)
    require_clean(world, worker, session, new)


def truncate(world: World, operation: Operation, worker: SimulatedWorker) -> Steps:
    number, generation = a_target(world, worker)
    reference = a_lease(world, worker)
    session, against = against_verb(world, worker, number, generation)
    pages = world.chance.randrange(14)
    if session is not None and not against and not refusal(world, worker, reference) and session.name in worker.held:
        rows = world.chance.randint(0, session.rows)
        if world.chance.random() < 0.8:
            move_back(world, session, worker.held[session.name], rows)
        pages = page_count(session.rows) + world.chance.choice((0, 0, 0, 1, -1))
    touch(world, operation, number)
    reply = yield worker.speaker, lambda seq: messages.TruncateSession(seq, reference, number, generation, pages)
    refused = refusal(world, worker, reference)
    session, against = against_verb(world, worker, number, generation)
    must = refused or against
    if session is not None and not refused:
        if not page_count(session.rows) <= pages <= len(session.pages):
            must = must | {"invalid_value"}
        elif world.model.has_no_room(session.uid, session.kind.stride, len(shared_from(world, session, pages))):
            must = must | {"out_of_capacity"}
    if not world.settle(operation, reply, must):
        return
    assert isinstance(reply, messages.PagesChanged)
    assert session is not None
    held = worker.held[session.name]
    worker.adopt(world.daemon, reply.extents)
    replace_shared(world, session, worker, held, pages)
    session.generation += 1
    held.generation, held.is_sealed = reply.generation, False
    world.require((reply.generation, reply.page_count) == (session.generation, pages), f"truncated: {reply}")
    grant_extents(world, worker, session)


def move_back(world: World, session: Session, held: Held, rows: int) -> None:
    """What a worker does before it truncates: its commit record and its tokens go back to ``rows``."""
    world.serial += 1
    session.rows, session.payload = rows, b"back %d" % world.serial
    session.tokens = session.tokens[: max(rows, 0)]
    session.sampler = b"sampler %d" % world.serial
    session.logical = rows
    held.block.publish_commit(held.generation, rows, session.payload)
    held.block.logical_rows = rows
    held.block.truncate_tokens(len(session.tokens))
    held.block.append_tokens([], session.sampler)
    held.is_sealed = True


def append(world: World, worker: SimulatedWorker, *, cut_short: bool = False) -> None:
    """Decode: log tokens, write rows, publish the commit record. ``cut_short``: die amid it.

    Nothing here needs the daemon.
    """
    if not worker.held:
        return
    name = world.chance.choice(sorted(worker.held))
    held = worker.held[name]
    session = world.model.numbered(held.number)
    if session is None or session.key != (worker.uid, name) or session.is_damaged or held.is_sealed:
        return
    if session.generation != held.generation or last_page(session.rows) in held.table()[1]:
        return
    room = min(len(session.pages) * PAGE_TOKENS, session.capacity) - session.rows
    fresh = world.chance.choice((0, 1, 1, 3, 64, 100, 300, 300, 500))
    ids = [world.chance.randrange(1 << 20) for _ in range(min(fresh, session.capacity - len(session.tokens)))]
    count = min(
        room, max(0, len(session.tokens) + len(ids) - session.rows), world.chance.choice((1, 64, 200, 768, 768, 768))
    )
    world.serial += 1
    mark = f"{session.uid}|{world.serial}|".encode()
    for number in range(session.rows // PAGE_TOKENS, page_count(session.rows + count)):
        page = session.pages[number]
        world.require(not world.model.is_shared(page), f"{session.key} would write page {number}, which is shared")
        if number * PAGE_TOKENS >= session.rows:
            worker.write(page, session.kind.stride, (mark + b"h%d" % number).ljust(MARK, b"."), tail=False)
        if (number + 1) * PAGE_TOKENS <= session.rows + count:
            worker.write(page, session.kind.stride, (mark + b"t%d" % number).ljust(MARK, b"."), tail=True)
    block, sampler = held.block, b"sampler %d" % world.serial
    block.logical_rows = session.logical = session.rows + count
    if cut_short and world.chance.random() < 0.5:
        block._log[len(session.tokens) : len(session.tokens) + len(ids)] = memoryview(array("i", ids))
        return
    block.append_tokens(ids, sampler)
    session.tokens += ids
    session.sampler = sampler
    if cut_short:
        at = block._record_at(block._words[576 // 8] + 1)
        block._bytes[at : at + 40] = world.chance.randbytes(40)
        return
    session.rows += count
    session.payload = b"payload %d" % world.serial
    block.publish_commit(held.generation, session.rows, session.payload)
    world.done["append done"] += 1


def detach(world: World, operation: Operation, worker: SimulatedWorker) -> Steps:
    number, generation = a_target(world, worker)
    reference = a_lease(world, worker)
    touch(world, operation, number)
    reply = yield worker.speaker, lambda seq: messages.DetachSession(seq, reference, number, generation)
    refused = refusal(world, worker, reference)
    session, against = against_verb(world, worker, number, generation)
    if not world.settle(operation, reply, refused or against):
        return
    assert session is not None
    worker.let_go(session.name)
    world.model.store(session)


def close(world: World, operation: Operation, worker: SimulatedWorker) -> Steps:
    number, generation = a_target(world, worker)
    reference = a_lease(world, worker)
    touch(world, operation, number)
    if (target := world.model.numbered(number)) is not None:
        operation.touched[target.key].append(None)
        operation.number = number
    refused_then = refusal(world, worker, reference)
    reply = yield worker.speaker, lambda seq: messages.CloseSession(seq, reference, number, generation)
    refused = refusal(world, worker, reference)
    session, against = against_verb(world, worker, number, generation, closing=True)
    if operation.ended is not None:
        session, refused, against = operation.ended, refused_then, set()
    if not world.settle(operation, reply, refused or against):
        return
    assert session is not None
    if session.name in worker.held and worker.held[session.name].number == number:
        worker.let_go(session.name)
    if operation.ended is None:
        del world.model.memory[session.key]
    world.has_ended(session.key)
    if (
        not operation.was_delayed and world.chance.random() < 0.3
    ):  # case 3: the second close is a typed error, and takes nothing from anybody
        again = yield worker.speaker, lambda seq: messages.CloseSession(seq, worker.lease, number, generation)
        world.settle(operation, again, {"unknown_session"})


def fork(world: World, operation: Operation, worker: SimulatedWorker) -> Steps:
    mine = [session for session in world.model.memory.values() if session.uid == worker.uid]
    long = [session for session in mine if session.rows > PAGE_TOKENS]
    incomplete = [session for session in mine if session.absent]
    like = incomplete if incomplete and world.chance.random() < 0.7 else long
    source = world.chance.choice(like if like and world.chance.random() < 0.7 else mine) if mine else None
    number, generation = (source.number, source.generation) if source else (1, 1)
    generation += world.chance.choice((0, 0, 0, 0, 0, 0, 0, 0, 0, 1))
    most = source.rows if source else 0
    rows = world.chance.choice((most, most, most, most, *(world.chance.randint(0, most) for _ in range(4)), most + 1))
    name = a_free_name(world, worker.uid)
    key = worker.uid, name
    reference = a_lease(world, worker)
    if source is not None and rows <= most:
        image = source.first(rows)
        operation.touched[key] = [None, image, empty(image)]
    reply = yield worker.speaker, lambda seq: messages.ForkSession(seq, reference, number, generation, rows, name)
    refused = refusal(world, worker, reference)
    source = world.model.numbered(number)
    must = set(refused)
    if not refused:
        must = against_name(world, key)
        if source is None or source.uid != worker.uid:
            must = {"unknown_session"}
        else:
            must |= {"stale_generation"} if source.generation != generation else set()
            must |= {"session_damaged"} if source.is_damaged else set()
            must |= {"invalid_value"} if rows > source.rows else set()
            blocks, stride = source.block_bytes, source.kind.stride
            if world.model.has_no_room(worker.uid, stride, 1 if rows else 0, blocks):
                must |= {"out_of_capacity"}
    if not world.settle(operation, reply, must, preparing(world, key)):
        return
    assert isinstance(reply, messages.SessionOpened)
    assert source is not None
    image = source.first(rows)
    session = Session(worker.uid, name, 0, source.kind, source.capacity, 2, worker.lease.number)
    held = opened(world, worker, session, reply)
    shared = source.pages[: last_page(rows)]
    new = take_table(world, session, held, shared)
    world.require(len(new) == (1 if rows else 0), f"fork of {rows} rows has {len(new)} pages of its own")
    if rows:
        head, tail = image.pages[-1]
        new[0].head, new[0].tail = head, tail
    session.rows = session.logical = rows
    session.tokens, session.payload, session.sampler = list(image.tokens), image.payload, image.sampler
    world.same_image(key, world.observer.session(session.number)[2], session.image())
    grant_extents(world, worker, session)
    if len(shared) + 1 >= len(source.pages):  # it is answered before it is looked at which extents it needs
        grant_extents(world, worker, source)


def find_prefix(world: World, operation: Operation, worker: SimulatedWorker) -> Steps:
    kind = world.chance.choice(KINDS)
    mine = [session for session in world.model.memory.values() if not session.is_damaged]
    tokens: list[int] = []
    if mine:
        like = world.chance.choice(mine)
        kind, tokens = like.kind, list(like.tokens)
        if tokens and world.chance.random() < 0.4:
            tokens[world.chance.randrange(len(tokens))] += 1
    digests = prefix_hashes(kind, tokens)
    reference = a_lease(world, worker)
    arguments = reference, kind.fingerprint, kind.encoding, digests
    reply = yield worker.speaker, lambda seq: messages.FindPrefix(seq, *arguments)
    refused = refusal(world, worker, reference)
    if not world.settle(operation, reply, refused):
        return
    assert isinstance(reply, messages.PrefixFound)
    most = world.model.prefix_pages(worker.uid, kind, digests)
    world.require(reply.pages == most, f"{reply.pages} pages of a prefix found instead of {most}")
    found = world.model.numbered(reply.session)
    if most:
        world.require(found is not None and found.uid == worker.uid, f"prefix of {reply}")
        assert found is not None
        world.require((found.name, found.generation) == (reply.name, reply.generation), f"prefix of {reply}")
        same = prefix_hashes(kind, found.tokens[: min(found.rows, len(found.tokens))])[:most]
        world.require(same == digests[:most], f"session {reply.name} does not begin so")


def fetch(world: World, operation: Operation, worker: SimulatedWorker) -> Steps:
    """Pages that are absent are there afterwards, with the bytes that were saved."""
    number, generation = a_target(world, worker)
    session = world.model.numbered(number)
    most = len(session.pages) if session else 3
    first, count = world.chance.randint(0, most), world.chance.choice((1, 1, 2, most, 0))
    reference = a_lease(world, worker)
    must = refusal(world, worker, reference) or against_verb(world, worker, number, generation)[1]
    if not must and not 0 <= first < first + count <= most:
        must = {"invalid_value"}
    arguments = reference, number, generation, first, count
    reply = yield worker.speaker, lambda seq: messages.FetchPages(seq, *arguments)
    may = {"unknown_session"} if operation.was_delayed else set()
    if not world.settle(operation, reply, must, may) or session is None or world.model.numbered(number) is not session:
        return
    if session.name not in worker.held:  # it has died meanwhile
        return
    frames, absent = worker.held[session.name].table()
    world.require(absent.isdisjoint(range(first, first + count)), f"{session.key}: {absent} are absent after a fetch")
    for number_of_page, (head, tail) in list(enumerate(session.marks()))[first : first + count]:
        found = worker.read(frames[number_of_page], session.kind.stride)
        world.require(found[0] == head and tail in (None, found[1]), f"{session.key}: page {number_of_page} is {found}")


def scribble(world: World, operation: Operation, worker: SimulatedWorker) -> Steps:
    """A worker overwrites what the daemon reads of its block; then somebody looks."""
    if not worker.held:
        return
    name = world.chance.choice(sorted(worker.held))
    held = worker.held[name]
    session = world.model.numbered(held.number)
    if session is None or session.key != (worker.uid, name) or session.is_damaged or session.busy:
        return
    os.pwrite(held.fds[1], b"scribbled", 0)
    session.is_damaged = True
    operation.touched[session.key] = [None]
    reply = yield world.admin, messages.Stat
    world.require(isinstance(reply, messages.Stats), f"{reply}")
