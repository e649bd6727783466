"""A Hugging Face model with its history in kvd: the library's own tokens, with its own cache as the oracle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from protocol.errors import DaemonUnavailable, InvalidValue
from tests.blackbox.daemon_process import DaemonProcess

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
transformers.utils.logging.disable_progress_bar()  # its thread would outlive the tests

from compute.integrations.transformers import KvdCache, kvd_cache  # noqa: E402 - needs the library
from tests.unit.test_model_oracle import DEEPSEEK, GLM  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of another package's use of torch
    pytest.mark.leaks_per_module,
    pytest.mark.xdist_group("transformers"),
]

NEW = 48
"""Tokens generated: with the prompts, across pages and past the selection."""


def make_model(name: str, settings: dict[str, Any]) -> Any:
    torch.manual_seed(7)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**settings)).eval()
    model.set_experts_implementation("eager")
    return model


@pytest.fixture(scope="module", params=[("GlmMoeDsa", GLM), ("DeepseekV32", DEEPSEEK)], ids=["glm", "deepseek"])
def model(request: pytest.FixtureRequest) -> Any:
    return make_model(*request.param)


@pytest.fixture(scope="module")
def glm() -> Any:
    return make_model("GlmMoeDsa", GLM)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The run directory of a daemon that can save to disk."""
    folder = tmp_path_factory.mktemp("node")
    sizes: dict[str, str] = {"host_capacity": "256MiB", "host_extent": "16MiB", "vram_capacity": "1GiB"}
    disk = {"disk_state_dir": str(folder / "state"), "disk_capacity": "256MiB"}
    with DaemonProcess(folder / "run", drain_timeout_s="0", **sizes, **disk) as process:
        yield process.wait_ready().run_dir
        stats = process.stat()
        assert (stats.ledger, stats.sessions) == ("balanced", [])


def prompt(length: int, seed: int = 1) -> Tensor:
    return torch.randint(1, 256, (1, length), generator=torch.Generator().manual_seed(seed))


def generate(model: Any, tokens: Tensor, count: int = NEW, **rest: Any) -> Tensor:
    made = model.generate(tokens, max_new_tokens=count, do_sample=False, **rest)
    assert made.shape[1] == tokens.shape[1] + count
    return made


@pytest.mark.parametrize("mode", ["offloaded", "resident"])
def test_tokens_are_the_library_s_own(model: Any, node: Path, mode: Any) -> None:
    for length in (1, 63, 700):
        expected = generate(model, prompt(length))
        with kvd_cache(model, run_dir=node, max_tokens=1024, mode=mode, encoding="f32", chunk=100) as cache:
            assert generate(model, prompt(length), cache=cache).tolist() == expected.tolist()
            [counters] = cache.counters()
            assert cache.get_seq_length() == length + NEW - 1
        assert len(set(expected[0, length:].tolist())) > 8
        assert mode == "resident" or length < 700 or counters["misses"] > 0, "all of it was in the ring"


@pytest.mark.parametrize(("name", "settings"), [("GlmMoeDsa", GLM), ("DeepseekV32", DEEPSEEK)])
def test_quantised_rows_err_little(
    node: Path, capsys: pytest.CaptureFixture[str], name: str, settings: dict[str, Any]
) -> None:
    """With all rows selected, and small weights: else the smallest error of a key chooses other rows and experts."""
    model, tokens = make_model(name, settings | {"index_topk": 512, "initializer_range": 0.03}), prompt(300)
    expected = model(tokens).logits
    with kvd_cache(model, run_dir=node, max_tokens=512, hot_rows=512) as cache:
        got = model(tokens, cache=cache).logits
    error = float((got - expected).norm() / expected.norm())
    with capsys.disabled():
        sys.stdout.write(f"\n{name}: relative error of all logits with q8g64 rows: {error:.1e}\n")
    assert 1e-5 < error < 0.1


def test_a_batch_with_left_padding(model: Any, node: Path) -> None:
    """Each entry gets the tokens that it gets alone."""
    alone = [generate(model, prompt(length, seed=length))[0, length:] for length in (5, 130, 64)]
    tokens, mask = torch.zeros(3, 130, dtype=torch.int64), torch.zeros(3, 130, dtype=torch.int64)
    for entry, length in enumerate((5, 130, 64)):
        tokens[entry, 130 - length :], mask[entry, 130 - length :] = prompt(length, seed=length)[0], 1
    with kvd_cache(model, run_dir=node, max_tokens=256, batch_size=3, encoding="f32", chunk=50) as cache:
        got = generate(model, tokens, attention_mask=mask, cache=cache)
    assert got[:, 130:].tolist() == [list(map(int, entry)) for entry in alone]


def test_cropped_tokens_are_forgotten(glm: Any, node: Path) -> None:
    tokens, other = prompt(150), prompt(40, seed=9)
    expected = generate(glm, torch.cat((tokens[:, :100], other), 1))
    with kvd_cache(glm, run_dir=node, max_tokens=512, encoding="f32") as cache:
        generate(glm, tokens, cache=cache)
        cache.crop(100 - cache.get_seq_length())
        assert cache.get_seq_length() == 100
        assert generate(glm, torch.cat((tokens[:, :100], other), 1), cache=cache).tolist() == expected.tolist()
        with pytest.raises(InvalidValue, match="0 or negative"):
            cache.crop(3)


def test_a_stored_session_is_gone_on_from(glm: Any, node: Path) -> None:
    """By another process as it might be: another lease, and nothing kept but the name."""
    first, second = prompt(130), prompt(20, seed=5)
    middle = generate(glm, first)
    expected = generate(glm, torch.cat((middle, second), 1))
    settings: dict[str, Any] = {"run_dir": node, "max_tokens": 512, "encoding": "f32", "session": "chat"}
    with kvd_cache(glm, **settings) as cache:
        assert generate(glm, first, cache=cache).tolist() == middle.tolist()
    with kvd_cache(glm, **settings) as cache:
        assert cache.tokens.tolist() == middle[:, :-1].tolist(), "the last token was never computed on"
        before = cache.get_seq_length()
        assert generate(glm, torch.cat((middle, second), 1), cache=cache).tolist() == expected.tolist()
        assert before == middle.shape[1] - 1
        [length] = cache.save()
        assert length > 100_000
        cache.reset()
    with pytest.raises(InvalidValue, match="embedded"), kvd_cache(glm, session="chat"):
        pass


def test_a_session_of_other_weights_is_refused(glm: Any, node: Path) -> None:
    settings: dict[str, Any] = {"run_dir": node, "max_tokens": 512, "session": "mine"}
    with kvd_cache(glm, **settings) as cache:
        generate(glm, prompt(70), 1, cache=cache)
    other = make_model("GlmMoeDsa", GLM)
    with torch.no_grad():
        other.lm_head.weight[0, 0] += 1
    with pytest.raises(Exception, match="was made by model"), kvd_cache(other, **settings):
        pass
    with kvd_cache(glm, **settings) as cache:
        assert cache.get_seq_length() == 70
        cache.reset()


def test_streaming(glm: Any, node: Path) -> None:
    class Streamer(transformers.generation.BaseStreamer):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.got: list[int] = []

        def put(self, value: Tensor) -> None:
            self.got += value.flatten().tolist()

        def end(self) -> None:
            self.got.append(-1)

    streamer, tokens = Streamer(), prompt(30)
    with kvd_cache(glm, run_dir=node, max_tokens=512, encoding="f32") as cache:
        made = generate(glm, tokens, cache=cache, streamer=streamer)
    assert streamer.got == [*made[0].tolist(), -1]


def test_an_embedded_daemon_goes_with_the_block(glm: Any) -> None:
    tokens = prompt(100)
    expected = generate(glm, tokens)
    with kvd_cache(glm, max_tokens=256, encoding="f32") as cache:
        run_dir = Path(str(cache._maker.attachment.client.run_dir))
        assert run_dir.exists()
        assert generate(glm, tokens, cache=cache).tolist() == expected.tolist()
    assert not run_dir.exists()


def test_other_caches_work_within_the_block_and_after(glm: Any, node: Path) -> None:
    expected = generate(glm, prompt(90))
    with kvd_cache(glm, run_dir=node, max_tokens=256):
        assert generate(glm, prompt(90)).tolist() == expected.tolist()
    assert generate(glm, prompt(90)).tolist() == expected.tolist()
    assert "forward" not in vars(glm.model)
    assert not any("forward" in vars(layer.self_attn) for layer in glm.model.layers)


def padded(before: int, zeros: int, after: int) -> Tensor:
    return torch.tensor([[1] * before + [0] * zeros + [1] * after])


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda model, cache: generate(model, prompt(500), cache=cache), "max_tokens"),
        (lambda model, cache: generate(model, prompt(9).expand(2, 9), cache=cache), "batch_size"),
        (lambda model, cache: generate(model, prompt(9), cache=cache, num_beams=2), "batch_size|beams"),
        (lambda model, cache: model(prompt(9), attention_mask=padded(5, 4, 0), cache=cache), "left padding"),
        (lambda model, cache: model(prompt(9), attention_mask=padded(2, 3, 4), cache=cache), "left padding"),
        (lambda model, cache: model(prompt(9), attention_mask=padded(0, 0, 8), cache=cache), "attention mask"),
        (lambda model, cache: model(inputs_embeds=torch.zeros(1, 3, 128), cache=cache), "inputs_embeds"),
        (lambda model, cache: model(prompt(9), cache=cache, output_attentions=True), "output_attentions"),
    ],
)
def test_what_cannot_be_right_is_refused(glm: Any, node: Path, act: Any, said: str) -> None:
    """And the cache is as it was."""
    expected = generate(glm, prompt(20))
    with kvd_cache(glm, run_dir=node, max_tokens=128, encoding="f32") as cache:
        with pytest.raises(InvalidValue, match=said):
            act(glm, cache)
        assert cache.get_seq_length() == 0
        assert generate(glm, prompt(20), cache=cache).tolist() == expected.tolist()


def test_beams_are_refused(glm: Any, node: Path) -> None:
    with (
        kvd_cache(glm, run_dir=node, max_tokens=128, batch_size=2) as cache,
        pytest.raises(InvalidValue, match="beams exchange histories"),
    ):
        generate(glm, prompt(9), cache=cache, num_beams=2)


def test_the_example(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    environment = {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, str(root / "docs" / "examples" / "three_lines.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "664 tokens" in done.stdout


def test_the_curve_of_memory() -> None:
    """The library's grows with the history, kvd's by its index keys."""
    command = [sys.executable, "-m", "benchmarks.cli", "transformers", "--lengths", "1024,8192", "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment)
    values = {row["case"]: row["value"] for row in json.loads(done.stdout)["rows"]}
    per_token = 7 * 576 * 2 + 4 * 128 * 2
    assert values["the library's cache, 8,192 tokens"] == 8192 * per_token / (1 << 20)
    keys = 7168 * 4 * 132 / (1 << 20)
    assert abs(values["kvd, 8,192 tokens"] - values["kvd, 1,024 tokens"] - keys) <= 2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"chunk": 0}, "chunk"),
        ({"chunk": 1000}, "chunk"),
        ({"batch_size": 0}, "batch_size"),
        ({"session": "x"}, "embedded"),
        ({"encoding": "int4"}, "encoding"),
    ],
)
def test_bad_settings(glm: Any, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidValue, match=said), kvd_cache(glm, **settings):
        pass


def test_other_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="glm_moe_dsa, deepseek_v32"), kvd_cache(torch.nn.Linear(1, 1)):
        pass


def test_no_daemon(glm: Any, tmp_path: Path) -> None:
    with pytest.raises(DaemonUnavailable), kvd_cache(glm, run_dir=tmp_path):
        pass


def test_a_cache_of_another_model_is_refused(glm: Any, node: Path) -> None:
    other = make_model("GlmMoeDsa", GLM)
    with kvd_cache(glm, run_dir=node, max_tokens=128) as cache, pytest.raises(InvalidValue, match="another model"):
        other(prompt(3), cache=cache)
    assert isinstance(cache, KvdCache)
