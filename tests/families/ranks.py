"""Runs a function on several processes that form a group of torch.distributed."""

from __future__ import annotations

import datetime
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _rank(
    rank: int, function: Callable[..., None], world: int, device: str, folder: str, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    place = torch.device("cpu") if device == "cpu" else torch.device("cuda", rank % torch.cuda.device_count())
    if device == "one gpu":
        place = torch.device("cuda", 0)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world,
        timeout=datetime.timedelta(seconds=150),
    )  # fmt: skip
    try:
        function(rank, world, place, *arguments)
    except BaseException:
        Path(folder, f"error{rank}").write_text(traceback.format_exc())
        os._exit(1)  # the others may wait for this rank
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(
    function: Callable[..., None], world: int, device: str, *arguments: Any, killed: tuple[int, ...] = ()
) -> None:
    """Calls `function(rank, world, device, *arguments)` on each rank; raises the errors of all ranks.

    device: "cpu", "gpus" (one for each rank, in turn), or "one gpu" for all ranks. killed: ranks that end by SIGKILL.
    """
    root = str(Path(__file__).parents[2])  # pytest may know the function's module by its path from there
    if root not in sys.path:
        sys.path.append(root)
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("forkserver" if device == "cpu" else "spawn")
        if device == "cpu":
            context.set_forkserver_preload(["torch"])  # once, not in each rank
        given = [(rank, function, world, device, folder, arguments) for rank in range(world)]
        processes = [context.Process(target=_rank, args=a, daemon=True) for a in given]
        for process in processes:
            process.start()
        until = time.monotonic() + 300  # all kernels may have to be compiled first, on a busy machine
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        errors = [path.read_text() for path in sorted(Path(folder).glob("error*"))]
    expected = [-9 if rank in killed else 0 for rank in range(world)]
    assert not errors and codes == expected, "\n".join([f"exit codes {codes}, None: hangs", *errors])
