"""vLLM's attention over a latent cache (DeepSeek): decode on fi's kernels, prompts by the engine's prefill backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport

from fi_core.autotuner import autotune
from fi_core.integrations.vllm.backend import Facts
from fi_core.integrations.vllm.mla_prompts import Prompts
from fi_core.integrations.vllm.prepare import FP8, begin_to_compile
from fi_core.mla import BatchMLAPagedAttentionWrapper

if TYPE_CHECKING:
    import torch

_WORKSPACE_BYTES = 34 << 20  # with which all SMs of an H200 work
_LATENT, _ROPE = 512, 64


class Backend(Facts, MLACommonBackend):  # type: ignore[misc]
    """What fi supports, and the classes that vLLM makes of it."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [_LATENT + _ROPE]

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return (1, 0, 2, 3) if include_num_layers_dimension else (0, 1, 2)


@dataclass
class DecodeMetadata(MLACommonDecodeMetadata):  # type: ignore[misc]
    """The decode requests of a step. indptr, of_layer: as the plan of attention takes them."""

    attention: BatchMLAPagedAttentionWrapper
    indptr: tuple[torch.Tensor, torch.Tensor]
    of_layer: tuple[Any, ...]
    planner: Impl | None = None

    def planned(self, layer: Impl) -> BatchMLAPagedAttentionWrapper:
        """Attention for these requests. The layer that asks first plans it, and again whenever it asks: a graph that is
        captured of the step then has the launch, and the builder of a replay has none.
        """
        if self.planner is None:
            self.planner = layer
        if self.planner is layer:
            pages = self.block_table.contiguous().view(-1)
            self.attention.plan(*self.indptr, pages, self.seq_lens, *self.of_layer)
        return self.attention


class Builder(MLACommonMetadataBuilder):  # type: ignore[misc]
    """Builds the metadata of a step; its decode requests are planned by the lengths on the device."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.UNIFORM

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        import torch

        super().__init__(kv_cache_spec, layer_names, vllm_config, device, MLACommonMetadata)
        layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        impl, prompts = layer.impl, layer.prefill_backend
        cache_dtype, q_dtype = vllm_config.cache_config.cache_dtype, vllm_config.model_config.dtype
        kv_dtype = torch.float8_e4m3fn if cache_dtype in FP8 else q_dtype
        heads = impl.num_heads * max(1, self.dcp_world_size)  # context parallel ranks gather those of each other
        self.attention = BatchMLAPagedAttentionWrapper(torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device))
        self.of_layer = heads, _LATENT, _ROPE, kv_cache_spec.block_size, True, impl.scale, q_dtype, kv_dtype
        self.requests = torch.arange(vllm_config.scheduler_config.max_num_seqs + 1, dtype=torch.int32, device=device)
        self.offsets: dict[tuple[int, int], torch.Tensor] = {}
        self.is_alone = self.dcp_world_size == 1 and not getattr(self, "use_pcp", False)  # 0.24 has no such ranks
        with autotune():
            self._load(device, heads, q_dtype, kv_dtype)
            if isinstance(prompts, Prompts):
                prompts.load(q_dtype, device)

    def _load(self, device: torch.device, heads: int, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
        """Attends to zeros, for few and for many rows: no kernel is compiled or loaded while the engine serves."""
        import torch

        cache = torch.zeros(1, self.of_layer[3], _LATENT + _ROPE, device=device).to(kv_dtype)
        table, length = self.requests[:1].view(1, 1), self.requests[1:2]
        for tokens in (1, self.of_layer[3]):
            query = torch.zeros(tokens, heads, _LATENT + _ROPE, dtype=q_dtype, device=device)
            self.attention.plan(self._of_each(1, tokens), self.requests[:2], table.view(-1), length, *self.of_layer)
            scale: dict[str, Any] = {"ckv_scale": 1.0, "kpe_scale": 1.0} if kv_dtype.itemsize == 1 else {}
            self.attention.run(*_parts(query), *_parts(cache), **scale)

    def _of_each(self, requests: int, tokens: int) -> torch.Tensor:
        """Offsets of so many tokens of each request, int32 on the device."""
        found = self.offsets.get((requests, tokens))
        if found is None:
            most = len(self.requests) - 1
            found = self.requests * tokens if requests == most else self._of_each(most, tokens)[: requests + 1]
            self.offsets[requests, tokens] = found
        return found

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """The metadata of a step. A step with one token of each request does without vLLM's own slices of each tensor,
        which take most of its time.
        """
        step = common_attn_metadata
        requests, lengths, tables = step.num_reqs, step.seq_lens, step.block_table_tensor
        is_decode = step.max_query_len == 1 and requests == step.num_actual_tokens == len(lengths) == len(tables)
        if not (is_decode and self.is_alone and step.causal is True):
            return super().build(common_prefix_len, step, fast_build)
        return MLACommonMetadata(
            num_reqs=requests,
            max_query_len=1,
            max_seq_len=step.max_seq_len,
            num_actual_tokens=requests,
            query_start_loc=step.query_start_loc,
            slot_mapping=step.slot_mapping,
            num_decodes=requests,
            num_decode_tokens=requests,
            num_prefills=0,
            decode=self._decode(tables, lengths, None, self._of_each(requests, 1)),
        )

    def _build_decode(
        self,
        *,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
        **others: Any,
    ) -> DecodeMetadata:
        requests = len(block_table_tensor)
        # Requests without tokens that pad a graph have as many rows as the others; their length is 0.
        tokens, rest = divmod(num_decode_tokens, requests)
        starts = query_start_loc_device if rest else self._of_each(requests, tokens)
        return self._decode(block_table_tensor, seq_lens_device, dcp_tot_seq_lens_device, starts)

    def _decode(
        self, pages: torch.Tensor, lengths: torch.Tensor, dcp_lengths: torch.Tensor | None, starts: torch.Tensor
    ) -> DecodeMetadata:
        """Of decode requests whose query tokens begin at `starts`."""
        indptr = starts, self._of_each(*pages.shape)
        return DecodeMetadata(pages, lengths, dcp_lengths, self.attention, indptr, self.of_layer)


class Impl(MLACommonImpl):  # type: ignore[misc]
    """Attention of a layer."""

    can_return_lse_for_decode = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        refused = {"alibi_slopes": alibi_slopes, "sliding_window": sliding_window, "logits_soft_cap": logits_soft_cap}
        for name, value in refused.items():
            if value:
                raise NotImplementedError(f"{name}: None is required; got {value}. Select another attention backend")
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_args,
        )
        self.supports_quant_query_input = False  # queries stay 16-bit over an fp8 cache
        begin_to_compile()

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`[tokens, heads, 512]` of the decode requests, and the natural logarithm of the sums where ranks merge."""
        q_nope, q_pe = q if isinstance(q, tuple) else _parts(q)
        scale: dict[str, Any] = {}
        if self.kv_cache_dtype in FP8:
            scale = dict.fromkeys(("ckv_scale", "kpe_scale"), layer._k_scale_float)
        merges = self.need_to_return_lse_for_decode
        found = attn_metadata.decode.planned(self).run(
            q_nope, q_pe, *_parts(kv_c_and_k_pe_cache), return_lse=merges, return_lse_base_on_e=merges, **scale
        )
        return found if merges else (found, None)


def _parts(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The latent and the rotary part of rows."""
    return rows[..., :_LATENT], rows[..., _LATENT:]
