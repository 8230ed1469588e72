"""The switch of batch invariance: who turns it on, who sees it, and which kernels a call then gets."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import threading

import pytest
import torch

import fi_core
from core.toy import SCALE
from fi_core import aot
from fi_core.registry import operator
from fi_core.runtime.dispatch import Request, choose, explain
from fi_core.runtime.errors import UnsupportedError
from fi_core.runtime.invariance import is_on
from fi_core.runtime.machine import Launch, Rehearsal
from fi_core.runtime.resolve.ahead import planned
from fi_core.runtime.spec.constraint import VARIES
from fi_core.runtime.spec.target import CPU, Target

HOPPER = Target("cuda", "90a")
FAST, SLOW = (dataclasses.replace(SCALE.implementation("cuda"), name=name) for name in ("fast", "slow"))
CAREFUL = dataclasses.replace(
    SCALE, implementations=(dataclasses.replace(FAST, constraints=(*FAST.constraints, *VARIES)), SLOW)
)


def test_blocks_are_nested_overlap_and_decorate() -> None:
    first, second = fi_core.batch_invariant(), fi_core.batch_invariant()
    assert not is_on()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert is_on(), "the second block is open"
    second.__exit__(None, None, None)
    assert not is_on()

    decorated = fi_core.batch_invariant()(is_on)
    assert decorated() and decorated() and not is_on()
    with pytest.raises(KeyError), fi_core.batch_invariant():
        raise KeyError
    assert not is_on()


def test_every_thread_sees_an_open_block() -> None:
    seen = []
    with fi_core.batch_invariant():
        thread = threading.Thread(target=lambda: seen.append(is_on()))
        thread.start()
        thread.join()
    assert seen == [True]


def test_the_environment_turns_it_on() -> None:
    code = "import fi_core; print(fi_core.supports('rmsnorm'), fi_core.runtime.invariance.is_on())"
    code = f"import fi_core.runtime.invariance; {code}"
    for value, on in (("1", "True"), ("0", "False")):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "FI_BATCH_INVARIANT": value}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.split()[-1] == on


def test_a_kernel_that_follows_the_batch_is_not_chosen() -> None:
    request = Request.of(CAREFUL, HOPPER)
    assert choose(request).implementation == "fast" and "batch_invariant" not in str(request)
    with fi_core.batch_invariant():
        inside = Request.of(CAREFUL, HOPPER)
    assert inside != request and inside.batch_invariant and str(inside).endswith("batch_invariant) on sm_90a")
    assert choose(inside).implementation == "slow"
    (reason,) = explain(inside)["fast"]
    assert reason.startswith("requires a call outside of fi_core.batch_invariant()")

    alone = dataclasses.replace(CAREFUL, implementations=CAREFUL.implementations[:1])
    with (
        fi_core.batch_invariant(),
        pytest.raises(UnsupportedError, match=r"fast: requires a call outside of fi_core\.batch_invariant"),
    ):
        choose(Request.of(alone, HOPPER))


def test_fp8_products_have_one_kernel_for_any_number_of_tokens() -> None:
    gemm = operator("gemm").op
    few, many = "wgmma_small_m_sm90", "wgmma_sm90"
    for a, wanted in (("e4m3", [many, many]), ("bf16", [few, many])):
        asked = [Request.of(gemm, HOPPER, {"a": a, "b": a, "m": m}) for m in (8, 65)]
        assert [choose(request).implementation for request in asked] == [few, many]
        with fi_core.batch_invariant():
            asked = [Request.of(gemm, HOPPER, {"a": a, "b": a, "m": m}) for m in (8, 65)]
        assert [choose(request).implementation for request in asked] == wanted
    with fi_core.batch_invariant():
        built = {spec.implementation for spec in aot.specs(gemm, HOPPER)}
    assert few in built, "the switch does not leave kernels out of packages"


def product(m: int, n: int, k: int, on: bool) -> Launch:
    """The launch of a bf16 product on an H200."""
    a, b, out = (torch.empty(*shape, dtype=torch.bfloat16) for shape in ((m, k), (n, k), (m, n)))
    with (
        Rehearsal(HOPPER, 132, 227 << 10) as rehearsal,
        fi_core.batch_invariant() if on else contextlib.nullcontext(),
    ):
        operator("gemm").function(out, a, b)
    ((_, launches),) = rehearsal.calls
    assert launches is not None
    return launches[0]


@pytest.mark.parametrize("m", [8, 33, 64])
def test_products_of_few_tokens_are_as_outside_or_in_fixed_parts(m: int) -> None:
    """Weights of many rows fill a card anyway; k of others has as many parts, inside, as for one token."""
    for n, k in ((6144, 4096), (4096, 14336), (28672, 4096)):
        assert product(m, n, k, True) == product(m, n, k, False)
    for n, k in ((2048, 4096), (576, 7168), (1000, 4096)):
        assert product(m, n, k, True).cluster == product(1, n, k, True).cluster > 1


def test_a_call_asks_anew_inside_of_a_block() -> None:
    x, weight = torch.randn(3, 64), torch.ones(64)
    rmsnorm = operator("rmsnorm")

    def is_invariant() -> bool:
        choice = rmsnorm.function(torch.empty_like(x), x, weight)
        assert choice is not None
        return choice.request.batch_invariant

    assert not is_invariant()
    with fi_core.batch_invariant():
        assert is_invariant()
    assert not is_invariant()


def test_a_plan_asks_anew_inside_of_a_block() -> None:
    device, values = torch.device("cpu"), ("f32", "f32", False)
    outside = planned(operator("rmsnorm").op, device, "auto", *values)
    with fi_core.batch_invariant():
        inside = planned(operator("rmsnorm").op, device, "auto", *values)
        assert Request.of(operator("rmsnorm").op, CPU).batch_invariant
    assert (outside.request.batch_invariant, inside.request.batch_invariant) == (False, True)


@pytest.mark.parametrize("name", ["moe_experts", "moe_few_tokens"])
def test_ops_whose_sums_follow_the_batch_refuse_by_name(name: str) -> None:
    op, e4m3 = operator(name).op, {"weight": "e4m3"}
    for target in (CPU, HOPPER):
        choose(Request.of(op, target, e4m3))
        with (
            fi_core.batch_invariant(),
            pytest.raises(UnsupportedError, match=f"(?s){name}.*outside of fi_core.batch_invariant"),
        ):
            choose(Request.of(op, target, e4m3))
