"""A session on all ranks: one on the daemon of each stage, at one committed row, with one log of tokens.

Rank 0's log is what clients have seen. A row is common when it is committed on every stage, and the token logs up to it
are the same: after a rank was lost, or a save that came through on some nodes only, that is what all stages go back to.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

import msgspec

from compute.attach import Attachment
from compute.homes import ResidentPages
from compute.parallel.team import Team
from compute.session import HostSession
from protocol.layout import PAGE_TOKENS, PageFormat
from protocol.messages import SessionOpened


class TeamSession(HostSession):
    """A session that this rank holds. From `join` on its pages come and go on all ranks at once, or on none.

    Holders act first, and then those who view what they hold (`compute.parallel.views`).
    """

    def __init__(self, attachment: Attachment, opened: SessionOpened, page_format: PageFormat, name: str) -> None:
        self._team: Team | None = None
        self._common_pages = 0
        super().__init__(attachment, opened, page_format, name)

    def join(self, team: Team, pages: int) -> None:
        """Have ``pages`` pages, the fewest of any stage; what others lack is not counted here either."""
        self._team, self._common_pages = team, pages

    @property
    def page_count(self) -> int:
        return self._common_pages if self._team else len(self._frames)

    def extend(self, pages: int) -> None:
        target = self.page_count + pages
        self._change(lambda: self._hold_pages(target))
        self._common_pages = target

    def truncate(self, tokens: int, *, logged: int | None = None) -> None:
        self._change(lambda: self._hold_tokens(tokens, logged))
        self._common_pages = min(self._common_pages, -(-tokens // PAGE_TOKENS))

    def trim(self, pages: int) -> None:
        self._change(lambda: self._hold_at_most(pages))
        self._common_pages = min(self._common_pages, pages)

    def _change(self, act: Callable[[], None]) -> None:
        if self._team is None:
            act()
            return
        self._team.together(act)
        if self._team.shards > 1:
            generations = self._team.exchange(self.generation, int)
            self._team.together(lambda: self._follow(generations))

    def _hold_pages(self, target: int) -> None:
        missing = target - len(self._frames)
        if missing > 0:
            super().extend(missing)

    def _hold_at_most(self, pages: int) -> None:
        self._drop_pages(pages)

    def _hold_tokens(self, tokens: int, logged: int | None) -> None:
        super().truncate(tokens, logged=logged)

    def _follow(self, generations: list[int]) -> None:
        """The holders have changed their sessions, which are at these generations, rank by rank."""


class TeamPages(ResidentPages):
    """Pages in VRAM, on all ranks or on none."""

    def __init__(self, attachment: Attachment, page_format: PageFormat, team: Team) -> None:
        super().__init__(attachment, page_format)
        self._team = team

    def extend(self, pages: int) -> None:
        before = self.page_count
        try:
            self._team.together(lambda: ResidentPages.extend(self, pages))
        except BaseException:
            self.page_count = before
            raise


class Standing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank's session, if it holds one: which it is, ``rows`` that may stay, and how many pages it has."""

    number: int = 0
    generation: int = 0
    rows: int = 0
    pages: int = 0


def standings(team: Team, session: HostSession | None) -> list[Standing]:
    """Of all ranks."""
    own = Standing()
    if session:
        own = Standing(session.number, session.generation, session.committed_rows, session.page_count)
    return team.exchange(own, Standing)


def share_log(team: Team, session: HostSession | None) -> list[int]:
    """The tokens that rank 0 has logged."""
    own, first = array("i", session.state.tokens() if session else []), array("i")
    first.frombytes(team.share(own.tobytes(), bytes))
    return first.tolist()


def reconcile(team: Team, session: HostSession | None) -> None:
    """Bring all stages' sessions, which were just opened, to their common row and log; None where another rank holds.

    Rows behind the common one go; they are computed again from the tokens.
    """
    truth = share_log(team, session)
    own = session.state.tokens() if session else truth
    kept = _common(own, truth)
    rows = team.exchange(min(session.committed_rows, kept) if session else len(truth), int)

    def bring() -> None:
        if session is None:
            return
        if session.committed_rows > min(rows):
            session.truncate(min(rows), logged=len(own))
        if own != truth:
            session.state.truncate_tokens(kept)
            session.state.append_tokens(truth[kept:])

    team.together(bring)


def _common(own: list[int], truth: list[int]) -> int:
    """How many leading tokens are the same."""
    least = min(len(own), len(truth))
    if own[:least] == truth[:least]:
        return least
    return next(place for place in range(least) if own[place] != truth[place])
