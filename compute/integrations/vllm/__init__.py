"""vLLM's KV connector: prefixes that outlive the engine. docs/vllm.md says how to use it.

--kv-transfer-config '{"kv_connector": "KvdConnector",
                       "kv_connector_module_path": "compute.integrations.vllm", "kv_role": "kv_both"}'
"""

from __future__ import annotations


def __getattr__(name: str) -> type:
    """`KvdConnector`, when it is asked for: all else here does without vLLM, and is tested without it."""
    if name == "KvdConnector":
        from compute.integrations.vllm.connector import KvdConnector

        return KvdConnector
    raise AttributeError(f"module {__name__} has no attribute {name}")
