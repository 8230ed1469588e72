"""Which implementations serve an op on a target, and what has been done with the binaries of a target."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from records import table

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
# The cards and processors by which files of results begin, and their targets.
CARDS = {"h100": "90a", "h200": "90a", "zen5": "cpu"}
GPUS = {
    "80": "A100, A30; sm_86 (A10, A40) takes them too", "89": "L4, L40, RTX 40", "90a": "H100, H200, GH200",
    "100a": "B200, GB200", "120a": "RTX 50, RTX PRO 6000",
}  # fmt: skip
INTERPRETED: dict[str, int] = {}  # units by target; docs/notes/targets-interpreter says why there are none


@functools.cache
def implementations(op: Any, target: Any) -> tuple[str, ...]:
    """The implementations of an op that take some of its prebuilt requests on a target, in the op's order."""
    from fi_core.runtime.dispatch import Request

    facts = [Request.of(op, target, values).facts() for values in op.grid()]
    return tuple(i.name for i in op.implementations if not all(i.refusals(values) for values in facts))


def promise(op: Any, target: Any) -> str:
    """What the implementations promise that requests of an op's grid get on a target inside of batch_invariant()."""
    from fi_core.runtime.dispatch import Request, choose
    from fi_core.runtime.errors import UnsupportedError

    served, refused = False, False
    for request in (Request.of(op, target, values) for values in op.grid()):
        try:
            choose(request._replace(batch_invariant=True))
            served = True
        except UnsupportedError:
            refused = refused or any(not i.refusals(request.facts()) for i in op.implementations)
    if not served:
        return "refused" if refused else "-"
    return "a b c d e, some refused" if refused else "a b c d e"


def promises_table() -> str:
    """Ops by what they promise on each target."""
    from fi_core.registry import load, ops
    from fi_core.runtime.spec.target import CPU, cuda_target

    load()
    targets = CPU, cuda_target(8, 0), cuda_target(9, 0)
    found: dict[tuple[str, ...], list[str]] = {}
    for name, op in sorted(ops().items()):
        found.setdefault(tuple(promise(op, target) for target in targets), []).append(f"`{name}`")
    rows = sorted(found.items(), key=lambda item: -len(item[1]))
    return table(
        ("promise on the CPU", "on sm_80", "on sm_90a", "ops"), [(*p, ", ".join(names)) for p, names in rows], left=4
    )


def results(arch: str) -> dict[str, int]:
    """The number of files of results by card of an architecture. Raises KeyError for a card without a target."""
    cards = [path.name.partition("-")[0] for path in sorted(RESULTS.glob("*.jsonl"))]
    return {card: cards.count(card) for card in dict.fromkeys(cards) if CARDS[card] == arch}


TARGETS = """# Targets

What has been done with the kernels of each target. *compiled*: specialisations that the binary packages hold; a
compiler is all that has seen them. *of Hopper*: those of them that sm_90a also has, from the same sources, where they
run. *interpreted*: executed by a program that stands for the hardware. *run*: on such hardware, with results in
`benchmarks/results`.

{}

Where *run* says no, a kernel may be wrong or slow in a way that nobody has seen: run `pytest -m gpu` of a checkout on
such a card first. {{doc}}`../../notes/targets-interpreter` says why no interpreter stands for one.
"""


def target_rows(ops: Any, targets: Any) -> list[tuple[object, ...]]:
    """A row for the CPU and each target of the binary packages."""
    from fi_core.aot import specs

    units = {t.arch: {(op.name, s.implementation, s.axes) for op in ops for s in specs(op, t)} for t in targets}

    def row(target: Any) -> tuple[object, ...]:
        compiled, cards = units[target.arch], results(target.arch)
        if target.kind == "cpu":
            machines = "x86-64; aarch64 is compiled, and loaded in an emulator"
            return ("CPU", machines, len(compiled), "-", "no", "yes: `nox -s tests` runs every op")
        ran = f"yes; files of results: {', '.join(f'{n} of {card.upper()}' for card, n in cards.items())}"
        interpreted = INTERPRETED.get(target.arch, 0) or "no"
        of_hopper = len(compiled & units["90a"])
        return (target, GPUS[target.arch], len(compiled), of_hopper, interpreted, ran if cards else "no")

    return [row(target) for target in targets]
