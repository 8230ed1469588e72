"""The fuzz itself: it calls everything, repeats a case from its name, and finds what is planted."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from fuzz import case, each, pool
from fuzz.__main__ import Summary, names, options
from fuzz.calls import Hook, Scenario, marked, scenarios


def test_every_function_of_the_api_is_called() -> None:
    """A function that no description, example or session calls would never be attacked."""
    called: set[str] = set()
    for scenario in scenarios():
        hook = case.Hostile(partial(case.drawn, "metadata", 0), -1)

        def watch(function: Any, arguments: Any, template: Any = None, planned: Any = None, hook: Any = hook) -> Any:
            called.add(f"{function.__module__}:{function.__qualname__}")
            try:
                return hook(function, arguments, template, planned)
            except ImportError:
                raise
            except Exception as error:  # cuDNN is not installed everywhere
                if "cudnn" not in f"{error}".lower():
                    raise
                return None

        scenario.start(watch, 1)
    assert marked().keys() - called == set()


def toy(x: torch.Tensor, eps: float = 1.0) -> torch.Tensor:
    """Has every defect that a case can show in its own process."""
    if type(x) is not torch.Tensor or x.ndim != 2 or x.dtype is not torch.float32 or not x.device.type == "cpu":
        raise RuntimeError("a bare complaint")
    if not isinstance(eps, float):
        raise TypeError(f"eps: a float is required; got {eps!r}")
    flat = torch.empty(0).set_(x.untyped_storage(), x.storage_offset(), x.shape)  # as if it were contiguous
    return flat.nan_to_num() * 2.0


def _toy(hook: Hook, seed: int) -> Any:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
    return hook(toy, {"x": x, "eps": 1.0})


TOY = Scenario("toy", _toy)


def test_cases_repeat_and_find() -> None:
    records = [case.run(f"metadata:{i}", [TOY]) for i in range(150)]
    assert records == [case.run(f"metadata:{i}", [TOY]) for i in range(150)]
    found = {record["outcome"]: record for record in records}
    assert found.keys() >= {"unnamed error", "named", "wrong answer", "right"}
    assert found["unnamed error"]["text"] == "a bare complaint"
    assert found["named"]["text"].startswith("eps: ")
    assert "strides" in found["wrong answer"]["change"]


def test_each_argument_is_changed_in_each_way() -> None:
    ways = each.ways(TOY)
    found = [case.run(f"each:{number}", [TOY]) for number in sorted(each.numbers([TOY], 10**6, 0))]
    assert len(found) == len(ways) > 30
    changes = [record["change"] for record in found]
    assert len(set(changes)) == len(changes)
    assert set(changes) >= {"x: all inf", "x: the first nan", "x: dimension 1 of 0", "eps: nan"}
    assert len(each.numbers([TOY], 7, 1)) == 7


def test_a_plan_that_fails_is_not_the_end() -> None:
    """The session goes on after it, and what a later call raises is judged too."""

    def plan(size: int) -> None:
        if type(size) is not int:
            raise TypeError("size: an int is required")

    def run() -> None:
        raise AttributeError("no attribute '_size'")

    def start(hook: Hook, seed: int) -> None:
        hook(plan, {"size": 1})
        hook(run, {})

    hook = case.Hostile(partial(case.drawn, "metadata", 4), 0)
    with pytest.raises(case._Over):
        start(hook, 0)
    assert (hook.record["outcome"], hook.record["raised_by"]) == ("unnamed error", run.__qualname__)


def _work(name: str, announce: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    record = {"case": name, "scenario": "toy"}
    announce(record | {"change": "x: none"})
    if name == "abort":
        os.abort()
    if name == "exit":
        os._exit(3)
    if name == "loop":
        while True:
            pass
    if name == "report":
        os.write(2, b"/a/csrc/norm/x.cc:3:4: runtime error: signed integer overflow: 1 + 2\n")
    if name == "address":
        os.write(
            2, b"==1==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x12\n    #0 0x1 in f /a/csrc/x.cc:9\n"
        )
        os._exit(1)
    if name == "raise":
        raise KeyError("x")
    return record | {"outcome": "named"}


def test_a_lost_process_is_attributed_to_its_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "BATCH", 4)
    cases = ["1", "abort", "2", "exit", "report", "3", "loop", "4", "address", "raise", "5"]
    found: dict[str, dict[str, Any]] = {}
    start = time.monotonic()

    def done(record: dict[str, Any]) -> bool:
        found[record["case"]] = record
        return True

    pool.run(cases, _work, jobs=2, seconds=0.5, done=done)
    assert time.monotonic() - start < 60
    assert {name: record["outcome"] for name, record in found.items()} == {
        **dict.fromkeys("12345", "named"), "abort": "crash", "exit": "crash", "report": "sanitizer", "loop": "hang",
        "address": "sanitizer", "raise": "broken case",
    }  # fmt: skip
    assert found["abort"]["change"] == "x: none"
    assert found["exit"]["text"].startswith("exit status 3")
    assert "signed integer overflow" in found["report"]["text"]
    assert found["address"]["text"].endswith("heap-buffer-overflow on address 0x... in f /a/csrc/x.cc:9")


def test_findings_of_one_cause_are_one_class(capsys: pytest.CaptureFixture[str]) -> None:
    summary = Summary(live=False)
    for i in range(3):
        summary.add({"case": f"metadata:{i}", "outcome": "unnamed error", "where": "a.py:f", "text": f"{i} of 7"})
    summary.add({"case": "metadata:9", "outcome": "named"})
    assert (summary.count, len(summary.classes)) == (4, 1)
    assert capsys.readouterr().out.count("nox -s fuzz -- --case metadata:0") == 1


def test_the_cases_of_a_run() -> None:
    assert list(names(options(["--metadata", "2", "--contents", "1", "--numbers", "2", "--seed", "5"]), [])) == [
        "numbers:5", "numbers:6", "metadata:5", "contents:5", "metadata:6",
    ]  # fmt: skip
    assert list(names(options(["--case", "contents:7"]), [])) == ["contents:7"]
    for name in ("contents", "other:1", "metadata:-1", "metadata:x"):
        with pytest.raises(
            ValueError, match="case: metadata, contents, each or numbers, a colon and a number are required"
        ):
            case.parse(name)
