"""Dtypes, backends and layouts that a function does not document are refused, also where its operator takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fi_core
from fi_core import fused_moe, gemm, grouped_mm
from fi_core.decode import xqa
from fi_core.runtime.errors import BackendSupportedError, UnsupportedError

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
ENDS = torch.tensor([0, 4], dtype=torch.int32)


def rows(dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(4, 64).to(dtype)


def experts(**options: Any) -> dict[str, Any]:
    ids, weights = torch.zeros(4, 2, dtype=torch.int32), torch.ones(4, 2)
    w1, w2 = torch.zeros(4, 128, 64, dtype=BF16), torch.zeros(4, 64, 64, dtype=BF16)
    return {
        "input": rows(BF16), "token_selected_experts": ids, "token_final_scales": weights, "fc1_expert_weights": w1,
        "fc2_expert_weights": w2, "output_dtype": BF16, "quant_scales": [], **options,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: fi_core.bmm_fp8(rows(BF16)[None], rows(BF16)[None].mT, torch.ones(1), torch.ones(1), BF16), ValueError,
         "bmm_fp8: A must be float8_e4m3fn or float8_e5m2; got torch.bfloat16"),
        (lambda: grouped_mm.grouped_mm_fp8(rows(BF16), rows(BF16)[None], ENDS), ValueError,
         "grouped_mm_fp8: a must be float8_e4m3fn or float8_e5m2; got torch.bfloat16"),
        (lambda: fi_core.mm_bf16(rows(E4M3), rows(E4M3).mT), TypeError,
         "mm_bf16: a must be bfloat16 or float16; got torch.float8_e4m3fn"),
        (lambda: fi_core.bmm_bf16(rows(E4M3)[None], rows(E4M3)[None].mT), TypeError,
         "bmm_bf16: A must be bfloat16 or float16; got torch.float8_e4m3fn"),
        (lambda: grouped_mm.grouped_mm_bf16(rows(E4M3), rows(E4M3)[None], ENDS), TypeError,
         "grouped_mm_bf16: a must be bfloat16 or float16; got torch.float8_e4m3fn"),
        (lambda: gemm.tinygemm_bf16(rows(E4M3), rows(E4M3), torch.empty(4, 4, dtype=BF16)), TypeError,
         "tinygemm_bf16: input must be bfloat16 or float16; got torch.float8_e4m3fn"),
        (lambda: gemm.prepare_bf16_fp4_weights(*(torch.zeros(16, n, dtype=torch.uint8) for n in (32, 4)), backend="x"),
         BackendSupportedError, "prepare_bf16_fp4_weights does not support backend 'x': it has cudnn"),
        (lambda: fi_core.fused_moe.cutlass_fused_moe(**experts(backend="cake")), BackendSupportedError,
         "backend: 'cutlass' is required, which selects fi's kernels; got 'cake'"),
        (lambda: fused_moe.cutlass_fused_moe_workspace_size(4, 64, 64, 4, 2, x_dtype=BF16, weight_dtype=BF16,
                                                            backend="cake"), BackendSupportedError,
         "backend: 'cutlass' is required"),
        (lambda: xqa(torch.ones(1, 1, 4, 64).half(), *(torch.ones(2, 16, 2, 64).half() for _ in range(2)),
                     torch.zeros(1, 2, dtype=torch.int32), torch.tensor([[8]], dtype=torch.int32),
                     torch.empty(1, 1, 4, 64).half(), torch.zeros(8, dtype=torch.uint8),
                     torch.zeros(8, dtype=torch.int32), 2, 16, kv_layout="NDH"), KeyError,
         "kv_layout: allowed are NHD, HND; got 'NDH'"),
    ],
)  # fmt: skip
def test_refusals(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_a_refused_request_names_the_call() -> None:
    """An operator inside refuses: the error begins with the function that was called, and lists its tensors."""
    ids = torch.zeros(4, 2)
    with pytest.raises(UnsupportedError) as caught:
        fused_moe.cutlass_fused_moe(**experts(token_selected_experts=ids))
    first, *_, last = str(caught.value).splitlines()
    assert first.startswith("cutlass_fused_moe: moe_sort(ids=f32) on ")
    assert "token_selected_experts float32 [4, 2]" in last and last.startswith("  arguments: input bfloat16 [4, 64]")
    assert "requires ids in i32, i64, i16, got f32" in str(caught.value)
    logits, lens = torch.ones(2, 8), torch.ones(2, dtype=torch.int32)
    with pytest.raises(
        ValueError, match=r"^top_k_varlen: k: 0 to 2\^31 - 1 is required; got 2147483648; got tensors of shapes logits"
    ):
        fi_core.top_k_varlen(logits, lens, 1 << 31)
