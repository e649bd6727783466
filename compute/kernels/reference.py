"""The definition of right, in plain torch, on CPU and CUDA tensors.

One file to a subject, all of it importable from here: rows, index keys and their scores, the selection, the rounds of
the hot cache, attention. A faster kernel cites the function that it replaces and is tested against it.

A row's result depends on nothing but its own inputs, bit for bit: not on how many rows a call has, which place a row
has among them, or how long the history is. Library products keep that only between calls of one shape, so every
product here has a shape that the caller cannot change; ``compute.kernels.tiles`` does the same for a model's layers.
"""

from __future__ import annotations

from compute.kernels.memory import Memory
from compute.kernels.reference_attention import attend
from compute.kernels.reference_cache import Round, fetch, forget, resolve
from compute.kernels.reference_keys import append_keys, decode_key_block, encode_keys, index_scores
from compute.kernels.reference_rows import append_rows, decode_rows, encode_rows, row_addresses
from compute.kernels.reference_topk import select_topk

__all__ = [
    "Memory",
    "Round",
    "append_keys",
    "append_rows",
    "attend",
    "decode_key_block",
    "decode_rows",
    "encode_keys",
    "encode_rows",
    "fetch",
    "forget",
    "index_scores",
    "resolve",
    "row_addresses",
    "select_topk",
]
