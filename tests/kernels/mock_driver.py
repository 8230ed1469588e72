"""Runs launchers of CUDA ops without a GPU: in a process of its own, whose libcuda.so.1 is mock_driver.cc.

    gpu = Gpu(folder, capability=90)
    gpu.call("rmsnorm", axes, {"out": Tensor(0x1000, (4, 128), "f16"), ...})  ->  [{"call": "launch", ...}]

Arguments go by the names that the op declares, with its defaults for those that are left out. Nothing reads the
addresses of tensors. What the process does to the driver comes back as the mock writes it down.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import fi_kernels
from fi_core.runtime.spec.arguments import REQUIRED

INCLUDE = fi_kernels.ROOT / "include"
LIBRARY = "libcuda.so.1"
Call = dict[str, Any]

# DLPack type codes and bits.
_DTYPES = {
    "f16": (2, 16),
    "bf16": (4, 16),
    "f32": (2, 32),
    "e4m3": (10, 8),
    "e5m2": (12, 8),
    "i8": (0, 8),
    "i32": (0, 32),
    "i64": (0, 64),
    "u8": (1, 8),
    "bool": (6, 8),
}
CPU, CUDA = 1, 2  # DLDeviceType


class Tensor(NamedTuple):
    """What a launcher sees of a tensor. Strides in elements; None: contiguous."""

    address: int
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None
    device: int = 0
    device_type: int = CUDA


def build_driver(folder: Path) -> Path:
    """Compiles the mock to folder/libcuda.so.1."""
    from tvm_ffi.libinfo import find_dlpack_include_path

    source = Path(__file__).with_name("mock_driver.cc")
    include = [f"-I{INCLUDE}", f"-I{find_dlpack_include_path()}"]
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", *include]
    subprocess.run(["c++", *flags, str(source), "-o", str(folder / LIBRARY)], check=True)
    return folder


class Gpu:
    """A machine with two GPUs of a compute capability. `switches` are the FI_MOCK_ variables of mock_driver.cc, and
    other variables of the environment."""

    def __init__(self, driver: Path, log: Path, capability: int = 90, **switches: str) -> None:
        self.log, self.seen = log, 0
        variables = {
            "LD_LIBRARY_PATH": os.pathsep.join([str(driver), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]),
            "FI_MOCK_LOG": str(log),
            "FI_MOCK_CAPABILITY": str(capability),
            **switches,
        }
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)  # the loader reads LD_LIBRARY_PATH when a process starts
        try:
            self.pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _hide_torch)
            self.pool.submit(os.getpid).result()
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})

    def call(self, op: str, axes: Call, arguments: Mapping[str, object], stream: int = 0, **options: Any) -> list[Call]:
        """Binds the op (once) and calls it; the driver calls of both. `options` as for bind. Raises what it raises."""
        self.pool.submit(_call, op, axes, dict(arguments), stream, options).result()
        return self.calls()

    def bind(self, op: str, axes: Call, **options: Any) -> dict[str, tuple[Path, str]]:
        """Where the files came from: {"host": (path, origin), "cubin": ...}.

        Options: implementation (None: what is chosen for the axes as fields), arch, device, shared_bytes.
        """
        return self.pool.submit(_origins, op, axes, options).result()

    def allocates(self) -> None:
        """Has the mock take the place of torch's allocator, which launchers ask for memory."""
        self.pool.submit(_allocate_by_mock).result()

    def messages(self) -> list[str]:
        """What the build log of the process has said since the first bind."""
        return self.pool.submit(_messages).result()

    def calls(self) -> list[Call]:
        """The driver calls since the last question."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        fresh, self.seen = lines[self.seen :], len(lines)
        return [json.loads(line) for line in fresh]

    def close(self) -> None:
        self.pool.shutdown()


def launches(calls: list[Call]) -> list[Call]:
    return [call for call in calls if call["call"] == "launch"]


# What runs in the process of the mock.
def _hide_torch() -> None:
    """tvm_ffi imports torch where there is one, which takes two seconds and is not needed here."""
    from fi_core.registry import load

    load()
    sys.modules["torch"] = None  # type: ignore[assignment]


def _allocate_by_mock() -> None:
    import tvm_ffi

    tvm_ffi.LIB.TVMFFIEnvSetDLPackManagedTensorAllocator(ctypes.CDLL(LIBRARY).mockAllocate, 1, None)


_bound: dict[str, Any] = {}
_said: list[str] = []


def _bind(name: str, axes: Call, options: dict[str, Any]) -> Any:
    import logging

    from fi_core.registry import operator
    from fi_core.runtime.dispatch import Request, choose
    from fi_core.runtime.launch.kernel import bind
    from fi_core.runtime.spec.op import Spec
    from fi_core.runtime.spec.target import Target

    key = repr((name, axes, options))
    if key not in _bound:
        if not _said:
            handler = logging.Handler()
            handler.emit = lambda record: _said.append(record.getMessage())  # type: ignore[method-assign]
            logging.getLogger("fi_core.jit").addHandler(handler)
        op = operator(name).op
        if "shared_bytes" in options:  # asks for more shared memory than the declaration does
            more = tuple(_with_shared(i, options["shared_bytes"]) for i in op.implementations)
            op = dataclasses.replace(op, implementations=more)
        target = Target("cuda", options.get("arch") or _native_arch())
        assert set(axes) == set(op.axes), f"{name}: axes are {', '.join(op.axes)}"
        implementation = options.get("implementation") or choose(Request.of(op, target, axes)).implementation
        spec = Spec(op, implementation, target, tuple((axis, axes[axis]) for axis in op.axes))
        _bound[key] = bind(spec, options.get("device", 0))
    return _bound[key]


def _native_arch() -> str:
    from fi_core.runtime.spec.target import cuda_target

    return cuda_target(*divmod(int(os.environ["FI_MOCK_CAPABILITY"]), 10)).arch


def _with_shared(implementation: Any, shared_bytes: int) -> Any:
    def unit(axes: Call) -> Any:
        chosen = implementation.unit(axes)
        return chosen._replace(entries=tuple(e._replace(shared_bytes=shared_bytes) for e in chosen.entries))

    return dataclasses.replace(implementation, unit=unit) if implementation.unit else implementation


def _origins(name: str, axes: Call, options: dict[str, Any]) -> dict[str, tuple[Path, str]]:
    return {file: tuple(found) for file, found in _bind(name, axes, options).origins.items()}


def _messages() -> list[str]:
    return _said


def _call(name: str, axes: Call, given: Call, stream: int, options: dict[str, Any]) -> None:
    import tvm_ffi

    from fi_core.registry import operator

    kernel = _bind(name, axes, options)
    arguments = in_order(operator(name).op, given)
    with contextlib.ExitStack() as stack:
        for device in {a.device for a in arguments if isinstance(a, Tensor) and a.device_type == CUDA}:
            stack.enter_context(tvm_ffi.use_raw_stream(tvm_ffi.device(f"cuda:{device}"), stream))
        given_tensors = (tvm_ffi.from_dlpack(_Exporter(a)) if isinstance(a, Tensor) else a for a in arguments)
        kernel.run(*given_tensors)


def in_order(op: Any, given: Mapping[str, object]) -> list[Any]:
    """What a host module is called with, its defaults for what is not given; a backend is a number there."""
    native = op.native
    assert set(given) <= {argument.name for argument in native}, f"{op.name} takes {[a.name for a in native]}"
    missing = [a.name for a in native if a.name not in given and a.default is REQUIRED]
    assert not missing, f"{op.name} requires {', '.join(missing)}"
    return [0 if argument.kind == "str" else given.get(argument.name, argument.default) for argument in native]


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),  # from here on DLManagedTensor
        ("deleter", ctypes.c_void_p),
    )


_exported: list[_DLTensor] = []  # kept for the life of the process: their last use is not known


class _Exporter:
    """Gives a Tensor away by the DLPack protocol."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **_: object) -> object:
        t, n = self.tensor, len(self.tensor.shape)
        shape = (ctypes.c_int64 * n)(*t.shape)
        steps = t.strides or [_product(t.shape[i + 1 :]) for i in range(n)]
        strides = (ctypes.c_int64 * n)(*steps)
        code, bits = _DTYPES[t.dtype]
        managed = _DLTensor(t.address, t.device_type, t.device, n, code, bits, 1, shape, strides, 0, None, None)
        _exported.append(managed)
        capsule = ctypes.pythonapi.PyCapsule_New
        capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return capsule(ctypes.addressof(managed), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.tensor.device_type, self.tensor.device


def _product(numbers: tuple[int, ...]) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result


# Parameter structs, read from the headers: scalars, pointers, arrays and other structs of the project.
_SCALARS: dict[str, Any] = {
    "bool": ctypes.c_bool,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    **{f"{u}int{bits}_t": getattr(ctypes, f"c_{u}int{bits}") for u in ("", "u") for bits in (8, 16, 32, 64)},
}
_FIELD = re.compile(r"^  (?!static )(?:const )?(\w+)(\*?) ([\w\[\], ]+)(?: = [^;]+)?;", re.MULTILINE)


def _headers(pattern: str) -> list[re.Match[str]]:
    texts = (path.read_text() for path in sorted(INCLUDE.rglob("*.h")))
    return [found for text in texts if (found := re.search(pattern, text, re.MULTILINE | re.DOTALL))]


def header_of(name: str) -> str:
    """The header that declares a struct, as it is included."""
    declaration = re.compile(rf"^struct (?:alignas\(\d+\) )?{name} {{", re.MULTILINE)
    (path,) = (path for path in INCLUDE.rglob("*.h") if declaration.search(path.read_text()))
    return path.relative_to(INCLUDE).as_posix()


def struct(name: str) -> type[ctypes.Structure]:
    """The ctypes twin of a parameter struct. Only its first member may be aligned to more than 8 bytes."""
    (found,) = _headers(rf"^struct (?:alignas\((\d+)\) )?{name} {{\n(.*?)^}};")
    constants = dict(re.findall(r"^  static constexpr \w+ (\w+) = (\d+);", found[2], re.MULTILINE))
    alignment, fields = int(found[1] or 8), []
    for kind, pointer, names in _FIELD.findall(found[2]):
        for field in names.split(", "):
            word, _, count = field.rstrip("]").partition("[")
            one: Any = ctypes.c_void_p if pointer else _SCALARS.get(kind)
            if one is None and (base := _headers(rf"^enum class {kind} : (\w+) {{")):
                one = _SCALARS[base[0][1]]
            if one is None:
                one = struct(kind)
                alignment = max(alignment, one.alignment)
            fields.append((word, one * int(constants.get(count, count)) if count else one))
    bare = type(name, (ctypes.Structure,), {"_fields_": fields})
    rest = -ctypes.sizeof(bare) % alignment if alignment > 8 else 0
    padding = [("padding", ctypes.c_char * rest)] if rest else []
    return type(name, (ctypes.Structure,), {"_fields_": [*fields, *padding], "alignment": alignment})


def parameters(launch: Call, name: str) -> Call:
    """The parameter struct of a launch, by field; pointers as integers, None for null."""
    kind = struct(name)
    content = bytes.fromhex(launch["parameters"])
    assert len(content) == ctypes.sizeof(kind), f"{launch['name']} takes {len(content)} bytes, {name} has others"
    return dict(_values(kind.from_buffer_copy(content)))


def _values(value: Any) -> Any:
    if isinstance(value, ctypes.Structure):
        return {field[0]: _values(getattr(value, field[0])) for field in value._fields_}
    return list(value) if isinstance(value, ctypes.Array) else value
