"""Small valid calls of functions that consist of other operators."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

import fi_core
from families.harness import rand
from fi_core import comm, fused_moe, gemm, lora, mamba

BF16, F32 = torch.bfloat16, torch.float32
Arguments = dict[str, Any]
LOGITS = (  # of routers: k, n, dtype, what a name ends in
    (6144, 256, F32, ""), (7168, 128, BF16, ""), (7168, 256, F32, ""), (7168, 256, BF16, "_bf16"),
    (7168, 384, F32, ""), (7168, 384, BF16, "_bf16"), (7168, 896, F32, ""), (7168, 896, BF16, "_bf16"),
)  # fmt: skip


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _bf16(*shape: int) -> torch.Tensor:
    return rand(*shape, dtype=BF16, device="cpu")


def _bytes(*shape: int) -> torch.Tensor:
    return torch.full(shape, 56, dtype=torch.uint8)


def _logits(k: int, n: int, dtype: torch.dtype) -> Arguments:
    return {"mat_a": _bf16(2, k), "mat_b": _bf16(n, k).t(), "out": torch.empty(2, n, dtype=dtype)}


def _pages() -> Arguments:
    return {
        "paged_kv_cache": (_bytes(4, 4, 2, 32), _bytes(4, 4, 2, 32)),
        "kv_cache_sf": (_bytes(4, 4, 2, 4), _bytes(4, 4, 2, 4)), "block_tables": _ints(0, 1, 2, 3).view(2, 2),
        "seq_lens": _ints(3, 7), "k_scale": 0.5, "v_scale": torch.ones(1), "output_k": _bf16(2, 8, 2, 64),
        "output_v": _bf16(2, 8, 2, 64),
    }  # fmt: skip


def _scan() -> Arguments:
    return {
        "x": _bf16(70, 4, 32), "dt": _bf16(70, 4), "A": -torch.ones(4), "B": _bf16(70, 2, 16), "C": _bf16(70, 2, 16),
        "chunk_size": 64, "cu_seqlens": _ints(0, 30, 70), "cu_chunk_seqlens": _ints(0, 30, 70),
        "last_chunk_indices": _ints(0, 1), "seq_idx": _ints(0, 1), "out": _bf16(70, 4, 32),
        "initial_states": rand(2, 4, 32, 16, dtype=F32, device="cpu"), "return_intermediate_states": True,
        "state_dtype": F32,
    }  # fmt: skip


def _no_rings() -> Arguments:
    """Of no layer: addresses in a tensor are for the user to check, so that the fuzz gives none."""
    pools = ("state", "x_cache", "B_cache", "dt_cache", "state_scale")
    names = ("A_ptrs", *(f"{pool}_{what}" for pool in pools for what in ("ptrs", "slot_strides")))
    return {
        **{name: torch.zeros(0, dtype=torch.int64) for name in names},
        **{name: torch.zeros(0, 0, dtype=torch.int32) for name in ("src_slots", "dst_slots")},
        **{name: _ints() for name in ("ring_start", "replay_prefix_len", "active_request_indices")},
        "state_dtype": F32, "input_dtype": BF16, "matrixA_dtype": F32, "dim": 64, "dstate": 128, "num_heads": 4,
        "heads_per_group": 2, "max_window": 8, "ring_buffer_len": 8,
    }  # fmt: skip


def _no_pairs(**more: Any) -> Arguments:
    """Adapters at addresses, which are for the caller to keep valid, of no pair."""
    none = torch.zeros(0, dtype=torch.int64)
    return {
        "w_ptr": torch.zeros(1, 4, dtype=torch.int64), "sorted_token_ids": none, "expert_ids": none,
        "lora_indices": _ints(0, -1), "lora_stride": 4096, **more,
    }  # fmt: skip


def _no_tokens(slices: int, **more: Any) -> Arguments:
    tables = {name: torch.zeros(slices, 4, dtype=torch.int64) for name in ("w_ptr_a", "w_ptr_b")}
    ids = torch.zeros(0, 2, dtype=torch.int32)
    return {
        **tables, "lora_stride_a": 64, "lora_stride_b": 64, "topk_ids": ids, "lora_ids": _ints(), "rank": 8, **more,
    }  # fmt: skip


def calls() -> Iterator[tuple[str, Callable[..., Any], Callable[[], Arguments]]]:
    """A name, the function, and what makes its arguments."""
    for k, n, dtype, end in LOGITS:
        name = f"mm_M1_16_K{k}_N{n}{end}"
        yield name, getattr(gemm, name), functools.partial(_logits, k, n, dtype)
    yield "masked bmm", gemm.masked_bmm, lambda: {
        "a": _bf16(3, 9, 64), "b": _bf16(3, 64, 40), "masked_m": _ints(4, 0, 9),
    }  # fmt: skip
    yield "ragged bmm", gemm.ragged_bmm, lambda: {
        "a": _bf16(13, 64), "b": _bf16(3, 40, 64), "m_indptr": _ints(0, 4, 4, 13), "max_m": 9,
    }  # fmt: skip
    yield "gemm alpha beta", gemm.gemm_alpha_beta, lambda: {
        "a": _bf16(9, 64), "b": _bf16(40, 64), "c": _bf16(9, 40), "alpha": 0.5, "beta": 2.0,
    }  # fmt: skip
    yield "rmsnorm silu", fi_core.fused_rmsnorm_silu, lambda: {"input": _bf16(7, 128), "weight": _bf16(128)}
    modulation = {"scale": (1, 5, 64), "shift": (1, 5, 64)}
    gated = {"residual": (1, 5, 64), "gate": (1, 5, 64)}
    yield "dit scale shift", fi_core.fused_dit_residual_layernorm_scale_shift, lambda: {
        "input": _bf16(1, 5, 64), **{name: _bf16(*shape) for name, shape in modulation.items()},
    }  # fmt: skip
    yield "dit gate scale shift", fi_core.fused_dit_gate_residual_layernorm_scale_shift, lambda: {
        "input": _bf16(1, 5, 64), **{name: _bf16(*shape) for name, shape in (gated | modulation).items()},
    }  # fmt: skip
    yield "dit gamma beta", fi_core.fused_dit_gate_residual_layernorm_gamma_beta, lambda: {
        "input": _bf16(1, 5, 64), **{name: _bf16(*shape) for name, shape in gated.items()},
        "gamma": torch.ones(64), "beta": torch.ones(64),
    }  # fmt: skip
    yield "nvfp4 kv quantize", fi_core.nvfp4_kv_quantize, lambda: {
        "input": _bf16(5, 64), "global_scale": torch.ones(1),
    }  # fmt: skip
    yield "pack heads", comm.pack_ulysses_qkv_head_chunk, lambda: {
        "query": _bf16(1, 5, 4, 8), "key": _bf16(1, 5, 4, 8), "value": _bf16(1, 5, 4, 8), "world_size": 2,
        "head_offset": 1, "head_count": 1,
    }  # fmt: skip
    yield "merge heads", comm.merge_ulysses_output_head_chunk, lambda: {
        "received": _bf16(1, 5, 2, 8), "world_size": 2, "local_heads": 2, "head_offset": 1, "out": _bf16(1, 5, 4, 8),
    }  # fmt: skip
    yield "experts in one call", fused_moe.mono_moe, lambda: {
        "activations_in": _bf16(3, 256), "router_logits": _bf16(3, 4),
        "expert_weights_up": torch.zeros(4, 256, 256).to(torch.float8_e4m3fn), "expert_scales_up": torch.ones(4, 2, 2),
        "expert_weights_down": torch.zeros(4, 256, 128).to(torch.float8_e4m3fn),
        "expert_scales_down": torch.ones(4, 2, 1), "top_k": 2,
    }  # fmt: skip
    yield "hash topk", fused_moe.hash_topk, lambda: {
        "router_logits": rand(5, 8, dtype=F32, device="cpu"), "input_ids": torch.tensor([3, 0, 9, 3, 7]),
        "tid2eid": (torch.arange(30, dtype=torch.int32) % 8).view(10, 3), "num_fused_shared_experts": 1,
        "routed_scaling_factor": 2.5,
    }  # fmt: skip
    yield "topk varlen", fi_core.top_k_varlen, lambda: {
        "logits": rand(6, 64, dtype=F32, device="cpu"), "seq_lens": _ints(64, 2, 17), "top_k": 8, "next_n": 2,
        "return_values": True,
    }  # fmt: skip
    yield "sampling with a slab", fi_core.cake_top_k_top_p_sampling_from_probs, lambda: {
        "probs": torch.full((3, 64), 1 / 64), "top_k": 8, "top_p": 0.9, "philox_seed": 1, "philox_offset": 0,
        "renorm_out": torch.zeros(3, 1024),
    }  # fmt: skip
    yield "scan of chunks", mamba.mamba_chunk_scan_combined_varlen, _scan
    yield "slice of an adapter", lora.bgmv_expand_slice, lambda: {
        "inputs": _bf16(3, 8), "lora_b_weights": _bf16(2, 1, 16, 8), "output_tensor": _bf16(3, 24),
        "lora_indices_tensor": _ints(1, -1, 0), "slice_offset": 8, "slice_size": 16,
    }  # fmt: skip
    yield "adapters of pairs, prepared", fused_moe.prepare_bgmv_moe, lambda: {
        "x": _bf16(3, 16), "lora_a_weights": [_bf16(2, 4, 8, 16)], "lora_b_weights": [_bf16(2, 4, 24, 8)],
        "sorted_token_ids": _ints(2, 0), "expert_ids": _ints(3, 1), "lora_indices": _ints(1, -1, 0),
        "topk_weights": torch.ones(2), "num_experts": 4,
    }  # fmt: skip
    yield "addresses of adapters", fused_moe.fill_w_ptr, lambda: {
        "w_ptr": torch.zeros(2, 4, dtype=torch.int64), "weights": _bf16(2, 4, 8, 16), "num_experts": 4, "slice_id": 1,
    }  # fmt: skip
    yield "shrink of pairs", fused_moe.bgmv_moe_shrink, lambda: _no_pairs(y=_bf16(1, 0, 8), x=_bf16(2, 16))
    yield "expand of pairs", fused_moe.bgmv_moe_expand, lambda: _no_pairs(
        y=torch.zeros(2, 24), x=_bf16(1, 0, 8), topk_weights=torch.ones(0), output_slices=[24],
        slice_start_loc=torch.zeros(1, dtype=torch.int64),
    )  # fmt: skip
    yield (
        "delta of the first product",
        fused_moe.bgmv_moe_gemm1_lora_delta,
        lambda: _no_tokens(2, hidden_states=_bf16(0, 16), intermediate_size=24),
    )
    yield "delta of the second product", fused_moe.bgmv_moe_gemm2_lora_delta, lambda: _no_tokens(
        1, gemm1_activation_output=_bf16(0, 24), expanded_idx_to_permuted_idx=_ints(), hidden_size=16,
        topk_weights=torch.ones(0, 2),
    )  # fmt: skip
    yield "states of rings", mamba.replayssm_materialize, _no_rings
    yield "nvfp4 rows", fi_core.nvfp4_kv_dequantize, lambda: {
        "fp4_data": _bytes(7, 48), "block_scales": _bytes(7, 6), "global_scale": torch.ones(1),
    }  # fmt: skip
    yield "nvfp4 pages", fi_core.nvfp4_kv_dequantize_paged, _pages
