"""What declarations alone tell of an op: implementations in order, what each requires, and which modules are there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fi_core.cli.origin import describe_file, origin
from fi_core.cli.report import paint
from fi_core.jit.ops import specs_of, view
from fi_core.runtime.build import sources
from fi_core.runtime.resolve import where
from fi_core.runtime.spec.artifact import Artifact
from fi_core.runtime.spec.constraint import Constraint, Rule
from fi_core.runtime.spec.op import Implementation, Op
from fi_core.runtime.spec.target import Target

WAY_OUT = (
    "A request is made by the launcher of its op, and some are not there: add --compile, which compiles them for this "
    "answer alone, or install the package that has them (pip install fi-jit-cache)."
)


def describe_op(op: Op, target: Target) -> tuple[dict[str, Any], list[str], bool]:
    """Data, lines, and whether some implementation runs on the target and its launcher can be had."""
    launcher = origin(sources.host_module(op, target.kind))
    there = _modules(op, target)
    data: dict[str, Any] = {
        "op": op.name,
        "request": None,
        "target": str(target),
        "chosen": None,
        "launches": None,
        "implementations": {},
        "files": [launcher.data()],
    }
    lines = [f"{op.name} on {target}: no launcher is there to make the request; declared are, in order:"]
    fits = False
    for implementation in op.implementations:
        wrong, needs = _conditions(implementation, target)
        found, total = there.get(implementation.name, (0, 0))
        data["implementations"][implementation.name] = {
            "why_not": wrong,
            "requires": needs,
            "modules": total,
            "modules_there": found,
        }
        fits = fits or not wrong
        words = wrong or needs or ["takes any request"]
        have = f"; {found} of {total} modules that are built ahead are there" if total and not wrong else ""
        lines.append(f"  {implementation.name}: {'; '.join(words)}{have}")
    lines += describe_file(launcher)
    if not fits:
        lines.append(paint("No implementation supports the target: a call raises UnsupportedError.", "red"))
    return data, lines, fits and launcher.ready


def _conditions(implementation: Implementation, target: Target) -> tuple[list[str], list[str]]:
    """What the target does not meet, and what a request must meet, in words."""
    facts = {"device": target.kind, "capability": target.capability}

    def names(condition: Constraint | Rule) -> Iterable[str]:
        return (condition.name,) if isinstance(condition, Constraint) else condition.names

    wrong, needs = [], []
    for condition in implementation.constraints:
        if not set(names(condition)) <= facts.keys():
            needs.append(f"requires {condition}")
        elif not condition.holds(facts):
            wrong.append(condition.refusal(facts))
    needs += [f"is fast with {condition}" for condition in implementation.preferred]
    if implementation.by_name:
        needs.append(
            f"runs only where the caller passes backend={(implementation.name, *implementation.backends)[-1]!r}"
        )
    return wrong, needs


def _modules(op: Op, target: Target) -> dict[str, tuple[int, int]]:
    """By implementation: how many of the modules that are built ahead have all files, and how many there are."""
    counts: dict[str, tuple[int, int]] = {}
    known: dict[Artifact, bool] = {}
    for spec in specs_of([op], [target]):
        files = view(spec).artifacts
        known |= {artifact: where(artifact) is not None for artifact in files if artifact not in known}
        found, total = counts.get(spec.implementation, (0, 0))
        counts[spec.implementation] = found + all(known[artifact] for artifact in files), total + 1
    return counts
