"""The node's state at one moment, as ``kvd-stat`` shows it (`protocol.stats`)."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from dataclasses import asdict
from weakref import WeakKeyDictionary

from kvd import __version__
from kvd.alloc.ledger import Ledger
from kvd.blocks.model import Space, blocks_of
from kvd.leases import Lease
from kvd.metrics.token_gaps import gap_quantile_s
from kvd.node import Node
from kvd.sessions.session import Session
from protocol.stats import (
    NOT_PUBLISHED,
    STATS_SCHEMA,
    BlockStats,
    LeaseStats,
    NodeStats,
    PurposeStats,
    SessionStats,
    TierStats,
)


class _Books:
    """What the ledger says, as statistics have it: the tiers, and bytes requested and committed by lease and session.

    Made anew when something in the ledger has changed: of a thousand sessions it takes longer than all the rest.
    """

    def __init__(self, node: Node) -> None:
        ledger = node.ledger
        self.changes = ledger.changes
        self.tiers = [_tier(ledger, tier, node.vram.own_bytes(tier)) for tier in ledger.tiers()]
        self.by_lease: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])
        self.by_session: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])
        for account, requested, committed in ledger.committed_by_account():
            for sums in (self.by_lease[account.lease], self.by_session[account.session]):
                sums[0] += requested
                sums[1] += committed


_latest: WeakKeyDictionary[Node, _Books] = WeakKeyDictionary()


def _books(node: Node) -> _Books:
    latest = _latest.get(node)
    if latest is None or latest.changes != node.ledger.changes:
        latest = _latest[node] = _Books(node)
    return latest


def node_stats(node: Node, *, recheck: bool = True) -> NodeStats:
    """Everything, checked: the sessions against their memory, and the ledger, if it has changed since, against what the
    system says.

    Without ``recheck`` the verdict, and what workers have published, are those of the last check.
    """
    verdict = node.look() if recheck else node.verdict
    books = _books(node)
    held = Counter(session.lease.number for session in node.sessions if session.lease)
    return NodeStats(
        schema=STATS_SCHEMA,
        daemon_version=__version__,
        epoch=node.leases.epoch,
        pid=os.getpid(),
        uptime_s=round(node.uptime_s, 3),
        draining=node.draining,
        ledger=verdict,
        tiers=books.tiers,
        leases=[_lease(node, lease, held[lease.number], *books.by_lease[lease.number]) for lease in node.leases],
        sessions=[_session(session, *books.by_session[session.number]) for session in node.sessions],
        stalls=list(node.gaps.recent),
        drain_failure=node.drain_failure,
        blocks=[_blocks(space) for space in node.spaces],
    )


def _tier(ledger: Ledger, tier: str, own: int) -> TierStats:
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
        quarantined=ledger.quarantined_bytes(tier),
        purposes=purposes,
        own=own,
    )


def _lease(node: Node, lease: Lease, held: int, requested: int, committed: int) -> LeaseStats:
    report = node.gaps.report(lease.number)
    holders = node.spaces.holders_of(lease)
    holds = [hold for holder in holders for hold in holder.holds.values()]
    counts = [holder.counts for holder in holders]
    return LeaseStats(
        lease=lease.number,
        state="quarantined" if lease.quarantined else "live",
        uid=lease.peer.uid,
        gid=lease.peer.gid,
        pid=lease.peer.pid,
        client=lease.client,
        age_s=round(lease.age_s, 3),
        sessions=held,
        requested=requested,
        committed=committed,
        device=report.device,
        torch_reserved=NOT_PUBLISHED if report.torch_reserved is None else report.torch_reserved,
        context=NOT_PUBLISHED if report.context is None else report.context,
        token_gaps=report.gaps,
        token_gap_s=report.gap_sum_ns / 1e9,
        longest_gap_s=report.gap_longest_ns / 1e9,
        gap_p50_s=gap_quantile_s(report, 0.5),
        gap_p99_s=gap_quantile_s(report, 0.99),
        stalls=report.stalls,
        blocks_looked_up=sum(each.looked_up for each in counts),
        blocks_found=sum(each.found for each in counts),
        blocks_loaded=sum(each.loaded for each in counts),
        blocks_published=sum(each.published for each in counts),
        blocks_pinned=sum(blocks_of(hold.runs) for hold in holds),
        blocks_writing=sum(len(hold.keys) for hold in holds),
    )


def _blocks(space: Space) -> BlockStats:
    return BlockStats(
        space=space.number,
        uid=space.uid,
        fingerprint=space.fingerprint.hex(),
        block_bytes=space.block_bytes,
        leases=len(space.openers),
        stored=len(space.stored),
        pinned=space.pinned,
        writing=len(space.writing),
        committed=space.kind.stride * (len(space.stored) + len(space.writing)),
        on_disk=space.on_disk_only,
        **asdict(space.counts),
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
        absent_pages=len(session.absent),
    )
