"""The dispatcher: choosing is a pure function of a request, and says for each implementation why it was not chosen."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from fi_core.registry import ops
from fi_core.runtime.dispatch import Choice, Request, choose, explain, specs
from fi_core.runtime.errors import UnsupportedError
from fi_core.runtime.launch.kernel import host_module
from fi_core.runtime.resolve.ahead import planned
from fi_core.runtime.spec.arguments import REQUIRED
from fi_core.runtime.spec.constraint import ON_CPU, Constraint, at_least, exactly
from fi_core.runtime.spec.op import Entry, Field, Implementation, Op, Unit, Values
from fi_core.runtime.spec.target import CPU, Target

TARGETS = (CPU, *(Target("cuda", arch) for arch in ("75", "80", "90a", "100a")))
HOPPER, AMPERE = Target("cuda", "90a"), Target("cuda", "80")


def units(axes: Values) -> Unit:
    return Unit("fi/toy/scale.cuh", "ScaleParams", (Entry("mix", f"mix<{axes['dim']}>", 32),))


# `fast` is preferred where pages are large, `elsewhere` is another library's, and taken only by name.
MIX = Op(
    name="mix",
    family="toy",
    arguments='Tensor(a!) out, Tensor x, str backend="auto"',
    fields={"dim": Field((64, 128), 64), "page": Field(None, 16)},
    axes={"dim": (64, 128)},
    implementations=(
        Implementation("cpu", ON_CPU, backends=("plain",)),
        Implementation(
            "fast", exactly(90), units, backends=("fa3",), preferred=(Constraint("page", "multiple of", 16),)
        ),
        Implementation("slow", at_least(80), units, backends=("plain", "plain_slow")),
        Implementation("elsewhere", (Constraint("device", "==", "cuda"),), backends=("other",), by_name=True),
    ),
)


def choice(target: Target = HOPPER, backend: str = "auto", **values: Any) -> Choice:
    return choose(Request.of(MIX, target, values, backend))


def test_a_request_and_a_choice_are_values() -> None:
    request = Request.of(MIX, HOPPER, {"dim": 128})
    assert request == Request(MIX, HOPPER, (128, 16)) and hash(request) == hash(Request(MIX, HOPPER, (128, 16)))
    assert request.facts() == {"device": "cuda", "capability": 90, "batch_invariant": False, "dim": 128, "page": 16}
    found = choose(request)
    assert (found.request, found.implementation, found.backend) == (request, "fast", "fa3")
    assert found.spec.axes == (("dim", 128),), "an axis is what device code is compiled for"
    assert [entry.body for entry in found.entries] == ["mix<128>"]
    for value, name in ((request, "backend"), (found, "implementation")):
        with pytest.raises(AttributeError):
            setattr(value, name, "slow")


def test_request_and_choice_print_themselves() -> None:
    assert str(Request.of(MIX, AMPERE, {"page": 3}, "plain")) == "mix(dim=64, page=3, backend=plain) on sm_80"
    assert str(choice(page=3)).splitlines() == [
        "mix(dim=64, page=3) on sm_90a: slow",
        "  cpu: requires device == cpu, got cuda",
        "  fast: supports the request but is slow: requires page multiple of 16, got 3",
        "  elsewhere: runs only where the caller passes backend='other'",
    ]


def test_choosing_is_remembered_and_depends_on_the_request_alone() -> None:
    choose.cache_clear()
    first = choice()
    assert choice() is first, "an equal request is looked up"
    choose.cache_clear()
    again = choice()
    assert again is not first
    assert all(getattr(again, field.name) == getattr(first, field.name) for field in dataclasses.fields(Choice))


def test_preferred_conditions_order_the_allowed_implementations() -> None:
    assert choice().implementation == "fast"
    assert choice(page=3).implementation == "slow"
    assert choice(page=3, backend="fa3").implementation == "fast", "who names it gets it"
    alone = dataclasses.replace(MIX, name="alone", implementations=(MIX.implementation("fast"),))
    found = choose(Request.of(alone, HOPPER, {"page": 3}))
    assert (found.implementation, found.reasons) == ("fast", ()), "a slow one rather than none"


def test_auto_never_chooses_a_by_name_implementation() -> None:
    found = choice(backend="other")
    assert (found.implementation, found.entries) == ("elsewhere", ()), "another library brings its kernels"
    with pytest.raises(UnsupportedError) as error:
        choice(Target("cuda", "75"))
    assert error.value.reasons["elsewhere"] == ("runs only where the caller passes backend='other'",)


@pytest.mark.parametrize(
    ("target", "backend", "implementation"),
    [(CPU, "plain", "cpu"), (HOPPER, "plain", "slow"), (HOPPER, "slow", "slow"), (HOPPER, "plain_slow", "slow")],
)
def test_a_backend_may_name_several_or_be_the_name_itself(target: Target, backend: str, implementation: str) -> None:
    assert choice(target, backend).implementation == implementation
    assert choice(target, backend).backend == "plain", "its first public name"


def test_a_named_backend_that_cannot_serve_gives_its_own_reasons() -> None:
    with pytest.raises(UnsupportedError) as error:
        choice(AMPERE, "fa3", dim=96)
    assert error.value.reasons == {
        "fast": ("requires dim in 64, 128, got 96", "requires capability == 90, got 80"),
    }
    with pytest.raises(UnsupportedError) as error:
        choice(Target("cuda", "75"), "plain")
    assert list(error.value.reasons) == ["cpu", "slow"], "all that the name stands for"


def test_an_unknown_backend_lists_the_names() -> None:
    with pytest.raises(ValueError, match="backend: mix has auto, plain, cpu, fa3, fast, plain_slow, slow, other") as e:
        choice(backend="fa4")
    assert str(e.value).endswith("got 'fa4'") and not isinstance(e.value, UnsupportedError)


def test_specs_are_of_all_that_take_it_here() -> None:
    """Packages ship every implementation of this library, also those that auto does not prefer."""
    assert [s.implementation for s in specs(Request.of(MIX, HOPPER, {"page": 3}))] == ["fast", "slow"]
    assert [s.implementation for s in specs(Request.of(MIX, CPU))] == ["cpu"]


def test_a_plan_asks_with_the_dtypes_of_torch() -> None:
    op = dataclasses.replace(MIX, name="mix_types", fields={"q": Field(("bf16",), "bf16")}, axes={"q": ("bf16",)})
    found = planned(op, torch.device("cpu"), "auto", torch.bfloat16, ahead=False)
    assert found.spec.axes == (("q", "bf16"),)
    assert planned(op, torch.device("cpu"), "auto", torch.bfloat16, ahead=False) is found


# These tests run over every op of every family.
def some(op: Op) -> list[dict[str, Any]]:
    """Requests of an op: the prebuilt ones, and of each the neighbours that differ in one field."""
    others: dict[str, tuple[Any, ...]] = {
        name: field.values if field.values is not None else (0, 1, 3, 64, 100, 128, 192, 256, 1024)
        for name, field in op.fields.items()
    }
    usual = op.values({})
    neighbours = [usual | {name: value} for name, values in others.items() for value in values]
    return [*op.grid(), *neighbours]


@pytest.mark.parametrize("op", ops().values(), ids=lambda op: op.name)
def test_every_implementation_has_a_reason_or_is_chosen(op: Op) -> None:
    backends = ("auto", *dict.fromkeys(name for i in op.implementations for name in (*i.backends, i.name)))
    seen = set()
    for values, target, backend in itertools.product(some(op), TARGETS, backends):
        request = Request.of(op, target, values, backend)
        reasons = explain(request)
        assert list(reasons) == [i.name for i in op.implementations]
        taken = [name for name, why in reasons.items() if not why]
        assert len(taken) <= 1, f"{request}: {taken}"
        assert all(text.strip() and "\n" not in text for why in reasons.values() for text in why)
        if not taken:
            with pytest.raises(UnsupportedError):
                choose(request)
            continue
        found = choose(request)
        assert found.implementation == taken[0] and dict(found.reasons) == {n: w for n, w in reasons.items() if w}
        assert [axis for axis, _ in found.spec.axes] == list(op.axes)
        assert found.entries or found.implementation == "cpu" or not op.implementation(found.implementation).unit
        seen.add(found.implementation)
    assert seen == {i.name for i in op.implementations}, "each is chosen for something, at least by its name"


def bf16_call(op: Op) -> dict[str, Any]:
    """Arguments of a call: 3 tokens of 4 heads and 2 kv heads of dim 128; pages of 16 tokens."""
    shapes = {
        "q": (3, 4, 128), "out": (3, 4, 128), "k": (9, 16, 2, 128), "v": (9, 16, 2, 128),
        "k_cache": (9, 16, 2, 128), "v_cache": (9, 16, 2, 128),
    }  # fmt: skip
    if op.name == "single_attention":
        shapes |= {"k": (9, 2, 128), "v": (9, 2, 128)}
    found: dict[str, Any] = {}
    for argument in op.parsed:
        quantized = op.name == "rope_quantize" and argument.name.endswith("_out")
        quantized |= (op.name, argument.name) in (("block_quantize", "out"), ("block_dequantize", "input"))
        dtype = torch.float8_e4m3fn if quantized else torch.bfloat16
        dtype = torch.int32 if (op.name, argument.name) == ("moe_sort", "ids") else dtype
        tensor = torch.empty(shapes.get(argument.name, (3, 128)), dtype=dtype)
        usual: dict[str, Any] = {"Tensor": tensor, "int": 0, "float": 0.0, "bool": False}
        number = argument.kind in ("int", "float", "bool") and argument.default is not REQUIRED
        found[argument.name] = argument.default if number else usual.get(argument.kind)
        if argument.is_tensor and argument.name in ("k", "v"):  # v is None where k is a cache of both
            found[argument.name] = tensor
        if argument.name == "input_dtype":
            found[argument.name] = 2  # bf16, of replayssm_materialize
    return found


@pytest.mark.parametrize("op", ops().values(), ids=lambda op: op.name)
def test_a_host_module_makes_a_request_with_a_value_for_every_field(op: Op) -> None:
    """Of a call of bf16 tensors that the op can serve."""
    if op.is_composite:
        return
    given = bf16_call(op)
    values = (0 if argument.kind == "str" else given[argument.name] for argument in op.native)
    place, backend, invariant, *words = map(int, host_module(op, "cpu")["request"](*values).split())
    assert (place, backend, invariant) == (1 << 32, 0, 0), "of the CPU, and no backend"
    assert len(words) == len(op.fields)
    for (name, field), word in zip(op.fields.items(), words):
        assert field.values is None or field.value(word) in field.values, f"{name}: {field.value(word)}"


def test_a_device_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="device: a cpu or cuda device is required of tensors; got meta"):
        planned(MIX, torch.device("meta"), "auto", 64, 16)
