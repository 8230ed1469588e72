"""`fi-bench compare A B`: is B faster, slower or the same, judged on medians of separate processes."""

from __future__ import annotations

import json
import math
import shlex
import statistics
import subprocess
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fi_bench import record, stats
from fi_bench.console import Progress, human_time, say, table
from fi_bench.errors import AMBIGUOUS, OK, UsageError
from fi_bench.parsing import Parser, underscored
from fi_bench.summary import describe

ENOUGH_TRIALS = 5  # a side; the rank interval of 5 against 5 covers 96.8 %
THRESHOLD = 0.02
CONFIDENCE = 0.95
VERDICTS = ("FASTER", "SLOWER", "SAME", "AMBIGUOUS")


class Key(NamedTuple):
    """Names a case on both sides of a comparison."""

    routine: str
    case: str
    backend: str


@dataclass(frozen=True)
class Side:
    """All processes of one case: medians and centres (ns), cycles if the clock was watched, and the circumstances.

    A centre is the mean of the middle half of the samples: a median of CUPTI's 32 ns ticks moves by 2 % at 1.6 us.
    """

    medians: tuple[float, ...]
    centres: tuple[float, ...]
    cycles: tuple[float, ...]
    circumstances: tuple[tuple[str, Any], ...]
    first: str
    last: str
    words: str

    @property
    def median(self) -> float:
        return statistics.median(self.medians)


@dataclass(frozen=True)
class Verdict:
    """FASTER and SLOWER describe B; the ratio is the time of B over the time of A."""

    verdict: str
    ratio: float
    low: float
    high: float
    why: str = ""


def judge(
    a: Sequence[float],
    b: Sequence[float],
    cycles: tuple[Sequence[float], Sequence[float]] | None = None,
    threshold: float = THRESHOLD,
    confidence: float = CONFIDENCE,
) -> Verdict:
    """One value per process and side. A difference needs an interval without 1, the threshold and agreeing cycles."""
    found = _ratio(a, b, confidence)
    ratio, low, high = found.middle, found.low, found.high
    if min(len(a), len(b)) < ENOUGH_TRIALS:
        why = f"{len(a)} and {len(b)} processes; run both sides with --trials {ENOUGH_TRIALS}"
        return Verdict("AMBIGUOUS", ratio, low, high, why)
    if low > 1 / (1 + threshold) and high < 1 + threshold:
        return Verdict("SAME", ratio, low, high)
    beyond = ratio <= 1 / (1 + threshold) or ratio >= 1 + threshold
    if low <= 1 <= high or not beyond:
        return Verdict(
            "AMBIGUOUS", ratio, low, high, f"the interval allows both SAME and {threshold:.0%}; more --trials"
        )
    if cycles is not None:
        by_cycles = _ratio(*cycles, confidence)
        if not (by_cycles.high < 1 if high < 1 else by_cycles.low > 1):
            return Verdict("AMBIGUOUS", ratio, low, high, f"cycles say {by_cycles.middle:.3f}: the clock changed")
    return Verdict("FASTER" if high < 1 else "SLOWER", ratio, low, high)


def _ratio(a: Sequence[float], b: Sequence[float], confidence: float) -> stats.Interval:
    shift = stats.shift_interval([math.log(x) for x in a], [math.log(x) for x in b], confidence)
    return stats.Interval(*(math.exp(x) if x < 700 else math.inf for x in shift))


def sides(records: Iterable[record.Record], backend: str | None = None, keep_backend: bool = True) -> dict[Key, Side]:
    """The measured cases, of one backend if named; without keep_backend they compare with those of another backend."""
    grouped: dict[Key, list[record.Record]] = {}
    for r in records:
        if r.get("stats") and backend in (None, r["backend"]):
            key = Key(r["routine"], r["case_key"], r["backend"] if keep_backend else "")
            grouped.setdefault(key, []).append(r)
    return {key: _side(group) for key, group in grouped.items()}


def _side(group: list[record.Record]) -> Side:
    seen = list({_circumstances(r) for r in group})
    if len(seen) > 1:
        words = f"{group[0]['routine']} {describe(group[0])}"
        raise UsageError(f"{words}: one file holds unlike rows: {_unlike(*seen[:2])}")
    centres = [stats.midmean(r["samples_ns"]) for r in group]
    cycles = [c * r["clocks"]["sm_mhz_mean"] for c, r in zip(centres, group) if r["clocks"].get("sm_mhz_mean")]
    times = sorted(r["timestamp"] for r in group)
    return Side(
        tuple(r["stats"]["median"] for r in group),
        tuple(centres),
        tuple(cycles) if len(cycles) == len(group) else (),
        seen[0],
        times[0],
        times[-1],
        describe(group[0]),
    )


def _circumstances(found: record.Record) -> tuple[tuple[str, Any], ...]:
    """The conditions that two comparable measurements share, besides the parameters."""
    on_gpu = found["device"] == "cuda"
    machine = found["env"].get("gpu_uuid" if on_gpu else "cpu")
    return (
        ("device", found["device"]),
        ("GPU" if on_gpu else "CPU", machine),
        ("timer", found["timer"]),
        ("cache", found["cache_state"]),
    )


def _unlike(a: tuple[tuple[str, Any], ...], b: tuple[tuple[str, Any], ...]) -> str:
    return ", ".join(f"{name} {x} and {y}" for (name, x), (_, y) in zip(a, b, strict=True) if x != y)


def compare(a: dict[Key, Side], b: dict[Key, Side], args: Namespace) -> dict[Key, tuple[Side, Side, Verdict]]:
    """The verdicts of all cases that both sides have, in the order of A; unlike ones are an error unless forced."""
    found = {}
    for key in (key for key in a if key in b):
        x, y = a[key], b[key]
        if x.circumstances != y.circumstances and not args.force:
            differ = _unlike(x.circumstances, y.circumstances)
            raise UsageError(f"{key.routine} {x.words}: A and B are not alike: {differ}; --force compares them")
        cycles = (x.cycles, y.cycles) if x.cycles and y.cycles else None
        found[key] = (x, y, judge(x.centres, y.centres, cycles, args.threshold, args.confidence))
    return found


def parse_source(text: str) -> tuple[list[record.Record], str | None]:
    """`FILE` or `FILE@BACKEND`."""
    path, _, backend = text.partition("@")
    return record.read(path), backend or None


def main(words: Sequence[str]) -> int:
    parser = Parser(
        prog="fi-bench compare",
        description="Compare results, case by case. Make them with `--trials 5`. Two backends of a file: F@a F@b.",
    )
    parser.add_argument("a", metavar="A", help="FILE or FILE@BACKEND: the results to compare with")
    parser.add_argument("b", metavar="B", help="FILE or FILE@BACKEND: the results to judge")
    parser.add_argument("--threshold", type=float, default=THRESHOLD, help="smallest difference that matters (0.02)")
    parser.add_argument("--confidence", type=float, default=CONFIDENCE, help="of the intervals (0.95)")
    parser.add_argument("--strict", action="store_true", help="exit 4 if any case is AMBIGUOUS")
    parser.add_argument("--force", action="store_true", help="compare although timer, device or cache state differ")
    parser.add_argument("--format", choices=("table", "markdown", "json"), default="table")
    parser.add_argument("--python_a", metavar="CMD", help="with flags after --: the Python of A, timed now")
    parser.add_argument("--python_b", metavar="CMD", help="the Python of B; such as 'env PYTHONPATH=... python'")
    parser.add_argument("--trials", type=int, default=ENOUGH_TRIALS, help="processes a side, in turns A B, B A (5)")
    at = list(words).index("--") if "--" in words else len(words)
    args, flags = parser.parse_args(underscored(words[:at])), words[at + 1 :]
    if not 0 < args.threshold < 1 or not 0.5 <= args.confidence < 1:
        raise UsageError("--threshold must lie in (0, 1) and --confidence in [0.5, 1)")
    if args.python_a or args.python_b or flags:
        _measure_in_turns(args, flags)
    (records_a, backend_a), (records_b, backend_b) = parse_source(args.a), parse_source(args.b)
    across = backend_a is not None and backend_b is not None and backend_a != backend_b
    a, b = sides(records_a, backend_a, not across), sides(records_b, backend_b, not across)
    found = compare(a, b, args)
    if not found:
        raise UsageError("A and B have no measured case in common; see `fi-bench list cases FILE`")
    _show(found, args)
    lost = len(a.keys() - b.keys()), len(b.keys() - a.keys())
    if any(lost):
        say("WARNING", f"{lost[0]} cases are only in A, {lost[1]} only in B")
    return AMBIGUOUS if args.strict and any(v.verdict == "AMBIGUOUS" for _, _, v in found.values()) else OK


def _measure_in_turns(args: Namespace, flags: Sequence[str]) -> None:
    """Append the rows of a number of processes to A and to B, alternating, so that drift hits both."""
    if not (args.python_a and args.python_b and flags):
        raise UsageError("to measure both sides now give --python_a, --python_b, and after -- the flags of a run")
    if {"@"} & {*args.a, *args.b} or args.a == args.b:
        raise UsageError("to measure both sides now name two files without @BACKEND")
    sides = [("A", args.python_a, args.a), ("B", args.python_b, args.b)]
    with Progress(2 * args.trials) as progress:
        for trial in range(args.trials):
            for name, python, file in sides if trial % 2 == 0 else sides[::-1]:
                progress.step(f"{name}, process {trial + 1}")
                command = [*shlex.split(python), "-m", "fi_bench", "run", *flags, "--output_path", file]
                if subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode:
                    raise UsageError(f"this command failed, run it to see why: {shlex.join(command)}")
                progress.done()


def _show(found: dict[Key, tuple[Side, Side, Verdict]], args: Namespace) -> None:
    rows = [
        {
            "routine": key.routine,
            "case": x.words,
            "backend": key.backend or f"{args.a.partition('@')[2]} -> {args.b.partition('@')[2]}",
            "A": human_time(x.median),
            "B": human_time(y.median),
            "B/A": f"{v.ratio:.3f}",
            "interval": f"{v.low:.3f} .. {v.high:.3f}",
            "verdict": v.verdict,
            "why": v.why,
        }
        for key, (x, y, v) in found.items()
    ]
    if args.format == "json":
        print(json.dumps({"cases": rows, "groups": groups(found)}, indent=1))
        return
    table(rows, args.format)
    print()
    table(groups(found), args.format)
    print()
    n = len(found)
    say("INFO", f"expected false alarms if nothing changed: at most {n * (1 - args.confidence):.1f} of {n}")
    if all(x.last < y.first or y.last < x.first for x, y, _ in found.values()) and n:
        say("WARNING", "one side was measured wholly before the other: drift in between counts as difference")


def groups(found: dict[Key, tuple[Side, Side, Verdict]]) -> list[dict[str, Any]]:
    """Geometric mean and worst case per routine: a good mean may hide a slow shape."""
    rows = []
    for routine in dict.fromkeys(key.routine for key in found):
        members = [(x, v) for key, (x, _, v) in found.items() if key.routine == routine]
        worst = max(members, key=lambda m: m[1].ratio)
        rows.append(
            {
                "group": routine,
                "cases": len(members),
                "geomean B/A": f"{stats.geomean([v.ratio for _, v in members]):.3f}",
                "worst B/A": f"{worst[1].ratio:.3f}",
                "worst case": worst[0].words,
                **{name.lower(): sum(v.verdict == name for _, v in members) for name in VERDICTS},
            }
        )
    return rows
