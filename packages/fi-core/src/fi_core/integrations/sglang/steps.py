"""Steps of SGLang over page tables: lengths stay on the device, and a CUDA graph has the plan of its step."""

from __future__ import annotations

import abc
import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_parallel, get_spec

from fi_core.integrations.sglang import refusals
from fi_core.prefill import ContextTablesPlan

if TYPE_CHECKING:
    import torch


@dataclass
class Step:
    """One step. All tensors on the device."""

    q_len: int  # query tokens of each request; 0: requests differ, as starts says
    lengths: torch.Tensor  # int32 [requests], with the query tokens
    tables: dict[bool, torch.Tensor]  # int32 [requests, pages]; of the pool of sliding windows by True
    starts: torch.Tensor | None = None  # int32 [requests + 1]
    longest: int = 1  # query tokens of a request
    window_slots: torch.Tensor | None = None  # where the window pool receives the new tokens
    page_starts: torch.Tensor | None = None  # int32 [requests + 1], of the rows of a table, for latent attention
    is_planned: bool = False  # latent attention
    prompts: ContextTablesPlan = field(default_factory=ContextTablesPlan)  # of all layers, where requests differ


refuse = functools.partial(refusals.refuse, "--attention-backend")


class Steps(AttentionBackend):  # type: ignore[misc]
    """The metadata of steps, as SGLang asks for it. Backends add `_plan` and the attention of a layer."""

    needs_cpu_seq_lens = False

    def __init__(self, model_runner: Any) -> None:
        import torch

        super().__init__()
        self.forward_metadata: Step | None = None
        self.token_to_kv_pool, self.device = model_runner.token_to_kv_pool, torch.device(model_runner.device)
        # Hybrid models read these two.
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.kv_index_translator = model_runner.kv_index_translator
        self.page_size, self.q_dtype = model_runner.page_size, model_runner.dtype
        self.kv_cache_dtype = self.data_type = model_runner.kv_cache_dtype
        self.drafts = _drafts()
        _check(model_runner)
        # The first slot of each page.
        self.pages = self.req_to_token_pool.req_to_token[:, :: self.page_size]
        self.window_pool = self.token_to_kv_pool if isinstance(self.token_to_kv_pool, SWAKVPool) else None
        self.layers = [module for module in model_runner.model.modules() if isinstance(module, RadixAttention)]
        self.graphs: dict[tuple[int, int], Step] = {}  # by requests and q_len

    @abc.abstractmethod
    def _plan(self, step: Step) -> None:
        """Plans a step of requests with as many query tokens each."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.forward_metadata = step = self._new(forward_batch)
        self._fill(step, forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Memory that every graph shares; the steps of graphs are its first rows."""
        import torch

        self.graphs.clear()
        self.graph_step = self._empty(max_bs)
        slots = torch.zeros(max_num_tokens, dtype=torch.int64, device=self.device)
        self.graph_step.window_slots = None if self.window_pool is None else slots

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        key = requests, q_len = forward_batch.batch_size, self._q_len(forward_batch)
        if not q_len:
            refuse("forward_mode", "a graph of decode or of drafts", forward_batch.forward_mode)
        if key not in self.graphs:
            shared = self.graph_step
            tables = {windowed: table[:requests] for windowed, table in shared.tables.items()}
            slots = None if shared.window_slots is None else shared.window_slots[: requests * q_len]
            self.graphs[key] = Step(q_len, shared.lengths[:requests], tables, window_slots=slots)
        self.forward_metadata = self.graphs[key]

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        assert self.forward_metadata is not None
        self._fill(self.forward_metadata, forward_batch)

    def _q_len(self, batch: Any) -> int:
        mode = batch.forward_mode
        if mode.is_decode_or_idle():
            return 1
        if not mode.is_target_verify():
            return 0
        if getattr(batch.spec_info, "ragged_verify_layout", None) is not None:
            refuse("SGLANG_RAGGED_VERIFY_MODE", "one number of drafts for all requests", "a ragged layout")
        return self.drafts

    def _empty(self, requests: int) -> Step:
        import torch

        shape = requests, self.pages.shape[1]
        kinds = [False] if self.window_pool is None else [False, True]
        tables = {kind: torch.zeros(shape, dtype=torch.int32, device=self.device) for kind in kinds}
        return Step(1, torch.ones(requests, dtype=torch.int32, device=self.device), tables)

    def _new(self, batch: Any) -> Step:
        import torch

        step = self._empty(batch.batch_size)
        step.q_len = self._q_len(batch)
        if self.window_pool is not None and batch.out_cache_loc is not None:
            step.window_slots = torch.empty_like(batch.out_cache_loc, dtype=torch.int64)
        if not step.q_len:
            if batch.forward_mode.is_draft_extend_v2():
                refuse("--speculative-draft-attention-backend", "another backend", batch.forward_mode)
            step.longest = max(batch.extend_seq_lens_cpu)
            ends = batch.extend_seq_lens.cumsum(0, dtype=torch.int32)
            step.starts = torch.nn.functional.pad(ends, (1, 0))
        return step

    def _fill(self, step: Step, batch: Any) -> None:
        """Writes lengths, tables and plans of a step in place, on the device."""
        import torch

        requests = batch.batch_size
        if not requests:
            return
        verified = step.q_len if batch.forward_mode.is_target_verify() else 0  # seq_lens has no drafts
        torch.add(batch.seq_lens[:requests], verified, out=step.lengths)
        slots = self.pages[batch.req_pool_indices[:requests]]
        for windowed, table in step.tables.items():
            own = self.window_pool.full_to_swa_index_mapping[slots] if windowed and self.window_pool else slots
            torch.div(own, self.page_size, rounding_mode="floor", out=table)
        if self.window_pool is not None and step.window_slots is not None:
            step.window_slots.copy_(self.window_pool.translate_loc_from_full_to_swa(batch.out_cache_loc))
        if step.q_len:
            self._plan(step)

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Any:
        return self.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)


def is_fp8(dtype: torch.dtype) -> bool:
    import torch

    return dtype in (torch.float8_e4m3fn, torch.float8_e5m2)


def _drafts() -> int:
    """Query tokens of a request that verifies drafts. Those of a tree are refused, which its mask would need."""
    spec = get_spec()
    if spec.speculative_algorithm is None:
        return 0
    if spec.speculative_eagle_topk != 1:
        refuse("--speculative-eagle-topk", "1", spec.speculative_eagle_topk)
    return int(spec.speculative_num_draft_tokens)


def _check(runner: Any) -> None:
    """Refuses what the backend cannot honour, by the option that selects it."""
    if runner.model_config.is_encoder_decoder:
        refuse("the model", "no cross attention", "an encoder and decoder")
    if runner.is_draft_worker:
        refuse("--speculative-draft-attention-backend", "another backend for the draft model", "none")
    if runner.page_size % 16:
        refuse("--page-size", "a multiple of 16", runner.page_size)
    if runner.kv_cache_dtype != runner.dtype and not is_fp8(runner.kv_cache_dtype):
        refuse("--kv-cache-dtype", f"{runner.dtype} or fp8", runner.kv_cache_dtype)
    if runner.kv_index_translator.is_translating:
        refuse("--enable-unified-memory", "its absence", "a unified pool")
    parallel = get_parallel()
    if parallel.attn_cp_size > 1 or parallel.attn_dcp_size > 1:
        refuse("context parallelism", "size 1", (parallel.attn_cp_size, parallel.attn_dcp_size))


def is_causal(layer: Any, step: Step, options: dict[str, Any]) -> bool:
    """Whether a row attends to the keys up to its own only. Refuses what a layer asks for besides."""
    given = [name for name, value in options.items() if value is not None and value is not False]
    if given:
        refuse(given[0], "None", "a value")
    if layer.is_cross_attention or layer.attn_type is AttentionType.DECODER_BIDIRECTIONAL:
        refuse("attn_type", "attention of a decoder or an encoder", layer.attn_type)
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        refuse("logit_capping_method", "tanh", layer.logit_capping_method)
    if layer.xai_temperature_len > 0:
        refuse("xai_temperature_len", "-1", layer.xai_temperature_len)
    causal = layer.attn_type is not AttentionType.ENCODER_ONLY
    if step.q_len and not causal:
        refuse("attn_type", "attention of a decoder", layer.attn_type)
    return causal
