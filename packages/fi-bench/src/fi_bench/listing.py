"""`fi-bench list`, `env` and `rerun`: known routines and backends, this machine, and the repetition of a row."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fi_bench import backends, cases, presets, record, summary, support
from fi_bench.catalog import FAMILY_OF, family_of
from fi_bench.console import table
from fi_bench.errors import OK, UsageError
from fi_bench.parsing import Parser, underscored
from fi_bench.peers import LIBRARIES


def main(words: Sequence[str]) -> int:
    parser = Parser(prog="fi-bench list", description="List routines, backends, support, presets or cases.")
    whats = ("routines", "backends", "support", "presets", "cases")
    parser.add_argument("what", nargs="?", default="routines", choices=whats)
    parser.add_argument("name", nargs="?", help="for `support`: one routine; for `cases`: a result file")
    parser.add_argument("--format", choices=("table", "markdown", "json"), default="table")
    args = parser.parse_args(underscored(words))
    if args.what == "cases":
        if args.name is None:
            raise UsageError("list cases needs a result file")
        found = summary.rows(record.read(args.name))
    elif args.what == "support":
        found = _support(args.name)
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
        found = cases.find(routine)
        if found is None:
            ours, peers, status = "-", "-", "no op yet"
        else:
            exists = backends.exists(found)
            ours = " ".join(backends.implementations(found) or ("auto",)) if exists else "-"
            peers = " ".join(("torch", *found.peers, "flashinfer"))
            status = "ready" if exists else "no op yet"
        rows.append({"routine": routine, "family": family, "ours": ours, "peers": peers, "status": status})
    return rows


def _backends() -> list[dict[str, Any]]:
    rows = []
    for name, library in LIBRARIES.items():
        there = library.module() is not None
        routines = sum(name in ("torch", "flashinfer") or name in found.peers for found in cases.every())
        rows.append(
            {
                "backend": name,
                "installed": "yes" if there else "no",
                "routines": routines,
                "install": "" if there else library.install,
            }
        )
    return rows


def _support(routine: str | None) -> list[dict[str, Any]]:
    """The compute capabilities of each routine and backend; a routine without a backend is a row too."""
    wanted = FAMILY_OF if routine is None else [routine] if family_of(routine) else []
    rows = []
    for name in wanted:
        found = cases.find(name)
        known = backends.offered(found) if found else {}
        known |= {f"flashinfer:{backend}": on for backend, on in support.FLASHINFER.get(name, {}).items()}
        for backend, on in known.items() or [("-", ())]:
            places = ("CPU", *support.CAPABILITIES)
            rows.append({"routine": name, "backend": backend} | {p: "yes" if p in on else "-" for p in places})
    return rows


def _presets() -> list[dict[str, Any]]:
    return [
        {"preset": name, "lines": len(presets.preset_lines(name)), "cases": presets.about(name)}
        for name in presets.names()
    ]


def env(words: Sequence[str]) -> int:
    parser = Parser(prog="fi-bench env", description="Print the environment that results of this machine depend on.")
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
