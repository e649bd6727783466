"""``kvd-bench prefill``: reading a long text into a history, in VRAM or host RAM, beside a chain of library products.

A model of GLM-5.3's layers and dimensions with random weights and few experts, in a worker on a daemon of its own. The
text is random tokens. In each mode one text is read, and then another one is appended; the hidden state of both last
tokens must have the same bits in both modes. The chain is torch's bfloat16 product for every projection of every layer,
one behind the other and nothing in between.
"""

from __future__ import annotations

import math
import sys
import time
from argparse import ArgumentParser, Namespace

import torch
import triton
from torch import Tensor

from benchmarks.report import Report, Row
from compute.decode.matrices import WEIGHT_TYPES
from compute.embedded import EmbeddedDaemon
from compute.histories import HistorySettings, Mode
from compute.worker import Worker
from protocol.errors import InvalidValue, NoDevice
from protocol.layout import LATENT_DIM, PAGE_TOKENS, Q8G64, round_up
from protocol.model import GLM_5_3, ModelConfig

GOAL = 0.4
"""Of the chain's tokens/s."""
APPEND_GOAL = 1.01
"""Time of an append to an offloaded history over that of one to a resident history."""
HOT_ROWS = 32_768

Product = tuple[int, int, int, int]
"""Batch, M, N, K."""


def configure(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--dtype", choices=WEIGHT_TYPES, default="fp8", help="type of the weights (default %(default)s)")
    add("--layers", type=int, default=GLM_5_3.num_hidden_layers, help="the first N layers (default all %(default)s)")
    add("--experts", type=int, default=8, help="routed experts of a layer (default %(default)s)")
    add("--tokens", type=int, default=50_085, help="of the text (default %(default)s)")
    add("--append", type=int, default=9_854, help="tokens of the text behind it (default %(default)s)")
    add("--chunk", type=int, default=2048, help="tokens of a pass (default %(default)s)")
    add("--modes", nargs="+", default=["resident", "offloaded"], choices=("resident", "offloaded"), help="of histories")


def run(arguments: Namespace) -> Report:
    """Measure; raises `InvalidValue` if the modes do not give the same hidden states, `NoDevice` without a GPU."""
    if min(arguments.tokens, arguments.append, arguments.chunk) < 1:
        raise InvalidValue("--tokens, --append, --chunk", "below 1", "1 or more")
    if not torch.cuda.is_available():
        raise NoDevice("prefills are measured on a GPU; torch sees none", device="cuda")
    config = GLM_5_3.with_layers(arguments.layers).with_experts(arguments.experts)
    products = chain(config, arguments.chunk)
    chain_s, rate = _time_chain(products)
    _say(f"chain: {chain_s * 1e3:.1f} ms for {arguments.chunk} tokens; largest rate seen {rate / 1e12:.0f} TFLOP/s")
    settings = {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "weights": f"random, {arguments.dtype}",
        "layers": config.num_hidden_layers,
        "experts": config.n_routed_experts,
        "tokens": arguments.tokens,
        "append": arguments.append,
        "chunk": arguments.chunk,
    }
    baseline = arguments.chunk / chain_s
    floor = arguments.chunk / (flops(products) / rate)
    rows = [
        Row("chain of library products", baseline, "tokens/s", floor),
        Row("rate of the largest library product", rate / 1e12, "TFLOP/s"),
    ]
    report = Report("prefill", torch.cuda.get_device_name(), settings, rows)
    room = round_up(arguments.tokens + arguments.append, PAGE_TOKENS) + PAGE_TOKENS
    page_bytes = config.page_format(Q8G64).stride
    history_bytes = room // PAGE_TOKENS * page_bytes
    extent = 1 << 30
    with (
        EmbeddedDaemon(
            "cuda",
            host_bytes=round_up(history_bytes + extent, extent),
            extent_bytes=extent,
            vram_bytes=round_up(2 * history_bytes, extent) + 8 * extent,
        ) as daemon,
        Worker(daemon.run_dir, "cuda", config, Q8G64, dtype=arguments.dtype, rows=arguments.chunk) as worker,
    ):
        appends: dict[str, float] = {}
        states: dict[str, list[Tensor]] = {}
        _read(worker, "resident", arguments, room, arguments.chunk + 1, 1)  # compiles
        for mode in arguments.modes:
            read, appended, states[mode] = _read(worker, mode, arguments, room, arguments.tokens, arguments.append)
            appends[mode] = appended
            _say(f"{mode}: {arguments.tokens} tokens in {read:.2f} s, then {arguments.append} in {appended:.3f} s")
            report.rows += [
                Row(f"{mode}: read", arguments.tokens / read, "tokens/s", floor, baseline, GOAL * baseline),
                Row(f"{mode}: appended", arguments.append / appended, "tokens/s", floor, baseline),
            ]
    report.rows.append(Row("peak of VRAM that torch took", torch.cuda.max_memory_reserved() / 2**30, "GiB"))
    if len(appends) == 2:
        if not all(torch.equal(*pair) for pair in zip(*states.values(), strict=True)):
            raise InvalidValue("hidden states of the offloaded history", "others", "those of the resident one")
        ratio = appends["offloaded"] / appends["resident"]
        report.rows.append(Row("append, offloaded over resident", ratio, "times", goal=APPEND_GOAL))
    return report


def _read(
    worker: Worker, mode: Mode, arguments: Namespace, room: int, tokens: int, appended: int
) -> tuple[float, float, list[Tensor]]:
    """Seconds for both texts, and the hidden states of their last tokens."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(0, worker.config.vocab_size, (tokens + appended,), generator=generator).tolist()
    ring_pages = 2 * arguments.chunk // PAGE_TOKENS + 2
    history = worker.history(HistorySettings(mode, room, HOT_ROWS, ring_pages, f"prefill-{mode}"))
    states, seconds = [], []
    for part in (text[:tokens], text[tokens:]):
        torch.cuda.synchronize()
        started = time.perf_counter()
        states.append(worker.prefill(history, part, arguments.chunk).clone())
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    history.close()
    return seconds[0], seconds[1], states


def chain(config: ModelConfig, rows: int) -> dict[Product, int]:
    """Products of a pass of ``rows`` rows, and how many of each. Experts share the rows out evenly."""
    heads, hidden, latent = config.num_attention_heads, config.hidden_size, config.q_lora_rank
    counts: dict[Product, int] = {}

    def add(batch: int, m: int, n: int, k: int, times: int) -> None:
        counts[batch, m, n, k] = counts.get((batch, m, n, k), 0) + times

    def add_mlp(m: int, inner: int, times: int) -> None:
        add(1, m, 2 * inner, hidden, times)
        add(1, m, hidden, inner, times)

    layers, anchors = config.num_hidden_layers, len(config.index_groups())
    dense = min(config.first_k_dense_replace, layers)
    index = config.index_head_dim + config.index_n_heads
    from_hidden = latent + config.kv_lora_rank + config.qk_rope_head_dim
    from_latent = heads * config.qk_head_dim
    add(1, rows, from_hidden + index, hidden, anchors)
    add(1, rows, from_hidden, hidden, layers - anchors)
    add(1, rows, from_latent + config.index_n_heads * config.index_head_dim, latent, anchors)
    add(1, rows, from_latent, latent, layers - anchors)
    add(heads, rows, LATENT_DIM, config.qk_nope_head_dim, layers)
    add(heads, rows, config.v_head_dim, LATENT_DIM, layers)
    add(1, rows, hidden, heads * config.v_head_dim, layers)
    add_mlp(rows, config.intermediate_size, dense)
    sparse = layers - dense
    add(1, rows, config.n_routed_experts, hidden, sparse)
    add_mlp(rows, config.moe_intermediate_size * config.n_shared_experts, sparse)
    of_expert = math.ceil(rows * config.num_experts_per_tok / config.n_routed_experts)
    add_mlp(of_expert, config.moe_intermediate_size, sparse * config.n_routed_experts)
    return {product: count for product, count in counts.items() if count}


def flops(products: dict[Product, int]) -> float:
    """Floating-point operations of a pass."""
    return float(sum(2 * math.prod(product) * count for product, count in products.items()))


def _time_chain(products: dict[Product, int]) -> tuple[float, float]:
    """Seconds of a pass, and the highest rate of any of its products, in operations per second."""
    total, best = 0.0, 0.0
    for product, count in products.items():
        batch, m, n, k = product
        left = torch.randn((batch, m, k), dtype=torch.bfloat16, device="cuda")
        copies = max(1, (256 << 20) // (batch * n * k * 2))  # so that weights come from memory
        weights = [torch.randn((batch, k, n), dtype=torch.bfloat16, device="cuda") for _ in range(min(copies, 8))]
        start, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
        runs = 16
        for turn in range(runs + 4):
            if turn == 4:
                start.record()
            torch.matmul(left, weights[turn % len(weights)])
        end.record()
        end.synchronize()
        seconds = start.elapsed_time(end) / 1e3 / runs
        total += seconds * count
        best = max(best, 2 * math.prod(product) / seconds)
    return total, best


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
