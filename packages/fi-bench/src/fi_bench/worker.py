"""Worker processes that run cases: a crash, a hang or a lost CUDA context costs one row."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fi_bench import ranks, record
from fi_bench.console import said_to, say
from fi_bench.errors import OK, ContextLostError, MismatchError
from fi_bench.runner import CaseRun

Record = record.Record
_START_SECONDS = 300.0  # for a new process to import torch, which is no part of a case


class End(NamedTuple):
    """How a task ended: done, lost (the CUDA context; its record exists), crashed or timeout (a record is missing)."""

    kind: str
    reason: str = ""


class Worker:
    """A process that runs tasks one after another. Tasks go to its stdin; records and printed lines come back through
    a pipe."""

    def __init__(self) -> None:
        answers, theirs = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fi_bench", "_child", str(theirs)],
            stdin=subprocess.PIPE,
            bufsize=0,
            pass_fds=(theirs,),
            start_new_session=True,
        )
        os.close(theirs)
        self._answers, self._unread, self.alive, self._started = answers, b"", True, False

    def do(self, args: Namespace, run_id: str, trial: int, emit: Callable[[Record], None]) -> End:
        """One case with all backends of `args`; the time limit holds for each backend."""
        task = {"args": vars(args), "run_id": run_id, "trial": trial}
        try:
            self._send(task)
            while True:
                answer = self._receive(args.timeout if self._started else _START_SECONDS)
                if answer is None:
                    return self._died()
                self._started = True
                if "started" in answer:
                    continue
                if "said" in answer:
                    say(*answer["said"])
                    continue
                if "record" in answer:
                    emit(answer["record"])
                    continue
                end = End(answer["end"], answer.get("reason", ""))
                if end.kind == "lost":
                    self.close()
                return end
        except TimeoutError:
            self._kill()
            return End("timeout", f"not done after {args.timeout:g} s")
        except BaseException:  # such as Ctrl-C: the process has a session of its own and does not receive it
            self._kill()
            raise

    def close(self) -> None:
        """Ends the process."""
        if self.alive:
            self._part()

    def _part(self) -> int:
        """Closes both pipes, which ends the process, and waits for it."""
        assert self._process.stdin is not None
        self.alive = False
        self._process.stdin.close()
        os.close(self._answers)
        return self._process.wait()

    def _send(self, task: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead: the next read reports that
            self._process.stdin.write(json.dumps(task).encode() + b"\n")

    def _receive(self, timeout: float | None) -> dict[str, Any] | None:
        """The next answer; None if the process ended."""
        end = time.monotonic() + timeout if timeout else None
        while b"\n" not in self._unread:
            if not select.select([self._answers], [], [], end and max(end - time.monotonic(), 0))[0]:
                raise TimeoutError
            more = os.read(self._answers, 1 << 20)
            if not more:
                return None
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _died(self) -> End:
        with contextlib.suppress(ProcessLookupError):  # ranks that it started
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._part()
        if code < 0:
            return End("crashed", f"killed by {signal.Signals(-code).name}")
        return End("crashed", f"ended with exit code {code} and no record")

    def _kill(self) -> None:
        if self.alive:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._part()


def serve(words: Sequence[str]) -> int:
    """The process of a Worker: a task a line until stdin ends."""
    import torch  # noqa: F401

    with open(int(words[0]), "w", encoding="utf-8") as answers:

        def answer(**found: Any) -> None:
            answers.write(record.dumps(found) + "\n")
            answers.flush()

        answer(started=True)
        with said_to(lambda kind, text: answer(said=[kind, text])):
            for line in iter(sys.stdin.readline, ""):
                task = json.loads(line)
                args, end = Namespace(**task["args"]), {"end": "done"}
                try:
                    with ranks.started(args, line):
                        CaseRun(args, task["run_id"], task["trial"], lambda found: answer(record=found)).run()
                except MismatchError:
                    pass  # its record is written
                except ContextLostError as error:
                    end = {"end": "lost", "reason": str(error)}
                answer(**end)
    return OK
