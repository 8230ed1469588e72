"""`fi-bench list`, `env` and `rerun`: what there is, where it runs, and a row once more."""

from __future__ import annotations

import importlib.util
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fi_bench import backends, case, record, shapes, summary
from fi_bench.catalog import FAMILIES, FAMILY_OF
from fi_bench.console import table
from fi_bench.errors import OK, UsageError
from fi_bench.parsing import Parser, underscored


def main(words: Sequence[str]) -> int:
    parser = Parser(prog="fi-bench list", description="What fi-bench knows, and what of it works here.")
    parser.add_argument("what", nargs="?", default="routines", choices=("routines", "backends", "presets", "cases"))
    parser.add_argument("file", nargs="?", help="for `cases`: a result file")
    parser.add_argument("--format", choices=("table", "markdown", "json"), default="table")
    args = parser.parse_args(underscored(words))
    if args.what == "cases":
        if args.file is None:
            raise UsageError("list cases needs a result file")
        found = summary.rows(record.read(args.file))
    else:
        found = {"routines": _routines, "backends": _backends, "presets": _presets}[args.what]()
    if args.format == "json":
        print(json.dumps(found, indent=1))
    else:
        table(found, args.format)
    return OK


def _routines() -> list[dict[str, Any]]:
    rows = []
    for routine, family in FAMILY_OF.items():
        found = case.find(routine)
        if found is None:
            ours, rivals, status = "-", "-", "no op yet"
        else:
            exists = backends.exists(found)
            ours = " ".join(backends.implementations(found) or ("auto",)) if exists else "-"
            rivals = " ".join(("torch", *found.rivals, "flashinfer"))
            status = "ready" if exists else "no op yet"
        rows.append({"routine": routine, "family": family, "ours": ours, "rivals": rivals, "status": status})
    return rows


def _backends() -> list[dict[str, Any]]:
    rows = []
    for name, rival in backends.RIVALS.items():
        there = importlib.util.find_spec(rival.module) is not None
        cases = [c.routine for f in FAMILIES for c in _cases(f) if name in ("torch", "flashinfer") or name in c.rivals]
        rows.append(
            {
                "backend": name,
                "installed": "yes" if there else "no",
                "routines": len(cases),
                "install": "" if there else rival.install,
            }
        )
    return rows


def _cases(family: str) -> list[case.Case]:
    found = (case.find(routine) for routine in FAMILIES[family].routines)
    return [c for c in found if c is not None]


def _presets() -> list[dict[str, Any]]:
    return [{"preset": name, "lines": len(shapes.preset_lines(name))} for name in shapes.names()]


def env(words: Sequence[str]) -> int:
    parser = Parser(prog="fi-bench env", description="What results of this machine depend on.")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(underscored(words))
    from fi_bench import environment

    found = environment.collect()
    if args.json:
        print(json.dumps(found, indent=1))
        return OK
    packages = found.pop("packages")
    width = max(map(len, (*found, *packages)))
    for name, value in (*found.items(), *packages.items()):
        print(f"{name.ljust(width)}  {value}")
    return OK


def rerun(words: Sequence[str]) -> int:
    parser = Parser(prog="fi-bench rerun", description="Run the case of one row again.")
    parser.add_argument("id", help="record_id of the row, or enough of its beginning")
    parser.add_argument("file", nargs="+", help="result files to look in")
    parser.add_argument("--dry_run", action="store_true", help="only print the command")
    args, more = parser.parse_known_args(underscored(words))
    found = [r for file in args.file for r in record.read(Path(file)) if r["record_id"].startswith(args.id)]
    ids = {r["record_id"] for r in found}
    if len(ids) != 1:
        shown = ", ".join(sorted(ids)[:5]) or "none"
        raise UsageError(f"id {args.id!r} must name one row of {', '.join(args.file)}, got {shown}")
    command = shlex.split(found[0]["repro"])[1:]
    at = command.index("--backends") if "--backends" in command else len(command)
    end = next((i for i in range(at + 1, len(command)) if command[i].startswith("--")), len(command))
    command[at:end] = ["--backends", found[0]["backend"]]
    print(shlex.join(["fi-bench", *command, *more]), flush=True)
    if args.dry_run:
        return OK
    from fi_bench import schedule

    return schedule.run([*command, *more])
