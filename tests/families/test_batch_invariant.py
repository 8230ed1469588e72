"""Batch invariance: with the switch on, the bits of a row are those that it has alone."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch

import fi_core
from families.invariance import OTHERS, Requests, Rows, bits, row_cases
from families.invariant_products import PRODUCTS
from families.invariant_requests import REQUESTS as BATCHED
from families.invariant_requests import attended, decode, prefill
from families.invariant_wrappers import WRAPPERS
from families.test_descriptions import DESCRIBED
from fi_core.runtime.errors import UnsupportedError

ROWS = row_cases(DESCRIBED)
# Cases whose kernels for the CPU follow the batch, too.
FOLLOW_THE_BATCH = (
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_context_with_kv_cache",
    "single_prefill_with_kv_cache",
    "BatchAttention",
    "PODWithPagedKVCacheWrapper, prompt",
    "BatchPODWithPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "mm_bf16, many tokens",
    "grouped_mm_bf16",
)
REQUESTS = [*BATCHED, *WRAPPERS, *PRODUCTS]
# Described functions that no case judges, and why.
UNJUDGED = {
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
        ("group_deepgemm_fp8_nt_groupwise", "grouped_mm_fp8", "grouped_mm_fp4", "grouped_mm_mxfp8"),
        "the op and the groups of group_gemm_fp8_nt_groupwise or grouped_mm_bf16",
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


def nudged(x: torch.Tensor) -> torch.Tensor:
    """The same values but for the last bit of one, as a sum in another order has them."""
    changed = x.clone(memory_format=torch.contiguous_format)
    bits(changed)[:1] ^= 1
    return changed


@pytest.mark.parametrize("case", ROWS, ids=lambda case: f"{case.described.name}-{case.axis}")
def test_the_judge_finds_a_bit_of_rows_that_follows_the_batch(case: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = Rows.outputs

    def planted(self: Rows, arguments: Any, index: torch.Tensor) -> Any:
        found = outputs(self, arguments, index)
        (x, dim), rest = found[-1], found[:-1]
        rows = x.unbind(dim) if len(index) > 1 else ()
        return [*rest, (torch.stack([nudged(row) for row in rows], dim), dim)] if rows else found

    monkeypatch.setattr(Rows, "outputs", planted)
    with fi_core.batch_invariant():
        assert case.differences(1, "cpu", batches=1) != []


@pytest.mark.parametrize("case", REQUESTS, ids=lambda case: case.name)
def test_the_judge_finds_a_bit_of_requests_that_follows_the_batch(case: Requests) -> None:
    def planted(requests: Sequence[Any], rng: Random, device: str) -> list[list[torch.Tensor]]:
        found = case.call(requests, rng, device)
        return found if len(requests) == 1 else [[*own[:-1], nudged(own[-1])] for own in found]

    with fi_core.batch_invariant():
        assert Requests(case.name, case.draw, planted).differences(1, "cpu", batches=1) != []


@pytest.mark.parametrize("name", FOLLOW_THE_BATCH)
def test_the_judge_finds_what_follows_the_batch_outside_of_a_block(name: str) -> None:
    (case,) = (case for case in REQUESTS if case.name == name)
    assert case.differences(1, "cpu") != []


def test_the_judge_finds_a_split_by_the_batch() -> None:
    """Planted: a request is split by the number of its neighbours."""

    def planted(requests: Sequence[Any], rng: Random, device: str) -> list[list[torch.Tensor]]:
        page_size = 1 if len(requests) == 1 else 16
        return decode(requests, rng, device, fixed_split_size=256 // page_size)

    def drawn(rng: Random, device: str) -> Any:
        return attended(rng, device, 1)

    with fi_core.batch_invariant():
        assert Requests("planted", drawn, planted).differences(1, "cpu") != []


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [4, 8])
def test_chunks_of_long_requests_are_merged_alike_by_all_who_may_end_them(kv_heads: int) -> None:
    """Alone all warps of a CTA merge, in a batch mostly the warp behind those that multiply. LSEs show each bit."""
    rng, page, heads, dim, batch = Random(7), 16, 32, 128, 80
    lengths = [rng.randint(3000, 30000) if n < 4 else rng.randint(2000, 9000) for n in range(batch)]
    pages = [-(-length // page) for length in lengths]
    first = [sum(pages[:n]) for n in range(batch + 1)]
    torch.manual_seed(1)
    cache = torch.empty(first[-1], 2, page, kv_heads, dim, device="cuda", dtype=torch.bfloat16).normal_()
    q = torch.randn(batch, heads, dim, device="cuda").bfloat16()
    wrapper = fi_core.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 30, dtype=torch.uint8, device="cuda"))

    def run(a: int, b: int) -> tuple[torch.Tensor, torch.Tensor]:
        indptr = torch.tensor([x - first[a] for x in first[a : b + 1]], dtype=torch.int32, device="cuda")
        last = torch.tensor([(n - 1) % page + 1 for n in lengths[a:b]], dtype=torch.int32, device="cuda")
        ids = torch.arange(first[a], first[b], dtype=torch.int32, device="cuda")
        wrapper.plan(indptr, ids, last, heads, kv_heads, dim, page, q_data_type=torch.bfloat16)
        return wrapper.run(q[a:b], cache, return_lse=True)

    with fi_core.batch_invariant():
        out, lse = run(0, batch)
        for n in range(batch):
            alone, lse_alone = run(n, n + 1)
            assert torch.equal(lse_alone[0], lse[n]) and torch.equal(alone[0], out[n]), (n, lengths[n])


def test_biases_that_count_rows_of_a_call_are_refused() -> None:
    with fi_core.batch_invariant(), pytest.raises(UnsupportedError, match="no ALIBI inside of"):
        prefill([attended(Random(1), "cpu", 9)], Random(1), "cpu", pos_encoding_mode="ALIBI")


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
