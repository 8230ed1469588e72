"""Fills the tables of benchmarks/README.md: flags, and which backend runs a routine where.

`python tools/benchmark_page.py` writes the page; with --check it writes nothing and exits with 1 if it is out of date.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from fi_bench import backends, cases, flags, support
from fi_bench.catalog import FAMILIES

PAGE = Path(__file__).resolve().parents[1] / "benchmarks" / "README.md"
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
ATTENTION = ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper",
             "BatchPrefillWithRaggedKVCacheWrapper", "BatchMLAPagedAttentionWrapper")  # fmt: skip


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _flag(flag: flags.Flag) -> tuple[str, str, str]:
    name = f"`--{flag.name}`" + (f", `-{flag.short}`" if flag.short else "")
    shown = flag.kind not in ("switch", "off", "count") and flag.default not in (None, "")
    default = "required" if flag.required else f"`{flag.default}`" if shown else ""
    allowed = (flag.metavar or "").strip("{}") if "{" in (flag.metavar or "") else ""
    return name, flag.help.replace("%%", "%") + (f" ({_code(allowed.split(','))})" if allowed else ""), default


def general() -> str:
    """The flags that every routine has."""
    return _table(("flag", "meaning", "default"), map(_flag, flags.GENERAL))


def families() -> str:
    """The flags of each family below its routines."""
    parts = []
    for family in FAMILIES.values():
        usual = dict.fromkeys(name for routine in family.routines for name in backends.usual(routine))
        parts.append(f"### {family.name}\n\n{_code(family.routines)}. Timed on a GPU by default: {_code(usual)}.\n\n")
        parts.append(_table(("flag", "meaning", "default"), map(_flag, family.flags)) + "\n")
    return "\n" + "".join(parts)


def _where(places: Sequence[str]) -> str:
    """ "CPU, 8.0 and later" for ("CPU", "8.0", ...)."""
    gpus = [place for place in places if place != "CPU"]
    later = bool(gpus) and tuple(gpus) == support.CAPABILITIES[support.CAPABILITIES.index(gpus[0]) :]
    words = [f"{gpus[0]} and later"] if later and len(gpus) > 1 else gpus
    return ", ".join([*(["CPU"] if "CPU" in places else []), *words])


def _offered(routine: str) -> dict[str, str]:
    case = cases.find(routine)
    return {name: _where(places) for name, places in (backends.offered(case) if case else {}).items()}


def attention() -> str:
    """A row a backend, a column a wrapper."""
    found = {routine: _offered(routine) for routine in ATTENTION}
    names = dict.fromkeys(name for offered in found.values() for name in offered)
    head = ("backend", "decode, paged", "prefill, paged", "prefill, ragged", "MLA")
    return _table(head, ([f"`{name}`", *(offered.get(name, "-") for offered in found.values())] for name in names))


def support_matrix() -> str:
    """A row for the routines of a family that take the same backends."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for family in FAMILIES.values():
        for routine in family.routines:
            case, offered = cases.find(routine), _offered(routine)
            others = {"torch", *case.peers} if case else set()
            cells = [
                ", ".join(f"`{name}` ({where})" for name, where in offered.items() if (name in others) == other)
                for other in (False, True)
            ]
            theirs = _code(f"flashinfer:{name}" for name in support.FLASHINFER.get(routine, ()))
            groups.setdefault((family.name, *(cell or "-" for cell in (*cells, theirs))), []).append(routine)
    head = ("routines", "this library", "other libraries", "FlashInfer's own, where it is installed")
    return _table(head, ([_code(routines), *key[1:]] for key, routines in groups.items()))


TABLES: dict[str, Callable[[], str]] = {
    "general-flags": general,
    "family-flags": families,
    "attention-backends": attention,
    "backends": support_matrix,
}


def filled(text: str) -> str:
    """The page with its tables as the code has them."""
    return MARKED.sub(lambda found: found[1] + TABLES[found[2]]() + found[4], text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    old = PAGE.read_text(encoding="utf-8")
    new = filled(old)
    if check:
        return int(old != new)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
