"""The launcher of batch prefill without a GPU: grids, tensor maps and parameters, seen by the mock driver."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core import toy
from fi_core.attention.ops import prefill as ops
from fi_core.runtime.spec.target import Target
from kernels.mock_driver import Call, Gpu, Tensor, build_driver, launches, parameters

OUT, LSE, SCHEDULE, Q, K, V, PAGES, SINKS, MASK, BOUNDS = (0x7F000100000 * (i + 1) for i in range(10))
BATCH, ROWS, HEADS, KV_HEADS, NUM_PAGES, PAGE = 4, 1000, 32, 8, 300, 16
TILE = ops.tile_tokens(HEADS, KV_HEADS)
Prefill = Callable[..., list[Call]]


@pytest.fixture(scope="module")
def prefill(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Calls the op on bf16 tensors, paged NHD, but for what is changed; the driver calls."""
    folder = tmp_path_factory.mktemp("prefill")
    gpu = Gpu(build_driver(folder), Path(folder) / "log", 90)

    def call(implementation: str = "wgmma_sm90", dims: tuple[int, int] = (128, 128), **change: Any) -> list[Call]:
        pool = (NUM_PAGES, PAGE, KV_HEADS)
        arguments: dict[str, Any] = {
            "out": Tensor(OUT, (ROWS, HEADS, dims[1]), "bf16"),
            "lse": Tensor(LSE, (ROWS, HEADS), "f32"),
            "schedule": Tensor(SCHEDULE, (ops.schedule_words(BATCH, ROWS, TILE),), "i32"),
            "q": Tensor(Q, (ROWS, HEADS, dims[0]), "bf16"),
            "k": Tensor(K, (*pool, dims[0]), "bf16"),
            "v": Tensor(V, (*pool, dims[1]), "bf16"),
            "page_indices": Tensor(PAGES, (256,), "i32"),
            "kv_layout": 0, "batch_size": BATCH, "tile_tokens": TILE, "causal": True, "sm_scale": 0.1,
        }  # fmt: skip
        arguments |= change
        hopper = implementation == "wgmma_sm90"
        kind = arguments["q"].dtype
        head_dim = dims[0] if hopper or dims[0] > 128 else 0
        capped = hopper and arguments.get("soft_cap", 0.0) > 0
        axes = {"q": kind, "kv": arguments["k"].dtype, "head_dim": head_dim, "soft_cap": capped, "split_tables": False}
        return gpu.call("batch_prefill", axes, arguments, implementation=implementation)

    yield call
    gpu.close()


def one(calls: list[Call]) -> Call:
    (launch,) = launches(calls)
    return launch


def maps(calls: list[Call]) -> dict[int, list[list[int]]]:
    """By address: [size, stride in bytes, box] of each dimension."""
    return {c["address"]: c["dimensions"] for c in calls if c["call"] == "tensor_map"}


def test_hopper_launch(prefill: Prefill) -> None:
    calls = prefill()
    launch = one(calls)
    assert launch["grid"] == [132, 1, 1] and launch["block"] == [512, 1, 1] and launch["pdl"]
    assert launch["shared_bytes"] == ops._wgmma_shared_bytes(128, 128, 128, 3)
    p = parameters(launch, "BatchPrefillParams")
    problem, pages, copies = p["problem"], p["pages"], p["copies"]
    assert (problem["out"], problem["lse"], pages["page_indices"], p["scales"]["sinks"]) == (OUT, LSE, PAGES, None)
    assert (problem["qo_heads"], problem["kv_heads"], problem["group_size"]["value"]) == (HEADS, KV_HEADS, 4)
    assert (copies["box_keys"], pages["page_size"]["value"], p["tile_tokens"]) == (16, PAGE, TILE)
    assert (problem["mask"]["causal"], problem["mask"]["window_left"]) == (1, -1)
    assert copies["scores"]["scale"] == pytest.approx(0.1 * 1.4426950408889634) and copies["scores"]["cap"] == 0
    assert p["copies"]["l2_kv_heads"] == 8, "256 pages of keys and values of all heads fit into L2"
    row = HEADS * 128 * 2
    assert maps(calls)[Q] == [[128, 2, 64], [4, 256, 4], [KV_HEADS, 1024, 1], [ROWS, row, TILE]]
    token = KV_HEADS * 256
    pages = [NUM_PAGES, PAGE * token, 1]
    assert launch["name"] == "batch_prefill_wgmma_whole_rows", (
        "a copy brings whole rows: heads count in blocks of 64 columns"
    )
    assert (p["copies"]["heads_in_column_blocks"], p["copies"]["row_groups_per_head"]) == (1, 0)
    assert maps(calls)[K] == maps(calls)[V] == [
        [64, 2, 64], [8, token, 8], [2 * KV_HEADS, 128, 2], [PAGE // 8, 8 * token, 2], pages
    ]  # fmt: skip


def test_small_pages_come_by_columns(prefill: Prefill) -> None:
    """Pages whose size is not a multiple of 8 tokens have no whole rows to copy."""
    pool = (NUM_PAGES, 4, KV_HEADS, 128)
    calls = prefill(k=Tensor(K, pool, "bf16"), v=Tensor(V, pool, "bf16"))
    assert one(calls)["name"] == "batch_prefill_wgmma"
    assert parameters(one(calls), "BatchPrefillParams")["copies"]["box_keys"] == 4
    token = KV_HEADS * 256
    p = parameters(one(calls), "BatchPrefillParams")
    assert p["copies"]["gathered"] == 1, "a page of 4 tokens is copied row by row"
    assert p["pages"]["last_page"] == NUM_PAGES - 1
    assert p["copies"]["k_rows"] == {"data": K, "page": 4 * token, "token": token, "head": 256}
    assert maps(calls)[K] == [[128, 2, 64], [4, token, 4], [KV_HEADS, 256, 1], [NUM_PAGES, 4 * token, 1]]


@pytest.mark.parametrize(("page", "entry", "keys"), [(16, "mixed", 128), (4, "gathered", 96)])
def test_fp8_keys_launch(prefill: Prefill, page: int, entry: str, keys: int) -> None:
    """Over fp8 keys 16-bit queries have a kernel for TMA and one for small pages, with tiles of their own."""
    pool = (NUM_PAGES, page, KV_HEADS, 128)
    calls = prefill(k=Tensor(K, pool, "e4m3"), v=Tensor(V, pool, "e4m3"))
    assert one(calls)["name"] == f"batch_prefill_wgmma_{entry}"
    assert parameters(one(calls), "BatchPrefillParams")["copies"]["box_keys"] == math.gcd(page, keys)
    assert maps(calls)[K][0] == [128, 1, 128]


def test_sections_follow_the_keys(prefill: Prefill) -> None:
    """Heads are handed out so many at a time that their keys and values stay in L2."""
    for tokens, section in ((16384, 4), (65536, 1), (10_000_000, 1), (100, 8)):
        assert parameters(one(prefill(kv_tokens=tokens)), "BatchPrefillParams")["copies"]["l2_kv_heads"] == section
    ragged = {"k": Tensor(K, (16384, KV_HEADS, 128), "bf16"), "v": Tensor(V, (16384, KV_HEADS, 128), "bf16")}
    p = parameters(one(prefill(page_indices=None, **ragged)), "BatchPrefillParams")
    assert p["copies"]["l2_kv_heads"] == 4, "of ragged keys the tensor says how many there are"


def test_hopper_ragged(prefill: Prefill) -> None:
    keys = {"k": Tensor(K, (5000, KV_HEADS, 192), "bf16"), "v": Tensor(V, (5000, KV_HEADS, 128), "bf16")}
    calls = prefill(dims=(192, 128), page_indices=None, **keys)
    p = parameters(one(calls), "BatchPrefillParams")
    assert p["pages"]["page_indices"] is None and p["copies"]["box_keys"] == 128
    assert maps(calls)[K] == [[192, 2, 64], [5000, KV_HEADS * 384, 128], [KV_HEADS, 384, 1], [1, 128, 1]]
    assert maps(calls)[V][0] == [128, 2, 64]


def test_hopper_soft_cap(prefill: Prefill) -> None:
    p = parameters(one(prefill(soft_cap=30.0, window_left=7)), "BatchPrefillParams")
    scores = p["copies"]["scores"]
    assert (scores["scale"], scores["cap"]) == pytest.approx((0.1 / 30, 30 * 1.4426950408889634))
    assert p["problem"]["mask"]["window_left"] == 7


def fp8(**change: Any) -> dict[str, Any]:
    pool = (NUM_PAGES, PAGE, KV_HEADS, 128)
    return {
        "q": Tensor(Q, (ROWS, HEADS, 128), "e4m3"),
        "k": Tensor(K, pool, "e4m3"),
        "v": Tensor(V, pool, "e4m3"),
    } | change


def test_fp8_launch(prefill: Prefill) -> None:
    calls = prefill(**fp8(scale_q=Tensor(SINKS, (HEADS,), "f32"), bmm2_scale=Tensor(MASK, (1,), "f32")))
    launch = one(calls)
    assert (
        launch["name"] == "batch_prefill_wgmma_fp8" and launch["grid"] == [132, 1, 1] and launch["block"] == [512, 1, 1]
    )
    assert launch["shared_bytes"] == ops._fp8_shared_bytes(*ops._FP8_TILES[128])
    p = parameters(launch, "BatchPrefillParams")
    problem, scales = p["problem"], p["scales"]
    assert (problem["scale_q"], problem["scale_k"], scales["bmm1"], scales["bmm2"]) == (SINKS, None, None, MASK)
    assert problem["out_type"] == 1
    assert p["copies"]["box_keys"] == 16, "rows of 128 bytes come whole"
    token = KV_HEADS * 128
    assert maps(calls)[Q] == [[128, 1, 128], [4, 128, 4], [KV_HEADS, 512, 1], [ROWS, HEADS * 128, TILE]]
    assert maps(calls)[K] == [[128, 1, 128], [PAGE, token, PAGE], [KV_HEADS, 128, 1], [NUM_PAGES, PAGE * token, 1]]
    for out_type, dtype in ((0, "f16"), (3, "e4m3"), (4, "e5m2")):
        launch = one(prefill(**fp8(out=Tensor(OUT, (ROWS, HEADS, 128), dtype))))
        assert parameters(launch, "BatchPrefillParams")["problem"]["out_type"] == out_type


def test_head_major_pages(prefill: Prefill) -> None:
    pool = (NUM_PAGES, KV_HEADS, 48, 64)
    calls = prefill(dims=(64, 64), kv_layout=1, k=Tensor(K, pool, "bf16"), v=Tensor(V, pool, "bf16"))
    copies = parameters(one(calls), "BatchPrefillParams")["copies"]
    assert copies["box_keys"] == 16, "what divides the page and the tile of keys"
    assert (copies["heads_in_column_blocks"], copies["row_groups_per_head"]) == (0, 6), "in groups of 8 tokens"
    assert copies["gathered"] == 0
    page = [NUM_PAGES, KV_HEADS * 48 * 128, 1]
    assert maps(calls)[K] == [[64, 2, 64], [8, 128, 8], [1, 128, 1], [6 * KV_HEADS, 1024, 2], page]


def test_little_work_takes_few_blocks(prefill: Prefill) -> None:
    few = {"out": Tensor(OUT, (3, HEADS, 128), "bf16"), "lse": None, "q": Tensor(Q, (3, HEADS, 128), "bf16")}
    schedule = Tensor(SCHEDULE, (ops.schedule_words(1, 3, TILE),), "i32")
    assert one(prefill(**few, batch_size=1, schedule=schedule))["grid"] == [KV_HEADS, 1, 1]
    assert one(prefill("mma_sm80", **few, batch_size=1, schedule=schedule))["grid"] == [KV_HEADS, 1, 1]


@pytest.mark.parametrize("implementation", ["wgmma_sm90", "mma_sm80"])
def test_another_kernel_runs_on_the_other_sms(prefill: Prefill, implementation: str) -> None:
    assert one(prefill(implementation, num_ctas=40))["grid"] == [40, 1, 1]
    most = one(prefill(implementation))["grid"]
    assert one(prefill("wgmma_sm90", num_ctas=4000))["grid"] == one(prefill())["grid"]
    assert most[0] > 40


def test_tiles_launch(prefill: Prefill) -> None:
    launch = one(prefill("mma_sm80", sinks=Tensor(SINKS, (HEADS,), "f32"), soft_cap=5.0))
    assert launch["grid"] == [132 * 2, 1, 1] and launch["block"] == [128, 1, 1]
    p = parameters(launch, "BatchPrefillParams")
    assert (p["pages"]["page_indices"], p["scales"]["sinks"], p["tile_tokens"]) == (PAGES, SINKS, TILE)
    assert p["pages"]["k_page"] == PAGE * KV_HEADS * 128 and p["problem"]["aligned"] == 1
    assert (p["problem"]["mask"]["causal"], p["problem"]["mask"]["window_left"]) == (1, -1)
    narrow = Tensor(K + 2, (NUM_PAGES, PAGE, KV_HEADS, 128), "bf16")
    assert parameters(one(prefill("mma_sm80", k=narrow)), "BatchPrefillParams")["problem"]["aligned"] == 0


def test_wide_tiles_launch(prefill: Prefill) -> None:
    """Four warps of 16 rows with all columns of the output: two units for what takes one with heads of 128."""
    few = {"out": Tensor(OUT, (3, HEADS, 256), "bf16"), "lse": None, "q": Tensor(Q, (3, HEADS, 256), "bf16")}
    schedule = Tensor(SCHEDULE, (ops.schedule_words(1, 3, TILE),), "i32")
    launch = one(prefill("mma_sm80", (256, 256), **few, batch_size=1, schedule=schedule))
    assert launch["grid"] == [2 * KV_HEADS, 1, 1] and launch["block"] == [128, 1, 1]


@pytest.mark.parametrize("kv", ["bf16", "e4m3"])
def test_chunks_take_no_more_shared_memory_than_the_smallest_gpu_has(kv: str) -> None:
    unit = toy.chosen(ops.BATCH_PREFILL, Target("cuda", "86"), {"q": "bf16", "kv": kv}, "mma_sm80").unit()
    assert unit is not None and unit.entries[0].shared_bytes <= 98 * 1024, "1 KB is for what is declared statically"


@pytest.mark.parametrize(("head_dim", "head_dim_vo"), [(192, 128), (256, 256)])
def test_two_blocks_of_wide_tiles_fit(head_dim: int, head_dim_vo: int) -> None:
    """Where a block has 227 KB of the 228 KB of a multiprocessor, which keeps 1 KB for each block."""
    asked = {"q": "f16", "kv": "f16", "out": "f16", "head_dim_qk": head_dim, "head_dim_vo": head_dim_vo}
    spec = toy.chosen(ops.BATCH_PREFILL, Target("cuda", "90a"), asked, "mma_sm80")
    unit = spec.unit()
    assert dict(spec.axes)["head_dim"] == head_dim
    assert unit is not None and 2 * (unit.entries[0].shared_bytes + 2 * 1024) <= 228 * 1024
    for arch in ("80", "89", "120a"):
        other = toy.chosen(ops.BATCH_PREFILL, Target("cuda", arch), asked, "mma_sm80")
        assert dict(other.axes)["head_dim"] == 0, f"no room on sm_{arch}"


def test_a_mask_takes_the_place_of_causal(prefill: Prefill) -> None:
    masked = {"mask": Tensor(MASK, (999,), "u8"), "mask_indptr": Tensor(BOUNDS, (BATCH + 1,), "i32")}
    p = parameters(one(prefill("mma_sm80", **masked)), "BatchPrefillParams")
    assert (p["masks"]["mask"], p["masks"]["offsets"], p["problem"]["mask"]["causal"]) == (MASK, BOUNDS, 0)
    with pytest.raises(ValueError, match="backend must be fa2 for masks"):
        prefill(**masked)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schedule": Tensor(SCHEDULE, (ops.schedule_words(BATCH, ROWS, TILE) - 1,), "i32")}, "schedule must have"),
        ({"bmm1_scale": Tensor(SINKS, (1,), "f32")}, "scales by head or on the device"),
        ({"v": Tensor(V, (NUM_PAGES, PAGE, 4, 128), "bf16")}, "v must have shape"),
        ({"mask": Tensor(MASK, (9,), "u8")}, "mask must have shape"),
        ({"sinks": Tensor(SINKS, (7,), "f32")}, "sinks must have shape"),
    ],
)
def test_refusals(prefill: Prefill, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        prefill(**change)


def test_wgmma_refuses_misaligned_rows(prefill: Prefill) -> None:
    misaligned = {"k": Tensor(K + 2, (NUM_PAGES, PAGE, KV_HEADS, 128), "bf16")}
    with pytest.raises(ValueError, match="alignment 16 is required of the rows of tensors; got 2"):
        prefill(**misaligned)
    assert launches(prefill("mma_sm80", **misaligned))


def test_nothing_to_do(prefill: Prefill) -> None:
    nothing = {"out": Tensor(OUT, (0, HEADS, 128), "bf16"), "lse": None, "q": Tensor(Q, (0, HEADS, 128), "bf16")}
    assert launches(prefill(**nothing)) == []
