"""The launcher of moe_gated_gemm without a GPU: tensor maps, the grid and refusals, by the mock driver."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernels.mock_driver import Call, Gpu, Tensor, build_driver, launches, parameters

OUT, OUT_SCALE, X, X_SCALE, W, W_SCALE, OFFSETS = ((1 << 40) + 0x10000000 * i for i in range(7))


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Calls the op on rows [n, k] and experts of `width` features; the driver calls."""
    folder = tmp_path_factory.mktemp("moe_gated_gemm")
    gpu = Gpu(build_driver(folder), Path(folder) / "log", 90)

    def call(n: int, e: int, k: int, width: int, **change: Any) -> list[Call]:
        arguments: dict[str, Any] = {
            "out": Tensor(OUT, (n, width), "e4m3"),
            "out_scale": Tensor(OUT_SCALE, (n, width // 128), "f32"),
            "x": Tensor(X, (n, k), "e4m3"),
            "x_scale": Tensor(X_SCALE, (n, k // 128), "f32"),
            "weight": Tensor(W, (e, 2 * width, k), "e4m3"),
            "weight_scale": Tensor(W_SCALE, (e, 2 * width // 128, k // 128), "f32"),
            "offsets": Tensor(OFFSETS, (e + 1,), "i32"),
        } | change
        return gpu.call("moe_gated_gemm", {}, arguments, implementation="wgmma_sm90")

    yield call
    gpu.close()


def test_a_tile_has_128_features_of_both_projections(gated: Callable[..., list[Call]]) -> None:
    (launch,) = launches(calls := gated(1000, 4, 512, 384))
    maps = {c["address"]: c["dimensions"] for c in calls if c["call"] == "tensor_map"}
    assert maps[X] == [[512, 1, 128], [1000, 512, 128], [1, 128, 1]]
    assert maps[W] == [[512, 1, 128], [768, 512, 128], [4, 768 * 512, 1]]
    assert launch["grid"] == [(1000 // 128 + 4) * 3, 1, 1]
    p = parameters(launch, "MoeGatedGemmParams")
    assert (p["gemm"]["k_blocks"], p["out_scale"]) == (4, OUT_SCALE)
    problem = p["gemm"]["problem"]
    assert (problem["n"], problem["batch"], problem["out_row_stride"]) == (768, 4, 384)


def test_no_rows_are_no_launch(gated: Callable[..., list[Call]]) -> None:
    assert not launches(gated(0, 4, 512, 384))


def test_refusals(gated: Callable[..., list[Call]]) -> None:
    with pytest.raises(ValueError, match="width and k must be multiples of 128"):
        gated(8, 2, 512, 64)
    with pytest.raises(ValueError, match="x must have rows at multiples of 16 bytes"):
        gated(8, 2, 512, 128, x=Tensor(X + 8, (8, 512), "e4m3"))
