"""How sample lays rows over clusters and shared memory; the mock driver refuses illegal launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kernels.mock_driver import Call, Gpu, Tensor, launches, parameters
from kernels.test_mock_driver import driver, start  # noqa: F401  (fixtures)

Start = Callable[..., Gpu]
BYTES = {"f32": 4, "f16": 2, "bf16": 2}


def launch(gpu: Gpu, rows: int, vocab: int, dtype: str = "f32", **options: Any) -> tuple[Call, dict[str, Any]]:
    """The one launch of a draw from `rows` rows, and its parameters."""
    arguments = [
        None,
        1.0,
        None,
        0,
        None,
        1.0,
        None,
        0.0,
        None,
        1,
        None,
        2,
        *[None] * 4,
        None,
        1.0,
        None,
        0.0,
        None,
        0.0,
    ]
    calls = gpu.call(
        "sample",
        {"dtype": dtype},
        Tensor(0x200000, (rows,), "i32"),
        None,
        None,
        Tensor(0x100000, (rows, vocab), dtype),
        None,
        *arguments,
        0,
        True,
        False,
        **options,
    )
    (one,) = launches(calls)
    return one, parameters(one, "SampleParams")


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("vocab", [1, 31, 2049, 32000, 128256, 151936, 262144])
@pytest.mark.parametrize("rows", [1, 3, 64, 1000])
def test_blocks_of_a_cluster_hold_the_row(start: Start, rows: int, vocab: int, dtype: str) -> None:  # noqa: F811
    one, p = launch(start(90), rows, vocab, dtype)
    cluster, vector = one["cluster"][0], 16 // BYTES[dtype]
    assert one["grid"] == [rows * cluster, 1, 1]
    assert p["slice"] * cluster >= vocab + vector - 1, "wherever the row begins"
    warps = one["block"][0] // 32
    assert p["slice"] % 512 == p["share"] % 512 == p["held"] % 512 == 0, "whole pieces"
    assert p["share"] * warps >= p["slice"] and 0 < p["held"] <= p["share"]
    assert p["held"] == p["share"] or p["held"] >= 1024, "the pieces at both ends are held"
    assert one["shared_bytes"] == warps * (288 * 4 + p["held"] * BYTES[dtype]) <= 210 * 1024
    assert p["rows"] == rows and p["vocab"] == vocab and p["input_row"] == vocab


def test_small_batches_spread_rows(start: Start) -> None:  # noqa: F811
    gpu = start(90)
    assert launch(gpu, 1, 32000)[0]["cluster"][0] > launch(gpu, 1000, 32000)[0]["cluster"][0]


@pytest.mark.parametrize("capability", [80, 100, 120])
def test_a_block_a_row_where_there_is_no_tuned_cluster(start: Start, capability: int) -> None:  # noqa: F811
    one, _ = launch(start(capability), 2, 524288)
    assert one["name"].startswith("sample_block") and one["grid"] == [2, 1, 1]


def test_the_longest_rows(start: Start) -> None:  # noqa: F811
    for dtype in BYTES:
        one, p = launch(start(90), 1000, 524288, dtype)
        assert p["slice"] * one["cluster"][0] >= 524288 + 7
        assert p["slice"] <= 65536, "sums of half weights in 32 bits"
        assert one["shared_bytes"] <= 210 * 1024
    with pytest.raises(ValueError, match=r"1 <= vocab <= 2\^19"):
        launch(start(90), 1, 524289)


def test_no_rows_no_launch(start: Start) -> None:  # noqa: F811
    with pytest.raises(ValueError, match="not enough values"):
        launch(start(90), 0, 128)
