"""A request of an HTTP client on its way: events from the scheduler's thread, text, and the client's going away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

from compute.serve.requests import Decoded, Event, Failed, Finished, Request
from compute.serve.scheduler import Scheduler
from compute.serve.text import Answer


class Call:
    """A `Sink` whose events are read by one task of the event loop that it is made in.

    ``submit`` raises what the scheduler's does. Reading ends with `Finished` or `Failed`; if it ends early, by an
    exception or because the client has gone, the request is cancelled.
    """

    def __init__(self, scheduler: Scheduler, answer: Answer) -> None:
        self._scheduler, self._answer = scheduler, answer
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[Event, str]] = asyncio.Queue()
        self._number: int | None = None
        self._ended = False

    def submit(self, request: Request) -> None:
        self._number = self._scheduler.submit(request, self)

    # On the scheduler's thread

    def take(self, token: int) -> bool:
        return self._answer.take(token)

    def emit(self, event: Event) -> None:
        text = ""
        if isinstance(event, Decoded | Finished):
            text = self._answer.drain(last=isinstance(event, Finished))
        with suppress(RuntimeError):  # the loop has been closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._events.put_nowait, (event, text))

    # In the event loop

    async def events(
        self, gone: Callable[[], Awaitable[object]], *, every_s: float
    ) -> AsyncIterator[tuple[Event, str] | None]:
        """Events with the text that each adds; None when nothing has come for ``every_s``.

        Ends without a last event when ``gone`` returns: the client has gone away, and the request is cancelled.
        """
        watch = asyncio.ensure_future(gone())
        next_event: asyncio.Future[tuple[Event, str]] = asyncio.ensure_future(self._events.get())
        try:
            while True:
                waited: set[asyncio.Future[Any]] = {watch, next_event}
                await asyncio.wait(waited, timeout=every_s, return_when=asyncio.FIRST_COMPLETED)
                if next_event.done():
                    event, text = next_event.result()
                    self._ended = isinstance(event, Finished | Failed)
                    yield event, text
                    if self._ended:
                        return
                    next_event = asyncio.ensure_future(self._events.get())
                elif watch.done():
                    return
                else:
                    yield None
        finally:
            watch.cancel()
            next_event.cancel()
            self.cancel()

    def cancel(self) -> None:
        """Cancel the request, unless it has ended."""
        if self._number is not None and not self._ended:
            self._ended = True
            self._scheduler.cancel(self._number)
