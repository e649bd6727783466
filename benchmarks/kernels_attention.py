"""Cases of the selection and of attention: index scores, top-2,048, both chained, attention over selected rows.

Baselines are the fastest public kernels measured on the same card (docs name them). Inputs are random, and as many sets
of them as the L2 cache cannot hold; key blocks and rows lie in memory in no order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.harness import Case, Floors, Work
from compute.kernels import reference
from compute.kernels.attention import SparseAttention
from compute.kernels.descriptors import FIELDS, KEY_BLOCK_ADDRESS, MAP_TOKENS
from compute.kernels.index_score import index_scores
from compute.kernels.topk import TopK
from protocol.layout import LATENT_DIM, PAGE_TOKENS, Q8G64, ROPE_DIM

_K = 2048
_HEADS = 32
_LENGTHS = {"50K": 51_200, "128K": 131_072, "1M": 1_048_576}
_CACHE_BYTES = 96 << 20
"""Input sets together are larger than this: more than the L2 cache."""
_DEVICE = torch.device("cuda")


def cases() -> list[Case]:
    return [*_score_cases(), *_topk_cases(), *_chained_cases(), *_attention_cases()]


def _table(
    name: str, prepare: Callable[[int, int, Floors], Work], goals: dict[tuple[str, int], tuple[float | None, float]]
) -> list[Case]:
    """A case for each (length, rows): (goal, baseline)."""
    return [
        Case(
            f"{name}: {length}, {rows} row{'s' * (rows > 1)}",
            functools.partial(prepare, _LENGTHS[length], rows),
            goal=goal,
            baseline=baseline,
        )
        for (length, rows), (goal, baseline) in goals.items()
    ]


def _score_cases() -> list[Case]:
    goals: dict[tuple[str, int], tuple[float | None, float]] = {
        ("50K", 1): (5.0, 5.2),
        ("128K", 1): (8.0, 8.1),
        ("1M", 1): (37.0, 38.6),
        ("50K", 4): (6.8, 6.8),
        ("128K", 4): (12.0, 10.1),
        ("1M", 4): (68.0, 53.2),
    }
    return _table("index score, 32 heads", _score, goals)


def _topk_cases() -> list[Case]:
    goals: dict[tuple[str, int], tuple[float | None, float]] = {
        ("50K", 1): (7.0, 7.1),
        ("128K", 1): (8.0, 8.0),
        ("1M", 1): (15.0, 15.5),
        ("50K", 4): (None, 7.2),
        ("128K", 4): (None, 8.1),
        ("1M", 4): (None, 18.3),
    }
    return _table("top-2,048", _topk, goals)


def _chained_cases() -> list[Case]:
    goals: dict[tuple[str, int], tuple[float | None, float]] = {
        ("50K", 1): (11.0, 13.0),
        ("128K", 1): (14.0, 16.4),
        ("1M", 1): (48.0, 55.6),
        ("50K", 4): (13.0, 14.6),
        ("128K", 4): (19.0, 18.9),
        ("1M", 4): (80.0, 72.8),
    }
    return _table("index score + top-2,048", _chained, goals)


def _attention_cases() -> list[Case]:
    """The peer's 64 rows are 16 sessions of 4. Hundreds of rows are a prefill's."""
    goals: dict[tuple[int, int], tuple[float | None, float | None]] = {
        (64, 1): (12.0, 19.4),
        (64, 4): (15.0, 20.1),
        (64, 16): (26.0, 30.6),
        (64, 64): (None, 75.8),
        **{(64, rows): (None, None) for rows in (256, 1024)},
        **{(128, rows): (None, None) for rows in (1, 4, 16, 256)},
    }
    return [
        Case(
            f"attention, {heads} heads, 2,048 keys: {rows:,} row{'s' * (rows > 1)}",
            functools.partial(_attention, heads, rows),
            goal=goal,
            baseline=baseline,
        )
        for (heads, rows), (goal, baseline) in goals.items()
    ]


class _Keys:
    """Random index keys of one history: blocks in no order, their table, and the record that points to it."""

    def __init__(self, tokens: int) -> None:
        layout = Q8G64.keys
        blocks = tokens // PAGE_TOKENS
        self.memory = torch.empty((blocks, layout.block_bytes), dtype=torch.uint8, device=_DEVICE)
        values, scales = reference.encode_keys(torch.randn((tokens, 128), device=_DEVICE), layout)
        self.memory[:, : layout.scales_offset] = values.view(torch.uint8).view(blocks, -1)
        self.memory[:, layout.scales_offset :] = scales.view(torch.uint8).view(blocks, -1)
        self.order = torch.randperm(blocks, device=_DEVICE)
        self.table = self.memory.data_ptr() + self.order * layout.block_bytes
        record = torch.zeros((1, FIELDS), dtype=torch.int64)
        record[0, MAP_TOKENS.value] = tokens
        record[0, KEY_BLOCK_ADDRESS.value] = self.table.data_ptr()
        self.records = record.to(_DEVICE)

    def exact(self, query: Tensor, weights: Tensor) -> Tensor:
        """float64 scores of one query row [heads, 128]."""
        values, scales = reference.decode_key_block(self.memory[self.order], Q8G64.keys)
        dots = (query.double() @ values.view(-1, 128).double().T * 128**-0.5).relu()
        sums: Tensor = weights.double() @ dots
        return sums * scales.view(-1).double()


class _Scoring:
    """Query rows against as many histories as the cache cannot hold."""

    def __init__(self, tokens: int, rows: int) -> None:
        self.histories = [_Keys(tokens) for _ in range(2 + _CACHE_BYTES // (tokens * 132))]
        self.query = torch.randn((1, rows, _HEADS, 128), device=_DEVICE).bfloat16()
        self.weights = torch.randn((1, rows, _HEADS), device=_DEVICE) * _HEADS**-0.5
        self.positions = torch.full((1, rows), tokens - 1, device=_DEVICE)
        self.scores = torch.empty((1, rows, tokens), device=_DEVICE)
        torch.cuda.synchronize()  # launches will be on another stream

    def launch(self, run: int, maxima: Tensor | None = None) -> None:
        keys = self.histories[run % len(self.histories)]
        index_scores(keys.records, self.query, self.weights, self.positions, self.scores, maxima)

    def check(self) -> None:
        self.launch(0)
        exact = self.histories[0].exact(self.query[0, -1], self.weights[0, -1])
        error = float((self.scores[0, -1].double() - exact).norm() / exact.norm())
        assert error < 1e-6, f"index scores are off by {error:.1e}"


def _runs(tokens: int) -> int:
    return 100 if tokens < 1_000_000 else 24


def _score(tokens: int, rows: int, floors: Floors) -> Work:
    scoring = _Scoring(tokens, rows)
    return Work(scoring.launch, _runs(tokens), floor=floors.read_us(tokens * 132), check=scoring.check)


def _topk(tokens: int, rows: int, floors: Floors) -> Work:
    sets = 2 + _CACHE_BYTES // (tokens * rows * 4)
    scores = torch.randn((sets, rows, tokens), device=_DEVICE)
    lengths = torch.full((rows,), tokens, device=_DEVICE)
    selection = torch.empty((rows, _K), dtype=torch.int32, device=_DEVICE)
    top = TopK(rows, tokens, _K, _DEVICE)
    torch.cuda.synchronize()

    def check() -> None:
        top.select(scores[0], lengths, selection)
        assert torch.equal(selection, reference.select_topk(scores[0], lengths, _K)), "a selection is wrong"

    return Work(
        lambda run: top.select(scores[run % sets], lengths, selection),
        100,
        floor=floors.read_us(scores[0].nbytes),
        check=check,
        torch=lambda run: scores[run % sets].topk(_K, sorted=False),
    )


def _chained(tokens: int, rows: int, floors: Floors) -> Work:
    scoring = _Scoring(tokens, rows)
    top = TopK(rows, tokens, _K, _DEVICE)
    selection = torch.empty((rows, _K), dtype=torch.int32, device=_DEVICE)
    lengths = scoring.positions[0] + 1
    torch.cuda.synchronize()

    def launch(run: int) -> None:
        scoring.launch(run, top.maxima)
        top.select(scoring.scores[0], lengths, selection, maxima_known=True)

    def check() -> None:
        launch(0)
        expected = reference.select_topk(scoring.scores[0], lengths, _K)
        assert torch.equal(selection, expected), "a selection is wrong"

    return Work(launch, _runs(tokens), floor=floors.read_us(tokens * 132), check=check)


@functools.cache
def _encoded_rows(count: int) -> Tensor:
    """Random rows, kept for all cases: uint8 [count, row bytes]."""
    memory = torch.empty((count, Q8G64.rows.row_bytes), dtype=torch.uint8, device=_DEVICE)
    for part in memory.split(1 << 17):
        latent = torch.randn((part.shape[0], LATENT_DIM), device=_DEVICE)
        rope = torch.randn((part.shape[0], ROPE_DIM), device=_DEVICE)
        part.copy_(reference.encode_rows(latent, rope, Q8G64.rows))
    return memory


def _attention(heads: int, rows: int, floors: Floors) -> Work:
    count, layers, sets = 1 << 18, 4, 16 if rows <= 16 else 2
    row_bytes = Q8G64.rows.row_bytes
    memory = _encoded_rows(count * layers)
    numbers = torch.randint(0, count, (sets, rows, _K), device=_DEVICE)
    addresses = memory.data_ptr() + numbers * (layers * row_bytes)
    latent_query = torch.randn((rows, heads, LATENT_DIM), device=_DEVICE).bfloat16()
    rope_query = torch.randn((rows, heads, ROPE_DIM), device=_DEVICE).bfloat16()
    scale = 256**-0.5
    out = torch.empty((rows, heads, LATENT_DIM), device=_DEVICE)
    attention = SparseAttention(rows, heads, _K, _DEVICE)
    torch.cuda.synchronize()

    def launch(run: int) -> None:
        attention.attend(addresses[run % sets], 1, latent_query, rope_query, scale, out)

    def check() -> None:
        launch(0)
        rows_read = memory.view(count, layers, row_bytes)[numbers[0, -1], 1].contiguous()
        latent, rope = (part.double() for part in reference.decode_rows(rows_read, Q8G64.rows))
        scores = (latent_query[-1].double() @ latent.T + rope_query[-1].double() @ rope.T) * scale
        exact = torch.softmax(scores, 1) @ latent
        error = float((out[-1].double() - exact).norm() / exact.norm())
        assert error < 1e-3, f"attention is off by {error:.1e}"

    return Work(launch, 100 if rows <= 16 else 8, floor=floors.read_us(rows * _K * row_bytes), check=check)
