"""`fi-core why`: the way of one call, as far as it can be told without making it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fi_core.build import compiler, sources, toolchain
from fi_core.cli.report import Report, UsageError, paint
from fi_core.env import env
from fi_core.jit.ops import default_targets
from fi_core.resolve import answers, store
from fi_core.spec.dtype import DTYPES
from fi_core.spec.op import Artifact, Op, Spec
from fi_core.spec.target import Target

_WORDS = {"true": "True", "1": "True", "false": "False", "0": "False"}
_TORCH = {dtype.torch: short for short, dtype in DTYPES.items()}


class Origin(NamedTuple):
    """Where a file comes from, and what was asked before: (who, why not)."""

    artifact: Artifact
    text: str
    path: Path | None
    ready: bool  # a call gets it
    misses: list[tuple[str, str]]

    def data(self) -> dict[str, Any]:
        return {
            "file": self.artifact.file,
            "kind": self.artifact.kind,
            "from": self.text,
            "path": str(self.path) if self.path else None,
            "ready": self.ready,
            "misses": [{"from": who, "why": why} for who, why in self.misses],
        }


def run(args: argparse.Namespace) -> Report:
    axes = _axes(args.op, args.axes)
    if args.impl and args.impl not in [impl.name for impl in args.op.impls]:
        raise UsageError(
            f"--impl: {args.op.name} has {', '.join(impl.name for impl in args.op.impls)}; got {args.impl}"
        )
    explained = [_explain(args.op, target, axes, args.impl) for target in args.targets or default_targets()]
    data = [data for data, _, _ in explained]
    lines = [line for _, lines, _ in explained for line in lines]
    return Report(data[0] if len(data) == 1 else data, lines, ok=all(ok for _, _, ok in explained))


def _axes(op: Op, given: Sequence[tuple[str, str]]) -> dict[str, object]:
    """The axes as the op has them: dtypes also by torch's names, booleans also as 0 and 1."""
    texts = dict(given)
    unknown, missing = [n for n in texts if n not in op.axes], [n for n in op.axes if n not in texts]
    if unknown or missing or len(texts) != len(given):
        wrong = (
            f"unknown: {', '.join(unknown)}"
            if unknown
            else f"missing: {', '.join(missing)}"
            if missing
            else "one is given twice"
        )
        allowed = " ".join(f"{name}={'|'.join(map(str, values))}" for name, values in op.axes.items())
        raise UsageError(f"{op.name} takes {allowed or 'no axes'}; {wrong}")
    return {name: _value(texts[name], values) for name, values in op.axes.items()}


def _value(text: str, allowed: Sequence[object]) -> object:
    """The allowed value of that name; any other text stays, for the implementations to refuse."""
    word = text.removeprefix("torch.")
    if all(isinstance(value, bool) for value in allowed):
        word = _WORDS.get(word.lower(), word)
    word = _TORCH.get(word, word)
    return next((value for value in allowed if str(value) == word), text)


def _explain(
    op: Op, target: Target, axes: dict[str, object], wanted: str | None
) -> tuple[dict[str, Any], list[str], bool]:
    reasons = op.explain(target, axes)
    chosen = next((name for name, why in reasons.items() if not why and wanted in (None, name)), None)
    asked = ", ".join(f"{name}={value}" for name, value in axes.items())
    lines = [f"{op.name}({asked}) on {target}"]
    data: dict[str, Any] = {"op": op.name, "axes": axes, "target": str(target), "chosen": chosen, "implementations": {}}
    origins = _origins(op.spec(target, axes, chosen)) if chosen else []
    if chosen:
        data["spec"] = op.spec(target, axes, chosen).name
        data["files"] = [origin.data() for origin in origins]
    for name, why in reasons.items():
        if name == chosen:
            verdict = paint("chosen", "green")
        elif why:
            verdict = "; ".join(why)
        else:
            verdict = f"takes it too; {'--impl asks for' if wanted else 'preferred is'} {chosen or wanted}"
        data["implementations"][name] = {"chosen": name == chosen, "refusals": list(why)}
        lines.append(f"  {name}: {verdict}")
        if name == chosen:
            lines += [line for origin in origins for line in _describe(origin)]
    if not chosen:
        lines.append(paint("No implementation takes it: a call raises UnsupportedError.", "red"))
    return data, lines, chosen is not None and all(origin.ready for origin in origins)


def _describe(origin: Origin) -> list[str]:
    place = f" {origin.path}" if origin.path else ""
    lines = [f"    {origin.artifact.file}: {origin.text if origin.ready else paint(origin.text, 'red')}{place}"]
    return [*lines, *(f"      {who}: {why}" for who, why in origin.misses)]


def _origins(spec: Spec) -> list[Origin]:
    return [origin(artifact) for artifact in sources.artifacts(spec)]


def origin(artifact: Artifact) -> Origin:
    """What a call would find, asking each place in its order and leaving no trace."""
    misses: list[tuple[str, str]] = []
    for provider, path, why in answers(artifact):
        if path:
            return Origin(artifact, provider.name, path, True, misses)
        if (provider.name, why) not in misses:  # it was asked for each target that fits
            misses.append((provider.name, why))
    if not misses:
        what, package = (
            ("device binaries", "fi-cubin") if artifact.kind == "cubin" else ("host modules", "fi-jit-cache")
        )
        misses.append(("prebuilt", f"no package with {what} is installed (pip install {package})"))
    key = compiler.key(artifact)
    directory = store.peek(key)
    if directory:
        return Origin(artifact, "store", directory / artifact.file, True, misses)
    misses.append(("store", f"has no {key}"))
    made_by = builder(artifact)
    if env.jit == "off":
        return Origin(artifact, "nowhere: FI_JIT=off forbids to compile it", None, False, misses)
    if made_by is None:
        missing = "CUDA compiler" if artifact.kind == "cubin" else "C++ compiler"
        return Origin(artifact, f"nowhere: there is no {missing} (see fi-core doctor)", None, False, misses)
    return Origin(artifact, f"would compile with {made_by}", None, True, misses)


def builder(artifact: Artifact) -> str | None:
    """The compiler that would make it, or None."""
    if artifact.kind != "cubin":
        return toolchain.cxx()
    if compiler.device_compiler() == "nvcc":
        return toolchain.nvcc()
    found = toolchain.nvrtc()
    return str(found.library) if found else None
