"""Pages that come later, when their session ends before they do."""

from __future__ import annotations

import os
from pathlib import Path

import structlog

from kvd.saved.jobs import Jobs
from kvd.saved.lazy import LazyRestores
from kvd.tiers.disk import SAVED
from tests.unit.test_copies import copying, filled, run


def test_no_page_comes_to_a_frame_that_is_another_sessions_by_now(tmp_path: Path) -> None:
    """The session ends while its file is being opened, and another one gets its frames."""
    with copying(tmp_path / "state") as (world, copies, spilling):
        run(copies.write(filled(world, "s", 300, "old"), SAVED))
        world.close(world.session("s"))
        jobs = Jobs()
        lazy = LazyRestores(copies, world.sessions, jobs, structlog.get_logger())
        lazy._bringing = True  # here, step by step
        run(copies.read(os.getuid(), "s", SAVED, lambda _: None, spilling.prepare, lazy=True))
        session = world.session("s")
        lazy.add(session, SAVED)
        steps = lazy._bring()
        step = next(steps)
        frames = session.frames
        world.sessions.end(session)
        other = filled(world, "other", 300, "new")
        assert set(other.frames) == set(frames)
        while True:
            assert callable(step)
            try:
                step = steps.send(step())
            except StopIteration:
                break
        assert [world.read_page(other, page).rstrip(b"\0") for page in range(5)] == [
            b"new %d" % page for page in range(5)
        ]
        assert lazy.is_idle
        jobs.close()
