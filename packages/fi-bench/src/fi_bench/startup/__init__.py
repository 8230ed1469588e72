"""`fi-bench startup`: the time of the first call of each function, with an empty and with a warm kernel store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fi_bench.console import say, table
from fi_bench.errors import FAILED, OK, UsageError
from fi_bench.files import append, writable
from fi_bench.parsing import Parser, underscored
from fi_bench.startup.calls import arguments

_STATES = ("cold", "warm")  # the kernel store of the process: empty, then as the process before left it
_MOST_SECONDS = 600


def main(words: Sequence[str]) -> int:
    parser = Parser(
        prog="fi-bench startup",
        description="Time the first call of each function in a fresh process, with an empty kernel store (cold) and "
        "with a warm one. torch, the CUDA context and the inputs are ready before the clock starts; the import of the "
        "function is a number of its own.",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--only", default="", metavar="TEXT", help="only functions whose name contains the text")
    parser.add_argument("--output_path", type=Path, metavar="FILE.jsonl", help="rows are appended")
    parser.add_argument("--format", choices=("table", "markdown", "json"), default="table")
    args = parser.parse_args(underscored(words))
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no CUDA device")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    names = [name for name in arguments(device) if args.only in name]
    if not names:
        raise UsageError(f"--only {args.only!r} leaves no function")
    if args.output_path is not None:
        writable(args.output_path, "--output_path")
    rows = list(_rows(names, device, args))
    if args.format == "json":
        print(json.dumps(rows, indent=1))
    else:
        columns = ("function", "device", "import_s", "cold_s", "warm_s")
        table([{name: row.get(name, "-") for name in columns} for row in rows], args.format)
    for row in rows:
        if "reason" in row:
            say("ERROR", f"{row['function']}: {row['reason']}")
    return FAILED if any("reason" in row for row in rows) else OK


def _rows(names: Sequence[str], device: str, args: Namespace) -> Iterator[dict[str, Any]]:
    for name in names:
        row = first_calls(name, device)
        if args.output_path is not None:
            append(args.output_path, json.dumps(row) + "\n")
        yield row


def first_calls(name: str, device: str) -> dict[str, Any]:
    """The seconds of one function in two processes that share a kernel store, which the first one finds empty."""
    row: dict[str, Any] = {"function": name, "device": device}
    script = Path(__file__).with_name("calls.py")
    with tempfile.TemporaryDirectory() as store:
        settings = [f"FI_CACHE_DIR={store}", f"PYTHONPATH={os.pathsep.join(p for p in sys.path if p)}"]
        settings.append("CUDA_CACHE_DISABLE=1")  # NVRTC 13 keeps what it compiles in a store of its own
        for state in _STATES:
            command = ["env", *settings, sys.executable, str(script), name, device]
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_MOST_SECONDS)
            except subprocess.TimeoutExpired:
                return row | {"reason": f"not done after {_MOST_SECONDS:g} s"}
            if done.returncode:
                return row | {"reason": " ".join(done.stderr.strip()[-300:].split())}
            row["import_s"], row[f"{state}_s"] = (round(float(word), 3) for word in done.stdout.split())
    return row
