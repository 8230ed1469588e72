"""CUDA launchers without a GPU: which entry, grid, attributes and parameters they launch, seen by a mock driver."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fi_core
from core import toy
from fi_core.aot import specs
from fi_core.norm.ops import NormConfig
from fi_core.registry import operator, ops
from fi_core.runtime.build import compiler, sources
from fi_core.runtime.errors import MissingKernelError
from fi_core.runtime.files import packed
from fi_core.runtime.resolve import built
from fi_core.runtime.resolve.provider import SCHEMA
from fi_core.runtime.spec.artifact import Artifact
from fi_core.runtime.spec.op import Entry, Op, Spec
from fi_core.runtime.spec.target import Target, cuda_target
from kernels.mock_driver import CPU, INCLUDE, Call, Gpu, Tensor, build_driver, header_of, launches, parameters

Start = Callable[..., Gpu]
AXES = {"dtype": "bf16", "out": "bf16", "residual": False}
X, OUT, W, R, SCALE = 0x7F000100000, 0x7F000200000, 0x7F000300000, 0x7F000400000, 0x7F000500000


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="session")
def start(driver: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts a machine; those that were asked for in the same words are the same."""
    running: dict[str, Gpu] = {}

    def machine(capability: int = 90, **switches: str) -> Gpu:
        key = repr((capability, sorted(switches.items())))
        if key not in running:
            log = tmp_path_factory.mktemp("gpu") / "log"
            running[key] = Gpu(driver, log, capability, **switches)
        running[key].calls()
        return running[key]

    yield machine
    for gpu in running.values():
        gpu.close()


def rmsnorm(gpu: Gpu, rows: int = 4, d: int = 4096, axes: Call = AXES, **change: Any) -> list[Call]:
    """The driver calls of rmsnorm on contiguous bf16 tensors, but for what is changed."""
    arguments = {
        "out": Tensor(OUT, (rows, d), str(axes["out"])),
        "input": Tensor(X, (rows, d), "bf16"),
        "residual": Tensor(R, (rows, d), "bf16") if axes["residual"] else None,
        "weight": Tensor(W, (d,), "bf16"),
        "scale": Tensor(SCALE, (1,), "f32") if axes["out"] in ("e4m3", "e5m2") else None,
        "eps": 1e-6,
        "weight_bias": 0.0,
        "enable_pdl": None,
    }
    options = {name: change.pop(name) for name in ("stream", "arch", "device", "shared_bytes") if name in change}
    assert set(change) <= set(arguments)
    return gpu.call("rmsnorm", axes, arguments | change, **options)


def launch(gpu: Gpu, **change: Any) -> Call:
    (one,) = launches(rmsnorm(gpu, **change))
    return one


def entry(one: Call, axes: Call = AXES) -> Entry:
    """The declaration of what was launched."""
    unit = toy.chosen(operator("rmsnorm").op, Target("cuda", "90a"), axes).unit()
    assert unit
    return next(e for e in unit.entries if e.name == one["name"])


def config_of(declared: Entry) -> NormConfig:
    assert isinstance(declared.config, NormConfig)
    return declared.config


@pytest.mark.parametrize("rows", [1, 3, 4, 130])
@pytest.mark.parametrize("d", [8, 64, 128, 512, 2048, 2056, 4096, 8200, 16384, 32768, 7, 111, 4100])
def test_the_launch_covers_every_row(start: Start, rows: int, d: int) -> None:
    one = launch(start(), rows=rows, d=d)
    chosen = entry(one)
    rows_a_block, vector, count, largest = config_of(chosen)
    assert one["grid"] == [-(-rows // rows_a_block), 1, 1]
    assert one["block"][1:] == [1, 1] and one["block"][0] <= chosen.threads and one["block"][0] % 32 == 0
    assert d <= largest and d % vector == 0
    in_one_pass = rows_a_block * largest <= chosen.threads * vector * count
    assert not in_one_pass or one["block"][0] * vector * count >= rows_a_block * d
    assert vector == 8 if d % 8 == 0 else vector == 1, "16 bytes a load wherever that is legal"
    assert parameters(one, "RmsnormParams")["rows"] == rows
    assert launch(start(), rows=1, d=d)["name"] == one["name"], "the sum of a row is taken alike in every batch"


@pytest.mark.parametrize(
    "change",
    [
        {"input": Tensor(X + 2, (4, 4096), "bf16")},
        {"input": Tensor(X, (4, 4096), "bf16", (4097, 1))},
        {"out": Tensor(OUT + 8, (4, 4096), "bf16")},
        {"out": Tensor(OUT, (4, 4096), "bf16", (4100, 1))},
        {"weight": Tensor(W + 4, (4096,), "bf16")},
        {"residual": Tensor(R + 2, (4, 4096), "bf16")},
        {"residual": Tensor(R, (4, 4096), "bf16", (4097, 1))},
    ],
)
def test_an_unaligned_tensor_gets_no_vector_loads(start: Start, change: Call) -> None:
    axes = AXES | {"residual": True}
    assert config_of(entry(launch(start(), axes=axes), axes)).vec_size == 8
    one = launch(start(), axes=axes, **change)
    vector = config_of(entry(one, axes)).vec_size
    tensor = next(iter(change.values()))
    bytes_a_load = 2 * vector
    assert tensor.address % bytes_a_load == 0
    assert tensor.strides is None or tensor.strides[0] * 2 % bytes_a_load == 0


def test_an_offset_of_one_row_keeps_vector_loads(start: Start) -> None:
    one = launch(start(), input=Tensor(X + 2 * 4096, (4, 4096), "bf16", (8192, 1)))
    assert config_of(entry(one)).vec_size == 8


def test_a_width_that_no_vector_divides(start: Start) -> None:
    """All addresses and strides are aligned, but the last vector of a row would leave it."""
    padded = {"out": Tensor(OUT, (4, 4100), "bf16", (4104, 1)), "input": Tensor(X, (4, 4100), "bf16", (4104, 1))}
    assert 4100 % config_of(entry(launch(start(), d=4100, **padded))).vec_size == 0


def test_parameters(start: Start) -> None:
    axes = {"dtype": "bf16", "out": "e4m3", "residual": True}
    one = launch(
        start(),
        rows=6,
        d=256,
        axes=axes,
        out=Tensor(OUT, (6, 256), "e4m3", (512, 1)),
        input=Tensor(X, (6, 256), "bf16", (264, 1)),
        residual=Tensor(R, (6, 256), "bf16", (300, 1)),
        eps=0.5,
        weight_bias=1.0,
    )
    p = parameters(one, "RmsnormParams")
    assert (p["out"], p["input"], p["residual"], p["weight"], p["scale"]) == (OUT, X, R, W, SCALE)
    assert (p["out_row_stride"], p["input_row_stride"], p["residual_row_stride"]) == (512, 264, 300)
    assert (p["rows"], p["d"], p["eps"], p["weight_bias"]) == (6, 256, 0.5, 1.0)


def test_parameters_of_heads(start: Start) -> None:
    """[n, heads, d]: a row of the kernel is one head."""
    shape = (5, 3, 128)
    one = launch(start(), out=Tensor(OUT, shape, "bf16"), input=Tensor(X, shape, "bf16", (1024, 256, 1)), d=128, rows=5)
    p = parameters(one, "RmsnormParams")
    assert (p["rows"], p["d"], p["heads"]["value"]) == (15, 128, 3)
    assert tuple(p[f"{side}_stride"] for side in ("input_row", "input_head", "out_row", "out_head")) == (
        1024,
        256,
        384,
        128,
    )
    assert (p["residual"], p["scale"]) == (None, None)


@pytest.mark.parametrize(
    ("capability", "asked", "pdl"),
    [(90, None, True), (90, True, True), (90, False, False), (80, None, False), (80, True, False)],
)
def test_programmatic_dependent_launch(start: Start, capability: int, asked: bool | None, pdl: bool) -> None:
    assert launch(start(capability), enable_pdl=asked)["pdl"] is pdl


def test_the_stream_and_the_device_of_the_tensors(start: Start) -> None:
    gpu = start()
    assert launch(gpu, stream=0x5EED)["stream"] == 0x5EED
    elsewhere = {
        "out": Tensor(OUT, (4, 4096), "bf16", device=1),
        "input": Tensor(X, (4, 4096), "bf16", device=1),
        "weight": Tensor(W, (4096,), "bf16", device=1),
    }
    one = launch(gpu, stream=0x77, **elsewhere)
    assert (one["device"], one["stream"]) == (1, 0x77), "a kernel bound on one device serves all of its kind"
    assert launch(gpu)["device"] == 0, "and the device is current for the launch only"


def test_no_driver_call_fails_in_a_thread_without_a_context(start: Start) -> None:
    """compute-sanitizer reports a failed call as an error of the program."""
    gpu = start(FI_MOCK_WORD="0")  # its process has no context but inside of a call
    calls = rmsnorm(gpu)
    assert {call["call"] for call in calls} >= {"load", "launch"}
    assert [call for call in calls if call["call"] == "failed"] == []


def test_a_kernel_refuses_tensors_of_a_device_that_it_does_not_serve(start: Start) -> None:
    """The request of a call names its device, so only who asks for a kernel by its number meets this."""
    gpu = start()
    tensors = {"out": Tensor(OUT, (4, 4096), "bf16"), "input": Tensor(X, (4, 4096), "bf16")}
    given = tensors | {"weight": Tensor(W, (4096,), "bf16")}
    assert len(launches(gpu.call("rmsnorm", AXES, given))) == 1
    on_cpu = {name: tensor._replace(device_type=CPU) for name, tensor in given.items()}
    with pytest.raises(ValueError, match="rmsnorm: the kernel was planned for another device than that of out, cpu"):
        gpu.call("rmsnorm", AXES, on_cpu)
    assert launches(gpu.calls()) == []
    mixed = start(FI_MOCK_CAPABILITY="90,80")  # of GPU 0 and of the others
    on_other = {name: tensor._replace(device=1) for name, tensor in given.items()}
    with pytest.raises(ValueError, match="rmsnorm: the kernel was planned for another device than that of out, cuda:1"):
        mixed.call("rmsnorm", AXES, on_other, arch="90a")
    assert launches(mixed.calls()) == []


@pytest.mark.parametrize(("rows", "d"), [(0, 4096), (4, 0)])
def test_nothing_is_launched_for_nothing(start: Start, rows: int, d: int) -> None:
    assert launches(rmsnorm(start(), rows=rows, d=d)) == []


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"weight": Tensor(W, (4096,), "bf16", device=1)}, ValueError, r"weight must be on .*cuda:0.*; got cuda:1"),
        ({"weight": Tensor(W, (4096,), "bf16", device_type=CPU)}, ValueError, r"weight must be on .*cuda:0.*; got cpu"),
        ({"weight": Tensor(W, (4095,), "bf16")}, ValueError, r"weight must have shape .*4096.*got \[4095\]"),
        ({"weight": Tensor(W, (4096,), "f16")}, TypeError, r"weight must .*bfloat16; got float16"),
        ({"input": Tensor(X, (4, 4096), "bf16", (1, 4))}, ValueError, r"input must be contiguous in its last"),
        ({"out": None}, TypeError, "out must be a tensor"),
        ({"eps": None}, TypeError, "eps must be a number"),
    ],
)
def test_a_wrong_argument_is_refused_before_the_launch(
    start: Start, change: Call, error: type[Exception], words: str
) -> None:
    gpu = start()
    with pytest.raises(error, match=f"^rmsnorm: {words}"):
        rmsnorm(gpu, **change)
    assert launches(gpu.calls()) == []


def test_a_failed_launch_names_what_was_launched(start: Start) -> None:
    with pytest.raises(RuntimeError) as error:
        rmsnorm(start(FI_MOCK_REFUSE="cuLaunchKernelEx"), d=128)
    spec = "rmsnorm_dtype_bf16_out_bf16_residual_False_cuda_sm_90a"
    cause = "rmsnorm: launch failed: CUDA_ERROR_LAUNCH_FAILED (unspecified launch failure)"
    for word in (cause, "kernel rmsnorm_", spec, "grid 1 x 1 x 1", "threads", "pdl"):
        assert word in str(error.value)


def test_more_shared_memory_is_asked_for_once_for_each_device(start: Start) -> None:
    gpu = start()

    def attributes(device: int) -> list[Call]:
        tensors = {name: Tensor(X, (4, 4096), "bf16", device=device) for name in ("out", "input")}
        calls = rmsnorm(gpu, shared_bytes=100_000, weight=Tensor(W, (4096,), "bf16", device=device), **tensors)
        (one,) = launches(calls)
        assert one["shared_bytes"] == 100_000 and one["device"] == device
        return [{"value": c["value"], "device": c["device"]} for c in calls if c["call"] == "attribute"]

    assert attributes(0) == [{"value": 100_000, "device": 0}]
    assert attributes(0) == []
    assert attributes(1) == [{"value": 100_000, "device": 1}]
    with pytest.raises(RuntimeError, match="cuKernelSetAttribute: CUDA_ERROR_INVALID_VALUE"):
        rmsnorm(gpu, shared_bytes=300_000)


def test_memory_that_is_not_there_is_refused(start: Start) -> None:
    """A fake tensor has its offset as address, and no program has memory below 64 KiB."""
    gpu = start(90)
    for offset in (1 << 10, 63 << 10):
        with pytest.raises(TypeError, match="rmsnorm: input has no data"):
            rmsnorm(gpu, input=Tensor(offset, (4, 4096), "bf16"))
    assert launches(rmsnorm(gpu, input=Tensor(0x302000000 << 4, (4, 4096), "bf16")))  # of a memory pool


def image_of(arch: str) -> Artifact:
    _, image = sources.artifacts(toy.chosen(operator("rmsnorm").op, Target("cuda", arch), AXES))
    return image


def provider(folder: Path, image: Artifact, content: bytes, file: str = "one.cubin") -> Path:
    """A prebuilt package of one device binary."""
    folder.mkdir()
    (folder / file).write_bytes(content)
    flags = list(compiler.flags(image, shipped=True))
    digest = hashlib.sha256(content).hexdigest()
    entry = {"closure": sources.closure(image), "flags": flags, "sha256": digest, "file": file}
    head = {"version": fi_core.__version__, "schema": SCHEMA, "abi": compiler.FFI_ABI}
    (folder / "index.json").write_text(json.dumps(head | {"artifacts": {image.id: entry}}))
    return folder


@pytest.mark.parametrize(
    "content", ["of another architecture", "no device binary", "without the entries", "not packed", "half of it"]
)
def test_a_prebuilt_image_that_the_driver_refuses(start: Start, tmp_path: Path, content: str) -> None:
    """One line says so, and the next place serves; likewise for a file that cannot be unpacked."""
    file = "one.cubin"
    if content == "of another architecture":
        binary, reason = built(image_of("80")).path.read_bytes(), "CUDA_ERROR_NO_BINARY_FOR_GPU"
    elif content == "no device binary":
        binary, reason = b"\x7fELF" + bytes(60), "CUDA_ERROR_INVALID_IMAGE"
    elif content in ("not packed", "half of it"):
        binary, reason, file = built(image_of("90a")).path.read_bytes(), "it cannot be unpacked", "one.cubin.xz"
        binary = packed(binary)[:1000] if content == "half of it" else binary
    else:
        binary = built(image_of("90a")).path.read_bytes().replace(b"rmsnorm_scalar", b"rmsnorm_sculpt")
        assert b"rmsnorm_sculpt" in binary
        reason = "CUDA_ERROR_NOT_FOUND"
    package = provider(tmp_path / "package", image_of("90a"), binary, file)
    gpu = start(90, FI_CUBIN_DIR=str(package))
    origin = gpu.bind("rmsnorm", AXES)["cubin"]
    assert origin[1] in ("store", "jit")
    (line,) = [text for text in gpu.messages() if text.startswith("FI_CUBIN_DIR skipped")]
    assert image_of("90a").id in line and reason in line
    assert launch(gpu)["device"] == 0


def test_an_image_built_here_that_the_driver_refuses(start: Start) -> None:
    with pytest.raises(RuntimeError) as error:
        rmsnorm(start(FI_MOCK_REFUSE="cuLibraryLoadData"))
    for word in (image_of("90a").id, "cuLibraryLoadData", "CUDA_ERROR_INVALID_IMAGE (device kernel image is invalid)"):
        assert word in str(error.value)


def test_a_prebuilt_image_of_an_older_target_serves(start: Start, tmp_path: Path) -> None:
    """An sm_86 card runs what was built for sm_80, and compiles nothing: FI_JIT=off."""
    built_before = [built(a) for a in sources.artifacts(toy.chosen(operator("rmsnorm").op, Target("cuda", "80"), AXES))]
    content = packed(built_before[1].path.read_bytes())  # as fi-cubin ships it
    package = provider(tmp_path / "package", image_of("80"), content, "one.cubin.xz")
    gpu = start(86, FI_CUBIN_DIR=str(package), FI_JIT="off")
    assert gpu.bind("rmsnorm", AXES)["cubin"][:2] == (package / "one.cubin.xz", "FI_CUBIN_DIR")
    assert launch(gpu)["pdl"] is False
    with pytest.raises(MissingKernelError, match="rmsnorm_dtype_bf16_out_bf16_residual_False_cuda_sm_90a"):
        start(90, FI_CUBIN_DIR=str(package), FI_JIT="off", FI_CACHE_DIR=str(tmp_path / "empty")).bind("rmsnorm", AXES)


def test_origins_say_who_compiled(start: Start, tmp_path: Path) -> None:
    for expected, devices in (("jit", "2"), ("store", "1")):  # another process
        origins = start(90, FI_CACHE_DIR=str(tmp_path), FI_MOCK_DEVICES=devices).bind("get_seq_lens", {})
        assert {file: found[1] for file, found in origins.items()} == {"host": expected, "cubin": expected}


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (None, "libcuda.so.1 not found: install the NVIDIA driver, or use CPU tensors"),
        (
            'extern "C" { int cuInit(unsigned) { return 0; } int cuGetExportTable(...) { return 500; } }',
            "libcuda.so.1 has no cuLibraryLoadData: the driver must be for CUDA 12.0 or later",
        ),
    ],
)
def test_no_driver_or_one_too_old(tmp_path: Path, code: str | None, words: str) -> None:
    for artifact in sources.artifacts(toy.chosen(operator("rmsnorm").op, Target("cuda", "90a"), AXES)):
        built(artifact)
    (tmp_path / "libcuda.so.1").write_bytes(b"not a library")
    if code:
        (tmp_path / "old.cc").write_text(code)
        line = ["c++", "-shared", "-fPIC", str(tmp_path / "old.cc"), "-o", str(tmp_path / "libcuda.so.1")]
        subprocess.run(line, check=True)
    gpu = Gpu(tmp_path, tmp_path / "log")
    with pytest.raises(RuntimeError, match=words):
        gpu.bind("rmsnorm", AXES)
    gpu.close()


def specs_of(op: Op) -> list[Spec]:
    """Every implementation and prebuilt axes of an op, each for the first architecture that takes it."""
    found: dict[object, Spec] = {}
    for arch in ("90a", "80", "100a", "120a"):
        for spec in specs(op, Target("cuda", arch)):
            found.setdefault((spec.implementation, spec.axes), spec)
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("spec", [spec for op in ops().values() for spec in specs_of(op)], ids=lambda spec: spec.name)
def test_every_kernel_binds(start: Start, spec: Spec) -> None:
    """The launcher loads, the image has every declared entry, compiled for the declared threads."""
    assert cuda_target(*divmod(spec.target.capability, 10)) == spec.target
    gpu = start(spec.target.capability)
    gpu.bind(spec.op.name, dict(spec.axes), implementation=spec.implementation)
    calls = gpu.calls()
    assert [c["capability"] for c in calls if c["call"] == "load"] == [spec.target.capability]
    unit = spec.unit()
    assert unit
    found = {c["name"]: c["max_threads"] for c in calls if c["call"] == "kernel"}
    assert found == {entry.name: entry.threads for entry in unit.entries}


@pytest.mark.slow
def test_parameter_structs_have_one_size_on_both_sides(start: Start, tmp_path: Path) -> None:
    """What g++ makes of each parameter struct, and what the device code reads: an odd member would shift the rest."""
    device: dict[tuple[str, str], int] = {}
    for name, op in ops().items():
        spec = specs_of(op)[0]
        unit = spec.unit()
        assert unit
        gpu = start(spec.target.capability)
        gpu.bind(name, dict(spec.axes), implementation=spec.implementation, device=1)
        (size,) = {c["parameter_bytes"] for c in gpu.calls() if c["call"] == "kernel"}
        device[(header_of(unit.params), unit.params)] = size
    lines = [f'#include "{header}"\n' for header, _ in device] + ["#include <cstdio>\nint main() {\n"]
    lines += [f'  printf("%zu\\n", sizeof(fi::{params}));\n' for _, params in device]
    unit_path, program = tmp_path / "sizes.cc", tmp_path / "sizes"
    unit_path.write_text("".join(lines) + "}\n")
    subprocess.run(["c++", "-std=c++17", f"-I{INCLUDE}", str(unit_path), "-o", str(program)], check=True)
    sizes = subprocess.run([program], check=True, capture_output=True, text=True).stdout.split()
    assert dict(zip(device, map(int, sizes))) == device
