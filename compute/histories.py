"""The histories of one model on one device: new ones, stored ones, and those that begin as another does.

What a model computes is not asked here: any decoder may append to a history and attend to it
(`compute.model.history_protocol`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar
from weakref import WeakValueDictionary

from torch import Tensor

from compute.attach import Attachment
from compute.history import History
from compute.homes import ResidentPages
from compute.hot_cache import HotCaches
from compute.index_keys import KeyBlocks
from compute.kernels.choice import KernelsName
from compute.session import HostSession
from protocol.errors import SessionDamaged
from protocol.layout import PAGE_TOKENS, Encoding, round_up
from protocol.messages import PrefixFound
from protocol.model import ModelConfig
from protocol.prefix import chain_start, extend_chain

Mode = Literal["resident", "offloaded"]

_T = TypeVar("_T")

MAX_DRAFTS = 3
"""Tokens that are drafted for one step, at most."""


@dataclass(frozen=True)
class HistorySettings:
    """How a history is kept. ``hot_rows`` and ``ring_pages`` serve the offloaded mode only.

    Without ``kernels``, the device decides which.
    """

    mode: Mode
    max_tokens: int
    hot_rows: int = 32768
    ring_pages: int = 8
    name: str = "default"
    kernels: KernelsName | None = None


class Histories:
    """Makes histories of the model that ``fingerprint`` names, in the memory of ``attachment``'s daemon.

    With ``drafts``, the most tokens drafted at a time, they have the rows of the MTP layer too. ``layers`` are the
    first layer and the end of those that this process has, by default all.
    """

    _session_type: type[HostSession] = HostSession

    def __init__(
        self,
        attachment: Attachment,
        config: ModelConfig,
        encoding: Encoding,
        fingerprint: bytes,
        *,
        drafts: int = 0,
        layers: tuple[int, int] | None = None,
    ) -> None:
        self.config = config
        self.fingerprint = fingerprint
        first, end = layers or (0, config.num_hidden_layers)
        self.format = config.page_format(encoding, mtp=drafts > 0, first_layer=first, end_layer=end)
        self._query_rows = drafts + 1
        self.attachment = attachment
        self._keys = KeyBlocks(attachment, self.format)
        self._of_session: WeakValueDictionary[int, History] = WeakValueDictionary()

    def history(self, settings: HistorySettings) -> History:
        """A new, empty history."""
        session = self._created(settings) if settings.mode == "offloaded" else None
        return self._together(lambda: self._history(settings, session), History.close)

    def stored_history(self, settings: HistorySettings) -> History:
        """The history of a stored session, at its committed rows; it may grow to what the session was made for."""
        return self._restored(self._opened(settings.name), settings)

    def resident_copy(self, settings: HistorySettings) -> History:
        """A resident history that begins with the committed rows of the stored session ``settings.name``.

        The session stays stored. Raises what `stored_history` raises.
        """
        self._require_one_process("a resident copy")
        session = HostSession.open(self.attachment, settings.name, self.format, fingerprint=self.fingerprint)
        try:
            return self._resident(session, settings)
        finally:
            session.detach()

    def resident_twin(self, source: History, settings: HistorySettings) -> History:
        """A resident history that begins with the committed rows of ``source``, which is offloaded and at its barrier.

        They share the index keys of full pages.
        """
        assert source.session is not None, "a resident history needs no twin"
        return self._resident(source.session, settings, source)

    def store(self, history: History, settings: HistorySettings, tokens: Sequence[int], hidden: Tensor) -> None:
        """Store the rows of a resident ``history``, those of ``tokens``, as the session ``settings.name``.

        ``hidden`` [hidden size] is the last row's, after the final norm. Raises `OutOfCapacity` and stores nothing.
        """
        self._require_one_process("a history to store")
        session = self._session(settings)
        try:
            session.extend(round_up(history.length, PAGE_TOKENS) // PAGE_TOKENS)
            start_copy = self.attachment.device.start_copy
            copies = [start_copy(session.page(page), history.page(page)) for page in range(session.page_count)]
            for copy in copies:
                copy.wait()
            session.state.append_tokens(tokens)
            session.state.logical_rows = history.length
            session.publish_commit(history.length, hidden.float().cpu().numpy().tobytes())
        except BaseException:
            session.close()
            raise
        session.detach()

    def take_over(self, settings: HistorySettings) -> tuple[History, list[int]]:
        """Go on where a worker ended, in whatever way: the stored history, and all acknowledged tokens.

        The history has the committed rows at most, and one row less than there are tokens. The caller appends the
        tokens from ``history.length`` on (`prefill`), which gives the hidden that decoding goes on from; none of them
        is sampled again. Raises what `stored_history` raises, and `SessionDamaged` if rows are committed that no
        acknowledged token belongs to.
        """
        history = self.stored_history(settings)
        assert history.session is not None
        tokens = history.session.state.tokens()
        if history.length > len(tokens):
            history.close(keep=True)
            raise SessionDamaged(
                f"session {settings.name!r} has {history.length} committed rows and {len(tokens)} tokens",
                session=history.session.number,
            )
        if tokens and history.length == len(tokens):
            history.rewind()
        return history, tokens

    def fork(self, source: History, settings: HistorySettings, rows: int | None = None) -> History:
        """A history that begins with the first ``rows`` rows of ``source``, by default with all; they share pages.

        ``source`` is offloaded and at its barrier.
        """
        assert source.session is not None, "a resident history has no pages to share"
        kept = source.length if rows is None else rows
        return self._restored(self._forked(source.session, kept, settings.name), settings, source, new=True)

    def fork_prefix(self, settings: HistorySettings, tokens: Sequence[int], *, least_tokens: int = 0) -> History | None:
        """A history that begins as ``tokens`` do, as far as a stored or held session of this uid has their pages.

        At least one token is left to be appended by the caller. None where no session has the first page, or where the
        one that has most of them has room for fewer than ``least_tokens``: a fork has as much as its source.
        """
        self._require_one_stage("a fork by prefix")
        encoding = self.format.encoding.name
        packed = array("i", tokens[: max(len(tokens) - 1, 0)]).tobytes()
        digests = extend_chain(chain_start(self.fingerprint, encoding), packed)
        found = self._found_prefix(digests)
        if not found.pages:
            return None
        session = self._forked_prefix(found, settings.name)
        if session.token_capacity < least_tokens:
            session.close()
            return None
        return self._restored(session, settings, self._of_session.get(found.session), new=True)

    # Steps, of which each is done on all ranks or on none where there are several (`compute.parallel.worker`)

    def _together(self, act: Callable[[], _T], undo: Callable[[_T], Any]) -> _T:  # noqa: ARG002
        return act()

    def _require_one_process(self, what: str) -> None:
        """Raise `InvalidValue` where the model is on several ranks."""

    def _created(self, settings: HistorySettings) -> HostSession:
        return self._session(settings)

    def _opened(self, name: str) -> HostSession:
        return self._session_type.open(self.attachment, self._name(name), self.format, fingerprint=self.fingerprint)

    def _forked(self, source: HostSession, rows: int, name: str) -> HostSession:
        return source.fork(rows, self._name(name))

    def _require_one_stage(self, what: str) -> None:
        """Raise `InvalidValue` where the model's layers are on several daemons."""

    def _found_prefix(self, digests: list[bytes]) -> PrefixFound:
        return self.attachment.client.find_prefix(
            fingerprint=self.fingerprint, encoding=self.format.encoding.name, digests=digests
        )

    def _forked_prefix(self, found: PrefixFound, name: str) -> HostSession:
        rows = found.pages * PAGE_TOKENS
        return self._session_type.fork_of(self.attachment, found.session, found.generation, rows, name, self.format)

    def _name(self, name: str) -> str:
        """What the session is called in the daemon."""
        return name

    def _pages(self) -> ResidentPages:
        return ResidentPages(self.attachment, self.format)

    def _resident(self, session: HostSession, settings: HistorySettings, source: History | None = None) -> History:
        """A resident history of the committed rows of ``session``, with the keys of ``source``, if that is open."""
        home = ResidentPages(self.attachment, self.format)
        try:
            rows = session.committed_rows
            home.extend(round_up(rows, PAGE_TOKENS) // PAGE_TOKENS)
            session.fetch(0, home.page_count)
            start_copy = self.attachment.device.start_copy
            copies = [start_copy(home.page(page), session.page(page)) for page in range(home.page_count)]
            for copy in copies:
                copy.wait()
            history = self._history(replace(settings, mode="resident"), None, home=home)
            history.restore(rows, source)
        except BaseException:
            home.close()
            raise
        return history

    def _session(self, settings: HistorySettings) -> HostSession:
        return self._session_type.create(
            self.attachment,
            self._name(settings.name),
            self.format,
            fingerprint=self.fingerprint,
            token_capacity=settings.max_tokens,
            commit_bytes=4 * self.format.hidden_size,
        )

    def _restored(
        self, session: HostSession, settings: HistorySettings, source: History | None = None, *, new: bool = False
    ) -> History:
        """The history of a session that this worker holds, at its committed rows, which ``source`` begins with too.

        Where that fails the session is stored, or, if it is ``new``, gone.
        """
        settings = replace(settings, max_tokens=session.token_capacity)

        def act() -> History:
            history = self._history(settings, session, new=new)
            try:
                history.restore(session.committed_rows, source)
            except BaseException:
                history.close(keep=not new)
                raise
            return history

        return self._together(act, lambda history: history.close(keep=not new))

    def _history(
        self,
        settings: HistorySettings,
        session: HostSession | None,
        *,
        new: bool = True,
        home: ResidentPages | None = None,
    ) -> History:
        with ExitStack() as undo:
            caches = None
            if session:
                undo.callback(session.close if new else session.detach)
                caches = HotCaches(
                    self.attachment,
                    self.format,
                    slots=settings.hot_rows,
                    max_tokens=round_up(settings.max_tokens, PAGE_TOKENS),
                    topk=self.config.index_topk,
                    query_rows=self._query_rows,
                    session=session.account,
                )
                undo.callback(caches.free)
            history = History(
                self.attachment,
                self.format,
                self._keys,
                session or home or self._pages(),
                max_tokens=settings.max_tokens,
                topk=self.config.index_topk,
                ring_pages=settings.ring_pages,
                caches=caches,
                session=session,
                kernels=settings.kernels,
            )
            undo.pop_all()
        if session:
            self._of_session[session.number] = history
        return history
