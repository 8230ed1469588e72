"""torch.ops.fi_core.*: schema, fake and aliasing of every op hold, on the arguments its public functions pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fi_core
from families.harness import FP8
from fi_bench.startup.calls import arguments as arguments_of
from fi_core.registry import load, ops, supports
from fi_core.runtime.launch import torch_op


@pytest.fixture(scope="module")
def calls() -> dict[str, tuple[Any, ...]]:
    """The arguments of one launch per op."""
    seen: dict[str, tuple[Any, ...]] = {}
    operators = load()

    def record(name: str, arguments: tuple[Any, ...]) -> Any:
        """Takes the place of the registered op, as if torch.compile traced the call."""
        seen.setdefault(name, arguments)
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(torch_op, "is_tracing", lambda: False)
            return operators[name].function(*arguments)

    for operator in operators.values():
        torch_op.register(operator.op, operator.function)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_op, "is_tracing", lambda: True)
        patch.setattr(torch_op, "call", record)
        for name, arguments in arguments_of("cpu").items():
            function: Any = fi_core
            for word in name.split("."):
                function = getattr(function, word)
            function(*arguments())
    return seen


# Functions of a second form of an op, which no call of the sample reaches.
NOT_IN_SAMPLE = {"rmsnorm_block_quant"}


def test_the_sample_reaches_every_op(calls: dict[str, tuple[Any, ...]]) -> None:
    assert set(calls) == set(ops()) - NOT_IN_SAMPLE


@pytest.mark.parametrize("name", sorted(set(ops()) - NOT_IN_SAMPLE))
def test_opcheck(name: str, calls: dict[str, tuple[Any, ...]]) -> None:
    checks = ["test_autograd_registration", "test_faketensor"]
    # The other two scale their inputs, which torch cannot do with fp8 on the CPU.
    if not any(isinstance(a, torch.Tensor) and a.dtype in FP8 for a in calls[name]):
        checks += ["test_schema", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(getattr(torch.ops.fi_core, name).default, calls[name], test_utils=checks)


def test_supports_answers_with_a_reason() -> None:
    assert supports("rmsnorm", dtype="bf16", out="bf16", residual=False) == (True, "")
    ok, why = supports("rmsnorm", capability=75, dtype="bf16", out="bf16", residual=False)
    assert not ok
    assert "requires capability >= 80, got 75" in why
    with pytest.raises(ValueError, match="fields of a request are dtype, out, residual; got type"):
        supports("rmsnorm", type="bf16")
