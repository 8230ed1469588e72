"""vLLM's gated delta nets (Qwen3-Next) on fi's kernels: prompts in chunks of tokens, and a token of each request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import ChunkGatedDeltaRule, QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

from fi_core.gdn_decode import gated_delta_rule_decode_pretranspose
from fi_core.gdn_prefill import chunk_gated_delta_rule
from fi_core.integrations.vllm.prepare import begin_to_compile

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


def register(replace: Callable[[Any, type], None]) -> None:
    """Replaces vLLM's layers."""
    replace(ChunkGatedDeltaRule, Chunks)
    replace(QwenGatedDeltaNetAttention, Layer)


class Chunks:
    """Of `ChunkGatedDeltaRule`, unless --gdn-prefill-backend names a backend."""

    def __init__(self) -> None:
        super().__init__()
        options = get_current_vllm_config().additional_config
        named = options.get("gdn_prefill_backend", "auto") if isinstance(options, dict) else "auto"
        if named == "auto":
            self._forward_method = self.forward_fi

    def forward_fi(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor,
        output_final_state: bool,
        cu_seqlens: torch.Tensor | None = None,
        chunk_indices: torch.Tensor | None = None,
        chunk_offsets: torch.Tensor | None = None,
        use_qk_l2norm_in_kernel: bool = True,
        core_attn_out: torch.Tensor | None = None,
        aiter_prefill_metadata: object | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`[1, tokens, heads, V]` and the states after each sequence, fp32. g: logarithms of the decay."""
        tokens, heads = q.shape[1], v.shape[2]
        output = q.new_empty(tokens, heads, v.shape[3])
        if core_attn_out is not None:  # where vLLM wants it
            output = core_attn_out.view(-1)[: output.numel()].view(output.shape)
        found = chunk_gated_delta_rule(
            q[0],
            k[0],
            v[0],
            g[0].float().exp(),
            beta[0].float(),
            initial_state=initial_state,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
            output=output,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )
        return output[None], found[1] if output_final_state else None


class Layer:
    """Of `QwenGatedDeltaNetAttention`: steps that decode a token of each request."""

    key_dim: int
    value_dim: int
    tp_size: int
    head_k_dim: int
    head_v_dim: int
    kv_cache: tuple[torch.Tensor, torch.Tensor]
    conv1d: Any
    activation: str
    A_log: torch.Tensor
    dt_bias: torch.Tensor

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        begin_to_compile()

    def _forward_core_decode_non_spec(
        self, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor, attn_metadata: Any
    ) -> None:
        """Writes `[tokens, heads, V]` to core_attn_out, and the states of the requests."""
        tokens = attn_metadata.num_actual_tokens
        # Requests that pad a graph have slot 0, which vLLM keeps for no request.
        slots = attn_metadata.non_spec_state_indices_tensor[:tokens]
        conv_states, states = self.kv_cache
        rows = causal_conv1d_update(
            mixed_qkv[:tokens],
            conv_states if is_conv_state_dim_first() else conv_states.transpose(-1, -2),
            self.conv1d.weight.squeeze(1),
            self.conv1d.bias,
            self.activation,
            conv_state_indices=slots,
            validate_data=False,
        )
        keys, values = self.key_dim // self.tp_size, self.value_dim // self.tp_size
        q, k, v = (
            x.unflatten(1, (1, -1, dim))
            for x, dim in zip(rows.split((keys, keys, values), 1), (self.head_k_dim, self.head_k_dim, self.head_v_dim))
        )
        gated_delta_rule_decode_pretranspose(
            q,
            k,
            v,
            None,
            self.A_log,
            a[:tokens, None],
            self.dt_bias,
            b[:tokens, None],
            output=core_attn_out[:tokens, None],
            initial_state=states,
            initial_state_indices=slots,
        )
