"""What fi's attention backends tell vLLM alike."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backend import MultipleOf


class Facts:
    """The first base of a backend, whose answers come before vLLM's."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major >= 8)
