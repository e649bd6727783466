"""Sessions that begin as others: the verbs that find a prefix by its content, and that fork a session.

A fork has the first rows of its source, and shares its pages (`kvd.sessions.sharing`). Both are of one uid.
"""

from __future__ import annotations

import bisect
import dataclasses
import os

from kvd.leases import Lease
from kvd.sessions.content import pack_start, read_content
from kvd.sessions.limits import require_session_name
from kvd.sessions.registry import Sessions
from kvd.sessions.session import Session
from kvd.sessions.sharing import last_page
from protocol import messages
from protocol.errors import InvalidValue, SessionBusy, StaleGeneration
from protocol.layout import PAGE_TOKENS
from protocol.messages import PrefixFound, SessionOpened
from protocol.prefix import DIGEST_BYTES, chain_start, extend_chain

FIRST_GENERATION = 2
"""Of a fork: its commit record is of the one before."""
MOST_DIGESTS = 1 << 14


class Forks:
    """The verbs. All is done on the loop: one page is copied, the others are counted."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    def fork(self, lease: Lease, request: messages.ForkSession) -> SessionOpened:
        """A session with the first rows of another one of the same uid, held by ``lease``."""
        sessions = self._sessions
        source = sessions.session_of(lease, request.session)
        if request.generation != source.header.generation:
            raise StaleGeneration(source.name, request.generation, source.header.generation)
        sessions.require_intact(source)
        content = read_content(source.blocks.worker_fd, source.header, with_tokens=False)
        if not 0 <= request.rows <= content.rows:
            raise InvalidValue(
                "rows of the fork", request.rows, f"0 to {content.rows}, the committed rows of its source"
            )
        source.require_pages(0, last_page(request.rows) + 1)
        header = dataclasses.replace(
            source.header,
            generation=FIRST_GENERATION,
            holder_pid=lease.peer.pid,
            holder_start=lease.process.start,
            page_count=0,
            name=require_session_name(request.name),
        )
        sessions.check_new(header.uid, header.name)
        shared = source.frames[: last_page(request.rows)]
        session = sessions.prepare(header, 1 if request.rows else 0, lease)
        own = session.frames
        try:
            if request.rows:
                sessions.frames.copy(source.frames[len(shared)], session.frames[0], header.page_stride)
            session.begin_with(shared, source)
            kept = content.first(request.rows)
            session.blocks.copy_log(source.blocks, kept.token_count)
            now = source.blocks.worker_state()
            if now.tokens < kept.token_count or now.commit.rows < kept.rows:
                raise SessionBusy(f"session {source.name!r} was truncated while it was forked", session=source.number)
            sessions.admit(session, pack_start(kept, session.header))
        except BaseException:
            session.frames = own
            sessions.discard(session)
            raise
        sessions.frames.share(shared)
        opened = sessions.opened(session, lease, request.seq)
        session.settle_extents()
        return opened

    def find_prefix(self, lease: Lease, request: messages.FindPrefix) -> PrefixFound:
        """The session of the lease's uid that has most of the pages that the hashes stand for."""
        if len(request.digests) > MOST_DIGESTS or any(len(digest) != DIGEST_BYTES for digest in request.digests):
            raise InvalidValue("digests", len(request.digests), f"at most {MOST_DIGESTS} of {DIGEST_BYTES} bytes")
        best, pages = None, 0
        for session in self._sessions:
            header = session.header
            if header.uid != lease.peer.uid or session.damage:
                continue
            if (header.fingerprint, header.encoding) != (request.fingerprint, request.encoding):
                continue
            found = _common(_chain(session), request.digests)
            if found > pages:
                best, pages = session, found
        if best is None:
            return PrefixFound(request.seq, 0, 0, "", 0)
        return PrefixFound(request.seq, best.number, best.header.generation, best.name, pages)


def _chain(session: Session) -> list[bytes]:
    """The hashes of the session's pages that are committed and whose tokens are logged. Kept, and extended here.

    Raises nothing: of a session whose block cannot be read there are none.
    """
    state = session.worker_state()
    if state is None:
        return []
    chain = session.prefix
    full = min(state.commit.rows, state.tokens, session.header.page_count * PAGE_TOKENS) // PAGE_TOKENS
    del chain[full:]
    if full > len(chain):
        before = chain[-1] if chain else chain_start(session.header.fingerprint, session.header.encoding)
        start, end = len(chain) * PAGE_TOKENS, full * PAGE_TOKENS
        tokens = os.pread(session.blocks.worker_fd, 4 * (end - start), session.blocks.log_offset + 4 * start)
        chain += extend_chain(before, tokens)
    return chain


def _common(chain: list[bytes], digests: list[bytes]) -> int:
    """How many leading hashes agree. Where one does, all before it do."""
    most = min(len(chain), len(digests))
    return bisect.bisect_left(range(most), True, key=lambda page: chain[page] != digests[page])
