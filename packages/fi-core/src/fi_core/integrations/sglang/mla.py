"""SGLang's attention over a latent cache (DeepSeek): decode, drafts and prompts, by lengths on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.models.deepseek_common.attention_backend_handler import (
    AttentionBackendRegistry,
    handle_attention_trtllm_mla,
)

from fi_core.autotuner import autotune
from fi_core.integrations.latent_prompts import attend_expanded
from fi_core.integrations.sglang.steps import Step, Steps, is_causal, is_fp8, refuse
from fi_core.mla import BatchMLAPagedAttentionWrapper

if TYPE_CHECKING:
    import torch

_WORKSPACE_BYTES = 34 << 20  # with which all SMs of an H200 work
_LATENT, _ROPE = 512, 64
_PROMPTS = 128 + _ROPE, 128  # head dims of expanded keys and values


class Backend(Steps):
    """Attention of a model's layers: over latent rows (head dim 512 + 64), and of prompts over expanded keys."""

    def __init__(self, model_runner: Any) -> None:
        import torch

        super().__init__(model_runner)
        # New tokens attend to each other over expanded keys, then to the cached ones in chunks.
        AttentionBackendRegistry.register("fi", handle_attention_trtllm_mla)
        dims = {(layer.head_dim, layer.v_head_dim) for layer in self.layers}
        if dims - {(_LATENT + _ROPE, _LATENT), _PROMPTS}:
            refuse("the model", "head dims of 512 + 64, and of 128 + 64 and 128 in prompts", sorted(dims))
        if is_fp8(self.kv_cache_dtype) and self.kv_cache_dtype is not torch.float8_e4m3fn:
            refuse("--kv-cache-dtype", f"{self.q_dtype} or fp8_e4m3", self.kv_cache_dtype)
        kinds = {(layer.tp_q_head_num, layer.scaling) for layer in self.layers if layer.v_head_dim == _LATENT}
        if len(kinds) != 1:
            refuse("the model", "layers of one number of heads and one scale of scores", sorted(kinds))
        ((self.heads, self.scaling),) = kinds
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        self.attention = BatchMLAPagedAttentionWrapper(workspace)
        with autotune():
            self._load()

    def _load(self) -> None:
        """Attends to zeros, for few and for many rows: no kernel is compiled or loaded while the engine serves."""
        import torch

        cache = torch.zeros(self.page_size, 1, _LATENT + _ROPE, device=self.device).to(self.kv_cache_dtype)
        one = torch.ones(1, dtype=torch.int32, device=self.device)
        for tokens in (1, self.page_size):
            step = Step(tokens, one, {False: torch.zeros_like(one)[None]})
            self._plan(self._with_starts(step))
            query = torch.zeros(tokens, self.heads, _LATENT + _ROPE, dtype=self.q_dtype, device=self.device)
            self._attend(query, cache)
        key, value = (torch.zeros(1, self.heads, dim, dtype=self.q_dtype, device=self.device) for dim in _PROMPTS)
        starts = torch.arange(2, dtype=torch.int32, device=self.device)
        attend_expanded(key, key, value, self.scaling, (starts, starts), 1, causal=True, return_lse=True)

    def _with_starts(self, step: Step) -> Step:
        """The step with offsets of its tokens and pages, which are made outside of graphs."""
        import torch

        requests, pages = step.tables[False].shape
        rows = torch.arange(requests + 1, dtype=torch.int32, device=self.device)
        step.page_starts = rows * pages
        if step.starts is None:
            step.starts = rows * step.q_len
        return step

    def _new(self, batch: Any) -> Step:
        return self._with_starts(super()._new(batch))

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(forward_batch, in_capture)
        step = self.forward_metadata
        if step is not None and step.page_starts is None:
            self._with_starts(step)

    def _plan(self, step: Step) -> None:
        self.attention.plan(
            step.starts,
            step.page_starts,
            step.tables[False].view(-1),
            step.lengths,
            num_heads=self.heads,
            head_dim_ckv=_LATENT,
            head_dim_kpe=_ROPE,
            page_size=self.page_size,
            causal=True,
            sm_scale=self.scaling,
            q_data_type=self.q_dtype,
            kv_data_type=self.kv_cache_dtype,
        )
        step.is_planned = True

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Any:
        """`[tokens, heads * v_head_dim]`; over expanded keys also the natural logarithms of the sums `[tokens, heads]`,
        fp32, where SGLang merges parts. Latent rows are first written to the pool, if save_kv_cache.
        """
        step = self.forward_metadata
        assert step is not None
        if not is_causal(layer, step, kwargs):
            refuse("attn_type", "attention of a decoder", layer.attn_type)
        q = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        if layer.v_head_dim != _LATENT:
            return self._prompts(step, q, k, v, layer, forward_batch, save_kv_cache)
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), k, v)
        if not step.is_planned:
            self._plan(step)
        return self._attend(q, self.token_to_kv_pool.get_key_buffer(layer.layer_id)).flatten(1)

    def _attend(self, query: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        pages = cache.view(-1, self.page_size, _LATENT + _ROPE)
        scales: dict[str, Any] = {}
        if is_fp8(self.kv_cache_dtype):  # the pool rounds rows as they are
            scales = {"ckv_scale": 1.0, "kpe_scale": 1.0}
        parts = (x.split((_LATENT, _ROPE), dim=-1) for x in (query, pages))
        out: torch.Tensor = self.attention.run(*(part for own in parts for part in own), **scales)
        return out

    def _prompts(self, step: Step, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool) -> Any:
        """Of new tokens to each other, or to a chunk of those before them, which SGLang expands."""
        if save_kv_cache:
            refuse("save_kv_cache", "False with expanded keys", True)
        starts, longest, is_chunk = step.starts, step.longest, bool(batch.attn_attend_prefix_cache)
        assert starts is not None  # of steps whose requests differ
        kv_starts = starts
        if is_chunk:
            kv_starts = batch.prefix_chunk_cu_seq_lens[batch.prefix_chunk_idx]
            longest = batch.prefix_chunk_max_seq_lens[batch.prefix_chunk_idx]
        k, v = (x.view(-1, layer.tp_q_head_num, dim).to(q.dtype) for x, dim in zip((k, v), _PROMPTS))
        return_lse, bounds = bool(batch.mha_return_lse), (starts, kv_starts)
        found = attend_expanded(q, k, v, layer.scaling, bounds, longest, causal=not is_chunk, return_lse=return_lse)
        return found if isinstance(found, tuple) else found.flatten(1)
