"""SGLang's attention backend over keys and values in paged pools: a step has one plan for all layers of a kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.mem_cache.layout.paged_view import paged_kv_view
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from fi_core.autotuner import autotune
from fi_core.decode import BlockTablesPlan, trtllm_batch_decode_with_kv_cache
from fi_core.integrations.sglang.steps import Step, Steps, is_causal, is_fp8
from fi_core.prefill import trtllm_batch_context_with_kv_cache

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

_WORKSPACE_BYTES = 16 << 20  # 8 MiB are enough for head dims up to 256


class Kind(NamedTuple):
    """What decides the plan of a layer."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    window_left: int
    in_window_pool: bool  # whether its cache is the pool of sliding windows, which has slots of its own


class Backend(Steps):
    """Attention of a model's layers."""

    def __init__(self, model_runner: Any) -> None:
        import torch

        super().__init__(model_runner)
        self.workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        self.plans = {kind: BlockTablesPlan(self.workspace) for kind in {self._kind(layer) for layer in self.layers}}
        with autotune():
            for soft_cap in {layer.logit_cap for layer in self.layers}:
                self._load(soft_cap)

    def _kind(self, layer: Any) -> Kind:
        windowed = self.window_pool is not None and self.window_pool.layers_mapping[layer.layer_id][1]
        return Kind(layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim, layer.sliding_window_size, windowed)

    def _plan(self, step: Step) -> None:
        for kind, plan in self.plans.items():
            plan.plan(
                step.tables[kind.in_window_pool],
                step.lengths,
                *kind[:3],
                self.page_size,
                self.q_dtype,
                self.kv_cache_dtype,
                q_len_per_req=step.q_len,
                window_left=kind.window_left,
            )

    def _load(self, soft_cap: float) -> None:
        """Attends to one token of zeros: no kernel is compiled while the engine serves."""
        import torch

        one = torch.ones(1, dtype=torch.int32, device=self.device)
        table, starts = torch.zeros_like(one)[None], torch.arange(2, dtype=torch.int32, device=self.device)
        for q_len in (1, 0):
            step = Step(q_len, one, {False: table, True: table}, starts)
            if q_len:
                self._plan(step)
            for kind in self.plans:
                query = torch.zeros(1, kind.num_qo_heads, kind.head_dim, dtype=self.q_dtype, device=self.device)
                shape = 1, self.page_size, kind.num_kv_heads, kind.head_dim
                cache = torch.zeros(shape, device=self.device).to(self.kv_cache_dtype)
                self._run(step, kind, query, (cache, cache), (1.0, 1.0), None, soft_cap, True)

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> torch.Tensor:
        """`[tokens, heads * head_dim]`; it first writes k and v to the pool, if save_kv_cache."""
        step, sinks = self.forward_metadata, kwargs.pop("sinks", None)
        assert step is not None
        causal = is_causal(layer, step, kwargs)
        if save_kv_cache and k is not None:
            where = KVWriteLoc.for_batch(forward_batch, swa_loc=step.window_slots)
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v, layer.k_scale, layer.v_scale)
        kind = self._kind(layer)
        cache = [
            paged_kv_view(x, self.page_size, kind.num_kv_heads, kind.head_dim)
            for x in self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        ]
        scales = layer.scaling, 1.0
        if is_fp8(self.kv_cache_dtype):
            k_scale, v_scale = _scales(layer)
            scales = layer.scaling * k_scale, v_scale
        query = q.reshape(-1, kind.num_qo_heads, kind.head_dim)
        sinks = None if sinks is None else sinks.float()
        out = self._run(step, kind, query, cache, scales, sinks, layer.logit_cap, causal)
        return out.view(len(out), -1)

    def _run(
        self, step: Step, kind: Kind, query: Any, cache: Any, scales: Any, sinks: Any, soft_cap: float, causal: bool
    ) -> torch.Tensor:
        (qk_scale, v_scale), tables = scales, step.tables[kind.in_window_pool]
        longest = self.pages.shape[1] * self.page_size
        if step.q_len:
            return trtllm_batch_decode_with_kv_cache(
                query,
                tuple(cache),
                self.workspace,
                tables,
                step.lengths,
                longest,
                qk_scale,
                v_scale,
                window_left=kind.window_left,
                sinks=sinks,
                kv_layout="NHD",
                q_len_per_req=step.q_len,
                plan=self.plans[kind],
                logits_soft_cap=soft_cap,
            )
        starts = step.starts
        assert starts is not None
        return trtllm_batch_context_with_kv_cache(  # type: ignore[return-value]
            query,
            tuple(cache),
            self.workspace,
            tables,
            step.lengths,
            step.longest,
            longest,
            qk_scale,
            v_scale,
            batch_size=len(step.lengths),
            cum_seq_lens_q=starts,
            cum_seq_lens_kv=starts,
            sinks=sinks,
            window_left=kind.window_left,
            kv_layout="NHD",
            causal=causal,
            logits_soft_cap=soft_cap,
            plan=step.prompts,
        )


def _scales(layer: Any) -> Iterator[Any]:
    """Those of keys and values: numbers where SGLang knows them on the host."""
    for number, tensor in ((layer.k_scale_float, layer.k_scale), (layer.v_scale_float, layer.v_scale)):
        yield number if number is not None else 1.0 if tensor is None else tensor
