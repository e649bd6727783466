"""The verb that lets a lease read a session which another one of the same uid holds: a rank beside the holder's.

Nothing of the session changes, and it stays the holder's. The viewer's descriptors can be read only.
"""

from __future__ import annotations

from kvd.leases import Lease
from kvd.sessions.registry import Sessions
from protocol import messages
from protocol.errors import SessionBusy, StaleGeneration
from protocol.messages import SessionOpened


def view(sessions: Sessions, lease: Lease, request: messages.ViewSession) -> SessionOpened:
    """Let ``lease`` read the session. Its extents stay with their uid while the process may live."""
    session = sessions.session_of(lease, request.session)
    header = session.header
    if request.generation != header.generation:
        raise StaleGeneration(session.name, request.generation, header.generation)
    if session.lease is None:
        raise SessionBusy(f"session {session.name!r} is held by no lease", session=session.number)
    sessions.require_idle(session)
    sessions.require_intact(session)
    session.require_pages(0, header.page_count)
    daemon_block, worker_block = sessions.granter.view_of_blocks(session, lease)
    extents = sessions.granter.extents(session.extents, lease, read_only=True)
    return SessionOpened(
        request.seq, header.session, header.generation, header.page_count, daemon_block, worker_block, extents
    )
