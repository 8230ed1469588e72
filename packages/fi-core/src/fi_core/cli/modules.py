"""Commands about modules, the files that are built ahead of time: list, status, prebuild, compile commands."""

from __future__ import annotations

import argparse
import difflib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fi_core import aot
from fi_core.ahead import Options, files_of, iterate_specs, model_of
from fi_core.cli.report import Report, UsageError, paint, section, table
from fi_core.jit.base import OLDEST, default_targets
from fi_core.jit.env import GENERATED
from fi_core.jit.ops import OpModule, specs_of, view
from fi_core.registry import ops
from fi_core.runtime import files
from fi_core.runtime.build import ninja
from fi_core.runtime.build.diagnose import build_log
from fi_core.runtime.env import env
from fi_core.runtime.resolve import Found, build_missing, where
from fi_core.runtime.spec.artifact import Artifact
from fi_core.runtime.spec.op import Spec
from fi_core.runtime.spec.target import CPU, Target


class State(NamedTuple):
    """A module and the place of each file; None for a file that would have to be compiled."""

    module: OpModule
    files: dict[Artifact, Found | None]

    @property
    def compiled(self) -> bool:
        return all(self.files.values())

    @property
    def type(self) -> str:
        """AOT if all files come from installed packages."""
        return "AOT" if all(found and found.origin != "store" for found in self.files.values()) else "JIT"

    @property
    def status(self) -> str:
        return "Compiled" if self.compiled else "Not Compiled"

    def data(self) -> dict[str, Any]:
        return {
            "name": self.module.name,
            "op": self.module.specs[0].op.name,
            "target": str(self.module.specs[0].target),
            "type": self.type,
            "compiled": self.compiled,
            "files": [
                {"file": a.file, "origin": found.origin if found else None, "path": str(found.path) if found else None}
                for a, found in self.files.items()
            ],
        }


def states(targets: Iterable[Target]) -> list[State]:
    """Every module of the targets."""
    modules = [view(spec) for spec in specs_of(ops().values(), targets)]
    places = {artifact: where(artifact) for artifact in dict.fromkeys(a for m in modules for a in m.artifacts)}
    return [State(module, {a: places[a] for a in module.artifacts}) for module in modules]


def counts(found: Sequence[State]) -> dict[str, int]:
    compiled = sum(state.compiled for state in found)
    return {"total": len(found), "compiled": compiled, "not_compiled": len(found) - compiled}


def _marked(state: State) -> str:
    return paint(state.status, "green" if state.compiled else "yellow")


def list_modules(args: argparse.Namespace) -> Report:
    if args.name:
        return _one(args.name, args.targets)
    found = states(args.targets or default_targets())
    lines = ["Available compilation modules:", *(f"  {s.module.name} - {_marked(s)}" for s in found)]
    return Report([{"name": s.module.name, "status": s.status} for s in found], lines)


def _one(name: str, targets: Sequence[Target] | None) -> Report:
    places = targets or dict.fromkeys((*default_targets(), *aot.targets()))
    specs = {spec.name: spec for spec in specs_of(ops().values(), places)}
    if name not in specs:
        of_op = [module for module, spec in specs.items() if spec.op.name == name]
        close = of_op or difflib.get_close_matches(name, specs, 3, 0.4)
        hint = [f"{'Modules of that op' if of_op else 'Close names'}: {', '.join(close)}"] if close else []
        return Report(
            {"error": f"Module '{name}' not found.", "close": close}, [f"Module '{name}' not found.", *hint], ok=False
        )
    module = view(specs[name])
    state = State(module, {artifact: where(artifact) for artifact in module.artifacts})
    more = {"sources": list(map(str, module.sources)), "ninja": str(module.ninja_path), "log": str(build_log())}
    return Report(state.data() | more, _detail(state))


def _detail(state: State) -> list[str]:
    host = state.files[state.module.host]
    lines = [f"Module: {state.module.name}", f"Status: {_marked(state)}", f"Type: {state.type}"]
    if host:
        lines.append(f"Library Path: {host.path}")
        lines.append(f"Created: {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(host.path.stat().st_mtime))}")
    lines.append("Files:")
    lines += [
        f"  {a.file} - {f'{found.origin}: {found.path}' if found else 'not compiled'}"
        for a, found in state.files.items()
    ]
    lines += ["Source Files:", *(f"  {i}. {path}" for i, path in enumerate(state.module.sources, 1))]
    written = "" if state.module.is_ninja_generated else " (JitSpec.write_ninja() writes it)"
    return [*lines, f"Build File: {state.module.ninja_path}{written}", f"Build Log: {build_log()}"]


def module_status(args: argparse.Namespace) -> Report:
    found = states(args.targets or default_targets())
    keep = {
        "all": lambda s: True,
        "aot": lambda s: s.type == "AOT",
        "jit": lambda s: s.type == "JIT",
        "compiled": lambda s: s.compiled,
        "not-compiled": lambda s: not s.compiled,
    }[args.filter]
    shown = [state for state in found if keep(state)]
    if args.detailed:
        lines = [line for state in shown for line in (*_detail(state), "")]
    else:
        rows = [(s.module.name, s.type, s.status, len(s.module.artifacts), _origins(s)) for s in shown]
        lines = [*table(("Module Name", "Type", "Status", "Files", "From"), rows), ""]
    total = counts(found)
    words = (
        ("Total modules", total["total"]),
        ("compiled", total["compiled"]),
        ("Not compiled", total["not_compiled"]),
    )
    return Report({"modules": [s.data() for s in shown], "summary": total}, [*lines, *section("Summary", words)])


def _origins(state: State) -> str:
    return ", ".join(dict.fromkeys(found.origin if found else "-" for found in state.files.values()))


def prebuild(args: argparse.Namespace) -> Report:
    targets = args.targets or default_targets()
    if older := [str(target) for target in targets if target.kind == "cuda" and target.capability < OLDEST]:
        raise UsageError(f"--target: no kernel supports {', '.join(older)}; sm_{OLDEST} is the oldest")
    wanted = args.ops or list(ops().values())
    options = {name: getattr(args, name) for name in Options._fields}
    if args.model:
        of = model_of(args.model)
        specs: Iterable[Spec] = (spec for target in targets for spec in iterate_specs(of, target, Options(**options)))
    else:
        specs = specs_of(wanted, targets)
    if args.list:
        return _listed(aot.files_of(specs), args, options)
    start = time.perf_counter()
    if args.output:
        listed = aot.files_of(specs)
        files, built = set(listed), len(aot.export(args.output, listed.values(), bool(args.progress)))
    else:
        files = set()

        def seen() -> Iterator[Artifact]:
            """The files, which `files` keeps; the first compiles while others are listed."""
            for artifact in files_of(specs):
                files.add(artifact)
                yield artifact

        built = build_missing(seen(), progress=True if args.progress else None, rebuild=args.rebuild)
    seconds = time.perf_counter() - start
    if not files:
        raise UsageError(
            f"nothing is built ahead of {', '.join(op.name for op in wanted)} on {', '.join(map(str, targets))}"
        )
    names = [str(target) for target in targets]
    data = {"targets": names, "files": len(files), "built": built, "seconds": round(seconds, 2)}
    if args.output:
        line = f"{built} files for {', '.join(names)} in {args.output}: FI_CUBIN_DIR={args.output}"
        return Report(data | {"output": str(args.output)}, [line])
    line = f"{built} of {len(files)} files built for {', '.join(names)} in {seconds:.1f} s"
    return Report(data, [line if built else f"All {len(files)} files for {', '.join(names)} are there."])


def _listed(wanted: dict[Artifact, Spec], args: argparse.Namespace, options: dict[str, Any]) -> Report:
    """The files that would be built, with the place of each; nothing is compiled."""
    rows = []
    for artifact, spec in wanted.items():
        found = where(artifact)
        target = str(artifact.target if artifact.kind == "cubin" else spec.target)
        rows.append((artifact.name, spec.op.name, target, artifact.file, found.origin if found else None))
    missing = sum(row[-1] is None for row in rows)
    data = {
        "model": args.model,
        "options": options if args.model else {},
        "files": [dict(zip(("name", "op", "target", "file", "from"), row)) for row in rows],
        "missing": missing,
    }
    shown = [(op, target, file, origin or "would compile") for _, op, target, file, origin in rows]
    lines = table(("op", "target", "file", "from"), shown)
    return Report(data, [*lines, "", f"{len(rows)} files, of which {missing} would compile"])


def export_compile_commands(args: argparse.Namespace) -> Report:
    if args.path and args.output:
        raise UsageError("PATH and --output name the same file: give one of them")
    path: Path = args.path or args.output or Path("compile_commands.json")
    targets = args.targets or dict.fromkeys((*default_targets(), CPU))
    wanted = list(dict.fromkeys(a for spec in specs_of(ops().values(), targets) for a in view(spec).artifacts))
    folder = env.cache_dir / GENERATED
    ninja.write(wanted, folder)  # editors open the units
    files.write(path, json.dumps(ninja.compile_commands(wanted, folder), indent=2) + "\n")
    return Report({"path": str(path), "entries": len(wanted)}, [f"{len(wanted)} commands written to {path}"])
