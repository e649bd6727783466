"""Sessions that come and go, share and split, in an order from a seed: the books never drift from what there is."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable

import pytest

from kvd.sessions.session import Session
from protocol.errors import InvalidValue, OutOfCapacity
from protocol.messages import ExtendSession
from tests.session_world import MIB, NOBODY, STRIDE, SessionWorld, session_world
from tests.trials import report

SHORT, LONG = 500, 100_000
CHECK_EVERY = 50


class Churn:
    """Random verbs on a world, and what each session's pages must say."""

    def __init__(self, world: SessionWorld, seed: int) -> None:
        self.world = world
        self.choice = random.Random(seed)
        self.made = 0
        self.done: Counter[str] = Counter()
        self.pages: dict[str, list[bytes]] = {}

    def step(self) -> None:
        verbs: list[Callable[[], None]] = [self.create, self.create, self.fork, self.fork]
        if len(self.world.sessions) > 8:
            verbs += [self.close] * 6
        if len(self.world.sessions):
            verbs += [self.grow, self.truncate, self.pass_on]
        verb = self.choice.choice(verbs)
        try:
            verb()
            self.done[verb.__name__] += 1
        except (OutOfCapacity, InvalidValue):
            self.done["refused"] += 1
            if len(self.world.sessions):
                self.close()

    def any(self) -> Session:
        return self.choice.choice(list(self.world.sessions))

    def create(self) -> None:
        name = f"s{self.made}"
        pages = self.choice.choice([0, 0, 1, 2, 5, 30])
        try:
            session = self.world.create(name, pages, tokens=self.choice.choice([64, 1000, 6400]))
        finally:
            if self.world.sessions.has(os.getuid(), name):
                self.made += 1
                self.pages[name] = []
        self.write(session, 0)

    def grow(self) -> None:
        session = self.any()
        if session.lease is None:
            return
        had = len(session.frames)
        request = ExtendSession(1, NOBODY, session.number, session.header.generation, self.choice.randint(1, 9))
        self.world.sessions.extend(session.lease, request)
        self.write(session, had)

    def write(self, session: Session, first: int) -> None:
        """Write the pages from ``first`` on, and commit all."""
        known = self.pages[session.name]
        for page in range(first, len(session.frames)):
            data = self.choice.randbytes(16).ljust(STRIDE, b"\0")
            self.world.write_page(session, page, data)
            known[page:] = [data]
        self.commit(session, min(64 * len(session.frames), session.header.token_capacity))

    def commit(self, session: Session, rows: int) -> None:
        with self.world.worker_block(session) as block:
            block.publish_commit(session.header.generation, rows)

    def fork(self) -> None:
        source = self.any() if len(self.world.sessions) else self.world.create("source", 3)
        self.pages.setdefault(source.name, [self.world.read_page(source, page) for page in range(len(source.frames))])
        with self.world.worker_block(source) as block:
            rows = self.choice.randint(0, block.commit.rows)
        fork = self.world.fork(source, rows, f"s{self.made}", self.choice.choice([self.world.first, self.world.second]))
        self.made += 1
        self.pages[fork.name] = self.pages[source.name][: len(fork.frames)]

    def truncate(self) -> None:
        session = self.any()
        if session.lease is None:
            return
        with self.world.worker_block(session) as block:
            rows = self.choice.randint(0, block.commit.rows)
        self.commit(session, rows)
        pages = -(-rows // 64)
        self.world.truncate(session, pages)
        del self.pages[session.name][pages:]
        if rows:
            self.write(session, pages - 1)

    def pass_on(self) -> None:
        """Detach a session, or have the other lease open it."""
        session = self.any()
        if session.lease is None:
            self.world.open(session.name, self.choice.choice([self.world.first, self.world.second]))
        else:
            self.world.detach(session)

    def close(self) -> None:
        session = self.any()
        if session.lease is None:
            self.world.open(session.name, self.world.first)
        self.check_pages(session)
        self.world.close(session)
        del self.pages[session.name]

    def check_pages(self, session: Session) -> None:
        found = [self.world.read_page(session, page) for page in range(len(session.frames))]
        assert found == self.pages[session.name], f"{session.name} has foreign bytes"

    def check(self) -> None:
        self.world.ledger.check()
        for session in self.world.sessions:
            self.check_pages(session)


@pytest.mark.parametrize(
    "count", [SHORT, pytest.param(LONG, marks=[pytest.mark.torture, pytest.mark.timeout(14400)])], ids=["short", "long"]
)
def test_sessions_come_and_go_without_drift(count: int) -> None:
    with session_world(capacity=8 * MIB, extent=2 * MIB, state_capacity=8 * MIB) as world:
        churn = Churn(world, seed=11)
        fds = len(os.listdir("/proc/self/fd"))
        steps = 0
        while churn.made < count:
            churn.step()
            steps += 1
            if steps % CHECK_EVERY == 0:
                churn.check()
        for session in world.sessions:
            if session.lease is None:
                world.open(session.name, world.first)
            world.close(session)
        world.ledger.check()
        assert len(os.listdir("/proc/self/fd")) == fds
        assert world.committed("pages") == world.committed("shared_pages") == world.committed("session_state") == 0
        report("sessions that drift", churn.made, steps=steps, **churn.done)
        assert min(churn.done[verb] for verb in ("create", "fork", "grow", "truncate", "pass_on", "close")) > 20
        assert churn.done["refused"] > 0


def test_a_foreign_byte_is_noticed() -> None:
    with session_world() as world:
        churn = Churn(world, seed=1)
        session = world.create("s0", 2)
        churn.pages["s0"] = []
        churn.write(session, 0)
        churn.check()
        world.write_page(session, 1, b"foreign")
        with pytest.raises(AssertionError, match="s0 has foreign bytes"):
            churn.check()
        world.write_page(session, 1, churn.pages["s0"][1])
