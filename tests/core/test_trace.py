"""Trace templates: names, axes, dtypes and the JSON of a definition; default_check; writing as calls pass by."""

from __future__ import annotations

import dataclasses
import inspect
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fi_core
from fi_core.observe import log, trace
from fi_core.observe.log import Settings, fi_api
from fi_core.observe.trace import (
    Const,
    Scalar,
    Tensor,
    TraceTemplate,
    Var,
    default_check,
    default_tolerances,
    fi_trace,
    samples,
    template_problems,
)

BF16 = torch.bfloat16


def reference(hidden_states: Any, weight: Any) -> Any:
    return hidden_states * weight


RMSNORM = TraceTemplate(
    "rmsnorm",
    {"batch_size": Var(), "hidden_size": Const("Width of a row.", abbrev="h")},
    {
        "hidden_states": Tensor(["batch_size", "hidden_size"], param="input"),
        "weight": Tensor(["hidden_size"]),
        "eps": Scalar(description="Added to the mean square."),
    },
    {"output": Tensor(["batch_size", "hidden_size"], dtype_from="hidden_states", param="out")},
    reference=reference,
    constraints=["batch_size > 0"],
    tags=["status:verified"],
    description="Root mean square norm.",
)


def rmsnorm(input: Any, weight: Any, eps: float = 1e-6, out: Any = None, enable_pdl: bool | None = None) -> Any:
    return input


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_TRACE_REGISTRY", [])
    monkeypatch.setattr(trace, "_dumped", set())
    monkeypatch.setattr(trace, "_warned", set())


@pytest.fixture
def op() -> Iterator[Any]:
    yield fi_api(trace=RMSNORM)(rmsnorm)
    vars(rmsnorm).clear()


def test_definition_has_exactly_the_schema(op: Any) -> None:
    definition = op.fi_trace(input=meta(3, 7168), weight=meta(7168, dtype=torch.float32))
    assert list(definition.items()) == [
        ("name", "rmsnorm_h7168"),
        ("description", "Root mean square norm."),
        ("op_type", "rmsnorm"),
        ("tags", [f"fi_api:{__name__}.rmsnorm", "status:verified"]),
        (
            "axes",
            {
                "batch_size": {"type": "var"},
                "hidden_size": {"type": "const", "value": 7168, "description": "Width of a row."},
            },
        ),
        ("constraints", ["batch_size > 0"]),
        (
            "inputs",
            {
                "hidden_states": {"shape": ["batch_size", "hidden_size"], "dtype": "bfloat16"},
                "weight": {"shape": ["hidden_size"], "dtype": "float32"},
                "eps": {"shape": None, "dtype": "float32", "description": "Added to the mean square."},
            },
        ),
        ("outputs", {"output": {"shape": ["batch_size", "hidden_size"], "dtype": "bfloat16", "param": "out"}}),
        ("reference", inspect.getsource(reference)),
    ]


def test_level_0_logs_nothing(op: Any) -> None:
    assert op.__wrapped__ is rmsnorm
    assert op.fi_trace is rmsnorm.fi_trace
    (entry,) = trace._TRACE_REGISTRY
    assert entry == (rmsnorm, RMSNORM, "rmsnorm")


def test_save_dir_writes(op: Any, tmp_path: Path) -> None:
    definition = op.fi_trace(save_dir=tmp_path / "new", name="mine", input=meta(1, 8), weight=meta(8))
    assert definition["name"] == "mine"
    assert (tmp_path / "new" / "mine.json").read_text() == json.dumps(definition, indent=2)
    op.fi_trace(input=meta(1, 8), weight=meta(8))
    assert len(list(tmp_path.rglob("*.json"))) == 1


def test_fi_trace_of_functions_and_methods(op: Any) -> None:
    class Wrapper:
        @fi_api(trace=RMSNORM)
        def run(self, input: Any, weight: Any, eps: float = 1.0, out: Any = None) -> Any:
            return input

    arguments = {"input": meta(1, 16), "weight": meta(16)}
    for func in (op, Wrapper.run, Wrapper().run):
        definition = fi_trace(func, **arguments)
        assert definition["name"] == "rmsnorm_h16"
    assert definition["tags"][0].endswith("Wrapper.run")
    assert Wrapper.run.fi_trace(**arguments) == definition  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="reference"):
        fi_trace(reference, **arguments)


def define(template: TraceTemplate, **arguments: Any) -> dict[str, Any]:
    return template.definition("m.f", arguments)


def test_fi_trace_takes_arguments_by_name() -> None:
    x = torch.ones(2, 4)
    with pytest.raises(TypeError, match=r"rmsnorm\.fi_trace: arguments are taken by name; got a Tensor alone"):
        fi_core.rmsnorm.fi_trace(x)  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"rmsnorm\.fi_trace: the argument 'input' is required"):
        fi_core.rmsnorm.fi_trace(weight=x[0])  # type: ignore[attr-defined]


def test_names_follow_the_axes() -> None:
    tensors = {"q": Tensor(["n", "heads", "d"]), "kv": Tensor(["p", "page", "kv_heads", "d"], tuple_idx=0)}
    axes = {
        "n": Var(),
        "p": Var(),
        "heads": Const(abbrev="h"),
        "kv_heads": Const(abbrev="kv"),
        "d": Const(),
        "page": Const(abbrev=""),
        "two": Const(abbrev="x", value=2),
    }
    template = TraceTemplate("paged", axes, tensors, {}, name_prefix="gqa_paged_decode")
    q, k, v = meta(5, 32, 128), meta(9, 16, 8, 128), meta(9, 16, 8, 64)
    assert define(template, q=q, kv=(k, v))["name"] == "gqa_paged_decode_h32_kv8_d128_x2"
    assert define(template, q=q, kv=(k, v))["axes"]["page"]["value"] == 16
    fused = meta(9, 2, 4, 8, 128)
    assert define(template, q=q, kv=fused)["axes"]["page"]["value"] == 4, "members fused along axis 1"
    with pytest.raises(ValueError, match=r"kv: axes .* got shape \(9, 2, 8, 128\)"):
        define(template, q=q, kv=meta(9, 2, 8, 128))
    assert define(TraceTemplate("plain", {"n": Var()}, {"x": Tensor(["n"])}, {}), x=meta(3))["name"] == "plain"


def test_a_template_gives_names_and_definitions_of_its_own(tmp_path: Path) -> None:
    arguments = {"input": meta(2, 16), "weight": meta(16)}
    traced = RMSNORM.build_fi_trace_fn("norm.rmsnorm")
    assert traced(**arguments) == RMSNORM.definition("norm.rmsnorm", arguments)
    assert traced(save_dir=tmp_path, name="mine", **arguments) == json.loads((tmp_path / "mine.json").read_text())
    assert RMSNORM.definition_name({"batch_size": None, "hidden_size": 16}) == "rmsnorm_h16"
    bare = TraceTemplate("bare", {}, {}, {}, constraints=None, tags=None)  # type: ignore[arg-type]
    assert bare.definition("m.f", {})["tags"] == ["fi_api:m.f"]


def test_constant_axes_come_from_required_tensors_then_numbers_then_optional_tensors() -> None:
    inputs = {
        "bias": Tensor(["h"], optional=True),
        "x": Tensor(["n", "d"]),
        "k": Scalar("int32", param="top_k"),
    }
    template = TraceTemplate("op", {"n": Var(), "d": Const(), "h": Const(), "k": Const(), "g": Const()}, inputs, {})

    def values(**arguments: Any) -> dict[str, Any]:
        axes = define(template, x=meta(2, 7), **arguments)["axes"]
        return {axis: entry["value"] for axis, entry in axes.items() if entry["type"] == "const"}

    assert values(bias=meta(4), top_k=3, g=5) == {"d": 7, "h": 4, "k": 3, "g": 5}
    assert values(bias=meta(4), h=6)["h"] == 6, "a number wins over an optional tensor"
    assert values()["h"] is None
    assert define(template, x=meta(2, 7), top_k=3)["name"] == "op_d7_k3"


def test_output_dtypes_are_resolved_in_order() -> None:
    def dtype(entry: Tensor, **arguments: Any) -> str:
        inputs = {"x": Tensor(["n", "d"]), "w": Tensor(["d"]), "scale": Tensor(["n"], optional=True)}
        template = TraceTemplate("op", {"n": Var(), "d": Const(), "o": Const(value=1)}, inputs, {"y": entry})
        call = {"x": meta(2, 8, dtype=torch.float16), "w": meta(8, dtype=torch.float32), **arguments}
        return str(define(template, **call)["outputs"]["y"]["dtype"])

    both = Tensor(["n"], dtype_from="w", dtype_from_scalar="out_dtype", dtype="int8")
    assert dtype(both, out_dtype=torch.float8_e4m3fn) == "float32"
    scalar = Tensor(["n"], dtype_from="scale", dtype_from_scalar="out_dtype", dtype="int8")
    assert dtype(scalar, out_dtype=torch.float8_e4m3fn) == "float8_e4m3fn"
    assert dtype(scalar, out_dtype="bfloat16") == "bfloat16"
    assert dtype(scalar, out_dtype=None) == "int8"
    assert dtype(Tensor(["d"])) == "float16", "the first input that shares an axis"
    assert dtype(Tensor(["o"])) == "unknown"


HALVES = TraceTemplate(
    "halves",
    {"rows": Var(), "width": Const(), "half": Var(), "unknown": Var()},
    {"x": Tensor(["rows", "width"])},
    {"y": Tensor(["rows", "half"], dtype_from="x"), "n": Tensor(["rows"], dtype="int32")},
    constraints=["rows > 0", "half == width // 2"],
    work=3,
)


def test_layouts_of_outputs_follow_from_inputs_and_constraints() -> None:
    """They give the work of a description that names only the operations of an element."""
    x = torch.empty(4, 10, dtype=BF16)
    assert HALVES.layouts({"x": x}) == {"y": ((4, 5), "bfloat16"), "n": ((4,), "int32")}
    assert HALVES.work_of({"x": x}) == (3 * (4 * 5 + 4), 2 * (4 * 10 + 4 * 5) + 4 * 4, "matmul")
    lacking = dataclasses.replace(HALVES, constraints=())
    with pytest.raises(ValueError, match="halves: no input has the axis 'half'; tell it by a constraint"):
        lacking.layouts({"x": x})


def test_samples_are_every_combination() -> None:
    assert samples({"dtype": ("bf16", "f16"), "rows, width": ((1, 8), (2, 4))}) == (
        {"dtype": "bf16", "rows": 1, "width": 8},
        {"dtype": "bf16", "rows": 2, "width": 4},
        {"dtype": "f16", "rows": 1, "width": 8},
        {"dtype": "f16", "rows": 2, "width": 4},
    )


def test_absent_optional_inputs_are_declared() -> None:
    inputs = {"x": Tensor(["n"]), "lse": Tensor(["n"], dtype="float32", optional=True, description="Log sum.")}
    definition = define(TraceTemplate("op", {"n": Var("Rows.")}, inputs, {}), x=meta(2))
    assert definition["inputs"]["lse"] == {
        "shape": ["n"],
        "dtype": "float32",
        "optional": True,
        "description": "Log sum.",
    }
    assert definition["axes"] == {"n": {"type": "var", "description": "Rows."}}
    assert "constraints" not in definition
    assert "reference" not in definition


def test_sources_may_be_text_or_have_none() -> None:
    template = TraceTemplate("op", {}, {}, {}, reference="def run(): ...", check=len, init=lambda: None)
    definition = define(template)
    assert definition["reference"] == "def run(): ..."
    assert "check" not in definition, "a builtin has no source"
    assert "lambda" in definition["init"]


def test_fi_init() -> None:
    def init(n: int) -> dict[str, Any]:
        return {"x": n}

    @fi_api(trace=TraceTemplate("op", {"n": Var()}, {"x": Tensor(["n"])}, {}, init=init))
    def op(x: Any) -> Any:
        return x

    assert op.fi_init is init  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (TraceTemplate("op", {"n": Var()}, {"y": Tensor(["n"])}, {}), "param 'y' is not a parameter"),
        (TraceTemplate("op", {"n": Var()}, {"x": Tensor(["n"])}, {"z": Tensor(["n"], param="q")}), "param 'q'"),
        (TraceTemplate("op", {"d": Const()}, {}, {}), "axis 'd' is constant"),
        (TraceTemplate("op", {}, {"x": Tensor(["n"])}, {}), "undeclared axis 'n'"),
        (TraceTemplate("op", {"n": Var()}, {"x": Tensor(["n"])}, {"z": Tensor([])}), "dtype of output 'z'"),
        (TraceTemplate("op", {}, {}, {"z": Tensor([], dtype_from="w")}), "'w', which is not an input"),
    ],
)
def test_a_template_that_does_not_fit_warns_at_import(template: TraceTemplate, words: str) -> None:
    def op(x: Any = None, out: Any = None) -> Any:
        return x

    with pytest.warns(UserWarning, match=words) as caught:
        fi_api(trace=template)(op)
    assert caught[0].filename in (__file__, log.__file__)
    assert not hasattr(op, "fi_trace")
    assert trace._TRACE_REGISTRY == []


def test_any_keyword_fits_an_op_that_takes_any() -> None:
    def op(**kwargs: Any) -> None: ...

    assert template_problems(op, RMSNORM) == []
    assert template_problems(rmsnorm, RMSNORM) == []


def test_dispatcher() -> None:
    small = TraceTemplate("small", {"n": Var()}, {"x": Tensor(["n"])}, {})
    large = TraceTemplate("large", {"n": Var()}, {"x": Tensor(["n"])}, {})

    def pick(save_dir: Any = None, name: str | None = None, **arguments: Any) -> TraceTemplate | None:
        size = arguments["x"].shape[0]
        return None if size == 0 else small if size < 4 else large

    pick.templates = [small, large]  # type: ignore[attr-defined]

    @fi_api(trace=pick)
    def op(x: Any) -> Any:
        return x

    assert fi_trace(op, x=meta(2))["name"] == "small"
    assert fi_trace(op, x=meta(9))["name"] == "large"
    with pytest.raises(ValueError, match="no trace template"):
        fi_trace(op, x=meta(0))
    assert [(template, label) for _, template, label in trace._TRACE_REGISTRY] == [(small, "small"), (large, "large")]


# FI_TRACE_DUMP


@pytest.fixture
def dumping(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(log, "settings", Settings(trace_dump=True))
    monkeypatch.setenv("FI_TRACE_DUMP_DIR", str(tmp_path))
    return tmp_path


def test_auto_dump_writes_each_name_once_before_the_call(dumping: Path) -> None:
    @fi_api(trace=RMSNORM)
    def rmsnorm(input: Any, weight: Any, eps: float = 1e-6, out: Any = None) -> Any:
        assert len(list(dumping.iterdir())) == 1
        return input

    x = meta(2, 64)
    assert rmsnorm(x, weight=meta(64)) is x
    (path,) = dumping.iterdir()
    assert path.name == "rmsnorm_h64.json"
    assert json.loads(path.read_text())["inputs"]["hidden_states"]["dtype"] == "bfloat16"
    path.write_text("kept")
    rmsnorm(meta(5, 64), meta(64))
    assert path.read_text() == "kept"


def test_auto_dump_with_defaults_self_and_keywords(dumping: Path) -> None:
    template = TraceTemplate("op", {"k": Const(), "m": Const(), "d": Const()}, {"x": Tensor(["d"])}, {})

    class Wrapper:
        @fi_api(trace=template)
        def run(self, x: Any, k: int = 3, **kwargs: Any) -> Any:
            return x

    Wrapper().run(meta(8), m=4)
    assert [path.name for path in dumping.iterdir()] == ["op_k3_m4_d8.json"]


def test_auto_dump_needs_a_directory(dumping: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FI_TRACE_DUMP_DIR")
    monkeypatch.chdir(tmp_path)
    op = fi_api(trace=RMSNORM)(lambda input, weight, eps=1.0, out=None: input)
    op(meta(1, 8), meta(8))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("FI_TRACE_DUMP_DIR", str(tmp_path))  # looked at in each call
    op(meta(1, 8), meta(8))
    assert len(list(tmp_path.iterdir())) == 1


def test_auto_dump_errors_warn_once_and_do_not_stop_the_call(dumping: Path) -> None:
    op = fi_api(trace=RMSNORM)(lambda input, weight, eps=1.0, out=None: input)
    with pytest.warns(UserWarning, match="ValueError: input: axes"):
        assert op(meta(8), meta(8)).shape == (8,)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        op(meta(9), meta(8))
    assert list(dumping.iterdir()) == []


# Comparing with a reference


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float64, 1e-7),
        (torch.float32, 1e-5),
        (torch.float16, 1e-3),
        ("bfloat16", 1e-2),
        (torch.float8_e5m2, 0.1),
        (torch.float4_e2m1fn_x2, 1.0),
        (torch.int32, 0.0),
    ],
)
def test_default_tolerances(dtype: Any, tolerance: float) -> None:
    assert default_tolerances(dtype) == (tolerance, tolerance)


NAN, INF = float("nan"), float("inf")
Make = Callable[[], Any]


@pytest.mark.parametrize(
    ("ref", "actual", "equal"),
    [
        ([1.0, 2.0], [1.0, 2.0001], True),
        ([1.0, 2.0], [1.0, 2.1], False),
        ([NAN, INF, 1.0], [NAN, INF, 1.0], True),
        ([NAN, 1.0], [0.0, 1.0], False),
        ([INF, 1.0], [-INF, 1.0], False),
        ([0.0, 0.0], [0.0, 0.0], True),
        ([], [], True),
        ([1.0], [1.0, 1.0], False),
        ([1, 2], [1, 2], True),
        ([1, 2], [1, 3], False),
        ([1.0, 2.0], [1, 2], False),
    ],
)
def test_default_check(ref: list[float], actual: list[float], equal: bool) -> None:
    a, b = torch.tensor(ref), torch.tensor(actual)
    assert default_check(a, b, rtol=1e-3, atol=1e-3) is equal
    assert default_check({"o": (a, None)}, {"o": [b, None]}, rtol=1e-3, atol=1e-3) is equal


def test_default_check_takes_the_tolerances_of_the_dtype() -> None:
    ref = torch.linspace(1, 2, 100)
    for dtype, step, equal in ((torch.float32, 5e-6, True), (torch.float32, 1e-3, False), (BF16, 5e-3, True)):
        assert default_check(reference_outputs=ref.to(dtype), actual_outputs=ref * (1 + step)) is equal, (dtype, step)


def test_default_check_of_structures() -> None:
    x = torch.ones(2)
    options = {"rtol": 0.0, "atol": 0.0}
    assert not default_check((x, x), (x,), **options)
    assert not default_check({"a": x}, {"b": x}, **options)
    assert not default_check((x, None), (x, x), **options)
    assert not default_check((x,), x, **options)


def test_default_check_limits() -> None:
    ref = torch.ones(100)
    actual = ref.clone()
    actual[0] = 1.5
    assert not default_check(ref, actual, rtol=0.01, atol=0.0)
    assert default_check(ref, actual, rtol=0.01, atol=0.0, max_mismatch_pct=1.0, min_cos_sim=0.99)
    assert not default_check(ref, actual, rtol=0.01, atol=0.0, max_mismatch_pct=0.9, min_cos_sim=0.99)
    noise = torch.tensor([1.0, -1.0]).repeat(50)
    assert default_check(ref, ref + noise, rtol=2.0, atol=0.0, min_cos_sim=0.5)
    assert not default_check(ref, ref + noise, rtol=2.0, atol=0.0), "in tolerance, but another direction"
    assert default_check(ref.bfloat16(), ref, rtol=0.0, atol=0.0), "dtypes may differ among floats"
