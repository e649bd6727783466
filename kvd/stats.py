"""The node's state at one moment, as ``kvd-stat`` shows it (`protocol.stats`)."""

from __future__ import annotations

import os
from collections import defaultdict

from kvd import __version__
from kvd.alloc.ledger import Ledger
from kvd.leases import Lease
from kvd.node import Node
from kvd.sessions.session import Session
from protocol.stats import STATS_SCHEMA, LeaseStats, NodeStats, PurposeStats, SessionStats, TierStats


class _Sums:
    """Bytes requested and committed in all tiers, by lease and by session."""

    def __init__(self, ledger: Ledger) -> None:
        self.by_lease: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])
        self.by_session: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])
        for entry in ledger.entries():
            for sums in (self.by_lease[entry.account.lease], self.by_session[entry.account.session]):
                sums[0] += entry.balance.requested
                sums[1] += entry.balance.committed


def node_stats(node: Node, *, recheck: bool = True) -> NodeStats:
    """Everything, checked: the ledger against what the system says, the sessions against their memory.

    Without ``recheck`` the verdict, and what workers have published, are those of the last check.
    """
    sums = _Sums(node.ledger)
    return NodeStats(
        schema=STATS_SCHEMA,
        daemon_version=__version__,
        epoch=node.leases.epoch,
        pid=os.getpid(),
        uptime_s=round(node.uptime_s, 3),
        draining=node.draining,
        ledger=node.check() if recheck else node.verdict,
        tiers=[_tier(node.ledger, tier) for tier in node.ledger.tiers()],
        leases=[_lease(node, lease, *sums.by_lease[lease.number]) for lease in node.leases],
        sessions=[_session(session, *sums.by_session[session.number]) for session in node.sessions],
    )


def _tier(ledger: Ledger, tier: str) -> TierStats:
    total = ledger.total(tier)
    purposes = [
        PurposeStats(purpose, part.requested, part.committed, part.peak_requested, part.peak_committed)
        for purpose, part in sorted(ledger.purposes(tier).items())
        if part.peak_committed or part.reserved
    ]
    return TierStats(
        tier=tier,
        requested=total.requested,
        committed=total.committed,
        capacity=ledger.capacity(tier),
        peak_requested=total.peak_requested,
        peak_committed=total.peak_committed,
        reserved=total.reserved,
        quarantined=sum(entry.balance.committed for entry in ledger.entries(tier) if entry.quarantined),
        purposes=purposes,
    )


def _lease(node: Node, lease: Lease, requested: int, committed: int) -> LeaseStats:
    return LeaseStats(
        lease=lease.number,
        state="quarantined" if lease.quarantined else "live",
        uid=lease.peer.uid,
        gid=lease.peer.gid,
        pid=lease.peer.pid,
        client=lease.client,
        age_s=round(lease.age_s, 3),
        sessions=len(node.sessions.held_by(lease)),
        requested=requested,
        committed=committed,
    )


def _session(session: Session, requested: int, committed: int) -> SessionStats:
    """As the check has just found it. Of a damaged session only what the daemon itself knows; the rest is 0."""
    state = None if session.damage else session.published
    counters = state.counters if state else {}
    return SessionStats(
        session=session.number,
        name=session.name,
        uid=session.header.uid,
        lease=session.lease.number if session.lease else 0,
        state=session.state,
        generation=session.header.generation,
        encoding=session.header.encoding,
        pages=session.header.page_count,
        logical_rows=state.logical_rows if state else 0,
        committed_rows=state.commit.rows if state else 0,
        tokens=state.tokens if state else 0,
        requested=requested,
        committed=committed,
        selections=counters.get("selections", 0),
        hits=counters.get("hits", 0),
        misses=counters.get("misses", 0),
        ring_hits=counters.get("ring_hits", 0),
        copybacks=counters.get("copybacks", 0),
        page_bytes=session.header.page_bytes,
    )
