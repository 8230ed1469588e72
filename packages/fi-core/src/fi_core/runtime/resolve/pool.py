"""Background threads for compilers: as many at once as cores and memory allow, and none while there is no work."""

from __future__ import annotations

import atexit
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, NamedTuple

from fi_core.runtime.env import env

_BYTES = 2 << 30  # R21: a compiler must not need more


def limit() -> int:
    """Compilers at once: FI_JIT_PREBUILD_MAX_JOBS, MAX_JOBS, else by cores and memory."""
    chosen = env.jit_prebuild_max_jobs or env.max_jobs
    if chosen:
        return chosen
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory // _BYTES))


class _Job(NamedTuple):
    work: Callable[[], Any]
    future: Future[Any]

    def run(self) -> None:
        try:
            self.future.set_result(self.work())
        except BaseException as error:  # it surfaces where the result is asked for
            self.future.set_exception(error)


class Pool:
    """Jobs by name. A job runs once, on a thread of the pool or in the first caller that needs its result.

    Threads end when no job waits. The process waits at its exit for jobs that run, because compilers may not be stopped
    in the middle, and drops the others.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._process = limit, os.getpid()
        self._lock = threading.Lock()
        self._jobs: dict[Hashable, _Job] = {}  # unfinished, or failed and not asked for
        self._queue: deque[Hashable] = deque()
        self._threads: set[threading.Thread] = set()

    def start(self, name: Hashable, work: Callable[[], Any]) -> Future[Any]:
        """Lets a thread run the work, unless a job of that name exists; returns the future of the job."""
        with self._lock:
            if name not in self._jobs:
                self._jobs[name] = _Job(work, Future())
                self._queue.append(name)
                if len(self._threads) < self._limit:
                    thread = threading.Thread(target=self._serve, name="fi-compile", daemon=True)
                    self._threads.add(thread)
                    thread.start()
            return self._jobs[name].future

    def result(self, name: Hashable, work: Callable[[], Any]) -> Any:
        """The result of the job of that name. A job that no thread has begun runs in the caller. Raises its error."""
        with self._lock:
            job = self._jobs.get(name)
            mine = job is None or name in self._queue
            if job is None:
                job = self._jobs[name] = _Job(work, Future())
            elif mine:
                self._queue.remove(name)
        try:
            if mine:
                job.run()
            return job.future.result()
        finally:
            self._forget(name, job)

    def waiting(self) -> int:
        """The number of jobs that have not finished."""
        return sum(not job.future.done() for job in list(self._jobs.values()))

    def drain(self) -> None:
        """Waits until no job waits and none runs."""
        for thread in list(self._threads):
            thread.join()

    def drop(self) -> None:
        """Cancels the jobs that no thread has begun, waits for the others, and forgets these and all that failed.

        A job that another thread starts meanwhile stays.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            while self._queue:
                future = self._jobs.pop(self._queue.popleft()).future
                future.cancel()
                future.set_running_or_notify_cancel()  # else `as_completed` of another thread waits for ever
        self.drain()
        with self._lock:
            self._jobs = {name: job for name, job in self._jobs.items() if not job.future.done()}

    def _forget(self, name: Hashable, job: _Job) -> None:
        with self._lock:
            if self._jobs.get(name) is job:
                del self._jobs[name]

    def _serve(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._threads.discard(threading.current_thread())
                    return
                name = self._queue.popleft()
                job = self._jobs[name]
            job.run()
            if job.future.exception() is None:
                self._forget(name, job)


@functools.cache
def pool() -> Pool:
    """The pool of this process; a forked child has its own, because threads do not outlive a fork."""
    made = Pool(limit())
    atexit.register(made.drop)
    return made


os.register_at_fork(after_in_child=pool.cache_clear)
