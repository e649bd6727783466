"""An engine's blocks go into kvd under keys of its own, and another process finds the longest chain that is there."""

import sys

from compute.block_store import BlockStore
from protocol.block_keys import chain_start, extend_chain, fingerprint

BLOCK_TOKENS, BLOCK_BYTES = 16, 65536
FACTS = fingerprint({"checkpoint": "sha256 of its files", "kv_dtype": "bfloat16", "layout": "layer, token, head"})
TOKENS = b"".join(token.to_bytes(4, "little") for token in range(100))
KEYS = extend_chain(chain_start(FACTS), TOKENS, BLOCK_TOKENS)  # of the six full blocks
with BlockStore(sys.argv[1], fingerprint=FACTS, block_bytes=BLOCK_BYTES) as store, store.reserve(KEYS[:4]) as reserved:
    for key, view in zip(reserved.keys, reserved.views, strict=True):
        view[:] = key * (BLOCK_BYTES // len(key))
    print("found before they are published:", store.find(KEYS))
    reserved.publish()
with BlockStore(sys.argv[1], fingerprint=FACTS, block_bytes=BLOCK_BYTES) as store, store.pin(KEYS) as pinned:
    print("found afterwards:", pinned.count, "of", len(KEYS))
    print("the same bytes:", all(view[:32] == key for view, key in zip(pinned.views, KEYS, strict=False)))
