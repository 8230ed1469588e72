"""The launches of top_k: clusters and shared memory. The mock driver refuses illegal launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kernels.mock_driver import Call, Gpu, Tensor, launches, parameters
from kernels.test_mock_driver import driver, start  # noqa: F401  (fixtures)

Start = Callable[..., Gpu]
BYTES = {"f32": 4, "f16": 2, "bf16": 2}
NON_PORTABLE = 14


def calls_of(gpu: Gpu, rows: int, width: int, k: int, dtype: str = "f32", *, by_value: bool = False) -> list[Call]:
    arguments = {
        "input": Tensor(0x7F000100000, (rows, width), dtype),
        "k": k,
        "values": Tensor(0x7F000200000, (rows, k), dtype),
        "indices": Tensor(0x7F000300000, (rows, k), "i64"),
        **dict.fromkeys(("out", "out_raw_indices", "lengths", "row_starts")),
        **dict.fromkeys(("src_page_table", "row_to_batch", "page_table_row_starts", "offsets")),
        "page_size": 1,
        "prefer_last": False,
        "sorted": by_value,
    }
    return gpu.call("top_k", {"dtype": dtype}, arguments)


@pytest.mark.parametrize("by_value", [False, True])
@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_shared_memory_has_room_for_every_row(start: Start, dtype: str, capability: int, by_value: bool) -> None:  # noqa: F811
    gpu = start(capability)
    for rows, width, k in (
        (1, 1, 1), (1, 131072, 2048), (3, 50257, 50), (16, 131072, 256), (64, 131072, 2048), (256, 262144, 4096),
        (1000, 333, 7), (200_000, 8192, 64), (1, 500_000, 100),
    ):  # fmt: skip
        (one,) = launches(calls_of(gpu, rows, width, k, dtype, by_value=by_value))
        p: dict[str, Any] = parameters(one, "TopKParams")
        cluster = one["cluster"][0]
        assert one["grid"] == [rows * cluster, 1, 1]
        assert cluster == 1 or capability >= 90
        vector = 16 // BYTES[dtype]
        flagged = (p["sort_at"] - p["bitmap_at"]) * 8 * vector  # elements of a slice: the bitmap has one bit per vector
        assert flagged * cluster >= width + vector - 1, "for any alignment of the row"
        assert p["bitmap_at"] == p["cached"] * 16
        assert p["cached"] % 32 == 0
        assert p["cached"] * vector <= flagged
        assert p["fixed_at"] - p["sort_at"] >= (8 * k if by_value else 0)
        assert p["fixed_at"] + 2 * 4096 * 4 < one["shared_bytes"] <= {80: 163, 90: 227, 120: 99}[capability] * 1024
        assert all(p[at] % 16 == 0 for at in ("bitmap_at", "sort_at", "fixed_at"))


def test_few_rows_use_large_clusters(start: Start) -> None:  # noqa: F811
    gpu = start(90)
    calls = calls_of(gpu, 1, 131072, 2048)
    assert launches(calls)[0]["cluster"] == [16, 1, 1]
    again = calls_of(gpu, 2, 131072, 2048)
    allowed = [c for c in (*calls, *again) if c["call"] == "attribute" and c["id"] == NON_PORTABLE]
    assert len(allowed) <= 1, "set once"
    assert launches(calls_of(start(120), 1, 131072, 2048))[0]["cluster"] == [8, 1, 1], "the largest portable one"


def test_rows_whose_bitmap_exceeds_shared_memory(start: Start) -> None:  # noqa: F811
    with pytest.raises(ValueError, match=r"rows of 3000001 elements need \d+ bytes of shared memory per CTA"):
        calls_of(start(89), 1, 3_000_001, 5)
