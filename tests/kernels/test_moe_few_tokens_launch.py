"""The launcher of moe_few_tokens without a GPU: a cooperative launch, and how a layer is shared out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kernels.mock_driver import Call, Gpu, Tensor, build_driver, launches, parameters

OUT, ACT, X, UP, DOWN, IDS, S1, S2 = (0x7F001000000 * (i + 1) for i in range(8))


def calls_of(gpu: Gpu) -> Callable[..., list[Call]]:
    """Calls the op on tokens [t, h] and e experts of width i, k for each token; the driver calls."""

    def call(t: int, k: int, e: int, h: int, i: int, fp8: bool = True, **change: Any) -> list[Call]:
        arguments: dict[str, Any] = {
            "out": Tensor(OUT, (t, h), "bf16"),
            "activated": Tensor(ACT, (t * k, i), "bf16"),
            "x": Tensor(X, (t, h), "bf16"),
            "up": Tensor(UP, (e, 2 * i, h), "e4m3" if fp8 else "bf16"),
            "down": Tensor(DOWN, (e, h, i), "e4m3" if fp8 else "bf16"),
            "ids": Tensor(IDS, (t, k), "i32"),
            "expected_slots": t * k,
        } | change
        if fp8:
            arguments["up_scale"] = Tensor(S1, (e, 2 * i // 128, h // 128), "f32")
            arguments["down_scale"] = Tensor(S2, (e, h // 128, i // 128), "f32")
        axes = {"x": "bf16", "weight": "e4m3" if fp8 else "bf16", "activation": "Swiglu"}
        return gpu.call("moe_few_tokens", axes, arguments, implementation="mma_sm90")

    return call


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_driver(tmp_path_factory.mktemp("moe_few_tokens"))


@pytest.fixture(scope="module")
def layer(driver: Path) -> Iterator[Callable[..., list[Call]]]:
    gpu = Gpu(driver, driver / "log", 90)
    yield calls_of(gpu)
    gpu.close()


def test_one_cooperative_launch(layer: Callable[..., list[Call]]) -> None:
    (launch,) = launches(layer(1, 8, 256, 2048, 512))
    assert (launch["grid"], launch["block"]) == ([132, 1, 1], [512, 1, 1])
    assert launch["cooperative"] and launch["pdl"]
    p = parameters(launch, "MoeFewTokensParams")
    assert [p[name] for name in ("x", "ids", "weights", "out", "activated")] == [X, IDS, None, OUT, ACT]
    assert [p[name] for name in ("tokens", "top_k", "hidden", "width", "experts")] == [1, 8, 2048, 512, 256]
    names = ("lines", "pitch", "expert_bytes", "row_bytes", "scale_row_stride")
    assert [p["up"][name] for name in names] == [16, 4112, 2 << 20, 2048, 16]
    assert [p["down"][name] for name in names] == [4, 1040, 1 << 20, 512, 4]


@pytest.mark.parametrize(
    ("shape", "features", "units"),
    [
        ((1, 8, 256, 2048, 512), 32, 4),  # 128 work tiles
        ((2, 8, 256, 2048, 512), 64, 8),
        ((1, 8, 128, 2048, 768), 48, 8),
        ((1, 1, 32, 7168, 2048), 16, 2),  # a rank that expects one expert
    ],
)
def test_work_tiles_fill_the_device(
    layer: Callable[..., list[Call]], shape: tuple[int, ...], features: int, units: int
) -> None:
    p = parameters(launches(layer(*shape))[0], "MoeFewTokensParams")
    assert (p["features"], p["k_warps"], p["unit"]) == (features, 16 // units, features // units)
    assert p["feature_tiles"] * features == shape[4] and p["row_tiles"] == -(-shape[3] // p["rows"])


def test_rows_must_fit_shared_memory(layer: Callable[..., list[Call]]) -> None:
    assert launches(layer(1, 2, 8, 4096, 14336, fp8=False))
    with pytest.raises(ValueError, match="x and activated must take at most"):
        layer(2, 2, 8, 4096, 14336, fp8=False)


def test_fewer_ctas_where_fewer_run_at_once(driver: Path) -> None:
    """A green context: the driver refuses a grid that is not resident as a whole."""
    gpu = Gpu(driver, driver / "log of few", 90, FI_MOCK_RESIDENT="40")
    grids = [launch["grid"][0] for launch in launches(calls_of(gpu)(1, 8, 16, 256, 128))]
    gpu.close()
    assert grids == [132, 66, 33]
