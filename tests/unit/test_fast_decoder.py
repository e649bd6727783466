"""The fast decoder against the float32 reference, and a row against its company. ``pytest -rP`` shows the errors."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from compute.decode.decoder import FastDecoder
from compute.decode.matrices import WeightType
from compute.decode.weights import load_weights_on
from compute.kernels.state import LENGTH
from compute.model.decoder import Decoder
from compute.model.weights import load_weights, random_weights
from protocol.errors import InvalidValue
from protocol.layout import Q8G64
from protocol.model import DEMO, ModelConfig
from tests.resident_history import ResidentHistory

TOKENS = 160
CPU = torch.device("cpu")
GLM = replace(
    DEMO,
    num_hidden_layers=6,
    hidden_size=256,
    intermediate_size=256,
    moe_intermediate_size=128,
    index_topk=96,
    first_k_dense_replace=2,
    initializer_range=0.05,  # with 0.2 rounding is amplified from layer to layer, in any arithmetic
)
"""Groups of 1, 1 and 4 layers; the last two of the four are experts'."""
DEEPSEEK = replace(
    GLM,
    num_hidden_layers=3,
    index_topk_freq=1,
    first_k_dense_replace=1,
    n_group=4,
    topk_group=2,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    indexer_rope_interleaved=False,
    rope_scaling={
        "rope_type": "yarn",
        "factor": 40.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 4096,
    },
)


@dataclass
class Model:
    config: ModelConfig
    folder: Path
    reference: Decoder
    fast: FastDecoder


@pytest.fixture(scope="module", params=[GLM, DEEPSEEK], ids=["glm", "deepseek"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Both decoders, of the same bfloat16 checkpoint."""
    config, folder = request.param, tmp_path_factory.mktemp("checkpoint")
    weights = random_weights(config, 3)
    generator = torch.Generator().manual_seed(4)
    for name, tensor in weights.items():
        if name.endswith("e_score_correction_bias"):
            tensor.uniform_(-0.5, 0.5, generator=generator)
        elif tensor.dim() == 1:
            tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.1)
        else:
            weights[name] = tensor.bfloat16()
    save_file(weights, folder / "model.safetensors")
    reference = Decoder(config, load_weights(config, folder), Q8G64)
    return Model(config, folder, reference, FastDecoder(load_weights_on(config, folder, "bf16", CPU), CPU, rows=TOKENS))


@pytest.fixture(scope="module")
def text() -> Tensor:
    return torch.randint(0, 256, (TOKENS,), generator=torch.Generator().manual_seed(1))


def run(decoder: Decoder | FastDecoder, text: Tensor, cuts: list[int]) -> Tensor:
    """Hidden states of ``text``, computed in passes that end at ``cuts``."""
    history = ResidentHistory(decoder.config, Q8G64, TOKENS)
    parts = [
        decoder.forward(text[start:end], torch.arange(start, end), history)
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)
    ]
    return torch.cat(parts)


def errors(decoder: FastDecoder, model: Model, text: Tensor) -> Tensor:
    """Of each row's logits, relative to the row's norm."""
    expected = model.reference.logits(run(model.reference, text, []))
    got = decoder.logits(run(decoder, text, []))
    assert got.argmax(1).unique().numel() > 16  # not one token over and over
    return (got - expected).norm(dim=1) / expected.norm(dim=1)


def test_logits_are_those_of_the_reference_to_rounding(model: Model, text: Tensor) -> None:
    """Where the selection is all there is, rounding is all that differs; later a key at the cutoff may be another."""
    error = errors(model.fast, model, text)
    dense, sparse = error[: model.config.index_topk], error[model.config.index_topk :]
    _say("bf16, all keys selected", dense)
    _say("bf16, sparse", sparse)
    assert float(dense.median()) < 0.03
    assert float(sparse.median()) < 0.08


def test_fp8_weights_cost_what_fp8_costs(model: Model, text: Tensor) -> None:
    error = errors(_decoder(model, "fp8"), model, text)
    _say("fp8", error)
    assert 0.03 < float(error.median()) < 0.3


def test_the_comparison_would_notice(model: Model, text: Tensor) -> None:
    """A negative control: the pairing of the indexer's rotation, one small part, is far from rounding."""
    config = replace(model.config, indexer_rope_interleaved=not model.config.indexer_rope_interleaved)
    wrong = FastDecoder(load_weights_on(config, model.folder, "bf16", CPU), CPU, rows=TOKENS)
    right, error = (errors(each, model, text)[model.config.index_topk :] for each in (model.fast, wrong))
    _say("another rotation", error)
    assert float(error.median()) > 3 * float(right.median())


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize(
    "cuts",
    [[144], [1, 2, 6, 22, 86], list(range(4, 64, 4)), list(range(37, TOKENS, 37))],
    ids=lambda cuts: f"{len(cuts) + 1} passes",
)
def test_a_row_has_the_same_bits_however_the_text_is_divided(
    model: Model, text: Tensor, cuts: list[int], kind: WeightType
) -> None:
    decoder = model.fast if kind == "bf16" else _decoder(model, kind)
    assert torch.equal(run(decoder, text, cuts), run(decoder, text, []))


def test_logits_do_not_depend_on_how_many_rows_ask(model: Model, text: Tensor) -> None:
    hidden = run(model.fast, text, [])
    logits = model.fast.logits(hidden)
    for row in (0, 15, 16, TOKENS - 1):
        assert torch.equal(model.fast.logits(hidden[row : row + 1])[0], logits[row])


@pytest.mark.parametrize(
    ("tokens", "said"),
    [([0, 256], "token is 256; allowed: 0 to 255"), ([-1], "token is -1"), ([], "M > 0"), ([1] * 200, "M <= 160")],
    ids=["large", "negative", "none", "many"],
)
def test_bad_input_is_refused_and_nothing_is_appended(model: Model, tokens: list[int], said: str) -> None:
    history = ResidentHistory(model.config, Q8G64, 256)
    with pytest.raises(InvalidValue, match=said):
        model.fast.forward(torch.tensor(tokens, dtype=torch.int64), torch.arange(len(tokens)), history)
    assert int(history.page_map.window[LENGTH]) == 0


def _say(what: str, error: Tensor) -> None:
    sys.stdout.write(f"error of logits, {what}: median {error.median():.4f}, at most {error.max():.4f}\n")


def _decoder(model: Model, kind: WeightType) -> FastDecoder:
    return FastDecoder(load_weights_on(model.config, model.folder, kind, CPU), CPU, rows=TOKENS)
