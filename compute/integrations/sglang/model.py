"""What the pages of an engine depend on beside their tokens, and which engines are refused.

A fact too many costs hits, one too few would give another model's pages: what is not known to be harmless is in it.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import torch
from sglang.srt.runtime_context import get_device, get_exec, get_model, get_spec
from sglang.version import __version__

from compute.integrations.checkpoint import folder_of, identity_of_folder
from compute.integrations.sglang.settings import Settings
from protocol.block_keys import fingerprint
from protocol.errors import InvalidValue

FORMAT = 1
"""Of what a block holds: the pieces of a page, in SGLang's order."""
EARLIEST = (0, 5, 23)
"""Of SGLang: before it, images are known by 30 bits, and before 0.5.20 hashes leave out adapters and cache salts."""
POOLS = ("kv", "indexer")
"""Host pools of which every page is a page of tokens: these are all that a prefix needs."""
_OF_THE_MODEL = (
    "load_format",
    "model_loader_extra_config",
    "context_length",
    "model_impl",
    "json_model_override_args",
    "dtype",
    "quantization",
    "modelopt_quant",
    "rl_quant_profile",
    "kv_cache_dtype",
    "qsa_indexer_dtype",
)
_CONFIGURATIONS = ("config.json", "hf_quant_config.json")


def check_supported(config: Any) -> None:
    """Raises `InvalidValue` by name for what the pages of a prefix alone do not restore, or are not known enough by.

    ``config`` is SGLang's ``HiCacheStorageConfig``.
    """
    version = tuple(map(int, re.findall(r"\d+", __version__)[:3]))
    if version < EARLIEST:
        allowed = f"{'.'.join(map(str, EARLIEST))} or newer: its page hashes tell apart what they have to"
        raise InvalidValue("version of SGLang", __version__, allowed)
    if (algorithm := get_spec().speculative_algorithm) is not None:
        raise InvalidValue("speculative_algorithm", algorithm, "none")
    for name in ("attn_cp_size", "dcp_size"):
        if getattr(config, name) != 1:
            raise InvalidValue(name, getattr(config, name), "1")


def model_fingerprint(settings: Settings) -> bytes:
    """Of the weights and of everything that is set about the model. Reads the checkpoint's files once."""
    model, kernel = get_model(), get_exec().kernel
    facts: dict[str, str | int | bytes] = {name: str(getattr(model, name)) for name in _OF_THE_MODEL}
    for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        facts[name] = str(getattr(kernel, name))
    if model.quantization_param_path:
        facts["scales"] = hashlib.sha256(Path(model.quantization_param_path).read_bytes()).hexdigest()
    return fingerprint({**facts, **_weights(model, settings)})


def space_fingerprint(model: bytes, config: Any, pool: str, facts: dict[str, str | int | bytes]) -> bytes:
    """Of the pages of one pool of one rank. ``facts`` are `Pages.facts`; ranks with copies of the same have one."""
    is_replicated = config.is_mla_model
    return fingerprint(
        {
            "format": FORMAT,
            "model": model,
            "of": pool,
            "shard": 0 if is_replicated else config.tp_rank,
            "shards": 1 if is_replicated else config.tp_size,
            "stage": config.pp_rank,
            "stages": config.pp_size,
            **facts,
        }
    )


def _weights(model: Any, settings: Settings) -> dict[str, str | int | bytes]:
    if settings.model_identity:
        return {"identity": settings.model_identity}
    try:
        folder = folder_of(model.model_path, model.revision)
        described = _configurations(folder)
        if str(model.load_format) == "dummy":
            return {**described, "dummy": f"seed {get_device().random_seed}, torch {torch.__version__}"}
        return {**described, "weights": identity_of_folder(folder)}
    except (OSError, ValueError) as error:
        allowed = f"a folder, or one in the hub's cache ({error}); or set model_identity"
        raise InvalidValue("model_path", model.model_path, allowed) from None


def _configurations(folder: Path) -> dict[str, str | int | bytes]:
    """What the checkpoint's files say of the model, whatever their white space; of a single file, nothing."""
    found = [folder / name for name in _CONFIGURATIONS if (folder / name).is_file()]
    return {path.name: json.dumps(json.loads(path.read_text()), sort_keys=True) for path in found}
