"""Code of a user, read by mypy and pyright and never run: a call that is wrong is an error, and only such a call.

Each wrong line names the error that it must give and ignores it; `nox -s types` fails if that error is missing.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import fi_core
import fi_core.testing
from fi_core.attention import (
    BatchAttentionWithAttentionSinkWrapper,
    BatchPrefillWithCausalBidirectionalRangesWrapper,
)
from fi_core.testing import bench_gpu_time

if TYPE_CHECKING:
    from typing_extensions import assert_type


def functions(x: torch.Tensor, weight: torch.Tensor) -> None:
    assert_type(fi_core.__version__, str)
    assert_type(fi_core.rmsnorm(x, weight, eps=1e-5), torch.Tensor)
    assert_type(fi_core.norm.rmsnorm(x, weight), torch.Tensor)
    fi_core.silu_and_mul(x, enable_pdl=True)
    fi_core.rmsnrom(x, weight)  # type: ignore[attr-defined]
    fi_core.rmsnorm(x, weight, epsilon=1)  # type: ignore[call-arg]
    fi_core.rmsnorm(x)  # type: ignore[call-arg]
    fi_core.rmsnorm(x, "weight")  # type: ignore[arg-type]
    fi_core.norm.layernrom(x)  # type: ignore[attr-defined]
    fi_core.top_k(x, k="4")  # type: ignore[arg-type]
    from fi_core import silu_and_mull  # type: ignore[attr-defined]  # noqa: F401


def one_request(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    pair = fi_core.single_prefill_with_kv_cache(q, k, v, causal=True, return_lse=True)
    assert_type(pair, tuple[torch.Tensor, torch.Tensor])
    assert_type(fi_core.single_prefill_with_kv_cache(q, k, v, causal=True), torch.Tensor)
    assert_type(fi_core.single_decode_with_kv_cache(q, k, v, return_lse=False), torch.Tensor)
    fi_core.single_prefill_with_kv_cache_return_lse(q, k, v, causal=True)
    fi_core.single_prefill_with_kv_cache_return_lse(q, k, v, casual=True)  # type: ignore[call-arg]
    fi_core.single_decode_with_kv_cache(q, k, v, window="left")  # type: ignore[call-overload]


def sampling(probs: torch.Tensor, asks: bool) -> None:
    assert_type(fi_core.top_p_sampling_from_probs(probs, 0.9), torch.Tensor)
    assert_type(fi_core.sampling_from_probs(probs, return_valid=True), tuple[torch.Tensor, torch.Tensor])
    either = fi_core.top_k_sampling_from_probs(probs, 40, return_valid=asks)
    assert_type(either, torch.Tensor | tuple[torch.Tensor, torch.Tensor])
    fi_core.top_p_sampling_from_probs(probs, 0.9, determinstic=True)  # type: ignore[call-overload]


def wrappers(q: torch.Tensor, cache: torch.Tensor, indptr: torch.Tensor) -> None:
    decode = fi_core.BatchDecodeWithPagedKVCacheWrapper(q.new_empty(1), "NHD")
    assert_type(decode, fi_core.decode.BatchDecodeWithPagedKVCacheWrapper)
    decode.plan(indptr, indptr, indptr, 32, 8, 128, 16, q_data_type=torch.bfloat16)
    assert_type(decode.run(q, cache), torch.Tensor)
    assert_type(decode.run(q, cache, return_lse=True), tuple[torch.Tensor, torch.Tensor])
    decode.plan(indptr, indptr, indptr, 32, 8, 128, "16")  # type: ignore[arg-type]
    decode.run(q, cache, return_lsee=True)  # type: ignore[call-overload]
    decode.rnu(q, cache)  # type: ignore[attr-defined]
    prefill = fi_core.BatchPrefillWithPagedKVCacheWrapper(q.new_empty(1))
    prefill.plan(indptr, indptr, indptr, indptr, 32, 8, 128, 16, casual=True)  # type: ignore[call-arg]
    BatchAttentionWithAttentionSinkWrapper("workspace")  # type: ignore[arg-type]


def derived(q: torch.Tensor, cache: torch.Tensor, indptr: torch.Tensor) -> None:
    """Parameters that another function declares."""
    decode = fi_core.BatchDecodeWithPagedKVCacheWrapper(q.new_empty(1), "NHD")
    decode.forward(q, cache, "NONE", sm_scale=0.1)
    decode.forward(q, cache, window="left")  # type: ignore[call-arg]
    prefill = fi_core.BatchPrefillWithPagedKVCacheWrapper(q.new_empty(1))
    prefill.forward(q, cache, casual=True)  # type: ignore[call-arg]
    fi_core.BatchPrefillWithRaggedKVCacheWrapper(q.new_empty(1)).forward(q, q, q, causal="yes")  # type: ignore[arg-type]
    blocks = fi_core.BlockSparseAttentionWrapper(q.new_empty(1))
    blocks.forward(q, q, q, soft_cap=1.0)  # type: ignore[call-arg]
    fi_core.VariableBlockSparseAttentionWrapper(q.new_empty(1)).forward(q, q)  # type: ignore[call-arg]
    pod = fi_core.PODWithPagedKVCacheWrapper(q.new_empty(1))
    pod.plan(indptr, indptr, indptr, 32, 8, 128, 16, "NONE", q_data_type=torch.bfloat16)
    pod.plan(indptr, indptr, indptr, 32, 8, 128, 16, window_right=0)  # type: ignore[call-arg]
    ranges = BatchPrefillWithCausalBidirectionalRangesWrapper(q.new_empty(1))
    ranges.plan(indptr, indptr, indptr, indptr, 32, 8, 128, 16, rope_scale=1.0)  # type: ignore[call-arg]
    ranges.forward(q, cache, indptr, causal=True)  # type: ignore[call-arg]
    ragged = fi_core.BatchPrefillWithRaggedKVCacheWrapper(q.new_empty(1), kv_indptr_buf=indptr)
    ragged.plan(indptr, indptr, 32, 8, 128, causal=True)
    ragged.plan(indptr, indptr, 32, 8, 128, page_size=16)  # type: ignore[call-arg]
    assert_type(ragged.workspace_size(indptr, indptr, 32, 8, 128), tuple[int, int])
    prefill.workspace_size(indptr, indptr, indptr, indptr, 32, 8, 128, 16, non_blocking=True)  # type: ignore[call-arg]
    decode.workspace_size(indptr, indptr, indptr, 32, 8, 128, 16, fixed_splits=4)  # type: ignore[call-arg]
    fi_core.MultiLevelCascadeAttentionWrapper(2, q).plan([q], [q], [q], [q], 32, 8, head_dim_qk=128)  # type: ignore[call-arg]
    prefix = fi_core.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(q)
    prefix.begin_forward(indptr, indptr, indptr, 32, 8, 128, 16, q_data_type="float16")  # type: ignore[call-arg]
    i, batch_pod = indptr, fi_core.BatchPODWithPagedKVCacheWrapper(q)
    batch_pod.plan(i, i, i, i, i, i, i, i, 32, 8, 128, 16, causal=True)  # type: ignore[call-arg]
    blocks.plan(indptr, indptr, 64, 64, 8, 8, 4, 4, 128, packed_mask=q, custom_mask=q)  # type: ignore[call-arg]
    BatchAttentionWithAttentionSinkWrapper(q, jit_args=())  # type: ignore[call-arg]
    BatchPrefillWithCausalBidirectionalRangesWrapper(q, backend="fa2")  # type: ignore[call-arg]
    found = fi_core.decode.xqa_batch_decode_with_kv_cache(q, cache, q, indptr, indptr, 4096, q_cu_seq_lens=indptr)
    assert_type(found, torch.Tensor)
    fi_core.decode.xqa_batch_decode_with_kv_cache(q, cache, q, indptr, indptr, 4096, cum_seq_lens_q=q)  # type: ignore[call-arg]
    fi_core.mla.xqa_batch_decode_with_kv_cache_mla(q, cache, q, 128, 512, 64, indptr, indptr, "64")  # type: ignore[arg-type]
    jit = fi_core.jit
    jit.gen_customize_batch_decode_module("uri", head_dim=128)  # type: ignore[call-arg]
    jit.gen_customize_single_decode_module("uri", backend="fa2")  # type: ignore[call-arg]
    jit.gen_customize_single_prefill_module("auto", "uri", idtype=torch.int32)  # type: ignore[call-arg]
    jit.gen_customize_batch_attention_module("uri", use_sliding_window=True)  # type: ignore[call-arg]


def lazy_packages() -> None:
    assert_type(fi_core.jit.gen_norm_module(dtype=torch.bfloat16), fi_core.jit.JitSpec)
    fi_core.jit.gen_nrom_module()  # type: ignore[attr-defined]
    fi_core.jit.gen_norm_module(targets="cpu")  # type: ignore[arg-type]
    fi_core.attention.BatchAttentionWrapper()  # type: ignore[attr-defined]
    bench_gpu_time(lambda: None, dry_run_iters="5")  # type: ignore[arg-type]
    fi_core.testing.bench_gpu_times(print)  # type: ignore[attr-defined]
