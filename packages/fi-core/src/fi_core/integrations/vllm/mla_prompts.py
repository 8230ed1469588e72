"""Prompts of latent attention (DeepSeek) in vLLM: `--attention-config.mla_prefill_backend CUSTOM`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from vllm.v1.attention.backends.mla.prefill.base import MLADimensions, MLAPrefillBackend

from fi_core.integrations.latent_prompts import attend_expanded

if TYPE_CHECKING:
    import torch


class Prompts(MLAPrefillBackend):  # type: ignore[misc]
    """Attention of queries and keys of 128 + 64 and values of 128, by lengths on the device."""

    supported_mla_dimensions: ClassVar[list[Any]] = [
        MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    ]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def supports_compute_capability(cls, device_capability: Any) -> bool:
        return bool(device_capability is not None and device_capability.major >= 8)

    def load(self, dtype: torch.dtype, device: torch.device) -> None:
        """Attends to one token of zeros: no kernel is loaded while the engine serves."""
        import torch

        key, value = (torch.zeros(1, self.num_heads, dim, dtype=dtype, device=device) for dim in (192, 128))
        starts = torch.arange(2, dtype=torch.int32, device=device)
        self._attend(key, key, value, (starts, starts), 1, True, True, None)

    def run_prefill_new_tokens(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        return_softmax_lse: bool,
        out: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Causal attention of the new tokens to each other: `[tokens, heads, 128]`, and `[heads, tokens]`, the natural
        logarithms of the sums.
        """
        if output_scale is not None:
            raise NotImplementedError("output_scale: None is required; the output is not quantized")
        step = self._prefill_metadata
        starts = step.query_start_loc, step.query_start_loc
        return self._attend(q, k, v, starts, step.max_query_len, True, return_softmax_lse, out)

    def run_prefill_context_chunk(
        self,
        chunk_idx: int | None = None,
        q: Any = None,
        k: Any = None,
        v: Any = None,
        out: torch.Tensor | None = None,
        chunk: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of the new tokens to a chunk of those before them. chunk: of vLLM 0.33, in place of its number."""
        step = self._prefill_metadata
        if chunk is None:
            starts = step.query_start_loc, step.chunked_context.cu_seq_lens[chunk_idx]
        else:
            step, starts = chunk, (chunk.query_start_loc, chunk.cu_seq_lens)
        found = self._attend(q, k, v, starts, step.max_query_len, False, True, out)
        assert isinstance(found, tuple)
        return found

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        starts: tuple[torch.Tensor, torch.Tensor],
        longest: int,
        causal: bool,
        return_lse: bool,
        out: torch.Tensor | None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        found = attend_expanded(q, k, v, self.scale, starts, longest, causal=causal, return_lse=return_lse, out=out)
        return (found[0], found[1].T.contiguous()) if isinstance(found, tuple) else found
