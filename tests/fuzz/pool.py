"""Runs cases in forked workers: a crash, a hang or a sanitizer's report is attributed to its case."""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import os
import re
import selectors
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

Record = dict[str, Any]
Work = Callable[[str, Callable[[Record], None]], Record]  # a case, and what announces it before its call
BATCH = 400  # cases of one worker; a fresh one has a clean heap
_REPORT = re.compile(r"ERROR: AddressSanitizer: [^\n]*|[^\s:]+:\d+:\d+: runtime error: [^\n]*")
_FRAME = re.compile(r"#\d+ 0x\w+ in ([^\n]*?(?:csrc|include/fi)/[^\s:]+:\d+)")


def sanitizer_report(text: str) -> str | None:
    """The first line of a report, and the first line of code of fi-kernels in its stack."""
    found = _REPORT.search(text)
    if not found:
        return None
    frame = _FRAME.search(text, found.start())
    head = re.sub(r"0x[0-9a-f]+", "0x...", found.group())
    return f"{head} in {frame.group(1)[-160:]}" if frame else head


class _Worker:
    """A forked process that runs a batch of cases. Each case is announced in the pipe before it begins."""

    def __init__(self, cases: list[str], work: Work) -> None:
        self.rest = deque(cases)
        self.now: Record | None = None
        self.since, self.used = time.monotonic(), 0.0
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self.read, write = os.pipe()
        self.text = b""
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.close(self.read)
                faulthandler.disable()  # of a test runner, which would write to its own file
                os.dup2(self.errors.fileno(), 2)
                os.dup2(self.errors.fileno(), 1)
                self._run(cases, work, write)
                status = 0
            finally:
                os._exit(status)
        os.close(write)

    def _run(self, cases: list[str], work: Work, write: int) -> None:
        def tell(record: Record, over: bool = False) -> None:
            os.write(write, f"{json.dumps([over, record], default=str)}\n".encode())

        seen = 0
        for case in cases:
            tell({"case": case})
            try:
                record = work(case, tell)
            except Exception as error:  # of the fuzz itself
                record = {"case": case, "outcome": "broken case", "text": f"{type(error).__name__}: {error}"}
            size = os.fstat(2).st_size
            if size > seen and (report := sanitizer_report(os.pread(2, size - seen, seen).decode(errors="replace"))):
                record |= {"outcome": "sanitizer", "text": report}
            seen = size
            tell(record, over=True)

    def lines(self) -> Iterator[tuple[bool, Record]] | None:
        """What has come through the pipe: whether a case is over, and its record. None at the end."""
        data = os.read(self.read, 1 << 16)
        if not data:
            return None
        *lines, self.text = (self.text + data).split(b"\n")
        return (json.loads(line) for line in lines)

    def is_late(self, seconds: float) -> bool:
        """Whether the case has used so much of the processor, or ten times as long passed, as on a busy machine."""
        passed = time.monotonic() - self.since
        return passed > seconds and (passed > 10 * seconds or self._cpu() - self.used > seconds)

    def _cpu(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def begin(self) -> None:
        """A case begins."""
        self.rest.popleft()
        self.since, self.used = time.monotonic(), self._cpu()

    def end(self, kill: bool) -> Record | None:
        """Waits; the record of the case that ended the process, if one did."""
        if kill:
            os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        os.close(self.read)
        text = os.pread(self.errors.fileno(), 1 << 20, 0).decode(errors="replace")
        self.errors.close()
        if self.now is None:
            return None
        if kill:
            return self.now | {"outcome": "hang", "text": "no end in time"}
        how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit status {os.WEXITSTATUS(status)}"
        report = sanitizer_report(text)
        tail = " | ".join(text.strip().splitlines()[-3:])[:300]
        return self.now | {"outcome": "sanitizer" if report else "crash", "text": report or f"{how}: {tail}"}


def run(cases: Iterable[str], work: Work, *, jobs: int, seconds: float, done: Callable[[Record], bool]) -> None:
    """Runs every case until `done`, which takes each record, returns False. seconds: the longest time of a case."""
    source, redo, go = iter(cases), deque[list[str]](), True
    workers: dict[int, _Worker] = {}

    def batch() -> list[str]:
        if redo:
            return redo.popleft()
        return list(itertools.islice(source, BATCH))

    def report(record: Record) -> None:
        nonlocal go
        go = done(record) and go

    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        stack.callback(lambda: [worker.end(True) for worker in workers.values()])
        while True:
            while go and len(workers) < jobs and (now := batch()):
                worker = _Worker(now, work)
                workers[worker.read] = worker
                selector.register(worker.read, selectors.EVENT_READ)
            if not workers or not go:
                return
            ready = {key.fd for key, _ in selector.select(0.5)}
            for fd, worker in list(workers.items()):
                lines = worker.lines() if fd in ready else iter(())
                for over, record in lines or ():
                    if over:
                        worker.now = None
                        report(record)
                        continue
                    if worker.now is None:
                        worker.begin()
                    worker.now = record
                late = worker.now is not None and worker.is_late(seconds)
                if lines is None or late:
                    selector.unregister(fd)
                    del workers[fd]
                    if lost := worker.end(kill=late):
                        report(lost)
                    if worker.rest:
                        redo.append(list(worker.rest))
