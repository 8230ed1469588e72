"""The launcher of batch_mla without a GPU: entries, grids, clusters, tensor maps and refusals, by the mock driver."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fi_core.attention.ops.mla import Sizes, words_of
from kernels.mock_driver import Call, Gpu, Tensor, build_driver, launches, parameters

OUT, Q, CKV, TABLE, SCHEDULE, WORKSPACE = (0x7F001000000 * (i + 1) for i in range(6))
RANGES, BATCH = 132, 4
Mla = Callable[..., list[Call]]


@pytest.fixture(scope="module")
def mla(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Calls the op for so many query heads and a page size, by an implementation; the driver calls."""
    folder = tmp_path_factory.mktemp("mla")
    gpu = Gpu(build_driver(folder), Path(folder) / "log", 90)

    def call(heads: int, page_size: int, implementation: str, pages: int = 32, **change: Any) -> list[Call]:
        cluster = 2 if heads > 64 else 1
        words = words_of(Sizes(RANGES, RANGES, RANGES // cluster, cluster), BATCH) // 2
        cache, q = (576 * page_size, 576, 1), (576 * heads, 576, 1)
        arguments: dict[str, Any] = {
            "out": Tensor(OUT, (BATCH, heads, 512), "bf16"),
            "lse": None,
            "workspace": Tensor(WORKSPACE, (1 << 24,), "f32"),
            "schedule": Tensor(SCHEDULE, (2, words), "i32"),
            "q_nope": Tensor(Q, (BATCH, heads, 512), "bf16", q),
            "q_pe": Tensor(Q + 1024, (BATCH, heads, 64), "bf16", q),
            "ckv_cache": Tensor(CKV, (pages, page_size, 512), "bf16", cache),
            "kpe_cache": Tensor(CKV + 1024, (pages, page_size, 64), "bf16", cache),
            "page_indices": Tensor(TABLE, (pages,), "i32"),
            "batch_size": BATCH, "max_ranges": RANGES, "narrow_ranges": RANGES, "wide_ranges": RANGES // cluster,
            "cluster": cluster, "sm_scale": 0.1,
        }  # fmt: skip
        axes = {"q": "bf16", "kv": change["ckv_cache"].dtype if "ckv_cache" in change else "bf16"}
        axes["fixed_splits"] = change.get("fixed_splits", False)
        return gpu.call("batch_mla", axes, arguments | change, implementation=implementation)

    yield call
    gpu.close()


def attention(calls: list[Call]) -> Call:
    """The only launch: it merges splits itself."""
    (launch,) = launches(calls)
    return launch


def test_few_rows_run_one_cta_on_each_sm(mla: Mla) -> None:
    launch = attention(mla(16, 1, "narrow_sm90"))
    assert launch["name"] == "batch_mla_ping_pong" and launch["grid"] == [RANGES, 1, 1]
    p = parameters(launch, "BatchMlaParams")
    assert (p["tile_rows"], p["cluster"], p["schedule"]) == (16, 1, SCHEDULE)


def test_few_rows_swap_operands_where_tma_loads_tiles(mla: Mla) -> None:
    launch = attention(mla(16, 64, "narrow_sm90"))
    assert launch["name"] == "batch_mla_swapped" and launch["grid"] == [RANGES, 1, 1]
    without_rope = {"q_pe": Tensor(Q, (BATCH, 16, 0), "bf16", (1, 1, 1)), "kpe_cache": Tensor(CKV, (32, 64, 0), "bf16")}
    assert attention(mla(16, 64, "narrow_sm90", **without_rope))["name"] == "batch_mla_ping_pong"


def test_many_heads_run_in_pairs_of_ctas_with_the_second_schedule(mla: Mla) -> None:
    calls = mla(128, 64, "wgmma_sm90")
    launch = attention(calls)
    assert launch["name"] == "batch_mla_wgmma_tma" and launch["grid"] == [RANGES, 1, 1]
    assert launch["cluster"] == [2, 1, 1]
    p = parameters(launch, "BatchMlaParams")
    assert (p["tile_rows"], p["cluster"]) == (128, 2) and p["schedule"] > SCHEDULE
    maps = {c["address"]: c["dimensions"] for c in calls if c["call"] == "tensor_map"}
    assert maps[CKV] == [[512, 2, 64], [64, 1152, 64], [32, 64 * 1152, 1]]
    assert maps[CKV + 1024] == [[64, 2, 64], [64, 1152, 64], [32, 64 * 1152, 1]]


def test_fixed_splits_have_one_kernel_for_any_heads(mla: Mla) -> None:
    for heads in (16, 128):
        for implementation, name in (("wgmma_sm90", "batch_mla_wgmma_tma"), ("mma_sm80", "batch_mla_mma_3")):
            assert attention(mla(heads, 64, implementation, fixed_splits=True))["name"] == name


@pytest.mark.parametrize(("page_size", "box"), [(1, 1), (8, 8), (24, 8), (64, 64), (128, 64)])
def test_fine_splits_copy_boxes_within_a_page(mla: Mla, page_size: int, box: int) -> None:
    calls = mla(16, page_size, "narrow_sm90", fixed_splits=True, fine_splits=True)
    launch = attention(calls)
    assert launch["name"] == "batch_mla_fine" and launch["grid"] == [RANGES, 1, 1]
    p = parameters(launch, "BatchMlaParams")
    assert (p["tile_rows"], p["cluster"], p["schedule"], p["box"]) == (16, 1, SCHEDULE, box)
    maps = {c["address"]: c["dimensions"] for c in calls if c["call"] == "tensor_map"}
    assert [dimension[2] for dimension in maps[CKV]] == [64, box, 1]


def test_fine_splits_have_a_kernel_where_the_cache_has_no_page(mla: Mla) -> None:
    launch = attention(mla(16, 64, "narrow_sm90", 0, fixed_splits=True, fine_splits=True))
    assert launch["name"] == "batch_mla_fine"


@pytest.mark.parametrize("change", [{"page_size": 32}, {"page_size": 64, "pages": 0}])
def test_tma_needs_whole_tiles_in_a_page(mla: Mla, change: dict[str, int]) -> None:
    assert attention(mla(64, implementation="wgmma_sm90", **change))["name"] == "batch_mla_wgmma_gather"


def test_rows_of_656_bytes_have_a_rotary_part_of_their_own_type(mla: Mla) -> None:
    caches = {
        "ckv_cache": Tensor(CKV, (32, 64, 512), "e4m3", (656 * 64, 656, 1)),
        "kpe_cache": Tensor(CKV + 528, (32, 64, 64), "bf16", (328 * 64, 328, 1)),
        "ckv_scales": Tensor(CKV + 512, (32, 64, 4), "f32", (164 * 64, 164, 1)),
    }
    for heads, implementation, name in ((128, "wgmma_fp8_sm90", "wgmma_gather"), (16, "narrow_sm90", "ping_pong")):
        launch = attention(mla(heads, 64, implementation, **caches))
        assert launch["name"] == f"batch_mla_{name}"
        p = parameters(launch, "BatchMlaParams")
        assert (p["wide_rope"], p["ckv_token"], p["kpe_token"], p["scales_token"]) == (1, 656, 328, 164)
    with pytest.raises(ValueError, match="kpe_scale must be ckv_scale, 1, with kpe_cache of q_nope's type; got 2"):
        mla(16, 64, "narrow_sm90", kpe_scale=2.0, **caches)


def test_sparse_tables_are_gathered(mla: Mla) -> None:
    launch = attention(mla(128, 1, "wgmma_sm90", sparse=True))
    assert launch["name"] == "batch_mla_wgmma_gather" and parameters(launch, "BatchMlaParams")["sparse"] == 1


def test_a_maximum_is_exact_where_it_is_asked_for(mla: Mla) -> None:
    """Kernels otherwise keep one that scores exceed by up to 8 powers of 2; those that load by TMA always do."""
    for heads, implementation, name in ((128, "wgmma_sm90", "wgmma_gather"), (16, "narrow_sm90", "ping_pong")):
        for page_size in (1, 64):
            launch = attention(mla(heads, page_size, implementation, exact_max=True))
            assert launch["name"] == f"batch_mla_{name}" and parameters(launch, "BatchMlaParams")["keep_max"] == 0
    assert parameters(attention(mla(128, 1, "wgmma_sm90")), "BatchMlaParams")["keep_max"] == 8


def test_packed_pages_are_widened_by_a_kernel_of_their_own(mla: Mla) -> None:
    """Slots are divided by the tokens of a page; rows of 584 bytes are no obstacle, a page at 8 bytes is."""
    packed = Tensor(CKV, (32, 64, 584), "u8", (65 * 576, 584, 1))
    none = {"q_pe": Tensor(Q, (BATCH, 64, 0), "bf16"), "kpe_cache": Tensor(CKV, (32, 64, 0), "u8")}
    launch = attention(mla(64, 64, "packed_sm80", sparse=True, ckv_cache=packed, **none))
    p = parameters(launch, "BatchMlaParams")
    assert launch["name"] == "batch_mla_packed_3" and launch["grid"] == [RANGES, 1, 1]
    assert (p["is_packed"], p["ckv_page"], p["last_page"], p["tile_rows"]) == (1, 65 * 576, 32 * 64 - 1, 16)
    odd = Tensor(CKV, (32, 64, 584), "u8", (64 * 584 + 8, 584, 1))
    with pytest.raises(ValueError, match="pages at multiples of 16 bytes"):
        mla(64, 64, "packed_sm80", sparse=True, ckv_cache=odd, **none)


def test_refusals_name_the_argument(mla: Mla) -> None:
    odd = Tensor(CKV + 2, (32, 64, 512), "bf16", (576 * 64, 576, 1))
    for change, words in (
        ({"ckv_cache": odd}, "must have rows at multiples of 16 bytes"),
        ({"workspace": Tensor(WORKSPACE, (1000,), "f32")}, "workspace must have"),
        ({"schedule": Tensor(SCHEDULE, (2, 64), "i32")}, "schedule must have rows"),
        ({"sparse": True}, "ckv_cache must have page_size 1"),
    ):
        with pytest.raises(ValueError, match=words):
            mla(64, 64, "wgmma_sm90", **change)
