"""What the NVIDIA driver says without torch and without a context: its version and the GPUs that are visible."""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

LIBRARY = "libcuda.so.1"
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_COMPUTE_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


class Gpu(NamedTuple):
    number: int
    name: str
    capability: tuple[int, int]


class Driver(NamedTuple):
    """`version` is the newest CUDA that it runs; `problem` is why it shows no GPU, None where all is well."""

    version: tuple[int, int]
    gpus: tuple[Gpu, ...]
    problem: str | None = None


@functools.cache
def driver() -> Driver | None:
    """The driver of this machine, None if there is none. GPUs are those that CUDA_VISIBLE_DEVICES leaves."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    number = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(number))
    version = number.value // 1000, number.value % 1000 // 10
    status = library.cuInit(0)
    if status == _NO_DEVICE:
        return Driver(version, ())
    if status:
        text = ctypes.c_char_p()
        library.cuGetErrorString(status, ctypes.byref(text))
        return Driver(version, (), f"cuInit failed with {status}: {(text.value or b'unknown error').decode()}")
    library.cuDeviceGetCount(ctypes.byref(number))
    return Driver(version, tuple(_gpu(library, index) for index in range(number.value)))


def _gpu(library: ctypes.CDLL, index: int) -> Gpu:
    device, value, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
    library.cuDeviceGet(ctypes.byref(device), index)
    library.cuDeviceGetName(name, len(name), device)
    capability = []
    for attribute in _COMPUTE_CAPABILITY:
        library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        capability.append(value.value)
    return Gpu(index, name.value.decode(errors="replace"), (capability[0], capability[1]))
