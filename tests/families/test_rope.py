"""Rotary embedding against fp64, in every form, on every device and implementation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import fi_core
from families.harness import assert_close, assert_guards, impls, rand, strided, using
from fi_core import rope

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# (num_qo_heads, num_kv_heads, head_dim, rotary_dim); the last four allow no 16-byte vectors
SHAPES = [
    (32, 8, 128, None),
    (4, 1, 64, 32),
    (3, 3, 80, None),
    (2, 1, 192, 64),
    (2, 2, 512, 256),
    (1, 2, 256, None),
    (2, 1, 72, 64),
    (2, 1, 72, 40),
    (5, 1, 6, 2),
    (1, 1, 90, 90),
]


def frequencies(
    width: int, scale: float = 1.0, theta: float = 1e4, smooth: tuple[float, float, float] | None = None
) -> torch.Tensor:
    f = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    if smooth is None:
        return f / scale
    low, high, length = smooth
    s = (f * length / (2 * math.pi * (high - low)) - low / (high - low)).clamp(0, 1)
    return (1 - s) * f / scale + s * f


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleave: bool) -> torch.Tensor:
    """x [n, heads, d] in fp64 with its first 2 * cos.shape[1] dimensions rotated; cos, sin [n, pairs]."""
    y, half = x.cpu().double(), cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    part = y[..., : 2 * half]
    a, b = part.unflatten(-1, (half, 2)).unbind(-1) if interleave else part.chunk(2, -1)
    pair = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(pair, -1).flatten(-2) if interleave else torch.cat(pair, -1)
    return torch.cat([turned, y[..., 2 * half :]], -1)


def by_position(x: torch.Tensor, positions: torch.Tensor, f: torch.Tensor, interleave: bool = False) -> torch.Tensor:
    angle = positions.cpu().double().unsqueeze(1) * f
    return rotated(x, angle.cos(), angle.sin(), interleave)


def heads(n: int, shape: tuple[Any, ...], dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    hq, hk, d, _ = shape
    return rand(n, hq, d, dtype=dtype, device=device), rand(n, hk, d, dtype=dtype, device=device, seed=1)


def spots(n: int, device: str, dtype: torch.dtype = torch.int32, top: int = 5000) -> torch.Tensor:
    return torch.randint(0, top, (n,), generator=torch.Generator().manual_seed(n)).to(dtype).to(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pos_ids(shape: tuple[Any, ...], interleave: bool, dtype: torch.dtype, device: str) -> None:
    width = shape[3] or shape[2]
    for n, index in ((1, torch.int64), (9, torch.int32)):
        q, k = heads(n, shape, dtype, device)
        positions = spots(n, device, index)
        want = [by_position(x, positions, frequencies(width), interleave) for x in (q, k)]
        for impl in impls("rope", device):
            with using("rope", impl):
                for got, expected in zip(fi_core.apply_rope_pos_ids(q, k, positions, shape[3], interleave), want):
                    assert got.dtype == dtype
                    assert_close(got, expected)
                for padding in (8, 1):  # aligned rows, and misaligned rows
                    inplace = strided(q, padding), strided(k, padding)
                    fi_core.apply_rope_pos_ids_inplace(*inplace, positions, shape[3], interleave)
                    for got, expected in zip(inplace, want):
                        assert_close(got, expected)
                        assert_guards(got)


def test_many_rows(device: str) -> None:
    """Enough rows that a thread processes several heads on a GPU; a row does not depend on the number of rows."""
    for n in (64, 1500):
        q, k = heads(n, (32, 8, 128, None), torch.bfloat16, device)
        positions = spots(n, device)
        got = fi_core.apply_rope_pos_ids(q, k, positions)
        for x, y in zip((q, k), got):
            assert_close(y, by_position(x, positions, frequencies(128)))
        alone = fi_core.apply_rope_pos_ids(q[-1:], k[-1:], positions[-1:])
        assert all(torch.equal(a, b[-1:]) for a, b in zip(alone, got))


def test_fused_qkv_slices(device: str) -> None:
    """Rotates slices of one projection in place; v between the rows does not change."""
    qkv = rand(5, (4 + 2 + 2) * 64, dtype=torch.bfloat16, device=device)
    before = qkv.clone()
    positions = spots(5, device)
    q, k, v = (x.view(5, -1, 64) for x in qkv.split([256, 128, 128], 1))
    want = [by_position(x, positions, frequencies(64)) for x in (q, k)]
    fi_core.apply_rope_pos_ids_inplace(q, k, positions)
    assert_close(q, want[0])
    assert_close(k, want[1])
    assert torch.equal(v.flatten(1), before[:, 384:])


@pytest.mark.parametrize(
    ("top", "error"), [(1 << 10, 1.5e-7), (1 << 20, 1.5e-7), (1 << 24, 2e-7), ((1 << 31) - 1, 1e-6)]
)
def test_precision_at_large_positions(top: int, error: float, device: str) -> None:
    """Pairs (1, 0) become cosine and sine; their precision must not depend on the position."""
    positions = torch.cat([spots(500, "cpu", torch.int64, top), torch.tensor([0, 1, top - 1, top])])
    q = torch.zeros(len(positions), 1, 128)
    q[..., :64] = 1
    angle = positions.double().unsqueeze(1) * frequencies(128)
    for sign in (1, -1):
        want = torch.cat([angle.cos(), sign * angle.sin()], -1).unsqueeze(1)
        got, _ = fi_core.apply_rope_pos_ids(q.to(device), q[:, :0].to(device), sign * positions.to(device))
        assert float((got.cpu().double() - want).abs().max()) < error


@pytest.mark.parametrize(
    "options", [{}, {"rope_scale": 4.0}, {"rope_theta": 1e6}, {"rope_scale": 0.1, "rope_theta": 0.5}]
)
def test_scale_and_theta(options: dict[str, float], device: str) -> None:
    q, k = heads(6, (2, 1, 64, None), torch.float32, device)
    positions = spots(6, device)
    f = frequencies(64, options.get("rope_scale", 1.0), options.get("rope_theta", 1e4))
    got = fi_core.apply_rope_pos_ids(q, k, positions, **options)
    for x, y in zip((q, k), got):
        assert_close(y, by_position(x, positions, f), tolerance=(1e-5, 1e-5))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rope_scale": 2.0},
        {"rope_theta": 1e4},
        {"low_freq_factor": 2},
        {"high_freq_factor": 16.0},
        {"old_context_len": 512},
        {"interleave": True, "rotary_dim": 32},
    ],
)
def test_llama31(options: dict[str, Any], device: str) -> None:
    q, k = heads(7, (2, 1, 128, None), torch.float32, device)
    positions = spots(7, device, top=100_000)
    o = {
        "rope_scale": 8,
        "rope_theta": 5e5,
        "low_freq_factor": 1,
        "high_freq_factor": 4,
        "old_context_len": 8192,
    } | options
    smooth = o["low_freq_factor"], o["high_freq_factor"], o["old_context_len"]
    f = frequencies(o.get("rotary_dim", 128), o["rope_scale"], o["rope_theta"], smooth)
    want = [by_position(x, positions, f, o.get("interleave", False)) for x in (q, k)]
    got = fi_core.apply_llama31_rope_pos_ids(q, k, positions, **options)
    indptr = torch.arange(8, dtype=torch.int32, device=device)
    ragged = fi_core.apply_llama31_rope(q, k, indptr, positions, **options)
    copies = [x.clone() for x in (q, k, q, k)]
    fi_core.apply_llama31_rope_pos_ids_inplace(*copies[:2], positions, **options)
    fi_core.apply_llama31_rope_inplace(*copies[2:], indptr, positions, **options)
    for results in (got, ragged, copies[:2], copies[2:]):
        for y, expected in zip(results, want):
            assert_close(y, expected, tolerance=(3e-6, 3e-6))


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_ragged(index: torch.dtype, device: str) -> None:
    """Empty segments; rows before the first and after the last segment are copied."""
    q, k = heads(12, (3, 1, 64, None), torch.float32, device)
    indptr = torch.tensor([2, 2, 5, 5, 6, 10], dtype=index)
    offsets = torch.tensor([99, 1000, 77, 0, 31], dtype=index)
    positions = torch.tensor([0, 0, 1000, 1001, 1002, 0, 31, 32, 33, 34, 0, 0])
    f = frequencies(64, 2.0)
    args = (indptr.to(device), offsets.to(device), None, True, 2.0)
    for impl in impls("rope", device):
        with using("rope", impl):
            got = fi_core.apply_rope(q, k, *args)
            copies = q.clone(), k.clone()
            fi_core.apply_rope_inplace(*copies, *args)
            for x, y, z in zip((q, k), got, copies):
                assert_close(y, by_position(x, positions, f, True))
                assert torch.equal(y, z)
                assert torch.equal(y[[0, 1, 10, 11]], x[[0, 1, 10, 11]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_neox", [False, True])
@pytest.mark.parametrize(("head_size", "width"), [(128, 128), (128, 64), (64, 64), (96, 24), (10, 6)])
def test_cos_sin_cache(head_size: int, width: int, is_neox: bool, dtype: torch.dtype, device: str) -> None:
    angle = torch.arange(50, dtype=torch.float64).unsqueeze(1) * frequencies(width)
    table = torch.cat([angle.cos(), angle.sin()], 1).float().to(device)
    q, k = heads(8, (4, 2, head_size, None), dtype, device)
    for index, cache in ((torch.int64, table), (torch.int32, strided(table, 3))):
        positions = spots(8, device, index, 50)
        cos, sin = table.cpu()[positions.cpu().long()].double().chunk(2, -1)
        want = [rotated(x, cos, sin, not is_neox) for x in (q, k)]
        for impl in impls("rope", device):
            with using("rope", impl):
                flat = q.flatten(1), k.flatten(1)
                got = fi_core.apply_rope_with_cos_sin_cache(positions, *flat, head_size, cache, is_neox)
                for y, expected in zip(got, want):
                    assert_close(y, expected.flatten(1))
                wide = fi_core.apply_rope_with_cos_sin_cache(positions, q, k, head_size, cache, is_neox)
                assert all(torch.equal(y.view(z.shape), z) for y, z in zip(got, wide))
                inplace = strided(flat[0]), strided(flat[1])
                fi_core.apply_rope_with_cos_sin_cache_inplace(positions, *inplace, head_size, cache, is_neox)
                for y, z in zip(inplace, got):
                    assert torch.equal(y, z)
                    assert_guards(y)


NORMED = [(4, 2, 64, 64), (3, 1, 128, 128), (2, 2, 256, 64), (1, 1, 512, 512)]


@pytest.mark.parametrize("shape", NORMED, ids=str)
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_of_heads(shape: tuple[int, ...], is_neox: bool, dtype: torch.dtype, device: str) -> None:
    """RMSNorm of each head of q and k, then rotation, in slices of one projection, in place."""
    hq, hk, d, width = shape
    qkv = rand(70, (hq + 2 * hk) * d, dtype=dtype, device=device)
    before, (q, k, v) = qkv.clone(), qkv.split((hq * d, hk * d, hk * d), 1)
    weights = [rand(d, dtype=dtype, device=device, seed=i) for i in (1, 2)]
    positions, f = torch.arange(70, device=device) * 37, frequencies(width)
    angle = torch.arange(70 * 37, dtype=torch.float64).unsqueeze(1) * f
    cache = torch.cat([angle.cos(), angle.sin()], 1).float().to(device)
    for impl in impls("rope", device):
        qkv.copy_(before)
        with using("rope", impl):
            rope.apply_rope_with_cos_sin_cache_inplace(
                positions, q, k, d, cache, is_neox, q_weight=weights[0], k_weight=weights[1], eps=1e-5
            )
        for got, had, w in ((q, before[:, : hq * d], weights[0]), (k, before[:, hq * d : -hk * d], weights[1])):
            x = had.unflatten(1, (-1, d)).double()
            x = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w.double()
            assert_close(got.unflatten(1, (-1, d)), by_position(x, positions, f, not is_neox))
        assert torch.equal(v, before[:, -hk * d :])


@pytest.mark.parametrize("shape", [(4, 2, 128, 128), (3, 1, 64, 64), (2, 2, 256, 64)], ids=str)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_norms_with_append(shape: tuple[int, ...], layout: str, index: torch.dtype, device: str) -> None:
    """Keys in the cache are those of a pass in place, values a copy; rows without a slot write nothing."""
    hq, hk, d, width = shape
    qkv = rand(37, (hq + 2 * hk) * d, dtype=torch.bfloat16, device=device)
    weights = [rand(d, dtype=torch.bfloat16, device=device, seed=i) for i in (1, 2)]
    positions, page_size = torch.arange(37, device=device) * 3, 16
    angle = torch.arange(37 * 3, dtype=torch.float64).unsqueeze(1) * frequencies(width)
    table = torch.cat([angle.cos(), angle.sin()], 1).float().to(device)
    slots = torch.randperm(5 * page_size, generator=torch.Generator().manual_seed(3))[:37]
    slots[[4, 36]] = -1
    kept = slots >= 0
    for impl in impls("rope", device):
        own, (q, k, v) = qkv.clone(), qkv.clone().split((hq * d, hk * d, hk * d), 1)
        want_q, want_k, _ = own.split((hq * d, hk * d, hk * d), 1)
        before = k.clone()
        storage = torch.full((5, 2, page_size, hk, d), 7.0, dtype=torch.bfloat16, device=device)
        if layout == "HND":
            storage = storage.transpose(2, 3).contiguous()
        caches = storage.unbind(1)
        normed = {"q_weight": weights[0], "k_weight": weights[1], "eps": 1e-5}
        with using("rope", impl):
            rope.apply_rope_with_cos_sin_cache_inplace(positions, want_q, want_k, d, table, **normed)
            rope.apply_rope_with_cos_sin_cache_inplace(
                positions, q, k, d, table, **normed, value=v, paged_kv_cache=caches,
                slot_mapping=slots.to(device, index), kv_layout=layout,
            )  # fmt: skip
        assert torch.equal(q, want_q) and torch.equal(k, before)
        for cache, rows in zip(caches, (want_k, v)):
            tokens = (cache.transpose(1, 2) if layout == "HND" else cache).reshape(-1, hk, d).cpu()
            assert torch.equal(tokens[slots[kept]], rows.cpu().unflatten(1, (hk, d))[kept])
            rest = torch.ones(len(tokens), dtype=torch.bool)
            rest[slots[kept]] = False
            assert (tokens[rest] == 7).all()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"value": None}, TypeError, "value, paged_kv_cache and q_weight must be given with slot_mapping"),
        ({"q_weight": None, "k_weight": None}, TypeError, "value, paged_kv_cache and q_weight must be given"),
        ({"slot_mapping": None}, TypeError, "slot_mapping must be given with value and paged_kv_cache"),
        ({"slot_mapping": torch.tensor([0, 1, 32])}, ValueError, "slot_mapping must be below 32"),
        ({"slot_mapping": torch.tensor([0, 1])}, ValueError, "slot_mapping must have shape"),
        ({"value": torch.ones(3, 2 * 64, dtype=torch.float16)}, ValueError, "value must have the 1 heads of key"),
        ({"kv_layout": "DNH"}, KeyError, "kv_layout"),
    ],
)
def test_append_that_is_refused(change: dict[str, Any], error: type[Exception], words: str) -> None:
    half = torch.ones(64, dtype=torch.float16)
    caches = torch.ones(2, 2, 16, 1, 64, dtype=torch.float16).unbind(1)
    given = {
        "positions": torch.arange(3), "query": torch.ones(3, 2 * 64, dtype=torch.float16),
        "key": torch.ones(3, 64, dtype=torch.float16), "value": torch.ones(3, 64, dtype=torch.float16),
        "head_size": 64, "cos_sin_cache": torch.ones(9, 64), "q_weight": half, "k_weight": half,
        "paged_kv_cache": caches, "slot_mapping": torch.arange(3),
    }  # fmt: skip
    with pytest.raises(error, match=words):
        rope.apply_rope_with_cos_sin_cache_inplace(**given | change)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"k_weight": None}, TypeError, "q_weight and k_weight must both be tensors"),
        ({"q_weight": torch.ones(64)}, TypeError, "q_weight must have the dtype of query"),
        ({"k_weight": torch.ones(32, dtype=torch.float16)}, ValueError, "k_weight must have shape"),
        (
            {"head_size": 96},
            ValueError,
            "head_size must be a power of two from 16 to 512, and rotary_dim a multiple of 16",
        ),
        ({"cos_sin_cache": torch.ones(9, 24)}, ValueError, "got 64 and 24"),
    ],
)
def test_norms_that_are_refused(change: dict[str, Any], error: type[Exception], words: str) -> None:
    size = change.get("head_size", 64)
    half = torch.ones(size, dtype=torch.float16)
    given = {
        "positions": torch.arange(3), "query": torch.ones(3, 2 * size, dtype=torch.float16),
        "key": torch.ones(3, size, dtype=torch.float16), "head_size": size, "cos_sin_cache": torch.ones(9, 64),
        "q_weight": half, "k_weight": half,
    }  # fmt: skip
    with pytest.raises(error, match=words):
        rope.apply_rope_with_cos_sin_cache_inplace(**given | change)


def test_position_outside_the_table_gives_nan(device: str) -> None:
    table = torch.ones(4, 32, device=device)
    q, k = heads(4, (2, 1, 64, None), torch.bfloat16, device)
    positions = torch.tensor([3, 4, -1, 0], device=device)
    for out in fi_core.apply_rope_with_cos_sin_cache(positions, q.flatten(1), k.flatten(1), 64, table):
        lost = out.view(4, -1, 64).isnan().cpu()
        assert lost[1:3, :, :32].all()
        assert not lost[[0, 3]].any() and not lost[..., 32:].any()


@pytest.mark.parametrize("interleave", [False, True])
def test_bad_values_stay_in_their_pair(interleave: bool, device: str) -> None:
    q, k = heads(3, (2, 1, 128, 64), torch.bfloat16, device)
    q[1, 1, 4], k[2, 0, 70], k[0, 0, 71] = float("nan"), float("inf"), float("nan")
    positions = spots(3, device)
    got = fi_core.apply_rope_pos_ids(q, k, positions, 64, interleave)
    for x, y in zip((q, k), got):
        assert_close(y, by_position(x, positions, frequencies(64), interleave))
        assert torch.equal(y[..., 64:].nan_to_num(3), x[..., 64:].nan_to_num(3))
    assert int(got[0].isnan().sum()) == 2


@pytest.mark.parametrize("n", [0, 3])
def test_nothing_to_rotate(n: int, device: str) -> None:
    q, k = heads(n, (4, 0, 64, None), torch.float16, device)
    positions = spots(n, device)
    q_rope, k_rope = fi_core.apply_rope_pos_ids(q, k, positions)
    assert_close(q_rope, by_position(q, positions, frequencies(64)))
    assert k_rope.shape == (n, 0, 64)
    q_rope, k_rope = fi_core.apply_rope(q[:0], k[:0], positions.new_zeros(1), positions.new_zeros(0))
    assert q_rope.shape == (0, 4, 64)


_Q, _K = torch.ones(4, 2, 64, dtype=torch.float16), torch.ones(4, 1, 64, dtype=torch.float16)
_POSITIONS, _TABLE = torch.arange(4), torch.ones(8, 64)


@pytest.mark.parametrize(
    ("function", "change", "error", "words"),
    [
        ("pos_ids", {"k": _K.bfloat16()}, TypeError, "k must have the dtype of q, float16; got bfloat16"),
        ("pos_ids", {"k": _K[:3]}, ValueError, "k must have shape .* with nnz = 4, head_dim = 64; got .3, 1, 64"),
        ("pos_ids", {"k": _K[..., :32]}, ValueError, "k must be|k must have shape"),
        ("pos_ids", {"q": _Q.flatten(1)}, ValueError, "q must have shape .nnz, heads, head_dim"),
        ("pos_ids", {"q": _Q.transpose(1, 2)}, ValueError, "q must be contiguous in its last"),
        ("pos_ids", {"q": _Q.double()}, ValueError, "requires dtype in"),
        ("pos_ids", {"pos_ids": _POSITIONS.float()}, TypeError, "pos_ids must be int32 or int64; got float32"),
        ("pos_ids", {"pos_ids": _POSITIONS[:3]}, ValueError, "pos_ids must have shape"),
        ("pos_ids", {"pos_ids": torch.arange(8)[::2]}, ValueError, "pos_ids must be contiguous"),
        ("pos_ids", {"rotary_dim": 63}, ValueError, "rotary_dim must be even and between 2 and head_dim = 64; got 63"),
        ("pos_ids", {"rotary_dim": 66}, ValueError, "rotary_dim must be even"),
        ("pos_ids", {"rotary_dim": 0}, ValueError, "rotary_dim must be even"),
        ("pos_ids", {"rope_scale": 0.0}, ValueError, "rope_scale must be positive"),
        ("pos_ids", {"rope_theta": math.nan}, ValueError, "rope_theta must be a number; got NaN"),
        ("llama31", {"low_freq_factor": 4}, ValueError, "high_freq_factor must be greater than low_freq_factor"),
        ("llama31", {"old_context_len": 0}, ValueError, "old_context_len must be positive; got 0"),
        ("ragged", {"offsets": torch.zeros(3)}, TypeError, "offsets must have the dtype of indptr"),
        ("ragged", {"offsets": torch.zeros(3, dtype=torch.int32)}, TypeError, "offsets must have the dtype of indptr"),
        ("ragged", {"indptr": torch.arange(4)}, ValueError, "indptr must have shape"),
        ("cached", {"cos_sin_cache": _TABLE.half()}, ValueError, "cos_sin_cache should be float32"),
        ("cached", {"cos_sin_cache": _TABLE[:, :63]}, ValueError, "rotary_dim must be even"),
        ("cached", {"cos_sin_cache": torch.ones(8, 66)}, ValueError, "between 2 and head_size = 64; got 66"),
        (
            "cached",
            {"head_size": 48},
            ValueError,
            "query must have a last dimension that is a multiple of head_size = 48",
        ),
        ("cached", {"key": _K.flatten(1).float()}, TypeError, "key must have the dtype of query"),
        ("cached", {"positions": _POSITIONS[:2]}, ValueError, "positions must have shape"),
    ],
)
def test_rejects(function: str, change: dict[str, Any], error: type[Exception], words: str) -> None:
    q_k: dict[str, Any] = {"q": _Q.clone(), "k": _K.clone()}
    good: dict[str, Any] = {
        "pos_ids": q_k | {"pos_ids": _POSITIONS},
        "llama31": q_k | {"pos_ids": _POSITIONS},
        "ragged": q_k | {"indptr": torch.tensor([0, 1, 4]), "offsets": torch.zeros(2, dtype=torch.int64)},
        "cached": {
            "positions": _POSITIONS,
            "query": _Q.flatten(1).clone(),
            "key": _K.flatten(1).clone(),
            "head_size": 64,
            "cos_sin_cache": _TABLE,
        },
    }[function]
    name = {"ragged": "", "pos_ids": "_pos_ids", "llama31": "_pos_ids", "cached": "_with_cos_sin_cache"}[function]
    stem = f"apply_{'llama31_' if function == 'llama31' else ''}rope{name}"
    for ending in ("", "_inplace"):
        call = getattr(rope, stem + ending)
        call(**good)
        with pytest.raises(error, match=words):
            call(**(good | change))


def test_traces_describe_the_calls() -> None:
    """The definition of each template is complete after a call, and its reference agrees with the call."""
    q, k = heads(4, (2, 1, 64, None), torch.float32, "cpu")
    positions = torch.tensor([5, 6, 0, 9])
    indptr, offsets = torch.tensor([0, 2, 3, 4]), torch.tensor([5, 0, 9])
    table = torch.cat([torch.rand(16, 16).cos(), torch.rand(16, 16).sin()], 1)
    forms: dict[str, dict[str, Any]] = {}
    for stem in ("apply_rope", "apply_llama31_rope"):
        forms[stem] = {"q": q, "k": k, "indptr": indptr, "offsets": offsets, "interleave": True}
        forms[f"{stem}_pos_ids"] = {"q": q, "k": k, "pos_ids": positions, "rotary_dim": 32}
    cached = {
        "positions": positions,
        "query": q.flatten(1),
        "key": k.flatten(1),
        "head_size": 64,
        "cos_sin_cache": table,
    }
    forms["apply_rope_with_cos_sin_cache"] = cached
    for stem, arguments in forms.items():
        for name in (stem, f"{stem}_inplace"):
            function = getattr(rope, name)
            definition = function.fi_trace(**arguments)
            assert definition["name"].startswith(name)
            assert all(value != "unknown" for value in (e["dtype"] for e in definition["outputs"].values()))
            scope: dict[str, Any] = {}
            exec(definition["reference"], scope)
            (reference,) = (f for n, f in scope.items() if n.endswith("_reference"))
            want = reference(**arguments)
            copies = {n: v.clone() if n in ("q", "k", "query", "key") else v for n, v in arguments.items()}
            got = function(**copies)
            for y, expected in zip(got or list(copies.values())[int("positions" in copies) :], want):
                assert_close(y, expected)
