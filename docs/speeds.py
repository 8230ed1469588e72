"""Compares the times of a release on every named shape with those of the release before.

`python docs/speeds.py` writes benchmarks/releases/VERSION.jsonl from benchmarks/results, and the table of VERSION in
CHANGELOG.md. `python docs/speeds.py check` writes nothing. Exit code 1: a shape is slower than in the last release, or
is no longer measured; with `check` also if the file or the table is not that of the results.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import results
from records import ROOT, Result, number, rows, table

RELEASES, CHANGELOG = ROOT / "benchmarks" / "releases", ROOT / "CHANGELOG.md"


class Shape(NamedTuple):
    """A named shape: the name of its table, and of the case in it."""

    family: str
    case: str


Times = Mapping[Shape, Result]


def _alone(name: str, column: str) -> list[Result]:
    """Times of a file whose cases no peer ran."""
    return [Result(row["case"], row[column], {}) for row in rows(name) if column in row]


def measured() -> dict[Shape, Result]:
    """What benchmarks/results holds for each named shape."""
    more = {
        "decode attention, listed": results.decode(),
        "attention variants": [result._replace(peers={}) for result in results.custom_attention()],
        "low-rank adapters": _alone("lora", "lora_us"),
        "sparse attention indexer": _alone("indexer", "topk_us"),
    }
    found: dict[Shape, Result] = {}
    for family, each in {**{family.name: family.results for family in results.families()}, **more}.items():
        for result in each:
            if found.setdefault(Shape(family, result.case), result) is not result:
                raise ValueError(f"{family}: {result.case}: one row a shape is required; got two")
    return found


def kept(version: str) -> dict[Shape, Result]:
    lines = (RELEASES / f"{version}.jsonl").read_text().splitlines()
    found = (json.loads(line) for line in lines)
    return {Shape(row["family"], row["case"]): Result(row["case"], row["us"], row["peers"]) for row in found}


def as_text(times: Times) -> str:
    """A line of JSON for each shape."""
    lines = ({**shape._asdict(), "us": r.fi, "peers": r.peers} for shape, r in times.items())
    return "".join(json.dumps(line) + "\n" for line in lines)


def last(version: str) -> str | None:
    """The newest release before a version that has a file."""

    def order(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")))

    known = [path.stem for path in RELEASES.glob("*.jsonl") if order(path.stem) < order(version)]
    return max(known, key=order, default=None)


def ratio(old: Result, new: Result) -> float:
    """How many times as long the new one takes; less than 1 is faster.

    A warm card slows all that runs on it. So where a peer ran in both, the times and the times over that of the fastest
    such peer must agree: of the two ratios the one closer to 1 counts, and 1 if one is above and one below.
    """
    shared = set(old.peers) & set(new.peers)
    own = new.fi / old.fi
    if not shared:
        return own
    relative = own * min(old.peers[name] for name in shared) / min(new.peers[name] for name in shared)
    return statistics.median((own, relative, 1.0))


def problems(old: Times, new: Times) -> Iterator[str]:
    """A line for each shape that a release may not have: slower than before by more than 2 %, or gone."""
    for shape, before in old.items():
        if shape not in new:
            yield f"{shape.family}: {shape.case}: is no longer measured"
        elif (times := ratio(before, new[shape])) > 1 + results.SAME:
            us = f"{number(before.fi)} us before, {number(new[shape].fi)} us now"
            yield f"{shape.family}: {shape.case}: {times:.3f} of the last release's time ({us})"


def summary(new: Times, version: str | None = None, old: Times | None = None) -> str:
    """A row a family: its shapes beside the fastest peer, and beside the last release if there is one."""
    head = ["family", "shapes", "over the fastest peer", "least of them"]
    head += [f"over {version}", "least of them"] if old else []
    lines = []
    for family in dict.fromkeys(shape.family for shape in new):
        own = {shape: result for shape, result in new.items() if shape.family == family}
        line: list[object] = [family, len(own)]
        line += _cells({shape: result.speedup for shape, result in own.items() if result.peers})
        if old:
            line += _cells({shape: 1 / ratio(old[shape], result) for shape, result in own.items() if shape in old})
        lines.append(line)
    return table(head, lines)


def _cells(speedups: Mapping[Shape, float]) -> tuple[str, str]:
    if not speedups:
        return "-", "-"
    least = min(speedups, key=lambda shape: speedups[shape])
    return f"{statistics.geometric_mean(speedups.values()):.2f}x", f"{speedups[least]:.2f}x, {least.case}"


SPEED = """### Speed

Times on an H200 (`benchmarks/results`). A release may not be slower than the one before by more than 2 % on any named
shape; [{0}.jsonl](benchmarks/releases/{0}.jsonl) has the time of each.

<!-- table: speed of {0} -->

{1}

<!-- end -->
"""


def filled(changelog: str, version: str, text: str) -> str:
    """The changelog with this table at the end of the section of the version. Raises ValueError if it has none."""
    section = re.search(rf"^## {re.escape(version)} - .*?(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if not section:
        raise ValueError(f"CHANGELOG.md: a section '## {version} - YYYY-MM-DD' is required: run `nox -s changelog`")
    start, end = section.span()
    before, after = section[0].partition("### Speed\n")[0].rstrip(), changelog[end:]
    return f"{changelog[:start]}{before}\n\n{SPEED.format(version, text)}" + (f"\n{after}" if after else "")


def main(words: list[str]) -> int:
    if words not in ([], ["check"]):
        print(__doc__, file=sys.stderr)
        return 2
    version = (ROOT / "VERSION").read_text().strip()
    new, before = measured(), last(version)
    old = kept(before) if before else {}
    changelog = filled(CHANGELOG.read_text(), version, summary(new, before, old))
    found = list(problems(old, new))
    for path, text in ((RELEASES / f"{version}.jsonl", as_text(new)), (CHANGELOG, changelog)):
        if words and (not path.is_file() or path.read_text() != text):
            found.append(f"{path.relative_to(ROOT)}: is not that of benchmarks/results; run `python docs/speeds.py`")
        elif not words:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    print("\n".join([*found, f"{len(new)} shapes; {f'beside {before}' if before else 'the first release'}"]))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
