"""Forms of an argument that callers of FlashInfer pass: lists, tensors on the host, tables that are padded."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

import fi_core
from families import test_mla as mla
from families.harness import assert_close, rand
from families.moe_reference import chosen, error, experts
from fi_core.attention.merge import _merge_states_reference
from fi_core.fused_moe import ActivationType, cutlass_fused_moe
from fi_core.mla import supported_mla_layer_dimensions, trtllm_batch_decode_with_kv_cache_mla
from fi_core.triton.cascade import variable_length_merge_states

BF16 = torch.bfloat16


def test_the_backend_of_keys_in_parts() -> None:
    k, nope, rope = (torch.ones(2, 3, n, dtype=BF16) for n in (5, 4, 1))
    fi_core.concat_mla_k(k, nope, rope[:, :1], backend="default")
    with pytest.raises(ValueError, match='backend: "default" or "cake" is required'):
        fi_core.concat_mla_k(k, nope, rope[:, :1], backend="triton")


def test_sinks_in_a_list(device: str) -> None:
    b = mla.batch((65, 3), 1, page_size=32, device=device)
    q, table = b.q.view(2, 1, 16, 576), mla.block_tables(b)
    arguments = (q, b.cache.unsqueeze(1), mla.workspace(device), 128, 512, 64, table, b.kv_len, 65)
    sinks = torch.linspace(-3, 3, 16, device=device)
    want, lse = b.expected()
    want = want / (1 + torch.exp(sinks.double() - lse * math.log(2)))[..., None]
    for given in (sinks, [sinks], (sinks,)):
        out = trtllm_batch_decode_with_kv_cache_mla(*arguments, bmm1_scale=mla.SCALE, sinks=given)
        assert_close(out[:, 0], want, tolerance=mla.TOLERANCE[BF16])
    with pytest.raises(ValueError, match=r"sinks: a tensor \[heads\], or a list of one, is required; got a list of 2"):
        trtllm_batch_decode_with_kv_cache_mla(*arguments, bmm1_scale=mla.SCALE, sinks=[sinks, sinks])


def test_dimensions_of_mla_layers(device: str) -> None:
    """Those that are named are served."""
    for head, heads in supported_mla_layer_dimensions:
        b = mla.batch((9,), 1, heads=heads, page_size=32, device=device)
        out = trtllm_batch_decode_with_kv_cache_mla(
            b.q.view(1, 1, heads, head.kv_lora_rank + head.qk_rope_head_dim), b.cache.unsqueeze(1),
            mla.workspace(device), head.qk_nope_head_dim, head.kv_lora_rank, head.qk_rope_head_dim,
            mla.block_tables(b), b.kv_len, 9, bmm1_scale=mla.SCALE,
        )  # fmt: skip
        assert_close(out[:, 0], b.expected()[0], tolerance=mla.TOLERANCE[BF16])


@pytest.mark.parametrize("count", [1, 8])
def test_constants_of_situ_in_tensors(count: int, device: str) -> None:
    e, k, h, i, tokens = 8, 2, 128, 104, 21
    x, w1 = rand(tokens, h, dtype=BF16, device=device), rand(e, 2 * i, h, dtype=BF16, device=device, scale=0.3, seed=1)
    w2, (ids, scales) = rand(e, h, i, dtype=BF16, device=device, scale=0.1, seed=2), chosen(tokens, e, k, device)
    beta, linear = (torch.linspace(low, 2 * low, count, device=device) for low in (1.0, 1.5))
    out = cutlass_fused_moe(
        x, ids, scales, w1, w2, BF16, activation_type=ActivationType.Situ, situ_beta=beta, situ_linear_beta=linear
    )
    constants = {"beta": beta.expand(e), "alpha": linear.expand(e)}
    assert error(out, experts(x, ids, scales, w1, w2, kind=ActivationType.Situ, constants=constants)) < 8e-3
    with pytest.raises(ValueError, match="situ_beta must be a number, or have 1 or 8 elements"):
        cutlass_fused_moe(
            x, ids, scales, w1, w2, BF16, activation_type=ActivationType.Situ, situ_beta=torch.ones(3, device=device)
        )


@pytest.mark.parametrize(("rows", "slots"), [(6, 6), (9, 6), (6, 9)])
def test_padded_slot_mappings(rows: int, slots: int, device: str) -> None:
    """Rows without a slot are skipped, and slots without a row; scales may lie on the host."""
    k, v = (rand(rows, 2, 64, dtype=BF16, device=device, seed=seed) for seed in (1, 2))
    mapping = torch.arange(slots, device=device) * 3
    filled, count = [], min(rows, slots)
    for keys, values, places, scale in (
        (k, v, mapping, torch.tensor(0.01)),
        (k[:count], v[:count], mapping[:count], 0.01),
    ):
        cache = torch.full((2, 2, 16, 2, 32), 7, dtype=torch.uint8, device=device)
        scales = torch.full((2, 2, 16, 2, 4), 7, dtype=torch.uint8, device=device)
        fi_core.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
            keys, values, places, cache, scales, scale, scale
        )
        filled.append((cache, scales))
    for got, want in zip(*filled):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float16, BF16, torch.float32])
def test_merging_of_a_varying_number_of_states(dtype: torch.dtype, device: str) -> None:
    counts = (3, 0, 1, 7)
    ends = list(itertools.accumulate(counts, initial=0))
    v, s = rand(11, 5, 64, dtype=dtype, device=device), 4 * rand(11, 5, dtype=torch.float32, device=device, seed=1)
    s[5:7, 2] = -torch.inf
    s[3] = -torch.inf  # all states of the third row
    out: Any = variable_length_merge_states(v, s, torch.tensor(ends, dtype=torch.int32, device=device))
    assert out[0].dtype == dtype and out[1].dtype == torch.float32
    for row, (begin, end) in enumerate(itertools.pairwise(ends)):
        want_v, want_s = _merge_states_reference(v[None, begin:end], s[None, begin:end])
        assert_close(out[0][row : row + 1], want_v)
        assert_close(out[1][row : row + 1], want_s, tolerance=(1e-6, 2e-6))
    with pytest.raises(ValueError, match="v and s: shapes"):
        variable_length_merge_states(v, s[:3], torch.tensor(ends, device=device))
