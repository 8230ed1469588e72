"""Batch prefill against fp64: shapes, layouts, types, masks and options, on every device and backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from families.attention_reference import attention
from families.engine import engine
from families.harness import FP8, TOLERANCE, assert_close, rand
from families.prefill_batch import HALVES, batch, check, planned, workspace
from fi_core.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
)

# (qo_len, kv_len): self attention, append, no queries, no keys, more queries than keys, one row, more than a tile
MIX = [(5, 5), (0, 9), (17, 90), (3, 0), (12, 4), (1, 130), (70, 70)]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("heads", "dims"),
    [
        ((4, 2), (64, 64)),
        ((8, 1), (128, 128)),
        ((3, 3), (192, 128)),
        ((2, 2), (256, 256)),
        ((14, 2), (80, 80)),  # a group that does not divide the rows of a tile
        ((5, 1), (96, 72)),
        ((160, 1), (64, 64)),  # more heads a group than a tile has rows
        ((2, 1), (264, 512)),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_shapes(heads: tuple[int, int], dims: tuple[int, int], causal: bool, dtype: torch.dtype, device: str) -> None:
    check(batch(MIX, heads=heads, dims=dims, dtype=dtype, device=device), causal=causal)


@pytest.mark.parametrize("page_size", [1, 2, 5, 16, 64, 128])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", ["tuple", "fused", "strided"])
def test_pages(page_size: int, kv_layout: str, form: str, device: str) -> None:
    """NaN in every slot and page without a token is not read."""
    b = batch([(40, 300), (9, 64), (2, 0), (130, 131)], dims=(128, 128), page_size=page_size, kv_layout=kv_layout,
              form=form, device=device)  # fmt: skip
    check(b, causal=True)


@pytest.mark.parametrize("lens", [(127, 127), (128, 128), (129, 129), (128, 1000), (1000, 1000), (300, 17), (1, 1)])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_lengths_around_tiles(lens: tuple[int, int], dims: tuple[int, int], device: str) -> None:
    check(batch([lens], heads=(2, 1), dims=dims, dtype=torch.bfloat16, device=device), causal=True)
    check(batch([lens], heads=(2, 2), dims=dims, dtype=torch.bfloat16, device=device), window_left=100)


# Each option, with the values that must make a difference.
OPTIONS: list[dict[str, Any]] = [
    {"sm_scale": 0.3},
    {"logits_soft_cap": 1.5},
    {"logits_soft_cap": 3.0, "causal": True, "window_left": 40},
    {"window_left": 0},
    {"window_left": 13, "causal": True},
    {"pos_encoding_mode": "ALIBI", "causal": True},
    {"pos_encoding_mode": "ROPE_LLAMA"},
    {"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 4.0, "rope_theta": 500.0, "causal": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()))
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)])
def test_options(options: dict[str, Any], dims: tuple[int, int], device: str) -> None:
    b = batch([(37, 70), (5, 200), (1, 30)], heads=(6, 3), dims=dims, device=device)
    rope = options.get("pos_encoding_mode") == "ROPE_LLAMA"
    check(b, lse_tolerance=(2e-2, 2e-2) if rope else (2e-4, 2e-4), **options)
    differences = [(x - y).nan_to_num(0.0).abs().max() for x, y in zip(b.expected(**options), b.expected())]
    assert max(differences) > 0.1, "the option would not be missed"


def test_scales(device: str) -> None:
    b = batch([(37, 70), (5, 200)], heads=(6, 3), device=device)
    check(
        b, run={"q_scale": 1.5, "k_scale": 0.5, "v_scale": 0.3}, expect={"k_scale": 0.75, "v_scale": 0.3}, causal=True
    )
    scales = {
        name: torch.tensor([x], device=device) for name, x in (("q_scale", 1.5), ("k_scale", 2.0), ("v_scale", 0.3))
    }
    check(b, run=scales, expect={"k_scale": 3.0, "v_scale": 0.3}, refused_by="fa3")


def masks_of(lens: list[tuple[int, int]], device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    masks = [torch.rand(qo, kv, generator=generator) < 0.4 for qo, kv in lens]
    for mask in masks:
        mask[len(mask) // 2 :][:1] = False  # a row that sees nothing
    return [mask.to(device) for mask in masks]


@pytest.mark.parametrize("lens", [MIX, [(130, 257), (1, 3), (7, 5)]])
def test_custom_masks(lens: list[tuple[int, int]], device: str) -> None:
    """A custom mask replaces causal; the window still applies."""
    b = batch(lens, device=device)
    masks = masks_of(lens, device)
    check(b, masks=masks)
    check(b, masks=masks, window_left=9)
    want, want_lse = b.expected(masks)
    bits = [torch.nn.functional.pad(m.flatten(), (0, -m.numel() % 8)).view(-1, 8) for m in masks]
    packed = torch.cat([(x.int() << torch.arange(8, device=device)).sum(-1).to(torch.uint8) for x in bits])
    flat = torch.cat([m.flatten() for m in masks])
    for w in planned(b, custom_mask=~flat, packed_custom_mask=packed, causal=True):  # packed wins
        out, lse = w.run_return_lse(b.q, b.cache)
        assert_close(out, want)
        assert_close(lse, want_lse, tolerance=(1e-4, 1e-4))
        w.plan(*b.paged_plan(), **b.types())
        assert engine(w).custom_mask_buf is None, "a plan without a mask forgets it"
        assert_close(w.run(b.q, b.cache), b.expected()[0])


@pytest.mark.parametrize("lens", [[(20, 29), (13, 13)]])
def test_items(lens: list[tuple[int, int]], device: str) -> None:
    """Multi-item scoring: prefixes of 12 and 2 tokens, items of 3, 4, 5 and of 7, 1 tokens."""
    b = batch(lens, device=device)
    positions = [[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 0, 0], [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 0]]
    prefixes, width = [12, 2], 20
    table = torch.tensor([p + [0] * (width - len(p)) for p in positions], dtype=torch.uint16, device=device).flatten()
    masks = []
    for (qo, kv), prefix, where in zip(lens, prefixes, positions):
        mask = torch.zeros(qo, kv, dtype=torch.bool)
        for i in range(qo):
            p = kv - qo + i
            for j in range(p + 1):
                mask[i, j] = p < prefix or j < prefix or p < j + where[p - prefix]
        masks.append(mask)
    for window in (-1, 6):
        want, want_lse = b.expected(masks, window_left=window)
        for w in planned(
            b, window_left=window, prefix_len_ptr=torch.tensor(prefixes, dtype=torch.uint32, device=device),
            token_pos_in_items_ptr=table[:31], token_pos_in_items_len=width,  # without zeros at the end
            max_item_len_ptr=torch.tensor(7, dtype=torch.uint16, device=device),
        ):  # fmt: skip
            out, lse = w.run_return_lse(b.q, b.cache)
            assert_close(out, want)
            assert_close(lse, want_lse, tolerance=(1e-4, 1e-4))


def test_items_with_a_soft_cap_on_fa3(device: str) -> None:
    """The name stands for whatever kernels have masks of items. A prefix of 4 tokens, items of 1, 1 and 0 more."""
    b = batch([(5, 9)], device=device)
    prefix, where = 4, [0, 1, 0, 1, 0]
    mask = torch.tensor([[j <= p and (j < prefix or p < j + where[p - prefix]) for j in range(9)] for p in range(4, 9)])
    want, _ = b.expected([mask], logits_soft_cap=2.0)
    for backend in ("auto", "fa2", "fa3"):
        w = BatchPrefillWithPagedKVCacheWrapper(workspace(device), backend=backend)
        w.plan(
            *b.paged_plan(), **b.types(), logits_soft_cap=2.0, token_pos_in_items_len=5,
            prefix_len_ptr=torch.tensor([prefix], dtype=torch.uint32, device=device),
            token_pos_in_items_ptr=torch.tensor(where, dtype=torch.uint16, device=device),
        )  # fmt: skip
        assert_close(w.run(b.q, b.cache), want)


def test_one_prefix_for_all_requests(device: str) -> None:
    b = batch([(6, 9), (8, 8)], device=device)
    own = torch.tensor([0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6], dtype=torch.uint16, device=device)
    one, each = (torch.tensor(x, dtype=torch.int32, device=device) for x in (2, [2, 2]))
    outs = []
    for prefix in (one, each):
        w = BatchPrefillWithPagedKVCacheWrapper(workspace(device))
        w.plan(
            *b.paged_plan(), **b.types(), prefix_len_ptr=prefix, token_pos_in_items_ptr=own, token_pos_in_items_len=8
        )
        outs.append(w.run(b.q, b.cache))
    assert torch.equal(*outs)
    with pytest.raises(ValueError, match="prefix_len_ptr: one element, or 2"):
        w.plan(*b.paged_plan(), prefix_len_ptr=each.repeat(2), token_pos_in_items_ptr=own, token_pos_in_items_len=8)


def test_a_mask_of_any_shape(device: str) -> None:
    b = batch([(6, 9), (8, 8)], device=device)
    masks = masks_of([(6, 9), (8, 8)], device)
    flat = torch.cat([m.flatten() for m in masks])
    w = BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    w.plan(*b.paged_plan(), **b.types(), custom_mask=flat.view(2, -1, 59))
    assert_close(w.run(b.q, b.cache), b.expected(masks)[0])
    out = single_prefill_with_kv_cache(b.q[:6], b.k[0], b.v[0], custom_mask=masks[0].flatten())
    assert_close(out, attention(b.q[:6], b.k[0], b.v[0], custom_mask=masks[0])[0])


@pytest.mark.parametrize("kv_dtype", FP8)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("dims", "page_size"), [((64, 64), 16), ((128, 128), 1), ((192, 128), 3), ((256, 256), 16)])
def test_fp8_keys(
    dims: tuple[int, int], page_size: int, dtype: torch.dtype, kv_dtype: torch.dtype, device: str
) -> None:
    """The output may have the other 16-bit type; scales may be tensors."""
    b = batch([(20, 70), (3, 9), (200, 330)], dims=dims, dtype=dtype, kv_dtype=kv_dtype, page_size=page_size,
              device=device)  # fmt: skip
    check(b, causal=True, run={"k_scale": 1.3, "v_scale": 0.7}, expect={"k_scale": 1.3, "v_scale": 0.7})
    scales = {name: torch.tensor([x], device=device) for name, x in (("k_scale", 1.3), ("v_scale", 0.7))}
    (other,) = {*HALVES} - {dtype}
    tolerance = TOLERANCE[torch.bfloat16]  # that of the probabilities
    check(b, run=scales, expect={"k_scale": 1.3, "v_scale": 0.7}, tolerance=tolerance, logits_soft_cap=3.0,
          o_data_type=other)  # fmt: skip


@pytest.mark.parametrize("power", [-60, 0, 60])
@pytest.mark.parametrize("dims", [(128, 128), (256, 256)])
def test_queries_of_any_size_over_fp8_keys(dims: tuple[int, int], power: int, device: str) -> None:
    """A Hopper kernel computes in half, and multiplies a row by a power of two before. Keys may be split."""
    b = batch([(20, 5000), (3, 9)], dims=dims, dtype=torch.bfloat16, kv_dtype=FP8[0], page_size=16, device=device)
    b.q.mul_(2.0**power)
    b.q[::5] = 0
    scale = {"k_scale": 2.0**-power}
    check(b, causal=True, run=scale, expect=scale)


def assert_fp8(w: Any, b: Any, out: torch.Tensor, lse: torch.Tensor, **options: Any) -> None:
    """Like assert_close; the Hopper kernel rounds each weight to e4m3, by 1 / 16 at most; outputs may be e4m3 too."""
    want, want_lse = b.expected(**options)
    assert_close(lse, want_lse, tolerance=(1e-3, 1e-3))
    if w.resolved_backend != "fa3":
        relative, absolute = TOLERANCE[out.dtype]
        assert_close(out, want, tolerance=(relative, max(absolute, 1e-3)))  # weights have 16 bits on tensor cores
        return
    most, _ = replace(b, v=[v.float().abs() for v in b.v]).expected(**options)
    error = (out.cpu().double() - want).abs()
    rounding, rms = {torch.float8_e4m3fn: (2**-4, 0.05), torch.float8_e5m2: (2**-3, 0.1)}.get(out.dtype, (2**-8, 0.03))
    assert not want.isnan().any() and (error <= most / 16 + want.abs() * rounding + 1e-3).all()
    if error.numel() > 10000:
        assert error.square().mean().sqrt() < rms * want.square().mean().sqrt(), "errors of weights are independent"


@pytest.mark.parametrize("o_dtype", [torch.bfloat16, None])
@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_fp8(dtype: torch.dtype, dims: tuple[int, int], o_dtype: torch.dtype | None, device: str) -> None:
    b = batch([(20, 70), (3, 9)], heads=(4, 2), dims=dims, dtype=dtype, device=device)
    scales = {
        name: rand(n, dtype=torch.float32, device=device, seed=i).abs() + 0.5
        for i, (name, n) in enumerate((("scale_q", 4), ("scale_k", 2), ("scale_v", 2)))
    }
    for w in planned(b, causal=True, o_data_type=o_dtype):
        assert w.run(b.q, b.cache).dtype == (o_dtype or dtype)
        assert_fp8(w, b, *w.run(b.q, b.cache, *scales.values(), return_lse=True), causal=True, **scales)
        numbers = w.run(b.q, b.cache, 0.5, 1.5, 2.0, return_lse=True)
        assert_fp8(w, b, *numbers, causal=True, k_scale=0.75, v_scale=2.0)
        one = {name: torch.tensor([x], device=device) for name, x in (("q_scale", 1.5), ("v_scale", 0.3))}
        assert_fp8(w, b, *w.run(b.q, b.cache, **one, return_lse=True), causal=True, k_scale=1.5, v_scale=0.3)


@pytest.mark.parametrize("options", [{"causal": True}, {"causal": True, "window_left": 100}, {"logits_soft_cap": 3.0}])
@pytest.mark.parametrize(
    ("heads", "dims", "page_size", "kv_layout"),
    [
        ((4, 1), (128, 128), 16, "NHD"),
        ((3, 3), (256, 256), 5, "HND"),
        ((7, 1), (64, 64), 64, "NHD"),
        ((4, 1), (192, 128), 1, "NHD"),
    ],
)
def test_fp8_tiles(
    options: dict[str, Any],
    heads: tuple[int, int],
    dims: tuple[int, int],
    page_size: int,
    kv_layout: str,
    device: str,
) -> None:
    """Lengths around the tile sizes of the kernels; NaN after every last key."""
    lens = [*MIX, (192, 192), (130, 385), (33, 200)]
    b = batch(lens, heads=heads, dims=dims, dtype=torch.float8_e4m3fn, page_size=page_size, kv_layout=kv_layout,
              device=device)  # fmt: skip
    for wrapper in (BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper):
        is_paged = wrapper is BatchPrefillWithPagedKVCacheWrapper
        keys = (b.cache,) if is_paged else b.ragged(kv_layout)
        for w in planned(b, wrapper, o_data_type=torch.float8_e4m3fn if is_paged else torch.float16, **options):
            out, lse = w.run(b.q, *keys, return_lse=True)
            assert_fp8(w, b, out, lse, **options)
            assert torch.equal(w.run(b.q, *keys), out), "the same with and without the LSE"


def test_long_fp8_sums_do_not_drift(device: str) -> None:
    """The mean of 8192 equal values is that value, although tensor cores sum fp8 products with few bits."""
    b = batch([(8, 8192)], heads=(2, 1), dims=(128, 128), dtype=torch.float8_e4m3fn, page_size=64, device=device)
    b.cache[1].fill_(1.5)
    for w in planned(b, o_data_type=torch.bfloat16):
        assert (w.run(b.q, b.cache).float() - 1.5).abs().max() < 0.02


@pytest.mark.parametrize("o_dtype", [torch.float16, torch.bfloat16, torch.float32, *FP8])
def test_output_dtype(o_dtype: torch.dtype, device: str) -> None:
    b = batch([(30, 50)], device=device)
    want, _ = b.expected(causal=True)
    for w in planned(b, causal=True, o_data_type=o_dtype):
        tolerance = TOLERANCE[torch.float16 if o_dtype is torch.float32 else o_dtype]
        assert_close(w.run(b.q, b.cache), want, tolerance=tolerance)


def with_sinks(b: Any, sinks: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference: a sink is one more key with score sinks[h] and value zero."""
    out, lse = b.expected(**options)
    natural = lse * 0.6931471805599453
    total = torch.logaddexp(natural, sinks.cpu().double())
    return out * (natural - total).exp()[..., None], total * 1.4426950408889634


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (80, 80)])
def test_sinks(dims: tuple[int, int], device: str) -> None:
    b = batch(MIX, heads=(6, 2), dims=dims, dtype=torch.bfloat16, device=device)
    sinks = rand(6, dtype=torch.float32, device=device) * 3
    for options in ({}, {"causal": True, "window_left": 30}, {"causal": True, "logits_soft_cap": 5.0}):
        want, want_lse = with_sinks(b, sinks, **options)
        for w in planned(b, **options):
            out, lse = w.run(b.q, b.cache, sinks=sinks, return_lse=True)
            assert_close(out, want)
            assert_close(lse, want_lse, tolerance=(2e-4, 2e-4))


@pytest.mark.parametrize("o_dtype", [torch.float16, *FP8])
@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_sinks_of_fp8(dims: tuple[int, int], dtype: torch.dtype, o_dtype: torch.dtype, device: str) -> None:
    b = batch([(20, 70), (3, 9), (200, 330)], heads=(4, 2), dims=dims, dtype=dtype, device=device)
    sinks = rand(4, dtype=torch.float32, device=device) * 3
    for options in ({"causal": True, "window_left": 30}, {"causal": True, "logits_soft_cap": 5.0}):
        want, want_lse = with_sinks(b, sinks, **options)
        for w in planned(b, o_data_type=o_dtype, **options):
            out, lse = w.run(b.q, b.cache, sinks=sinks, return_lse=True)
            # Weights are rounded to e4m3, 2^-4 of each, and outputs to o_dtype.
            assert_close(out, want, tolerance=(0.2 if o_dtype is FP8[1] else 0.1, 0.1))
            assert_close(lse, want_lse, tolerance=(2e-3, 2e-3))


def test_bad_rows_spoil_themselves_only(device: str) -> None:
    b = batch([(40, 60), (5, 5)], dtype=torch.bfloat16, device=device)
    b.q[3, 1, 5] = float("nan")
    want, _ = b.expected(causal=True)
    assert want.isnan().any(-1).sum() == 1
    for w in planned(b, causal=True):
        assert_close(w.run(b.q, b.cache), want)


def test_large_scores(device: str) -> None:
    """Scores of +-1e4: the softmax is one-hot, and no exponential overflows."""
    b = batch([(60, 90)], heads=(2, 1), dims=(128, 128), dtype=torch.bfloat16, device=device)
    b.q.mul_(64)
    check(b, causal=True, sm_scale=10.0)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("factor", "window_left"), [(2, -1), (8, -1), (64, -1), (64, 100)])
def test_row_max_that_grows(factor: int, window_left: int, dtype: torch.dtype, device: str) -> None:
    """row_max grows from one KV tile to the next, by less and by more than the rescale threshold."""
    b = batch([(60, 1500), (150, 150)], heads=(2, 1), dims=(128, 128), dtype=dtype, device=device)
    b.q.mul_(factor)
    check(b, causal=True, window_left=window_left)


@pytest.mark.parametrize("dims", [(128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("dtype", HALVES)
def test_row_max_that_grows_in_every_tile(dtype: torch.dtype, dims: tuple[int, int], device: str) -> None:
    """row_max grows by 2^3 per tile of 64 keys in one head and by 2^16 in the other, once by more than 2^256."""
    b = batch([(70, 1500)], heads=(2, 1), dims=dims, dtype=dtype, device=device)
    ramp = torch.linspace(0, 1, 1500, device=device).reshape(-1, 1, 1)
    ramp[1000:] += 4
    b = replace(b, q=b.q.abs(), k=[(b.k[0] * 0.05 + ramp).to(dtype)])
    b.q.mul_((b.q.new_tensor([64, 320]) / dims[0] ** 0.5).reshape(-1, 1))
    want, want_lse = b.expected(causal=True)
    for w in planned(b, BatchPrefillWithRaggedKVCacheWrapper, causal=True):
        out, lse = w.run(b.q, *b.ragged(b.pool.kv_layout), return_lse=True)
        assert_close(out, want)
        assert_close(lse, want_lse, tolerance=(1e-4, 1e-4))


@pytest.mark.parametrize("lens", [[], [(0, 0)], [(0, 7), (0, 0)]])
def test_nothing(lens: list[tuple[int, int]], device: str) -> None:
    b = batch(lens or [(0, 0)], device=device)
    if not lens:
        b = b.only([0])
    for w in planned(b, causal=True):
        out, lse = w.run_return_lse(b.q, b.cache)
        assert out.shape == (0, 4, 64) and lse.shape == (0, 4)


@pytest.mark.parametrize("window_left", [-1, 200])
def test_a_request_does_not_depend_on_its_batch(window_left: int, device: str) -> None:
    """The same bits without split-KV: the tile height does not change results."""
    b = batch([(300, 900), (1, 77), (70, 70), (128, 2000)], heads=(8, 2), dims=(128, 128), device=device)
    rows, options = list(b.qo_lens), {"causal": True, "window_left": window_left, "disable_split_kv": True}
    for w in planned(b, **options):
        whole = w.run(b.q, b.cache).split(rows)
        for requests in ([3], [2, 0], [1, 2, 3, 0, 1]):
            part = b.only(requests)
            w.plan(*part.paged_plan(), **options, **part.types())
            for got, request in zip(w.run(part.q, part.cache).split(list(part.qo_lens)), requests):
                assert torch.equal(got, whole[request])


@pytest.mark.parametrize(
    ("causal", "window_left", "dims"),
    [(True, -1, (128, 128)), (False, -1, (64, 64)), (True, 2300, (128, 128)), (True, 2300, (192, 128))],
)
def test_split_requests(causal: bool, window_left: int, dims: tuple[int, int], device: str) -> None:
    """Few queries with many keys: on Hopper CTAs split the keys of a tile, and the last merges the partials."""
    b = batch([(20, 2101), (1, 2100), (50, 2600)], heads=(4, 1), dims=dims, device=device)
    options = {"causal": causal, "window_left": window_left}
    check(b, **options)
    sinks = torch.linspace(-2, 2, 4, device=device)
    for w in planned(b, **options):
        out, lse = w.run_return_lse(b.q, b.cache)
        for _ in range(3):
            again, again_lse = w.run_return_lse(b.q, b.cache)
            assert torch.equal(again, out) and torch.equal(again_lse, lse), "parts are merged in their order"
        if w.resolved_backend == "fa3":
            assert int(w._plan.schedule[5]) > 1, "parts"
        with_sinks = w.run(b.q, b.cache, sinks=sinks)
        w.plan(*b.paged_plan(), **options, disable_split_kv=True, **b.types())
        assert int(w._plan.schedule[5]) == 1
        assert_close(w.run(b.q, b.cache), out.double())
        assert_close(w.run(b.q, b.cache, sinks=sinks), with_sinks.double())


def test_agrees_with_single_prefill(device: str) -> None:
    b = batch([(50, 80)], dims=(128, 128), device=device)
    want, _ = attention(b.q, b.k[0], b.v[0], causal=True)
    for w in planned(b, causal=True):
        assert_close(w.run(b.q, b.cache), want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_offsets_beyond_32_bits(kv_layout: str, dtype: torch.dtype) -> None:
    """Caches of 5 GiB, of K and of V, with used pages at both ends."""
    b = batch([(40, 300), (9, 64)], heads=(8, 8), dims=(128, 128), dtype=dtype, kv_layout=kv_layout, device="cuda")
    own = b.pool.indices.long()
    pages = (5 << 30) // (16 * 8 * 128 * dtype.itemsize)
    where = torch.cat([torch.arange(10), torch.arange(pages - len(b.cache[0]) + 10, pages)]).cuda()[own]
    pools = []
    for part in b.cache:
        pool = torch.full((pages, *part.shape[1:]), 0x7F, dtype=torch.uint8, device="cuda")  # NaN
        if dtype.itemsize == 2:
            pool = torch.full((pages, *part.shape[1:]), 0x7FFF, dtype=torch.int16, device="cuda")
        pool[where] = part.view(pool.dtype)[own]
        pools.append(pool.view(dtype))
    far = replace(b, cache=(pools[0], pools[1]), pool=replace(b.pool, indices=where.int()))
    for w in planned(far, causal=True, o_data_type=torch.bfloat16):
        out, lse = w.run(far.q, far.cache, return_lse=True)
        if dtype is torch.bfloat16:
            assert_close(out, b.expected(causal=True)[0])
        else:
            assert_fp8(w, b, out, lse, causal=True)


@pytest.mark.gpu
def test_long_sequences() -> None:
    """Rows at the beginning, in the middle and at the end of 8192, and few rows over as many keys."""
    check(batch([(17, 8192), (1000, 8192)], heads=(2, 1), dims=(128, 128), device="cuda"), causal=True)
    b = batch([(8192, 8192)], heads=(2, 1), dims=(128, 128), dtype=torch.bfloat16, device="cuda")
    for w in planned(b, causal=True):
        out, lse = w.run(b.q, b.cache, return_lse=True)
        for first in (0, 4000, 8192 - 64):
            rows = slice(first, first + 64)
            want, want_lse = attention(b.q[rows], b.k[0][: first + 64], b.v[0][: first + 64], causal=True)
            assert_close(out[rows], want)
            assert_close(lse[rows], want_lse, tolerance=(1e-4, 1e-4))
