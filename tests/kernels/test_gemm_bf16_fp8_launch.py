"""The launcher of gemm_bf16_fp8 without a GPU: tiles, shared memory and refusals, by the mock driver."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernels.mock_driver import Call, Gpu, Tensor, build_driver, launches, parameters

OUT, A, B, ALPHA, BIAS = ((1 << 40) + 0x1000000 * i for i in range(5))
Gemm = Callable[..., list[Call]]


@pytest.fixture(scope="module")
def gemm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Calls the op on bf16 [m, k] times e4m3 [n, k], with what is changed; the driver calls."""
    folder = tmp_path_factory.mktemp("gemm_bf16_fp8")
    gpu = Gpu(build_driver(folder), Path(folder) / "log", 90)

    def call(m: int, n: int, k: int, tokens: int = 16, **change: Any) -> list[Call]:
        arguments: dict[str, Any] = {
            "out": Tensor(OUT, (m, n), "bf16"), "a": Tensor(A, (m, k), "bf16"), "b": Tensor(B, (n, k), "e4m3"),
        }  # fmt: skip
        axes = {"out": "bf16", "tokens": tokens}
        return gpu.call("gemm_bf16_fp8", axes, arguments | change, implementation="mma_sm90")

    yield call
    gpu.close()


def one(calls: list[Call]) -> tuple[Call, dict[str, Any]]:
    (launch,) = launches(calls)
    return launch, parameters(launch, "GemmFewBitsParams")


def test_rows_of_weights_fill_the_device(gemm: Gemm) -> None:
    """28672 rows are 128 CTAs of 14 blocks of 16 rows; a stage has 128 k."""
    calls = gemm(16, 28672, 8192, alpha=Tensor(ALPHA, (), "f32"), bias=Tensor(BIAS, (28672,), "bf16"))
    launch, p = one(calls)
    assert (launch["grid"], launch["block"]) == ([128, 1, 1], [640, 1, 1])
    assert (p["blocks"], p["row_warps"], p["scale_blocks"], p["alpha"], p["bias"]) == (14, 4, 0, ALPHA, BIAS)
    boxes = {c["address"]: c["dimensions"] for c in calls if c["call"] == "tensor_map"}
    assert boxes[B] == [[8192, 1, 128], [28672, 8192, 224], [1, 128, 1]]


@pytest.mark.parametrize("tokens", [8, 16])
@pytest.mark.parametrize(("n", "k"), [(4096, 14336), (8192, 28672), (6144, 4096), (72, 96), (1, 16), (128256, 8192)])
def test_every_shape_has_a_launch(gemm: Gemm, n: int, k: int, tokens: int) -> None:
    """CTAs cover the rows and the tokens; twice the stages fit that sets of warps read at a time, and all in turn."""
    launch, p = one(gemm(2 * tokens + 1, n, k, tokens))
    rows, at_a_time = 16 * p["blocks"], 8 // p["row_warps"]
    assert launch["grid"][0] == 3 * -(-n // rows)
    assert p["stages"] >= 2 * at_a_time and p["stages"] % at_a_time == 0 and p["stages"] % 4 == 0
    assert p["stages"] * (rows * 128 + tokens * 128 * 2) < launch["shared_bytes"] <= 227 * 1024


def test_refusals(gemm: Gemm) -> None:
    with pytest.raises(ValueError, match="alpha must have one element"):
        gemm(4, 64, 64, alpha=Tensor(ALPHA, (2,), "f32"))
    with pytest.raises(TypeError, match="b"):
        gemm(4, 64, 64, b=Tensor(B, (64, 64), "e5m2"))
    with pytest.raises(ValueError, match="bias"):
        gemm(4, 64, 64, bias=Tensor(BIAS, (63,), "bf16"))
    assert launches(gemm(0, 64, 64)) == []
