"""Code of a user, read by mypy and pyright and never run: a call that is wrong is an error, and only such a call.

Each wrong line names the error that it must give and ignores it; `nox -s types` fails if that error is missing.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import fi_core
import fi_core.testing
from fi_core.attention import BatchAttentionWithAttentionSinkWrapper
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


def lazy_packages() -> None:
    assert_type(fi_core.jit.gen_norm_module(dtype=torch.bfloat16), fi_core.jit.JitSpec)
    fi_core.jit.gen_nrom_module()  # type: ignore[attr-defined]
    fi_core.jit.gen_norm_module(targets="cpu")  # type: ignore[arg-type]
    fi_core.attention.BatchAttentionWrapper()  # type: ignore[attr-defined]
    bench_gpu_time(lambda: None, dry_run_iters="5")  # type: ignore[arg-type]
    fi_core.testing.bench_gpu_times(print)  # type: ignore[attr-defined]
