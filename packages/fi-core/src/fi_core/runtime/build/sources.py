"""The fi-kernels tree: the files of a spec, rendering of templates, and the content hash of a unit with its headers."""

from __future__ import annotations

import enum
import functools
import hashlib
import json
import posixpath
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from fi_core.runtime import files
from fi_core.runtime.spec.arguments import CPP_TYPES
from fi_core.runtime.spec.artifact import Artifact, Text
from fi_core.runtime.spec.op import Field, Op, Spec, Unit
from fi_core.runtime.spec.target import CPU

_INCLUDE = re.compile(rb'^\s*#\s*include\s*["<]([^">{]+)[">]', re.MULTILINE)


@functools.cache
def root() -> Path:
    """The directory of fi-kernels' sources."""
    import fi_kernels

    return Path(fi_kernels.ROOT)


def include_dir() -> Path:
    return root() / "include"


def include_dirs(artifact: Artifact) -> tuple[Path, ...]:
    """The include folders of a unit, except those of the compiler."""
    return (include_dir(), *map(Path, artifact.includes))


def artifacts(spec: Spec) -> tuple[Artifact, ...]:
    """The files a spec needs: its host module and, on CUDA, its device binary."""
    if spec.target.kind == "cpu":
        return (host_module(spec.op, "cpu"),)
    unit = spec.unit()
    assert unit is not None, f"{spec}: a CUDA implementation has a unit"
    title = f"{spec.op.name} by {spec.implementation}"
    image = Artifact(spec.name, "cubin", spec.target, device_unit(title, unit), unit.flags)
    return host_module(spec.op, "cuda"), image


def host_module(op: Op, kind: str) -> Artifact:
    """The launcher of an op (kind "cuda"), or its CPU implementation ("cpu")."""
    return Artifact(f"{op.name}_{kind}", kind, CPU, op.source, headers=(generated_header(op),))


def _text(template: str, data: dict[str, Any], includes: tuple[str, ...] = ()) -> Text:
    return Text(template, json.dumps(data, sort_keys=True), includes)


def device_unit(title: str, unit: Unit) -> Text:
    """A device unit: for each kernel entry a `__global__` function that calls the template it instantiates."""
    entries = [{"name": e.name, "body": e.body, "threads": e.threads, "ctas": e.ctas_per_sm} for e in unit.entries]
    data = {
        "title": title,
        "header": unit.header,
        "params": unit.params,
        "entries": entries,
        "variant": unit.variant,
    }
    return _text("unit.cu.jinja", data, (unit.header, *_includes(unit.variant.encode())))


def variant_module(op: Op, name: str, variant: str, flags: tuple[str, ...]) -> Artifact:
    """The CPU implementation of an op with a user's device code before it."""
    data = {"title": f"{name} on the CPU", "variant": variant, "source": op.source}
    source = _text("variant.cc.jinja", data, (op.source, *_includes(variant.encode())))
    return Artifact(f"{name}_cpu", "cpu", CPU, source, flags, (str(root()),), (generated_header(op),))


def joined(title: str, paths: Sequence[Path]) -> str | Text:
    """The source of one unit: a file, or a text that includes several files."""
    if len(paths) == 1:
        return str(paths[0])
    files = [str(path) for path in paths]
    return _text("sources.jinja", {"title": title, "files": files}, tuple(files))


@functools.cache
def generated_header(op: Op) -> tuple[str, Text]:
    """The name and text of the header with the structs of an op: its plan, arguments and request, and the config of its
    kernel entries.
    """
    arguments = [
        {"name": a.name, "type": CPP_TYPES[a.kind], "reader": a.reader, "planned": a.name in op.planned}
        for a in op.parsed
    ]
    tensors = sorted((a for a in op.parsed if a.is_tensor), key=lambda a: not a.written)
    config, enums = [], {}
    if op.config is not None:
        for name, kind in get_type_hints(op.config).items():
            config.append({"name": name, "type": kind.__name__ if issubclass(kind, enum.Enum) else "int64_t"})
            if issubclass(kind, enum.Enum):
                enums[kind.__name__] = {member.name: member.value for member in kind}
    data = {
        "op": op.name,
        "stem": _camel(op.name),
        "arguments": [a for a in arguments if not a["planned"]],
        "planned": [a for a in arguments if a["planned"]],
        "first": next(a.name for a in op.parsed if a.kind == "Tensor"),
        "backend": next((a.name for a in op.parsed if a.kind == "str"), "0"),
        "fields": [_field(name, f) for name, f in op.fields.items()],
        "config": config,
        "enums": enums,
        "tensors": [f"&{a.name}" for a in tensors],
        "permitted": [sum(a.may_be(b) << i for i, b in enumerate(tensors)) for a in tensors if a.written],
    }
    return op.header, _text("op.h.jinja", data)


def _field(name: str, field: Field) -> dict[str, Any]:
    """A member of a request; an enum has the name of its field, and members such as kColumnBlocks."""
    kinds = {"dtype": "DType", "bool": "bool", "int": "int64_t", "word": _camel(name)}
    members = {
        "k" + "".join(part[0].upper() + part[1:] for part in word.split("_")): number
        for word, number in field.members().items()
    }
    return {"name": name, "type": kinds[field.kind], "members": members}


def _camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


@functools.cache
def _template(path: Path, _modified: int) -> Any:
    import jinja2  # only what compiles something, or writes a report, pays for it

    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return environment.from_string(path.read_text())


def _template_path(text: Text) -> Path:
    return root() / "templates" / text.template


def render(text: Text) -> str:
    """The rendered text of a template and its data."""
    path = _template_path(text)
    return str(_template(path, path.stat().st_mtime_ns).render(**json.loads(text.data)))


def text(artifact: Artifact) -> str:
    """The translation unit."""
    source = artifact.source
    return render(source) if isinstance(source, Text) else (root() / source).read_text()


def _content(source: str | Text) -> tuple[bytes, tuple[str, ...]]:
    """The bytes that determine a source's text, without rendering it, and the headers that it includes."""
    if isinstance(source, Text):
        template = _template_path(source).read_bytes()
        return template + b"\0" + source.data.encode(), (*_includes(template), *source.includes)
    content = (root() / source).read_bytes()
    return content, _includes(content)


def _includes(content: bytes) -> tuple[str, ...]:
    return tuple(m.decode() for m in _INCLUDE.findall(content))


@functools.cache
def _read(path: Path, *_state: int) -> tuple[str, tuple[str, ...]]:
    """sha256 and includes of a header, cached for each state of the file."""
    content = path.read_bytes()
    return hashlib.sha256(content).hexdigest(), _includes(content)


def _locate(name: str, includer: str, places: Iterable[Path]) -> tuple[str, Path] | None:
    """An included file, beside its includer or below one of the places; None for system headers."""
    for choice in (posixpath.normpath(posixpath.join(posixpath.dirname(includer), name)), name):
        for place in places:
            if (place / choice).is_file():
                return choice, place / choice
    return None


def headers(artifact: Artifact) -> dict[str, str]:
    """Every project header that the unit reaches, transitively and with generated ones, and the sha256 of its
    content.
    """
    places, generated = include_dirs(artifact), dict(artifact.headers)
    todo = [(name, "") for name in _content(artifact.source)[1]]
    seen: dict[str, str] = {}
    while todo:
        name, includer = todo.pop()
        if name in generated:
            if name not in seen:
                content, nested = _content(generated[name])
                seen[name] = hashlib.sha256(content).hexdigest()
                todo.extend((other, name) for other in nested)
            continue
        found = _locate(name, includer, places)
        if found and found[0] not in seen:
            name, path = found
            state = path.stat()
            seen[name], nested = _read(path, state.st_mtime_ns, state.st_size)
            todo.extend((other, name) for other in nested)
    return seen


def reached(names: Iterable[str], folder: Path) -> list[str]:
    """The headers of a folder that these headers of it include, transitively and with themselves."""
    todo, seen = list(names), set()
    while todo:
        name = todo.pop()
        if name not in seen and (folder / name).is_file():
            seen.add(name)
            todo.extend(_includes((folder / name).read_bytes()))
    return sorted(seen)


def closure(artifact: Artifact) -> str:
    """sha256 over the unit and its headers; a prebuilt file is used only if it was built from the same."""
    digest = hashlib.sha256(_content(artifact.source)[0])
    for name, content in sorted(headers(artifact).items()):
        digest.update(f"\0{name}\0{content}".encode())
    return digest.hexdigest()


def write_headers(artifact: Artifact, directory: Path) -> None:
    """Writes the generated headers of a unit below a folder, only where their content differs."""
    for name, header in artifact.headers:
        files.write_if_new(directory / name, render(header))
