"""How long a decode step is expected to take: the sum of its kernels, each by what was measured of it.

The figures are in ``step_model.toml``, each with its source; a GPU with another bandwidth gets them in proportion. Time
is put down to what a kernel waits for: launches and latencies, bytes from device memory, operations, the bus, and the
joins of tensor-parallel ranks. ``kvd-bench plan`` holds the sum against kept results.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from kvd.planning.products import Product, WeightType, draft_product, head_product, layer_products
from protocol.layout import Encoding
from protocol.model import ModelConfig


@cache
def measured() -> Mapping[str, Any]:
    """What ``step_model.toml`` has."""
    return tomllib.loads(files("kvd.planning").joinpath("step_model.toml").read_text())


@dataclass(frozen=True)
class Rates:
    """What one GPU of a node gives: bytes/s of its memory and of its bus, operations/s as a part of the measured."""

    hbm_read: float
    bus_read: float
    compute: float = 1.0


@dataclass(frozen=True)
class Batch:
    """Sessions that one step decodes, of ``tokens`` tokens each on average; ``misses`` is a part of the selected rows.

    Fractions of a session are fine.
    """

    sessions: float
    tokens: float
    drafts: int = 0
    misses: float = 0.01


@dataclass(frozen=True)
class StepTime:
    """µs of a step, by what they are waited for. ``bus_busy`` is how long the bus is in use, waited for or not."""

    launches: float = 0.0
    hbm: float = 0.0
    compute: float = 0.0
    bus: float = 0.0
    joins: float = 0.0
    bus_busy: float = 0.0

    @property
    def total(self) -> float:
        return self.launches + self.hbm + self.compute + self.bus + self.joins

    def __add__(self, other: StepTime) -> StepTime:
        return StepTime(
            self.launches + other.launches,
            self.hbm + other.hbm,
            self.compute + other.compute,
            self.bus + other.bus,
            self.joins + other.joins,
            self.bus_busy + other.bus_busy,
        )

    def times(self, count: float) -> StepTime:
        """As many of it, one after the other."""
        parts = (self.launches, self.hbm, self.compute, self.bus, self.joins, self.bus_busy)
        return StepTime(*(count * part for part in parts))


class StepModel:
    """Steps of layers ``layers`` of a model on ``tensor`` GPUs that share heads and experts.

    With ``cached`` the histories are in host RAM, else in VRAM.
    """

    def __init__(
        self,
        config: ModelConfig,
        encoding: Encoding,
        kind: WeightType,
        rates: Rates,
        *,
        layers: range | None = None,
        tensor: int = 1,
        cached: bool = True,
    ) -> None:
        self._config, self._encoding, self._kind, self._rates = config, encoding, kind, rates
        self._layers = layers or range(config.num_hidden_layers)
        self._tensor, self._cached = tensor, cached
        self._groups = config.index_groups(self._layers.start, self._layers.stop)
        self._products = Counter(tuple(layer_products(config, layer, kind)) for layer in self._layers)
        self._figures = measured()
        self._hbm_scale = self._figures["hbm_read"] / rates.hbm_read

    def step(self, batch: Batch) -> StepTime:
        """One step of all sessions of ``batch``, drafts for the next one included."""
        rows = batch.sessions * (1 + batch.drafts)
        time = StepTime()
        for products, layers in self._products.items():
            time += self._layer(products, rows).times(layers)
        for layers, groups in Counter(group.layers for group in self._groups).items():
            time += self._group(batch, layers).times(groups)
        if self._layers.stop == self._config.num_hidden_layers:
            time += self._product(head_product(self._config), rows)
            if batch.drafts:
                time += self._drafting(batch)
        return time

    def _layer(self, products: Sequence[Product], rows: float) -> StepTime:
        time = StepTime(launches=self._figures["layer"]["other_us"])
        for product in products:
            time += self._product(product, rows)
        if self._tensor > 1:
            time += StepTime(joins=2 * self._figures["assumed"]["join_us"])
        return time + self._attention(rows)

    def _product(self, product: Product, rows: float) -> StepTime:
        figures = self._figures["products"][product.kind]
        operations = 1e6 * product.operations(rows) / self._tensor / figures["operations"] / self._rates.compute
        if rows <= figures.get("few", {}).get("rows", 0):
            figures = figures["few"]
        read = 1e6 * product.read_bytes(rows) / self._tensor / figures["read"] * self._hbm_scale
        widened = read * (1 + figures["row_cost"] * max(rows - 1, 0))
        launches = product.launches * figures["launch_us"]
        return StepTime(launches=launches, hbm=read, compute=max(widened, operations) - read)

    def _attention(self, rows: float) -> StepTime:
        figures = self._figures["attention"]
        heads = rows * self._config.num_attention_heads / self._tensor / figures["heads"]
        keys = self._config.index_topk / figures["keys"]
        alone = figures["us"][0][1]
        beyond = _between(figures["us"], max(heads * keys, 1)) - alone
        return StepTime(launches=alone, compute=beyond / self._rates.compute)

    def _group(self, batch: Batch, layers: int) -> StepTime:
        figures, rows = self._figures["index"], 1 + batch.drafts
        all_tokens = batch.sessions * batch.tokens
        read = 1e6 * all_tokens * self._encoding.keys.block_bytes / 64 / self._rates.hbm_read
        heads = self._config.index_n_heads / figures["heads"]
        picoseconds = figures["token_ps"] * self._hbm_scale + figures["token_row_ps"] * rows * heads
        if batch.sessions > 1:
            picoseconds += figures["token_of_many_ps"]
        scored = all_tokens * picoseconds / 1e6
        index = StepTime(launches=figures["launch_us"], hbm=min(read, scored), compute=max(scored - read, 0.0))
        return index + self._look_up(batch, layers)

    def _look_up(self, batch: Batch, layers: int) -> StepTime:
        """What the hot cache adds to a group: the anchor layer's own reads, and a round beside it that slows others."""
        if not self._cached:
            return StepTime()
        figures, rows = self._figures["cache"], 1 + batch.drafts
        queries, row_bytes = batch.sessions * rows, self._encoding.rows.row_bytes
        bus = min(figures["fetch"], self._rates.bus_read)
        missed = self._config.index_topk * batch.misses
        distinct = self._missed(batch) * batch.sessions
        few = _between(figures["anchor_us"], missed) * (1 + figures["anchor_row_cost"] * max(queries - 1, 0))
        anchor = max(few, 1e6 * missed * queries * row_bytes / bus)
        fetched = 1e6 * distinct * layers * row_bytes / bus
        late = max(figures["fetch_slows"] * fetched - figures["hidden_us"], 0.0)
        launches = figures["lookup_us"] + figures["lookup_row_us"] * (rows - 1)
        return StepTime(launches=launches, bus=anchor + late, bus_busy=fetched + fetched / layers)

    def _missed(self, batch: Batch) -> float:
        """Rows of one session and group that are fetched; those that several query rows miss are fetched once."""
        rows = 1 + batch.drafts
        of_4: float = self._figures["cache"]["distinct_of_4"]
        distinct = max(1 - (1 - of_4) / 3 * (rows - 1), 1 / rows)
        return self._config.index_topk * batch.misses * rows * distinct

    def _drafting(self, batch: Batch) -> StepTime:
        """The MTP layer over all rows, then once more for each further draft, with a head for each."""
        products = [*layer_products(self._config, self._config.num_hidden_layers, self._kind)]
        products.append(draft_product(self._config, self._kind))
        time = self._group(batch, 1)
        for draft in range(batch.drafts):
            rows = batch.sessions * (1 if draft else 1 + batch.drafts)
            time += self._layer(products, rows)
            time += self._product(head_product(self._config), batch.sessions)
        return time


def _between(points: Sequence[Sequence[float]], at: float) -> float:
    """By straight lines between ``points``, ascending; the last line goes on."""
    index = next((i for i in range(1, len(points) - 1) if at <= points[i][0]), len(points) - 1)
    (left, low), (right, high) = points[index - 1], points[index]
    return low + (high - low) * (at - left) / (right - left)
