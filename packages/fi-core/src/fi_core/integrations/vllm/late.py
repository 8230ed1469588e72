"""The log names kernels that fi compiles behind vLLM's warm-up, as vLLM does for those of Triton."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
from typing import Any

# vLLM's own monitors of compilers, of 0.24 and of 0.33: `activate` ends the warm-up of a worker.
MONITORS = ("vllm.triton_utils.jit_monitor", "vllm.utils.jit_monitor")
_log = logging.getLogger("vllm.plugins.fi_core")


def register() -> None:
    """Replaces `activate` of the monitor; the log names MONITORS where vLLM has none of them."""
    for name in MONITORS:
        with contextlib.suppress(ModuleNotFoundError, AttributeError):  # of another version of vLLM
            monitor: Any = importlib.import_module(name)
            monitor.activate = _followed(monitor.activate)
            return
    _log.info("fi does not name kernels that compile late: vLLM has none of %s", ", ".join(MONITORS))


def _followed(own: Any) -> Any:
    @functools.wraps(own)
    def activate(**options: Any) -> None:
        from fi_core import ahead  # 0.2 s of a process that makes no layer

        own(**options)
        ahead.serving()

    return activate
