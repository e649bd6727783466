"""A scheduler whose daemon goes away: with the next one it goes on, without one everybody is told, and it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from compute.serve.replies import status_of
from compute.serve.requests import Request
from compute.serve.scheduler import Scheduler
from kvd.run_dir import shm_prefix
from protocol.errors import EXIT_NO_DEVICE, DaemonUnavailable, UnknownSession
from tests.blackbox.daemon_process import DaemonProcess
from tests.blackbox.scheduling import SETTINGS, Client, alone, prompt, serve, until, worker_of
from tests.leaks import orphans_expected

pytestmark = pytest.mark.leaks_per_module


class Daemons:
    """One daemon after the other on one run directory."""

    def __init__(self, run_dir: Path, stack: ExitStack) -> None:
        self._run_dir, self._stack = run_dir, stack
        self.start()

    def start(self) -> None:
        daemon = DaemonProcess(self._run_dir, drain_timeout_s="0", vram_capacity="256MiB")
        self._daemon = self._stack.enter_context(daemon).wait_ready()

    def kill(self) -> None:
        self._daemon.process.kill()
        self._daemon.process.wait()


@pytest.fixture
def daemons(run_dir: Path) -> Iterator[Daemons]:
    with orphans_expected(), ExitStack() as stack:
        yield Daemons(run_dir, stack)


def test_a_scheduler_goes_on_with_the_next_daemon(run_dir: Path, daemons: Daemons) -> None:
    """It finds out by a session to end, by a request, or in the queue: nobody is told but of what was asked."""
    with worker_of(run_dir, 60.0) as worker:
        scheduler = Scheduler(worker, SETTINGS)
        before, running, after, queued = prompt(70), Client(), Client(), Client()
        scheduler.submit(Request(before, 400, session="kept"), running)
        until(scheduler, lambda: len(running.tokens) > 10)
        daemons.kill()
        daemons.start()
        ended = scheduler.end_session("nobody's")
        scheduler.turn()
        assert isinstance(ended.exception(0), UnknownSession)
        daemons.kill()
        daemons.start()
        scheduler.submit(Request(prompt(40), 10), after)
        serve(scheduler, after)
        assert not running.ended
        check = scheduler.sessions.check

        def checked(request: Request) -> None:
            check(request)
            daemons.kill()
            daemons.start()

        scheduler.sessions.check = checked  # type: ignore[method-assign]
        scheduler.submit(Request(prompt(50), 10), queued)
        serve(scheduler, queued, running)
        scheduler.stop()
        scheduler.run()
        assert running.tokens == alone(worker, before, 400)
        assert after.tokens == alone(worker, prompt(40), 10)
        assert queued.tokens == alone(worker, prompt(50), 10)
        scheduler.sessions.end("kept")


@pytest.mark.parametrize("first", ["request", "session", "cancellation"])
def test_everybody_is_told_where_no_daemon_comes(run_dir: Path, daemons: Daemons, first: str) -> None:
    """Those that run, those that come, and those that end a session, whoever finds out."""
    with worker_of(run_dir) as worker:
        scheduler = Scheduler(worker, SETTINGS)
        clients = [Client() for _ in range(4)]
        numbers = [scheduler.submit(Request(prompt(70), 400), client) for client in clients[:2]]
        until(scheduler, lambda: all(client.tokens for client in clients[:2]))
        daemons.kill()
        futures = []
        if first == "cancellation":
            scheduler.cancel(numbers[0])
        if first == "session":
            futures = [scheduler.end_session(name) for name in ("one", "two")]
        for client in clients[2:]:
            scheduler.submit(Request(prompt(40), 10), client)
        with pytest.raises(DaemonUnavailable) as caught:
            scheduler.run()
        assert caught.value.exit_status == EXIT_NO_DEVICE
        for error in (*(client.error for client in clients), *(future.exception(0) for future in futures)):
            assert isinstance(error, DaemonUnavailable)
            assert status_of(error) == 503
    daemons.start()  # it ends what that one left


def test_a_daemon_that_lacks_a_session_is_none_to_go_on_with(run_dir: Path, daemons: Daemons) -> None:
    """It is not the fault of the request that finds out."""
    with worker_of(run_dir, 60.0) as worker:
        scheduler = Scheduler(worker, SETTINGS)
        running, after = Client(), Client()
        scheduler.submit(Request(prompt(70), 400), running)
        until(scheduler, lambda: bool(running.tokens))
        daemons.kill()
        for path in Path("/dev/shm").glob(f"{shm_prefix(run_dir)[1:]}-session-*"):
            path.unlink()
        daemons.start()
        scheduler.submit(Request(prompt(40), 10), after)
        with pytest.raises(DaemonUnavailable, match="does not take back what this process holds"):
            scheduler.run()
        for client in (running, after):
            assert isinstance(client.error, DaemonUnavailable)
