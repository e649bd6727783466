"""SGLang's HiCache with kvd behind it: prefixes that outlive the engine. docs/sglang.md says how to use it.

--enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
'{"backend_name": "kvd", "module_path": "compute.integrations.sglang", "class_name": "KvdStorage", "interface_v1": 1}'
"""

from __future__ import annotations


def __getattr__(name: str) -> type:
    """`KvdStorage`, when it is asked for: all else here does without SGLang, and is tested without it."""
    if name == "KvdStorage":
        from compute.integrations.sglang.storage import KvdStorage

        return KvdStorage
    raise AttributeError(f"module {__name__} has no attribute {name}")
