"""The selection kernels against their reference: the same positions, whatever the scores and lengths."""

from __future__ import annotations

import functools

import pytest
import torch
import triton
from torch import Tensor
from torch.nn.functional import pad

from compute.kernels import topk as top_k
from compute.kernels.reference import select_topk
from compute.kernels.topk import TopK
from compute.kernels.topk_cluster import MAX_CAPACITY, fits_cluster
from compute.kernels.topk_collect import CLASSES, NO_SCORE
from protocol.errors import InvalidValue
from tests.kernels.pages import DEVICE

CUDA = DEVICE.type == "cuda"
NAN, INF = float("nan"), float("inf")


FORMS = ["portable", "maxima known", *(["cluster"] if fits_cluster(DEVICE, 1) else [])]


@pytest.fixture(autouse=True, params=FORMS)
def _form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test with the Triton kernels, with maxima that `index_scores` would have found, and where the GPU can, with
    the cluster's kernel, which needs these.
    """
    monkeypatch.setitem(globals(), "TopK", functools.partial(TopK, portable=request.param != "cluster"))
    if request.param != "portable":
        monkeypatch.setattr(top_k.TopK, "select", _select_with_maxima)


SELECT = top_k.TopK.select


def _select_with_maxima(top: TopK, scores: Tensor, lengths: Tensor, selection: Tensor) -> None:
    if scores.shape[1] >= top.capacity and lengths.shape == scores.shape[:1] and len(scores) <= top.rows:
        tiles = triton.cdiv(top.capacity, CLASSES)
        used = pad(scores[:, : top.capacity], (0, tiles * CLASSES - top.capacity))
        taken = (torch.arange(tiles * CLASSES, device=DEVICE) < lengths[:, None]) & (used > -INF)
        bits = (used + 0.0).view(torch.int32)
        keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).where(taken, NO_SCORE)
        top.maxima[: len(scores)] = keys.view(-1, tiles, CLASSES).amax(1)
    SELECT(top, scores, lengths, selection, maxima_known=True)


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def _select(scores: Tensor, lengths: list[int], k: int, top: TopK | None = None) -> Tensor:
    """The kernels' selection of ``scores`` with NaN beyond each length and a prefilled output."""
    rows, columns = scores.shape
    top = top or TopK(rows, columns, k, DEVICE)
    poisoned = torch.full((rows, top.capacity), NAN, device=DEVICE)
    for row, length in enumerate(lengths):
        poisoned[row, :length] = scores[row, :length]
    selection = torch.full((rows, k), 123456, dtype=torch.int32, device=DEVICE)
    top.select(poisoned, torch.tensor(lengths, device=DEVICE), selection)
    assert bool((top.maxima == NO_SCORE).all()), "the scratch is not as it was"
    return selection


def _assert_same(scores: Tensor, lengths: list[int], k: int) -> None:
    expected = select_topk(scores, torch.tensor(lengths, device=DEVICE), k)
    actual = _select(scores, lengths, k)
    for row in range(scores.shape[0]):
        where = (actual[row] != expected[row]).nonzero()
        assert where.numel() == 0, f"row {row} differs from slot {int(where[0])} on"


def test_lengths_that_differ_within_a_batch() -> None:
    lengths = [0, 1, 63, 64, 65, 2047, 2048, 2049]
    _assert_same(_normal(len(lengths), 2049), lengths, 2048)


@pytest.mark.parametrize("k", [1, 7, 64, 100])
def test_any_k(k: int) -> None:
    _assert_same(_normal(2, 700), [700, 99], k)


def test_case_09_a_history_of_five_rows() -> None:
    selection = _select(_normal(1, 5), [5], 2048)
    assert selection[0].tolist() == [0, 1, 2, 3, 4] + [-1] * 2043


def test_ties_go_to_the_lowest_positions() -> None:
    scores = torch.stack(
        [
            torch.zeros(900),
            torch.arange(900) % 3 - 1.0,
            (torch.arange(900) % 2 - 1.0) * 0.0,  # -0.0 and 0.0 are equal
            torch.arange(900).float().div(400).floor(),
        ]
    ).to(DEVICE)
    _assert_same(scores, [900, 900, 899, 850], 150)


def test_excluded_infinite_and_tiny_scores() -> None:
    scores = _normal(5, 600)
    scores[0, ::2] = -INF
    scores[1] = -INF
    scores[2, ::5] = INF
    scores[3] *= 1e-42  # subnormal
    scores[4] = torch.where(scores[4] > 0, 3e38, -3e38) * scores[4].abs().clamp(max=1)
    _assert_same(scores, [600] * 5, 200)


def test_a_nan_below_the_length_is_never_chosen() -> None:
    scores = _normal(1, 300)
    scores[0, 10:200] = NAN
    assert _select(scores, [300], 128)[0].tolist() == [*range(10), *range(200, 300), *([-1] * 18)]


def test_recent_tokens_score_highest() -> None:
    _assert_same(torch.arange(2, 1502, device=DEVICE).float().log()[None], [1500], 256)


def test_more_candidates_than_one_tile() -> None:
    """All scores of a class alike: the bound takes in whole classes, or with equal scores everything."""
    periodic = _normal(1, CLASSES).repeat(1, 2) + torch.arange(2 * CLASSES, device=DEVICE) * 1e-6
    equal = torch.ones(1, 2 * CLASSES, device=DEVICE)
    steps = torch.arange(2 * CLASSES, device=DEVICE)[None] // 3000 * 1.0
    _assert_same(torch.cat((periodic, equal, steps)), [2 * CLASSES] * 3, 600)


def test_a_row_alone_in_a_batch_and_at_any_place() -> None:
    scores, lengths = _normal(4, 800), [800, 640, 3, 799]
    together = _select(scores, lengths, 200)
    order = [2, 0, 3, 1]
    assert torch.equal(_select(scores[order], [lengths[i] for i in order], 200), together[order])
    for row in range(4):
        assert torch.equal(_select(scores[row : row + 1], lengths[row : row + 1], 200)[0], together[row])


def test_one_scratch_serves_selections_in_turn() -> None:
    top = TopK(3, 640, 96, DEVICE)
    for seed, lengths in enumerate(([640, 100, 0], [5, 640, 96], [639, 1, 97])):
        scores = _normal(3, 640, seed=seed)
        expected = select_topk(scores, torch.tensor(lengths, device=DEVICE), 96)
        assert torch.equal(_select(scores, lengths, 96, top), expected)


def test_wrong_shapes_and_sizes_are_refused() -> None:
    for k in (0, 1 << 15):
        with pytest.raises(InvalidValue):
            TopK(1, 64, k, DEVICE)
    top = TopK(2, 128, 8, DEVICE)
    scores, lengths = torch.zeros(2, 128, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    selection = torch.zeros(2, 8, dtype=torch.int32, device=DEVICE)
    with pytest.raises(InvalidValue, match="scores"):
        top.select(torch.zeros(3, 128, device=DEVICE), lengths, selection)
    with pytest.raises(InvalidValue, match="scores"):
        top.select(scores[:, :64], lengths, selection)
    with pytest.raises(InvalidValue, match="selection"):
        top.select(scores, lengths, selection[:, :4])


@pytest.mark.gpu
@pytest.mark.parametrize("length", [4095, 51_200, 131_072, MAX_CAPACITY, 1_048_576])
def test_long_histories(length: int) -> None:
    scores = _normal(6, length)
    scores[1] = (scores[1] * 20).round()  # ties
    scores[2] = 0
    scores[3, scores[3] < 0.5] = -INF
    scores[4] = torch.arange(length, device=DEVICE) * 1e-3
    scores[5] = -scores[5].abs() * 1e-30
    _assert_same(scores, [length] * 6, 2048)


@pytest.mark.gpu
def test_a_selection_larger_than_shared_memory() -> None:
    _assert_same(_normal(2, 70_000), [70_000, 12_000], 20_000)


@pytest.mark.gpu
def test_a_recorded_graph_follows_lengths_and_scores() -> None:
    top = TopK(4, 20_000, 2048, DEVICE)
    scores = torch.zeros(4, top.capacity, device=DEVICE)
    lengths = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    selection = torch.zeros(4, 2048, dtype=torch.int32, device=DEVICE)
    top.select(scores, lengths, selection)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):  # the second finds the scratch as the first left it
            top.select(scores, lengths, selection)
    for seed in range(20):
        scores.copy_(_normal(4, top.capacity, seed=seed))
        lengths.copy_(torch.randint(0, 20_001, (4,), generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert torch.equal(selection, select_topk(scores, lengths, 2048))
