"""A rehearsal shapes the launches of a call without a GPU; they are those that a driver is given for the same call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core.toy import chosen
from fi_core.registry import operator
from fi_core.runtime.launch.kernel import rehearse
from fi_core.runtime.machine import Launch
from fi_core.runtime.machine import launches as rehearsed
from fi_core.runtime.spec.op import Spec
from fi_core.runtime.spec.target import CPU, Target
from kernels.mock_driver import Call, Tensor, in_order, launches
from kernels.test_decode_launch import BATCH, CTAS, KV_HEADS, PAGE, PAGES, Q_HEADS, RANGES
from kernels.test_mock_driver import Start, driver, start  # noqa: F401  (fixtures)

HOPPER = Target("cuda", "90a")
MULTIPROCESSORS, SHARED_LIMIT = 132, 227 * 1024  # of the device that the mock driver plays
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "i32": torch.int32}
RMSNORM = chosen(operator("rmsnorm").op, HOPPER, {"dtype": "bf16", "out": "bf16", "residual": False})
DECODE = chosen(operator("batch_decode").op, HOPPER)


def rmsnorm(rows: int, d: int) -> Call:
    return {
        "out": Tensor(0x7F000200000, (rows, d), "bf16"),
        "input": Tensor(0x7F000100000, (rows, d), "bf16"),
        "residual": None,
        "weight": Tensor(0x7F000300000, (d,), "bf16"),
        "scale": None,
        "eps": 1e-6,
        "weight_bias": 0.0,
        "enable_pdl": None,
    }


def decode(pages_in_use: int) -> Call:
    cache, words = (PAGES, PAGE, KV_HEADS, 128), 12 + (RANGES + 1) * 8 + BATCH * 4 + 2 * RANGES
    return {
        "out": Tensor(0x7F004000000, (BATCH, Q_HEADS, 128), "bf16"),
        "lse": None,
        "partials": Tensor(0x7F005000000, (2 * RANGES, 16, 130), "f32"),
        "schedule": Tensor(0x7F006000000, (words,), "i32"),
        "q": Tensor(0x7F003000000, (BATCH, Q_HEADS, 128), "bf16"),
        "k": Tensor(0x7F001000000, cache, "bf16"),
        "v": Tensor(0x7F002000000, cache, "bf16"),
        "page_indices": Tensor(0x7F007000000, (pages_in_use,), "i32"),
        "kv_layout": 0,
        "num_ctas": CTAS,
        "num_ranges": RANGES,
        "split_kv": 0,
    }


def on_cpu(arguments: Call) -> dict[str, Any]:
    """The same call with tensors of the CPU."""
    return {
        name: torch.empty(value.shape, dtype=DTYPES[value.dtype]) if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }


def seen(call: Call) -> Launch:
    """A launch as the mock driver was asked for it."""
    assert call["block"][1:] == [1, 1] and call["cluster"][1:] == [1, 1]
    grid = tuple(call["grid"])
    return Launch(call["name"], grid, call["block"][0], call["shared_bytes"], call["cluster"][0], call["pdl"])


@pytest.mark.parametrize(
    ("spec", "arguments", "entry"),
    [
        (RMSNORM, rmsnorm(4, 4096), "rmsnorm_cta_256_2"),
        (RMSNORM, rmsnorm(1000, 128), "rmsnorm_warp_16_1"),
        (DECODE, decode(64), "batch_decode_cluster"),
        (DECODE, decode(100_000), "batch_decode_tma"),
    ],
    ids=["rmsnorm of long rows", "rmsnorm of short rows", "decode of little work", "decode of much"],
)
def test_a_rehearsal_launches_what_a_device_would_be_given(
    start: Start,  # noqa: F811
    spec: Spec,
    arguments: Call,
    entry: str,
) -> None:
    given = launches(start(90).call(spec.op.name, dict(spec.axes), arguments, implementation=spec.implementation))
    kernel = rehearse(spec, MULTIPROCESSORS, SHARED_LIMIT)
    found = rehearsed(kernel.run(*in_order(spec.op, on_cpu(arguments))))
    assert found == tuple(map(seen, given))
    assert [launch.entry for launch in found] == [entry]


def test_each_call_tells_its_own_launches() -> None:
    kernel = rehearse(RMSNORM, MULTIPROCESSORS, SHARED_LIMIT)
    for rows in (2, 9):
        (one,) = rehearsed(kernel.run(*in_order(RMSNORM.op, on_cpu(rmsnorm(rows, 4096)))))
        assert one.grid == (rows, 1, 1)
    assert str(one) == "rmsnorm_cta_256_2: grid 9 x 1 x 1, 256 threads, 0 B shared, pdl"
    nothing = rehearsed(kernel.run(*in_order(RMSNORM.op, on_cpu(rmsnorm(0, 4096)))))
    assert nothing == (), "nothing is launched for nothing"


def test_arguments_are_checked_as_in_a_call() -> None:
    kernel = rehearse(RMSNORM, MULTIPROCESSORS, SHARED_LIMIT)
    with pytest.raises(ValueError, match=r"rmsnorm: weight must have shape .*4096.*got \[4095\]"):
        kernel.run(*in_order(RMSNORM.op, on_cpu(rmsnorm(4, 4096) | {"weight": Tensor(0, (4095,), "bf16")})))


def test_the_device_that_is_meant_shapes_the_launch() -> None:
    """A cluster of decode has as many CTAs as a device of so many multiprocessors runs at once."""
    grids = []
    for multiprocessors in (MULTIPROCESSORS, 16):
        kernel = rehearse(DECODE, multiprocessors, SHARED_LIMIT)
        (one,) = rehearsed(kernel.run(*in_order(DECODE.op, on_cpu(decode(8)))))
        grids.append((one.entry, one.cluster))
    assert grids[0] == ("batch_decode_cluster", 4) and grids[1] != grids[0]


def test_a_cpu_has_no_launches_to_rehearse() -> None:
    with pytest.raises(AssertionError, match="only a CUDA spec can be rehearsed"):
        rehearse(chosen(RMSNORM.op, CPU), MULTIPROCESSORS, SHARED_LIMIT)
