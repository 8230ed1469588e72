"""`fi-bench run`: the order of lines, points, backends and trials; processes of their own; resuming; the exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fi_bench import parsing, record, summary
from fi_bench.console import Progress, complain, say, table
from fi_bench.errors import FAILED, MISMATCH, OK, USAGE, MismatchError
from fi_bench.runner import CaseRun, asked_backends

Record = record.Record
_BAD = {"failed", "crashed", "timeout"}


@dataclass
class Tally:
    """What happened, as far as the exit code needs it."""

    records: list[Record] = field(default_factory=list)
    bad_lines: int = 0
    broken: int = 0  # a line that failed outside of any backend

    def exit_code(self) -> int:
        """Mismatch before usage before failure; a run that measured nothing failed, unless all was done before."""
        statuses = [r["status"] for r in self.records]
        if any(r["status"] == "mismatch" and not r["args"]["allow_output_mismatch"] for r in self.records):
            return MISMATCH
        if self.bad_lines:
            return USAGE
        if self.broken or _BAD & set(statuses):
            return FAILED
        return FAILED if statuses and set(statuses) == {"skipped"} else OK


@dataclass(frozen=True)
class Job:
    """One point in one trial, with the backends that are still to be done."""

    args: Namespace
    trial: int
    where: str


def run(words: Sequence[str]) -> int:
    lines = parsing.read_lines(words)
    tally = Tally()
    for line in lines:
        if line.error:
            tally.bad_lines += 1
            say("ERROR", f"Error running test: {line.words[0]}")
            say("ERROR", f"Error: {line.where}: {line.error}")
    good = [line for line in lines if not line.error]
    first = next((point for line in good for point in line.points), None)
    if first is None or (tally.bad_lines and first.fail_fast):
        return tally.exit_code() if lines else _nothing(words)
    if first.use_cupti:
        what = "is deprecated and will be removed in a future release. CUPTI is now enabled by default."
        say("WARNING", f"--use_cupti {what}")
    sink = record.Sink(first.output_path)
    done = record.finished(record.read(sink.jsonl)) if first.resume and sink.jsonl else set()
    jobs = list(_jobs(good, done))
    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid():x}"
    progress = Progress(len(jobs))

    def emit(found: Record) -> None:
        tally.records.append(found)
        sink.write(found)

    for job in jobs:
        progress.step(f"{job.args.routine} ({job.where})")
        progress.clear()
        statuses = _run(job, run_id, emit, tally)
        differed = "mismatch" in statuses and not job.args.allow_output_mismatch
        if (differed and len(lines) == 1) or (job.args.fail_fast and (differed or statuses & _BAD)):
            break
    _summary(tally.records, first.format)
    return tally.exit_code()


def _nothing(words: Sequence[str]) -> int:
    complain(f"no test in {' '.join(words)}")
    return USAGE


def _jobs(lines: Sequence[parsing.Line], done: set[tuple[str, str, int]]) -> Iterator[Job]:
    """Trials outermost, so that they spread over time; odd ones go through the backends backwards (A B, B A, ...)."""
    most = max((point.trials for line in lines for point in line.points), default=1)
    for trial in range(most):
        for line in lines:
            for point in line.points:
                if trial >= point.trials:
                    continue
                key = record.case_key(point.routine, point)
                names = asked_backends(point) if done or point.trials > 1 or _isolated(point) else point.backends
                if names is not None:
                    left = [name for name in names if (key, name, trial) not in done]
                    if not left:
                        continue
                    names = left[::-1] if trial % 2 else left
                yield Job(Namespace(**{**vars(point), "backends": names}), trial, line.where)


def _isolated(args: Namespace) -> bool:
    return bool(args.isolate or args.timeout or args.trials > 1)


def _run(job: Job, run_id: str, emit: Callable[[Record], None], tally: Tally) -> set[str]:
    """Does the job; the statuses of its records, and `failed` if there was trouble outside of any backend."""
    before = len(tally.records)
    broken = set()
    if _isolated(job.args):
        for name in job.args.backends:
            for found in _in_child(job, name, run_id):
                emit(found)
    else:
        try:
            CaseRun(job.args, run_id, job.trial, emit).run()
        except MismatchError as error:
            say("ERROR", str(error).removeprefix("[ERROR] "))
        except Exception as error:
            tally.broken += 1
            broken.add("failed")
            say("ERROR", f"Error running test: {job.where}: {job.args.routine}")
            say("ERROR", f"Error: {type(error).__name__}: {error}")
    return broken | {r["status"] for r in tally.records[before:]}


def _in_child(job: Job, name: str, run_id: str) -> list[Record]:
    """One backend in a process of its own; what it could not say itself, its end says."""
    point = Namespace(**{**vars(job.args), "backends": [name]})
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "records.jsonl"
        task = {"args": vars(point), "run_id": run_id, "trial": job.trial, "out": str(out)}
        sys.stdout.flush()
        child = subprocess.Popen(
            [sys.executable, "-m", "fi_bench", "_child"],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            child.communicate(json.dumps(task), timeout=job.args.timeout)
            end = _end(child.returncode)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            end = ("timeout", f"not done after {job.args.timeout:g} s")
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            raise
        records = record.read(out) if out.exists() else []
    if records:
        return records
    status, reason = end
    say("ERROR", f"{name} for routine {point.routine}: {reason}")
    blank = CaseRun(point, run_id, job.trial, lambda found: None).blank(name)
    return [blank | {"status": status, "reason": reason}]


def _end(code: int) -> tuple[str, str]:
    if code < 0:
        return "crashed", f"killed by {signal.Signals(-code).name}"
    return "crashed", f"ended with exit code {code} and no record"


def child() -> int:
    """The process of one backend: its task comes on stdin."""
    task = json.load(sys.stdin)
    sink = record.Sink(task["out"])
    try:
        CaseRun(Namespace(**task["args"]), task["run_id"], task["trial"], sink.write).run()
    except MismatchError:
        return MISMATCH
    return OK


def _summary(records: Sequence[Record], format: str) -> None:
    if format in ("table", "markdown"):
        table(summary.rows(records), format)
    elif format == "json":
        print(json.dumps([json.loads(record.dumps(r)) for r in records], indent=1))
    elif format == "csv":
        print(record.csv_line(record.COLUMNS), end="")
        for r in records:
            if r.get("stats"):
                print(record.csv_line(record.csv_row(r)), end="")
