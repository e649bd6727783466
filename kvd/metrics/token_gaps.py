"""What workers report of the time between tokens, and what the kernel did when one was much too long.

Read once a second, where workers wrote it: no token waits for it. A stall has a *suspect* if the stall watch saw events
of a kind between two looks that overlap the gap; the events are the host's, so it is a suspect and not a proof.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from kvd.leases import Lease
from kvd.metrics.stall_watch import EVENTS, StallWatch
from protocol.lease_report import GAP_BOUNDS_MS, STALLS_KEPT, LeaseReport, Stall
from protocol.stats import StallStats

UNWATCHED = "unwatched"
NOBODY = "none"
"""The suspect, in counts, of a stall during which no event was seen."""
_NOTHING = LeaseReport()


class TokenGaps:
    """Reads the reports of all leases; keeps the shares of those that have ended. For the loop's thread.

    ``watch`` is the stall watch, if there is one.
    """

    def __init__(self) -> None:
        self.watch: StallWatch | None = None
        self.recent: deque[StallStats] = deque(maxlen=STALLS_KEPT)
        """The latest stalls, oldest first."""
        self.stalls: Counter[str] = Counter(dict.fromkeys([*EVENTS, NOBODY, UNWATCHED], 0))
        """Stalls so far, by suspect; one with two suspects counts for both."""
        self._reports: dict[int, LeaseReport] = {}
        self._ended = [0] * (len(GAP_BOUNDS_MS) + 1)
        self._ended_ns = 0
        self._pending: list[tuple[int, Stall]] = []

    def report(self, lease: int) -> LeaseReport:
        """What the lease had reported when it was last looked at."""
        return self._reports.get(lease, _NOTHING)

    def look(self, leases: Iterable[Lease]) -> None:
        """Read the reports of ``leases``, and judge the stalls that the stall watch has looked at."""
        for lease in leases:
            if lease.report is not None:
                self._read(lease.number, lease.report.read())
        waiting = []
        for number, stall in self._pending:
            if self.watch is not None and self.watch.looked_at < stall.end_ns / 1e9:
                waiting.append((number, stall))
            else:
                self._judge(number, stall)
        self._pending = waiting

    def lease_ended(self, lease: Lease) -> None:
        """The lease goes, what it has counted stays."""
        if lease.report is not None:
            self._read(lease.number, lease.report.read())
        report = self._reports.pop(lease.number, _NOTHING)
        self._ended = [ours + count for ours, count in zip(self._ended, report.buckets, strict=True)]
        self._ended_ns += report.gap_sum_ns

    def totals(self) -> tuple[list[int], float]:
        """Gaps of all leases there were, by `GAP_BOUNDS_MS`, and their sum in seconds."""
        parts = [self._ended, *(report.buckets for report in self._reports.values())]
        nanoseconds = self._ended_ns + sum(report.gap_sum_ns for report in self._reports.values())
        return [sum(column) for column in zip(*parts, strict=True)], nanoseconds / 1e9

    def _read(self, number: int, report: LeaseReport) -> None:
        fresh = report.stalls - self.report(number).stalls
        if fresh > 0:
            self._pending += [(number, stall) for stall in report.latest[-fresh:]]
        self._reports[number] = report

    def _judge(self, number: int, stall: Stall) -> None:
        end, gap = stall.end_ns / 1e9, stall.gap_ns / 1e9
        suspects = [UNWATCHED] if self.watch is None else self.watch.kinds_between(end - gap, end)
        self.stalls.update(suspects or [NOBODY])
        self.recent.append(StallStats(number, end, gap, suspects))


def gap_quantile_s(report: LeaseReport, share: float) -> float:
    """A bound in seconds that this share of the gaps keeps to; 0 if there were none."""
    wanted, seen = share * report.gaps, 0
    if not report.gaps:
        return 0.0
    for bound, count in zip(GAP_BOUNDS_MS, report.buckets, strict=False):
        seen += count
        if seen >= wanted:
            return min(bound / 1e3, report.gap_longest_ns / 1e9)
    return report.gap_longest_ns / 1e9
