"""Tiny device kernels: one notes the time and the clock of SM 0, one holds the stream until the host lets go, and one
reads memory as fast as it can.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

NAMES = ("fi_bench_mark", "fi_bench_hold", "fi_bench_read")
HOLD_LIMIT_NS = 200_000_000  # a held stream continues by itself after this time

SOURCE = r"""
__device__ unsigned long long fi_now() {
  unsigned long long t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
extern "C" __global__ void fi_bench_mark(unsigned long long* out) {
  unsigned sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  if (sm == 0) {  // clock64 counts per SM: always read the same one
    out[0] = fi_now();
    out[1] = clock64();
  }
}
extern "C" __global__ void fi_bench_hold(const volatile int* released, int ticket, unsigned long long limit) {
  const unsigned long long start = fi_now();
  while (*released < ticket && fi_now() - start < limit) {
  }
}
extern "C" __global__ void __launch_bounds__(512) fi_bench_read(const uint4* data, long long n, unsigned* out) {
  const long long step = (long long)gridDim.x * blockDim.x;
  long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  unsigned found = 0;
  for (; i + 3 * step < n; i += 4 * step) {  // four loads under way per thread
    const uint4 a = data[i], b = data[i + step], c = data[i + 2 * step], d = data[i + 3 * step];
    found |= (a.x & b.y & c.z & d.w) ^ (a.w & b.x & c.y & d.z) ^ (a.y & b.z & c.w & d.x) ^ (a.z & b.w & c.x & d.y);
  }
  for (; i < n; i += step) found |= data[i].x & data[i].y & data[i].z & data[i].w;
  if (found == 0xffffffffu) out[0] = 1;  // keeps the compiler from removing the loads
}
"""
_READ_THREADS = 512


class DriverError(RuntimeError):
    """The CUDA driver refused."""


def _check(status: int, what: str) -> None:
    if status:
        raise DriverError(f"{what} failed with CUresult {status}")


def compile_kernels(capability: tuple[int, int]) -> bytes:
    """The cubin; needs NVRTC and no GPU."""
    from fi_core.runtime.build.nvrtc import compile_cubin

    return compile_cubin(SOURCE, "fi_bench", [f"--gpu-architecture=sm_{capability[0]}{capability[1]}"]).image


class Kernels:
    """The kernels of a driver's library, by name, for a device of so many SMs; `released` is pinned host memory."""

    def __init__(
        self, cuda: ctypes.CDLL, functions: Mapping[str, ctypes.c_void_p], sms: int, released: torch.Tensor
    ) -> None:
        self._cuda, self._functions, self._blocks, self._released = cuda, functions, 2 * sms, released
        self._ticket = 0

    def _launch(self, name: str, blocks: int, *arguments: Any, threads: int = 1) -> None:
        import torch

        pointers = (ctypes.c_void_p * len(arguments))(
            *(ctypes.cast(ctypes.pointer(a), ctypes.c_void_p) for a in arguments)
        )
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        status = self._cuda.cuLaunchKernel(
            self._functions[name], blocks, 1, 1, threads, 1, 1, 0, stream, pointers, None
        )
        _check(status, f"launch of {name}")

    def mark(self, slot: torch.Tensor) -> None:
        """Write (globaltimer ns, clock64) into two int64 on the device when the stream gets here."""
        self._launch("fi_bench_mark", self._blocks, ctypes.c_void_p(slot.data_ptr()))

    def hold(self) -> None:
        """Blocks the stream until `release`, so that the next kernels run without launch gaps."""
        self._ticket += 1
        self._launch(
            "fi_bench_hold",
            1,
            ctypes.c_void_p(self._released.data_ptr()),
            ctypes.c_int(self._ticket),
            ctypes.c_ulonglong(HOLD_LIMIT_NS),
        )

    def read(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Read all of `data`, whose size is a multiple of 16 bytes; `out` is some int32 on the device."""
        arguments = (data.data_ptr(), data.nbytes // 16, out.data_ptr())
        kinds = (ctypes.c_void_p, ctypes.c_longlong, ctypes.c_void_p)
        self._launch(
            "fi_bench_read",
            2 * self._blocks,
            *(kind(a) for kind, a in zip(kinds, arguments, strict=True)),
            threads=_READ_THREADS,
        )

    def release(self) -> None:
        self._released[0] = self._ticket


@functools.cache
def kernels(device: torch.device) -> Kernels:
    """Loads the kernels into the current context of a device."""
    import torch

    torch.zeros(1, device=device)  # makes the context
    properties, cuda = torch.cuda.get_device_properties(device), ctypes.CDLL("libcuda.so.1")
    image, module = compile_kernels((properties.major, properties.minor)), ctypes.c_void_p()
    _check(cuda.cuModuleLoadData(ctypes.byref(module), image), "cuModuleLoadData")
    functions = {name: ctypes.c_void_p() for name in NAMES}
    for name, function in functions.items():
        _check(cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), name)
    released = torch.zeros(1, dtype=torch.int32).pin_memory()
    return Kernels(cuda, functions, properties.multi_processor_count, released)


def megahertz(begin: Sequence[int], end: Sequence[int]) -> float:
    """Mean SM clock between two marks; 0 where SM 0 missed one."""
    (t0, c0), (t1, c1) = begin, end
    return 1e3 * (c1 - c0) / (t1 - t0) if t0 and t1 > t0 else 0.0
