"""`fi-bench run`: the order of lines, points, backends and trials; worker processes; resuming; the exit code."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from fi_bench import parsing, record, summary
from fi_bench.console import Progress, complain, say, table
from fi_bench.errors import FAILED, MISMATCH, OK, USAGE, ContextLostError, MismatchError, OutputError
from fi_bench.measure.ranks import count
from fi_bench.runner import CaseRun, asked_backends
from fi_bench.worker import Worker

Record = record.Record
_BAD = {"failed", "crashed", "timeout"}


@dataclass
class Tally:
    """Counts what the exit code depends on."""

    records: list[Record] = field(default_factory=list)
    bad_lines: int = 0
    broken: int = 0  # a line that failed outside of any backend
    unmeasured: int = 0  # cases that every backend skipped

    def exit_code(self) -> int:
        """Mismatch before usage before failure; a case that every backend skips is a failure."""
        statuses = [r["status"] for r in self.records]
        if any(r["status"] == "mismatch" and not r["args"]["allow_output_mismatch"] for r in self.records):
            return MISMATCH
        if self.bad_lines:
            return USAGE
        return FAILED if self.broken or self.unmeasured or _BAD & set(statuses) else OK


@dataclass(frozen=True)
class Job:
    """One point in one trial, with the backends that are not done yet."""

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
    jobs = list(jobs_of(drawn_lines(good, first), done))
    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid():x}"

    def emit(found: Record) -> None:
        tally.records.append(found)
        sink.write(found)

    with contextlib.closing(Runs(run_id, emit, tally)) as runs, Progress(len(jobs)) as progress:
        for number, job in enumerate(jobs, 1):
            progress.step(f"{job.args.routine} {' '.join(job.args.backends)} ({job.where})")
            if len(jobs) > 1:
                say("INFO", f"{number}/{len(jobs)} {_title(job)}")
            statuses = runs.run(job)
            progress.done()
            tally.unmeasured += statuses == {"skipped"}
            differed = "mismatch" in statuses and not job.args.allow_output_mismatch
            if (differed and len(lines) == 1) or (job.args.fail_fast and (differed or statuses & _BAD)):
                break
    _summary(tally.records, first.format)
    return tally.exit_code()


def _title(job: Job) -> str:
    """The case of the [PERF] lines that follow."""
    tag = f"{job.args.case_tag}: " if job.args.case_tag else ""
    trial = f" (process {job.trial + 1})" if job.args.trials > 1 else ""
    return f"{tag}{job.args.routine} {summary.describe_point(job.args)}{trial}"


def drawn_lines(lines: Sequence[parsing.Line], args: Namespace) -> list[parsing.Line]:
    """--draw N: N points of each --case_tag, at random."""
    if args.draw is None:
        return list(lines)
    tagged: dict[str | None, list[parsing.Line]] = {}
    for line in lines:
        tagged.setdefault(line.points[0].case_tag, []).append(line)
    rng = random.Random(args.random_seed)
    return [line for group in tagged.values() for line in _drawn(group, args.draw, rng)]


def _drawn(lines: Sequence[parsing.Line], count: int, rng: random.Random) -> list[parsing.Line]:
    places = [(i, j) for i, line in enumerate(lines) for j in range(len(line.points))]
    if count >= len(places):
        return list(lines)
    return [dataclasses.replace(lines[i], points=(lines[i].points[j],)) for i, j in rng.sample(places, count)]


def _nothing(words: Sequence[str]) -> int:
    complain(f"no test in {' '.join(words)}")
    return USAGE


def jobs_of(lines: Sequence[parsing.Line], done: set[tuple[str, str, int]]) -> Iterator[Job]:
    """Trials outermost, so that they spread over time; odd ones go through the backends backwards (A B, B A, ...)."""
    most = max((point.trials for line in lines for point in line.points), default=1)
    for trial in range(most):
        for line in lines:
            for point in line.points:
                if trial >= point.trials:
                    continue
                key = record.case_key(point.routine, point)
                names = asked_backends(point)
                left = [name for name in names if (key, name, trial) not in done]
                if left:
                    named = Namespace(**{**vars(point), "backends": left[::-1] if trial % 2 else left})
                    yield Job(named, trial, line.where)


def _isolated(args: Namespace) -> bool:
    return bool(args.isolate or args.timeout)


class Runs:
    """Runs jobs in this process, each backend in its own process, or each trial in its own process."""

    def __init__(self, run_id: str, emit: Callable[[Record], None], tally: Tally) -> None:
        self.run_id, self.emit, self.tally = run_id, emit, tally
        self._worker: Worker | None = None
        self._trial = 0
        self._lost = False  # a kernel broke the CUDA context of this process

    def run(self, job: Job) -> set[str]:
        """Runs a job. Returns the statuses of its records, and `failed` after an error outside of any backend."""
        before, broken = len(self.tally.records), self.tally.broken
        if self._lost or _isolated(job.args) or job.args.trials > 1 or count(job.args) > 1:
            self._elsewhere(job, job.args.backends)
        else:
            self._here(job)
        trouble = {"failed"} if self.tally.broken > broken else set()
        return trouble | {r["status"] for r in self.tally.records[before:]}

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _here(self, job: Job) -> None:
        before = len(self.tally.records)
        try:
            CaseRun(job.args, self.run_id, job.trial, self.emit).run()
        except MismatchError as error:
            say("ERROR", str(error).removeprefix("[ERROR] "))
        except ContextLostError:
            self._lost = True
            say("WARNING", "the CUDA context of this process is lost; the remaining backends run in another process")
            names = asked_backends(job.args)[len(self.tally.records) - before :]
            self._elsewhere(job, names)
        except OutputError:  # no row of this run can be kept
            raise
        except Exception as error:
            self.tally.broken += 1
            say("ERROR", f"Error running test: {job.where}: {job.args.routine}")
            say("ERROR", f"Error: {type(error).__name__}: {error}")

    def _elsewhere(self, job: Job, names: Sequence[str]) -> None:
        """Runs the backends in worker processes; a process that dies gets a record with the reason."""
        left = list(names)
        while left:
            batch = left[:1] if _isolated(job.args) else left
            point = Namespace(**{**vars(job.args), "backends": batch})
            before = len(self.tally.records)
            end = self._worker_for(job).do(point, self.run_id, job.trial, self.emit)
            answered = len(self.tally.records) - before
            if end.kind in ("crashed", "timeout") and answered < len(batch):
                say("ERROR", f"{left[answered]} for routine {point.routine}: {end.reason}")
                blank = CaseRun(point, self.run_id, job.trial, lambda found: None).blank(left[answered])
                self.emit(blank | {"status": end.kind, "reason": end.reason})
                answered += 1
            elif end.kind == "done":
                answered = len(batch)  # fewer records: a mismatch ended the case
            left = left[answered:]

    def _worker_for(self, job: Job) -> Worker:
        worker = self._worker
        if worker is None or not worker.alive or _isolated(job.args) or self._trial != job.trial:
            self.close()
            worker = self._worker = Worker()
            self._trial = job.trial
        return worker


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
