"""The launcher of lora_delta without a GPU: two launches, of which the second waits for sums only, and their tasks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fi_core.lora.ops import sums_shape
from kernels.mock_driver import Call, Gpu, Tensor, build_driver, launches, parameters

OUT, X, WHO, A, B, SUMS, ROWS, OFFSETS = (0x7F001000000 * (i + 1) for i in range(8))


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gpu]:
    folder: Path = build_driver(tmp_path_factory.mktemp("lora"))
    gpu = Gpu(folder, folder / "log", 90)
    yield gpu
    gpu.close()


def calls_of(
    gpu: Gpu, pairs: int, loras: int, experts: int, k: int, n: int, rank: int = 16, stage: int = 0, **change: Any
) -> list[Call]:
    """What adapters `[loras, experts, rank, k]` on rows in order, or sorted by expert, ask of the driver."""
    arguments: dict[str, Any] = {
        "out": Tensor(OUT, (1, pairs, rank) if stage == 1 else (pairs, n), "bf16"),
        "x": Tensor(X, (pairs, k), "bf16"),
        "lora_indices": Tensor(WHO, (pairs,), "i64"),
        "a": Tensor(A, (loras, experts, rank, k), "bf16"),
        "b": None if stage == 1 else Tensor(B, (loras, experts, n, rank), "bf16"),
        "sums": Tensor(SUMS, sums_shape(pairs, rank, k, loras * experts), "f32"),
        "stage": stage,
    }
    if experts > 1:
        arguments["tokens"] = Tensor(ROWS, (pairs,), "i32")
        arguments["offsets"] = Tensor(OFFSETS, (experts + 1,), "i32")
    axes = {"dtype": "bf16", "x": "bf16", "out": "bf16", "stage": ("Delta", "Shrink")[stage]}
    return gpu.call("lora_delta", axes, arguments | change)


def delta(gpu: Gpu, *sizes: int, **change: Any) -> list[Call]:
    return launches(calls_of(gpu, *sizes, **change))


def test_what_is_expanded_waits_for_sums_only(gpu: Gpu) -> None:
    """The second launch may read tables and weights at once; the first may not, unless the caller says so."""
    for ready in (False, True):
        shrink, expand = delta(gpu, 64, 8, 1, 4096, 4096, ready=ready)
        assert shrink["pdl"] and expand["pdl"]
        assert parameters(shrink, "LoraDeltaParams")["ready"] == ready
        p = parameters(expand, "LoraDeltaParams")
        assert p["ready"] == 1
        assert (p["middle"], p["parts"], p["middle_part_stride"], p["middle_row_stride"]) == (SUMS, 8, 64 * 16, 16)


@pytest.mark.parametrize(
    ("pairs", "rank", "columns"), [(1, 16, 256), (64, 16, 256), (1024, 16, 256), (9000, 16, 1024), (64, 64, 128),
                                   (1024, 64, 256), (64, 256, 128)]
)  # fmt: skip
def test_few_adapters_share_rows_among_multiprocessors(gpu: Gpu, pairs: int, rank: int, columns: int) -> None:
    """The parts of `in` are those of any batch, so that bits are; chunks of columns are not. Their weights lie in
    shared memory behind the sums of a tile.
    """
    shrink, found = delta(gpu, pairs, 8, 1, 4096, 4096, rank)
    expand = parameters(found, "LoraDeltaParams")
    assert parameters(shrink, "LoraDeltaParams")["parts"] == 8
    assert (expand["chunk_groups"], expand["chunks"]) == (columns // 32, 4096 // columns)
    rows = {1: 8, 64: 16}.get(pairs, 32)
    assert found["shared_bytes"] == 2 * rows * (rank + 8) + 2 * rank * columns


def test_no_more_ctas_than_tiles_have_tasks(gpu: Gpu) -> None:
    """64 pairs of 8 adapters have at most 11 tiles of 16, of 8 parts and of 16 chunks."""
    shrink, expand = delta(gpu, 64, 8, 1, 4096, 4096)
    assert (shrink["grid"], expand["grid"]) == ([88, 1, 1], [176, 1, 1])


@pytest.mark.parametrize(("begin", "width", "wide"), [(0, 4096, 1), (8, 4104, 1), (2, 4104, 0), (0, 4100, 0)])
def test_vectors_of_an_output_that_is_aligned(gpu: Gpu, begin: int, width: int, wide: int) -> None:
    """16 bytes at a time where each slice begins at a multiple of them in every row."""
    out = Tensor(OUT, (64, width), "bf16")
    expand = delta(gpu, 64, 8, 1, 4096, 4096, out=out, begin=begin)[1]
    assert parameters(expand, "LoraDeltaParams")["wide"] == wide


def test_a_window_has_no_more_ctas_than_tasks(gpu: Gpu) -> None:
    for pairs, experts, k, groups in ((512, 128, 2048, 132), (4, 128, 2048, 4), (2, 1, 512, 2)):
        found = delta(gpu, pairs, 8, experts, k, 768)[0]
        assert parameters(found, "LoraDeltaParams")["groups"] == groups
        assert found["grid"] == [groups * -(-pairs // 256), 1, 1]


def test_a_shrink_adds_its_parts(gpu: Gpu) -> None:
    shrink, add = delta(gpu, 30, 8, 1, 4096, 0, stage=1)
    assert (add["grid"], add["shared_bytes"]) == ([30, 1, 1], 0)
    assert parameters(add, "LoraDeltaParams")["parts"] == parameters(shrink, "LoraDeltaParams")["parts"] == 8


def test_sums_without_a_place_are_memory_of_one_call(gpu: Gpu) -> None:
    """Of as many bytes as they have where a plan gives them, until what reads them is launched."""
    gpu.allocates()
    calls = [
        c for c in calls_of(gpu, 64, 8, 1, 4096, 4096, sums=None) if c["call"] in ("allocate", "launch", "release")
    ]
    assert [call["call"] for call in calls] == ["allocate", "launch", "launch", "release"]
    assert calls[0]["bytes"] == 4 * math.prod(sums_shape(64, 16, 4096, 8))
    for launch in calls[1:3]:
        assert parameters(launch, "LoraDeltaParams")["middle"] == calls[0]["address"]


@pytest.mark.parametrize(("loras", "experts", "k"), [(8, 1, 4096), (32, 1, 520), (33, 1, 4096), (8, 128, 2048)])
def test_a_plan_gives_as_many_parts_as_the_launcher_asks_for(gpu: Gpu, loras: int, experts: int, k: int) -> None:
    parts, *rest = sums_shape(30, 16, k, loras * experts)
    assert parameters(delta(gpu, 30, loras, experts, k, 768)[0], "LoraDeltaParams")["parts"] == parts
    with pytest.raises(ValueError, match=f"sums must have shape .*parts = {parts}.* got .{parts + 1}"):
        delta(gpu, 30, loras, experts, k, 768, sums=Tensor(SUMS, (parts + 1, *rest), "f32"))
