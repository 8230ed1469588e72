"""Streams on disjoint sets of SMs of a GPU: CUDA's green contexts, through the driver (12.4 or later)."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fi_core.compat.backend import cuda_index
from fi_core.runtime.build.driver import LIBRARY
from fi_core.runtime.errors import LibraryError
from fi_core.utils import round_up

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceResource", "SmResource", "split_device_green_ctx", "split_device_green_ctx_by_sm_count"]

_SM = 1  # CU_DEV_RESOURCE_TYPE_SM
_DEFAULT_STREAM = 1  # CU_GREEN_CTX_DEFAULT_STREAM
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_STEP = 8  # SMs by which every GPU can be divided, where the driver does not tell: the field is newer than CUDA 12.4


class SmResource(NamedTuple):
    smCount: int


class DeviceResource(NamedTuple):
    """The SMs of one group; `resource.sm.smCount` is their number."""

    sm: SmResource


class _Resource(ctypes.Structure):
    """CUdevResource: a type, 92 bytes of padding, 48 of content: the SMs, the least of a part, the step of its size."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("padding", ctypes.c_ubyte * 92),
        ("sm_count", ctypes.c_uint),
        ("least", ctypes.c_uint),
        ("step", ctypes.c_uint),
        ("content", ctypes.c_ubyte * 36),
    )


@functools.cache
def driver_library() -> Any:
    try:
        library = ctypes.CDLL(LIBRARY)
        library.cuGreenCtxCreate  # noqa: B018 (raises where the driver is older)
    except (OSError, AttributeError) as error:
        raise LibraryError(f"green contexts: an NVIDIA driver for CUDA 12.4 or later is required; {error}") from None
    return library


def _call(name: str, *arguments: Any) -> None:
    status = getattr(driver_library(), name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        driver_library().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{name} failed with {status}: {(text.value or b'unknown error').decode()}")


def _split(source: _Resource, units: int, size: int) -> tuple[list[_Resource], _Resource]:
    """Units of so many SMs, and the SMs that remain."""
    count, remaining, found = ctypes.c_uint(units), _Resource(), (_Resource * units)()
    _call(
        "cuDevSmResourceSplitByCount",
        found,
        ctypes.byref(count),
        ctypes.byref(source),
        ctypes.byref(remaining),
        ctypes.c_uint(0),
        ctypes.c_uint(size),
    )
    if count.value != units:
        raise RuntimeError(
            f"sm_counts: {source.sm_count} SMs have {count.value} units of {size}; {units} are required in all"
        )
    return list(found), remaining


def _stream(parts: Sequence[_Resource], index: int) -> torch.cuda.ExternalStream:
    """A stream whose kernels run on these SMs; it lives as long as the process."""
    import torch

    descriptor, context, stream, device = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    array = (_Resource * len(parts))(*parts)
    _call("cuDeviceGet", ctypes.byref(device), index)
    _call("cuDevResourceGenerateDesc", ctypes.byref(descriptor), array, ctypes.c_uint(len(parts)))
    _call("cuGreenCtxCreate", ctypes.byref(context), descriptor, device, ctypes.c_uint(_DEFAULT_STREAM))
    _call("cuGreenCtxStreamCreate", ctypes.byref(stream), context, ctypes.c_uint(_NON_BLOCKING), 0)
    return torch.cuda.ExternalStream(stream.value or 0, device=torch.device("cuda", index))


def _all(dev: torch.device | str) -> tuple[int, _Resource]:
    import torch

    index = cuda_index(dev, "split_device_green_ctx")
    torch.cuda.init()
    with torch.cuda.device(index):
        torch.cuda.current_stream(index).synchronize()  # the primary context exists
    device, found = ctypes.c_int(), _Resource()
    _call("cuDeviceGet", ctypes.byref(device), index)
    _call("cuDeviceGetDevResource", device, ctypes.byref(found), _SM)
    return index, found


def split_device_green_ctx(
    dev: torch.device | str, num_groups: int, min_count: int
) -> tuple[list[torch.cuda.ExternalStream], list[DeviceResource]]:
    """Divides the SMs of a GPU into groups of one size, and what remains.

    Args:
        dev: a CUDA device.
        num_groups: number of groups.
        min_count: SMs of a group; it is rounded up to what the GPU can divide (8 on sm_90).

    Returns:
        (streams, resources): those of each group, then those of the remaining SMs if there are any. A kernel on a
        stream runs on the SMs of its group only.

    Raises:
        ValueError: dev is no CUDA device, or a number is below 1.
        RuntimeError: The GPU has too few SMs; or the driver refuses, with its message.
        LibraryError: The driver is older than CUDA 12.4.
    """
    if num_groups < 1 or min_count < 1:
        raise ValueError(f"num_groups, min_count: at least 1 each is required; got {num_groups} and {min_count}")
    return split_device_green_ctx_by_sm_count(dev, [min_count] * num_groups)


def split_device_green_ctx_by_sm_count(
    dev: torch.device | str, sm_counts: Sequence[int]
) -> tuple[list[torch.cuda.ExternalStream], list[DeviceResource]]:
    """Divides the SMs of a GPU into groups of these sizes, and what remains.

    The driver divides a GPU only once and into equal units: a unit is the greatest common divisor of the sizes, and a
    group is made of several. An H200 has 132 SMs but 15 units of 8, because a unit lies within one processing cluster.

    Args:
        dev: a CUDA device.
        sm_counts: SMs of each group; each is rounded up to what the GPU can divide: 8 from sm_90 on.

    Returns:
        As `split_device_green_ctx`.

    Raises:
        ValueError: dev is no CUDA device, or sm_counts is empty or has a number below 1.
        RuntimeError: The GPU has too few SMs; or the driver refuses, with its message.
        LibraryError: The driver is older than CUDA 12.4.
    """
    if not sm_counts or min(sm_counts) < 1:
        raise ValueError(f"sm_counts: numbers from 1 on, at least one, are required; got {list(sm_counts)}")
    index, whole = _all(dev)
    least, step = (whole.least, whole.step) if whole.step else (_STEP, _STEP)
    sizes = [max(least, round_up(count, step)) for count in sm_counts]
    unit = math.gcd(*sizes)
    units, remaining = _split(whole, sum(sizes) // unit, unit)
    groups = [[units.pop() for _ in range(size // unit)] for size in sizes]
    if remaining.sm_count:
        groups.append([remaining])
    resources = [DeviceResource(SmResource(sum(part.sm_count for part in group))) for group in groups]
    return [_stream(group, index) for group in groups], resources
