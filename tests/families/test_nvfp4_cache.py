"""Attention over NVFP4 keys and values against fp64, by every implementation and entry point; 16-bit types mixed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fi_core
from families.attention_reference import attention
from families.harness import assert_close, impls, rand, using
from families.nvfp4_cache import K_SCALE, V_SCALE, batch
from families.paged import split_tables
from fi_core import decode, prefill
from fi_core.cascade import MultiLevelCascadeAttentionWrapper
from fi_core.pod import BatchPODWithPagedKVCacheWrapper, PODWithPagedKVCacheWrapper
from fi_core.runtime.errors import UnsupportedError

BF16, F16, U8 = torch.bfloat16, torch.float16, torch.uint8
LENGTHS = [0, 1, 16, 63, 65, 300]
SCALES = {"k_scale": K_SCALE, "v_scale": V_SCALE}


def workspace(device: str) -> torch.Tensor:
    return torch.empty(32 << 20, dtype=U8, device=device)


def decoded(x: Any, layout: str, plan: dict[str, Any] | None = None, **run: Any) -> Any:
    wrapper = decode.BatchDecodeWithPagedKVCacheWrapper(workspace(x.q.device), layout, use_tensor_cores=True)
    heads = x.q.shape[1], x.cache[0].shape[2 if layout == "NHD" else 1]
    types = {"q_data_type": x.q.dtype, "kv_data_type": U8}
    wrapper.plan(
        x.indptr, x.indices, x.last_page_len, *heads, x.q.shape[2], x.page_size, q_len_per_req=x.qo_lens[0], **types,
        **(plan or {}),
    )  # fmt: skip
    return wrapper.run(x.q, x.cache, kv_cache_sf=x.scales, return_lse=True, **SCALES, **run)


def check(got: Any, want: Any) -> None:
    for x, y in zip(got, want):
        assert_close(x, y, tolerance=(2e-2, 2e-2))


DECODE = [
    ({}, {}),
    ({"layout": "HND", "dtype": F16}, {}),
    ({"dim": 64, "page_size": 1, "heads": (4, 4)}, {}),
    ({"dim": 256, "page_size": 64, "heads": (16, 1), "layout": "HND"}, {}),
    ({"dim": 96, "padding": 3}, {}),
    ({"dim": 80, "dim_vo": 48}, {}),
    ({"page_size": 5, "padding": 16}, {"window_left": 70}),
    ({}, {"logits_soft_cap": 8.0, "sm_scale": 0.2}),
    ({"qo_lens": [4] * 5, "lengths": [*LENGTHS[2:], 4]}, {}),
    ({"heads": (16, 2), "lengths": [3000, 5, 1200], "layout": "HND", "page_size": 4}, {"window_left": 900}),
    ({"heads": (32, 2), "lengths": [3000, 5, 1200]}, {"logits_soft_cap": 8.0}),
    ({"dim": 64, "heads": (16, 2), "lengths": [3000, 5, 1200]}, {}),
    ({"dim": 64, "page_size": 16, "layout": "HND", "lengths": [3000, 5, 1200]}, {"window_left": 900}),
    ({"dim": 256, "heads": (16, 2), "lengths": [700, 5]}, {}),
    ({"heads": (32, 8), "lengths": [*LENGTHS, 90, 400] * 2}, {"logits_soft_cap": 8.0}),
    ({"heads": (32, 8), "lengths": [*LENGTHS, 90, 2000] * 2, "layout": "HND", "page_size": 64}, {"window_left": 77}),
    ({"heads": (16, 2), "lengths": [*LENGTHS, 90, 1000] * 4, "page_size": 4, "padding": 16}, {}),
    ({}, {"pos_encoding_mode": "ALIBI"}),
    ({"page_size": 16}, {"pos_encoding_mode": "ROPE_LLAMA"}),
]


@pytest.mark.parametrize(("shape", "options"), DECODE)
def test_decode(shape: dict[str, Any], options: dict[str, Any], device: str) -> None:
    given = {"lengths": LENGTHS} | shape
    x = batch(**given, device=device)
    want = x.expected(causal=True, **options)
    ran = []
    for impl in impls("batch_decode", device):
        with using("batch_decode", impl):
            try:
                got = decoded(x, given.get("layout", "NHD"), options)
            except UnsupportedError:
                continue
        ran.append(impl)
        check(got, want)
    assert ran


def test_decode_scales(device: str) -> None:
    """Sinks, factors on the device, scales as e4m3, and caches in one tensor."""
    x = batch(LENGTHS, device=device)
    sinks = rand(8, dtype=torch.float32, device=device)
    k, v = (torch.tensor([s], device=device) for s in (K_SCALE, V_SCALE))
    wrapper = decode.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(
        x.indptr, x.indices, x.last_page_len, 8, 2, 128, 16, q_data_type=BF16, kv_data_type=U8, o_data_type=F16
    )
    both, scales = (torch.stack(parts, 1) for parts in (x.cache, x.scales))
    e4m3 = scales.view(torch.float8_e4m3fn)
    got = wrapper.run(x.q, both, kv_cache_sf=e4m3, k_scale=k, v_scale=v, sinks=sinks, return_lse=True)
    assert got[0].dtype is F16
    check(got, x.expected(sinks=sinks))


PREFILL = [
    ({}, {"causal": True}),
    ({"layout": "HND", "dtype": F16, "page_size": 1}, {}),
    ({"dim": 64, "heads": (4, 4)}, {"causal": True, "window_left": 30}),
    ({"dim": 192, "dim_vo": 128, "page_size": 64}, {"causal": True}),
    ({"dim": 256, "heads": (4, 1)}, {"logits_soft_cap": 9.0}),
    ({"dim": 96, "padding": 3}, {"causal": True}),
    ({"dim": 80, "dim_vo": 48}, {}),
    ({}, {"pos_encoding_mode": "ROPE_LLAMA", "causal": True}),
]


@pytest.mark.parametrize(("shape", "options"), PREFILL)
def test_prefill(shape: dict[str, Any], options: dict[str, Any], device: str) -> None:
    x = batch([40, 0, 7, 300, 65], [40, 3, 7, 9, 65], **shape, device=device)
    layout, dims = shape.get("layout", "NHD"), (x.q.shape[2], x.v[0].shape[2])
    heads = shape.get("heads", (8, 2))
    want = x.expected(**options)
    types = {"q_data_type": x.q.dtype, "kv_data_type": U8}
    for impl in impls("batch_prefill", device):
        with using("batch_prefill", impl):
            try:
                paged = prefill.BatchPrefillWithPagedKVCacheWrapper(workspace(device), layout)
                paged.plan(
                    x.qo_indptr, x.indptr, x.indices, x.last_page_len, *heads, dims[0], x.page_size, dims[1], **options,
                    **types,
                )  # fmt: skip
                got = paged.run(x.q, x.cache, kv_cache_sf=x.scales, return_lse=True, **SCALES)
            except UnsupportedError:
                assert impl == "wgmma_sm90"
                continue
            check(got, want)
            ragged = prefill.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), layout)
            ragged.plan(x.qo_indptr, x.offsets(x.lengths), *heads, *dims, **options, **types)
            check(ragged.run(x.q, *x.ragged, kv_cache_sf=x.ragged_scales, return_lse=True, **SCALES), want)


def test_prefill_masks(device: str) -> None:
    x = batch([40, 7], [5, 7], device=device)
    masks = [rand(q, kv, dtype=torch.float32, device="cpu", seed=q) > -0.5 for q, kv in ((5, 40), (7, 7))]
    wrapper = prefill.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(
        x.qo_indptr, x.indptr, x.indices, x.last_page_len, 8, 2, 128, 16, q_data_type=BF16, kv_data_type=U8,
        custom_mask=torch.cat([m.flatten() for m in masks]),
    )  # fmt: skip
    check(wrapper.run(x.q, x.cache, kv_cache_sf=x.scales, return_lse=True, **SCALES), x.expected(masks))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_single_prefill(layout: str, device: str) -> None:
    x = batch([70], [20], layout=layout, device=device)
    given = {"kv_layout": layout, "kv_cache_sf": x.ragged_scales, "return_lse": True, **SCALES}
    check(prefill.single_prefill_with_kv_cache(x.q, *x.ragged, causal=True, **given), x.expected(causal=True))
    mask = rand(20, 70, dtype=torch.float32, device=device) > -0.3
    masked = prefill.single_prefill_with_kv_cache(x.q, *x.ragged, custom_mask=mask, **given)
    check(masked, x.expected([mask]))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_block_tables(layout: str, device: str) -> None:
    """The interfaces of TensorRT-LLM and XQA, which take whole factors."""
    factors = 128**-0.5 * K_SCALE, V_SCALE
    for qo_len in (1, 3):
        x = batch([40, 5, 300], [qo_len] * 3, layout=layout, device=device)
        want = x.expected(causal=True)
        common = x.q, x.cache, workspace(device), x.block_tables(), x.seq_lens(), 300, *factors
        given = {"kv_layout": layout, "kv_cache_sf": x.scales, "q_len_per_req": qo_len}
        check(decode.trtllm_batch_decode_with_kv_cache(*common, return_lse=True, **given), want)
        check((decode.xqa_batch_decode_with_kv_cache(*common, **given),), want)
    out = torch.empty(3, 1, 3, 8, 128, dtype=BF16, device=device)
    fi_core.xqa(
        x.q.view(3, 1, 3, 8, 128), *x.cache, x.block_tables(), x.seq_lens().view(3, 1), out, workspace(device), None, 2,
        16, q_scale=K_SCALE, rcp_out_scale=V_SCALE, kv_layout=layout, q_seq_len=3, k_sf_cache=x.scales[0],
        v_sf_cache=x.scales[1],
    )  # fmt: skip
    check((out.view(9, 8, 128),), want)
    x = batch([40, 5, 300], [7, 5, 30], layout=layout, device=device)
    got = prefill.trtllm_batch_context_with_kv_cache(
        x.q, x.cache, workspace(device), x.block_tables(), x.seq_lens(), 30, 300, *factors, 3, x.qo_indptr,
        x.offsets(x.lengths), kv_layout=layout, kv_cache_sf=x.scales, return_lse=True,
    )  # fmt: skip
    check(got, x.expected(causal=True))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_keys_and_values_with_page_tables_of_their_own(layout: str, page_size: int, device: str) -> None:
    factors, tables = (128**-0.5 * K_SCALE, V_SCALE), {"kv_layout": layout, "uses_shared_paged_kv_idx": False}
    for qo_lens in ([1] * 3, [7, 5, 30]):
        x = batch([40, 5, 300], qo_lens, layout=layout, page_size=page_size, device=device)
        (cache, table), (scales, _) = (split_tables(both, x.block_tables()) for both in (x.cache, x.scales))
        given = {"kv_cache_sf": scales, "return_lse": True, **tables}
        if max(qo_lens) == 1:
            for impl in impls("batch_decode", device):
                if impl == "tma_sm90" and page_size % 4:
                    continue
                with using("batch_decode", impl):
                    got = decode.trtllm_batch_decode_with_kv_cache(
                        x.q, cache, workspace(device), table, x.seq_lens(), 300, *factors, **given
                    )
                check(got, x.expected())
        got = prefill.trtllm_batch_context_with_kv_cache(
            x.q, cache, workspace(device), table, x.seq_lens(), 30, 300, *factors, 3, x.qo_indptr,
            x.offsets(x.lengths), **given,
        )  # fmt: skip
        check(got, x.expected(causal=True))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_appended_keys_are_attended_to(layout: str, device: str) -> None:
    x = batch([40, 7], layout=layout, device=device)
    cache, scales = (tuple(torch.full_like(part, 0x7F) for part in both) for both in (x.cache, x.scales))
    k, v = (torch.cat(parts).to(BF16).to(device) for parts in (x.k, x.v))
    owner, position = fi_core.get_batch_indices_positions(x.offsets(x.lengths), x.seq_lens(), 47)
    fi_core.nvfp4_quantize_append_paged_kv_cache(
        k * K_SCALE, v * V_SCALE, owner, position, cache, scales, x.indices, x.indptr, x.last_page_len, K_SCALE,
        V_SCALE, layout,
    )  # fmt: skip
    x.cache, x.scales = cache, scales
    got, _ = decoded(x, layout)
    want, _ = x.expected()
    error = (got.double().cpu() - want).norm() / want.norm()  # of a second rounding to four bits
    assert error < 0.2


def test_mixed_batches_and_shared_prefixes(device: str) -> None:
    x = batch([37, 100, 40, 30], [1, 1, 5, 30], device=device)
    want, _ = x.expected(causal=True)
    bounds, pages, types = x.indptr, x.last_page_len, {"q_data_type": BF16, "kv_data_type": U8}
    decode_half = bounds[:3], x.indices[: bounds[2]], pages[:2]
    prompts = bounds[2:] - bounds[2], x.indices[bounds[2] :], pages[2:]
    given = {"kv_cache_sf_p": x.scales, "kv_cache_sf_d": x.scales, "causal_p": True, **SCALES}
    both = BatchPODWithPagedKVCacheWrapper(workspace(device))
    both.plan(x.offsets(x.qo_lens[2:]), *prompts, x.offsets([1, 1]), *decode_half, 8, 2, 128, 16, **types)
    found = both.run(x.q[2:], x.cache, x.q[:2], x.cache, **given)
    assert_close(torch.cat(found[::-1]), want, tolerance=(2e-2, 2e-2))

    one = PODWithPagedKVCacheWrapper(workspace(device))
    one.plan(*decode_half, 8, 2, 128, 16, **types)
    k, v, *scales = (part[-30:] for part in (*x.ragged, *x.ragged_scales))
    found = one.run(x.q[-30:], k, v, x.q[:2], x.cache, **{**given, "kv_cache_sf_p": tuple(scales)})
    assert_close(torch.cat(found[::-1]), torch.cat((want[:2], want[-30:])), tolerance=(2e-2, 2e-2))

    x = batch([32, 40, 7], device=device)
    shared = MultiLevelCascadeAttentionWrapper(2, workspace(device))
    bounds, pages = x.indptr, x.last_page_len
    shared.plan(
        [x.offsets([2]), x.offsets([1, 1])], [bounds[:2], bounds[1:] - bounds[1]],
        [x.indices[: bounds[1]], x.indices[bounds[1] :]], [pages[:1], pages[1:]], 8, 2, 128, 16, **types,
    )  # fmt: skip
    got = shared.run(x.q[1:], x.cache, kv_cache_sf=x.scales, **SCALES)
    for b in (1, 2):
        k, v = (torch.cat((part[0], part[b])) for part in (x.k, x.v))
        expected = attention(x.q[b : b + 1], k, v, k_scale=K_SCALE, v_scale=V_SCALE)[0]
        assert_close(got[b - 1 : b], expected, tolerance=(2e-2, 2e-2))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"kv_cache_sf": None}, ValueError, "kv_cache_sf: the scales of paged_kv_cache are required"),
        ({"kv_cache_sf": 3}, TypeError, "kv_cache_sf: a tuple .* is required; got a int"),
        ({"kv_cache_sf": (torch.zeros(1, 16, 2, 8),) * 2}, TypeError, r"kv_cache_sf\[0\] must be"),
        (
            {"kv_cache_sf": (torch.zeros(9, 16, 2, 4, dtype=U8),) * 2},
            ValueError,
            r"kv_cache_sf\[0\] must have the shape",
        ),
    ],
)
def test_refusals(change: dict[str, Any], error: type[Exception], words: str) -> None:
    x = batch([40, 7])
    wrapper = decode.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    wrapper.plan(x.indptr, x.indices, x.last_page_len, 8, 2, 128, 16, q_data_type=BF16, kv_data_type=U8)
    with pytest.raises(error, match=words):
        wrapper.run(**({"q": x.q, "paged_kv_cache": x.cache, "kv_cache_sf": x.scales} | change))


def test_scales_need_nvfp4() -> None:
    x = batch([40, 7])
    wide = tuple(torch.zeros(9, 16, 2, 128, dtype=BF16) for _ in range(2))
    wrapper = decode.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    wrapper.plan(x.indptr, x.indices, x.last_page_len, 8, 2, 128, 16, data_type=BF16, q_data_type=BF16)
    with pytest.raises(ValueError, match="kv_cache_sf: paged_kv_cache of uint8"):
        wrapper.run(x.q, wide, kv_cache_sf=x.scales)
    wrapper.plan(x.indptr, x.indices, x.last_page_len, 8, 2, 128, 16, q_data_type=torch.float32, kv_data_type=U8)
    with pytest.raises((TypeError, UnsupportedError), match=r"k must|kv"):
        wrapper.run(x.q.float(), x.cache, kv_cache_sf=x.scales)


@pytest.mark.parametrize(("q_type", "kv_type"), [(F16, BF16), (BF16, F16)])
@pytest.mark.parametrize("page_size", [1, 16])
def test_mixed_16_bits(q_type: torch.dtype, kv_type: torch.dtype, page_size: int, device: str) -> None:
    lengths = [5, 64, 200]
    counts = [-(-n // page_size) for n in lengths]
    indptr = torch.tensor([0, counts[0], counts[0] + counts[1], sum(counts)], dtype=torch.int32, device=device)
    last = torch.tensor([n - (c - 1) * page_size for n, c in zip(lengths, counts)], dtype=torch.int32, device=device)
    indices = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).int().to(device)
    cache = rand(sum(counts), 2, page_size, 2, 128, dtype=kv_type, device=device)
    for qo_len in (1, 5):
        q = rand(3 * qo_len, 8, 128, dtype=q_type, device=device)
        want = []
        for b, n in enumerate(lengths):
            rows = cache[indices[int(indptr[b]) : int(indptr[b + 1])].long()]
            k, v = (rows[:, i].flatten(0, 1)[:n] for i in range(2))
            want.append(attention(q[b * qo_len : (b + 1) * qo_len], k, v, causal=True))
        expected = tuple(torch.cat(parts) for parts in zip(*want))
        shape, types = (8, 2, 128, page_size), {"q_data_type": q_type, "kv_data_type": kv_type}
        for impl in impls("batch_decode", device):
            with using("batch_decode", impl):
                wrapper = decode.BatchDecodeWithPagedKVCacheWrapper(workspace(device), use_tensor_cores=True)
                try:
                    wrapper.plan(indptr, indices, last, *shape, q_len_per_req=qo_len, **types)
                    got = wrapper.run(q, cache, return_lse=True)
                except UnsupportedError:
                    continue
                assert got[0].dtype is q_type
                check(got, expected)
        rows = torch.arange(4, dtype=torch.int32, device=device) * qo_len
        for impl in impls("batch_prefill", device):
            if impl == "wgmma_sm90":
                continue
            with using("batch_prefill", impl):
                whole = prefill.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
                whole.plan(rows, indptr, indices, last, *shape, causal=True, **types)
                check(whole.run(q, cache, return_lse=True), expected)
    single = prefill.single_prefill_with_kv_cache(q[:5], k, v, causal=True, return_lse=True)
    check(single, attention(q[:5], k, v, causal=True))
    one = decode.single_decode_with_kv_cache(q[0], k, v)
    check((one,), (attention(q[:1], k, v)[0][0],))


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 16])
def test_tables_that_lie(page_size: int) -> None:
    """Page ids outside of the cache read some page, or none: no illegal access."""
    x = batch([300, 40], page_size=page_size, device="cuda")
    x.indices[::3] = torch.tensor(2**31 - 1, dtype=torch.int32)
    x.indices[1::5] = -7
    for impl in impls("batch_decode", "cuda"):
        with using("batch_decode", impl):
            if impl != "tma_sm90" or page_size % 4 == 0:
                decoded(x, "NHD")
    wrapper = prefill.BatchPrefillWithPagedKVCacheWrapper(workspace("cuda"))
    wrapper.plan(
        x.qo_indptr, x.indptr, x.indices, x.last_page_len, 8, 2, 128, page_size, q_data_type=BF16, kv_data_type=U8
    )
    wrapper.run(x.q, x.cache, kv_cache_sf=x.scales)
    torch.cuda.synchronize()


def test_mla_append_names_what_does_not_fit() -> None:
    rows, pages = {"append_ckv": (3, 64), "append_kpe": (3, 16)}, {"ckv_cache": (2, 4, 32), "kpe_cache": (2, 4, 16)}
    table = (torch.zeros(3, dtype=torch.int32), torch.arange(3).int(), torch.arange(2).int())
    given: dict[str, Any] = {
        **{name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in rows.items()},
        **{name: torch.zeros(shape, dtype=torch.uint8) for name, shape in pages.items()},
        "ckv_sf_cache": torch.zeros(2, 4, 4).to(torch.float8_e4m3fn),
        "batch_indices": table[0], "positions": table[1], "kv_indices": table[2],
        "kv_indptr": torch.tensor([0, 2], dtype=torch.int32), "kv_last_page_len": torch.tensor([3], dtype=torch.int32),
        "ckv_scale": 0.1, "kpe_scale": 0.1,
    }  # fmt: skip
    given["kpe_cache"] = given["kpe_cache"].view(torch.float8_e4m3fn)
    fi_core.nvfp4_quantize_append_paged_mla_kv_cache(**given)
    for name, value, words in (
        ("kpe_cache", given["kpe_cache"].view(torch.uint8), "kpe_cache must be float8_e4m3fn; got uint8"),
        ("ckv_scale", 0.0, "ckv_scale: a positive, finite factor is required; got 0.0"),
        ("kpe_scale", float("inf"), "kpe_scale: a positive, finite factor is required; got inf"),
        ("append_kpe", given["append_kpe"][:, :8], "append_kpe must have a last dimension that is a multiple of 16"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            fi_core.nvfp4_quantize_append_paged_mla_kv_cache(**{**given, name: value})
