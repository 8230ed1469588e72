"""Specs: dispatch, refusals, names, targets; and rules for the declaration of every op."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import platform
import re

import pytest
import torch

from core import toy
from core.toy import chosen
from fi_core import aot
from fi_core.registry import operator, ops
from fi_core.runtime.dispatch import Request, explain, specs
from fi_core.runtime.errors import UnsupportedError
from fi_core.runtime.spec.constraint import ON_CPU, Constraint, at_least, exactly
from fi_core.runtime.spec.dtype import DTYPES, short_name
from fi_core.runtime.spec.op import Implementation, Op, Spec
from fi_core.runtime.spec.target import CPU, PREBUILT_ARCHS, Target, cuda_target, default_suffix, parse_arch

CUDA = {arch: Target("cuda", arch) for arch in ("80", "86", "89", "90a", "100a", "120a")}
ATTEND = Op(
    name="attend",
    family="attention",
    arguments="Tensor(a!) out, Tensor q",
    axes={"dtype": ("f16", "bf16"), "head_dim": (64, 128, 192), "causal": (False, True)},
    implementations=(
        Implementation("cpu", ON_CPU),
        Implementation("wgmma", (*exactly(90), Constraint("head_dim", "in", (64, 128))), toy.unit),
        Implementation("mma", (*at_least(80), Constraint("head_dim", "multiple of", 64)), toy.unit),
        Implementation("tiny", (*at_least(80), Constraint("head_dim", "<=", 64)), toy.unit),
    ),
)
AXES = {"dtype": "f16", "head_dim": 128, "causal": True}


@pytest.mark.parametrize(
    ("op", "bound", "good", "bad", "text"),
    [
        ("==", "cuda", "cuda", "cpu", "x == cuda"),
        (">=", 80, 80, 75, "x >= 80"),
        ("<=", 256, 256, 257, "x <= 256"),
        ("in", (64, 128), 64, 96, "x in 64, 128"),
        ("multiple of", 16, 48, 40, "x multiple of 16"),
    ],
)
def test_constraints(op: str, bound: object, good: object, bad: object, text: str) -> None:
    constraint = Constraint("x", op, bound)
    assert constraint.holds({"x": good}) and not constraint.holds({"x": bad})
    assert str(constraint) == text
    assert constraint.refusal({"x": bad}) == f"requires {text}, got {bad}"


def test_a_wrong_constraint_is_an_error() -> None:
    with pytest.raises(AssertionError, match="unknown operator '<'"):
        Constraint("x", "<", 3).holds({"x": 1})
    with pytest.raises(AssertionError, match="needs integers"):
        Constraint("x", ">=", 3).holds({"x": "3"})


@pytest.mark.parametrize(
    ("target", "axes", "impl"),
    [
        (CPU, {}, "cpu"),
        (CUDA["90a"], {}, "wgmma"),
        (CUDA["90a"], {"head_dim": 192}, "mma"),
        (CUDA["80"], {}, "mma"),
        (CUDA["120a"], {"head_dim": 64}, "mma"),
    ],
)
def test_the_first_implementation_that_fits(target: Target, axes: dict[str, object], impl: str) -> None:
    spec = chosen(ATTEND, target, AXES | axes)
    assert (spec.implementation, spec.target, dict(spec.axes)) == (impl, target, AXES | axes)


def test_a_named_implementation() -> None:
    assert chosen(ATTEND, CUDA["90a"], AXES, "mma").implementation == "mma"
    with pytest.raises(UnsupportedError) as error:
        chosen(ATTEND, CUDA["80"], AXES, "wgmma")
    assert str(error.value).splitlines() == [
        "attend(dtype=f16, head_dim=128, causal=True, backend=wgmma) on sm_80 is not supported:",
        "  wgmma: requires capability == 90, got 80",
    ]
    with pytest.raises(ValueError, match=r"attend: implementation must be one of cpu, wgmma, mma, tiny; got 'fast'"):
        ATTEND.implementation("fast")


def test_a_refusal_names_the_requirement_of_each_implementation() -> None:
    old = Target("cuda", "75")
    with pytest.raises(UnsupportedError) as error:
        chosen(ATTEND, old, AXES | {"head_dim": 192})
    assert error.value.reasons == {
        "cpu": ("requires device == cpu, got cuda",),
        "wgmma": ("requires capability == 90, got 75", "requires head_dim in 64, 128, got 192"),
        "mma": ("requires capability >= 80, got 75",),
        "tiny": ("requires capability >= 80, got 75", "requires head_dim <= 64, got 192"),
    }
    assert "\n  mma: requires capability >= 80, got 75\n" in str(error.value)
    assert isinstance(error.value, ValueError)


def test_a_value_that_no_implementation_takes() -> None:
    with pytest.raises(UnsupportedError) as error:
        chosen(ATTEND, CPU, AXES | {"dtype": "f32"})
    assert error.value.reasons["cpu"] == ("requires dtype in f16, bf16, got f32",)
    assert len(error.value.reasons) == 4
    assert all(reason for reason in error.value.reasons.values())


def test_fields_are_known_and_have_usual_values() -> None:
    with pytest.raises(ValueError, match="attend: fields of a request are dtype, head_dim, causal; got page"):
        chosen(ATTEND, CPU, AXES | {"page": 1})
    usual = {"dtype": "f16", "head_dim": 64, "causal": False}
    assert ATTEND.values({}) == usual and ATTEND.values({"causal": True}) == usual | {"causal": True}


def test_explain_says_it_for_each() -> None:
    assert explain(Request.of(ATTEND, CUDA["90a"], AXES)) == {
        "cpu": ("requires device == cpu, got cuda",),
        "wgmma": (),
        "mma": ("supports the request too; wgmma is preferred",),
        "tiny": ("requires head_dim <= 64, got 128",),
    }


def test_specs_are_values() -> None:
    spec = chosen(ATTEND, CUDA["90a"], AXES)
    same = chosen(ATTEND, CUDA["90a"], dict(reversed(AXES.items())))
    assert spec == same and hash(spec) == hash(same)
    assert spec != chosen(ATTEND, CUDA["90a"], AXES, "mma")
    assert str(spec) == "attend(dtype=f16, head_dim=128, causal=True) by wgmma on sm_90a"
    assert spec.name == "attend_dtype_f16_head_dim_128_causal_True_wgmma_sm_90a"
    assert chosen(ATTEND, CPU, AXES).name == "attend_cpu"
    assert chosen(ATTEND, CPU, AXES).unit() is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.implementation = "mma"  # type: ignore[misc]
    assert ATTEND.source == "csrc/attention/attend.cc"
    assert ATTEND.header == "fi/generated/attend.h"


def test_the_grid_is_every_combination_or_the_list() -> None:
    assert len(list(ATTEND.grid())) == 12
    assert next(ATTEND.grid()) == {"dtype": "f16", "head_dim": 64, "causal": False}
    few = dataclasses.replace(ATTEND, prebuilt=({"causal": True},))
    assert list(few.grid()) == [{"dtype": "f16", "head_dim": 64, "causal": True}], "other fields are as usual"


def test_targets() -> None:
    assert (CPU.kind, CPU.arch, str(CPU)) == ("cpu", platform.machine(), platform.machine())
    assert [CUDA["90a"].capability, CUDA["86"].capability, CUDA["120a"].capability, CPU.capability] == [90, 86, 120, 0]
    assert str(CUDA["100a"]) == "sm_100a"
    assert pickle.loads(pickle.dumps(CUDA["86"])) == CUDA["86"]


@pytest.mark.parametrize(
    ("arch", "others"),
    [
        ("80", []),
        ("86", ["80"]),
        ("87", ["80"]),
        ("89", ["80"]),
        ("75", []),  # older than everything that is built ahead
        ("90a", []),  # an sm_80 binary does not run on another major
        ("100a", []),
        ("103a", []),  # nor an "a" binary on another minor
        ("120a", []),
        ("121a", []),
    ],
)
def test_binaries_that_run_on_a_target(arch: str, others: list[str]) -> None:
    target = Target("cuda", arch)
    assert [t.arch for t in target.compatible()] == [arch, *others]


def test_the_cpu_runs_its_own_only() -> None:
    assert CPU.compatible() == (CPU,)


@pytest.mark.parametrize(
    ("word", "arch"),
    [
        ("7.5", (7, "5")),
        ("8.0", (8, "0")),
        ("8.9", (8, "9")),
        ("9.0", (9, "0a")),
        ("10.0", (10, "0a")),
        ("10.3", (10, "3a")),
        ("11.0", (11, "0a")),
        ("12.0", (12, "0f")),
        ("12.1", (12, "1a")),
        ("9.0a", (9, "0a")),
        ("10.0f", (10, "0f")),
        ("12.0a", (12, "0a")),
        ("12.0f", (12, "0f")),
        ("8.0a", (8, "0a")),  # a suffix that is given is kept
    ],
)
def test_architectures_as_users_write_them(word: str, arch: tuple[int, str]) -> None:
    assert parse_arch(word) == arch
    if word[-1].isdigit():
        major, minor = map(int, word.split("."))
        assert default_suffix(major, minor) == arch[1]


@pytest.mark.parametrize("word", ["", "9", "90a", "9.0b", "sm_90", "9.0 ", "9.0a+PTX"])
def test_a_wrong_architecture(word: str) -> None:
    with pytest.raises(ValueError, match=f"expected major.minor.* got {re.escape(repr(word))}"):
        parse_arch(word)


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 0), "80"), ((8, 6), "86"), ((8, 9), "89"), ((9, 0), "90a"), ((10, 0), "100a"), ((12, 0), "120a")],
)
def test_the_target_of_a_device(capability: tuple[int, int], arch: str) -> None:
    assert cuda_target(*capability) == Target("cuda", arch)
    if capability != (8, 6):
        assert arch in PREBUILT_ARCHS


def test_dtypes() -> None:
    for short, dtype in DTYPES.items():
        torch_dtype = getattr(torch, dtype.torch)
        assert short_name(torch_dtype) == short == dtype.short
        assert torch_dtype.itemsize == dtype.bytes
    assert short_name(torch.complex64) == "torch.complex64"


# These tests run over every op of every family.
def cuda_specs(op: Op) -> list[Spec]:
    """Every CUDA implementation of every prebuilt configuration on every target that takes it."""
    return [spec for target in CUDA.values() for spec in aot.specs(op, target)]


def test_names_are_unique() -> None:
    """One name for each configuration on each target, over all ops: names are files of one directory."""
    specs = [spec for op in ops().values() for spec in cuda_specs(op)]
    names = [spec.name for spec in specs] + [f"{name}_{kind}" for name in ops() for kind in ("cpu", "cuda")]
    assert len(specs) > 100
    repeated = [name for name, group in itertools.groupby(sorted(names)) if len(list(group)) > 1]
    assert repeated == []
    assert [name for name in names if not re.fullmatch(r"[A-Za-z0-9_]{1,200}", name)] == []


@pytest.mark.parametrize("op", ops().values(), ids=lambda op: op.name)
def test_a_declaration(op: Op) -> None:
    grid = list(op.grid())
    assert operator(op.name).op is op
    assert grid and len({tuple(values.items()) for values in grid}) == len(grid), "the grid repeats itself"
    for values in grid:
        assert list(values) == list(op.fields), "fields in the order of the declaration"
        if values.get("selects"):  # the op `indexer` asks for it on Hopper alone; elsewhere it composes two ops
            assert op.name == "mqa_logits"
            assert [spec.implementation for spec in specs(Request.of(op, CUDA["90a"], values))] == ["wgmma_select_sm90"]
            continue
        (cpu,) = specs(Request.of(op, CPU, values))
        assert cpu.unit() is None, "every op runs on the CPU"
        assert any(specs(Request.of(op, target, values)) for target in CUDA.values()), "and on some GPU"
    old = any(specs(Request.of(op, CUDA["80"], values)) for values in grid)
    assert old == (op.name not in toy.HOPPER_ALONE), "every other op runs on GPUs since sm_80"
    for spec in cuda_specs(op):
        assert [axis for axis, _ in spec.axes] == list(op.axes), "names are made of axes in their order"
        assert all(value in op.axes[axis] for axis, value in spec.axes), "an axis has the values that are declared"
    assert len({impl.name for impl in op.implementations}) == len(op.implementations)
    assert re.fullmatch(r"\(.*Tensor\(a!\).*\) -> \(\)", op.schema), "the schema is of the out-variant"


@pytest.mark.parametrize("op", ops().values(), ids=lambda op: op.name)
def test_units(op: Op) -> None:
    found = {(spec.implementation, spec.axes): spec for spec in cuda_specs(op)}
    assert found
    for spec in found.values():
        unit = spec.unit()
        assert unit == spec.unit(), "the choice is a pure function of the axes"
        assert unit and unit.entries
        names = [entry.name for entry in unit.entries]
        assert len(set(names)) == len(names)
        for entry in unit.entries:
            assert re.fullmatch(r"[a-z]\w*", entry.name)
            assert 32 <= entry.threads <= 1024 and entry.threads % 32 == 0
            assert 0 <= entry.shared_bytes <= 227 * 1024
            assert entry.ctas_per_sm * entry.threads <= 2048
            assert type(entry.config) is (op.config or tuple), "a launcher reads the config that the op declares"
            assert all(isinstance(word, int) for word in entry.config), "which is of integers"


def test_the_prebuilt_set_is_small() -> None:
    """All five architectures of all ops share wheels of 15 MB."""
    count = sum(len(list(op.grid())) for op in ops().values())
    assert count <= 174, "prebuild fewer configurations: what varies per call is an argument"
