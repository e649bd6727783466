"""The decoder against ``transformers``, which shares nothing with it: same weights, same logits, same tokens.

Rows and keys are unquantised here, so that both compute the same thing but for rounding.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compute.model.decoder import Decoder
from compute.model.rope import Rope
from compute.model.weights import load_weights
from protocol.layout import F32
from protocol.model import ModelConfig
from tests.resident_history import ResidentHistory

transformers = pytest.importorskip("transformers", reason="transformers, the oracle, is not installed")
transformers.utils.logging.disable_progress_bar()  # its thread would outlive the tests

pytestmark = pytest.mark.filterwarnings("ignore")  # of another package's use of torch

PREFILL, GREEDY = 96, 64

TINY = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "index_n_heads": 32,  # with few heads, ties of the ReLU flip the cutoff on rounding
    "index_head_dim": 128,
    "index_topk": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,  # with 0.02 every output is one repeated token
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
    "dtype": "float32",
}
GLM = TINY | {
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 3,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 8e6},
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 40.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}
DEEPSEEK = TINY | {
    "num_hidden_layers": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-6,
    "rope_parameters": YARN,
}


@dataclass
class Pair:
    oracle: Any
    config: ModelConfig
    decoder: Decoder

    def history(self) -> ResidentHistory:
        return ResidentHistory(self.config, F32, PREFILL + GREEDY)


def make_pair(name: str, settings: dict[str, Any], folder: Path) -> Pair:
    """An oracle with random weights, saved, and our decoder of what was saved."""
    if not hasattr(transformers, f"{name}ForCausalLM"):
        pytest.skip(f"this transformers has no {name}")
    torch.manual_seed(7)
    oracle = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**settings)).eval()
    oracle.set_experts_implementation("eager")
    with torch.no_grad():
        for tensor_name, tensor in oracle.state_dict().items():
            if tensor_name.endswith("e_score_correction_bias"):
                tensor.uniform_(-0.5, 0.5)  # else leaving it out, or weighting by it, would go unseen
            elif tensor_name.endswith(("norm.weight", "norm.bias")):
                tensor.add_(torch.randn_like(tensor), alpha=0.1)
    oracle.save_pretrained(folder)
    config = ModelConfig.from_file(folder / "config.json")
    return Pair(oracle, config, Decoder(config, load_weights(config, folder), F32))


@pytest.fixture(scope="module", params=[("GlmMoeDsa", GLM), ("DeepseekV32", DEEPSEEK)], ids=["glm", "deepseek"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    name, settings = request.param
    return make_pair(name, settings, tmp_path_factory.mktemp(name))


def prompt() -> Tensor:
    return torch.randint(0, 256, (PREFILL,), generator=torch.Generator().manual_seed(11))


def test_prefill_logits_agree(pair: Pair) -> None:
    tokens = prompt()
    with torch.no_grad():
        expected = pair.oracle(tokens[None]).logits[0]
    got = pair.decoder.logits(pair.decoder.forward(tokens, torch.arange(PREFILL), pair.history()))
    assert got.argmax(1).unique().numel() > 16  # not one token over and over
    error = float((got - expected).abs().max() / expected.abs().max())
    assert error < 1e-4, f"largest error {error} of the largest logit"


def test_greedy_tokens_agree(pair: Pair) -> None:
    tokens = prompt()
    expected = pair.oracle.generate(tokens[None], max_new_tokens=GREEDY, do_sample=False)[0, PREFILL:].tolist()
    history = pair.history()
    hidden = pair.decoder.forward(tokens, torch.arange(PREFILL), history)
    got = [int(pair.decoder.logits(hidden[-1:]).argmax())]
    while len(got) < GREEDY:
        position = torch.tensor([PREFILL + len(got) - 1])
        hidden = pair.decoder.forward(torch.tensor(got[-1:]), position, history)
        got.append(int(pair.decoder.logits(hidden).argmax()))
    assert got == expected
    assert len(set(got)) > 8


def test_the_oracle_would_notice(pair: Pair, tmp_path: Path) -> None:
    """A negative control: the pairing of the indexer's rotation, one small part, changes the logits visibly."""
    pair.oracle.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    config = ModelConfig.from_dict(raw | {"indexer_rope_interleaved": not pair.config.indexer_rope_interleaved})
    tokens = prompt()
    right, wrong = (
        decoder.logits(decoder.forward(tokens, torch.arange(PREFILL), pair.history()))
        for decoder in (pair.decoder, Decoder(config, load_weights(config, tmp_path), F32))
    )
    assert float((right - wrong).abs().max() / right.abs().max()) > 1e-2


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"factor": 8.0, "beta_fast": 64, "beta_slow": 2},
        {"mscale": 0.707, "mscale_all_dim": 1.0},
        {"mscale": None, "mscale_all_dim": None},
        {"attention_factor": 1.25},
        {"rope_theta": 8e6, "original_max_position_embeddings": 32768},
    ],
    ids=str,
)
def test_yarn_angles_agree(changes: dict[str, Any]) -> None:
    rope = {key: value for key, value in (YARN | changes).items() if value is not None}
    theirs = transformers.DeepseekV32Config(**DEEPSEEK | {"rope_parameters": rope})
    frequencies, factor = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](theirs)
    positions = torch.arange(0, 160_000, 10_000)
    cos, sin = Rope(ModelConfig.from_dict(theirs.to_dict()), torch.device("cpu")).tables(positions)
    angles = positions[:, None].float() * frequencies
    torch.testing.assert_close(cos, angles.cos() * factor, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(sin, angles.sin() * factor, rtol=1e-6, atol=1e-6)
    scale = ModelConfig.from_dict(theirs.to_dict()).softmax_scale
    modeling = transformers.models.deepseek_v32.modeling_deepseek_v32
    assert scale == pytest.approx(modeling.yarn_apply_mscale(rope, 96**-0.5))
