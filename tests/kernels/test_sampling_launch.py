"""How sample lays rows over clusters and shared memory; the mock driver refuses illegal launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kernels.mock_driver import Call, Gpu, Tensor, launches, parameters
from kernels.test_mock_driver import driver, start  # noqa: F401  (fixtures)

Start = Callable[..., Gpu]
BYTES = {"f32": 4, "f16": 2, "bf16": 2}


def calls_of(
    gpu: Gpu,
    rows: int,
    vocab: int,
    dtype: str = "f32",
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float = 0.0,
    output: int = 0,
) -> list[Call]:
    """The launches of a draw from `rows` rows, or of softmax (output 1). Filters: numbers, or tensors, one a row."""
    k = (top_k, 0) if isinstance(top_k, Tensor) else (None, top_k)
    p = (top_p, 1.0) if isinstance(top_p, Tensor) else (None, top_p)
    temperature, seed, offset, changes = (None, 1.0), (None, 1), (None, 2), [None] * 4
    penalties = (None, 1.0, None, 0.0, None, 0.0)
    out = Tensor(0x200000, (rows, vocab), "f32") if output else Tensor(0x200000, (rows,), "i32")
    input = Tensor(0x100000, (rows, vocab), dtype)
    arguments = [*temperature, *k, *p, None, min_p, *seed, *offset, *changes, *penalties, output, True, False]
    return launches(gpu.call("sample", {"dtype": dtype}, out, None, None, input, None, *arguments))


def launch(
    gpu: Gpu, rows: int, vocab: int, dtype: str = "f32", top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> tuple[Call, dict[str, Any]]:
    """The one launch that numbers as filters need, and its parameters."""
    (one,) = calls_of(gpu, rows, vocab, dtype, top_k, top_p, min_p)
    return one, parameters(one, "SampleParams")


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("vocab", [1, 31, 2049, 32000, 128256, 151936, 262144])
@pytest.mark.parametrize("rows", [1, 3, 64, 1000])
def test_blocks_of_a_cluster_hold_the_row(start: Start, rows: int, vocab: int, dtype: str) -> None:  # noqa: F811
    one, p = launch(start(90), rows, vocab, dtype, top_p=0.9, min_p=0.1)
    assert one["name"].startswith("sample_cluster") and not p["streamed"]
    cluster, vector = one["cluster"][0], 16 // BYTES[dtype]
    assert one["grid"] == [rows * cluster, 1, 1]
    assert p["slice"] * cluster >= vocab + vector - 1, "wherever the row begins"
    warps = one["block"][0] // 32
    assert p["slice"] % 512 == p["share"] % 512 == p["held"] % 512 == 0, "whole pieces"
    assert p["share"] * warps >= p["slice"] and 0 < p["held"] <= p["share"]
    assert p["held"] == p["share"] or p["held"] >= 1024, "the pieces at both ends are held"
    assert one["shared_bytes"] == warps * (288 * 4 + p["held"] * BYTES[dtype]) <= 210 * 1024
    assert p["rows"] == rows and p["vocab"] == vocab and p["input_row"] == vocab


@pytest.mark.parametrize("filters", [{}, {"top_k": 1}, {"top_k": 50}, {"top_p": 0.5}, {"top_p": 0.9}], ids=str)
@pytest.mark.parametrize("vocab", [2049, 128256, 524288])
@pytest.mark.parametrize("rows", [1, 64, 1000])
def test_rows_without_filters_or_with_a_small_k_or_a_large_share_are_streamed(
    start: Start,  # noqa: F811
    rows: int,
    vocab: int,
    filters: dict[str, Any],
) -> None:
    one, p = launch(start(90), rows, vocab, **(filters if vocab > 4096 or "top_p" in filters else {}))
    pieces, cluster = -(-vocab // 512), one["cluster"][0]
    assert one["name"].startswith("sample_stream") and p["streamed"]
    assert one["grid"] == [rows * cluster, 1, 1] and cluster <= 16
    assert one["shared_bytes"] == 16 * pieces, "what is known of each piece"


@pytest.mark.parametrize(
    "filters", [{"top_p": 0.49}, {"top_p": 0.9, "min_p": 0.1}, {"top_k": 50, "top_p": 0.0}], ids=str
)
def test_one_kernel_where_numbers_tell_which(start: Start, filters: dict[str, Any]) -> None:  # noqa: F811
    one, p = launch(start(90), 64, 128256, **filters)
    assert one["name"].startswith("sample_stream" if "top_k" in filters else "sample_cluster")
    assert p["streamed"] == ("top_k" in filters)


def test_filters_in_tensors_launch_both_kernels(start: Start) -> None:  # noqa: F811
    """Each takes the rows that are its own; only the device knows which."""
    for filters in ({"top_k": Tensor(0x300000, (3,), "i32")}, {"top_p": Tensor(0x300000, (3,), "f32")}):
        both = calls_of(start(90), 3, 32000, **filters)
        assert [one["name"].rsplit("_", 1)[0] for one in both] == ["sample_stream", "sample_cluster"]
        assert all(parameters(one, "SampleParams")["streamed"] for one in both)


@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.4])
def test_small_batches_spread_rows(start: Start, top_p: float) -> None:  # noqa: F811
    gpu = start(90)
    few, many = (launch(gpu, rows, 32000, top_p=top_p)[0]["cluster"][0] for rows in (1, 1000))
    assert few > many


@pytest.mark.parametrize("capability", [80, 100, 120])
def test_a_block_a_row_where_there_is_no_tuned_cluster(start: Start, capability: int) -> None:  # noqa: F811
    one, _ = launch(start(capability), 2, 524288)
    assert one["name"].startswith("sample_block") and one["grid"] == [2, 1, 1]


def test_the_longest_rows(start: Start) -> None:  # noqa: F811
    for dtype in BYTES:
        one, p = launch(start(90), 1000, 524288, dtype, top_p=0.4)
        assert p["slice"] * one["cluster"][0] >= 524288 + 7
        assert p["slice"] <= 65536, "sums of half weights in 32 bits"
        assert one["shared_bytes"] <= 210 * 1024
    with pytest.raises(ValueError, match=r"1 <= vocab <= 2\^19"):
        launch(start(90), 1, 524289)


def test_no_rows_no_launch(start: Start) -> None:  # noqa: F811
    with pytest.raises(ValueError, match="not enough values"):
        launch(start(90), 0, 128)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("vocab", [1, 2049, 128256, 262145, 524288])
@pytest.mark.parametrize("rows", [1, 64, 1000])
def test_softmax_holds_the_row(start: Start, rows: int, vocab: int, dtype: str) -> None:  # noqa: F811
    (one,) = calls_of(start(90), rows, vocab, dtype, output=1)
    p, cluster, warps = parameters(one, "SampleParams"), one["cluster"][0], one["block"][0] // 32
    pieces = -(-vocab // 512)
    assert one["grid"] == [rows * cluster, 1, 1] and cluster <= 16
    assert cluster * warps * (p["held"] + 1) >= pieces and p["held"] <= 3
    assert one["shared_bytes"] == (pieces + 1) // 2 * 16 + warps * p["held"] * 2048


@pytest.mark.parametrize(("rows", "threads"), [(1, 256), (48, 256), (64, 1024), (66, 1024), (67, 256), (256, 256)])
def test_softmax_is_one_wave_of_large_blocks_where_small_ones_are_not(start: Start, rows: int, threads: int) -> None:  # noqa: F811
    (one,) = calls_of(start(90), rows, 128256, output=1)
    assert one["block"][0] == threads
