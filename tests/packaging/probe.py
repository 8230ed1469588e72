"""Runs in a clean environment: binds every prebuilt kernel, or those whose names begin so, and prints their origins.

Besides, it reports each process started, each socket opened, each file opened for writing and each load of NVRTC.
"""

from __future__ import annotations

import json
import os
import sys

EVENTS: list[str] = []
STARTS = ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "os.system", "socket.connect", "os.mkdir")


def watch(event: str, arguments: tuple[object, ...]) -> None:
    if event in STARTS:
        EVENTS.append(f"{event} {arguments[:2]}")
    elif event == "ctypes.dlopen" and "nvrtc" in str(arguments[0]):
        EVENTS.append(f"{event} {arguments[0]}")
    elif event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        EVENTS.append(f"{event} {arguments[0]}")


def main() -> None:
    sys.addaudithook(watch)
    import fi_core
    from fi_core import aot
    from fi_core.registry import ops
    from fi_core.runtime.build import toolchain
    from fi_core.runtime.launch.kernel import bind

    toolchain.cuda_home = lambda: None  # type: ignore[assignment]  # this machine may have a CUDA toolkit
    kernels: dict[str, object] = {}
    specs = [spec for op in ops().values() for target in aot.targets() for spec in aot.specs(op, target)]
    for spec in specs:
        if spec.name.startswith(tuple(sys.argv[1:]) or ""):
            try:
                kernels[spec.name] = {role: found.origin for role, found in bind(spec).origins.items()}
            except RuntimeError as error:
                kernels[spec.name] = f"{type(error).__name__}: {error}"
    print(json.dumps({"kernels": kernels, "events": EVENTS, "from": fi_core.__file__}))


main()
