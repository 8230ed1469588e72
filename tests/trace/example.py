"""Writes the benchmark definition of every described function and wrapper: `python tests/trace/example.py [FOLDER]`.

The folder is fi_trace_out beside this file, unless it is given. It also gets definitions.txt, a line for each with its
inputs and outputs: `--keep` writes that file here too, where test_definitions.py compares it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(path) for path in sorted(HERE.parents[1].glob("packages/*/src"))]


def definitions() -> Iterator[dict[str, Any]]:
    """The definition of the first sample of each described function; nothing is computed. Layouts share a name."""
    import fi_core
    from fi_core.observe.draw import Draw
    from fi_core.observe.trace import every_described
    from fi_core.registry import load

    load()
    for module in fi_core._MODULES:
        importlib.import_module(f"fi_core.{module}")
    known = set()
    for described in sorted(every_described(), key=lambda d: d.name):
        template = described.template
        assert template.make is not None
        sizes = template.samples[0] if template.samples else {}
        api = f"{described.function.__module__}.{described.function.__qualname__}"
        definition = template.definition(api, template.make(Draw(nasty=False), **sizes))
        if definition["name"] not in known:
            known.add(definition["name"])
            yield definition


def line(definition: Mapping[str, Any]) -> str:
    """A definition in a line: its name, its inputs and its outputs."""

    def values(entries: Mapping[str, Mapping[str, Any]]) -> str:
        return ", ".join(
            f"{name} {'scalar' if entry['shape'] is None else '[' + ', '.join(entry['shape']) + ']'} {entry['dtype']}"
            for name, entry in entries.items()
        )

    return f"{definition['name']}: {values(definition['inputs'])} -> {values(definition['outputs'])}"


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=HERE / "fi_trace_out")
    parser.add_argument("--keep", action="store_true", help="write definitions.txt beside this file")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    found = list(definitions())
    for definition in found:
        (given.folder / f"{definition['name']}.json").write_text(json.dumps(definition, indent=2) + "\n")
    lines = "".join(f"{line(definition)}\n" for definition in found)
    for folder in (given.folder, *([HERE] if given.keep else [])):
        (folder / "definitions.txt").write_text(lines)
    print(f"{len(found)} definitions in {given.folder}")


if __name__ == "__main__":
    main()
