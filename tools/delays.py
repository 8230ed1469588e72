"""Runs kernels with random delays around their synchronisation and compares every bit: `python tools/delays.py`.

A race that a quiet card hides changes results, or hangs, when single warps are slow. FI_DELAYS=<group> compiles device
code with delays at one group of instructions (fi/cuda/ptx/delay.cuh). This command runs the cases of delays.txt once
without delays and --repeats times with each group; inputs are the same, outputs hold NaN before each call. It needs a
GPU and compiles each kernel once a group, so it takes minutes; the store (FI_CACHE_DIR) keeps what it compiles, and
--part 2/3 runs the second of three parts of the cases.

Exit code 0: all bits are equal, nothing hung. 1: a case differs, hangs or fails. 2: usage.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import inspect
import itertools
import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

Outputs = dict[str, "torch.Tensor"]
Tasks = collections.deque[tuple[int, str]]  # numbers and lines that no process has taken yet

LINES = Path(__file__).with_suffix(".txt")
SEED = 7


class Call(NamedTuple):
    """A prepared call: fresh inputs and poisoned outputs, what runs them, and what it has written and returned."""

    inputs: Callable[[], Any]
    run: Callable[[Any], Any]
    outputs: Callable[[Any, Any], Outputs]


class Outcome(NamedTuple):
    """What a process found for one line: checksums of each repetition, or why there are none."""

    line: int
    sums: tuple[str, ...] = ()
    failure: str = ""


def read(path: Path) -> list[str]:
    """The cases, one a line; comments begin with #."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


def points(line: str, kind: str) -> Iterator[Callable[[], Call]]:
    """What prepares each call of a line: a routine of fi-bench with its flags, or `call NAME size=value,...` of a
    described function; behind `invariant` under the switch of batch invariance.
    """
    if line.startswith("invariant "):
        yield from map(invariant, points(line.removeprefix("invariant "), kind))
        return
    if line.startswith("call "):
        yield from (of_description(name, sizes, kind) for name, sizes in calls(line))
        return
    from fi_bench import parsing, sweep

    for args in sweep.points(parsing.parse(["--random_seed", str(SEED), *line.split()])):
        yield of_case(args, kind)


def calls(line: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The described functions and sizes of a line `call NAME size=value,...`."""
    _, name, *sizes = line.split()
    given = {key: values.split(",") for key, _, values in (size.partition("=") for size in sizes)}
    for each in itertools.product(*given.values()):
        yield name, dict(zip(given, map(_value, each), strict=True))


def invariant(prepare: Callable[[], Call]) -> Callable[[], Call]:
    """The same, prepared and run with batch invariance."""
    from fi_core import batch_invariant

    def prepared() -> Call:
        with batch_invariant():
            call = prepare()
        return call._replace(run=batch_invariant()(call.run))

    return prepared


def _value(word: str) -> Any:
    return {"True": True, "False": False}.get(word, int(word) if word.isdecimal() else word)


def of_description(name: str, sizes: dict[str, Any], kind: str) -> Callable[[], Call]:
    import torch

    from fi_bench.case import Inputs
    from fi_bench.runner import fresh
    from fi_core.registry import described

    found = described(name)
    if found is None:
        raise LookupError(f"no description of {name}")
    arguments = found.template.sample(device=kind, generator=SEED, nasty=False, **sizes)
    takes_out = "out" in inspect.signature(found.function).parameters

    def prepare() -> Call:
        run, own = found.bind(arguments), Inputs(found.own(arguments))
        first: Any = run(**fresh(own)) if takes_out else None

        def inputs() -> Inputs:
            out = first[0] if isinstance(first, tuple) else first
            poisoned = {"out": torch.full_like(out, float("nan"))} if takes_out else {}
            return Inputs({**fresh(own), **poisoned})

        def seeded(given: Inputs) -> Any:
            torch.manual_seed(SEED)  # for functions that draw
            return run(**given)

        return Call(inputs, seeded, found.template.results)

    return prepare


def of_case(args: Namespace, kind: str) -> Callable[[], Call]:
    import torch

    from fi_bench import backends, cases, refcheck
    from fi_bench.runner import fresh

    case = cases.find(args.routine)
    if case is None:
        raise LookupError(f"fi-core has no {args.routine}")
    device = torch.device(kind)
    torch.manual_seed(SEED)
    x = case.make(args, device, torch.Generator(device).manual_seed(SEED))
    runner = backends.bind("auto", case, kind)

    def prepare() -> Call:
        run = runner.prepare(fresh(x))

        def inputs() -> Any:
            given = fresh(x)
            refcheck.poison(given, case.poison)
            return given

        return Call(inputs, run, runner.outputs)

    return prepare


def checksum(outputs: dict[str, torch.Tensor]) -> str:
    """A hash of all bits, made on the device: each 16-bit word counts with its place."""
    import torch

    found = []
    for name in sorted(outputs):
        flat = outputs[name].detach().contiguous().flatten().view(torch.uint8)
        words = torch.nn.functional.pad(flat, (0, -flat.numel() % 2)).view(torch.int16).long()
        places = torch.arange(words.numel(), device=words.device) * 2654435769 + 1
        found.append(f"{name}:{int((words * places).sum()) & (1 << 64) - 1:016x}")
    return " ".join(found)


def repeated(prepare: Callable[[], Call], repeats: int) -> Iterator[str]:
    """Checksums of the outputs of the same call, made again and again on fresh inputs and poisoned outputs."""
    call = prepare()
    for _ in range(repeats):
        inputs = call.inputs()
        yield checksum(call.outputs(inputs, call.run(inputs)))


def serve(repeats: int, device: str) -> None:
    """The child: one line of JSON for each line of cases from stdin, then the kernels that it loaded."""
    from fi_core.registry import loaded_kernels

    for number, line in (json.loads(task) for task in sys.stdin):
        try:
            sums = [
                " / ".join(each) for each in zip(*(repeated(p, repeats) for p in points(line, device)), strict=True)
            ]
            answer: dict[str, Any] = {"line": number, "sums": sums}
        except Exception as error:  # whatever it is, it belongs to this case
            answer = {"line": number, "failure": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
        print(json.dumps(answer), flush=True)
    print(json.dumps({"kernels": sorted(loaded_kernels())}), flush=True)


class Child:
    """A process with one group of delays, or none, that works through some lines."""

    def __init__(self, group: str, args: Namespace, sources: Path | None = None) -> None:
        self.limit = args.limit
        self.environment = {**os.environ, "FI_DELAYS": group}
        if sources is not None:
            path = os.pathsep.join([str(sources), *sys.path])
            self.environment |= {"PYTHONPATH": path}
        repeats = 3 if group in ("", "patience") else args.repeats
        self.words = [sys.executable, __file__, "--serve", f"--repeats={repeats}", f"--device={args.device}"]
        self.kernels: set[str] = set()

    def run(self, tasks: Tasks) -> list[Outcome]:
        """Takes lines, which others may take too, until none is left."""
        found: list[Outcome] = []
        while tasks:  # a hang or a lost context ends a process; the rest gets another one
            found += self._process(tasks)
        return found

    def _process(self, tasks: Tasks) -> Iterator[Outcome]:
        with subprocess.Popen(
            self.words, env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            while True:
                try:
                    number, line = tasks.popleft()
                except IndexError:
                    break
                outcome = self._answer(process, number, line)
                what = outcome.failure or f"{len(set(outcome.sums))} result of {len(outcome.sums)} runs"
                print(f"{self.environment['FI_DELAYS'] or 'plain'}: {line}: {what}", file=sys.stderr)
                yield outcome
                if process.poll() is not None:
                    return
                if outcome.failure and "CUDA" in outcome.failure:  # the context is lost
                    process.kill()
                    return
            kernels, _ = process.communicate()
            self.kernels |= set(json.loads(kernels)["kernels"])

    def _answer(self, process: subprocess.Popen[str], number: int, line: str) -> Outcome:
        """What the process finds for a line; a process that gives no answer is ended."""
        assert process.stdin
        assert process.stdout
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps((number, line)) + "\n")
            process.stdin.flush()
        with selectors.DefaultSelector() as ready:
            ready.register(process.stdout, selectors.EVENT_READ)
            text = process.stdout.readline() if ready.select(self.limit) else None
        if not text:
            process.kill()
            code = process.wait()  # else the next case would be given to a process that is about to end
            ended = f"the process ended with code {code}"
            return Outcome(number, failure=f"no answer within {self.limit:g} s: it hangs" if text is None else ended)
        answer = json.loads(text)
        return Outcome(number, tuple(answer.get("sums", ())), answer.get("failure", ""))


def judged(reference: Outcome, delayed: Outcome) -> str:
    """What is wrong, or nothing."""
    if delayed.failure:
        return delayed.failure
    wrong = sum(each != reference.sums[0] for each in delayed.sums)
    return f"{wrong} of {len(delayed.sums)} runs differ" if wrong else ""


def part(text: str) -> tuple[int, int]:
    """`K/N`, the K-th of N parts."""
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"K/N with K from 1 to N is required; got {text!r}")
    return int(number), int(of)


def main(words: list[str]) -> int:
    from fi_core.runtime.build.compiler import DELAYS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", nargs="+", choices=DELAYS, default=list(DELAYS), help="all unless given")
    parser.add_argument("--repeats", type=int, default=40, help="calls of each case and group (40)")
    parser.add_argument("--limit", type=float, default=180, help="seconds for one case, its compilation included (180)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once")
    parser.add_argument("--lines", type=Path, default=LINES, help="file of cases (delays.txt)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the command")
    parser.add_argument("--part", type=part, default=(1, 1), metavar="K/N", help="the K-th of N parts of the cases")
    parser.add_argument("--json", type=Path, help="write all checksums and failures here")
    parser.add_argument("--planted", action="store_true", help="put errors into copies of kernels; each must show")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.serve:
        serve(args.repeats, args.device)
        return 0
    return planted(args) if args.planted else compared(args)


def compared(args: Namespace) -> int:
    """Every case with every group, in several processes."""
    number, of = args.part
    lines = {n: line for n, line in enumerate(read(args.lines)) if n % of == number - 1}
    groups = ["", *args.groups]
    each = max(1, args.jobs // len(groups))  # processes of a group
    start = time.monotonic()
    tasks = {group: Tasks(lines.items()) for group in groups}
    for n, group in enumerate(groups):  # groups share host modules, so each begins to compile another one
        tasks[group].rotate(-n * len(lines) // len(groups))

    def share(group: str) -> tuple[str, list[Outcome], set[str]]:
        child = Child(group, args)
        return group, child.run(tasks[group]), child.kernels

    found: dict[str, dict[int, Outcome]] = {group: {} for group in groups}
    kernels: set[str] = set()
    with concurrent.futures.ThreadPoolExecutor(len(groups) * each) as pool:
        for group, outcomes, loaded in pool.map(share, groups * each):
            found[group] |= {outcome.line: outcome for outcome in outcomes}
            kernels |= loaded
    return report(args, lines, found, kernels, time.monotonic() - start)


def planted(args: Namespace) -> int:
    """Each planted error with its groups until one shows it. Exit code 1 if one that is no fence does not show."""
    import fi_kernels
    from planted import ERRORS

    lines = {error.line: n for n, error in enumerate(ERRORS)}
    plain = {o.line: o for o in Child("", args).run(Tasks((n, line) for line, n in lines.items()))}

    def seen(error: Any) -> str:
        with tempfile.TemporaryDirectory(prefix="fi-planted-") as folder:
            copy = Path(folder) / "fi_kernels"
            shutil.copytree(Path(fi_kernels.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
            error.edit(copy / "include")
            for group in error.groups:
                (outcome,) = Child(group, args, Path(folder)).run(Tasks([(0, error.line)]))
                if what := judged(plain[lines[error.line]], outcome):
                    return f"{group}: {what}"
        return ""

    results = []
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for error, what in zip(ERRORS, pool.map(seen, ERRORS), strict=True):
            results.append(what)
            print(f"{error.name}: {what or 'not seen'}", flush=True)
    must = [bool(what) for error, what in zip(ERRORS, results, strict=True) if error.kind != "fence"]
    print(f"{sum(must)} of {len(must)} seen, and {sum(map(bool, results)) - sum(must)} fences")
    return 0 if all(must) and not any(o.failure for o in plain.values()) else 1


def report(
    args: Namespace, lines: dict[int, str], found: dict[str, dict[int, Outcome]], kernels: set[str], seconds: float
) -> int:
    """Prints what differs and how much ran; returns the exit code."""
    plain, wrong, skipped = found[""], [], []
    for number, line in lines.items():
        if plain[number].failure:
            skipped.append(f"not run: {line}: {plain[number].failure}")
        elif len(set(plain[number].sums)) > 1:
            wrong.append(f"without delays: {line}: runs differ from each other")
        else:
            for group in args.groups:
                what = judged(plain[number], found[group][number])
                wrong += [f"{group}: {line}: {what}"] if what else []
    if args.json:
        rows = {group: {n: o._asdict() for n, o in outcomes.items()} for group, outcomes in found.items()}
        args.json.write_text(json.dumps({"lines": lines, "groups": rows, "kernels": sorted(kernels)}, indent=1))
    print("\n".join([*skipped, *wrong]))
    print(
        f"{len(lines) - len(skipped)} of {len(lines)} cases x {len(args.groups)} groups, {args.repeats} runs each, "
        f"{len(kernels)} kernels: {len(wrong)} findings in {seconds:.0f} s"
    )
    return 1 if wrong or skipped else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
