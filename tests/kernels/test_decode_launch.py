"""Launches of batch decode without a GPU: grid, tensor maps and parameters, seen by the mock driver."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from fi_core.decode import ops
from fi_core.spec.target import Target
from kernels.mock_driver import Call, Tensor, launches
from kernels.test_mock_driver import Start, driver, start  # noqa: F401  (fixtures)

BATCH, BLOCKS, Q_HEADS, KV_HEADS, PAGES, PAGE = 3, 132, 32, 8, 100, 16
RANGES = 3 * BLOCKS
K, V, Q = 0x1000000, 0x2000000, 0x3000000


MANY = Tensor(0x7000000, (100_000,), "i32")


def call(start: Start, impl: str, dim: int = 128, kv: str = "bf16", **change: Any) -> list[Call]:  # noqa: F811
    shape = (PAGES, PAGE, KV_HEADS, dim)
    words, slots = 12 + (RANGES + 1) * 8 + BATCH * 4 + 2 * RANGES, 2 * RANGES
    arguments: dict[str, Any] = {
        "out": Tensor(0x4000000, (BATCH, Q_HEADS, dim), "bf16"),
        "lse": None,
        "workspace": Tensor(0x5000000, (slots, 16, dim + 2), "f32"),
        "schedule": Tensor(0x6000000, (words,), "i32"),
        "q": Tensor(Q, (BATCH, Q_HEADS, dim), "bf16"),
        "k_cache": Tensor(K, shape, kv),
        "v_cache": Tensor(V, shape, kv),
        "page_indices": Tensor(0x7000000, (PAGES,), "i32"),
        **dict.fromkeys(
            ("sinks", "scale_q", "scale_k", "scale_v", "bmm1_scale", "bmm2_scale", "draft_mask", "qo_indptr")
        ),
        "kv_layout": 0,
        "pos_encoding_mode": 0,
        "q_len": 1,
        "blocks": BLOCKS,
        "ranges": RANGES,
        "split": 0,
        "window_left": -1,
        "logits_soft_cap": 0.0,
        "sm_scale": 0.1,
        "v_scale": 1.0,
        "rope_scale": 1.0,
        "rope_theta": 1e4,
        "enable_pdl": None,
        "impl": impl,
    }
    assert set(change) <= set(arguments)
    axes = {"q": "bf16", "kv": kv, "head_dim": dim if impl != "fa2" else 0}
    return start().call("batch_decode", axes, *(arguments | change).values(), impl=impl)


@pytest.mark.parametrize("impl", ["fa3", "fa2_tc", "fa2"])
def test_one_launch_of_a_block_a_range(start: Start, impl: str) -> None:  # noqa: F811
    (one,) = launches(call(start, impl, page_indices=MANY))
    assert one["grid"] == [BLOCKS, 1, 1] and one["pdl"]
    behind_the_maps = bytes.fromhex(one["parameters"])[2 * 128 :]
    assert struct.unpack_from("QQQ", behind_the_maps) == (Q, K, V)


@pytest.mark.parametrize(
    ("page", "dim", "kv", "rows"),
    [(16, 128, "bf16", 16), (1, 128, "bf16", 1), (48, 128, "bf16", 16), (256, 128, "bf16", 64), (64, 64, "e4m3", 64)],
)
def test_a_copy_brings_whole_rows_of_one_page(start: Start, page: int, dim: int, kv: str, rows: int) -> None:  # noqa: F811
    shape = (PAGES, page, KV_HEADS, dim)
    caches = {"k_cache": Tensor(K, shape, kv), "v_cache": Tensor(V, shape, kv)}
    calls = call(start, "fa3", dim, kv, page_indices=MANY, **caches)
    maps = [c for c in calls if c["call"] == "tensor_map"]
    assert [m["address"] for m in maps] == [K, V]
    bytes_ = 1 if kv == "e4m3" else 2
    for one in maps:
        sizes, strides, box = zip(*one["dimensions"])
        assert sizes[0] * sizes[2] == dim and (sizes[1], *sizes[3:]) == (page, KV_HEADS, PAGES)
        assert strides[1:] == (
            KV_HEADS * dim * bytes_ if page > 1 else 128,
            128,
            dim * bytes_,
            page * KV_HEADS * dim * bytes_,
        )
        assert box[0] * bytes_ == 128 and box[1:] == (rows, sizes[2], 1, 1)


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "parts"), [(32, 8, 4), (8, 1, 16), (20, 1, 16), (12, 4, 8), (32, 16, 2)]
)
def test_little_work_is_that_of_clusters(start: Start, q_heads: int, kv_heads: int, parts: int) -> None:  # noqa: F811
    change = {
        "q": Tensor(Q, (BATCH, q_heads, 128), "bf16"),
        "out": Tensor(0x4000000, (BATCH, q_heads, 128), "bf16"),
        "k_cache": Tensor(K, (PAGES, PAGE, kv_heads, 128), "bf16"),
        "v_cache": Tensor(V, (PAGES, PAGE, kv_heads, 128), "bf16"),
        "page_indices": Tensor(0x7000000, (64,), "i32"),
    }
    units = kv_heads * -(-q_heads // kv_heads // 16)
    for more in {}, {"page_indices": MANY, "window_left": 1000}:
        (one,) = launches(call(start, "fa3", **change | more))
        assert one["name"] == "decode_cluster" and one["cluster"] == [parts, 1, 1] and one["pdl"]
        assert one["grid"] == [units * parts, BATCH, 1]


@pytest.mark.parametrize(
    "change",
    [
        {"page_indices": MANY},
        {"split": 2},
        {"split": -1},
        {"window_left": 100_000, "page_indices": MANY},
        {"logits_soft_cap": 30.0},
        {"pos_encoding_mode": 2},
        {
            "k_cache": Tensor(K, (PAGES, 8, KV_HEADS, 128), "bf16"),
            "v_cache": Tensor(V, (PAGES, 8, KV_HEADS, 128), "bf16"),
        },
    ],
)
def test_clusters_take_nothing_that_they_cannot(start: Start, change: dict[str, Any]) -> None:  # noqa: F811
    (one,) = launches(call(start, "fa3", **change))
    assert one["name"] == "decode_tma" and one["grid"] == [BLOCKS, 1, 1]


def test_clusters_take_rows_where_pages_are_small(start: Start) -> None:  # noqa: F811
    pages = {name: Tensor(at, (PAGES, 3, KV_HEADS, 128), "bf16") for name, at in (("k_cache", K), ("v_cache", V))}
    calls = call(start, "fa2_tc", page_indices=Tensor(0x7000000, (64,), "i32"), **pages)
    (one,) = launches(calls)
    assert one["name"] == "decode_cluster" and not any(c["call"] == "tensor_map" for c in calls)
    (one,) = launches(call(start, "fa2_tc", page_indices=MANY))
    assert one["name"] == "decode_tiles"


def test_head_major_pages(start: Start) -> None:  # noqa: F811
    shape = (PAGES, KV_HEADS, PAGE, 128)
    calls = call(start, "fa3", kv_layout=1, k_cache=Tensor(K, shape, "bf16"), v_cache=Tensor(V, shape, "bf16"))
    for one in (c for c in calls if c["call"] == "tensor_map"):
        assert [d[1] for d in one["dimensions"]][1:] == [256, 128, PAGE * 256, KV_HEADS * PAGE * 256]


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("kv", ["bf16", "e4m3"])
def test_the_kernel_of_all_gpus_asks_for_no_more_shared_memory_than_the_smallest_has(kv: str, dim: int) -> None:
    unit = ops.BATCH_DECODE.spec(Target("cuda", "86"), {"q": "bf16", "kv": kv, "head_dim": dim}, "fa2_tc").unit()
    assert unit is not None
    assert max(entry.shared_bytes for entry in unit.entries) <= 99 * 1024


@pytest.mark.parametrize(
    ("impl", "change", "words"),
    [
        ("fa3", {"k_cache": Tensor(K + 2, (PAGES, PAGE, KV_HEADS, 128), "bf16")}, "must be multiples of 16 bytes"),
        ("fa2_tc", {"q": Tensor(Q, (BATCH, Q_HEADS, 128), "bf16", (4100, 129, 1))}, "must be multiples of 16 bytes"),
        ("fa3", {"pos_encoding_mode": 1}, "impl must be fa2 for ROPE_LLAMA"),
        (
            "fa3",
            {"workspace": Tensor(0x5000000, (10, 16, 130), "f32")},
            "workspace must have 2 slots or more for each of 396 ranges",
        ),
        ("fa3", {"schedule": Tensor(0x6000000, (100,), "i32")}, "schedule must have 3992 words"),
        ("fa3", {"q_len": 2}, "q must have a multiple of q_len = 2 rows"),
    ],
)
def test_refusals(start: Start, impl: str, change: Call, words: str) -> None:  # noqa: F811
    with pytest.raises(ValueError, match=words):
        call(start, impl, **change)
