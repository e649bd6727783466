"""The fast decoder's weights: from a seed, and from checkpoints in bfloat16 and FP8 that ``transformers`` names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compute.decode.weights import (
    DecodeWeights,
    load_weights_on,
    random_weights_on,
    range_shapes,
)
from compute.kernels.matrix import Matrix
from compute.kernels.reference_linear import dequantise, quantise
from protocol.errors import InvalidValue
from protocol.model import DEMO, GLM_5_3, ModelConfig
from tests.fast_weights import parts_of
from tests.unit.test_model_oracle import GLM, TINY

TINY_CONFIG = replace(
    DEMO, num_hidden_layers=4, moe_intermediate_size=128, n_routed_experts=4, num_nextn_predict_layers=1
)
LAYERS = TINY_CONFIG.num_hidden_layers


def checkpoint(config: ModelConfig) -> dict[str, Tensor]:
    """Random float32 tensors, under the names of ``transformers``."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(shape, generator=generator) * 0.2
        for name, shape in range_shapes(config, 0, config.num_hidden_layers, mtp=True).items()
    }


def quantised(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every projection in FP8 with its block scales, as published checkpoints have them; the rest in bfloat16."""
    out: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        kept = tensor.dim() == 1 or any(part in name for part in ("embed", "lm_head", "weights_proj", ".gate.weight"))
        if kept:
            out[name] = tensor if name.endswith("bias") else tensor.bfloat16()
            continue
        pair = quantise(tensor)
        assert pair.scales is not None
        out[name], out[f"{name}_scale_inv"] = pair.values, pair.scales
    return out


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return checkpoint(TINY_CONFIG)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, Tensor]) -> Path:
    path = tmp_path_factory.mktemp("bf16")
    save_file({name: tensor.bfloat16() for name, tensor in weights.items()}, path / "model.safetensors")
    return path


def every_part(loaded: DecodeWeights, compare: Callable[[str, Tensor, Tensor], None], named: dict[str, Tensor]) -> None:
    """Call ``compare(name, got, of the checkpoint)`` for every tensor of the checkpoint ``named`` in float32."""
    config = loaded.config
    assert loaded.embedding is not None
    assert loaded.norm is not None
    assert loaded.head is not None
    assert loaded.mtp is not None
    got: dict[str, Tensor] = {
        "model.embed_tokens.weight": loaded.embedding.float(),
        "model.norm.weight": loaded.norm,
        "lm_head.weight": dequantise(loaded.head),
    }
    layers = [*loaded.layers, loaded.mtp.layer]
    for number, layer in enumerate(layers):
        got |= {f"model.layers.{number}.{name}": tensor for name, tensor in parts_of(config, layer).items()}
    mtp = {
        "eh_proj.weight": dequantise(loaded.mtp.combine),
        "enorm.weight": loaded.mtp.embedding_norm,
        "hnorm.weight": loaded.mtp.hidden_norm,
        "shared_head.norm.weight": loaded.mtp.norm,
    }
    got |= {f"model.layers.{len(loaded.layers)}.{name}": tensor for name, tensor in mtp.items()}
    assert got.keys() == named.keys()
    for name, tensor in named.items():
        compare(name, got[name], tensor.float())


def is_same(name: str, got: Tensor, stored: Tensor) -> None:
    assert torch.equal(got, stored), name


def test_a_bfloat16_checkpoint_is_read_as_it_is(folder: Path, weights: dict[str, Tensor]) -> None:
    loaded = load_weights_on(TINY_CONFIG, folder, "bf16", "cpu", mtp=True)
    every_part(loaded, is_same, {name: tensor.bfloat16() for name, tensor in weights.items()})


def test_an_fp8_checkpoint_keeps_its_values_and_scales(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    stored = quantised(weights)
    save_file(stored, tmp_path / "model.safetensors")
    exact = {name: tensor for name, tensor in stored.items() if not name.endswith("_scale_inv")}
    for name in exact:
        if f"{name}_scale_inv" in stored:
            exact[name] = dequantise(Matrix(stored[name], stored[f"{name}_scale_inv"]))

    def compare_fp8(name: str, got: Tensor, expected: Tensor) -> None:
        if "weights_proj" in name:  # bfloat16 in the file, quantised here
            torch.testing.assert_close(got, expected, rtol=2**-4, atol=0.01)
        else:
            assert torch.equal(got, expected.bfloat16().float() if "kv_b" in name else expected), name

    every_part(load_weights_on(TINY_CONFIG, tmp_path, "fp8", "cpu", mtp=True), compare_fp8, exact)
    rounded = {name: tensor.bfloat16() for name, tensor in exact.items()}
    rounded |= {name: tensor for name, tensor in exact.items() if name.endswith("bias")}
    every_part(load_weights_on(TINY_CONFIG, tmp_path, "bf16", "cpu", mtp=True), is_same, rounded)


def test_what_transformers_saves_is_read(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(5)
    model = transformers.GlmMoeDsaForCausalLM(transformers.GlmMoeDsaConfig(**GLM | {"dtype": "bfloat16"})).bfloat16()
    model.save_pretrained(tmp_path, max_shard_size="400KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    config = ModelConfig.from_file(tmp_path / "config.json")
    seen: list[tuple[int, int]] = []
    loaded = load_weights_on(config, tmp_path, "bf16", "cpu", progress=lambda done, total: seen.append((done, total)))
    stored: dict[str, Tensor] = {}
    for file in tmp_path.glob("*.safetensors"):
        stored |= load_file(file)
    for number, layer in enumerate(loaded.layers):
        for name, tensor in parts_of(config, layer).items():
            assert torch.equal(tensor, stored[f"model.layers.{number}.{name}"].float()), name
    assert len(loaded.layers) == TINY["num_hidden_layers"]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] == sum(tensor.nbytes for tensor in stored.values())


def test_a_range_of_layers_has_what_belongs_to_it(folder: Path, weights: dict[str, Tensor]) -> None:
    middle = load_weights_on(TINY_CONFIG, folder, "bf16", "cpu", first_layer=1, end_layer=3)
    assert (middle.first_layer, middle.end_layer) == (1, 3)
    assert (middle.embedding, middle.norm, middle.head, middle.mtp) == (None, None, None, None)
    assert torch.equal(
        parts_of(TINY_CONFIG, middle.layers[0])["self_attn.o_proj.weight"],
        weights["model.layers.1.self_attn.o_proj.weight"].bfloat16().float(),
    )
    last = load_weights_on(TINY_CONFIG, folder, "bf16", "cpu", first_layer=3, mtp=True)
    assert last.mtp is not None
    assert last.embedding is not None
    assert last.head is not None
    for first, end in ((0, 0), (-1, 2), (2, LAYERS + 1), (3, 3)):
        with pytest.raises(InvalidValue, match="layers is"):
            load_weights_on(TINY_CONFIG, folder, "bf16", "cpu", first_layer=first, end_layer=end)
    with pytest.raises(InvalidValue, match="MTP layers is"):
        load_weights_on(TINY_CONFIG, folder, "bf16", "cpu", end_layer=2, mtp=True)


@pytest.mark.parametrize(
    "name", ["model.layers.2.self_attn.q_b_proj.weight", "model.layers.4.eh_proj.weight", "model.norm.weight"]
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, weights: dict[str, Tensor], name: str) -> None:
    tensor = weights[name]
    for changed, said in (
        ({key: tensor for key, tensor in weights.items() if key != name}, "is 'missing'"),
        (weights | {name: tensor[1:].clone()}, r"allowed: '?\[" + str(tensor.shape[0])),
        (weights | {name: tensor.double()}, "is 'F64'"),
        (weights | {name: tensor.to(torch.float8_e4m3fn)}, "_scale_inv .* is 'missing'|is 'F8_E4M3'"),
    ):
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(InvalidValue, match=said) as refused:
            load_weights_on(TINY_CONFIG, tmp_path, "fp8", "cpu", mtp=True)
        assert name in str(refused.value)


def test_a_misshapen_scale_is_refused_by_name(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    name = "model.layers.1.self_attn.o_proj.weight"
    stored = quantised(weights)
    stored[f"{name}_scale_inv"] = torch.ones(7, 1)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(InvalidValue, match=rf"shape of tensor {name}_scale_inv is '\[7, 1\]'"):
        load_weights_on(TINY_CONFIG, tmp_path, "fp8", "cpu", mtp=True)
    assert load_weights_on(TINY_CONFIG, tmp_path, "fp8", "cpu", first_layer=2, mtp=True).mtp  # of another range


def test_fp8_wants_whole_blocks_per_expert() -> None:
    with pytest.raises(InvalidValue, match="moe_intermediate_size with FP8 weights is 64"):
        random_weights_on(replace(TINY_CONFIG, moe_intermediate_size=64), 0, "fp8", "cpu")


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_a_seed_decides_every_bit_whatever_the_range(kind: str) -> None:
    assert kind in ("bf16", "fp8")
    whole, again = (random_weights_on(TINY_CONFIG, 5, kind, "cpu", mtp=True) for _ in range(2))  # type: ignore[arg-type]
    part = random_weights_on(TINY_CONFIG, 5, kind, "cpu", first_layer=2, mtp=True)  # type: ignore[arg-type]
    other = random_weights_on(TINY_CONFIG, 6, kind, "cpu", mtp=True)  # type: ignore[arg-type]
    for name, tensor in parts_of(TINY_CONFIG, whole.layers[3]).items():
        for same in (again.layers[3], part.layers[1]):
            assert torch.equal(parts_of(TINY_CONFIG, same)[name], tensor), name
    name = "self_attn.o_proj.weight"
    assert not torch.equal(*(parts_of(TINY_CONFIG, model.layers[3])[name] for model in (whole, other)))
    first, second = (parts_of(TINY_CONFIG, layer)[name] for layer in whole.layers[2:])
    assert not torch.equal(first, second)


def test_fp8_and_bfloat16_of_a_seed_are_the_same_model() -> None:
    exact, rounded = (random_weights_on(TINY_CONFIG, 5, kind, "cpu").layers[3] for kind in ("bf16", "fp8"))
    left, right = (parts_of(TINY_CONFIG, layer) for layer in (exact, rounded))
    for name, tensor in left.items():
        torch.testing.assert_close(right[name], tensor, rtol=2**-3, atol=2e-2)


def test_a_model_is_cut_by_layers_and_experts() -> None:
    small = GLM_5_3.with_layers(6).with_experts(8)
    assert [(group.first_layer, group.layers) for group in small.index_groups(0, 7)] == [
        (0, 1), (1, 1), (2, 4), (6, 1),
    ]  # fmt: skip
    assert range_shapes(small, 0, 6, mtp=True).keys() == {
        name.replace("layers.78.", "layers.6.")
        for name in range_shapes(GLM_5_3.with_experts(8), 0, 78, mtp=True)
        if not name.startswith("model.layers.") or int(name.split(".")[2]) in (*range(6), 78)
    }
    for wrong in (0, 79):
        with pytest.raises(InvalidValue, match="layers is"):
            GLM_5_3.with_layers(wrong)
    with pytest.raises(InvalidValue, match="routed experts is 7"):
        GLM_5_3.with_experts(7)
