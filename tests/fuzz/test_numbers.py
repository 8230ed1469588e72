"""The fuzz judges numbers: every op has a reference, drawn calls agree with it, and a wrong number is a finding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fi_bench import backends, cases, catalog
from fi_core.registry import ops
from fuzz import case, numbers

ROUTINES = [found.routine for found in numbers.routines()]
DRAWS = 6  # of a routine on a GPU
OF_SEVERAL_RANKS = {"all_to_all"}  # tests/families/test_comm.py judges it
WITHOUT_A_REFERENCE: set[str] = set()  # ops; it stays empty


def test_every_op_has_a_reference() -> None:
    assert set(ops()) - numbers.references() - OF_SEVERAL_RANKS == WITHOUT_A_REFERENCE


def test_every_routine_with_a_case_is_drawn() -> None:
    every = {name for family in catalog.FAMILIES.values() for name in family.routines if cases.find(name)}
    assert every == set(ROUTINES)


@pytest.mark.parametrize("routine", {found.family: found.routine for found in numbers.routines()}.values())
def test_a_drawn_call_is_right(routine: str) -> None:
    """One of each family, whose sizes go together; `nox -s fuzz` draws every routine."""
    found = (numbers.draw(routine, seed) for seed in range(8))
    record = next(record for record in found if record["outcome"] != "named")
    assert record["outcome"] == "right", record


@pytest.mark.gpu
@pytest.mark.parametrize("routine", ROUTINES)
def test_drawn_calls_are_right_on_a_gpu(routine: str) -> None:
    records = [numbers.draw(routine, seed, "cuda") for seed in range(DRAWS)]
    assert [record for record in records if record["outcome"] == "wrong answer"] == []
    assert any(record["outcome"] == "right" for record in records), records


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(len(numbers.descriptions())))
def test_described_calls_are_right_on_a_gpu(number: int) -> None:
    records = [numbers.draw(f"call {number}", seed, "cuda") for seed in range(2)]
    assert [record for record in records if record["outcome"] == "wrong answer"] == []


def test_the_cases_of_a_run_repeat() -> None:
    one, again = (case.run("numbers:13", []) for _ in range(2))
    assert one == again and one["case"] == "numbers:13" and one["outcome"] == "right"


def test_a_wrong_number_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    bind = backends.bind

    def off_by_a_bit(*arguments: Any) -> Any:
        runner = bind(*arguments)

        def outputs(*given: Any) -> dict[str, torch.Tensor]:
            found = runner.outputs(*given)
            name, x = next(iter(found.items()))
            wrong = x.clone()
            wrong.view(-1)[-1] += 0.25
            return {**found, name: wrong}

        return replace(runner, outputs=outputs)

    monkeypatch.setattr(backends, "bind", off_by_a_bit)
    record = numbers.draw("rmsnorm", 0)
    assert record["outcome"] == "wrong answer" and "mismatches=1" in record["text"]
