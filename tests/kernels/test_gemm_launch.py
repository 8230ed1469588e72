"""The launcher of gemm without a GPU: tile shapes, tensor maps and refusals, seen by the mock driver."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernels.mock_driver import Call, Gpu, Tensor, build_driver, launches, parameters

OUT, A, B, SA, SB, BIAS, GROUPS = (0x7F001000000 * (i + 1) for i in range(7))
Gemm = Callable[..., list[Call]]
ENTRIES, OF_208 = 16, 7  # of 16-bit operands; the number of 128 x 208


@pytest.fixture(scope="module")
def gemm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Calls the op on [m, k] times [n, k] of a dtype, with what is changed; the driver calls."""
    folder = tmp_path_factory.mktemp("gemm")
    gpu = Gpu(build_driver(folder), Path(folder) / "log", 90)

    def call(m: int, n: int, k: int, dtype: str = "bf16", scales: str = "rows", **change: Any) -> list[Call]:
        arguments: dict[str, Any] = {
            "out": Tensor(OUT, (m, n), "bf16"), "a": Tensor(A, (m, k), dtype), "b": Tensor(B, (n, k), dtype),
        }  # fmt: skip
        arguments |= change
        tiles = "groups" if change.keys() & {"m_indptr", "masked_m"} else "batched"
        b_major = "n" if "b" in change and change["b"].strides and "b_transposed" not in change else "k"
        axes = {
            "a": dtype,
            "b": dtype,
            "out": "bf16",
            "scales": scales,
            "tiles": tiles,
            "b_major": b_major,
            "fast_accum": change.get("use_fast_accum", False),
            "tokens": 0,
        }
        return gpu.call("gemm", axes, arguments, implementation="wgmma_sm90")

    yield call
    gpu.close()


def one(calls: list[Call]) -> Call:
    (launch,) = launches(calls)
    return launch


def maps(calls: list[Call]) -> dict[int, list[list[int]]]:
    """By address: [size, stride in bytes, box] of each dimension."""
    return {c["address"]: c["dimensions"] for c in calls if c["call"] == "tensor_map"}


def test_a_tactic_names_a_tile_shape(gemm: Gemm) -> None:
    calls = gemm(4096, 7168, 512, tactic=0)
    launch = one(calls)
    assert launch["name"] == "gemm_128x256" and launch["grid"] == [132, 1, 1] and launch["cluster"] == [1, 1, 1]
    assert launch["shared_bytes"] == 227 * 1024, "all that an SM has for a CTA"
    assert maps(calls)[A] == [[512, 2, 64], [4096, 1024, 128], [1, 128, 1]]
    assert maps(calls)[B] == [[512, 2, 64], [7168, 1024, 256], [1, 128, 1]]
    p = parameters(launch, "GemmSm90Params")
    assert (p["k_blocks"], p["whole_rows"]) == (8, 1)
    assert one(gemm(4096, 7168, 512, tactic=1))["name"] == "gemm_128x192"


def test_tiles_fill_the_waves(gemm: Gemm) -> None:
    """384 tiles of 176 columns fill three waves of 132 SMs, where 288 of 256 columns take three longer ones."""
    launch = one(gemm(4096, 2112, 7168))
    assert launch["name"] == "gemm_128x176" and launch["grid"] == [132, 1, 1]
    assert one(gemm(1408, 3072, 7168))["name"] == "gemm_128x256", "132 of the largest tile"
    assert one(gemm(100, 128, 512))["grid"][0] <= 4, "no more CTAs than tiles"


def test_strides_and_scales(gemm: Gemm) -> None:
    calls = gemm(
        300, 256, 256, "e4m3", "blocks",
        out=Tensor(OUT, (300, 256), "bf16", (264, 1)), a=Tensor(A, (300, 256), "e4m3", (512, 1)),
        a_scale=Tensor(SA, (300, 2), "f32", (1, 300)), b_scale=Tensor(SB, (2, 2), "f32"), enable_pdl=False,
    )  # fmt: skip
    assert not one(calls)["pdl"] and maps(calls)[A][1][1] == 512
    p = parameters(one(calls), "GemmSm90Params")["problem"]
    assert (p["a_scale_row_stride"], p["a_scale_k_stride"], p["a_scale_rows"]) == (1, 300, 1)
    assert (p["b_scale_row_stride"], p["b_scale_k_stride"], p["b_scale_rows"]) == (2, 1, 128)


def test_n_major_weights_come_by_blocks_of_64_columns(gemm: Gemm) -> None:
    calls = gemm(300, 512, 256, b=Tensor(B, (512, 256), "bf16", (1, 512)))
    assert maps(calls)[B] == [[512, 2, 64], [256, 1024, 64], [1, 128, 1]]
    assert parameters(one(calls), "GemmSm90Params")["problem"]["b_k_stride"] == 512


def test_transposed_operands_are_read_as_they_lie(gemm: Gemm) -> None:
    """A weight `[k, n]` whose k is contiguous, and scales `[k / 128, rows]`, launch as their transposes do."""
    plain = {"a_scale": Tensor(SA, (300, 2), "f32", (1, 300)), "b_scale": Tensor(SB, (2, 2), "f32", (1, 2))}
    turned = {
        "b": Tensor(B, (256, 256), "e4m3", (1, 256)), "b_transposed": True, "scales_transposed": True, "scale_rows": 1,
        "a_scale": Tensor(SA, (2, 300), "f32"), "b_scale": Tensor(SB, (2, 2), "f32"),
    }  # fmt: skip
    calls, others = gemm(300, 256, 256, "e4m3", "blocks", **plain), gemm(300, 256, 256, "e4m3", "blocks", **turned)
    assert one(calls) == one(others) and maps(calls) == maps(others)


def test_rows_of_an_unaligned_output_are_stored_by_elements(gemm: Gemm) -> None:
    assert parameters(one(gemm(300, 128, 256)), "GemmSm90Params")["whole_rows"] == 1
    assert parameters(one(gemm(300, 129, 256)), "GemmSm90Params")["whole_rows"] == 0


def test_tma_stores_tiles_where_a_cta_has_several(gemm: Gemm) -> None:
    calls = gemm(4096, 7168, 512, "e4m3")
    assert maps(calls)[OUT] == [[7168, 2, 64], [4096, 14336, 64], [1, 128, 1]]
    assert parameters(one(calls), "GemmSm90Params")["tma_stores"] == 1
    for calls, reason in (
        (gemm(4096, 128, 512, "e4m3"), "one tile for each CTA"),
        (gemm(4096, 7169, 512, "e4m3"), "rows are not aligned to 16 bytes"),
        (gemm(4096, 7168, 512), "16-bit operands"),
    ):
        assert OUT not in maps(calls) and parameters(one(calls), "GemmSm90Params")["tma_stores"] == 0, reason


def test_early_stores_of_block_scaled_tiles_where_k_is_short(gemm: Gemm) -> None:
    def call(k: int, n: int = 7168, strides: tuple[int, int] | None = None, **more: Any) -> list[Call]:
        blocks = -(-k // 128)
        scales = {
            "a_scale": Tensor(SA, (4096, blocks), "f32", strides),
            "b_scale": Tensor(SB, (-(-n // 128), blocks), "f32"),
        }
        return gemm(4096, n, k, "e4m3", "blocks", **scales, **more)

    for k, strides in ((512, None), (3072, None), (1536, (1, 0))):
        calls = call(k, strides=strides)
        assert one(calls)["name"] == "gemm_256x128_early_stores"
        assert maps(calls)[OUT] == [[7168, 2, 64], [4096, 14336, 64], [1, 128, 1]]
        p = parameters(one(calls), "GemmSm90Params")
        assert (p["tma_stores"], p["group_m"]) == (1, 16), f"k {k}, scales expanded along k: {bool(strides)}"
    for calls, reason in (
        (call(640), "a part of a pass through the ring of stages"),
        (call(4096), "a long k"),
        (call(512, 7164), "rows are not aligned to 16 bytes"),
        (call(512, 1024), "one tile for each CTA"),
    ):
        assert "early" not in one(calls)["name"] and OUT not in maps(calls), reason
        assert parameters(one(calls), "GemmSm90Params")["tma_stores"] == 0, reason
    with pytest.raises(ValueError, match="tactic must be -1"):
        call(640, tactic=6)


@pytest.mark.parametrize(("m", "tactic", "last"), [(129, 3, 1), (256, 3, 128), (257, 0, 129), (100, 0, 0), (65, 5, 1)])
def test_the_last_tile_of_rows_is_full(gemm: Gemm, m: int, tactic: int, last: int) -> None:
    """It begins within the tile before, so that no CTA runs ahead of those that read the same weights."""
    assert parameters(one(gemm(m, 8192, 8192, tactic=tactic)), "GemmSm90Params")["last_row"] == last


def test_the_last_tile_may_be_short_where_l2_keeps_the_weights(gemm: Gemm) -> None:
    assert parameters(one(gemm(129, 4096, 1024, tactic=3)), "GemmSm90Params")["last_row"] == 128


@pytest.mark.parametrize(("strides", "last"), [((1, 132), 4), ((64, 1), 4), (None, 4)])
def test_the_last_tile_begins_at_a_multiple_of_four_scales(
    gemm: Gemm, strides: tuple[int, int] | None, last: int
) -> None:
    scales = {"a_scale": Tensor(SA, (129, 64), "f32", strides), "b_scale": Tensor(SB, (64, 64), "f32")}
    p = parameters(one(gemm(129, 8192, 8192, "e4m3", "blocks", tactic=3, **scales)), "GemmSm90Params")
    assert p["last_row"] == last


@pytest.mark.parametrize(
    ("m", "n", "k", "name", "transposed"),
    [
        (129, 8192, 8192, "gemm_128x160_whole", 1),
        (172, 7168, 4096, "gemm_small_m_64x192", 0),
        (300, 4096, 4096, "gemm_128x80_whole", 1),
        (385, 8192, 8192, "gemm_128x208_whole", 1),
        (159, 28672, 3584, "gemm_128x160_whole", 1),
        (1408, 3072, 7168, "gemm_128x256", 0),
    ],
)
def test_tokens_between_few_and_many(gemm: Gemm, m: int, n: int, k: int, name: str, transposed: int) -> None:
    """Tiles of the kernel for few tokens, or of weights as rows: 385 tokens are two tiles of 208 and four of 128."""
    launch = one(gemm(m, n, k))
    assert launch["name"] == name and parameters(launch, "GemmSm90Params")["transposed"] == transposed


def test_exchanged_operands(gemm: Gemm) -> None:
    scales = {"a_scale": Tensor(SA, (385,), "f32"), "b_scale": Tensor(SB, (8192,), "f32")}
    calls = gemm(385, 8192, 8192, "e4m3", **scales)
    p = parameters(one(calls), "GemmSm90Params")
    assert (one(calls)["name"], p["transposed"], p["group_m"]) == ("gemm_128x208", 1, 1)
    assert maps(calls)[A] == [[8192, 1, 128], [385, 8192, 208], [1, 128, 1]]
    assert maps(calls)[B] == [[8192, 1, 128], [8192, 8192, 128], [1, 128, 1]]
    q = p["problem"]
    assert (q["m"], q["n"], q["a"], q["b"], q["a_scale"], q["b_scale"]) == (8192, 385, B, A, SB, SA)
    assert (q["out"], q["out_row_stride"]) == (OUT, 8192)
    for reason, change in {
        "a bias is that of columns": {"bias": Tensor(BIAS, (8192,), "bf16")},
        "tensor cores would read each operand as the other": {"b": Tensor(B, (8192, 8192), "e5m2")},
    }.items():
        plain = one(gemm(385, 8192, 8192, "e4m3", **scales, **change))
        assert parameters(plain, "GemmSm90Params")["transposed"] == 0, reason


def test_whole_transposed_tiles_and_sums_of_parts_go_through_a_map(gemm: Gemm) -> None:
    """Boxes of 16 tokens; rows that are not aligned to 16 bytes have other tiles, without a split."""
    for splits in (1, 2):
        calls = gemm(300, 4096, 8192, tactic=splits * ENTRIES + OF_208)
        assert maps(calls)[OUT] == [[4096, 2, 64], [300, 8192, 16], [1, 128, 1]]
        with pytest.raises(ValueError, match="tactic must be -1"):
            gemm(300, 4095, 8192, tactic=splits * ENTRIES + OF_208)


@pytest.mark.parametrize(
    ("m", "n", "k", "splits", "grid", "whole", "blocks", "groups"),
    [
        (193, 3584, 14336, 4, 112, 0, 56, 4),  # 28 tiles of 208 tokens, each by four CTAs
        (190, 2112, 7168, 3, 51, 0, 38, 5),  # 17 tiles; the last CTA has 36 of 112 blocks of k
        (300, 9000, 2048, 2, 128, 1, 16, 7),  # 142 tiles: one of each CTA, then 14 of pairs
    ],
)
def test_a_cluster_splits_k(
    gemm: Gemm, m: int, n: int, k: int, splits: int, grid: int, whole: int, blocks: int, groups: int
) -> None:
    launch = one(gemm(m, n, k, tactic=splits * ENTRIES + OF_208))
    p = parameters(launch, "GemmSm90Params")
    assert (launch["name"], launch["cluster"], launch["grid"]) == ("gemm_128x208_whole", [splits, 1, 1], [grid, 1, 1])
    assert (p["transposed"], p["splits"], p["whole_tiles"]) == (1, splits, whole)
    assert (p["own_blocks"], p["own_groups"]) == (blocks, groups)


@pytest.mark.parametrize("splits", [1, 2])
def test_tiles_that_are_split_and_others_compute_different_rows(gemm: Gemm, splits: int) -> None:
    """Their bits differ, so the last tile of tokens does not begin within the one before where both kinds meet."""
    p = parameters(one(gemm(1000, 8192, 8192, tactic=splits * ENTRIES + OF_208)), "GemmSm90Params")
    assert (p["whole_tiles"] == 2, p["last_column"]) == ((False, 792), (True, 1000))[splits - 1]


@pytest.mark.parametrize(("dtype", "scales"), [("bf16", "rows"), ("e4m3", "rows"), ("e4m3", "blocks")])
def test_few_rows_of_weights_and_much_k_are_split(gemm: Gemm, dtype: str, scales: str) -> None:
    """9 by 3 tiles of 64 x 64 would leave most SMs idle: four CTAs share each."""
    blocks = {"a_scale": Tensor(SA, (132, 40), "f32"), "b_scale": Tensor(SB, (5, 40), "f32")}
    launch = one(gemm(132, 576, 5120, dtype, scales, **(blocks if scales == "blocks" else {})))
    assert (launch["name"], launch["cluster"], launch["grid"]) == ("gemm_small_m_64x64", [4, 1, 1], [108, 1, 1])
    p = parameters(launch, "GemmSm90Params")
    assert (p["transposed"], p["problem"]["m"], p["problem"]["n"]) == (0, 132, 576)


@pytest.mark.parametrize(
    ("m", "n", "k", "name", "splits"),
    [
        (341, 640, 2880, "gemm_64x96_whole", 3),
        (527, 768, 2048, "gemm_small_m_64x64", 1),
        (717, 2112, 7168, "gemm_small_m_64x192", 1),
    ],
)
def test_few_rows_of_weights_meet_hundreds_of_tokens_in_small_tiles(
    gemm: Gemm, m: int, n: int, k: int, name: str, splits: int
) -> None:
    """Larger tiles would be too few for all SMs."""
    launch = one(gemm(m, n, k))
    assert (launch["name"], launch["cluster"]) == (name, [splits, 1, 1])


def test_few_tiles_of_tokens_meet_weights_in_turn(gemm: Gemm) -> None:
    """Of many, tiles that run at the same time cover a square."""
    turned = ENTRIES + OF_208
    assert parameters(one(gemm(2080, 4096, 1024, tactic=turned)), "GemmSm90Params")["group_m"] == 1
    assert parameters(one(gemm(8658, 3072, 2048, tactic=turned)), "GemmSm90Params")["group_m"] == 15


def test_many_rows_of_weights_are_not_split(gemm: Gemm) -> None:
    assert one(gemm(132, 8192, 512))["cluster"] == [1, 1, 1]


@pytest.mark.parametrize(("m", "n", "k"), [(193, 3584, 64), (600, 4096, 8192)])
def test_a_split_takes_blocks_of_k_and_few_tiles(gemm: Gemm, m: int, n: int, k: int) -> None:
    """Each CTA of a cluster has a block of k, and a cluster shares one tile at most."""
    with pytest.raises(ValueError, match="tactic must be -1"):
        gemm(m, n, k, tactic=2 * ENTRIES + OF_208)


def test_what_l2_forgets_follows_the_card(gemm: Gemm, tmp_path: Path) -> None:
    """29 MB of weights: more than half of 50 MB, so there the last tile of tokens begins early enough to be full."""
    call = gemm(257, 3584, 4096, tactic=3)
    assert parameters(one(call), "GemmSm90Params")["last_row"] == 256, "60 MB"
    gpu = Gpu(build_driver(tmp_path), tmp_path / "log", 90, FI_MOCK_L2_MB="50")
    operands = {"out": (OUT, (257, 3584)), "a": (A, (257, 4096)), "b": (B, (3584, 4096))}
    axes = {"a": "bf16", "b": "bf16", "out": "bf16", "scales": "rows", "tiles": "batched", "b_major": "k"}
    arguments = {name: Tensor(*place, "bf16") for name, place in operands.items()} | {"tactic": 3}
    call = gpu.call("gemm", axes | {"fast_accum": False, "tokens": 0}, arguments, implementation="wgmma_sm90")
    assert parameters(one(call), "GemmSm90Params")["last_row"] == 257 - 128
    gpu.close()


@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
def test_all_tokens_are_added_alike_where_bits_may_not_follow_the_batch(tmp_path: Path, dtype: str) -> None:
    """Tiles for few tokens add 16-bit products as others do, and fp8 products in parts of another size."""
    gpu = Gpu(build_driver(tmp_path), tmp_path / "log", 90, FI_BATCH_INVARIANT="1")
    axes = {"a": dtype, "b": dtype, "out": "bf16", "scales": "rows", "tiles": "batched", "b_major": "k"}
    for m, n, k in ((16, 2624, 7168), (128, 2624, 7168), (132, 2624, 5120), (172, 7168, 4096)):
        operands = {"out": Tensor(OUT, (m, n), "bf16"), "a": Tensor(A, (m, k), dtype), "b": Tensor(B, (n, k), dtype)}
        call = gpu.call("gemm", axes | {"fast_accum": False, "tokens": 0}, operands, implementation="wgmma_sm90")
        assert one(call)["cluster"] == [1, 1, 1]
        assert dtype == "bf16" or "small_m" not in one(call)["name"]
    gpu.close()


@pytest.mark.parametrize(("n", "k", "parts"), [(576, 7168, 8), (1536, 7168, 2), (2048, 4096, 2), (64, 2048, 8)])
def test_weights_of_few_rows_are_added_in_as_many_parts_for_any_tokens(
    tmp_path: Path, n: int, k: int, parts: int
) -> None:
    """Of few tokens each CTA of a cluster has a part; of many a CTA computes one after the other."""
    gpu = Gpu(build_driver(tmp_path), tmp_path / "log", 90, FI_BATCH_INVARIANT="1")
    axes = {"a": "bf16", "b": "bf16", "out": "bf16", "scales": "rows", "tiles": "batched", "b_major": "k"}
    axes |= {"fast_accum": False}  # type: ignore[dict-item]
    names = set()
    for m in (1, 16, 64, 65, 130, 600, 5000):
        operands = {"out": Tensor(OUT, (m, n), "bf16"), "a": Tensor(A, (m, k), "bf16"), "b": Tensor(B, (n, k), "bf16")}
        few = m <= 64
        own = {"tokens": next(t for t in (8, 16, 32, 64) if t >= m) if few else 0}
        implementation = "wgmma_small_m_sm90" if few else "wgmma_parts_sm90"
        launch = one(gpu.call("gemm", axes | own, operands, implementation=implementation))
        shares = "small_m" in launch["name"]
        assert launch["cluster"] == [parts if shares else 1, 1, 1]
        assert shares or parameters(launch, "GemmSm90Params")["splits"] == parts
        names.add(shares)
    assert names == {False, True}
    gpu.close()


def test_row_indices_are_those_of_whole_tiles(gemm: Gemm) -> None:
    """A tile meets the matrix of its first row, so it may not begin among the rows of another."""
    b = Tensor(B, (3, 8192, 8192), "bf16")
    p = parameters(one(gemm(300, 8192, 8192, b=b, m_indices=Tensor(GROUPS, (300,), "i32"))), "GemmSm90Params")
    assert p["last_row"] == 256


def test_grouped_rows(gemm: Gemm) -> None:
    b = Tensor(B, (40, 256, 128), "bf16")
    launch = one(gemm(5000, 256, 128, b=b, m_indptr=Tensor(GROUPS, (41,), "i32")))
    p = parameters(launch, "GemmSm90Params")
    assert (p["problem"]["rows"], p["problem"]["row_groups"]) == (1, GROUPS)
    masked = {
        "out": Tensor(OUT, (40, 512, 256), "bf16"), "a": Tensor(A, (40, 512, 128), "bf16"),
        "masked_m": Tensor(GROUPS, (40,), "i32"), "expected_m": 60,
    }  # fmt: skip
    assert one(gemm(0, 256, 128, b=b, **masked))["name"].startswith("gemm_64x")


@pytest.mark.parametrize(
    ("rows", "equal", "varied"), [(256, "gemm_256x128", "gemm_64x256"), (2048, "gemm_256x128", "gemm_256x128")]
)
def test_groups_of_expected_rows_end_in_a_part_of_a_tile(gemm: Gemm, rows: int, equal: str, varied: str) -> None:
    """The 32 experts of a rank with 256 rows each: half of those of random routing have more, so two tiles of 256."""
    operands = {
        "b": Tensor(B, (32, 7168, 2048), "e4m3"),
        "a_scale": Tensor(SA, (32 * rows, 16), "f32"),
        "b_scale": Tensor(SB, (32, 56, 16), "f32"),
        "m_indptr": Tensor(GROUPS, (33,), "i32"),
    }
    assert one(gemm(32 * rows, 7168, 2048, "e4m3", "blocks", **operands))["name"] == equal
    assert one(gemm(32 * rows, 7168, 2048, "e4m3", "blocks", expected_m=rows, **operands))["name"] == varied


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"a": Tensor(A, (100, 128), "bf16")}, ValueError, r"a must have shape \[m, k\] with k = 256"),
        ({"out": Tensor(OUT, (100, 8), "bf16")}, ValueError, "out must have shape"),
        ({"b": Tensor(B, (512, 256), "e4m3")}, TypeError, "b must have the dtype of a"),
        ({"a_scale": Tensor(SA, (3,), "f32")}, ValueError, "a_scale must have one element"),
        ({"a_scale": Tensor(SA, (100, 2), "f32")}, ValueError, "a_scale and b_scale must both be of blocks"),
        ({"scale_rows": 1}, ValueError, "a_scale and b_scale must have one scale for each 1 rows of a"),
        ({"bias": Tensor(BIAS, (100,), "bf16")}, ValueError, "bias must have shape"),
        (
            {
                "a": Tensor(A, (100, 256), "e4m3"),
                "b": Tensor(B, (512, 256), "e4m3"),
                "a_scale": Tensor(SA, (100, 2), "f32"),
                "b_scale": Tensor(SB, (4, 2), "f32"),
                "bias": Tensor(BIAS, (512,), "bf16"),
            },
            ValueError,
            "bias must be None with scales of blocks",
        ),
        ({"m_indptr": Tensor(GROUPS, (3,), "i32")}, ValueError, r"b must have shape \[groups, n, k\]"),
        ({"tactic": 99}, ValueError, "tactic must be -1"),
    ],
)
def test_refusals(gemm: Gemm, change: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        gemm(100, 512, 256, **change)


def test_nothing_to_do(gemm: Gemm) -> None:
    assert launches(gemm(0, 512, 256)) == []


@pytest.fixture(scope="module")
def gemm_80(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """As `gemm` on sm_80, where mma.sync computes everything."""
    folder = tmp_path_factory.mktemp("gemm_80")
    gpu = Gpu(build_driver(folder), Path(folder) / "log", 80)

    def call(m: int, n: int, k: int, **change: Any) -> list[Call]:
        arguments = {"out": Tensor(OUT, (m, n), "bf16"), "a": Tensor(A, (m, k), "bf16"), "b": Tensor(B, (n, k), "bf16")}
        tiles = "groups" if "m_indptr" in change else "batched"
        axes = {"a": "bf16", "b": "bf16", "out": "bf16", "scales": "rows", "tiles": tiles, "b_major": "k"}
        axes |= {"fast_accum": False, "tokens": 0}
        return gpu.call("gemm", axes, arguments | change, implementation="mma_sm80")

    yield call
    gpu.close()


def test_mma_tiles_follow_the_rows(gemm_80: Gemm) -> None:
    """Few rows take small tiles; many take 128 x 128, one CTA for each."""
    launch = one(gemm_80(4096, 4096, 512))
    assert launch["name"] == "gemm_128x128" and launch["grid"] == [1024, 1, 1] and not launch["pdl"]
    p = parameters(launch, "GemmMmaParams")
    assert (p["k_stages"], p["pairs"]) == (16, 1)
    launch = one(gemm_80(8, 4096, 512))
    assert launch["name"] == "gemm_32x64" and launch["grid"] == [64, 1, 1]


@pytest.mark.parametrize(
    "change",
    [
        {"a": Tensor(A, (64, 100), "bf16", (101, 1)), "b": Tensor(B, (72, 100), "bf16")},
        {"a": Tensor(A, (64, 104), "bf16"), "b": Tensor(B, (72, 104), "bf16", (1, 72))},
        {"a": Tensor(A + 2, (64, 104), "bf16"), "b": Tensor(B, (72, 104), "bf16")},
    ],
)
def test_mma_loads_elements_where_rows_are_misaligned(gemm_80: Gemm, change: dict[str, Any]) -> None:
    assert one(gemm_80(64, 72, 0, **change))["name"] == "gemm_64x64_elements"


def test_mma_grids_cover_groups_of_unknown_sizes(gemm_80: Gemm) -> None:
    """Each of 40 groups may end in a part of a tile."""
    indices = {"b_indices": Tensor(SA, (40,), "i32"), "m_indptr": Tensor(GROUPS, (41,), "i32")}
    launch = one(gemm_80(640, 256, 128, b=Tensor(B, (3, 256, 128), "bf16"), **indices))
    p = parameters(launch, "GemmMmaParams")["problem"]
    assert launch["name"] == "gemm_32x64" and launch["grid"] == [(640 // 32 + 40) * 4, 1, 1]
    assert (p["batch"], p["matrices"], p["b_indices"]) == (40, 3, SA)
