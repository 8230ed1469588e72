"""Specs: dispatch, refusals in words, names, targets; and what holds for the declaration of every op."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import platform
import re

import pytest
import torch

from core import toy
from fi_core.errors import UnsupportedError
from fi_core.registry import launcher, ops
from fi_core.spec.constraint import ON_CPU, Constraint, at_least, exactly
from fi_core.spec.dtype import DTYPES, short_name
from fi_core.spec.op import Axes, Impl, Op, Spec
from fi_core.spec.target import CPU, PREBUILT_ARCHS, Target, cuda_target, default_suffix, parse_arch

CUDA = {arch: Target("cuda", arch) for arch in ("80", "86", "89", "90a", "100a", "120a")}
ATTEND = Op(
    name="attend",
    family="attention",
    schema="(Tensor(a!) out, Tensor q) -> ()",
    axes={"dtype": ("f16", "bf16"), "head_dim": (64, 128, 192), "causal": (False, True)},
    impls=(
        Impl("cpu", ON_CPU),
        Impl("wgmma", (*exactly(90), Constraint("head_dim", "in", (64, 128))), toy.unit),
        Impl("mma", (*at_least(80), Constraint("head_dim", "multiple of", 64)), toy.unit),
        Impl("tiny", (*at_least(80), Constraint("head_dim", "<=", 64)), toy.unit),
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
    spec = ATTEND.spec(target, AXES | axes)
    assert (spec.impl, spec.target, dict(spec.axes)) == (impl, target, AXES | axes)


def test_a_named_implementation() -> None:
    assert ATTEND.spec(CUDA["90a"], AXES, "mma").impl == "mma"
    with pytest.raises(UnsupportedError) as error:
        ATTEND.spec(CUDA["80"], AXES, "wgmma")
    assert str(error.value).splitlines() == [
        "attend(dtype=f16, head_dim=128, causal=True) is not supported on sm_80:",
        "  wgmma: requires capability == 90, got 80",
    ]
    with pytest.raises(ValueError, match=r"attend: impl must be one of cpu, wgmma, mma, tiny; got 'fast'"):
        ATTEND.spec(CPU, AXES, "fast")


def test_a_refusal_names_what_each_implementation_requires() -> None:
    old = Target("cuda", "75")
    with pytest.raises(UnsupportedError) as error:
        ATTEND.spec(old, AXES | {"head_dim": 192})
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
        ATTEND.spec(CPU, AXES | {"dtype": "f32"})
    assert error.value.reasons["cpu"] == ("requires dtype in f16, bf16, got f32",)
    assert len(error.value.reasons) == 4
    assert all(reason for reason in error.value.reasons.values())


@pytest.mark.parametrize("axes", [{"dtype": "f16"}, AXES | {"page": 1}])
def test_axes_are_all_named(axes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"attend: axes must be dtype, head_dim, causal; got {', '.join(axes)}"):
        ATTEND.spec(CPU, axes)


def test_explain_says_it_for_each() -> None:
    assert ATTEND.explain(CUDA["90a"], AXES) == {
        "cpu": ("requires device == cpu, got cuda",),
        "wgmma": (),
        "mma": (),
        "tiny": ("requires head_dim <= 64, got 128",),
    }


def test_specs_are_values() -> None:
    spec = ATTEND.spec(CUDA["90a"], AXES)
    same = ATTEND.spec(CUDA["90a"], dict(reversed(AXES.items())))
    assert spec == same and hash(spec) == hash(same)
    assert spec != ATTEND.spec(CUDA["90a"], AXES, "mma")
    assert str(spec) == "attend(dtype=f16, head_dim=128, causal=True) by wgmma on sm_90a"
    assert spec.name == "attend_dtype_f16_head_dim_128_causal_True_wgmma_sm_90a"
    assert spec.on(CUDA["80"]) == dataclasses.replace(spec, target=CUDA["80"])
    assert ATTEND.spec(CPU, AXES).name == "attend_cpu"
    assert ATTEND.spec(CPU, AXES).unit() is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.impl = "mma"  # type: ignore[misc]
    assert ATTEND.source == "csrc/attention/attend.cc"


def test_the_grid_is_every_combination_or_the_list() -> None:
    assert len(list(ATTEND.grid())) == 12
    assert next(ATTEND.grid()) == {"dtype": "f16", "head_dim": 64, "causal": False}
    few = dataclasses.replace(ATTEND, prebuilt=(AXES,))
    assert list(few.grid()) == [AXES]


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


# What holds for every op of every family.
def test_names_are_unique() -> None:
    """One name for each configuration on each target, over all ops: names are files of one directory."""
    specs = [
        op.spec(target, axes, impl.name)
        for op in ops().values()
        for axes in op.grid()
        for target in CUDA.values()
        for impl in op.impls
        if not op.explain(target, axes)[impl.name]
    ]
    names = [spec.name for spec in specs] + [f"{name}_{kind}" for name in ops() for kind in ("cpu", "cuda")]
    assert len(specs) > 100
    repeated = [name for name, group in itertools.groupby(sorted(names)) if len(list(group)) > 1]
    assert repeated == []
    assert [name for name in names if not re.fullmatch(r"[A-Za-z0-9_]{1,200}", name)] == []


def runs(op: Op, target: Target, axes: Axes) -> bool:
    return not all(op.explain(target, axes).values())


@pytest.mark.parametrize("op", ops().values(), ids=lambda op: op.name)
def test_a_declaration(op: Op) -> None:
    grid = list(op.grid())
    assert launcher(op.name).op is op
    assert grid and len({tuple(axes.items()) for axes in grid}) == len(grid), "the grid repeats itself"
    for axes in grid:
        assert list(axes) == list(op.axes), "axes in the order of the declaration: names are made of them"
        assert op.spec(CPU, axes).unit() is None, "every op runs on the CPU"
        assert any(runs(op, target, axes) for target in CUDA.values()), "and on some GPU"
    assert any(runs(op, CUDA["80"], axes) for axes in grid), "every op runs on GPUs since sm_80"
    assert len({impl.name for impl in op.impls}) == len(op.impls)
    assert re.fullmatch(r"\(.*Tensor\(a!\).*\) -> \(\)", op.schema), "the schema is of the out-variant"


def cuda_specs(op: Op) -> list[Spec]:
    """Every CUDA implementation of every prebuilt configuration, on the first target that takes it."""
    found: dict[object, Spec] = {}
    for axes in op.grid():
        for target in CUDA.values():
            for name, why in op.explain(target, axes).items():
                if not why:
                    found.setdefault((name, *axes.values()), op.spec(target, axes, name))
    return list(found.values())


@pytest.mark.parametrize("op", ops().values(), ids=lambda op: op.name)
def test_units(op: Op) -> None:
    specs = cuda_specs(op)
    assert specs
    for spec in specs:
        unit = spec.unit()
        assert unit == spec.unit(), "the choice is a pure function of the axes"
        assert unit and unit.entries
        names = [entry.name for entry in unit.entries]
        assert len(set(names)) == len(names)
        for entry in unit.entries:
            assert re.fullmatch(r"[a-z]\w*", entry.name)
            assert 32 <= entry.threads <= 1024 and entry.threads % 32 == 0
            assert 0 <= entry.shared_bytes <= 227 * 1024
            assert entry.blocks_per_sm * entry.threads <= 2048
            assert all(type(word) is int for word in entry.config), "the launcher reads integers"


def test_the_prebuilt_set_is_small() -> None:
    """All five architectures of all ops share wheels of 15 MB."""
    count = sum(len(list(op.grid())) for op in ops().values())
    assert count <= 150, "prebuild fewer configurations: what varies per call is an argument"
