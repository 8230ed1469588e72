"""Writes the reference pages that are derived from the packages: one function per page, each returning MyST text."""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import docstrings
import layouts
import names as flashinfer_names
import support


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = [head, ["---"] * len(head), *([str(cell).replace("|", "\\|") for cell in row] for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


def environment() -> str:
    """The table of fi_core.runtime.env."""
    from fi_core.runtime.env import env

    rows = [
        (
            "<br>".join(f"`{name}`" for name in (row.name, *row.aliases)),
            f"{row.doc}<br>{row.allowed}; default: {row.default}; read: {row.when}",
        )
        for row in env.table()
    ]
    lines = [
        "# Environment variables",
        "",
        "`FI_X` wins over its alias `FLASHINFER_X`; an empty value counts as unset; unknown variables are ignored.",
        "A variable is read at import, at each build, or at each call.",
        "",
        *table(("variable", "meaning, allowed values, default, when it is read"), rows),
    ]
    return "\n".join(lines) + "\n"


def _commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parser of each command, those of groups in place of the group."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield parser
    for command in dict.fromkeys(command for group in groups for command in group.choices.values()):
        yield from _commands(command)


def command_line() -> str:
    """The help of each command of fi-core."""
    from fi_core.cli.arguments import parser

    os.environ["COLUMNS"] = "100"  # of the help texts
    lines = [
        "# Command line",
        "",
        "`fi-core COMMAND`, or `python -m fi_core COMMAND`. Exit codes: 0 all is well, 1 it failed or something is",
        "amiss, 2 it was called wrongly.",
    ]
    for command in _commands(parser()):
        lines += ["", f"## {command.prog}", "", "```none", command.format_help().rstrip(), "```"]
    return "\n".join(lines) + "\n"


def _known() -> tuple[list[Any], tuple[Any, ...]]:
    """The ops of the registry by family and name, and the targets of the binary packages."""
    from fi_core import registry
    from fi_core.runtime.spec.target import CPU, PREBUILT_ARCHS, Target

    known = sorted(registry.ops().values(), key=lambda op: (op.family, op.name))
    return known, (CPU, *(Target("cuda", arch) for arch in PREBUILT_ARCHS))


def ops() -> str:
    """The ops of the registry: arguments, axes and implementations."""
    from fi_core.aot import specs

    known, targets = _known()

    def where(op: Any, target: Any) -> str:
        found = [spec.implementation for spec in specs(op, target)]
        return "<br>".join(f"{name} ({found.count(name)})" for name in dict.fromkeys(found)) or "-"

    lines = [
        "# Ops",
        "",
        "An op is one host entry with its kernels. Several functions may share an op, as all forms of rmsnorm do; the",
        "page {doc}`support` lists them.",
        "",
        "## Prebuilt specialisations",
        "",
        "The implementations that serve each target, and the number of prebuilt specialisations. A GPU whose",
        "architecture has no column runs the binary of an older one of its generation, or compiles its own.",
    ]
    for family in dict.fromkeys(op.family for op in known):
        rows = [(f"`{op.name}`", *(where(op, t) for t in targets)) for op in known if op.family == family]
        lines += ["", f"**{family}**", "", *table(("op", "CPU", *(str(t) for t in targets[1:])), rows)]
    lines += [
        "",
        "## Axes",
        "",
        "An axis is fixed for a model and chosen at compile time. Everything else is an argument.",
    ]
    for op in known:
        axes = [(f"`{name}`", ", ".join(map(str, values))) for name, values in op.axes.items()]
        rows = [(impl.name, " and ".join(str(c) for c in impl.constraints)) for impl in op.implementations]
        arguments = "\n".join(str(op.schema).split(", "))
        lines += [
            "",
            f"### {op.name}",
            "",
            "```none",
            f"{op.name}{arguments}",
            "```",
            "",
            f"Source: `{op.source}`.",
            "",
        ]
        lines += [*(table(("axis", "values"), axes) if axes else ["No axes."]), ""]
        lines += table(("implementation", "requires"), rows)
    return "\n".join(lines) + "\n"


def support_matrix() -> str:
    """Which public function runs where, and by which implementation."""
    from fi_core.cli.reached import ops_of

    known, targets = _known()
    by_name = {op.name: op for op in known}
    columns = [targets[0], *(target for target in targets[1:] if target.capability in (80, 90))]
    lines = [
        "# Support matrix",
        "",
        "The implementations that the dispatcher may choose for each function, best first: on the CPU, on sm_80 (which",
        "sm_86, sm_89, sm_100 and sm_120 follow) and on sm_90 (Hopper). A function may run several ops, such as a plan",
        "and an attention kernel. `fi-core why` prints the choice for one request. Other public names, which run no op",
        "or reach it through an object, follow each table.",
    ]
    for family in (*families(), *LIBRARY):
        rows, others = [], []
        for place, value in members(family):
            link = f"{{py:obj}}`{place.rpartition('.')[2]} <{place}>`"
            reached = ops_of(value)
            for index, op in enumerate(sorted(reached, key=lambda name: name.endswith("_plan"))):
                cells = ("<br>".join(f"`{n}`" for n in support.implementations(by_name[op], t)) or "-" for t in columns)
                rows.append((link if index == 0 else "", f"`{op}`", *cells))
            if not reached and "cudnn" in place:
                rows.append((link, "cuDNN", "-", "`cudnn`", "`cudnn`"))
            elif not reached:
                others.append(link)
        lines += ["", f"## {title(family)}"]
        lines += ["", *table(("function", "op", "CPU", "sm_80", "sm_90"), rows)] if rows else []
        lines += ["", f"{'Others' if rows else 'Names'}: {', '.join(others)}."] if others else []
    return "\n".join(lines) + "\n"


def targets() -> str:
    """What has been done with the binaries of each target."""
    head = ("target", "machines", "compiled", "of Hopper", "interpreted", "run")
    return support.TARGETS.format("\n".join(table(head, support.target_rows(*_known()))))


def models() -> str:
    """The serving profiles: models by name, and what decides their kernels."""
    from fi_core.profiles import KV_DTYPES, MODELS

    head = ("model", "heads", "head dim", "layers", "experts", "weights", "fp16")
    rows = [
        (
            f"`{name}`",
            f"{model.num_qo_heads} / {model.num_kv_heads}",
            model.head_dim if not model.head_dim_vo else f"{model.head_dim} / {model.head_dim_vo}",
            ", ".join(
                word
                for word, has in (
                    ("MLA", model.latent),
                    ("gated delta rule", model.linear),
                    ("soft cap", model.soft_cap),
                )
                if has
            )
            or "-",
            f"{model.experts}, {model.activation}" if model.experts else "-",
            model.weights or model.dtype,
            "yes" if model.serves_fp16 else "-",
        )
        for name, model in MODELS.items()
    ]
    caches = ", ".join(kv or "that of activations" for kv in KV_DTYPES)
    return "\n".join([
        "# Models",
        "",
        "The names that `fi_core.prepare` and `fi-core prebuild --model` take; they also take a folder with the",
        "config.json of transformers. The binary packages hold every kernel of these models in bf16, and of dense",
        "ones in fp16 too, as a column says, for any page size, tensor-parallel ranks of a host, adapters and",
        f"drafted tokens, with a KV cache of {caches}. MLA has no e5m2 cache.",
        "",
        *table(head, rows),
        "",
    ])  # fmt: skip


class _Annotation(str):
    """An annotation as it is written: without the quotes that `inspect` puts around postponed ones."""

    def __repr__(self) -> str:
        return str(self)


def _signature(value: Any) -> str:
    """The signature as text, without `self`."""

    def written(annotation: Any) -> Any:
        return _Annotation(annotation.replace("'", "")) if isinstance(annotation, str) else annotation

    signature = inspect.signature(value)
    parameters = [
        parameter.replace(annotation=written(parameter.annotation))
        for name, parameter in signature.parameters.items()
        if name != "self"
    ]
    returns = written(signature.return_annotation)
    return str(signature.replace(parameters=parameters, return_annotation=returns))


def _names(value: Any) -> list[str]:
    try:
        return list(inspect.signature(value).parameters)
    except (TypeError, ValueError):
        return []


def _exception(kind: str, value: Any) -> str:
    """The place of an exception that the docstring of `value` names, as other families have some of the same name."""
    from fi_core import errors

    own = getattr(sys.modules.get(getattr(value, "__module__", "")), kind, None)
    family = getattr(own, "__module__", "fi_core.runtime").split(".")[1:2]
    if own is not None and family not in ([], ["runtime"]):
        return f"~fi_core.{family[0]}.{kind}"
    return f"~fi_core.errors.{kind}" if hasattr(errors, kind) else kind


def _text(value: Any, signature: Any) -> str:
    """The docstring as Markdown, with parameters, returns and raises as lists."""
    parsed = docstrings.parse(inspect.getdoc(value) or "", _names(signature))
    parsed.raises = [(_exception(kind, value), text) for kind, text in parsed.raises]
    return parsed.markdown()


def _entry(name: str, value: Any) -> list[str]:
    """A function or class as a directive."""
    inner = getattr(value, "func", value)  # of a functools.partial
    kind = "py:exception" if inspect.isclass(value) and issubclass(value, BaseException) else None
    kind = kind or ("py:class" if inspect.isclass(value) else "py:function" if callable(value) else "py:data")
    try:
        signature = _signature(value) if kind in ("py:function", "py:class") else ""
    except ValueError:
        signature = ""
    lines = ["", f"````{{{kind}}} {name}{signature}", "", _text(inner, value), "````"]
    return lines + (_methods(name, value) if kind == "py:class" else [])


def _methods(owner: str, value: type) -> list[str]:
    """The public methods and properties of a class, aliases left out."""
    lines: list[str] = []
    for name, member in inspect.getmembers(value, lambda m: inspect.isfunction(m) or isinstance(m, property)):
        own = any(name in vars(base) and base.__module__.startswith("fi_core.") for base in value.__mro__)
        if name.startswith("_") or not own or getattr(member, "__name__", name) != name:
            continue
        kind, signature = "py:property", ""
        if inspect.isfunction(member):
            kind, signature = "py:method", _signature(member)
        lines += ["", f"````{{{kind}}} {owner}.{name}{signature}", "", _text(member, member), "````"]
    return lines


def _members(title: str, text: str, module: str, names: Iterable[str], prefix: str) -> str:
    home = importlib.import_module(module)
    lines = [f"# {title}", "", text]
    for name in names:
        value = getattr(home, name)
        if prefix == "fi_core.errors" or not getattr(value, "__module__", "").endswith(".errors"):  # each on one page
            lines += _entry(f"{prefix}.{name}", value)
    return "\n".join(lines) + "\n"


# The titles of the pages, in the order of the reference; a module that is not here has its own name as title.
TITLES = {
    "decode": "Decode attention",
    "prefill": "Prefill attention",
    "cascade": "Cascade attention",
    "mla": "Multi-head latent attention (MLA)",
    "pod": "Prefill beside decode (POD)",
    "sparse": "Block-sparse attention",
    "norm": "Norms",
    "rope": "Rotary embedding",
    "activation": "Activations",
    "page": "Paged KV cache",
    "sampling": "Sampling",
    "topk": "Top-k",
    "quantization": "Quantization",
    "gemm": "Matrix products",
    "grouped_mm": "Grouped matrix products",
    "gdn_decode": "Gated delta rule, decode",
    "gdn_prefill": "Gated delta rule, prefill",
    "mamba": "State spaces (Mamba-2)",
    "mhc": "Hyper-connections (mHC)",
    "lora": "Low-rank adapters (LoRA)",
    "fused_moe": "Mixture of experts",
    "comm": "Communication",
    "concat_ops": "Keys of MLA",
    "logits_processor": "Logits pipelines",
    "green_ctx": "Green contexts",
}
# Modules that compute nothing themselves.
LIBRARY = ("registry", "runtime.invariance", "ahead", "observe.trace", "autotuner")


def families() -> list[str]:
    """The modules of fi_core that have a page: every one that holds public names, but for the library's."""
    import fi_core

    known = [module for module in TITLES if module in fi_core._MODULES]
    return known + sorted(set(fi_core._MODULES) - set(known) - set(LIBRARY))


def title(family: str) -> str:
    return TITLES.get(family) or family.rpartition(".")[2].replace("_", " ").capitalize()


def members(module: str) -> Iterator[tuple[str, Any]]:
    """The qualified name and the object of everything public in a module; each name stands on one page only."""
    import fi_core

    elsewhere = {name for other, names in fi_core._MODULES.items() if other != module for name in names}
    home, names = importlib.import_module(f"fi_core.{module}"), fi_core._MODULES.get(module, ())
    for name in dict.fromkeys((*names, *getattr(home, "__all__", ()))):
        value = getattr(home, name)
        if name.startswith("_") or inspect.ismodule(value) or (name in elsewhere and name not in names):
            continue
        yield (f"fi_core.{name}" if name in names else f"fi_core.{module}.{name}"), value


def first_sentence(value: Any) -> str:
    text = docstrings.parse(inspect.getdoc(getattr(value, "func", value)) or "", _names(value)).text
    return re.split(r"(?<=\.)(?<!al\.)\s", " ".join(text.split("\n\n")[0].split()))[0]


def _introduction(module: str) -> str:
    return inspect.getdoc(importlib.import_module(f"fi_core.{module}")) or ""


def family_page(family: str) -> str:
    """All functions and classes of a family."""
    lines = [f"# {title(family)}", "", _introduction(family), ""]
    found = list(members(family))
    rows = [(f"{{py:obj}}`{place.rpartition('.')[2]} <{place}>`", first_sentence(value)) for place, value in found]
    lines += table(("name", "purpose"), rows)
    for place, value in found:
        lines += _entry(place, value)
    return "\n".join(lines) + "\n"


def library() -> str:
    """What is public beside the families: kernels of this process, prebuilding, traces, tuning."""
    lines = ["# Library functions", "", "Loaded kernels, support queries, prebuilding, traces and autotuning."]
    for module in LIBRARY:
        for place, value in members(module):
            lines += _entry(place, value)
    return "\n".join(lines) + "\n"


def functions() -> str:
    """The list of families."""
    rows = [(f"{{doc}}`{family}`", " ".join(_introduction(family).split("\n\n")[0].split())) for family in families()]
    lines = ["# Functions", "", "A name that is listed as `fi_core.<name>` is also `fi_core.<family>.<name>`.", ""]
    lines += table(("family", "functions"), [*rows, ("{doc}`library`", "Loaded kernels, prebuilding, traces, tuning.")])
    lines += ["", "```{toctree}", ":maxdepth: 1", ":hidden:", "", *families(), "library", "```"]
    return "\n".join(lines) + "\n"


def flashinfer() -> str:
    """The public names of FlashInfer, and what a caller meets here."""
    rows = flashinfer_names.rows()
    count = {state: sum(row.state == state for row in rows) for state in dict.fromkeys(row.state for row in rows)}
    lines = [
        "# Names of FlashInfer",
        "",
        "Every public name of FlashInfer that fi has, and those that it lacks. *same*: fi takes every call that",
        "FlashInfer takes. *differs*: as the last column says, and the page of the function. *Blackwell only*:",
        "FlashInfer's kernels need sm_100 or later; the last column says what to use on other GPUs. *in another form*:",
        "fi does the same with other arguments, as the last column says. *not yet*: fi will have it. A module and the",
        "top of the package may both have a name; it stands here once or twice, as callers import it.",
        "",
        f"{'; '.join(f'{state}: {number}' for state, number in count.items())}.",
        "",
        *table(("name", "here", "how, or what to use"), ((f"`{row.name}`", row.state, row.how) for row in rows)),
    ]
    return "\n".join(lines) + "\n"


def layouts_page() -> str:
    """Which layouts each function honours, with which backend names."""
    lines = [
        "# Layouts",
        "",
        "The layouts that weights, scales, caches and tables may have, by function and backend name. *honoured*: the",
        "result is that of the layout. *refused*: the call raises an error with the words that stand here. Tests call",
        "every row. A layout that is not here is an error of shape.",
    ]
    for family, rows in layouts.TABLE.items():
        cells = (
            (
                f"`{row.function.rpartition('.')[2]}`",
                row.layout,
                ", ".join(f"`{name}`" for name in layouts.backends(row) if name) or "-",
                f"refused: {row.refusal}" if row.refusal else "honoured",
            )
            for row in rows
        )
        lines += ["", f"## {family}", "", *table(("function", "layout", "backends", "result"), cells)]
    return "\n".join(lines) + "\n"


def errors() -> str:
    import fi_core.runtime.errors as module

    found = [n for n, value in vars(module).items() if inspect.isclass(value) and value.__module__ == module.__name__]
    return _members("Errors", inspect.getdoc(module) or "", module.__name__, found, "fi_core.errors")


def jit() -> str:
    import fi_core.jit as module

    return _members(
        "Building kernels", inspect.getdoc(module) or "", "fi_core.jit", sorted(module.__all__), "fi_core.jit"
    )


def testing() -> str:
    import fi_core.testing as module

    text = inspect.getdoc(module) or ""
    return _members("Timing and checking", text, "fi_core.testing", sorted(module.__all__), "fi_core.testing")


PAGES: dict[str, Callable[[], str]] = {
    "functions.md": functions,
    **{f"{family}.md": functools.partial(family_page, family) for family in families()},
    "library.md": library,
    "support.md": support_matrix,
    "targets.md": targets,
    "layouts.md": layouts_page,
    "models.md": models,
    "ops.md": ops,
    "command-line.md": command_line,
    "environment.md": environment,
    "errors.md": errors,
    "flashinfer.md": flashinfer,
    "jit.md": jit,
    "testing.md": testing,
}


def write_all(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for stale in set(folder.glob("*.md")) - {folder / name for name in PAGES}:
        stale.unlink()
    for name, page in PAGES.items():
        (folder / name).write_text(page())
