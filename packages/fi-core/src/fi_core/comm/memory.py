"""Memory that the processes of a group share: CUDA IPC between GPUs of a host, POSIX shared memory between CPUs."""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
from typing import TYPE_CHECKING, Any

from fi_core.comm.mnnvl import CommBackend, TorchDistBackend

if TYPE_CHECKING:
    import torch

__all__ = [
    "CudaRTLibrary",
    "SharedMemory",
    "bytes_at",
    "create_shared_buffer",
    "free_shared_buffer",
    "pack_strided_memory",
]


class cudaIpcMemHandle_t(ctypes.Structure):
    """The name of an allocation in other processes, 64 bytes."""

    _fields_ = (("internal", ctypes.c_byte * 64),)


class CudaRTLibrary:
    """The CUDA runtime, as far as memory of several processes needs it; the methods are its functions.

    Args:
        so_file: path of libcudart; None: the one that torch has loaded.

    Raises:
        RuntimeError: No libcudart is loaded, or a call fails; the text is the runtime's.
    """

    def __init__(self, so_file: str | None = None) -> None:
        if so_file is None:
            import torch  # noqa: F401  loads it

            with open("/proc/self/maps") as maps:
                found = [line.split()[-1] for line in maps if "libcudart" in line]
            if not found:
                raise RuntimeError("libcudart is not loaded: a torch with CUDA is required, or pass so_file")
            so_file = found[0]
        self.lib = ctypes.CDLL(so_file)
        self.lib.cudaGetErrorString.restype = ctypes.c_char_p

    def _call(self, name: str, *arguments: Any) -> None:
        self.CUDART_CHECK(getattr(self.lib, name)(*arguments), name)

    def CUDART_CHECK(self, result: int, name: str = "result") -> None:
        """Raises RuntimeError with the text of a result that is not 0, cudaSuccess."""
        if result:
            raise RuntimeError(f"{name}: {self.cudaGetErrorString(result)}")

    def cudaGetErrorString(self, error: int) -> str:
        """The text of a result."""
        text: bytes = self.lib.cudaGetErrorString(error)
        return text.decode()

    def cudaSetDevice(self, device: int) -> None:
        """Makes a device current."""
        self._call("cudaSetDevice", ctypes.c_int(device))

    def cudaDeviceSynchronize(self) -> None:
        """Waits for the current device."""
        self._call("cudaDeviceSynchronize")

    def cudaDeviceReset(self) -> None:
        """Destroys all state of the current device in this process."""
        self._call("cudaDeviceReset")

    def cudaMalloc(self, size: int) -> ctypes.c_void_p:
        """Allocates `size` bytes on the current device."""
        pointer = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(size))
        return pointer

    def cudaFree(self, devPtr: ctypes.c_void_p) -> None:
        """Frees what cudaMalloc returned."""
        self._call("cudaFree", devPtr)

    def cudaMemset(self, devPtr: ctypes.c_void_p, value: int, count: int) -> None:
        """Sets `count` bytes to a value."""
        self._call("cudaMemset", devPtr, ctypes.c_int(value), ctypes.c_size_t(count))

    def cudaMemcpy(self, dst: ctypes.c_void_p, src: ctypes.c_void_p, count: int) -> None:
        """Copies `count` bytes between any two places."""
        self._call("cudaMemcpy", dst, src, ctypes.c_size_t(count), ctypes.c_int(4))  # cudaMemcpyDefault

    def cudaPointerGetAttributes(self, pointer: int) -> tuple[int, int]:
        """The kind of memory at an address (0: not CUDA's, 1: of the host, 2: of a device, 3: managed), its device."""
        attributes = (ctypes.c_int * 64)()  # cudaPointerAttributes, which grows with versions
        self._call("cudaPointerGetAttributes", attributes, ctypes.c_void_p(pointer))
        return attributes[0], attributes[1]

    def cudaDeviceGetPCIBusId(self, device: int) -> str:
        """The address of a device on PCI, as "0000:18:00.0"."""
        text = ctypes.create_string_buffer(32)
        self._call("cudaDeviceGetPCIBusId", text, ctypes.c_int(32), ctypes.c_int(device))
        return text.value.decode()

    def cudaDeviceGetP2PAttribute(self, attribute: int, srcDevice: int, dstDevice: int) -> int:
        """An attribute of the link from a device to another."""
        value = ctypes.c_int()
        devices = ctypes.c_int(srcDevice), ctypes.c_int(dstDevice)
        self._call("cudaDeviceGetP2PAttribute", ctypes.byref(value), ctypes.c_int(attribute), *devices)
        return value.value

    def cudaIpcGetMemHandle(self, devPtr: ctypes.c_void_p) -> cudaIpcMemHandle_t:
        """The name of an allocation in other processes."""
        handle = cudaIpcMemHandle_t()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), devPtr)
        return handle

    def cudaIpcOpenMemHandle(self, handle: cudaIpcMemHandle_t) -> ctypes.c_void_p:
        """Maps an allocation of another process, and enables access to its device."""
        pointer = ctypes.c_void_p()
        self._call("cudaIpcOpenMemHandle", ctypes.byref(pointer), handle, ctypes.c_uint(1))  # lazy peer access
        return pointer

    def cudaIpcCloseMemHandle(self, devPtr: ctypes.c_void_p) -> None:
        """Unmaps what cudaIpcOpenMemHandle returned."""
        self._call("cudaIpcCloseMemHandle", devPtr)


class _CudaBytes:
    """Bytes at an address of a GPU, for torch.as_tensor."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def bytes_at(address: int, size: int, device: torch.device) -> torch.Tensor:
    """The bytes at an address of a CUDA device, `[size]`, uint8; the caller keeps the memory."""
    import torch

    return torch.as_tensor(_CudaBytes(address, size), device=device)


def pack_strided_memory(
    ptr: int, segment_size: int, segment_stride: int, num_segments: int, dtype: torch.dtype, dev_id: int
) -> torch.Tensor:
    """Segments of memory as the rows of a tensor, which the caller keeps.

    Args:
        ptr: the address of the first segment, a multiple of the bytes of an element.
        segment_size: bytes of a segment.
        segment_stride: bytes from the start of a segment to that of the next; at least segment_size.
        num_segments: how many, 1 or more.
        dtype: of the elements; segment_size and segment_stride are multiples of its bytes.
        dev_id: the CUDA device of the memory; -1: the host.

    Returns:
        `[num_segments, segment_size / bytes of an element]`.

    Raises:
        ValueError: a number does not fit.
    """
    import torch

    width = dtype.itemsize
    sizes = (("ptr", ptr, 1), ("segment_size", segment_size, 1), ("segment_stride", segment_stride, segment_size))
    for name, value, least in sizes:
        if value < least or value % width:
            raise ValueError(f"{name} must be at least {least} and a multiple of {width}, of {dtype}; got {value}")
    if num_segments < 1 or dev_id < -1:
        raise ValueError(f"num_segments must be 1 or more, dev_id -1 or more; got {num_segments} and {dev_id}")
    size = (num_segments - 1) * segment_stride + segment_size
    if dev_id >= 0:
        flat = bytes_at(ptr, size, torch.device("cuda", dev_id))
    else:
        flat = torch.frombuffer((ctypes.c_byte * size).from_address(ptr), dtype=torch.uint8)
    return flat.view(dtype).as_strided((num_segments, segment_size // width), (segment_stride // width, 1))


EMPTY = -(2**31)  # kEmpty of fi/comm/workspace.h, as int32


def fill_empty(buffer: torch.Tensor) -> None:
    """Makes a buffer of a GPU a new workspace."""
    import torch

    buffer[: buffer.numel() // 4 * 4].view(torch.int32).fill_(EMPTY)
    torch.cuda.synchronize(buffer.device)


def is_shared(pointers: list[int]) -> bool:
    """Whether these are of `create_shared_buffer`."""
    return tuple(pointers) in _shared


class SharedMemory:
    """A buffer of each rank, which every rank of the group maps.

    Creating and closing are collective. Every word of a buffer of a GPU is EMPTY at first, of a CPU 0. The memory is
    the object's own: torch's allocators neither give nor get it.

    Args:
        size: bytes of a buffer.
        device: where this rank's buffer lies: a CUDA device or the CPU.
        comm_backend: the group.

    Raises:
        RuntimeError: A rank cannot map the memory of another; the GPUs must be able to access each other.
    """

    def __init__(self, size: int, device: torch.device, comm_backend: CommBackend) -> None:
        self.size, self.device, self._comm = size, device, comm_backend
        self.rank, self.world_size = comm_backend.Get_rank(), comm_backend.Get_size()
        self._mappings: list[Any] = []
        self.pointers = self._map_cuda() if device.type == "cuda" else self._map_cpu()
        comm_backend.barrier()

    def _map_cuda(self) -> list[int]:
        import torch

        self._cuda = CudaRTLibrary()
        with torch.cuda.device(self.device):
            torch.cuda.current_stream().synchronize()  # makes the context
            own = self._cuda.cudaMalloc(self.size)
            fill_empty(bytes_at(own.value or 0, self.size, self.device))
            handles = self._comm.allgather(bytes(self._cuda.cudaIpcGetMemHandle(own)))
            failure, pointers = "", []
            for rank, handle in enumerate(handles):
                try:
                    opened = cudaIpcMemHandle_t.from_buffer_copy(handle)
                    pointer = own if rank == self.rank else self._cuda.cudaIpcOpenMemHandle(opened)
                    pointers.append(pointer.value or 0)
                except RuntimeError as error:
                    pointers.append(0)
                    failure = failure or f"rank {self.rank} cannot map the memory of rank {rank}: {error}"
            failures = [text for text in self._comm.allgather(failure) if text]
            if failures:
                for rank, address in enumerate(pointers):
                    if address and rank != self.rank:
                        self._cuda.cudaIpcCloseMemHandle(ctypes.c_void_p(address))
                self._comm.barrier()  # all have unmapped this rank's
                self._cuda.cudaFree(own)
                raise RuntimeError(f"group: GPUs that can access each other are required; {failures[0]}")
            return pointers

    def _map_cpu(self) -> list[int]:
        import torch

        path = f"/dev/shm/fi-{secrets.token_hex(8)}"
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.ftruncate(descriptor, self.size)
            for other in self._comm.allgather(path):
                opened = descriptor if other == path else os.open(other, os.O_RDWR)
                self._mappings.append(torch.frombuffer(mmap.mmap(opened, self.size), dtype=torch.uint8))
                if opened != descriptor:
                    os.close(opened)
            self._comm.barrier()
        finally:  # the mappings keep the memory; no name is left when a process dies
            os.close(descriptor)
            os.unlink(path)
        return [mapping.data_ptr() for mapping in self._mappings]

    def tensor(self) -> torch.Tensor:
        """This rank's buffer, `[size]`, uint8."""
        if self.device.type == "cpu":
            return self._mappings[self.rank]  # type: ignore[no-any-return]
        return bytes_at(self.pointers[self.rank], self.size, self.device)

    def close(self) -> None:
        """Unmaps the buffers of the others, then frees this rank's."""
        if not self.pointers:
            return
        if self.device.type == "cuda":
            import torch

            with torch.cuda.device(self.device):
                torch.cuda.synchronize()
                self._comm.barrier()  # no rank uses them any more
                for rank, pointer in enumerate(self.pointers):
                    if rank != self.rank:
                        self._cuda.cudaIpcCloseMemHandle(ctypes.c_void_p(pointer))
                self._comm.barrier()
                self._cuda.cudaFree(ctypes.c_void_p(self.pointers[self.rank]))
        self._mappings, self.pointers = [], []


_shared: dict[tuple[int, ...], SharedMemory] = {}  # by the pointers that create_shared_buffer returned


def create_shared_buffer(size_in_bytes: int, group: torch.distributed.ProcessGroup | None = None) -> list[int]:
    """Allocates a buffer on the current CUDA device of each rank and maps all of them; collective.

    Args:
        size_in_bytes: of each buffer, equal on all ranks.
        group: the ranks; None: the world.

    Returns:
        The address of each rank's buffer in this process, by rank.

    Raises:
        RuntimeError: The GPUs cannot access each other.
    """
    import torch

    device = torch.device("cuda", torch.cuda.current_device())
    memory = SharedMemory(size_in_bytes, device, TorchDistBackend(group))
    _shared[tuple(memory.pointers)] = memory
    return list(memory.pointers)


def free_shared_buffer(pointers: list[int], group: torch.distributed.ProcessGroup | None = None) -> None:
    """Frees what `create_shared_buffer` returned; collective.

    Raises:
        ValueError: pointers are not of create_shared_buffer, or are freed.
    """
    memory = _shared.pop(tuple(pointers), None)
    if memory is None:
        raise ValueError("pointers: what create_shared_buffer returned, not yet freed, is required")
    memory.close()
