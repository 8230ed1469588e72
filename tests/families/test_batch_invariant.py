"""Batch invariance: with the switch on, the bits of a row are those that it has alone."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch

import fi_core
from families import invariant_requests
from families.invariance import OTHERS, Requests, Rows, row_cases
from families.invariant_requests import REQUESTS, attended, decode
from families.test_descriptions import DESCRIBED

ROWS = row_cases(DESCRIBED)
# Described functions that no case judges, and why.
UNJUDGED = {
    **dict.fromkeys(
        ("BatchAttention", "BatchPODWithPagedKVCacheWrapper", "PODWithPagedKVCacheWrapper",
         "BatchPrefillWithCausalBidirectionalRangesWrapper", "BlockSparseAttentionWrapper",
         "VariableBlockSparseAttentionWrapper", "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
         "BatchPrefillWithSharedPrefixPagedKVCacheWrapper", "MultiLevelCascadeAttentionWrapper"),
        "plans the wrappers of decode and prefill that are judged",
    ),
    **dict.fromkeys(("single_decode_with_kv_cache", "single_prefill_with_kv_cache"), "one request"),
    **dict.fromkeys(
        ("append_paged_kv_cache", "append_paged_mla_kv_cache", "nvfp4_quantize_append_paged_kv_cache",
         "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping", "nvfp4_quantize_append_paged_mla_kv_cache",
         "append_sparse_mla_kv_cache", "block_scale_interleave", "packbits", "segment_packbits",
         "get_batch_indices_positions", "get_seq_lens"),
        "copies or quantizes elements: nothing is summed over rows",
    ),
    **dict.fromkeys(
        ("apply_rope", "apply_rope_inplace", "apply_llama31_rope", "apply_llama31_rope_inplace"),
        "rotates as apply_rope_pos_ids does",
    ),
    **dict.fromkeys(
        ("group_gemm_fp8_nt_groupwise", "group_deepgemm_fp8_nt_groupwise", "grouped_mm_bf16", "grouped_mm_fp8",
         "grouped_mm_fp4", "grouped_mm_mxfp8"),
        "the op of SegmentGEMMWrapper",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ROWS, ids=lambda case: f"{case.described.name}-{case.axis}")
def test_rows_are_the_same_in_any_batch(case: Rows, device: str) -> None:
    with fi_core.batch_invariant():
        assert case.differences(1, device) == []


@pytest.mark.parametrize("case", REQUESTS, ids=lambda case: case.name)
def test_requests_are_the_same_in_any_batch_page_size_and_chunks(case: Requests, device: str) -> None:
    with fi_core.batch_invariant():
        assert case.differences(1, device) == []


def test_the_judge_finds_a_split_by_the_batch() -> None:
    """Planted: a request is split by the number of its neighbours. Without the switch, decode does likewise."""

    def planted(requests: Sequence[Any], rng: Random, device: str) -> list[list[torch.Tensor]]:
        page_size = 1 if len(requests) == 1 else 16
        return decode(requests, rng, device, fixed_split_size=256 // page_size)

    def drawn(rng: Random, device: str) -> Any:
        return attended(rng, device, 1)

    original = invariant_requests.paged
    with fi_core.batch_invariant():
        assert Requests("planted", drawn, planted).differences(1, "cpu") != []
    assert invariant_requests.paged is original
    assert Requests("decode", drawn, decode).differences(1, "cpu") != []


def test_every_described_function_is_judged() -> None:
    judged = {case.described.name for case in ROWS} | {case.name.partition(",")[0] for case in REQUESTS}
    given = {name for name, _ in OTHERS} | UNJUDGED.keys()
    assert {found.name for found in DESCRIBED} - judged - given == set()


def test_a_plan_from_outside_is_refused_inside() -> None:
    rng, device = Random(3), "cpu"
    request = attended(rng, device, 1)
    with fi_core.batch_invariant():
        decode([request], rng, device)
    wrapper = fi_core.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    indptr, indices, last = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2], [0, 1], [4]))
    cache = torch.randn(2, 2, 16, 2, 64).bfloat16()
    q = torch.randn(1, 8, 64).bfloat16()
    wrapper.plan(indptr, indices, last, 8, 2, 64, 16, q_data_type="bfloat16")
    outside = wrapper.run(q, cache)
    with fi_core.batch_invariant():
        with pytest.raises(ValueError, match=r"inside of fi_core\.batch_invariant\(\) a plan that was made inside"):
            wrapper.run(q, cache)
        wrapper.plan(indptr, indices, last, 8, 2, 64, 16, q_data_type="bfloat16")
        inside = wrapper.run(q, cache)
    assert torch.equal(wrapper.run(q, cache), inside), "a plan from inside runs outside, too"
    assert torch.allclose(inside, outside, atol=1e-2)


def test_a_draw_needs_a_seed_of_each_row() -> None:
    logits = torch.randn(3, 50)
    seeds = torch.arange(3)
    with fi_core.batch_invariant():
        with pytest.raises(ValueError, match=r"seed and offset: inside of .* tensors \[3\] are required"):
            fi_core.sampling.sampling_from_logits(logits)
        both = fi_core.sampling.sampling_from_logits(logits, seed=seeds, offset=seeds)
        alone = fi_core.sampling.sampling_from_logits(logits[2:], seed=2, offset=2)
    assert both[2] == alone[0]
