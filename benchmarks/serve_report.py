"""The figures of ``kvd-bench serve``: what a trace's requests got, beside what some or all of them got alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.report import Row
from benchmarks.serve_trace import Answer, Asked
from benchmarks.timing import percentile


@dataclass(frozen=True)
class Trace:
    """Requests that were sent and answered, in ``seconds``; ``left_out`` were not, since the time was up.

    ``alone`` are answers to some of them without a server, by number, one after the other in ``alone_s``. ``drift`` is
    by how many bytes each tier differs from before.
    """

    asked: Sequence[Asked]
    served: Sequence[Answer]
    seconds: float
    left_out: int
    alone: Mapping[int, Answer]
    alone_s: float
    drift: Mapping[str, int]

    def rows(self, sharers: int) -> list[Row]:
        """All figures; those with a goal are what must hold, and the floors are of the requests alone."""
        rows, alone = [], list(self.alone.values())
        for name, of in (("time to first token", _first), ("gap between tokens", _gaps)):
            times, floors = (sorted(value for answer in each for value in of(answer)) for each in (self.served, alone))
            for figure, percent in (("p50", 50), ("p99", 99), ("longest", 100)):
                here, floor = (1e3 * percentile(values or [0.0], percent) for values in (times, floors))
                rows.append(Row(f"{name}, {figure}", here, "ms", floor=floor))
        name = "longest wait for a first token, of what the work ahead of it takes"
        rows.append(Row(name, self.longest_wait(sharers), "times"))
        prompts = [len(asked.prompt) for asked in self.asked]
        output, output_alone = (sum(len(answer.tokens) for answer in each) for each in (self.served, alone))
        read_alone = sum(prompts[number] for number in self.alone)
        rows.append(
            Row("output tokens of all requests", output / self.seconds, "tokens/s", floor=output_alone / self.alone_s)
        )
        rows.append(
            Row(
                "prompt tokens of all requests",
                sum(prompts) / self.seconds,
                "tokens/s",
                floor=read_alone / self.alone_s,
            )
        )
        rows.append(Row("prompt tokens", sum(prompts), "tokens"))
        rows.append(Row("prompt tokens, longest", max(prompts), "tokens"))
        rows.append(Row("output tokens", output, "tokens"))
        distinct = {token for answer in self.served for token in answer.tokens}
        rows.append(Row("distinct output tokens", len(distinct), "tokens"))
        rows.append(Row("requests that were answered", len(self.served), "requests"))
        rows.append(Row("requests left out, since the time was up", self.left_out, "requests"))
        rows.append(Row("requests answered alone too", len(alone), "requests"))
        differing = sum(self.served[number].tokens != answer.tokens for number, answer in self.alone.items())
        rows.append(Row("answers that differ from those alone", differing, "answers", goal=0))
        failed = sum(bool(answer.error) for answer in self.served)
        rows.append(Row("requests that failed", failed, "requests", goal=0))
        for tier, drift in self.drift.items():
            rows.append(Row(f"{tier}: bytes requested more or less than before", abs(drift), "B", goal=0))
        return rows

    def longest_wait(self, sharers: int) -> float:
        """The longest wait for a first token, beside the work that may come before it: far above 1, somebody starved.

        That work is in tokens: all of the requests that were sent before and had not been answered, and as many times
        its own prompt as there are ``sharers`` of the worker, since each of them gets as much. The trace's tokens over
        its time are the rate of it.
        """
        sizes = [len(asked.prompt) + len(answer.tokens) for asked, answer in zip(self.asked, self.served, strict=True)]
        rate, longest = sum(sizes) / self.seconds, 0.0
        for asked, answer in zip(self.asked, self.served, strict=True):
            ahead = sum(
                size for size, other in zip(sizes, self.served, strict=True) if other.due_s < answer.due_s < other.end_s
            )
            longest = max(longest, answer.first_s * rate / (ahead + sharers * len(asked.prompt)))
        return longest


def _first(answer: Answer) -> list[float]:
    return [answer.first_s]


def _gaps(answer: Answer) -> list[float]:
    return answer.gaps_s
