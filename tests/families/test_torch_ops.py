"""torch.ops.fi_core.*: schema, fake and aliasing of every op hold, on the arguments its public functions pass."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fi_core
from families.harness import FP8
from fi_core.launch.op import Launcher
from fi_core.registry import ops, supports


def _startup() -> ModuleType:
    """benchmarks/startup.py, which has one small call per public function."""
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "startup.py"
    spec = importlib.util.spec_from_file_location("startup", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def calls() -> dict[str, tuple[Any, ...]]:
    """The arguments of one launch per op."""
    seen: dict[str, tuple[Any, ...]] = {}
    launch = Launcher.__call__

    def record(self: Launcher, *arguments: Any) -> None:
        seen.setdefault(self.op.name, arguments)
        launch(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launcher, "__call__", record)
        for name, arguments in _startup().arguments("cpu").items():
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
    with pytest.raises(ValueError, match="axes must be dtype, out, residual; got dtype"):
        supports("rmsnorm", dtype="bf16")
