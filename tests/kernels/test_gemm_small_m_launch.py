"""The launcher of gemm for few tokens without a GPU: tiles, splits of k and tensor maps, seen by the mock driver."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fi_core.gemm.ops import GEMM
from fi_core.runtime.dispatch import Request, choose
from fi_core.runtime.spec.target import Target
from kernels.mock_driver import Call, Gpu, Tensor, build_driver, launches, parameters

OUT, A, B, SA, SB, GROUPS = (0x7F001000000 * (i + 1) for i in range(6))
Gemm = Callable[..., list[Call]]


@pytest.fixture(scope="module")
def gemm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Calls the op on [m, k] times [n, k] of a dtype, with what is changed; the driver calls."""
    folder = tmp_path_factory.mktemp("gemm_small_m")
    gpu = Gpu(build_driver(folder), Path(folder) / "log", 90)

    def call(m: int, n: int, k: int, dtype: str = "bf16", tokens: int = 16, **change: Any) -> list[Call]:
        arguments: dict[str, Any] = {
            "out": Tensor(OUT, (m, n), "bf16"), "a": Tensor(A, (m, k), dtype), "b": Tensor(B, (n, k), dtype),
        }  # fmt: skip
        arguments |= change
        tiles = "groups" if change.keys() & {"m_indptr", "masked_m"} else "batched"
        scales = "blocks" if change.keys() & {"a_scale"} else "rows"
        axes = {
            "a": dtype,
            "b": dtype,
            "out": "bf16",
            "scales": scales,
            "tiles": tiles,
            "b_major": "k",
            "fast_accum": False,
            "tokens": tokens,
        }
        return gpu.call("gemm", axes, arguments, implementation="wgmma_small_m_sm90")

    yield call
    gpu.close()


def one(calls: list[Call]) -> Call:
    (launch,) = launches(calls)
    return launch


def maps(calls: list[Call]) -> dict[int, list[list[int]]]:
    """By address: [size, stride in bytes, box] of each dimension."""
    return {c["address"]: c["dimensions"] for c in calls if c["call"] == "tensor_map"}


@pytest.mark.parametrize(
    ("m", "k", "name", "tokens"),
    [
        (1, "long", "wgmma_small_m_sm90", 8),
        (9, "long", "wgmma_small_m_sm90", 16),
        (64, "long", "wgmma_small_m_sm90", 64),
        (65, "long", "wgmma_sm90", 0),
        (16, "short", "wgmma_small_m_sm90", 16),
        (17, "short", "wgmma_sm90", 0),
    ],
)
def test_few_tokens_have_a_kernel_of_their_own(m: int, k: str, name: str, tokens: int) -> None:
    choice = choose(Request.of(GEMM, Target("cuda", "90a"), {"m": m, "k": k}))
    assert choice.implementation == name and dict(choice.spec.axes)["tokens"] == tokens


def test_boxes_are_tiles_of_128_bytes(gemm: Gemm) -> None:
    calls = gemm(
        9, 1000, 1000, "e4m3", a=Tensor(A, (9, 1000), "e4m3", (1024, 1)), b=Tensor(B, (1000, 1000), "e4m3", (1008, 1))
    )
    p = parameters(one(calls), "GemmSm90Params")
    columns = int(one(calls)["name"].rpartition("x")[2])
    assert maps(calls)[A] == [[1000, 1, 128], [9, 1024, 16], [1, 128, 1]]
    assert maps(calls)[B] == [[1000, 1, 128], [1000, 1008, columns], [1, 128, 1]]
    assert (p["k_blocks"], p["whole_rows"], p["group_m"]) == (8, 1, 1)


@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
@pytest.mark.parametrize(("n", "k"), [(2112, 7168), (4096, 4096), (10240, 8192), (256, 16384)])
def test_the_split_of_k_does_not_depend_on_m(gemm: Gemm, n: int, k: int, dtype: str) -> None:
    """The order of additions decides the last bits, so a token's result is the same in any batch."""
    clusters = {one(gemm(m, n, k, dtype, tokens))["cluster"][0] for m, tokens in ((1, 8), (16, 16), (17, 32), (64, 64))}
    assert len(clusters) == 1


def test_three_ctas_share_a_tile_where_all_clusters_run_at_a_time(gemm: Gemm) -> None:
    launch = one(gemm(16, 2112, 7168))
    assert launch["cluster"][0] == 3 and launch["grid"][0] == 33 * 3


@pytest.mark.parametrize(("n", "k"), [(2560, 8192), (2880, 4096), (2048, 2048)])
def test_weights_that_enough_ctas_stream_are_not_split(gemm: Gemm, n: int, k: int) -> None:
    """40 tiles of 64 rows, or 24 with few k: a cluster would cost more than it gains."""
    launch = one(gemm(12, n, k))
    assert launch["cluster"][0] == 1 and launch["grid"][0] == n // 64 and launch["name"].endswith("x64")


def test_large_weights_take_small_tiles(gemm: Gemm) -> None:
    assert one(gemm(1, 36864, 7168, tokens=8))["name"] == "gemm_small_m_8x64"


def test_two_tiles_of_tokens_are_not_split(gemm: Gemm) -> None:
    launch = one(gemm(128, 2112, 7168, tokens=64))
    assert launch["cluster"][0] == 1 and launch["grid"][0] == 66


@pytest.mark.parametrize(("m", "last"), [(129, 65), (192, 128), (64, 0), (3, 0)])
def test_the_last_tile_is_full(gemm: Gemm, m: int, last: int) -> None:
    p = parameters(one(gemm(m, 8192, 8192, tokens=64)), "GemmSm90Params")
    assert p["last_row"] == last


def test_narrow_weights_are_split_along_k(gemm: Gemm) -> None:
    """Four tiles of 64 rows of b cannot stream from more than four SMs."""
    launch = one(gemm(1, 256, 16384))
    assert launch["cluster"][0] == 8 and launch["grid"][0] >= 16


@pytest.mark.parametrize("tactic", range(32))
def test_every_tactic_covers_the_product(gemm: Gemm, tactic: int) -> None:
    launch = one(gemm(20, 1000, 4096, tactic=tactic))
    columns, splits = int(launch["name"].rpartition("x")[2]), launch["cluster"][0]
    assert splits == (tactic % 8 + 1 if columns <= 128 else 1)
    assert launch["grid"][0] == 2 * -(-1000 // columns) * splits


def test_many_tiles_are_persistent(gemm: Gemm) -> None:
    assert one(gemm(1, 57344, 8192))["grid"] == [132, 1, 1]


def test_large_weights_are_not_evicted_first(gemm: Gemm) -> None:
    once = [parameters(one(gemm(1, n, 8192)), "GemmSm90Params")["b_once"] for n in (8192, 28672)]
    assert once == [1, 0]


def test_grouped_rows_are_not_split(gemm: Gemm) -> None:
    b = Tensor(B, (8, 256, 4096), "bf16")
    calls = gemm(128, 256, 4096, b=b, m_indptr=Tensor(GROUPS, (9,), "i32"))
    launch, p = one(calls), parameters(one(calls), "GemmSm90Params")
    assert launch["cluster"] == [1, 1, 1] and p["problem"]["row_groups"] == GROUPS
    assert maps(calls)[A][1] == [128, 8192, 16] and maps(calls)[B][2] == [8, 2 * 256 * 4096, 1]


def test_block_scales_of_any_stride(gemm: Gemm) -> None:
    scales = {"a_scale": Tensor(SA, (10, 8), "f32", (1, 12)), "b_scale": Tensor(SB, (3, 8), "f32")}
    p = parameters(one(gemm(10, 320, 1024, "e4m3", **scales)), "GemmSm90Params")["problem"]
    assert (p["a_scale_row_stride"], p["a_scale_k_stride"], p["a_scale_rows"]) == (1, 12, 1)
    assert (p["b_scale_row_stride"], p["b_scale_k_stride"], p["b_scale_rows"]) == (8, 1, 128)


def test_refusals(gemm: Gemm) -> None:
    with pytest.raises(ValueError, match="tactic must be -1, or below 32; got 32"):
        gemm(1, 512, 256, tactic=32)


def test_constant_weights_are_loaded_before_the_kernel_ahead_ends(gemm: Gemm) -> None:
    early = [parameters(one(gemm(1, 512, 256, b_constant=b)), "GemmSm90Params")["b_constant"] for b in (False, True)]
    assert early == [0, 1]
