"""What the connector counts, for vLLM's log and its Prometheus metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

COUNTERS = {
    "lookups": "requests that were looked up",
    "failed_lookups": "lookups that kvd did not answer in time, or was not asked",
    "hit_tokens": "prompt tokens that were found and not computed",
    "loaded_blocks": "blocks loaded",
    "loaded_bytes": "bytes loaded",
    "failed_loads": "loads of which blocks failed, and were computed",
    "failed_load_blocks": "blocks that failed to load, and were computed",
    "saved_blocks": "blocks saved that were not stored before",
    "saved_bytes": "bytes saved",
    "dropped_save_blocks": "blocks not saved: kvd was away, full or slow",
}
HISTOGRAMS = {
    "load_seconds": "from a request's scheduling to its last loaded block",
    "save_seconds": "from a step's end to its last saved block",
    "lookup_seconds": "what the scheduler waited for a lookup",
}
BUCKETS = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0]


@dataclass
class KvdStats(KVConnectorStats):
    """Sums of `COUNTERS`, and the single times of `HISTOGRAMS`, of an interval."""

    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data = {**dict.fromkeys(COUNTERS, 0), **{name: [] for name in HISTOGRAMS}}

    def count(self, name: str, by: float = 1) -> None:
        self.data[name] += by

    def took(self, name: str, seconds: float) -> None:
        self.data[name].append(seconds)

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = self.data[name] + value
        return self

    def reduce(self) -> dict[str, int | float]:
        reduced: dict[str, int | float] = {f"kvd {name}": self.data[name] for name in COUNTERS if self.data[name]}
        for name in HISTOGRAMS:
            times = sorted(self.data[name])
            if times:
                reduced[f"kvd {name} p50"] = round(times[len(times) // 2], 6)
                reduced[f"kvd {name} max"] = round(times[-1], 6)
        return reduced


class KvdPromMetrics(KVConnectorPromMetrics):
    """``vllm:kvd_…`` for each of `COUNTERS` and `HISTOGRAMS`, by engine."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, dict[int, Any]] = {}
        for name, help_text in COUNTERS.items():
            counter = self._counter_cls(name=f"vllm:kvd_{name}", documentation=help_text, labelnames=labelnames)
            self._metrics[name] = self._by_engine(counter)
        for name, help_text in HISTOGRAMS.items():
            histogram = self._histogram_cls(
                name=f"vllm:kvd_{name}", documentation=help_text, buckets=BUCKETS, labelnames=labelnames
            )
            self._metrics[name] = self._by_engine(histogram)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name in COUNTERS:
            if transfer_stats_data.get(name):
                self._metrics[name][engine_idx].inc(transfer_stats_data[name])
        for name in HISTOGRAMS:
            for seconds in transfer_stats_data.get(name, ()):
                self._metrics[name][engine_idx].observe(seconds)

    def _by_engine(self, metric: Any) -> dict[int, Any]:
        return {engine: metric.labels(*values) for engine, values in self.per_engine_labelvalues.items()}
