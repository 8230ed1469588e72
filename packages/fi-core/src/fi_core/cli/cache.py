"""`fi-core cache ...`: the store of kernels that were compiled on this machine."""

from __future__ import annotations

import argparse
import time

from fi_core.cli.report import Report, paint, size, table
from fi_core.runtime.resolve import store


def ls(args: argparse.Namespace) -> Report:
    entries = store.entries()
    data = [{"key": e.key, "path": str(e.path), "bytes": e.bytes, "used": e.used} for e in entries]
    rows = [(e.key, size(e.bytes), time.strftime("%Y-%m-%d %H:%M", time.localtime(e.used))) for e in entries]
    total = f"{len(entries)} entries, {size(sum(e.bytes for e in entries))}"
    places = sorted({str(e.path.parent) for e in entries})
    return Report(
        data, [*table(("entry", "size", "last use"), rows), "", f"{total} in {', '.join(places) or store.roots()[0]}"]
    )


def verify(args: argparse.Namespace) -> Report:
    found = [(entry, store.problem(entry.path)) for entry in store.entries()]
    damaged = [(entry, why) for entry, why in found if why]
    data = {
        "checked": len(found),
        "damaged": [{"key": e.key, "path": str(e.path), "problem": why} for e, why in damaged],
    }
    lines = [f"{paint('damaged', 'red')} {entry.path}: {why}" for entry, why in damaged]
    end = f"{len(found)} entries checked, {len(damaged)} damaged"
    hint = ["A damaged entry is never used: the next call sets it aside and compiles it again."] if damaged else []
    return Report(data, [*lines, end, *hint], ok=not damaged)


def prune(args: argparse.Namespace) -> Report:
    removed = store.prune(args.max_age_days, args.max_bytes)
    return Report(
        [str(path) for path in removed], [*(f"removed {path}" for path in removed), f"{len(removed)} removed"]
    )


def clear(args: argparse.Namespace) -> Report:
    count = store.clear()
    return Report({"removed": count}, [f"Cache cleared: {count} entries removed."])
