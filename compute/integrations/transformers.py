"""A Hugging Face model with its history in kvd: three lines.

    model = AutoModelForCausalLM.from_pretrained(...)
    with kvd_cache(model, max_tokens=65536) as cache:
        model.generate(**inputs, cache=cache)

The model's own modules compute everything but attention over the history, which reads only the selected rows, in the
latent space: keys and values are never expanded. For GLM-MoE-DSA and DeepSeek-V3.2, on a CPU or one GPU. Prompts are
read in chunks, so that VRAM is bounded by the hot caches and one chunk, however long they are.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compute.attach import Attachment
from compute.client import Client
from compute.device import open_device
from compute.embedded import EmbeddedDaemon
from compute.fingerprint import fingerprint
from compute.histories import Histories, HistorySettings, Mode
from compute.history import EXTEND_PAGES
from compute.integrations.transformers_cache import KvdCache, absorbed
from compute.kernels.choice import KernelsName
from protocol.errors import InvalidValue
from protocol.layout import PAGE_TOKENS, encoding_named, round_up
from protocol.model import ModelConfig

__all__ = ["KvdCache", "kvd_cache"]

MODEL_TYPES = ("glm_moe_dsa", "deepseek_v32")
_MIB = 1 << 20


@contextmanager
def kvd_cache(
    model: Any,
    *,
    max_tokens: int = 8192,
    batch_size: int = 1,
    mode: Mode = "offloaded",
    encoding: str = "q8g64",
    hot_rows: int | None = None,
    run_dir: Path | str | None = None,
    session: str | None = None,
    identity: bytes | None = None,
    chunk: int = 256,
    kernels: KernelsName | None = None,
) -> Iterator[KvdCache]:
    """A cache for ``model`` (a ``transformers`` causal language model), which is changed for the block and put back.

    ``run_dir`` is where the node's daemon has its sockets; without it a daemon is started for the block. ``max_tokens``
    and ``batch_size`` are the most that it will hold. ``hot_rows`` is the size of each index group's cache in VRAM,
    16 × the selection by default. With a ``session`` name the history is stored in the node's daemon when the block
    ends, and gone on from when one of that name is there (``cache.tokens`` are its tokens); entries of a batch are
    called NAME-0, NAME-1, …. Stored sessions belong to a model: ``identity`` says which, by default a hash of all
    weights, which reads them once.

    Raises `InvalidValue` for a model or setting that cannot be right, and what the daemon raises.
    """
    config = _config_of(model)
    page_format = config.page_format(encoding_named(encoding))
    if session is not None and run_dir is None:
        raise InvalidValue("session", session, "none without a run_dir: an embedded daemon's sessions go with it")
    if batch_size < 1:
        raise InvalidValue("batch_size", batch_size, "at least 1")
    if hot_rows is None:
        hot_rows = 16 * config.index_topk
    if identity is None:
        identity = _identity(model) if session else os.urandom(32)
    names = [session or f"transformers-{os.getpid()}-{os.urandom(4).hex()}"]
    if batch_size != 1:
        names = [f"{names[0]}-{entry}" for entry in range(batch_size)]
    settings = [HistorySettings(mode, max_tokens, hot_rows, 8, name, kernels) for name in names]
    limit = (settings[0].ring_pages - 1) * PAGE_TOKENS
    if not 1 <= chunk <= limit:
        raise InvalidValue("chunk", chunk, f"1 to {limit}")
    with ExitStack() as stack:
        device = open_device(str(model.device))
        stack.callback(device.close)
        if run_dir is None:
            kind = device.torch_device.type
            pages = batch_size * round_up(-(-max_tokens // PAGE_TOKENS), EXTEND_PAGES)
            run_dir = stack.enter_context(
                _embedded(kind, pages if mode == "offloaded" else 1, page_format.stride)
            ).run_dir
        client = stack.enter_context(Client(Path(run_dir), name="transformers"))
        attachment = stack.enter_context(Attachment(client, device))
        encoded = encoding_named(encoding)
        histories = Histories(attachment, config, encoded, fingerprint(config, encoded, identity))
        cache = KvdCache(histories, settings, chunk)
        stack.callback(lambda: cache._close(keep=session is not None and mode == "offloaded"))
        if session is not None:
            cache._resume()
        stack.enter_context(_replaced(model, cache))
        with torch.no_grad():
            yield cache


@contextmanager
def _replaced(model: Any, cache: KvdCache) -> Iterator[None]:
    """Have passes with ``cache`` go through it; others go as before."""
    with_selection = model.config.model_type == "glm_moe_dsa"

    def replace(module: Any, forward: Callable[..., Any]) -> None:
        module.forward = forward
        stack.callback(delattr, module, "forward")

    def attention(module: Any) -> Callable[..., Any]:
        original = module.forward

        def forward(hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, **rest: Any) -> Any:
            if rest.get("cache") is not cache:
                return original(hidden_states, position_embeddings, attention_mask, **rest)
            output = cache.attend(module, hidden_states, position_embeddings)
            return (output, None, None) if with_selection else (output, None)

        return forward

    def whole(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(input_ids: Tensor | None = None, attention_mask: Any = None, **rest: Any) -> Any:
            if rest.get("cache") is not cache:
                return original(input_ids, attention_mask, **rest)
            return cache.run(original, input_ids, attention_mask, **rest)

        return forward

    with ExitStack() as stack:
        for layer in model.model.layers:
            replace(layer.self_attn, attention(layer.self_attn))
        replace(model.model, whole(model.model.forward))
        yield


def _config_of(model: Any) -> ModelConfig:
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind not in MODEL_TYPES:
        raise InvalidValue("model", kind, f"one of {', '.join(MODEL_TYPES)}")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        raise InvalidValue("devices of the model", sorted(map(str, devices)), "one")
    for layer in model.model.layers:
        absorbed(layer.self_attn)
    return ModelConfig.from_dict(model.config.to_dict())


def _identity(model: nn.Module) -> bytes:
    """A hash of every tensor's name, dtype, shape and content."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().data)
    return digest.digest()


def _embedded(device: str, pages: int, stride: int) -> EmbeddedDaemon:
    """A daemon with room for so many pages, and as much VRAM as there is."""
    extent = round_up(max(stride, min(pages * stride, 256 * _MIB)), 2 * _MIB)
    extents = -(-pages // (extent // stride))
    memory = (
        torch.cuda.mem_get_info()[1] if device == "cuda" else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )
    return EmbeddedDaemon(
        device, host_bytes=extents * extent, extent_bytes=extent, vram_bytes=memory // (2 * _MIB) * (2 * _MIB)
    )
