"""Skips a test that is marked gpu, sm90 or multigpu on a machine without such a device; `nox -s gpu` insists on one.
Where workers share the cores, most tests compute on one thread. Each test draws the same numbers, alone and in a row.
"""

from __future__ import annotations

import os
import sys
import zlib

import pytest
from hypothesis import settings

settings.load_profile("ci")  # the same examples in each run, without a deadline: a busy machine is not slow code

IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ


def _missing(item: pytest.Item) -> str | None:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return "needs a CUDA device"
    if item.get_closest_marker("multigpu") and count < 2:
        return f"needs two CUDA devices, this machine has {count}"
    if item.get_closest_marker("sm90") and torch.cuda.get_device_capability()[0] != 9:
        return "needs a Hopper device"
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
        if IS_WORKER:  # two threads of each worker would take a third more time
            torch.set_num_threads(2 if zlib.crc32(item.nodeid.encode()) % 4 == 0 else 1)
    if item.get_closest_marker("gpu") and (reason := _missing(item)):
        pytest.skip(reason)
