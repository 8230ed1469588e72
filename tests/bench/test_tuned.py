"""The backend `tuned`: it finds the fastest tactic of all implementations, and undoes what it forces."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bench.helpers import write
from fi_bench import record
from fi_bench.cli import main
from fi_bench.tuned import Configuration, Tuned
from fi_core.runtime.launch.operator import operators

TIMES = {("large", 0): 5.0, ("large", 3): 3.0, ("small", 1): 4.0}  # of what the launchers take


class Operator:
    """An operator whose implementations are `large` and `small`, which have tactics, and `plain`, which has none."""

    def __init__(self) -> None:
        self.op, self.forced, self.used = SimpleNamespace(name="product"), None, (None, -1)
        self.function: Any = lambda *args, tactic=-1: self.call(tactic)

    def forget(self) -> None:
        pass

    def call(self, tactic: int) -> None:
        implementation = self.forced
        if implementation != "plain" and tactic >= 0 and (implementation, tactic) not in TIMES:
            raise ValueError(f"tactic must be one of this problem below 9; got {tactic}")
        self.used = (implementation, tactic)

    def time(self) -> float:
        product()
        return TIMES.get(self.used, 3.5)


def product() -> None:
    operation("a", "b")


operation: Any = None


def test_the_fastest_tactic_of_all_implementations_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = Operator()
    monkeypatch.setitem(globals(), "operation", operator.function)
    tuned = Tuned(operator, product)
    with tuned.in_place():
        assert tuned.fastest(["small", "plain"], operator.time) == Configuration("plain", -1)
        found = tuned.fastest(["large", "small", "plain"], operator.time)
        assert found == Configuration("large", 3)
        tuned.use(found)
        product()
        assert operator.used == ("large", 3)
    assert operation is operator.function and operator.forced is None


def test_a_case_that_no_configuration_takes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = Operator()
    monkeypatch.setitem(globals(), "operation", operator.function)
    tuned = Tuned(operator, product)
    with tuned.in_place(), pytest.raises(ValueError, match="no configuration of product takes the case"):
        tuned.fastest(["unknown"], operator.time)


def test_a_product_is_tuned_and_checked_on_a_cpu(tmp_path: Any) -> None:
    """The CPU has one configuration; afterwards calls choose by themselves again."""
    out = write(tmp_path / "r.jsonl", [])
    words = "--routine mm_bf16 --m 3 --n 64 --k 128 --num_iters 5 --refcheck --backends auto tuned torch --output_path"
    assert main([*words.split(), out]) == 0
    rows = {r["backend"]: r for r in record.read(out)}
    assert rows["tuned"]["status"] == "ok" and rows["tuned"]["resolved_backend"] == "cpu"
    assert rows["tuned"]["library"] == "fi_core" != rows["torch"]["library"]
    assert operators()["gemm"].forced is None


def test_a_function_without_tactics_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--routine rmsnorm --batch_size 2 --hidden_size 64 --num_iters 5 --backends tuned"
    assert main(words.split()) == 1
    assert "rmsnorm has no tactics: use --backends auto" in capsys.readouterr().out
