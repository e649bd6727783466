"""Weights: the same from a seed everywhere, read back from files exactly, and refused with the tensor's name."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from compute.model.weights import INDEX_FILE, SINGLE_FILE, load_weights, random_weights, tensor_shapes
from protocol.errors import InvalidValue
from protocol.model import DEEPSEEK_V3_2, DEMO, GLM_5_3, ModelConfig

SMALL = replace(DEMO, num_hidden_layers=4, n_routed_experts=2, hidden_size=32, q_lora_rank=16)


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return random_weights(SMALL, 5)


def test_seed_and_name_decide_every_bit(weights: dict[str, Tensor]) -> None:
    again = random_weights(SMALL, 5)
    assert list(again) == list(weights) == list(tensor_shapes(SMALL))
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())
    deeper = random_weights(replace(SMALL, num_hidden_layers=5), 5)
    assert all(torch.equal(deeper[name], tensor) for name, tensor in weights.items())
    other = random_weights(SMALL, 6)
    assert not torch.equal(other["lm_head.weight"], weights["lm_head.weight"])


def test_the_bits_are_the_same_on_every_machine(weights: dict[str, Tensor]) -> None:
    golden = hashlib.sha256()
    for name in sorted(weights):
        golden.update(name.encode() + weights[name].numpy().tobytes())
    assert golden.hexdigest() == "306c43acbaa8156ed7bad8bdb42bd30cf3c3902d23e868981a6035073ce0c0a2"


def test_values_have_the_deviation_of_the_config_and_are_nearly_normal(weights: dict[str, Tensor]) -> None:
    values = weights["model.layers.0.self_attn.indexer.wq_b.weight"].flatten().double()
    assert values.numel() == 65536
    assert float(values.mean()) == pytest.approx(0.0, abs=0.2 * 4 / 256)
    assert float(values.std()) == pytest.approx(0.2, rel=0.01)
    assert float((values.abs() < 0.2).double().mean()) == pytest.approx(0.6827, abs=0.02)


def test_norms_are_one_and_biases_zero(weights: dict[str, Tensor]) -> None:
    assert bool((weights["model.layers.3.post_attention_layernorm.weight"] == 1).all())
    assert bool((weights["model.layers.0.self_attn.indexer.k_norm.weight"] == 1).all())
    assert not weights["model.layers.0.self_attn.indexer.k_norm.bias"].any()
    assert not weights["model.layers.3.mlp.gate.e_score_correction_bias"].any()


def test_only_the_first_layer_of_a_group_has_an_indexer() -> None:
    with_indexer = {int(name.split(".")[2]) for name in tensor_shapes(GLM_5_3) if name.endswith("indexer.wk.weight")}
    assert with_indexer == {0, 1, *range(2, 78, 4)}


@pytest.mark.parametrize(("config", "billions"), [(GLM_5_3, 743.4), (DEEPSEEK_V3_2, 671.9)], ids=["glm", "deepseek"])
def test_published_sizes(config: ModelConfig, billions: float) -> None:
    total = sum(torch.Size(shape).numel() for shape in tensor_shapes(config).values())
    assert total / 1e9 == pytest.approx(billions, abs=0.1)


def test_one_file_or_a_folder_or_shards_are_read_alike(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    extra = {"model.layers.78.eh_proj.weight": torch.zeros(3)}  # of a part that the decoder does not have
    save_file(weights | extra, tmp_path / SINGLE_FILE)
    (shards := tmp_path / "shards").mkdir()
    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: weights[name] for name in part}, shards / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (shards / INDEX_FILE).write_text(json.dumps(index))
    for path in (tmp_path / SINGLE_FILE, tmp_path, shards):
        read = load_weights(SMALL, path)
        assert read.keys() == weights.keys()
        assert all(torch.equal(read[name], tensor) for name, tensor in weights.items())


def test_shorter_floats_become_float32(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    save_file({name: tensor.bfloat16() for name, tensor in weights.items()}, tmp_path / SINGLE_FILE)
    read = load_weights(SMALL, tmp_path)
    assert all(torch.equal(read[name], tensor.bfloat16().float()) for name, tensor in weights.items())


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    name = "model.layers.2.self_attn.q_b_proj.weight"
    for changed, said in (
        ({key: tensor for key, tensor in weights.items() if key != name}, rf"{name} in .* is 'missing'; .*\[384, 16\]"),
        (weights | {name: weights[name][1:]}, rf"{name} is '\[383, 16\]'; allowed: \[384, 16\]"),
        (weights | {name: weights[name].to(torch.float8_e4m3fn)}, rf"dtype of tensor {name} is 'F8_E4M3'"),
    ):
        save_file({key: tensor.contiguous() for key, tensor in changed.items()}, tmp_path / SINGLE_FILE)
        with pytest.raises(InvalidValue, match=said):
            load_weights(SMALL, tmp_path)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    for content in (b"", b"\x80\x04K\x01.", b"\xff" * 64, (2**40).to_bytes(8, "little") + b"{}"):
        (tmp_path / SINGLE_FILE).write_bytes(content)
        with pytest.raises(InvalidValue, match="readable safetensors file"):
            load_weights(SMALL, tmp_path)
    with pytest.raises(InvalidValue, match="readable safetensors file"):
        load_weights(SMALL, tmp_path / "absent")


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ("", "weight_map"),
        ("[]", "weight_map"),
        ('{"weight_map": [1]}', "weight_map"),
        ('{"weight_map": {"a": "../../etc/passwd"}}', "file name"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "file name"),
        ('{"weight_map": {"a": 5}}', "file name"),
        ('{"weight_map": {"a": ""}}', "file name"),
        ('{"weight_map": {"a": ".."}}', "file name"),
    ],
)
def test_an_index_names_files_of_its_own_folder_only(tmp_path: Path, index: str, said: str) -> None:
    (tmp_path / INDEX_FILE).write_text(index)
    with pytest.raises(InvalidValue, match=said):
        load_weights(SMALL, tmp_path)
