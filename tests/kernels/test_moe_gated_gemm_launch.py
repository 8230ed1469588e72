"""The launcher of moe_gated_gemm without a GPU: tensor maps, the grid and refusals, by the mock driver."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernels.mock_driver import Call, Gpu, Tensor, build_driver, launches, parameters

OUT, OUT_SCALE, X, X_SCALE, W, W_SCALE, OFFSETS, BIAS, ALPHA = ((1 << 40) + 0x10000000 * i for i in range(9))


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Calls the op on rows [n, k] and experts of `width` features; the driver calls."""
    folder = tmp_path_factory.mktemp("moe_gated_gemm")
    gpu = Gpu(build_driver(folder), Path(folder) / "log", 90)

    def call(n: int, e: int, k: int, width: int, dtype: str = "e4m3", **change: Any) -> list[Call]:
        arguments: dict[str, Any] = {
            "out": Tensor(OUT, (n, width), dtype),
            "x": Tensor(X, (n, k), dtype),
            "weight": Tensor(W, (e, 2 * width, k), dtype),
            "offsets": Tensor(OFFSETS, (e + 1,), "i32"),
            **dict.fromkeys(("out_scale", "x_scale", "weight_scale")),
        }
        if dtype == "e4m3":
            arguments |= {
                "out_scale": Tensor(OUT_SCALE, (n, width // 128), "f32"),
                "x_scale": Tensor(X_SCALE, (n, k // 128), "f32"),
                "weight_scale": Tensor(W_SCALE, (e, 2 * width // 128, k // 128), "f32"),
            }
        axes = {"x": dtype, "activation": "Swiglu", "scales": "blocks"}
        return gpu.call("moe_gated_gemm", axes, arguments | change, implementation="wgmma_sm90")

    yield call
    gpu.close()


def test_a_tile_has_128_features_of_both_projections(gated: Callable[..., list[Call]]) -> None:
    (launch,) = launches(calls := gated(1000, 4, 512, 384))
    maps = {c["address"]: c["dimensions"] for c in calls if c["call"] == "tensor_map"}
    assert maps[X] == [[512, 1, 128], [1000, 512, 128], [1, 128, 1]]
    assert maps[W] == [[512, 1, 128], [768, 512, 128], [4, 768 * 512, 1]]
    assert launch["grid"] == [(1000 // 128 + 4) * 3, 1, 1] and launch["shared_bytes"] == 227 * 1024
    p = parameters(launch, "MoeGatedGemmParams")
    assert (p["gemm"]["k_blocks"], p["out_scale"]) == (4, OUT_SCALE)
    problem = p["gemm"]["problem"]
    assert (problem["n"], problem["batch"], problem["out_row_stride"]) == (768, 4, 384)


@pytest.mark.parametrize(("expected", "rows", "box"), [(300, 128, 128), (40, 64, 64)])
def test_16_bits_choose_a_tile(gated: Callable[..., list[Call]], expected: int, rows: int, box: int) -> None:
    """A box of weights has the features of a warpgroup: all of a tile of 128 rows, half of those of one of 64."""
    change = {
        "bias": Tensor(BIAS, (8, 4096), "bf16"), "alpha": Tensor(ALPHA, (8,), "f32"), "beta_value": 1.0,
        "expected_m": expected,
    }  # fmt: skip
    (launch,) = launches(calls := gated(4000, 8, 512, 2048, "bf16", **change))
    maps = {c["address"]: c["dimensions"] for c in calls if c["call"] == "tensor_map"}
    assert maps[X] == [[512, 2, 64], [4000, 1024, rows], [1, 128, 1]]
    assert maps[W] == [[512, 2, 64], [4096, 1024, box], [8, 2 * 4096 * 512, 1]]
    p = parameters(launch, "MoeGatedGemmParams")
    assert (p["gemm"]["k_blocks"], p["out_scale"], p["bias"], p["alpha"], p["beta"]) == (8, None, BIAS, ALPHA, None)
    assert (p["bias_row_stride"], p["bias_is_float"], p["constants"]["beta"]) == (4096, 0, 1.0)


def test_no_rows_are_no_launch(gated: Callable[..., list[Call]]) -> None:
    assert not launches(gated(0, 4, 512, 384))


def test_refusals(gated: Callable[..., list[Call]]) -> None:
    with pytest.raises(ValueError, match="width and k must be multiples of 128"):
        gated(8, 2, 512, 64)
    with pytest.raises(ValueError, match="x must have rows that are 16-byte aligned"):
        gated(8, 2, 512, 128, x=Tensor(X + 8, (8, 512), "e4m3"))
    with pytest.raises(ValueError, match="must be given for float8_e4m3fn and for nothing else"):
        gated(8, 2, 512, 128, "bf16", x_scale=Tensor(X_SCALE, (8, 4), "f32"))
    with pytest.raises(ValueError, match="activation must be one of two projections; got 6"):
        gated(8, 2, 512, 128, activation=6)
    with pytest.raises(TypeError, match="bias must be float32"):
        gated(8, 2, 512, 128, bias=Tensor(BIAS, (2, 256), "bf16"))
