"""vLLM's attention backend over block tables: lengths stay on the device, and a step has one plan for all layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from vllm._custom_ops import reshape_and_cache_flash
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import get_per_layer_parameters

from fi_core.autotuner import autotune
from fi_core.decode import BlockTablesPlan, trtllm_batch_decode_with_kv_cache
from fi_core.integrations.vllm.backend import Facts
from fi_core.integrations.vllm.prepare import FP8, begin_to_compile
from fi_core.prefill import ContextTablesPlan, trtllm_batch_context_with_kv_cache
from fi_core.runtime.invariance import is_on

if TYPE_CHECKING:
    import torch

_WORKSPACE_BYTES = 16 << 20  # of a builder; 8 MiB are enough for head dims up to 256
_HND = (0, 1, 3, 2, 4)  # memory order of [blocks, 2, tokens, heads, head_dim]


class Backend(Facts, AttentionBackend):  # type: ignore[misc]
    """What fi supports, and the classes that vLLM makes of it."""

    forward_includes_kv_cache_update = False
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", *FP8]

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [64, 80, 96, 128, 192, 256]

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    # vLLM 0.24 asks for a shape and an order, newer ones for layouts of [blocks, heads, tokens, (K, V)].
    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, 2, block_size, num_kv_heads, head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return (1, 2, 4, 0, 3, 5) if include_num_layers_dimension else _HND

    @classmethod
    def get_required_kv_cache_layout(cls) -> str:
        return "HND"

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        from vllm.v1.kv_cache_interface import KVCacheLayout

        return KVCacheLayout.LBHNC, KVCacheLayout.BLHNC


@dataclass
class Metadata:
    """One step: decode requests first, each of q_len query tokens, then those of prefill. All tensors on the device."""

    num_decodes: int
    num_prefills: int
    q_len: int
    max_query_len: int
    max_seq_len: int
    decode: tuple[torch.Tensor, torch.Tensor]  # block tables and lengths of its requests
    prefill: tuple[torch.Tensor, torch.Tensor]
    qo_indptr: torch.Tensor  # of prefill requests, in the tokens of the step
    workspace: torch.Tensor
    of_layer: tuple[int, int, int, int, torch.dtype, torch.dtype]  # as `BlockTablesPlan.plan` wants it
    plans: dict[int, BlockTablesPlan]  # of decode, by window_left
    prefill_plan: ContextTablesPlan
    planners: dict[int, Impl] = field(default_factory=dict)  # the first layer of each window

    def plan_of(self, layer: Impl) -> BlockTablesPlan:
        """The plan of the decode requests. The layer that asks first makes it, and again whenever it asks: a graph that
        is captured of the step then has the launch, and its replays need none.
        """
        plan = self.plans[layer.window_left]
        if self.planners.setdefault(layer.window_left, layer) is layer:
            tables, lengths = self.decode
            plan.plan(tables, lengths, *self.of_layer, q_len_per_req=self.q_len, window_left=layer.window_left)
        return plan


class Builder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Builds the metadata of a step without a launch, and without waiting for the device."""

    # Inside of batch_invariant() all tokens go through prefill, whose plans a graph would keep.
    _cudagraph_support: ClassVar[AttentionCGSupport] = (
        AttentionCGSupport.NEVER if is_on() else AttentionCGSupport.UNIFORM_BATCH
    )

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        import torch

        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        layers = get_per_layer_parameters(vllm_config, layer_names, Impl).values()
        soft_caps = {layer.logits_soft_cap for layer in layers}
        self.workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.plans = {window: BlockTablesPlan(self.workspace) for window in {layer.window_left for layer in layers}}
        self.q_dtype = vllm_config.model_config.dtype
        self.heads = (
            vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config),
            kv_cache_spec.num_kv_heads,
            kv_cache_spec.head_size,
            kv_cache_spec.block_size,
        )
        cache_dtype = vllm_config.cache_config.cache_dtype
        self.kv_dtype = _fp8(cache_dtype) if cache_dtype in FP8 else kv_cache_spec.dtype
        self.of_layer = *self.heads, self.q_dtype, self.kv_dtype
        with autotune():
            for soft_cap in soft_caps:
                self._load(device, soft_cap)

    def _load(self, device: torch.device, soft_cap: float) -> None:
        """Attends to one token of zeros: no kernel is compiled or loaded while the engine serves."""
        import torch

        heads, kv_heads, head_size, block_size = self.heads
        query = torch.zeros(1, heads, head_size, dtype=self.q_dtype, device=device)
        pages = torch.zeros(1, 2, kv_heads, block_size, head_size, device=device).to(self.kv_dtype)
        table, length = torch.zeros(2, 1, 1, dtype=torch.int32, device=device).unbind()
        length, starts = length.view(1) + 1, torch.arange(2, dtype=torch.int32, device=device)
        for window_left, plan in self.plans.items():
            plan.plan(table, length, *self.of_layer, window_left=window_left)
            trtllm_batch_decode_with_kv_cache(
                query, pages, self.workspace, table, length, 1, window_left=window_left, plan=plan
            )
            trtllm_batch_context_with_kv_cache(
                query,
                pages,
                self.workspace,
                table,
                length,
                1,
                1,
                1.0,
                1.0,
                batch_size=1,
                cum_seq_lens_q=starts,
                cum_seq_lens_kv=starts,
                window_left=window_left,
                logits_soft_cap=soft_cap,
            )

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        step = common_attn_metadata
        if step.causal is not True:
            raise NotImplementedError("causal: True is required; select another attention backend for this model")
        # Decode adds in another order, and a prompt may end in a chunk of one token.
        decodes, q_len = (0, 1) if is_on() else _decodes(step, self.reorder_batch_threshold)
        prefills = step.num_reqs - decodes
        tables, lengths, starts = step.block_table_tensor, step.seq_lens, step.query_start_loc
        decode = prefill = tables, lengths
        if decodes and prefills:
            decode, prefill = zip(tables.tensor_split((decodes,)), lengths.tensor_split((decodes,)))
            starts = starts[decodes:]
        return Metadata(
            decodes,
            prefills,
            q_len,
            step.max_query_len,
            step.max_seq_len,
            decode,
            prefill,
            qo_indptr=starts,
            workspace=self.workspace,
            of_layer=self.of_layer,
            plans=self.plans,
            prefill_plan=ContextTablesPlan(),
        )


class Impl(AttentionImpl):  # type: ignore[misc]
    """Attention of a layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if alibi_slopes:
            raise NotImplementedError(
                f"alibi_slopes: None is required; got {alibi_slopes}. Select another attention backend"
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.window_left = -1 if sliding_window is None else sliding_window - 1
        self.sliding_window = self.window_left, 0  # this and the next for get_per_layer_parameters
        self.logits_soft_cap = logits_soft_cap or 0.0
        self.kv_cache_dtype, self.kv_sharing_target_layer_name = kv_cache_dtype, kv_sharing_target_layer_name
        self.sinks = sinks
        self.appends = kv_cache_dtype == "auto" and kv_sharing_target_layer_name is None
        self.rotation: Any = None  # of the queries and keys of this step, by `qk_norm`
        begin_to_compile()

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        self.sinks = None if self.sinks is None else self.sinks.float()

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Writes the keys and values of a step; slot_mapping has its actual tokens, which key and value may exceed."""
        rotate, self.rotation = self.rotation, None
        pages = self._pages(kv_cache)
        if rotate is not None:
            value = value[: len(slot_mapping)]
            rotate(key, value=value, paged_kv_cache=pages, slot_mapping=slot_mapping, kv_layout="HND")
            return
        k, v = (x.transpose(1, 2) for x in pages)  # the operator has tokens before heads
        scales = layer._k_scale, layer._v_scale
        reshape_and_cache_flash(key, value, k, v, slot_mapping, self.kv_cache_dtype, *scales)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Metadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`[tokens, num_heads, head_size]`, of which rows beyond those of the step are padding."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("output_scale: None is required; the output is not quantized")
        self.rotation = None  # of a step that writes no keys
        if attn_metadata is None:  # vLLM measures the memory of a step
            return output.fill_(0)
        step, (k, v) = attn_metadata, self._pages(kv_cache)
        scales = self.scale, 1.0
        if self.kv_cache_dtype in FP8:
            dtype = _fp8(self.kv_cache_dtype)  # vLLM keeps bytes
            k, v, scales = k.view(dtype), v.view(dtype), (self.scale * layer._k_scale_float, layer._v_scale_float)
        if step.num_decodes:
            rows = step.num_decodes * step.q_len
            trtllm_batch_decode_with_kv_cache(
                query[:rows],
                (k, v),
                step.workspace,
                *step.decode,
                step.max_seq_len,
                *scales,
                window_left=self.window_left,
                out=output[:rows],
                sinks=self.sinks,
                q_len_per_req=step.q_len,
                plan=step.plan_of(self),
                logits_soft_cap=self.logits_soft_cap,
            )
        if step.num_prefills:
            tables, lengths = step.prefill
            trtllm_batch_context_with_kv_cache(
                query,
                (k, v),
                step.workspace,
                tables,
                lengths,
                step.max_query_len,
                step.max_seq_len,
                *scales,
                batch_size=lengths.shape[0],
                cum_seq_lens_q=step.qo_indptr,
                cum_seq_lens_kv=step.qo_indptr,
                window_left=self.window_left,
                out=output,
                sinks=self.sinks,
                logits_soft_cap=self.logits_soft_cap,
                plan=step.prefill_plan,
            )
        return output

    def _pages(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, each `[blocks, heads, tokens, head_dim]`."""
        k, v = kv_cache.permute(_HND).unbind(1) if kv_cache.ndim == 5 else kv_cache.split(self.head_size, dim=-1)
        return k, v


def _decodes(step: Any, most: int) -> tuple[int, int]:
    """How many requests are decode, and the query tokens of each: those before the first of another length than the
    first request, which has up to `most`. Requests without tokens that pad a graph of one length are decode too.
    """
    if step.max_query_len == 1 and step.num_actual_tokens == step.num_reqs:
        return step.num_reqs, 1
    lengths = [end - begin for begin, end in pairwise(step.query_start_loc_cpu.tolist())]
    q_len = lengths[0]
    if not 0 < q_len <= most:
        return 0, 1
    if step.num_actual_tokens == step.num_reqs * q_len and {0, q_len}.issuperset(lengths):
        return step.num_reqs, q_len
    return next((i for i, length in enumerate(lengths) if length != q_len), step.num_reqs), q_len


def _fp8(name: str) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, FP8[name])
    return dtype
