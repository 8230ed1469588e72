"""SGLang's gated delta nets (Qwen3-Next) on fi's kernels: `--linear-attn-backend fi`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang.srt.layers.attention.linear.gdn_backend import GDNKernelDispatcher
from sglang.srt.layers.attention.linear.kernels.kernel_backend import LinearAttnKernelBase
from sglang.srt.layers.attention.linear.utils import LinearAttnKernelBackend
from sglang.srt.runtime_context import get_exec

from fi_core.gdn_decode import gated_delta_rule_decode_pretranspose, gated_delta_rule_mtp
from fi_core.gdn_prefill import chunk_gated_delta_rule
from fi_core.integrations.sglang.refusals import refuse

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("sglang.srt.plugins.fi_core")


class Dispatcher(GDNKernelDispatcher):  # type: ignore[misc]
    """SGLang's choice of kernels, with fi's where an option names them."""

    def __init__(self, decode_backend: Any, prefill_backend: Any, verify_backend: Any = None) -> None:
        options = get_exec().mamba
        base = options.linear_attn_backend
        kinds = {
            "decode": (decode_backend, options.linear_attn_decode_backend or base),
            "extend": (prefill_backend, options.linear_attn_prefill_backend or base),
            "verify": (verify_backend, options.linear_attn_verify_backend),
        }
        # SGLang has one backend, CUSTOM, for all names that are not its own.
        own = {kind for kind, (backend, name) in kinds.items() if name == "fi" and backend.is_custom()}
        triton = LinearAttnKernelBackend.TRITON
        super().__init__(*(triton if kind in own else backend for kind, (backend, _) in kinds.items()))
        kernel = Kernel()
        for kind in own:
            setattr(self, f"{kind}_kernel", kernel)
        if "decode" in own:
            self.supports_packed_decode = False
        if own:
            _log.info("fi computes gated delta nets: %s", ", ".join(sorted(own)))


class Kernel(LinearAttnKernelBase):  # type: ignore[misc]
    """One token of each request, prompts in chunks of tokens, and drafts. Negative slots are padding."""

    uses_state_checkpoints = True

    def decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
        ssm_states: torch.Tensor,
        cache_indices: torch.Tensor,
        query_start_loc: torch.Tensor,
        **kwargs: Any,
    ) -> torch.Tensor:
        """`[1, requests, heads, V]`; the states of the requests are updated in place."""
        out, _ = gated_delta_rule_decode_pretranspose(
            q.transpose(0, 1),
            k.transpose(0, 1),
            v.transpose(0, 1),
            None,
            A_log,
            a[:, None],
            dt_bias,
            b[:, None],
            initial_state=ssm_states,
            initial_state_indices=cache_indices,
        )
        return out.transpose(0, 1)

    def extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        *,
        ssm_states: torch.Tensor,
        cache_indices: torch.Tensor,
        query_start_loc: torch.Tensor,
        state_checkpoint_cu_starts: torch.Tensor | None = None,
        num_state_checkpoints: int = 0,
        state_checkpoint_every_n_tokens: int = 0,
        output: torch.Tensor | None = None,
        inplace_update: bool = True,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None, torch.Tensor | None]:
        """`[1, tokens, heads, V]`, and the states after each so many tokens `[1, checkpoints, heads, V, K]`, fp32, if
        SGLang keeps them for its prefix cache. g: logarithms of the decay.
        """
        if not inplace_update:
            refuse("--linear-attn-prefill-backend", "--enable-mis", "its absence", True)
        kept = None
        if num_state_checkpoints:
            shape = num_state_checkpoints, *ssm_states.shape[1:]
            kept = q.new_empty(shape, dtype=ssm_states.dtype)
        out: Any = chunk_gated_delta_rule(
            q[0],
            k[0],
            v[0],
            g[0].float().exp(),
            beta[0].float(),
            initial_state=ssm_states,
            cu_seqlens=query_start_loc,
            use_qk_l2norm_in_kernel=True,
            output=None if output is None else output[0],
            output_state=ssm_states,
            state_checkpoints=kept,
            checkpoint_cu_starts=None if kept is None else state_checkpoint_cu_starts,
            checkpoint_every_n_tokens=state_checkpoint_every_n_tokens if num_state_checkpoints else 0,
            state_indices=cache_indices.clamp(min=0),  # slot 0 is no request's
        )
        return out[None], None, None if kept is None else kept[None]

    def target_verify(
        self,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        ssm_states: torch.Tensor,
        cache_indices: torch.Tensor,
        query_start_loc: torch.Tensor,
        intermediate_states_buffer: torch.Tensor | None = None,
        retrieve_parent_token: torch.Tensor | None = None,
        stable_rows: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """`[1, tokens, heads, V]` of a chain of drafts of each request; the states after each token are kept in
        intermediate_states_buffer, those of the pool stay.
        """
        if retrieve_parent_token is not None:
            refuse("--linear-attn-verify-backend", "--speculative-eagle-topk", "1", "a tree of drafts")
        if stable_rows:
            refuse("--linear-attn-verify-backend", "SGLANG_ENABLE_PP_SPEC", "its absence", True)
        requests = len(query_start_loc) - 1
        queries, keys, values = (x.view(requests, -1, *x.shape[2:]) for x in (q, k, v))
        out, _ = gated_delta_rule_mtp(
            queries,
            keys,
            values,
            ssm_states,
            cache_indices[:requests],
            A_log,
            a.view(requests, -1, a.shape[-1]),
            dt_bias,
            b.view(requests, -1, b.shape[-1]),
            intermediate_states_buffer=intermediate_states_buffer,
            disable_state_update=True,
        )
        return out.view(1, -1, *out.shape[2:])
