"""``kvd-bench engine-copies``: blocks of an engine on a GPU to a daemon's frames and back, as by the vLLM connector.

An engine-shaped tensor, layer by layer; blocks from scattered places, as many at a time as the connector takes. What
is *saved* or *loaded* is one call of its copying class; *put* and *got* are several in turn, with all that is asked of
the daemon. What a loop of matrix products loses beside copies that never pause is measured in turns with the same loop
alone: recorded products of few rows, bound by reading their weights, as a decode step is.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import statistics
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.harness import Floors, measure_floors
from benchmarks.report import Report, Row
from benchmarks.timing import timed
from compute.block_store import BlockStore
from compute.embedded import EmbeddedDaemon
from compute.integrations.vllm.copies import CudaCopies
from compute.integrations.vllm.regions import Region
from compute.integrations.vllm.transfers import BATCH_BYTES
from kvd.alloc.sizes import require_size
from protocol.errors import KvdError
from protocol.layout import round_up

GOAL_GB_S, SLOWED_GOAL = 48.0, 2.0
EXTENT = 64 << 20
BATCHES = 8
"""That the daemon has room for; older ones make place."""
IN_TURN = 4
"""Batches that are put or got one after the other."""
ENGINE_BYTES = 2 << 30
"""Of an engine's cache."""
PRODUCT = (12288, 6144)
"""Weight of a product of the loop: 151 MB, three times the L2."""
PRODUCTS, ROWS_OF_PRODUCT, REPLAYS = 24, 16, 100
"""Of the loop: products of one replay, rows of each, and replays that are timed at a time."""


@dataclass(frozen=True)
class Shape:
    """An engine's cache: a block has ``piece`` bytes in each of its ``layers``."""

    name: str
    layers: int
    piece: int

    @property
    def block(self) -> int:
        return self.layers * self.piece


SHAPES = (
    Shape("32 layers, 16 tokens of 64 KiB", 32, 64 << 10),
    Shape("MLA of 61 layers, 64 tokens of fp8_ds_mla", 61, 64 * 656),
    Shape("MLA of 61 layers, 16 tokens of bf16", 61, 16 * 1152),
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument("--rounds", type=int, default=20, help="copies of each kind; the figure is their median")


def run(arguments: argparse.Namespace) -> Report:
    """Measure; raises `NoDevice` without a GPU, and `KvdError` if bytes that came back are others."""
    require_size("rounds", arguments.rounds)
    floors = measure_floors()
    torch.cuda.empty_cache()
    settings = {"torch": torch.__version__, "rounds": arguments.rounds, "bytes of a copy": BATCH_BYTES}
    report = Report("engine-copies", torch.cuda.get_device_name(), settings, floors.rows())
    for shape in SHAPES:
        if any(arguments.only in f"{shape.name}: {what}" for what in ("saved", "loaded", "put", "got", "products")):
            sys.stderr.write(f"{shape.name}\n")
            report.rows += _measure(shape, arguments.rounds, floors)
    report.rows = [row for row in report.rows if arguments.only in row.case]
    return report


def _measure(shape: Shape, rounds: int, floors: Floors) -> Iterator[Row]:
    host = BATCHES * round_up(BATCH_BYTES, EXTENT)
    count = ENGINE_BYTES // shape.block
    layers = torch.randint(0, 256, (shape.layers, count, shape.piece), dtype=torch.uint8, device="cuda")
    regions = [Region(layer.data_ptr(), shape.piece, shape.piece) for layer in layers]
    numbers = torch.randperm(count, generator=torch.Generator().manual_seed(1)).tolist()
    batch = BATCH_BYTES // shape.block
    ours, others = numbers[:batch], numbers[batch : 2 * batch]
    nbytes = batch * shape.block
    with (
        EmbeddedDaemon("cpu", host_bytes=host, extent_bytes=EXTENT, vram_bytes=EXTENT) as daemon,
        BlockStore(daemon.run_dir, fingerprint=bytes(32), block_bytes=shape.block, timeout_s=60) as store,
    ):
        copies = CudaCopies(regions, "cuda")
        keys = (hashlib.sha256(b"%d" % number).digest() for number in itertools.count())

        def put() -> list[list[bytes]]:
            wanted = [list(itertools.islice(keys, batch)) for _ in range(IN_TURN)]
            for reservation in store.reserve_each(wanted):
                copies.adopt(store.extents(), reservation.extents)
                copies.save(ours, reservation.addresses, copies.mark())
                reservation.publish()
            return wanted

        def get(wanted: list[list[bytes]]) -> None:
            for pinned in store.pin_each(wanted):
                assert pinned.is_whole, "what was put last is stored"
                copies.load(others, pinned.addresses, copies.mark())

        for _ in range(2 * BATCHES // IN_TURN):  # first uses: memory is mapped and registered
            stored = put()
        store.wait_mapped()
        get(stored)
        if not torch.equal(layers[:, ours], layers[:, others]):
            raise KvdError(f"{shape.name}: other bytes came back")

        def figure(
            what: str, act: Callable[[], object], floor: float, goal: float | None = None, batches: int = 1
        ) -> Row:
            seconds = statistics.median(timed(act) for _ in range(rounds))
            return Row(f"{shape.name}: {what}", batches * nbytes / seconds / 1e9, "GB/s", floor=floor / 1e9, goal=goal)

        yield figure("put", put, floors.copy_to_host, batches=IN_TURN)
        yield figure("got", partial(get, stored := put()), floors.copy_to_device, batches=IN_TURN)
        with store.pin(stored[-1]) as pinned:
            frames, before = pinned.addresses, copies.mark()  # the engine's steps from here on are not waited for

            def save() -> None:
                copies.save(ours, frames, before)

            def load() -> None:
                copies.load(others, frames, before)

            yield figure("saved", save, floors.copy_to_host, GOAL_GB_S)
            yield figure("loaded", load, floors.copy_to_device, GOAL_GB_S)
            for what, copy in (("saves", save), ("loads", load)):
                slowed, rate = _beside(copy, nbytes, max(3, rounds // 4))
                yield Row(f"{shape.name}: products beside {what}, slowed", slowed, "%", goal=SLOWED_GOAL)
                yield Row(f"{shape.name}: {what} beside products", rate / 1e9, "GB/s")
        copies.adopt([], [])  # what is registered stays mapped


def _beside(copy: Callable[[], object], nbytes: int, rounds: int) -> tuple[float, float]:
    """Percent that the loop of products takes longer beside copies, and bytes per second of those."""
    weights = [torch.randn(PRODUCT, device="cuda", dtype=torch.bfloat16) for _ in range(PRODUCTS)]
    rows = torch.randn(ROWS_OF_PRODUCT, PRODUCT[1], device="cuda", dtype=torch.bfloat16)
    products = [torch.mm(rows, weight.T) for weight in weights]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight, product in zip(weights, products, strict=True):
            torch.mm(rows, weight.T, out=product)

    def loop() -> float:
        start, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    copied: list[float] = []

    def beside() -> float:
        over, begun = threading.Event(), threading.Event()

        def copying() -> None:
            while not over.is_set():
                begun.set()
                copied.append(timed(copy))

        thread = threading.Thread(target=copying)
        thread.start()
        begun.wait()
        try:
            return loop()
        finally:
            over.set()
            thread.join()

    loop()
    times = [(loop(), beside()) for _ in range(rounds)]
    slowed = statistics.median(with_copies / alone for alone, with_copies in times) - 1
    return 100 * slowed, nbytes / statistics.median(copied)
