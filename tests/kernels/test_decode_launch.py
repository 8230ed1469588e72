"""Launches of batch decode without a GPU: grid, tensor maps and parameters, seen by the mock driver."""

from __future__ import annotations

from typing import Any

import pytest

from core import toy
from fi_core.attention.ops import decode as ops
from fi_core.runtime.dispatch import Request, choose
from fi_core.runtime.errors import UnsupportedError
from fi_core.runtime.spec.target import Target
from kernels.mock_driver import Call, Tensor, launches, parameters
from kernels.test_mock_driver import Start, driver, start  # noqa: F401  (fixtures)

BATCH, CTAS, Q_HEADS, KV_HEADS, PAGES, PAGE = 3, 132, 32, 8, 100, 16
RANGES = 3 * CTAS
K, V, Q = 0x7F001000000, 0x7F002000000, 0x7F003000000


MANY = Tensor(0x7F007000000, (100_000,), "i32")


def call(start: Start, implementation: str, dim: int = 128, kv: str = "bf16", **change: Any) -> list[Call]:  # noqa: F811
    shape = (PAGES, PAGE, KV_HEADS, dim)
    words, partials = 12 + (RANGES + 1) * 8 + BATCH * 4 + 2 * RANGES, 2 * RANGES
    arguments: dict[str, Any] = {
        "out": Tensor(0x7F004000000, (BATCH, Q_HEADS, dim), "bf16"),
        "lse": None,
        "partials": Tensor(0x7F005000000, (partials, 16, dim + 2), "f32"),
        "schedule": Tensor(0x7F006000000, (words,), "i32"),
        "q": Tensor(Q, (BATCH, Q_HEADS, dim), "bf16"),
        "k": Tensor(K, shape, kv),
        "v": Tensor(V, shape, kv),
        "page_indices": Tensor(0x7F007000000, (PAGES,), "i32"),
        "kv_layout": 0,
        "num_ctas": CTAS,
        "num_ranges": RANGES,
        "split_kv": 0,
        "sm_scale": 0.1,
    }
    axes = {"q": "bf16", "kv": kv, "head_dim": dim if implementation != "cuda_core" else 0, "split_tables": False}
    return start().call("batch_decode", axes, arguments | change, implementation=implementation)


@pytest.mark.parametrize("implementation", ["tma_sm90", "mma_sm80", "cuda_core"])
def test_one_launch_of_a_block_a_range(start: Start, implementation: str) -> None:  # noqa: F811
    (one,) = launches(call(start, implementation, page_indices=MANY))
    assert one["grid"] == [CTAS, 1, 1] and one["pdl"]
    problem = parameters(one, "BatchDecodeParams")["problem"]
    assert (problem["q"], problem["k"], problem["v"]) == (Q, K, V)


@pytest.mark.parametrize(
    ("page", "dim", "kv", "rows"),
    [(16, 128, "bf16", 16), (1, 128, "bf16", 1), (48, 128, "bf16", 16), (256, 128, "bf16", 64), (64, 64, "e4m3", 64)],
)
def test_a_copy_brings_whole_rows_of_one_page(start: Start, page: int, dim: int, kv: str, rows: int) -> None:  # noqa: F811
    shape = (PAGES, page, KV_HEADS, dim)
    caches = {"k": Tensor(K, shape, kv), "v": Tensor(V, shape, kv)}
    calls = call(start, "tma_sm90", dim, kv, page_indices=MANY, **caches)
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
        "out": Tensor(0x7F004000000, (BATCH, q_heads, 128), "bf16"),
        "k": Tensor(K, (PAGES, PAGE, kv_heads, 128), "bf16"),
        "v": Tensor(V, (PAGES, PAGE, kv_heads, 128), "bf16"),
        "page_indices": Tensor(0x7F007000000, (64,), "i32"),
    }
    q_tiles = kv_heads * -(-q_heads // kv_heads // 16)
    for more in {}, {"page_indices": MANY, "window_left": 1000}:
        (one,) = launches(call(start, "tma_sm90", **change | more))
        assert one["name"] == "batch_decode_cluster" and one["cluster"] == [parts, 1, 1] and one["pdl"]
        assert one["grid"] == [q_tiles * parts, BATCH, 1]


@pytest.mark.parametrize(
    "change",
    [
        {"page_indices": MANY},
        {"split_kv": 2},
        {"split_kv": -1},
        {"window_left": 100_000, "page_indices": MANY},
        {"soft_cap": 30.0},
        {"pos_encoding": 2},
        {
            "k": Tensor(K, (PAGES, 8, KV_HEADS, 128), "bf16"),
            "v": Tensor(V, (PAGES, 8, KV_HEADS, 128), "bf16"),
        },
    ],
)
def test_clusters_take_nothing_that_they_cannot(start: Start, change: dict[str, Any]) -> None:  # noqa: F811
    (one,) = launches(call(start, "tma_sm90", **change))
    assert one["name"] == "batch_decode_tma" and one["grid"] == [CTAS, 1, 1]


def test_clusters_take_rows_where_pages_are_small(start: Start) -> None:  # noqa: F811
    pages = {name: Tensor(at, (PAGES, 3, KV_HEADS, 128), "bf16") for name, at in (("k", K), ("v", V))}
    calls = call(start, "mma_sm80", page_indices=Tensor(0x7F007000000, (64,), "i32"), **pages)
    (one,) = launches(calls)
    assert one["name"] == "batch_decode_cluster" and not any(c["call"] == "tensor_map" for c in calls)


@pytest.mark.parametrize(
    ("kv", "ctas", "name"),
    [
        ("bf16", 2 * CTAS, "batch_decode_mma_two_ctas"),
        ("bf16", 3 * CTAS, "batch_decode_mma"),
        ("e4m3", 2 * CTAS, "batch_decode_mma"),
    ],
)
def test_fewer_ctas_of_an_sm_have_more_registers(start: Start, kv: str, ctas: int, name: str) -> None:  # noqa: F811
    (one,) = launches(call(start, "mma_sm80", kv=kv, page_indices=MANY, num_ctas=ctas))
    assert one["name"] == name and one["grid"] == [ctas, 1, 1]


def test_head_major_pages(start: Start) -> None:  # noqa: F811
    shape = (PAGES, KV_HEADS, PAGE, 128)
    calls = call(start, "tma_sm90", kv_layout=1, k=Tensor(K, shape, "bf16"), v=Tensor(V, shape, "bf16"))
    for one in (c for c in calls if c["call"] == "tensor_map"):
        assert [d[1] for d in one["dimensions"]][1:] == [256, 128, PAGE * 256, KV_HEADS * PAGE * 256]


@pytest.mark.parametrize(("k", "v", "joined"), [(K, V, True), (V, K, True), (K, K, False), (K, V, False)])
def test_one_copy_brings_nvfp4_keys_and_values(start: Start, k: int, v: int, joined: bool) -> None:  # noqa: F811
    shape, scales = (PAGES, PAGE, KV_HEADS, 64), (PAGES, PAGE, KV_HEADS, 8)
    wide = (PAGE * KV_HEADS * 96, KV_HEADS * 96, 96, 1)
    change = {
        "k": Tensor(k, shape, "u8"),
        "v": Tensor(v, shape, "u8", None if joined or k == v else wide),
        "k_scales": Tensor(0x7F008000000, scales, "u8"),
        "v_scales": Tensor(0x7F009000000, scales, "u8"),
        "page_indices": MANY,
    }
    calls = call(start, "tma_sm90", kv="e2m1", **change)
    of_k, of_v = (c for c in calls if c["call"] == "tensor_map")
    assert of_k["address"] == (min(k, v) if joined else k) and of_v["address"] == v
    assert of_k["dimensions"][2] == [2, V - K, 2] if joined else of_k["dimensions"][2][0] == 1
    (one,) = launches(calls)
    assert one["name"] == "batch_decode_tma_8"
    q = {"q": Tensor(Q, (BATCH, 72, 128), "bf16"), "out": Tensor(0x7F004000000, (BATCH, 72, 128), "bf16")}
    (one,) = launches(call(start, "tma_sm90", kv="e2m1", **change, **q))
    assert one["name"] == "batch_decode_tma"


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize(("heads", "page", "box"), [(4, 16, 16), (4, 64, 32), (2, 64, 64)])
def test_one_copy_brings_several_heads(start: Start, heads: int, page: int, box: int, joined: bool) -> None:  # noqa: F811
    shape, scales = (PAGES, page, KV_HEADS, 64), (PAGES, page, KV_HEADS, 8)
    change = {
        "k": Tensor(K, shape, "u8"),
        "v": Tensor(V, shape, "u8", None if joined else (page * KV_HEADS * 96, KV_HEADS * 96, 96, 1)),
        "k_scales": Tensor(0x7F008000000, scales, "u8"),
        "v_scales": Tensor(0x7F009000000, scales, "u8"),
        "page_indices": MANY,
    }
    calls = call(start, "tma_sm90", kv="e2m1", heads_per_tile=heads, **change)
    (one,) = launches(calls)
    assert one["name"] == f"batch_decode_tma_8_{heads}_heads"
    of_k, of_v = ([d[2] for d in c["dimensions"]] for c in calls if c["call"] == "tensor_map")
    assert of_k == [64, box, 1 + joined, heads if joined else 1, 1] and of_v == [64, box, 1, 1, 1]
    (one,) = launches(call(start, "cuda_core", kv="e2m1", heads_per_tile=heads, **change))  # for unaligned tensors
    assert one["name"] == "batch_decode_cuda_core"


def test_a_query_tile_has_no_more_heads_than_rows(start: Start) -> None:  # noqa: F811
    for change in {"heads_per_tile": 0}, {"heads_per_tile": 2}, {"heads_per_tile": 3}:
        with pytest.raises(ValueError, match="heads_per_tile must be 1, or with NVFP4 keys on CUDA"):
            call(start, "tma_sm90", **change)


def test_heads_of_a_query_tile() -> None:
    kinds = {"q": "bf16", "head_dim_qk": 128, "head_dim_vo": 128}
    target = Target("cuda", "90a")
    fp4, fp8 = (choose(Request.of(ops.BATCH_DECODE, target, {**kinds, "kv": kv})) for kv in ("e2m1", "e4m3"))
    assert [ops.heads_per_tile(fp4, 64, *heads) for heads in ((32, 8), (64, 8), (28, 4), (40, 8), (96, 8))] == [
        4, 2, 2, 2, 1,
    ]  # fmt: skip
    assert [ops.heads_per_tile(fp4, batch, 32, 8) for batch in (1, 4, 15, 16)] == [1, 2, 2, 4], (
        "few query tiles have splits"
    )
    assert ops.heads_per_tile(fp4, 64, 32, 8, 2) == ops.heads_per_tile(fp4, 64, 32, 8, 1, ops.NO_SPLIT) == 1
    assert ops.heads_per_tile(fp8, 64, 32, 8) == 1
    assert [ops.num_q_tiles(32, 8, 1, heads) for heads in (1, 2, 4)] == [8, 4, 2]


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("page", [4, 16])
@pytest.mark.parametrize("change", [{}, {"alignment": 4}, {"head_dim_vo": 32}, {"pos_encoding": "ROPE_LLAMA"}])
def test_a_run_of_a_plan_with_several_heads_has_a_kernel(dim: int, page: int, change: dict[str, Any]) -> None:
    """Tensors of `run` that the planned kernel cannot take are those of the CUDA cores, and never of mma.sync."""
    shape = {"q": "bf16", "kv": "e2m1", "head_dim_qk": dim, "head_dim_vo": dim, "page_size": page}
    for heads, rows in (4, 4), (4, 1), (2, 8), (2, 5):
        request = Request.of(ops.BATCH_DECODE, Target("cuda", "90a"), shape | {"heads_per_tile": heads} | change)
        choice = choose(request)
        assert choice.implementation == ("tma_sm90" if page == 16 and not change else "cuda_core")
        configs = [ops.DecodeConfig(*e.config) for e in choice.entries]
        assert any(c.kind is ops.DecodeKind.CUDA_CORE or (c.heads == heads and c.q_rows >= rows) for c in configs)
        assert "requires heads_per_tile == 1, got" in " ".join(dict(choice.reasons)["mma_sm80"])
        with pytest.raises(UnsupportedError, match=f"heads_per_tile == 1, got {heads}"):
            choose(request._replace(backend="mma_sm80"))


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("kv", ["bf16", "e4m3"])
def test_the_kernel_of_all_gpus_asks_for_no_more_shared_memory_than_the_smallest_has(kv: str, dim: int) -> None:
    asked = {"q": "bf16", "kv": kv, "head_dim_qk": dim, "head_dim_vo": dim}
    unit = toy.chosen(ops.BATCH_DECODE, Target("cuda", "86"), asked, "mma_sm80").unit()
    assert unit is not None
    assert max(entry.shared_bytes for entry in unit.entries) <= 99 * 1024


@pytest.mark.parametrize(
    ("implementation", "change"),
    [
        ("tma_sm90", {"k": Tensor(K + 2, (PAGES, PAGE, KV_HEADS, 128), "bf16")}),
        ("mma_sm80", {"q": Tensor(Q, (BATCH, Q_HEADS, 128), "bf16", (4100, 129, 1))}),
    ],
)
def test_only_cuda_cores_load_misaligned_rows(start: Start, implementation: str, change: Call) -> None:  # noqa: F811
    with pytest.raises(ValueError, match="alignment 16 is required of the rows of tensors; got 2"):
        call(start, implementation, **change)
    assert len(launches(call(start, "cuda_core", **change))) == 1


@pytest.mark.parametrize(
    ("implementation", "change", "words"),
    [
        ("tma_sm90", {"pos_encoding": 1}, "backend must be fa2 for ROPE_LLAMA"),
        (
            "tma_sm90",
            {"partials": Tensor(0x7F005000000, (10, 16, 130), "f32")},
            "partials must have 2 partials or more for each of 396 work ranges",
        ),
        ("tma_sm90", {"schedule": Tensor(0x7F006000000, (100,), "i32")}, "schedule must have 3992 words"),
        ("tma_sm90", {"q_len": 2}, "q must have a multiple of q_len = 2 rows"),
    ],
)
def test_refusals(start: Start, implementation: str, change: Call, words: str) -> None:  # noqa: F811
    with pytest.raises(ValueError, match=words):
        call(start, implementation, **change)
