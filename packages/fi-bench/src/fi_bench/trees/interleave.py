"""`fi-bench compare-trees OLD NEW`: every case of two checkouts in turns, one process each, on one device."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import shlex
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fi_bench import parsing, presets, record, stats
from fi_bench.console import Progress, human_time, say, table
from fi_bench.errors import FAILED, OK, REGRESSION, UsageError
from fi_bench.files import append, writable
from fi_bench.parsing import Parser, underscored
from fi_bench.runner import repro_command
from fi_bench.summary import describe_point

SCHEMA = "fi-bench trees 1"
_ANSWER_SECONDS = 300.0  # a side that compiles its kernels may take a minute
_LEAST_ROUNDS = 5

Answer = dict[str, Any]


class Side:
    """A process that measures one checkout; it is started again when it dies."""

    def __init__(self, name: str, tree: Path) -> None:
        self.name, self.tree = name, tree
        self._process: subprocess.Popen[bytes] | None = None
        self._answers, self._unread = -1, b""

    def ask(self, **task: Any) -> Answer:
        """One task and its answer."""
        self.tell(**task)
        return self.answer()

    def tell(self, **task: Any) -> None:
        if self._process is None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead: `answer` reports that
            self._process.stdin.write(json.dumps(task).encode() + b"\n")

    def answer(self) -> Answer:
        end = time.monotonic() + _ANSWER_SECONDS
        while b"\n" not in self._unread:
            ready = select.select([self._answers], [], [], max(end - time.monotonic(), 0))[0]
            more = os.read(self._answers, 1 << 20) if ready else b""
            if not more:
                why = self.stop(kill=True) if not ready else self.stop()
                return {"error": f"no answer in {_ANSWER_SECONDS:g} s" if not ready else f"exit code {why}"}
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        found: Answer = json.loads(line)
        if found.get("lost"):
            self.stop(kill=True)
        return found

    def stop(self, kill: bool = False) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        assert process.stdin is not None
        if kill:
            process.kill()
        process.stdin.close()
        os.close(self._answers)
        self._unread = b""
        return process.wait()

    def _start(self) -> None:
        answers, theirs = os.pipe()
        script = Path(__file__).with_name("side.py")
        calm = ["env", "OMP_WAIT_POLICY=passive"]  # the threads of an idle side do not spin
        self._process = subprocess.Popen(
            [*calm, sys.executable, str(script), str(theirs), *map(str, sources(self.tree))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            bufsize=0,
            pass_fds=(theirs,),
        )
        os.close(theirs)
        self._answers = answers


def sources(tree: Path) -> list[Path]:
    """The package folders of a checkout."""
    found = sorted(tree.resolve().glob("packages/*/src"))
    if not (tree / "packages" / "fi-core" / "src" / "fi_core").is_dir():
        raise UsageError(f"{tree}: not a checkout: it has no packages/fi-core/src/fi_core")
    return found


def points(args: Namespace, flags: Sequence[str]) -> list[Namespace]:
    """The cases: those of the presets, of a testlist, or of flags after `--`."""
    words = [["--testlist", args.testlist]] if args.testlist else []
    words += [list(flags)] if flags else []
    words += [["--preset", name] for name in args.preset or ([] if words else [presets.TREES])]
    found: list[Namespace] = []
    for typed in words:
        for line in parsing.read_lines(typed):
            if line.error:
                raise UsageError(f"{line.where}: {line.error}")
            found += line.points
    names = [record.case_key(p.routine, p) for p in found]
    return [p for i, p in enumerate(found) if names[i] not in names[:i]]


def title(point: Namespace) -> str:
    """`D1 BatchDecodeWithPagedKVCacheWrapper`, or the routine and its parameters."""
    return f"{point.case_tag} {point.routine}" if point.case_tag else f"{point.routine} {describe_point(point)}"


def measure(point: Namespace, sides: tuple[Side, Side], rounds: int, device: str) -> Iterator[Answer]:
    """Prepares the case on both sides at once, then takes turns; the first round warms up and does not count."""
    words = shlex.split(repro_command(point))[1:]
    blank = {"schema": SCHEMA, "case": point.case_tag or "", "routine": point.routine, "words": shlex.join(words)}
    for side in sides:
        side.tell(do="prepare", words=words, device=device)
    prepared = [side.answer() for side in sides]
    taken: list[list[Answer]] = [[], []]
    for number in range(rounds + 1 if not _errors(prepared) else 0):
        for i in (0, 1) if number % 2 == 0 else (1, 0):
            taken[i].append(sides[i].ask(do="turn", device=device))
        if _errors([turns[-1] for turns in taken]):
            break
    trouble = _errors(prepared) or _errors([turns[-1] for turns in taken if turns])
    if trouble:
        for side in sides:
            side.ask(do="forget", device=device)
        yield {**blank, "metric": "", "status": "failed", "reason": trouble}
        return
    same = {f"same_{name}": prepared[0][name] == prepared[1][name] for name in ("inputs", "outputs")}
    for metric in taken[0][0]["ns"]:
        old, new = ([turn["ns"][metric] for turn in turns[1:]] for turns in taken)
        yield {**blank, "metric": metric, "status": "ok", **same, "old_ns": old, "new_ns": new, **ratios(old, new)}


def _errors(answers: Sequence[Answer]) -> str:
    named = zip(("OLD", "NEW"), answers, strict=False)
    return "; ".join(f"{name}: {answer['error']}" for name, answer in named if "error" in answer)


def ratios(old: Sequence[float], new: Sequence[float]) -> dict[str, float]:
    """The time of NEW over that of OLD: the median over the rounds, with its interval of order statistics."""
    found = stats.median_interval([b / a for a, b in zip(old, new, strict=True)])
    return {"ratio": found.middle, "low": found.low, "high": found.high}


def verdict(row: Answer, threshold: float) -> str:
    """SLOWER and FASTER need an interval without 1 and a difference of the threshold."""
    if row["status"] != "ok":
        return "FAILED"
    beyond = abs(math.log(row["ratio"])) >= math.log1p(threshold)
    if beyond and (row["low"] > 1 or row["high"] < 1):
        return "SLOWER" if row["ratio"] > 1 else "FASTER"
    limits = 1 / (1 + threshold), 1 + threshold
    return "SAME" if limits[0] < row["low"] and row["high"] < limits[1] else "AMBIGUOUS"


def shown(row: Answer) -> dict[str, str]:
    """A row of the printed table."""
    named = {"case": row["title"], "metric": row["metric"] or "-"}
    if row["status"] != "ok":
        return named | dict.fromkeys(("old", "new", "new/old", "interval", "bits"), "-") | {"verdict": "FAILED"}
    old, new = (human_time(stats.median_interval(row[side]).middle) for side in ("old_ns", "new_ns"))
    interval = f"{row['low']:.3f} .. {row['high']:.3f}"
    bits = "equal" if row["same_outputs"] else "differ" if row["same_inputs"] else "inputs differ"
    return named | {
        "old": old,
        "new": new,
        "new/old": f"{row['ratio']:.3f}",
        "interval": interval,
        "bits": bits,
        "verdict": row["verdict"],
    }


def summary(rows: Sequence[Answer]) -> list[dict[str, Any]]:
    """Geometric mean and worst case of each metric."""
    found = []
    for metric in dict.fromkeys(row["metric"] for row in rows if row["status"] == "ok"):
        members = [row for row in rows if row["metric"] == metric and row["status"] == "ok"]
        worst = max(members, key=lambda row: float(row["ratio"]))
        counts = {
            name.lower(): sum(row["verdict"] == name for row in members)
            for name in ("FASTER", "SLOWER", "SAME", "AMBIGUOUS")
        }
        found.append(
            {
                "metric": metric,
                "cases": len(members),
                "geomean": f"{stats.geomean([r['ratio'] for r in members]):.3f}",
                "worst": f"{worst['ratio']:.3f}",
                "worst case": worst["title"],
                **counts,
            }
        )
    return found


_DESCRIPTION = """\
Measure two checkouts on one device, in turns, one process each. Every case prints the time of NEW over that of OLD: of
the device, of the host until a call returns, and of the host for a plan. A checkout is a folder with packages/. Nothing
needs to be installed: `PYTHONPATH=packages/fi-core/src:packages/fi-kernels/src:packages/fi-bench/src python -m fi_bench
compare-trees OLD NEW`. Without cases the preset `trees` runs, in 4 minutes on an H200.
Exit code 3: a case is slower by the threshold.
"""


def _parser() -> Parser:
    parser = Parser(prog="fi-bench compare-trees", description=_DESCRIPTION)
    parser.add_argument("old", type=Path, metavar="OLD", help="checkout to compare with")
    parser.add_argument("new", type=Path, metavar="NEW", help="checkout to judge")
    parser.add_argument("--preset", action="append", metavar="NAME", help="cases of a preset; may be repeated")
    parser.add_argument("--testlist", metavar="FILE", help="cases of a file, one set of flags per line")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name contains the text")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="turns of each side that count (9)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no further case after SECONDS")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--threshold", type=float, default=0.02, help="smallest difference that matters (0.02)")
    parser.add_argument("--output_path", type=Path, metavar="FILE.jsonl", help="rows are appended")
    parser.add_argument("--format", choices=("table", "markdown", "json"), default="table")
    return parser


def main(words: Sequence[str]) -> int:
    at = list(words).index("--") if "--" in words else len(words)
    args, flags = _parser().parse_args(underscored(words[:at])), words[at + 1 :]
    if args.rounds < _LEAST_ROUNDS:
        raise UsageError(f"--rounds must be at least {_LEAST_ROUNDS}, got {args.rounds}")
    if not 0 < args.threshold < 1:
        raise UsageError("--threshold must lie in (0, 1)")
    if not args.seconds > 0:
        raise UsageError(f"--seconds must be above 0, got {args.seconds:g}")
    chosen = [point for point in points(args, flags) if args.only in title(point)]
    if not chosen:
        raise UsageError(f"--only {args.only!r} leaves no case")
    sides = Side("OLD", args.old), Side("NEW", args.new)
    with contextlib.ExitStack() as stack:
        for side in sides:
            stack.callback(side.stop)
        sink = None if args.output_path is None else writable(args.output_path, "--output_path")
        rows = list(_rows(args, chosen, sides, sink))
    if args.format == "json":
        print(json.dumps({"rows": rows, "summary": summary(rows)}, indent=1))
    else:
        table([shown(row) for row in rows], args.format)
        print()
        table(summary(rows), args.format)
    for row in rows:
        if row["status"] != "ok":
            say("ERROR", f"{row['title']}: {row['reason']}")
    verdicts = {row["verdict"] for row in rows}
    return REGRESSION if "SLOWER" in verdicts else FAILED if "FAILED" in verdicts else OK


def _rows(
    args: Namespace, chosen: Sequence[Namespace], sides: tuple[Side, Side], sink: Path | None
) -> Iterator[Answer]:
    """Starts both sides and measures the cases; each row is on disk before the next case starts."""
    start = time.monotonic()
    hello = [_greeted(side) for side in sides]
    device = ("cuda" if hello[0]["gpu"] else "cpu") if args.device == "auto" else args.device
    if device == "cuda" and not hello[0]["gpu"]:
        raise UsageError("--device cuda: torch sees no CUDA device")
    _write(sink, {"schema": SCHEMA, "old": hello[0], "new": hello[1], "device": device, "rounds": args.rounds})
    with Progress(len(chosen)) as progress:
        for number, point in enumerate(chosen):
            if time.monotonic() - start > args.seconds:
                say("WARNING", f"--seconds {args.seconds:g} are over: {len(chosen) - number} cases are not measured")
                chosen = chosen[:number]
                break
            progress.step(title(point))
            for row in measure(point, sides, args.rounds, device):
                row |= {"title": title(point), "verdict": verdict(row, args.threshold)}
                _write(sink, row)
                yield row
            progress.done()
    say("INFO", f"{len(chosen)} cases in {time.monotonic() - start:.0f} s on {hello[0]['gpu'] or 'this CPU'}")


def _greeted(side: Side) -> Answer:
    """What a side measures; it must import the packages of its checkout."""
    hello = side.ask(do="hello")
    if "error" in hello:
        raise UsageError(f"{side.tree}: its process does not start: {hello['error']}; {hello.get('where', '')}")
    for name in ("fi_core", "fi_bench"):
        if not Path(hello[name]).is_relative_to(side.tree.resolve()):
            raise UsageError(f"{side.tree}: its process imports {name} from {hello[name]}")
    return hello


def _write(sink: Path | None, row: Answer) -> None:
    if sink is not None:
        append(sink, json.dumps(row) + "\n")
