"""Launches the kernels of stream.cu, which read the bytes of a case once and compute nothing."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

import fi_kernels
from fi_core.runtime.build import nvrtc

_GROUPS, _SEGMENTS = 6, 512
_CTAS = 132
_RING = 200 * 1024  # bytes of shared memory
_CHUNK = 16 * 1024
_LOADS_CHUNK = 4096  # of a warp: eight loads of 16 bytes by 32 lanes
_EVICT_FIRST, _EVICT_NORMAL = 0x12F0000000000000, 0x1000000000000000
_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Read(NamedTuple):
    """What a stream reads of a tensor: all of it, or the matrices of its first dimension with these places."""

    tensor: torch.Tensor
    places: Sequence[int] | None = None

    @property
    def segments(self) -> int:
        return 1 if self.places is None else len(self.places)

    @property
    def segment_bytes(self) -> int:
        """A multiple of 16 below what the tensor has."""
        matrix = self.tensor if self.places is None else self.tensor[0]
        return matrix.numel() * matrix.element_size() // 16 * 16


class _Group(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_uint64),
        ("stride", ctypes.c_int64),
        *((name, ctypes.c_uint32) for name in ("bytes", "count", "chunks", "gathered")),
    )


class _Params(ctypes.Structure):
    _fields_ = (
        ("groups", _Group * _GROUPS),
        ("out", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("out_bytes", "num_groups", "num_chunks", "chunk", "range", "stages")),
        ("policy", ctypes.c_uint64),
        ("never", ctypes.c_uint32),
        ("index", ctypes.c_uint16 * _SEGMENTS),
    )


def _check(status: int, call: str) -> None:
    if status:
        raise RuntimeError(f"{call} returned CUDA error {status}")


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def compiled() -> bytes:
    include = Path(fi_kernels.__file__).parent / "include"
    source = Path(__file__).with_suffix(".cu").read_text()
    return nvrtc.compile_cubin(source, "stream", ("-std=c++17", "--gpu-architecture=sm_90a", f"-I{include}")).image


@functools.cache
def _function(name: str) -> ctypes.c_void_p:
    module = _module()
    function = ctypes.c_void_p()
    _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()), "cuModuleGetFunction")
    if name == "stream_bulk":
        _check(_driver().cuFuncSetAttribute(function, _DYNAMIC_SHARED, _RING), "cuFuncSetAttribute")
    return function


@functools.cache
def _module() -> ctypes.c_void_p:
    torch.cuda.current_stream()  # makes the context
    module = ctypes.c_void_p()
    _check(_driver().cuModuleLoadData(ctypes.byref(module), compiled()), "cuModuleLoadData")
    return module


def chunk_of(reads: Sequence[Read], largest: int = _CHUNK) -> int:
    """Bytes of a chunk with which every CTA reads as many chunks."""
    total = sum(r.segments * r.segment_bytes for r in reads)
    rounds = max(1, -(-total // (_CTAS * largest)))
    while True:
        for chunk in range(-(-total // (_CTAS * rounds) // 128) * 128, largest + 1, 128):
            if chunk and sum(r.segments * -(-r.segment_bytes // chunk) for r in reads) <= _CTAS * rounds:
                return chunk
        rounds += 1


def stream(
    reads: Sequence[Read],
    out: torch.Tensor,
    *,
    kernel: str = "stream_bulk",
    evict_first: bool = True,
    ranges: bool = False,
    chunk: int | None = None,
) -> Callable[[], torch.Tensor]:
    """A call that reads once and writes zeros to out, on torch's current stream; it returns out.

    Args:
        reads: at most six tensors, contiguous and 16-byte aligned; all places are the same.
        out: is set to zeros.
        kernel: "stream_bulk", "stream_loads", or "stream_nothing", which only starts.
        evict_first: the policy of L2 for what is read.
        ranges: whether a CTA reads neighbouring chunks rather than every 132nd.
        chunk: bytes of a copy; None lets every CTA read as many chunks.
    """
    if kernel == "stream_loads":
        chunk = _LOADS_CHUNK
    chunk = chunk or chunk_of(reads)
    p = _Params(out=out.data_ptr(), out_bytes=out.numel() * out.element_size() // 16 * 16)
    p.num_groups, p.chunk, p.stages = len(reads), chunk, min(64, _RING // chunk)
    p.policy = _EVICT_FIRST if evict_first else _EVICT_NORMAL
    p.never = 0x9E3779B9
    for group, read in zip(p.groups, reads):
        group.base = read.tensor.data_ptr()
        if not read.tensor.is_contiguous() or group.base % 16:
            raise ValueError("reads: contiguous tensors with 16-byte alignment are required")
        group.bytes, group.count = read.segment_bytes, read.segments
        group.chunks = -(-read.segment_bytes // chunk)
        if read.places is not None:
            group.gathered, group.stride = 1, read.tensor.stride(0) * read.tensor.element_size()
            p.index[: len(read.places)] = list(read.places)
        p.num_chunks += group.count * group.chunks
    p.range = -(-p.num_chunks // _CTAS) if ranges else 0
    threads, shared = {"stream_bulk": (128, _RING), "stream_loads": (1024, 0), "stream_nothing": (128, 0)}[kernel]
    function = _function(kernel)
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(p))
    keep = p, tuple(reads)

    def call() -> torch.Tensor:
        assert keep
        current = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        _check(
            _driver().cuLaunchKernel(function, _CTAS, 1, 1, threads, 1, 1, shared, current, pointers, None),
            "cuLaunchKernel",
        )
        return out

    return call


def forms(reads: Sequence[Read], out: torch.Tensor) -> dict[str, Callable[[], Callable[[], torch.Tensor]]]:
    """The streams of a case by name, and a kernel that only starts."""
    return {
        "stream": lambda: stream(reads, out),
        "stream, normal": lambda: stream(reads, out, evict_first=False),
        "stream, ranges": lambda: stream(reads, out, ranges=True),
        "stream, loads": lambda: stream(reads, out, kernel="stream_loads"),
        "nothing": lambda: stream(reads, out, kernel="stream_nothing"),
    }
