"""The launcher of gemm_few_bits without a GPU: tiles, warps that split k, memory and refusals, by the mock driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kernels.mock_driver import Call, Gpu, Tensor, build_driver, launches, parameters

OUT, A, B, SB, ALPHA, BIAS = ((1 << 40) + 0x1000000 * i for i in range(6))
Gemm = Callable[..., list[Call]]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_driver(tmp_path_factory.mktemp("gemm_few_bits"))


def calling(gpu: Gpu) -> Gemm:
    """Calls the op on bf16 [m, k] times fp4 [n, k], or e4m3 with block 0, with what is changed; the driver calls."""

    def call(m: int, n: int, k: int, block: int = 16, tokens: int = 16, **change: Any) -> list[Call]:
        arguments: dict[str, Any] = {
            "out": Tensor(OUT, (m, n), "bf16"), "a": Tensor(A, (m, k), "bf16"), "block_size": block,
        }  # fmt: skip
        if block:
            scales = (-(-n // 128) * 128, -(-k // block // 4) * 4)
            arguments |= {"b": Tensor(B, (n, k // 2), "u8"), "b_scale": Tensor(SB, scales, "u8")}
        else:
            arguments["b"] = Tensor(B, (n, k), "e4m3")
        axes = {"out": "bf16", "block": block, "tokens": tokens}
        return gpu.call("gemm_few_bits", axes, arguments | change, implementation="mma_sm90")

    return call


@pytest.fixture(scope="module")
def gemm(driver: Path) -> Iterator[Gemm]:
    gpu = Gpu(driver, driver / "log", 90)
    yield calling(gpu)
    gpu.close()


@pytest.fixture
def batch_invariant_gemm(driver: Path) -> Iterator[Gemm]:
    gpu = Gpu(driver, driver / "batch-invariant-log", 90, FI_BATCH_INVARIANT="1")
    yield calling(gpu)
    gpu.close()


def one(calls: list[Call], struct: str = "GemmFewBitsParams") -> tuple[Call, dict[str, Any]]:
    (launch,) = launches(calls)
    return launch, parameters(launch, struct)


def one_fp8(calls: list[Call]) -> tuple[Call, dict[str, Any]]:
    return one(calls, "GemmFp8WeightsParams")


def test_rows_of_weights_fill_the_device(gemm: Gemm) -> None:
    """28672 rows are 128 CTAs of 14 blocks of 16 rows, which four warps share."""
    calls = gemm(16, 28672, 8192, alpha=Tensor(ALPHA, (), "f32"))
    launch, p = one(calls)
    assert launch["grid"] == [128, 1, 1]
    assert launch["block"] == [640, 1, 1]
    assert (p["blocks"], p["row_warps"], p["scale_blocks"], p["scale_tiles"]) == (14, 4, 3, 128)
    assert (p["scales"], p["alpha"]) == (SB, ALPHA)
    boxes = {c["address"]: c["dimensions"] for c in calls if c["call"] == "tensor_map"}
    assert boxes[B] == [[4096, 1, 128], [28672, 4096, 224], [1, 128, 1]]


def test_fp8_weights_and_their_tokens_come_in_boxes(gemm: Gemm) -> None:
    """Boxes of 128 bytes along k: of 16 tokens, and of the rows of a tile of weights."""
    calls = gemm(5, 28672, 8192, 0, alpha=Tensor(ALPHA, (), "f32"), bias=Tensor(BIAS, (28672,), "bf16"))
    launch, p = one_fp8(calls)
    rows = 16 * p["blocks"]
    assert (p["m"], p["k_stages"], p["token_tiles"], p["alpha"], p["bias"]) == (5, 64, 1, ALPHA, BIAS)
    assert launch["grid"] == [-(-28672 // rows) * p["splits"], 1, 1]
    assert launch["block"] == [576, 1, 1]
    boxes = {c["address"]: c["dimensions"] for c in calls if c["call"] == "tensor_map"}
    assert boxes[A] == [[8192, 2, 64], [5, 16384, 16], [1, 128, 1]]
    assert boxes[B] == [[8192, 1, 128], [28672, 8192, rows], [1, 128, 1]]
    assert (p["b_once"], p["quads"]) == (1, 1)


@pytest.mark.parametrize("tokens", [8, 16, 32, 64])
@pytest.mark.parametrize(("n", "k"), [(4096, 14336), (576, 5120), (72, 96), (1, 32), (2112, 7168), (128256, 8192)])
def test_every_shape_of_fp8_weights_has_a_launch(gemm: Gemm, n: int, k: int, tokens: int) -> None:
    """CTAs cover the rows, the tokens and k, and a ring has stages for all warps; few rows are shared out along k."""
    launch, p = one_fp8(gemm(2 * tokens + 1, n, k, 0, tokens))
    rows, warps, splits = 16 * p["blocks"], 8 if tokens > 32 else 16, p["splits"]
    assert launch["block"] == [32 * (warps + 2), 1, 1]
    assert launch["grid"][0] == 3 * -(-n // rows) * splits
    assert launch["cluster"][0] == splits
    assert p["token_tiles"] == 3 and not p["b_once"]
    assert p["blocks"] <= 2 * p["row_warps"] <= warps
    at_a_time = warps // p["row_warps"] // 2
    assert max(4, 2 * at_a_time) <= p["stages"] <= 24 and p["stages"] % at_a_time == 0
    assert p["own_stages"] * splits >= p["k_stages"] > p["own_stages"] * (splits - 1)
    assert p["own_quads"] * splits >= tokens * rows // 4
    assert p["stages"] * 128 * (rows + 2 * tokens) <= p["ring_bytes"]
    assert launch["shared_bytes"] <= 227 * 1024


def test_batch_invariant_products_with_fp8_weights_add_in_one_order(batch_invariant_gemm: Gemm) -> None:
    """Tile, warps and split of k, on which the order of additions depends, are those of one token."""
    alone, many = (one_fp8(batch_invariant_gemm(m, 4096, 14336, 0))[1] for m in (1, 100))
    for name in ("blocks", "row_warps", "splits", "own_stages"):
        assert alone[name] == many[name]


@pytest.mark.parametrize("tokens", [8, 16])
@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize(("n", "k"), [(4096, 14336), (8192, 28672), (6144, 4096), (72, 96), (1, 32), (128256, 8192)])
def test_every_shape_has_a_launch(gemm: Gemm, n: int, k: int, block: int, tokens: int) -> None:
    """CTAs cover the rows and the tokens; twice the stages fit that sets of warps read at a time, and all in turn."""
    launch, p = one(gemm(2 * tokens + 1, n, k, block, tokens))
    rows = 16 * p["blocks"]
    assert launch["grid"][0] == 3 * -(-n // rows)
    assert p["blocks"] <= 4 * p["row_warps"] <= 16
    assert 16 // p["row_warps"] <= p["stages"] <= 16
    assert p["stages"] % (8 // p["row_warps"]) == 0 and p["stages"] % 4 == 0
    assert launch["shared_bytes"] <= 226 * 1024
    assert p["scale_blocks"] * 128 >= rows


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"b": Tensor(B, (512, 100), "u8")}, "b must have shape"),
        ({"b_scale": Tensor(SB, (512, 8), "u8")}, "b_scale must have 8192 elements"),
        ({"b_scale": Tensor(SB + 4, (512, 16), "u8")}, "b_scale must be 16-byte aligned"),
        ({"alpha": Tensor(ALPHA, (2,), "f32")}, "alpha must have one element"),
        ({"block_size": 8}, "block_size must be 16"),
        ({"bias": Tensor(BIAS, (511,), "bf16")}, "bias must have shape"),
        ({"b": Tensor(B, (512, 256), "e4m3"), "block_size": 0}, "b_scale must be None"),
    ],
)
def test_refusals(gemm: Gemm, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        gemm(5, 512, 256, **change)


def test_nothing_to_do(gemm: Gemm) -> None:
    assert launches(gemm(0, 512, 256)) == []
