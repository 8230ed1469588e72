"""`fi-core verify`: whether the installed packages are what their indexes, RECORD and the installed sources say."""

from __future__ import annotations

import argparse

from fi_core import verify
from fi_core.cli.report import Report, paint


def run(args: argparse.Namespace) -> Report:
    found = verify.packages(deep=args.deep)
    if args.rebuild:
        verify.rebuild(found, args.rebuild, args.seed)
    problems = [problem for package in found for problem in package.problems]
    data = {
        "packages": [
            {**package._asdict(), "problems": [problem._asdict() for problem in package.problems]} for package in found
        ],
        "ok": not problems,
    }
    lines = [
        f"{p.package} {p.file} {paint(p.problem, 'red')} expected {p.expected or '-'} found {p.found or '-'}"
        for p in problems
    ]
    for package in found:
        note = f"; {package.note}" if package.note else ""
        lines.append(f"{package.name} {package.version}: {package.files} files, {len(package.problems)} problems{note}")
    return Report(data, lines, ok=not problems)
