"""Solutions of traced definitions, as records, and in place of the functions whose calls have such a definition."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fi_core
from fi_core import trace_apply
from fi_core.observe import trace
from fi_core.observe.trace import (
    BuildSpec,
    Described,
    Solution,
    SourceFile,
    SupportedBindings,
    SupportedLanguages,
    every_described,
    fi_trace,
)
from fi_core.registry import load

HELPER = "def times(x, n):\n    return x * n\n"
ENTRY = """
from helper import times

def run(hidden_states, weight, eps):
    return times(hidden_states, 3) + weight
"""
SOLUTION = Solution(
    "threefold", "rmsnorm_h64", "a person", BuildSpec("python", ["H200"], "main.py::run"),  # type: ignore[arg-type]
    (SourceFile("main.py", ENTRY), SourceFile("helper.py", HELPER)), "three times the input",
)  # fmt: skip


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    trace_apply.disable_apply()


def norm_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(3, 64), torch.ones(64)


def test_a_solution_as_json() -> None:
    data = json.loads(json.dumps(SOLUTION.to_dict()))
    assert data["spec"]["language"] == "python" and data["spec"]["binding"] is None
    again = Solution.from_dict(data)
    assert again == SOLUTION and again.hash() == SOLUTION.hash() and len(again.hash()) == 64
    assert (again.entry_file(), again.entry_symbol()) == ("main.py", "run")
    assert again.entry_source() == SOLUTION.sources[0] and again.spec.is_python_family
    compiled = BuildSpec(SupportedLanguages.CUDA, [], "a.cu::run", binding=SupportedBindings.TVM_FFI)
    assert not compiled.is_python_family and BuildSpec.from_dict(compiled.to_dict()) == compiled


def test_wrong_records() -> None:
    for make, words in (
        (
            lambda: SourceFile("../a.py", ""),
            "path: a place below the folder of the solution is required; got '../a.py'",
        ),
        (lambda: BuildSpec("python", [], "main.py"), "entry_point: 'file.py::function' is required; got 'main.py'"),  # type: ignore[arg-type]
        (lambda: BuildSpec("rust", [], "a.rs::f"), "'rust' is not a valid SupportedLanguages"),  # type: ignore[arg-type]
        (lambda: Solution("", "d", "a", SOLUTION.spec, SOLUTION.sources), "name: a text of one character or more"),
        (
            lambda: Solution("s", "d", "a", SOLUTION.spec, ()),
            r"sources: 'main.py' and no path twice is required; got \[\]",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            make()


def test_calls_run_a_function() -> None:
    """Inputs come by keyword, outputs that are arguments are written; a call of another name runs as before."""
    x, weight = norm_inputs()
    name = fi_trace(fi_core.rmsnorm, input=x, weight=weight)["name"]
    plain, seen = fi_core.rmsnorm(x, weight), []

    def solution(**inputs: Any) -> torch.Tensor:
        seen.append(inputs)
        return inputs["hidden_states"] * 2

    assert not trace_apply.is_enabled()
    assert trace_apply.enable_apply({name: solution}) >= 1
    assert trace_apply.is_enabled()
    assert torch.equal(fi_core.rmsnorm(x, weight), x * 2)
    assert torch.equal(fi_core.norm.rmsnorm(x, weight, 1e-3), x * 2)
    assert seen[0]["weight"] is weight and seen[1]["eps"] == 1e-3
    wide = torch.randn(2, 128)
    fi_core.rmsnorm(wide, torch.ones(128))
    (counts,) = trace_apply.stats().values()
    assert counts == {"hit": 2, "fallback_no_candidate": 1}
    trace_apply.disable_apply()
    assert torch.equal(fi_core.rmsnorm(x, weight), plain)
    assert trace_apply.stats() == {} and not trace_apply.is_enabled()


def test_calls_run_a_solution_from_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = norm_inputs()
    assert trace_apply.enable_apply() == 0
    name = fi_trace(fi_core.rmsnorm, input=x, weight=weight)["name"]
    data = {**SOLUTION.to_dict(), "definition": name}
    place = tmp_path / "solutions" / "norm" / "threefold.json"
    place.parent.mkdir(parents=True)
    place.write_text(json.dumps(data))
    monkeypatch.setenv("FI_TRACE_APPLY_PATH", str(tmp_path))
    assert trace_apply.enable_apply() >= 1
    assert torch.equal(fi_core.rmsnorm(x, weight), x * 3 + weight)


def test_outputs_that_a_solution_writes() -> None:
    x, weight = norm_inputs()
    name = fi_trace(fi_core.rmsnorm, input=x, weight=weight)["name"]
    text = "def run(input, weight, eps, output):\n    output.copy_(input + eps)\n"
    spec = BuildSpec(SupportedLanguages.PYTHON, [], "main.py::run", destination_passing_style=True)
    trace_apply.enable_apply({name: Solution("s", name, "a", spec, [SourceFile("main.py", text)])})
    assert torch.equal(fi_core.rmsnorm(x, weight, 0.5), x + 0.5)


def test_a_run_of_a_wrapper() -> None:
    """The name follows from the plan too; attention runs the solution, with q and the cache."""
    workspace = torch.empty(1 << 20, dtype=torch.uint8)
    wrapper = fi_core.BatchDecodeWithPagedKVCacheWrapper(workspace)
    indptr = torch.tensor([0, 1, 2], dtype=torch.int32)
    wrapper.plan(indptr, torch.arange(2, dtype=torch.int32), torch.full((2,), 16, dtype=torch.int32), 4, 2, 64, 16,
                 q_data_type=torch.float32, kv_data_type=torch.float32)  # fmt: skip
    q, cache = torch.randn(2, 4, 64), torch.randn(2, 2, 16, 2, 64)
    name = fi_trace(wrapper.run, q=q, paged_kv_cache=cache)["name"]
    assert trace_apply.enable_apply({name: lambda **inputs: inputs["q"] * 5}) >= 1
    assert torch.equal(wrapper.run(q, cache), q * 5)


def described(name: str) -> tuple[Described, dict[str, Any], str]:
    """A function with its description, the arguments of a call, and the name of their definition."""
    found = next(f for f in every_described() if f.name == name)
    arguments = found.template.sample()
    return found, arguments, found.template.name_of(arguments)


def test_every_described_function_is_replaced() -> None:
    """Whatever wraps a function in its module."""
    load()
    described = [found for found in every_described() if found.function.__module__.startswith("fi_core.")]
    places = {(found.wrapper or sys.modules[found.function.__module__], found.function.__name__) for found in described}
    before = {(owner, name): getattr(owner, name) for owner, name in places}
    trace_apply.enable_apply({found.template.name_prefix or found.template.op_type: print for found in described})
    assert [name for owner, name in places if getattr(owner, name) is before[owner, name]] == []


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("mm_bf16", "one"),
        ("cutlass_fused_moe", "one"),  # which lists its launches
        ("causal_conv1d_update", "one"),  # of two outputs, one is written
        ("rmsnorm_quant", "none"),
        ("append_paged_kv_cache", "none"),  # which writes members of a tuple
        ("gated_delta_rule_decode", "all"),  # which returns the state that it writes
    ],
)
def test_results_have_the_form_of_the_function(name: str, form: str) -> None:
    """Outputs that are arguments are written; what is returned follows from the annotation."""
    load()
    found, arguments, definition = described(name)
    module = sys.modules[found.function.__module__]
    targets = [found.template.target(output, arguments) for output in found.template.outputs]
    made = [torch.full((2,), float(i)) if t is None else torch.ones_like(t) for i, t in enumerate(targets)]
    trace_apply.enable_apply({definition: lambda **inputs: tuple(made)})
    result = getattr(module, name)(**arguments)
    assert list(trace_apply.stats().values()) == [{"hit": 1}]
    for target, output in zip(targets, made):
        assert target is None or torch.equal(target.float(), output.float())
    returned = [output if target is None else target for target, output in zip(targets, made)]
    if form == "none":
        assert result is None
    elif form == "one":
        assert torch.equal(result.float(), returned[0].float())
    else:
        assert isinstance(result, tuple) and len(result) == len(returned)
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(result, returned))


def test_the_files_of_a_solution_stay_while_it_runs() -> None:
    """Compilers such as Triton read its source in the first call."""
    x, weight = norm_inputs()
    name = fi_trace(fi_core.rmsnorm, input=x, weight=weight)["name"]
    text = "from pathlib import Path\ndef run(hidden_states, **_):\n    return hidden_states * len(source())\n"
    text += "def source():\n    return Path(__file__).read_text()\n"
    spec = BuildSpec(SupportedLanguages.PYTHON, [], "main.py::run")
    trace_apply.enable_apply({name: Solution("s", name, "a", spec, [SourceFile("main.py", text)])})
    assert torch.equal(fi_core.rmsnorm(x, weight), x * len(text))


def test_errors() -> None:
    x, weight = norm_inputs()
    name = fi_trace(fi_core.rmsnorm, input=x, weight=weight)["name"]

    def broken(**inputs: Any) -> Any:
        raise ArithmeticError("broken")

    trace_apply.enable_apply({name: broken})
    with pytest.raises(ArithmeticError, match="broken"):
        fi_core.rmsnorm(x, weight)
    (counts,) = trace_apply.stats().values()
    assert counts == {"error": 1}
    with pytest.raises(TypeError, match=r"solutions\['a'\]: a function or a Solution is required; got int"):
        trace_apply.enable_apply({"a": 3})
    spec = BuildSpec(SupportedLanguages.CUDA, [], "a.cu::run")
    with pytest.raises(NotImplementedError, match=r"Python is required; got cuda: build it with jit\.gen_jit_spec"):
        trace_apply.enable_apply({name: Solution("s", name, "a", spec, [SourceFile("a.cu", "")])})


def test_the_standard_check() -> None:
    assert trace.standard_check is trace.default_check
