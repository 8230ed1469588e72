"""Orders of expert weights, and MLA's keys: helpers of torch that engines call while they load a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fi_core
from fi_core.fused_moe import ActivationType, convert_to_block_layout, core, reorder_rows_for_gated_act_gemm
from fi_core.fused_moe.core import _maybe_get_cached_w3_w1_permute_indices  # vLLM imports it
from fi_core.fused_moe.utils import get_hybrid_num_tokens_buckets


def test_rows_of_gate_and_linear_alternate() -> None:
    x = torch.arange(12.0).view(6, 2)
    assert reorder_rows_for_gated_act_gemm(x)[:, 0].tolist() == [0.0, 6.0, 2.0, 8.0, 4.0, 10.0]
    assert fi_core.reorder_rows_for_gated_act_gemm is reorder_rows_for_gated_act_gemm
    with pytest.raises(ValueError, match="x: an even number of rows is required; got shape"):
        reorder_rows_for_gated_act_gemm(x[:5])


def test_blocks_of_columns() -> None:
    x = torch.arange(24).view(4, 6)
    blocks = convert_to_block_layout(x, 2)
    assert blocks.is_contiguous() and blocks.shape == (3, 4, 2)
    assert torch.equal(blocks[1], x[:, 2:4])
    with pytest.raises(ValueError, match=r"input_tensor: shape \[m, k\], k a multiple of blockK \(4\)"):
        convert_to_block_layout(x, 4)


def test_permutations_of_expert_weights() -> None:
    """First the halves alternate, then rows are shuffled; the indices of a shape are made once."""
    cache: dict[Any, torch.Tensor] = {}
    w = torch.randn(256, 64)
    both = _maybe_get_cached_w3_w1_permute_indices(cache, w, 128)
    assert torch.equal(w[both], fi_core.shuffle_matrix_a(reorder_rows_for_gated_act_gemm(w), 128))
    plain = _maybe_get_cached_w3_w1_permute_indices(cache, w, 128, is_gated_act_gemm=False)
    second = core.get_w2_permute_indices_with_cache(cache, w, 128)
    assert torch.equal(plain, second) and torch.equal(w[second], fi_core.shuffle_matrix_a(w, 128))
    assert core.get_w2_permute_indices_with_cache(cache, w, 128) is second and len(cache) == 3
    scales = torch.randint(0, 255, (256, 4), dtype=torch.uint8)
    order = core.get_w2_permute_indices_with_cache(cache, scales, 128, num_elts_per_sf=16)
    shuffled = fi_core.block_scale_interleave(scales[order].contiguous())
    assert torch.equal(shuffled.view(-1), fi_core.shuffle_matrix_sf_a(scales, 128).view(-1))


def test_activations() -> None:
    assert [a.name for a in ActivationType if a.is_gated] == [
        "Swiglu", "Geglu", "SwigluBias", "SwigluStep", "GegluTanh", "Situ",
    ]  # fmt: skip
    assert ActivationType(3) is ActivationType.Swiglu and fi_core.fused_moe.is_gated_activation(6) is False


def test_buckets_of_tokens() -> None:
    assert get_hybrid_num_tokens_buckets(1) == (1,)
    assert get_hybrid_num_tokens_buckets(300) == (1, 2, 4, 8, 16, 32, 64, 128, 256, 300)
    big = get_hybrid_num_tokens_buckets(20000)
    assert big == tuple(sorted(set(big))) and big[-3:] == (8192, 16384, 20000)
    with pytest.raises(ValueError, match="max_num_tokens"):
        get_hybrid_num_tokens_buckets(0)
