"""Times ops beside torch on the CPU, in turns in one process, by shapes drawn from a preset of fi-bench.

A row of the result is a case on a number of threads: the least time of fi and of torch in microseconds. Other processes
of the machine disturb a mean, and rarely all turns of one side.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fi_bench import backends, cases, parsing, schedule, summary

SIDES = ("auto", "torch")
_SAMPLE_US, _FEWEST_TURNS = 200, 5


def points(preset: str, seed: int, draw: int, routine: str | None) -> list[argparse.Namespace]:
    """`draw` points of each case tag of a preset."""
    words = ["--preset", preset, "--device", "cpu", "--draw", str(draw), "--random_seed", str(seed)]
    lines = parsing.read_lines([*words, *(["--routine", routine] if routine else [])])
    return [point for line in schedule.drawn_lines(lines, lines[0].points[0]) for point in line.points]


def calls(point: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """The call of each side on the same values, after one that compiles it."""
    case, device = cases.find(point.routine), torch.device("cpu")
    assert case is not None
    torch.manual_seed(point.random_seed)
    found: dict[str, Callable[[], Any]] = {}
    for side in SIDES:
        inputs = case.make(point, device, torch.Generator(device).manual_seed(point.random_seed))
        call = backends.bind(side, case, "cpu").prepare(inputs)
        call(inputs)
        found[side] = functools.partial(call, inputs)
    return found


def least_us(sides: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """The least mean of a sample of each side, in turns; where fi seems slower, in four times the turns."""

    def sample(call: Callable[[], Any], repeats: int) -> float:
        start = time.perf_counter_ns()
        for _ in range(repeats):
            call()
        return (time.perf_counter_ns() - start) / repeats / 1e3

    found = {side: min(sample(call, 1) for _ in range(2)) for side, call in sides.items()}
    repeats = {side: max(1, round(_SAMPLE_US / once)) for side, once in found.items()}
    begin, turns = time.monotonic(), 0
    while turns < _FEWEST_TURNS or time.monotonic() - begin < seconds * (4 if found["auto"] > found["torch"] else 1):
        turns += 1
        for side, call in sides.items():
            found[side] = min(found[side], sample(call, repeats[side]))
    return found


def measured(drawn: Sequence[argparse.Namespace], threads: Sequence[int], seconds: float) -> Iterator[dict[str, Any]]:
    for point in drawn:
        sides = calls(point)
        for count in threads:
            torch.set_num_threads(count)
            us = least_us(sides, seconds)
            row = {"routine": point.routine, "case": summary.describe_point(point), "threads": count}
            yield row | {"fi": round(us["auto"], 2), "torch": round(us["torch"], 2)}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="cpu-grid")
    parser.add_argument("--draw", type=int, default=4, help="points of each routine")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--routine")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=0.5, help="of each case on each number of threads")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(words)
    found = []
    for row in measured(points(args.preset, args.seed, args.draw, args.routine), args.threads, args.seconds):
        found.append(row)
        times = f"{row['fi'] / row['torch']:6.3f} {row['threads']} {row['fi']:10.1f} {row['torch']:10.1f}"
        print(times, row["routine"], row["case"], flush=True)
    for count in args.threads:
        ratios = [row["fi"] / row["torch"] for row in found if row["threads"] == count]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"{count} threads: {len(ratios)} cases, geometric mean {mean:.3f}, worst {max(ratios):.3f}")
    if args.output:
        args.output.write_text("".join(json.dumps(row) + "\n" for row in found))


if __name__ == "__main__":
    main()
