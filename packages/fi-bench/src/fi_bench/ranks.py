"""The processes of a collective: the worker of a case is rank 0, and starts the others on this host."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import subprocess
import sys
import tempfile
import threading
from argparse import Namespace
from collections.abc import Iterator, Sequence

from fi_bench.console import said_to
from fi_bench.errors import FAILED, OK, ContextLostError, MismatchError
from fi_bench.measure.ranks import count
from fi_bench.runner import CaseRun, asked_backends, device_of

_TIMEOUT = datetime.timedelta(seconds=120)  # of torch's collectives; a kernel may have to be compiled first


@contextlib.contextmanager
def joined(args: Namespace, rank: int, store: str) -> Iterator[None]:
    """Inside the block this process is a rank of torch.distributed's world."""
    import torch
    import torch.distributed as dist

    on_gpu = device_of(args, asked_backends(args)) == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // count(args)))
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=count(args), timeout=_TIMEOUT)
    mismatch = None
    try:
        try:
            yield
        except MismatchError as error:  # which every rank raises
            mismatch = error
        dist.barrier()
    finally:
        dist.destroy_process_group()
    if mismatch:
        raise mismatch


@contextlib.contextmanager
def started(args: Namespace, task: str) -> Iterator[None]:
    """Inside the block this process is rank 0, and the others run the same task. A process for one rank stays alone."""
    if count(args) == 1:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        command = [sys.executable, "-m", "fi_bench", "_rank"]
        others = [
            subprocess.Popen([*command, str(rank), store], stdin=subprocess.PIPE, text=True)
            for rank in range(1, count(args))
        ]
        for other in others:
            assert other.stdin is not None
            other.stdin.write(task)
            other.stdin.close()
            threading.Thread(target=_watch, args=(other,), daemon=True).start()
        try:
            with joined(args, 0, store):
                yield
        finally:
            for other in others:
                other.wait()


def _watch(other: subprocess.Popen[str]) -> None:
    """Ends this process with a rank that died: the others would wait for it."""
    if other.wait() != OK:
        os._exit(FAILED)


def serve(words: Sequence[str]) -> int:
    """The process of a rank behind the first: the task of stdin. Rank 0 prints and keeps the results."""
    rank, store = int(words[0]), words[1]
    task = json.loads(sys.stdin.read())
    args = Namespace(**task["args"])
    silent = contextlib.suppress(MismatchError, ContextLostError)  # rank 0 reports them
    with silent, said_to(lambda kind, text: None), joined(args, rank, store):
        CaseRun(args, task["run_id"], task["trial"], lambda found: None).run()
    return OK
