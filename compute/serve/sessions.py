"""The histories of a server's sessions: opened and reserved for, kept while they are idle, let go.

A request's pages, its key blocks and its VRAM are all taken before its first token is read, so that no request that has
begun can run out of memory. What a request that ended did not need goes back. A session that has answered stays open
for a while, since the next turn often follows soon; the longest idle one is let go when memory is needed. Named
sessions stay stored in the daemon, which takes them to disk when host RAM is short; others end.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from compute.histories import HistorySettings
from compute.history import History
from compute.serve.errors import ContextExceeded
from compute.serve.requests import Request
from compute.worker import Worker
from protocol.errors import OutOfCapacity, SessionBusy, StaleGeneration, UnknownSession
from protocol.layout import PAGE_TOKENS, round_up

GRANULARITY = 2 << 20
"""Bytes: VRAM is given in multiples of it."""
LEAST_CAPACITY = 4096
"""Tokens that a history without a name has room for, at least: others may begin with its pages, and grow beyond it."""


@dataclass(frozen=True)
class SessionSettings:
    """``context`` is the most tokens of a session, ``slack`` the rows that steps write behind its last token."""

    context: int
    hot_rows: int
    ring_pages: int
    slack: int
    idle_s: float
    """Seconds that a session stays open without a request."""
    default_output: int
    """Tokens of an answer where a request does not say how many."""


@dataclass(eq=False)
class OpenSession:
    """A history that answers a request, or is idle. ``name`` is the daemon's for it.

    ``before`` is how many tokens and rows it had before the request, to go back to if nothing is answered.
    """

    name: str
    named: bool
    history: History
    before: tuple[int, int] = (0, 0)
    max_tokens: int = 0
    """Tokens that the request may add to its prompt."""
    cached: int = 0
    """Rows that were there before it."""
    idle_since: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens in its log."""
        assert self.history.session is not None
        return self.history.session.state.token_count

    def unread(self) -> list[int]:
        """Tokens of the log that have no rows yet."""
        assert self.history.session is not None
        return self.history.session.state.tokens(self.history.length)

    def log(self, tokens: Sequence[int]) -> None:
        """Acknowledge ``tokens``."""
        assert self.history.session is not None
        self.history.session.state.append_tokens(tokens)


class Sessions:
    """The open sessions of ``worker``: those that answer, and idle ones."""

    def __init__(self, worker: Worker, settings: SessionSettings, now: Callable[[], float] = time.monotonic) -> None:
        self._worker, self.settings, self._now = worker, settings, now
        self.answering: dict[str, OpenSession] = {}
        self.idle: OrderedDict[str, OpenSession] = OrderedDict()
        """The longest idle first."""

    def check(self, request: Request) -> None:
        """Raise what `open` certainly would: `SessionBusy`, `ContextExceeded`, or `OutOfCapacity` of a tier that is
        smaller than what the request needs alone.
        """
        self._refuse_answering(request.session)
        self._room(0, len(request.prompt), request, self.settings.context)
        self._worker.together(lambda: self._check_capacity(request))

    def _check_capacity(self, request: Request) -> None:
        tokens = len(request.prompt) + (request.max_tokens or self.settings.default_output)
        needed = self._footprint(min(tokens, self.settings.context))
        for tier in self._worker.stat().tiers:
            asked = needed.get("host" if tier.tier == "host" else "vram", 0)
            if tier.tier not in ("host", f"vram:{self._worker.device.uuid}") or asked <= tier.capacity:
                continue
            raise OutOfCapacity(tier.tier, asked, tier.capacity - tier.committed, tier.capacity)

    def open(self, request: Request) -> OpenSession:
        """A history for ``request``, with memory for all that it may write, and its tokens in its log.

        Raises `OutOfCapacity` and what `check` and the daemon raise; then everything is as it was, but that idle
        sessions may have been let go to make room.
        """
        self._refuse_answering(request.session)
        while True:
            try:
                opened = self._open(request)
            except OutOfCapacity:
                if not self._let_go_of_one(keep=request.session):
                    raise
            else:
                self.answering[opened.name] = opened
                return opened

    def done(self, opened: OpenSession, *, answered: bool, hidden: Tensor | None = None) -> None:
        """Its request has ended. Unless it ``answered`` with a token at least, the session is as it was before.

        ``hidden`` [hidden size] is the last row's, where it is known. It is stored with the boundary: where no step has
        written the MTP layer's row behind it yet, whoever goes on needs it for that.
        """
        del self.answering[opened.name]
        tokens, rows = opened.before
        if answered:
            opened.history.trim()
            self._worker.commit(opened.history, hidden)
        elif opened.named and tokens:
            self._undo(opened, tokens, rows)
        else:
            self._worker.end(opened.history)
            return
        opened.idle_since = self._now()
        self.idle[opened.name] = opened
        if self.settings.idle_s == 0:
            self._let_go(opened)

    def expire(self) -> bool:
        """Let go of those that were idle for long enough; whether there were any."""
        limit = self._now() - self.settings.idle_s
        expired = [opened for opened in self.idle.values() if opened.idle_since <= limit]
        for opened in expired:
            self._let_go(opened)
        return bool(expired)

    def let_go(self, name: str) -> bool:
        """Close an idle session now; whether there was one."""
        opened = self.idle.get(name)
        if opened is not None:
            self._let_go(opened)
        return opened is not None

    def end(self, name: str) -> None:
        """End a session, idle here or stored. Raises `SessionBusy`, or what the daemon raises."""
        self._refuse_answering(name)
        opened = self.idle.pop(name, None)
        if opened is not None:
            self._worker.end(opened.history)
        else:
            self._worker.end_stored(name)

    def close(self) -> None:
        """Let go of all that are idle."""
        while self._let_go_of_one():
            pass

    def _refuse_answering(self, name: str | None) -> None:
        if name in self.answering:
            raise SessionBusy(f"session {name!r} is answering another request", session=name)

    def _open(self, request: Request) -> OpenSession:
        opened = self._stored(request.session) if request.session is not None else None
        if opened is None:
            opened = self._begun(request)
            new: Sequence[int] = list(request.prompt)[opened.tokens :]
        else:
            new = request.prompt if request.continued is None else request.continued
            new = self._without_end(opened, new, request.stop_tokens) if opened.tokens else request.prompt
        history, before = opened.history, opened.before
        try:
            limit = min(self.settings.context, history.max_tokens - self.settings.slack)
            opened.max_tokens = self._room(opened.tokens, len(new), request, limit)
            opened.cached = history.length
            needed = opened.tokens - history.length + len(new) + opened.max_tokens + self.settings.slack
            self._worker.together(lambda: history.reserve(needed))
            opened.log(new)
        except BaseException:
            if before == (0, 0):
                self._worker.end(history)
            else:
                self._undo(opened, *before)
                self.idle[opened.name] = opened
            raise
        return opened

    def _stored(self, name: str) -> OpenSession | None:
        """The session called ``name``, idle here or stored in the daemon."""
        opened = self.idle.pop(name, None)
        if opened is None:
            try:
                history, _ = self._worker.take_over(self._history_settings(name, self.settings.context))
            except UnknownSession:
                return None
            opened = OpenSession(name, True, history, idle_since=self._now())
        opened.before = (opened.tokens, opened.history.length)
        return opened

    def _begun(self, request: Request) -> OpenSession:
        """A new history, which begins with the pages of one that begins as the prompt does, where there is one."""
        name = request.session or self._own_name("request")
        needed = len(request.prompt) + (request.max_tokens or self.settings.default_output)
        capacity = self.settings.context
        if request.session is None:
            capacity = min(max(LEAST_CAPACITY, 1 << (needed - 1).bit_length()), capacity)
        settings = self._history_settings(name, capacity)
        least = (needed if request.session is None else capacity) + self.settings.slack
        history = self._fork(settings, request.prompt, least) or self._worker.history(settings)
        return OpenSession(name, request.session is not None, history)

    def _fork(self, settings: HistorySettings, tokens: Sequence[int], least: int) -> History | None:
        try:
            return self._worker.fork_prefix(settings, tokens, least_tokens=least)
        except (UnknownSession, StaleGeneration, SessionBusy):
            return None  # another worker has changed it since it was found

    @contextmanager
    def scratch(self, tokens: int) -> Iterator[History]:
        """An empty history with room for so many tokens, of no request. Raises `OutOfCapacity`."""
        history = self._worker.history(self._history_settings(self._own_name("scratch"), tokens))
        try:
            yield history
        finally:
            self._worker.end(history)

    def _history_settings(self, name: str, capacity: int) -> HistorySettings:
        rows = round_up(capacity + self.settings.slack, PAGE_TOKENS)
        return HistorySettings(
            "offloaded", rows, self.settings.hot_rows, self.settings.ring_pages, name, self._worker.kernels
        )

    def _room(self, history: int, prompt: int, request: Request, limit: int) -> int:
        """Tokens that may follow; raises `ContextExceeded`."""
        left = limit - history - prompt
        wanted = request.max_tokens
        if wanted is None:
            wanted = min(self.settings.default_output, max(left, 1))
        if left < wanted:
            raise ContextExceeded(history, prompt, wanted, limit)
        return wanted

    def _without_end(self, opened: OpenSession, new: Sequence[int], stop_tokens: frozenset[int]) -> Sequence[int]:
        assert opened.history.session is not None
        last = opened.history.session.state.tokens(opened.tokens - 1)
        repeated = len(new) > 1 and new[0] in stop_tokens and last == [new[0]]
        return new[1:] if repeated else new

    def _footprint(self, tokens: int) -> dict[str, int]:
        """Bytes that a history of ``tokens`` takes at least, by tier."""
        page_format, settings = self._worker.format, self.settings
        groups = range(len(page_format.groups))
        pages = -(-(tokens + settings.slack) // PAGE_TOKENS)
        hot = settings.hot_rows * sum(page_format.group_row_bytes(group) for group in groups)
        parts = (
            hot,
            4 * tokens * len(groups),
            settings.ring_pages * page_format.stride,
            pages * page_format.keys_bytes,
        )
        return {"host": pages * page_format.stride, "vram": sum(round_up(part, GRANULARITY) for part in parts)}

    def _let_go_of_one(self, keep: str | None = None) -> bool:
        """Let go of the longest idle session but ``keep``; whether there was one."""
        found = next((opened for name, opened in self.idle.items() if name != keep), None)
        if found is not None:
            self._let_go(found)
        return found is not None

    def _let_go(self, opened: OpenSession) -> None:
        del self.idle[opened.name]
        self._worker.end(opened.history, keep=opened.named)

    def _undo(self, opened: OpenSession, tokens: int, rows: int) -> None:
        """Have its log and its rows as they were."""
        history = opened.history
        assert history.session is not None
        if history.length > rows:
            history.truncate(rows, logged=tokens)
            self._worker.commit(history, None)
        else:  # nothing was appended, so what is committed is as it was
            history.session.state.truncate_tokens(tokens)
            history.trim()

    def _own_name(self, kind: str) -> str:
        """A session's name that no client can guess."""
        return self._worker.shared(f"{kind}-{secrets.token_hex(8)}", str)
