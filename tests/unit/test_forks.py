"""Forks share pages by count, copy what is written, and are found by what their tokens are."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator

import pytest

from kvd.config import LimitsConfig
from kvd.sessions.blocks import SessionBlocks
from kvd.sessions.session import Session
from protocol.errors import (
    InvalidValue,
    OutOfCapacity,
    SessionBusy,
    SessionExists,
    StaleGeneration,
    UnknownSession,
)
from protocol.messages import CreateSession, ExtendSession, FindPrefix, ForkSession
from protocol.prefix import chain_start, extend_chain
from tests.session_world import MIB, NOBODY, PRINT, STRIDE, SessionWorld, open_lease, session_world


@pytest.fixture
def world() -> Iterator[SessionWorld]:
    with session_world() as made:
        yield made


def tagged(name: str, page: int) -> bytes:
    return f"{name} page {page}".encode()


def filled(world: SessionWorld, name: str, rows: int, tokens: list[int] | None = None) -> Session:
    """A session with ``rows`` committed rows, every page saying whose it is."""
    pages = -(-rows // 64)
    session = world.create(name, pages)
    for page in range(pages):
        world.write_page(session, page, tagged(name, page))
    world.acknowledge(session, list(range(rows)) if tokens is None else tokens, rows, b"terminal")
    return session


def owner(world: SessionWorld, session: Session) -> list[str]:
    """Whose bytes each page has."""
    return [world.read_page(session, page).rstrip(b"\0").decode() for page in range(len(session.frames))]


def test_a_fork_shares_all_but_the_page_of_its_last_row(world: SessionWorld) -> None:
    source = filled(world, "a", 640)
    before = world.committed("pages")
    fork = world.fork(source, 640, "b", world.second)
    assert fork.frames[:9] == source.frames[:9]
    assert fork.frames[9] != source.frames[9]
    assert owner(world, fork) == owner(world, source) == [tagged("a", page).decode() for page in range(10)]
    assert world.committed("shared_pages") == 9 * STRIDE
    assert world.committed("pages") + world.committed("shared_pages") == before + STRIDE
    with world.worker_block(fork) as block:
        assert (block.tokens(), block.sampler_state) == (list(range(640)), b"sampler")
        assert (block.commit.rows, block.commit.payload, block.logical_rows) == (640, b"terminal", 640)
        assert block.commit.generation < fork.header.generation
    assert (fork.lease, fork.header.uid, fork.state) == (world.second, source.header.uid, "held")


@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 128, 200])
def test_a_fork_of_fewer_rows_has_their_tokens_and_no_terminal_state(world: SessionWorld, rows: int) -> None:
    source = filled(world, "a", 300)
    fork = world.fork(source, rows, "b")
    assert len(fork.frames) == -(-rows // 64)
    assert [frame in source.frames for frame in fork.frames] == [True] * (max(rows - 1, 0) // 64) + [False] * bool(rows)
    with world.worker_block(fork) as block:
        assert (block.tokens(), block.sampler_state) == (list(range(rows)), b"")
        assert (block.commit.rows, block.commit.payload) == (rows, b"")


def test_case_03_a_fork_that_is_never_read_and_closed_twice(world: SessionWorld) -> None:
    source = filled(world, "a", 640)
    shared = source.frames[:9]
    fork = world.fork(source, 640, "b")
    assert {world.sessions.frames.references(frame) for frame in shared} == {2}
    world.close(fork)
    assert {world.sessions.frames.references(frame) for frame in shared} == {1}
    with pytest.raises(UnknownSession):
        world.close(fork)
    assert owner(world, source) == [tagged("a", page).decode() for page in range(10)]
    assert {world.sessions.frames.references(frame) for frame in shared} == {1}
    world.close(source)
    with pytest.raises(UnknownSession):
        world.close(source)
    world.ledger.check()
    assert world.committed("pages") == world.committed("shared_pages") == 0


def test_case_06_two_sessions_share_a_thousand_tokens_and_diverge(world: SessionWorld) -> None:
    """Each writes whatever it may: from the page of its last committed row on. No page has a foreign row."""
    source = filled(world, "a", 1000)
    fork = world.fork(source, 1000, "b", world.second)
    for session in (source, fork):
        world.write_page(session, 15, tagged(session.name, 15))
    assert owner(world, source) == [tagged("a", page).decode() for page in range(16)]
    assert owner(world, fork) == [tagged("a", page).decode() for page in range(15)] + ["b page 15"]
    world.close(source)
    assert owner(world, fork) == [tagged("a", page).decode() for page in range(15)] + ["b page 15"]


def test_truncation_below_what_is_shared_copies_what_may_be_written(world: SessionWorld) -> None:
    source = filled(world, "a", 640)
    fork = world.fork(source, 640, "b")
    with world.worker_block(source) as block:
        block.publish_commit(source.header.generation, 300)
    world.truncate(source, 5)
    assert source.frames[:4] == fork.frames[:4]
    assert source.frames[4] not in fork.frames
    assert owner(world, source)[4] == "a page 4", "the rows that stay are copied"
    for page in range(4, len(source.frames)):
        world.write_page(source, page, b"new")
    assert owner(world, fork) == [tagged("a", page).decode() for page in range(10)]
    world.ledger.check()
    references = [world.sessions.frames.references(frame) for frame in fork.frames]
    assert references == [2] * 4 + [1] * 6


def test_a_fork_gives_nobody_an_extent_that_only_its_source_had(world: SessionWorld) -> None:
    """The source's second extent may be another uid's by the time that the fork is opened, or forked again."""
    a_whole_extent = 4 * MIB // STRIDE
    source, hole = world.create("a", 2), world.create("hole", 4)
    filler = world.create("filler", a_whole_extent - 6, tokens=64 * a_whole_extent)
    world.sessions.extend(world.first, ExtendSession(1, NOBODY, source.number, 1, 1))
    world.acknowledge(source, list(range(192)), 192)
    assert source.extents == {0, 1}
    world.close(hole)  # where the forks' own pages go
    fork = world.fork(source, 64 * 3, "b")
    again = world.fork(fork, 64 * 3, "c")
    for session in (filler, source):
        world.close(session)
    for session in (fork, again):
        assert session.extents == {frame >> 32 for frame in session.frames} == {0}
        world.detach(session)
        assert {extent.number for extent in world.open(session.name, world.second).extents} <= {0}
    world.fork(again, 64 * 3, "d", world.second)


def cut_short(world: SessionWorld) -> tuple[Session, Session]:
    """A session of ten pages whose holder moved its commit back to 100 rows and died before it truncated, and a fork.

    The page of row 99 is shared, and the next holder would write row 100 to it.
    """
    source = filled(world, "a", 640)
    fork = world.fork(source, 640, "b", world.second)
    cut(world, source)
    return source, fork


def cut(world: SessionWorld, session: Session) -> None:
    with world.worker_block(session) as block:
        block.publish_commit(session.header.generation, 100)
        block.truncate_tokens(100)
    world.sessions.lease_ended(world.first)


def test_an_opening_after_a_truncation_that_was_cut_short_copies_what_may_be_written(world: SessionWorld) -> None:
    source, fork = cut_short(world)
    shared, before = source.frames, world.committed("pages") + world.committed("shared_pages")
    world.open("a", world.first)
    assert source.frames[0] == shared[0]
    assert not set(source.frames[1:9]) & set(fork.frames)
    assert owner(world, source)[:2] == [tagged("a", page).decode() for page in range(2)]
    world.write_page(source, 1, b"diverged")
    assert owner(world, fork) == [tagged("a", page).decode() for page in range(10)]
    assert world.committed("pages") + world.committed("shared_pages") == before + 8 * STRIDE


def test_a_prefix_that_was_cut_and_written_again_is_not_found_by_its_old_tokens(world: SessionWorld) -> None:
    source = filled(world, "a", 640)
    digests = extend_chain(chain_start(PRINT, "q8g64"), struct.pack("<640i", *range(640)))
    find = FindPrefix(1, NOBODY, PRINT, "q8g64", digests)
    assert world.forks.find_prefix(world.first, find).pages == 10
    cut(world, source)
    world.open("a", world.first)
    world.acknowledge(source, [7] * 540, 640)
    assert world.forks.find_prefix(world.first, find).pages == 1


def test_truncation_that_finds_no_room_changes_nothing(world: SessionWorld) -> None:
    source = filled(world, "a", 640)
    world.fork(source, 640, "b")
    most = 16 * MIB // STRIDE - 11
    world.create("c", most, tokens=64 * most)
    with world.worker_block(source) as block:
        block.publish_commit(source.header.generation, 300)
    before = (source.header, source.frames, [entry.balance for entry in world.ledger.entries()])
    with pytest.raises(OutOfCapacity, match="host"):
        world.truncate(source, 5)
    assert (source.header, source.frames, [entry.balance for entry in world.ledger.entries()]) == before


def test_refused_forks_leave_nothing(world: SessionWorld) -> None:
    source = filled(world, "a", 100)
    foreign = open_lease(world.leases, uid=12345)
    before = [(str(entry.account), entry.balance) for entry in world.ledger.entries()]

    def refused(error: type[Exception], *, generation: int = 1, rows: int = 100, name: str = "b", lease=world.second):
        with pytest.raises(error):
            world.forks.fork(lease, ForkSession(1, NOBODY, source.number, generation, rows, name))
        assert [(str(entry.account), entry.balance) for entry in world.ledger.entries()] == before

    refused(StaleGeneration, generation=2)
    refused(InvalidValue, rows=101)
    refused(InvalidValue, rows=-1)
    refused(InvalidValue, name="no/name")
    refused(SessionExists, name="a")
    refused(UnknownSession, lease=foreign)
    world.create("full", 16 * MIB // STRIDE - 2, tokens=1 << 18)
    before = [(str(entry.account), entry.balance) for entry in world.ledger.entries()]
    refused(OutOfCapacity)
    with pytest.raises(SessionBusy):
        world.open("a", world.second)


def test_forks_of_forks_stored_and_opened_keep_the_books(world: SessionWorld) -> None:
    source = filled(world, "a", 640)
    second = world.fork(source, 500, "b")
    third = world.fork(second, 400, "c", world.second)
    world.detach(source)
    world.close(second)
    world.open("a", world.second)
    world.detach(third)
    world.ledger.check()
    assert owner(world, third) == [tagged("a", page).decode() for page in range(7)]
    world.sessions.lease_ended(world.second)
    world.ledger.check()
    assert world.session("a").state == "stored"
    assert owner(world, world.session("a")) == [tagged("a", page).decode() for page in range(10)]


def test_a_thousand_sessions_over_one_prefix_take_their_own_tails_only() -> None:
    with session_world(capacity=32 * MIB, state_capacity=64 * MIB, most=1024) as world:
        source = filled(world, "source", 64 * 100)
        before = world.committed("pages") + world.committed("shared_pages")
        state = world.committed("session_state")
        for index in range(1000):
            fork = world.fork(source, 64 * 100 - index % 64, f"fork-{index}")
            assert fork.frames[:99] == source.frames[:99]
        world.ledger.check()
        grown = world.committed("pages") + world.committed("shared_pages") - before
        assert grown == 1000 * STRIDE, "one page of its own for each"
        assert world.committed("session_state") == 1001 * state
        assert {world.sessions.frames.references(frame) for frame in source.frames[:99]} == {1001}
        for session in world.sessions:
            if session is not source:
                world.close(session)
        world.ledger.check()
        assert world.committed("pages") + world.committed("shared_pages") == before


def test_a_uid_has_no_more_than_its_limit_and_shared_pages_count_once(world: SessionWorld) -> None:
    world.sessions.limit(LimitsConfig(host_per_uid=12 * STRIDE))
    source = filled(world, "a", 640)
    world.fork(source, 640, "b")
    refusal = (
        f"host for uid {os.getuid()}: {2 * STRIDE} bytes asked, {STRIDE} free of {12 * STRIDE}; held by sessions of"
    )
    with pytest.raises(OutOfCapacity, match=refusal):
        world.create("c", 2)
    world.fork(source, 64, "d")
    with pytest.raises(OutOfCapacity, match="0 free"):
        world.fork(source, 64, "e")
    foreign = open_lease(world.leases, uid=12345)
    opened = world.sessions.create(foreign, CreateSession(1, NOBODY, "c", PRINT, "q8g64", 5000, 6400, 8))
    world.sessions.extend(foreign, ExtendSession(1, NOBODY, opened.session, 1, 12))


def chain(tokens: list[int], encoding: str = "q8g64") -> list[bytes]:
    """The specification's hashes, by another hand."""
    before = hashlib.sha256(b"kvd prefix 1\0" + PRINT + encoding.encode()).digest()
    found = []
    for start in range(0, len(tokens) // 64 * 64, 64):
        before = hashlib.sha256(before + struct.pack("<64i", *tokens[start : start + 64])).digest()
        found.append(before)
    return found


def test_hashes_are_those_of_the_specification() -> None:
    tokens = list(range(-5, 300))
    packed = struct.pack(f"<{len(tokens)}i", *tokens)
    assert extend_chain(chain_start(PRINT, "q8g64"), packed) == chain(tokens)
    first = extend_chain(chain_start(PRINT, "q8g64"), packed[:512])
    assert first + extend_chain(first[-1], packed[512:]) == chain(tokens)


def test_the_longest_prefix_is_found_by_its_tokens(world: SessionWorld) -> None:
    tokens = list(range(1000))
    filled(world, "short", 300, tokens[:300])
    long = filled(world, "long", 640, tokens[:640])
    filled(world, "other", 640, tokens[:128] + [7] * 512)
    foreign = open_lease(world.leases, uid=12345)

    def find(wanted: list[bytes], lease=world.second, encoding: str = "q8g64") -> tuple[str, int, int]:
        found = world.forks.find_prefix(lease, FindPrefix(1, NOBODY, PRINT, encoding, wanted))
        return found.name, found.generation, found.pages

    assert find(chain(tokens)) == ("long", 1, 10)
    assert find(chain(tokens[:300])) in (("short", 1, 4), ("long", 1, 4))
    assert find(chain(tokens[:128] + [7] * 100)) == ("other", 1, 3)
    assert find(chain([*tokens[:64], 1, *tokens[65:]]))[2] == 1
    assert find(chain([1, *tokens[1:]])) == find([]) == ("", 0, 0)
    assert find(chain(tokens), foreign) == find(chain(tokens, "f32"), encoding="f32") == ("", 0, 0)
    with world.worker_block(long) as block:
        block.publish_commit(1, 256)
        block.truncate_tokens(256)
    world.truncate(long, 4)
    assert find(chain(tokens))[2] == 4
    world.acknowledge(long, [3] * 384, 640)
    assert find(chain(tokens))[2] == 4, "what is written after a truncation is hashed anew"
    world.sessions.extend(world.first, ExtendSession(1, NOBODY, long.number, 2, 6))
    assert find(chain(tokens[:256] + [3] * 384)) == ("long", 2, 10)
    with pytest.raises(InvalidValue, match="digests"):
        find([b"short"])
    with pytest.raises(InvalidValue, match="digests"):
        find([bytes(32)] * 16385)


def test_a_source_that_ends_before_what_it_shares_was_counted(world: SessionWorld) -> None:
    source = filled(world, "a", 640)
    for name in ("b", "c"):
        world.forks.fork(world.first, ForkSession(1, NOBODY, source.number, source.header.generation, 640, name))
    assert world.committed("shared_pages") == 0, "nobody has asked for a count yet"
    world.close(source)
    world.ledger.check()
    assert {world.sessions.frames.references(frame) for frame in world.session("b").frames[:9]} == {2}
    world.close(world.session("b"))
    assert owner(world, world.session("c")) == [tagged("a", page).decode() for page in range(10)]


def test_a_source_that_is_truncated_amid_a_fork_refuses_it(
    world: SessionWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = filled(world, "a", 640, list(range(640)))
    before = [(str(entry.account), entry.balance.committed) for entry in world.ledger.entries()]
    copy_log = SessionBlocks.copy_log

    def cut(blocks: SessionBlocks, of: SessionBlocks, tokens: int) -> None:
        copy_log(blocks, of, tokens)
        with world.worker_block(source) as block:
            block.truncate_tokens(600)

    monkeypatch.setattr(SessionBlocks, "copy_log", cut)
    with pytest.raises(SessionBusy, match="truncated while it was forked"):
        world.fork(source, 640, "b")
    assert [(str(entry.account), entry.balance.committed) for entry in world.ledger.entries()] == before


def test_frames_that_a_thread_writes_go_to_nobody_else_meanwhile(world: SessionWorld) -> None:
    session = filled(world, "a", 640)
    written, others = session.frames[:4], 16 * MIB // STRIDE - 4
    with world.sessions.frames.keeping(written):
        world.close(session)
        assert world.committed("pages") == 4 * STRIDE
        filler = world.create("b", others, tokens=64 * others)
        assert not set(filler.frames) & set(written)
        with pytest.raises(OutOfCapacity):
            world.create("c", 1)
    world.ledger.check()
    assert set(world.create("d", 4).frames) == set(written)


def test_a_fork_of_few_rows_is_granted_the_extents_of_those(world: SessionWorld) -> None:
    most = 2 * 4 * MIB // STRIDE
    source = world.create("a", most, tokens=64 * most)
    world.acknowledge(source, list(range(64 * most)), 64 * most)
    assert len(source.extents) == 2
    request = ForkSession(1, NOBODY, source.number, source.header.generation, 100, "b")
    opened = world.forks.fork(world.second, request)
    assert {extent.number for extent in opened.extents} == {frame >> 32 for frame in world.session("b").frames}
