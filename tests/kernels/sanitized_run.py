"""Every kernel of the hot path once, on a small session: a program for `compute-sanitizer`; `make sanitize` runs it.

    compute-sanitizer --tool memcheck python -m tests.kernels.sanitized_run

It checks no result, which the tests do. Set PYTORCH_NO_CUDA_MEMORY_CACHING=1, so that each tensor is an allocation of
its own and an access past its end is seen. With ``--list`` it prints which kernels it ran; with ``--only KERNEL`` it
runs only the part of them in which that kernel is.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from compute.kernels.addresses import row_addresses
from compute.kernels.append import append_keys, append_rows
from compute.kernels.attention import SparseAttention, hopper_programs
from compute.kernels.cuda_source import CudaKernel
from compute.kernels.descriptors import describe
from compute.kernels.fetch import fetch
from compute.kernels.half_rows import HALF_ROW_DIMS, fill_half_rows
from compute.kernels.index_score import index_scores
from compute.kernels.positions import begin_step
from compute.kernels.resolve import RoundBuffers, resolve
from compute.kernels.topk import TopK
from compute.kernels.triton_support import INTERPRETED
from protocol.layout import PAGE_TOKENS, Q8G64
from tests.kernels import sanitized_passes, sanitized_products
from tests.kernels.pages import DEVICE, Pages, format_of

GROUP, LAYERS, HEADS = 1, 4, 64
PAGES, K, SLOTS = 20, 600, 2600
LENGTH = PAGES * PAGE_TOKENS - 5
RING_FIRST = LENGTH // PAGE_TOKENS * PAGE_TOKENS - PAGE_TOKENS
ATTENDED_ROWS = (1, 30)
"""Query rows of one call: few, and of more programs than a GPU holds at a time."""


@dataclass(frozen=True)
class Part:
    """Launches, and the modules of ``compute.kernels`` that hold their kernels."""

    run: Callable[[], None]
    modules: tuple[str, ...]


def main(only: str | None = None) -> None:
    """Run all parts, or the one that has a kernel called ``only``."""
    for part in PARTS if only is None else [_part_of(only)]:
        torch.manual_seed(0)
        part.run()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def run_steps() -> None:
    page_format = format_of()
    pages = Pages.random(page_format, PAGES, length=0, ring_first=RING_FIRST)
    cache = pages.cache(GROUP, SLOTS)
    for rows in (1, 4):
        run_step(pages, describe(pages.page_map, GROUP, cache, selected=rows * K)[None].to(DEVICE), rows)


def run_step(pages: Pages, records: Tensor, rows: int) -> None:
    """A history that ends in ``rows`` query rows: appended, scored, selected, resolved, fetched, attended."""
    page_format = pages.page_map.format

    def integers(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=DEVICE)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE)

    positions, seen = integers(1, rows), integers(1, rows)
    begin_step(records, torch.full((1,), LENGTH - rows, device=DEVICE), integers(1), positions, seen)
    for part in (torch.arange(LENGTH - rows, device=DEVICE).view(1, -1), positions):
        append_keys(records, page_format, GROUP, part, normal(*part.shape, 128))
        for layer in range(LAYERS):
            append_rows(records, page_format, GROUP, layer, part, normal(*part.shape, 512), normal(*part.shape, 64))

    top = TopK(rows, PAGES * PAGE_TOKENS, K, DEVICE)
    scores = torch.full(
        (1, rows, top.capacity), float("nan"), device=DEVICE
    )  # read 16 bytes at a time, past the length
    query, weights = normal(1, rows, 32, 128).bfloat16(), normal(1, rows, 32)
    selection = torch.empty((1, rows, K), dtype=torch.int32, device=DEVICE)
    for maxima in (None, top.maxima):
        index_scores(records, query, weights, positions, scores, maxima)
        top.select(scores[0], seen[0], selection[0], maxima_known=maxima is not None)

    addresses = torch.empty((1, rows, K), dtype=torch.int64, device=DEVICE)
    row_addresses(records, page_format, GROUP, selection, addresses)
    buffers = RoundBuffers.empty(1, rows, K, DEVICE)
    staging = torch.empty((1, rows, K, Q8G64.rows.row_bytes), dtype=torch.uint8, device=DEVICE)
    for _ in range(2):  # misses, then hits
        row_addresses(records, page_format, GROUP, selection, addresses, cached=True, staging=staging)
        resolve(records, page_format, GROUP, selection, buffers)
        fetch(buffers, page_format.group_row_bytes(GROUP))

    halves = torch.empty((LENGTH, HALF_ROW_DIMS), dtype=torch.float16, device=DEVICE)
    fill_half_rows(records[0], page_format, GROUP, 1, halves)
    for count in ATTENDED_ROWS:
        latent, rope = normal(count, HEADS, 512).bfloat16(), normal(count, HEADS, 64).bfloat16()
        out = torch.empty((count, HEADS, 512), device=DEVICE)
        attention = SparseAttention(count, HEADS, K, DEVICE)
        attention.attend(buffers.addresses[0, :1].repeat(count, 1), 1, latent, rope, 0.05, out)
        if DEVICE.type == "cuda" and hopper_programs(DEVICE):
            attention.attend_halves(selection[0, :1].repeat(count, 1), halves, latent, rope, 0.05, out)


STEP_MODULES = (
    "addresses",
    "append",
    "attention",
    "attention_hopper",
    "attention_rows",
    "fetch",
    "half_rows",
    "index_score",
    "positions",
    "resolve",
    "topk_cluster",
    "topk_collect",
    "topk_select",
)
PARTS = (
    Part(run_steps, STEP_MODULES),
    Part(sanitized_passes.main, sanitized_passes.MODULES),
    Part(sanitized_products.main, sanitized_products.MODULES),
)


def _part_of(kernel: str) -> Part:
    """Raises `SystemExit` if there is no such kernel."""
    for part in PARTS:
        for name in part.modules:
            module = importlib.import_module(f"compute.kernels.{name}")
            if kernel == name or kernel in vars(module) or kernel in getattr(module, "SOURCES", ()):
                return part
    raise SystemExit(f"sanitized_run: there is no kernel {kernel!r}; --list prints those that there are")


def _note_kernels(names: set[str]) -> None:
    """Fill ``names`` with the kernels that are launched."""
    from triton import JITFunction

    for module in [module for name, module in sys.modules.items() if name.startswith("compute.kernels.")]:
        for name, kernel in vars(module).items():
            if isinstance(kernel, JITFunction):
                kernel.add_pre_run_hook(lambda *_, name=name, **__: names.add(name))
    make = CudaKernel.__init__

    def noted(kernel: CudaKernel, name: str, defines: Mapping[str, int]) -> None:
        names.add(name)
        make(kernel, name, defines)

    CudaKernel.__init__ = noted  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Run every kernel of the hot path once.")
    parser.add_argument("--list", action="store_true", help="print which kernels ran")
    parser.add_argument("--only", metavar="KERNEL", help="run only the part in which this kernel is")
    options = parser.parse_args()
    ran: set[str] = set()
    if options.list and not INTERPRETED:
        _note_kernels(ran)
    main(options.only)
    sys.stdout.writelines(f"{name}\n" for name in sorted(ran))
