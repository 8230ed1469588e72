"""Arguments are declared once: their torch schema, the generated headers, and the keys of compiled files."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import shutil
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

import pytest
import torch

from core import toy
from fi_core.registry import load, ops
from fi_core.runtime.build import compiler, sources
from fi_core.runtime.resolve import built
from fi_core.runtime.spec.arguments import CPP_TYPES, REQUIRED, Argument, parse
from fi_core.runtime.spec.artifact import Artifact
from fi_core.runtime.spec.op import Op
from fi_core.runtime.spec.target import CPU, Target

if TYPE_CHECKING:
    from core.conftest import Python

EACH_OP = pytest.mark.parametrize("op", ops().values(), ids=lambda op: op.name)


def test_parse() -> None:
    text = 'Tensor(a!) out, Tensor? scale, int k=-1, float eps=1e-6, bool? pdl=None, bool causal=False, str backend="x"'
    assert parse(text) == (
        Argument("out", "Tensor", True, REQUIRED, "a"),
        Argument("scale", "Tensor?", False, REQUIRED),
        Argument("k", "int", False, -1),
        Argument("eps", "float", False, 1e-6),
        Argument("pdl", "bool?", False, None),
        Argument("causal", "bool", False, False),
        Argument("backend", "str", False, "x"),
    )
    assert [argument.name for argument in parse(text) if argument.is_tensor] == ["out", "scale"]


@pytest.mark.parametrize("text", ["Tensor", "tensor x", "int[] sizes", "Tensor x,int k", ""])
def test_invalid_declarations(text: str) -> None:
    with pytest.raises(ValueError, match="an argument such as 'Tensor\\(a!\\) out' or 'int k=1' is required; got"):
        parse(text)


@EACH_OP
def test_torch_has_the_declared_arguments(op: Op) -> None:
    """Names, kinds, defaults, and which tensors are written, of the operator and of the function that calls it."""
    operator = load()[op.name]
    schema = getattr(torch.ops.fi_core, op.name).default._schema
    assert [a.name for a in schema.arguments] == [a.name for a in op.parsed]
    parameters = inspect.signature(operator.function).parameters
    assert list(parameters)[: len(op.parsed)] == [a.name for a in op.parsed]
    for ours, theirs in zip(op.parsed, schema.arguments):
        kind = str(theirs.type).replace("Optional[", "").replace("]", "?" if "Optional[" in str(theirs.type) else "")
        assert kind == ours.kind
        assert bool(theirs.alias_info and theirs.alias_info.is_write) == ours.written
        assert theirs.has_default_value() == (ours.default is not REQUIRED)
        here = parameters[ours.name].default
        if ours.default is REQUIRED:
            assert here is inspect.Parameter.empty
        else:
            assert here == theirs.default_value == ours.default
    written = [a.name for a in op.parsed if a.written]
    assert written and all(a.kind.startswith("Tensor") for a in op.parsed if a.written)


def rendered(op: Op) -> str:
    _, header = sources.generated_header(op)
    return sources.render(header)


def members(text: str, struct: str) -> list[tuple[str, str]]:
    """(type, name) of the members of a generated struct, in order."""
    found = re.search(rf"^struct {struct}(?: : \w+)? {{\n(.*?)^}};", text, re.MULTILINE | re.DOTALL)
    assert found, f"no {struct}"
    return [(kind, name) for kind, name in re.findall(r"^  (\w+) (\w+);$", found[1], re.MULTILINE)]


def stem(op: Op) -> str:
    return "".join(word.capitalize() for word in op.name.split("_"))


@EACH_OP
def test_a_generated_header_has_the_arguments_in_order(op: Op) -> None:
    """Those that a plan fixes have a struct of their own."""
    text = rendered(op)
    planned = [a for a in op.parsed if a.name in op.planned]
    rest = [a for a in op.parsed if a.name not in op.planned]
    assert list(op.native) == planned + rest
    for name, arguments in ((f"{stem(op)}Plan", planned), (f"{stem(op)}Args", rest)):
        assert not arguments or members(text, name) == [(CPP_TYPES[a.kind], a.name) for a in arguments]
        assert not arguments or f"kCount = {len(arguments)};" in text
    read = re.findall(r'values.get<(\w+)>\((\d+), "(\w+)"\)', text)
    assert read == [(a.reader, str(i), a.name) for some in (planned, rest) for i, a in enumerate(some)]
    assert all("Written" in a.reader for a in op.parsed if a.written), "a tensor that is written is checked as such"


@EACH_OP
def test_a_generated_header_has_the_request(op: Op) -> None:
    text = rendered(op)
    if not op.fields:
        assert "Request {" not in text
        return
    body = re.search(rf"struct {stem(op)}Request {{\n(.*?)^}};", text, re.MULTILINE | re.DOTALL)
    assert body
    assert re.findall(r"^  \w+ (\w+);$", body[1], re.MULTILINE) == list(op.fields)
    for name, field in op.fields.items():
        assert field.value(field.word(field.default)) == field.default, "a word of C++ is read as it is written"
        for word, number in field.members().items():
            assert field.word(word) == number and field.value(number) == word and f" = {number}," in body[1], name


@EACH_OP
def test_a_generated_header_has_the_config_of_the_entries(op: Op) -> None:
    text = rendered(op)
    if op.config is None:
        assert "Config {" not in text
        return
    found = members(text, f"{stem(op)}Config")
    assert [name for _, name in found] == list(get_type_hints(op.config))
    for (kind, _), hint in zip(found, get_type_hints(op.config).values()):
        assert kind == (hint.__name__ if issubclass(hint, IntEnum) else "int64_t")
        if issubclass(hint, IntEnum):
            body = re.search(rf"enum class {kind} : int64_t {{(.*?)}};", text)
            assert body
            pairs = re.findall(r"(\w+) = (-?\d+),", body[1])
            assert {name: int(value) for name, value in pairs} == {m.name: m.value for m in hint}


# A change of a declaration or of a template recompiles the units that depend on it.
def files() -> dict[str, Artifact]:
    """The files of one configuration of each op, by kind and op."""
    found = {}
    for name, op in ops().items():
        for target in (CPU, Target("cuda", "90a" if name in toy.HOPPER_ALONE else "80")):
            for artifact in sources.artifacts(toy.chosen(op, target, next(op.grid()))):
                found[f"{artifact.kind} {name}"] = artifact
    return found


def keys() -> dict[str, str]:
    return {name: compiler.key(artifact) for name, artifact in files().items()}


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in before if before[name] != after[name]}


@pytest.fixture
def copied(fresh: Callable[[], None], tmp_path: Path) -> Iterator[Path]:
    """The sources of fi-kernels, in a directory of the test."""
    shutil.copytree(toy.KERNELS, tmp_path / "kernels")
    toy.use(tmp_path / "kernels")
    yield tmp_path / "kernels"
    toy.use(toy.KERNELS)


@pytest.mark.parametrize(
    ("template", "kinds"),
    [("op.h.jinja", ("cpu", "cuda")), ("unit.cu.jinja", ("cubin",)), ("variant.cc.jinja", ())],
)
def test_an_edited_template(copied: Path, template: str, kinds: tuple[str, ...]) -> None:
    before = keys()
    path = copied / "templates" / template
    path.write_text(path.read_text() + "// Edited.\n")
    assert changed(before, keys()) == {name for name in before if name.startswith(kinds) and kinds}


class ToyConfig(NamedTuple):
    rows: int


@pytest.mark.parametrize("change", ["arguments", "config"])
def test_an_edited_declaration(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """The host modules of one op: its launcher and its CPU implementation."""
    before, op = keys(), ops()["rmsnorm"]
    other: Any = {"arguments": f"{op.arguments}, int more=0", "config": ToyConfig}[change]
    edited = {**ops(), "rmsnorm": dataclasses.replace(op, **{change: other})}
    monkeypatch.setattr(f"{__name__}.ops", lambda: edited)
    assert changed(before, keys()) == {"cpu rmsnorm", "cuda rmsnorm"}


WARM = """
import json, sys
import torch
import fi_core
from fi_core.page import get_seq_lens
out = get_seq_lens(torch.tensor([0, 2, 3], dtype=torch.int32), torch.tensor([5, 7], dtype=torch.int32), 16)
from fi_core.registry import loaded_kernels
print(json.dumps([out.tolist(), list(loaded_kernels().values()), "jinja2" in sys.modules]))
"""


def test_a_warm_process_renders_nothing(python: Python) -> None:
    """jinja2 takes 40 ms to import: naming what is in the store needs no text."""
    (host,) = sources.artifacts(toy.chosen(ops()["get_seq_lens"], CPU))
    assert built(host).origin == "jit"
    lengths, origins, loaded = json.loads(python.run(WARM))
    assert (lengths, origins) == ([21, 7], ["store"])
    assert not loaded, "jinja2 is imported only where something is compiled"
