"""The launches of sample: clusters, shared memory and choice of kernel. The mock driver refuses illegal launches."""

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
    """The launches of a draw from `rows` rows, or of softmax (output 1). Filters: numbers, or tensors `[rows]`."""
    arguments = {
        **dict.fromkeys(("valid", "adjusted", "indices", "bias", "bitmask", "seen", "seen_count")),
        "out": Tensor(0x7F000200000, (rows, vocab), "f32") if output else Tensor(0x7F000200000, (rows,), "i32"),
        "input": Tensor(0x7F000100000, (rows, vocab), dtype),
        **filter_of("temperature", 1.0),
        **filter_of("top_k", top_k, 0),
        **filter_of("top_p", top_p, 1.0),
        **filter_of("min_p", min_p),
        **filter_of("seed", 1),
        **filter_of("offset", 2),
        **filter_of("repetition_penalty", 1.0),
        **filter_of("frequency_penalty", 0.0),
        **filter_of("presence_penalty", 0.0),
        "output": output,
        "logits": True,
        "joint": False,
    }
    return launches(gpu.call("sample", {"dtype": dtype, "draws": output == 0}, arguments))


def filter_of(name: str, value: float | Tensor, usual: float = 0) -> dict[str, Any]:
    """The two arguments of what is a number or a tensor, one a row."""
    rows = isinstance(value, Tensor)
    return {name: value if rows else None, f"{name}_value": usual if rows else value}


def launch(
    gpu: Gpu, rows: int, vocab: int, dtype: str = "f32", top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> tuple[Call, dict[str, Any]]:
    """The only launch that filters given as numbers need, and its parameters."""
    (one,) = calls_of(gpu, rows, vocab, dtype, top_k, top_p, min_p)
    return one, parameters(one, "SampleParams")


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("vocab", [1, 31, 2049, 32000, 128256, 151936, 262144])
@pytest.mark.parametrize("rows", [1, 3, 64, 1000])
def test_the_ctas_of_a_cluster_cache_the_row(start: Start, rows: int, vocab: int, dtype: str) -> None:  # noqa: F811
    one, p = launch(start(90), rows, vocab, dtype, top_p=0.9, min_p=0.1)
    assert one["name"].startswith("sample_cluster") and not p["single_pass"]
    cluster, vector = one["cluster"][0], 16 // BYTES[dtype]
    assert one["grid"] == [rows * cluster, 1, 1]
    assert p["cta_slots"] * cluster >= vocab + vector - 1, "for any alignment of the row"
    warps = one["block"][0] // 32
    assert p["cta_slots"] % 512 == p["warp_slots"] % 512 == p["warp_cached"] % 512 == 0, "whole tiles"
    assert p["warp_slots"] * warps >= p["cta_slots"] and 0 < p["warp_cached"] <= p["warp_slots"]
    assert p["warp_cached"] == p["warp_slots"] or p["warp_cached"] >= 1024, "the tiles at both ends are cached"
    assert one["shared_bytes"] == warps * (288 * 4 + p["warp_cached"] * BYTES[dtype]) <= 210 * 1024
    assert p["rows"] == rows and p["vocab"] == vocab and p["input_stride"] == vocab


@pytest.mark.parametrize("filters", [{}, {"top_k": 1}, {"top_k": 50}, {"top_p": 0.5}, {"top_p": 0.9}], ids=str)
@pytest.mark.parametrize("vocab", [2049, 128256, 524288])
@pytest.mark.parametrize("rows", [1, 64, 1000])
def test_rows_without_filter_or_with_small_k_or_large_p_take_a_single_pass(
    start: Start,  # noqa: F811
    rows: int,
    vocab: int,
    filters: dict[str, Any],
) -> None:
    one, p = launch(start(90), rows, vocab, **(filters if vocab > 4096 or "top_p" in filters else {}))
    tiles, cluster = -(-vocab // 512), one["cluster"][0]
    assert one["name"].startswith("sample_single_pass") and p["single_pass"]
    assert one["grid"] == [rows * cluster, 1, 1] and cluster <= 16
    assert one["shared_bytes"] == 16 * tiles, "a sum per tile"


@pytest.mark.parametrize(
    "filters", [{"top_p": 0.49}, {"top_p": 0.9, "min_p": 0.1}, {"top_k": 50, "top_p": 0.0}], ids=str
)
def test_filters_as_numbers_launch_one_kernel(start: Start, filters: dict[str, Any]) -> None:  # noqa: F811
    one, p = launch(start(90), 64, 128256, **filters)
    assert one["name"].startswith("sample_single_pass" if "top_k" in filters else "sample_cluster")
    assert p["single_pass"] == ("top_k" in filters)


def test_filters_as_tensors_launch_both_kernels(start: Start) -> None:  # noqa: F811
    """Each kernel skips the rows of the other; only the device knows the values."""
    for filters in ({"top_k": Tensor(0x7F000300000, (3,), "i32")}, {"top_p": Tensor(0x7F000300000, (3,), "f32")}):
        both = calls_of(start(90), 3, 32000, **filters)
        assert [one["name"].rsplit("_", 1)[0] for one in both] == ["sample_single_pass", "sample_cluster"]
        assert all(parameters(one, "SampleParams")["single_pass"] for one in both)


@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.4])
def test_small_batches_use_larger_clusters(start: Start, top_p: float) -> None:  # noqa: F811
    gpu = start(90)
    few, many = (launch(gpu, rows, 32000, top_p=top_p)[0]["cluster"][0] for rows in (1, 1000))
    assert few > many


@pytest.mark.parametrize("capability", [80, 100, 120])
def test_one_cta_per_row_without_a_tuned_cluster_kernel(start: Start, capability: int) -> None:  # noqa: F811
    one, _ = launch(start(capability), 2, 524288)
    assert one["name"].startswith("sample_cta") and one["grid"] == [2, 1, 1]


def test_the_longest_rows(start: Start) -> None:  # noqa: F811
    for dtype in BYTES:
        one, p = launch(start(90), 1000, 524288, dtype, top_p=0.4)
        assert p["cta_slots"] * one["cluster"][0] >= 524288 + 7
        assert p["cta_slots"] <= 65536, "sums of 16-bit half weights fit into 32 bits"
        assert one["shared_bytes"] <= 210 * 1024
    with pytest.raises(ValueError, match=r"1 <= vocab <= 2\^19"):
        launch(start(90), 1, 524289)


def test_no_rows_no_launch(start: Start) -> None:  # noqa: F811
    assert calls_of(start(90), 0, 128) == []


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("vocab", [1, 2049, 128256, 262145, 524288])
@pytest.mark.parametrize("rows", [1, 64, 1000])
def test_softmax_caches_the_row(start: Start, rows: int, vocab: int, dtype: str) -> None:  # noqa: F811
    (one,) = calls_of(start(90), rows, vocab, dtype, output=1)
    p, cluster, warps = parameters(one, "SampleParams"), one["cluster"][0], one["block"][0] // 32
    tiles = -(-vocab // 512)
    assert one["grid"] == [rows * cluster, 1, 1] and cluster <= 16
    assert cluster * warps * (p["warp_cached"] + 1) >= tiles and p["warp_cached"] <= 3
    assert one["shared_bytes"] == (tiles + 1) // 2 * 16 + warps * p["warp_cached"] * 2048


@pytest.mark.parametrize(("rows", "threads"), [(1, 256), (48, 256), (64, 1024), (66, 1024), (67, 256), (256, 256)])
def test_softmax_uses_large_ctas_where_only_they_fit_one_wave(start: Start, rows: int, threads: int) -> None:  # noqa: F811
    (one,) = calls_of(start(90), rows, 128256, output=1)
    assert one["block"][0] == threads
