"""The launcher of moe_experts without a GPU: tensor maps of gated weights, seen by the mock driver."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernels.mock_driver import Call, Gpu, Tensor, build_driver, launches, parameters

OUT, ACT, X, UP, DOWN, OFFSETS, ROWS, PROGRESS, S1, S2, SUM, IDS = (0x7F001000000 * (i + 1) for i in range(12))


@pytest.fixture(scope="module", params=["0"])
def experts(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """Calls the op on tokens [t, h] and experts of width i; the driver calls. Its parameter: FI_BATCH_INVARIANT."""
    folder = tmp_path_factory.mktemp("moe_experts")
    gpu = Gpu(build_driver(folder), Path(folder) / "log", 90, FI_BATCH_INVARIANT=request.param)

    def call(t: int, k: int, e: int, h: int, i: int, tokens: int = 8, **change: Any) -> list[Call]:
        dtype = change.pop("dtype", "e4m3" if change else "bf16")
        arguments: dict[str, Any] = {
            "out": Tensor(OUT, (t * k, h), "bf16"),
            "activated": Tensor(ACT, (t * k, i), "bf16"),
            "x": Tensor(X, (t, h), "bf16"),
            "up": Tensor(UP, (e, 2 * i, h), dtype),
            "down": Tensor(DOWN, (e, h, i), dtype),
            "offsets": Tensor(OFFSETS, (e + 1,), "i32"),
            "rows": Tensor(ROWS, (t * k,), "i32"),
            "progress": Tensor(PROGRESS, (641,), "i32"),
        } | change
        axes = {"x": "bf16", "weight": dtype, "activation": "Swiglu", "tokens": tokens}
        return gpu.call("moe_experts", axes, arguments, implementation="wgmma_sm90")

    yield call
    gpu.close()


def test_rows_of_up_and_gate_alternate_in_a_box(experts: Callable[..., list[Call]]) -> None:
    scales = {"up_scale": Tensor(S1, (16, 4, 3), "f32"), "down_scale": Tensor(S2, (16, 3, 2), "f32")}
    calls = experts(3, 2, 16, 384, 256, **scales)
    (launch,) = launches(calls)
    maps = {c["address"]: c["dimensions"] for c in calls if c["call"] == "tensor_map"}
    rows = int(launch["name"].rpartition("x")[2])
    assert maps[UP] == [[384, 1, 128], [8, 384, 8], [2, 256 * 384, 2], [32, 8 * 384, rows // 16], [16, 512 * 384, 1]]
    assert maps[DOWN] == [[256, 1, 128], [8, 256, 8], [1, 384 * 256, 1], [48, 8 * 256, rows // 8], [16, 384 * 256, 1]]
    p = parameters(launch, "ExpertGemmParams")
    up, down = p["gemm"]
    assert (up.features, up.k, up.k_blocks, up.gated, up.activated) == (256, 384, 3, 1, 1)
    assert (down.features, down.k, down.k_blocks, down.gated, down.activated) == (384, 256, 2, 0, 0)
    assert (up.source, down.source, p["products"], p["experts"]) == (ROWS, None, 2, 16)


def test_blocks_of_shuffled_rows_are_boxes(experts: Callable[..., list[Call]]) -> None:
    """BlockMajorK: a block of k of an expert is a matrix of its own. Gate and up alternate in memory already."""
    up, down = Tensor(UP, (4, 6, 512, 64), "bf16"), Tensor(DOWN, (4, 4, 384, 64), "bf16")
    (launch,) = launches(calls := experts(3, 2, 4, 384, 256, up=up, down=down, shuffle_tile=128, dtype="bf16"))
    maps = {c["address"]: c["dimensions"] for c in calls if c["call"] == "tensor_map"}
    rows = int(launch["name"].rpartition("x")[2])
    assert maps[UP] == [[64, 2, 64], [8, 128, 8], [2, 8 * 128, 2], [32, 16 * 128, rows // 16], [4 * 6, 512 * 128, 1]]
    assert maps[DOWN] == [[64, 2, 64], [8, 128, 8], [1, 384 * 128, 1], [48, 8 * 128, rows // 8], [4 * 4, 384 * 128, 1]]
    products = parameters(launch, "ExpertGemmParams")["gemm"]
    assert [(g.k_apart, g.k_blocks, g.order.step, g.order.paired) for g in products] == [(1, 6, 2, 1), (1, 4, 4, 0)]


def test_passes_have_room(experts: Callable[..., list[Call]]) -> None:
    """Experts and full tiles of 8 tokens are at most 640 passes."""
    assert launches(experts(512, 8, 128, 64, 32))
    with pytest.raises(ValueError, match="rows must be at most 4096 for 128 experts"):
        experts(513, 8, 128, 64, 32)


def test_few_slots_have_tiles_of_fewer_weight_rows(experts: Callable[..., list[Call]]) -> None:
    scales = {"up_scale": Tensor(S1, (16, 4, 3), "f32"), "down_scale": Tensor(S2, (16, 3, 2), "f32")}
    names = [launches(experts(t, 8, 16, 384, 256, **scales))[0]["name"] for t in (2, 3)]
    assert names == ["moe_experts_8x64", "moe_experts_8x128"]


@pytest.mark.parametrize(
    ("experts", "least"), [("0", "moe_experts_8x128"), ("1", "moe_experts_8x64")], indirect=["experts"]
)
def test_16_bit_weights_have_them_inside_of_batch_invariant(experts: Callable[..., list[Call]], least: str) -> None:
    names = [launches(experts(t, 8, 16, 384, 256))[0]["name"] for t in (2, 3)]
    assert names == [least, "moe_experts_8x128"]


def test_few_slots_are_sorted_and_summed_by_the_kernel(experts: Callable[..., list[Call]]) -> None:
    def call(t: int, tokens: int = 8) -> list[Call]:
        scales = {"up_scale": Tensor(S1, (16, 4, 3), "f32"), "down_scale": Tensor(S2, (16, 3, 2), "f32")}
        sums = {"sum": Tensor(SUM, (t, 384), "bf16"), "ids": Tensor(IDS, (t, 8), "i32"), "first_expert": 32}
        return experts(t, 8, 16, 384, 256, tokens, **scales, **sums)

    slots = parameters(launches(call(8))[0], "ExpertGemmParams")["slots"]
    assert [slots[name] for name in ("ids", "sum", "weights", "bias")] == [IDS, SUM, None, None]
    assert [slots[name] for name in ("count", "top_k", "first_expert", "sum_row_stride")] == [64, 8, 32, 384]
    with pytest.raises(ValueError, match="ids must have at most 64 elements"):
        call(9)
    with pytest.raises(ValueError, match="expected_tokens must be at most 16"):
        call(8, 32)
