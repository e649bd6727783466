"""The daemon's state as Prometheus metrics. They are served by `kvd.metrics.server`; docs/metrics.md explains each.

Needs the package ``prometheus-client`` (the extra ``metrics``).
"""

from __future__ import annotations

import copy
import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric

from kvd.metrics.counters import Counters
from kvd.metrics.stall_watch import StallWatch
from kvd.node import BALANCED, Node
from kvd.stats import node_stats
from protocol.lease_report import GAP_BOUNDS_MS
from protocol.stats import NOT_PUBLISHED, NodeStats, SessionStats, TierStats, reports_of_processes

WORKER_COUNTERS = {
    "selections": ("kvd_rows_selected", "Rows that attention selected"),
    "hits": ("kvd_cache_hits", "Selected rows found in the hot cache"),
    "misses": ("kvd_cache_misses", "Unique rows that were fetched from host RAM"),
    "ring_hits": ("kvd_ring_hits", "Selected rows found in the ring"),
    "copybacks": ("kvd_page_copybacks", "Pages copied from the ring to host RAM"),
    "duplicate_misses": ("kvd_duplicate_misses", "Misses that another query row of the same step had already claimed"),
}
"""Counters that workers publish: name and help of the metric, which gets ``_total`` in the text."""

TIER_GAUGES = ("requested", "committed", "reserved", "quarantined", "capacity", "peak_requested", "peak_committed")
SESSION_GAUGES = {
    "committed_rows": ("kvd_session_committed_rows", "Rows that would survive the worker"),
    "tokens": ("kvd_session_tokens", "Tokens acknowledged to a client"),
    "committed": ("kvd_session_committed_bytes", "Bytes given up for it"),
}
BLOCK_COUNTERS = {
    "looked_up": "looked for",
    "found": "looked for and stored",
    "loaded": "pinned, to be read",
    "published": "published",
    "abandoned": "reserved and given up",
    "evicted": "that made room",
    "spilled": "written to disk",
    "returned": "read back from disk",
}
BLOCK_STATES = ("stored", "pinned", "writing", "on_disk")
SESSION_STATES = ("held", "stored", "damaged")
LEASE_STATES = ("live", "quarantined")


@dataclass(frozen=True)
class Snapshot:
    """The state at one moment; nothing of it changes later. ``build_s`` is how long the loop was held up for it."""

    stats: NodeStats
    counters: Counters
    worker_totals: Mapping[str, int]
    host_events: Mapping[tuple[str, str], int]
    last_bursts: Mapping[str, float]
    gaps: Sequence[int]
    gaps_s: float
    stalls: Mapping[str, int]
    blocks: Mapping[str, int]
    build_s: float


def take_snapshot(node: Node, stall_watch: StallWatch | None) -> Snapshot:
    """In the loop's thread. What workers publish is as the last check has found it, at most a second ago."""
    begin = time.perf_counter()
    stats = node_stats(node, recheck=False)
    gaps, gaps_s = node.gaps.totals()
    return Snapshot(
        stats=stats,
        counters=copy.deepcopy(node.counters),
        worker_totals=node.sessions.worker_totals(),
        host_events=stall_watch.counts() if stall_watch else {},
        last_bursts={burst.kind: burst.time for burst in stall_watch.bursts} if stall_watch else {},
        gaps=gaps,
        gaps_s=gaps_s,
        stalls=dict(node.gaps.stalls),
        blocks=asdict(node.spaces.totals()),
        build_s=time.perf_counter() - begin,
    )


def families(snapshot: Snapshot) -> Iterator[Metric]:
    """Every metric but those of single sessions."""
    stats = snapshot.stats
    yield InfoMetricFamily("kvd", "The daemon", value={"version": stats.daemon_version, "epoch": str(stats.epoch)})
    yield GaugeMetricFamily("kvd_uptime_seconds", "Since the daemon started", value=stats.uptime_s)
    yield GaugeMetricFamily("kvd_serving", "1 while it takes new work, 0 while it drains", value=not stats.draining)
    yield GaugeMetricFamily("kvd_ledger_balanced", "1 while the books add up", value=stats.ledger == BALANCED)
    yield GaugeMetricFamily("kvd_snapshot_seconds", "How long this scrape held up the loop", value=snapshot.build_s)
    yield from _tiers(stats.tiers)
    yield from _happened(snapshot)
    yield from _blocks(snapshot)
    yield from _reported(snapshot)


def _tiers(tiers: Sequence[TierStats]) -> Iterator[Metric]:
    for what in TIER_GAUGES:
        gauge = GaugeMetricFamily(f"kvd_tier_{what}_bytes", f"Of the tier: {what.replace('_', ' ')}", labels=["tier"])
        for tier in tiers:
            gauge.add_metric([tier.tier], getattr(tier, what))
        yield gauge
    for what in ("requested", "committed"):
        gauge = GaugeMetricFamily(f"kvd_purpose_{what}_bytes", f"By purpose: {what}", labels=["tier", "purpose"])
        for tier in tiers:
            for part in tier.purposes:
                gauge.add_metric([tier.tier, part.purpose], getattr(part, what))
        yield gauge


def _happened(snapshot: Snapshot) -> Iterator[Metric]:
    counters, stats = snapshot.counters, snapshot.stats
    requests = CounterMetricFamily("kvd_requests", "Requests answered, by outcome", labels=["verb", "outcome"])
    for (verb, outcome), count in sorted(counters.requests.items()):
        requests.add_metric([verb, outcome], count)
    yield requests
    yield CounterMetricFamily("kvd_leases_opened", "Leases opened", value=counters.leases_opened)
    yield CounterMetricFamily("kvd_leases_ended", "Leases ended", value=counters.leases_ended)
    yield CounterMetricFamily(
        "kvd_leases_quarantined",
        "Leases that lost their connection before their process",
        value=counters.leases_quarantined,
    )
    yield _by_state("kvd_leases", "Leases", LEASE_STATES, (lease.state for lease in stats.leases))
    yield _by_state("kvd_sessions", "Sessions", SESSION_STATES, (session.state for session in stats.sessions))
    for name, (metric, text) in WORKER_COUNTERS.items():
        yield CounterMetricFamily(metric, f"{text}, all sessions since the start", value=snapshot.worker_totals[name])
    events = CounterMetricFamily(
        "kvd_host_events", "What the kernel did to pages, whole host", labels=["kind", "event"]
    )
    for (kind, event), count in snapshot.host_events.items():
        events.add_metric([kind, event], count)
    yield events
    last = GaugeMetricFamily("kvd_host_event_last_timestamp_seconds", "When it was last seen", labels=["kind"])
    for kind, when in snapshot.last_bursts.items():
        last.add_metric([kind], when)
    yield last


def _blocks(snapshot: Snapshot) -> Iterator[Metric]:
    """Of all spaces together."""
    gauge = GaugeMetricFamily("kvd_blocks", "Blocks, by state", labels=["state"])
    for state in BLOCK_STATES:
        gauge.add_metric([state], sum(getattr(space, state) for space in snapshot.stats.blocks))
    yield gauge
    for what, text in BLOCK_COUNTERS.items():
        yield CounterMetricFamily(f"kvd_blocks_{what}", f"Blocks {text}", value=snapshot.blocks[what])
    yield CounterMetricFamily(
        "kvd_block_reservations_refused", "Reservations that found no room", value=snapshot.blocks["refused"]
    )


def _reported(snapshot: Snapshot) -> Iterator[Metric]:
    """What workers report of themselves."""
    for what, text in (("torch_reserved", "Held by workers' torch"), ("context", "Held by workers' contexts")):
        gauge = GaugeMetricFamily(f"kvd_worker_{what}_bytes", f"{text}, as far as they say", labels=["device"])
        sums: Counter[str] = Counter()
        for lease in reports_of_processes(snapshot.stats.leases):
            if getattr(lease, what) != NOT_PUBLISHED:
                sums[lease.device] += getattr(lease, what)
        for device, nbytes in sums.items():
            gauge.add_metric([device], nbytes)
        yield gauge
    bounds = [*(str(bound / 1e3) for bound in GAP_BOUNDS_MS), "+Inf"]
    yield HistogramMetricFamily(
        "kvd_token_gap_seconds",
        "From one token to the next, one for each step of decoding",
        buckets=list(zip(bounds, itertools.accumulate(snapshot.gaps), strict=True)),
        sum_value=snapshot.gaps_s,
    )
    stalls = CounterMetricFamily("kvd_token_stalls", "Gaps much longer than usual, by suspect", labels=["suspect"])
    for suspect, count in sorted(snapshot.stalls.items()):
        stalls.add_metric([suspect], count)
    yield stalls


def _by_state(name: str, text: str, states: Iterable[str], found: Iterable[str]) -> Metric:
    gauge = GaugeMetricFamily(name, f"{text}, by state", labels=["state"])
    counts = list(found)
    for state in states:
        gauge.add_metric([state], counts.count(state))
    return gauge


def session_text(sessions: Sequence[SessionStats]) -> str:
    """The metrics of single sessions, as text.

    One label each, the rest in an info metric to join with; and written here: the package takes ten times as long for
    the thousands of lines of a thousand sessions. Nothing needs escaping: `kvd.sessions.limits` says what names are.
    """
    lines = ["# HELP kvd_session_info 1; whose it is", "# TYPE kvd_session_info gauge"]
    for session in sessions:
        labels = f'session="{session.session}",name="{session.name}",uid="{session.uid}",state="{session.state}"'
        lines.append(f"kvd_session_info{{{labels}}} 1")
    for field, (metric, text) in SESSION_GAUGES.items():
        lines += _family(metric, "gauge", text, field, sessions)
    for field in ("selections", "misses"):
        metric, text = WORKER_COUNTERS[field]
        lines += _family(f"{metric.replace('kvd_', 'kvd_session_', 1)}_total", "counter", text, field, sessions)
    return "".join(f"{line}\n" for line in lines)


def _family(metric: str, kind: str, text: str, field: str, sessions: Sequence[SessionStats]) -> Iterator[str]:
    yield f"# HELP {metric} {text}, by session"
    yield f"# TYPE {metric} {kind}"
    for session in sessions:
        yield f'{metric}{{session="{session.session}"}} {getattr(session, field)}'
