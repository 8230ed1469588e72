"""CPU kernel headers: conversions against torch, math against float64, parallel_for, vectorized clones."""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = ROOT / "packages/fi-kernels/src/fi_kernels/include"
HEADERS = ["convert.h", "math.h", "parallel.h", "reduce.h", "target.h"]  # headers that need only a compiler
WARNINGS = ["-Wall", "-Wextra", "-Wconversion", "-Wsign-conversion", "-Wshadow", "-Werror"]
FLAGS = ["-std=c++17", "-O3", "-fPIC", f"-I{INCLUDE}", *WARNINGS]
COMPILERS = [c for c in ("g++", "aarch64-linux-gnu-g++", "clang++") if shutil.which(c)]
X86 = platform.machine() == "x86_64"
# "clones" is the build of kernels, which runs at the level of this machine; the others run the code of older machines.
LEVELS = (
    ["clones", "x86-64", "x86-64-v3"] if X86 and torch.backends.cpu.get_cpu_capability() != "DEFAULT" else ["clones"]
)
FORMATS = {
    "bf16": (torch.bfloat16, torch.uint16, float("inf")),
    "f16": (torch.float16, torch.uint16, float("inf")),
    "e4m3": (torch.float8_e4m3fn, torch.uint8, 448.0),
    "e5m2": (torch.float8_e5m2, torch.uint8, 57344.0),
}
INF, NAN = float("inf"), float("nan")


class Library:
    """One build of cpu_headers.cc."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dll = ctypes.CDLL(str(path))
        self.dll.record_ranges.restype = ctypes.c_int64
        self.dll.nested_calls.restype = ctypes.c_int64

    def map(self, function: str, x: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        assert x.is_contiguous()
        out = torch.empty(x.shape, dtype=out_dtype)
        self.dll[function](*pointers(out, x), ctypes.c_int64(x.numel()))
        return out


def pointers(*tensors: torch.Tensor) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(t.data_ptr()) for t in tensors]


def compile_library(out: Path, *flags: str) -> Library:
    source = Path(__file__).with_name("cpu_headers.cc")
    subprocess.run(["g++", *FLAGS, "-shared", "-fopenmp", *flags, str(source), "-o", str(out)], check=True)
    return Library(out)


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Library]:
    folder = tmp_path_factory.mktemp("cpu_headers")
    flags = {level: ["-DTEST_ONE_LEVEL", f"-march={level}"] for level in LEVELS if level != "clones"}
    return {level: compile_library(folder / f"{level}.so", *flags.get(level, [])) for level in LEVELS}


@pytest.fixture(params=LEVELS)
def library(request: pytest.FixtureRequest, libraries: dict[str, Library]) -> Library:
    return libraries[request.param]


@pytest.fixture
def clones(libraries: dict[str, Library]) -> Library:
    return libraries["clones"]


@pytest.mark.parametrize("openmp", [True, False], ids=["openmp", "no-openmp"])
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("header", HEADERS)
def test_header_compiles_alone(header: str, compiler: str, openmp: bool, tmp_path: Path) -> None:
    unit = tmp_path / "unit.cc"
    unit.write_text(f'#include "fi/cpu/{header}"\n#include "fi/cpu/{header}"\n')
    subprocess.run([compiler, *FLAGS, *(["-fopenmp"] if openmp else []), "-fsyntax-only", str(unit)], check=True)


def all_bits(storage: torch.dtype) -> torch.Tensor:
    return torch.arange(2 ** (8 * storage.itemsize), dtype=torch.int32).to(storage)


def bits_as_float(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("name", FORMATS)
def test_decode_every_value(library: Library, name: str) -> None:
    dtype, storage, _ = FORMATS[name]
    bits = all_bits(storage)
    got, want = library.map(f"decode_{name}", bits, torch.float32), bits.view(dtype).float()
    nan = want.isnan()
    assert torch.equal(got.isnan(), nan)
    assert torch.equal(got[~nan].view(torch.int32), want[~nan].view(torch.int32))


def encode_inputs(dtype: torch.dtype, storage: torch.dtype) -> torch.Tensor:
    """Every value of the 8- and 16-bit formats, every rounding tie with both neighbours, and random bits."""
    values = [all_bits(s).view(d).float() for d, s, _ in FORMATS.values()]
    finite = all_bits(storage).view(dtype).double()
    finite = finite[finite.isfinite()].unique()
    largest = finite[-1] + (finite[-1] - finite[-2])
    finite = torch.cat([-largest.view(1), finite, largest.view(1)])
    ties = ((finite[1:] + finite[:-1]) / 2).float()
    up, down = torch.nextafter(ties, torch.tensor(INF)), torch.nextafter(ties, torch.tensor(-INF))
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(-(2**31), 2**31, (4_000_000,), generator=generator, dtype=torch.int64)
    return torch.cat([*values, ties, up, down, bits_as_float(random)])


@pytest.mark.parametrize("name", FORMATS)
def test_encode(library: Library, name: str) -> None:
    dtype, storage, limit = FORMATS[name]
    x = encode_inputs(dtype, storage)
    got = library.map(f"encode_{name}", x, storage).view(dtype)
    want = x.clamp(-limit, limit).to(dtype)
    nan = x.isnan()
    assert torch.equal(got.float().isnan(), nan)
    assert torch.equal(got[~nan].view(storage), want[~nan].view(storage))
    assert torch.equal(got.view(storage).int() >> (8 * storage.itemsize - 1) == 1, x.view(torch.int32) < 0)


def inputs_of_math() -> torch.Tensor:
    """Bit patterns spread evenly over all floats, plus dense samples where the functions change fastest."""
    spread = bits_as_float(torch.arange(-(2**31), 2**31, 4093, dtype=torch.int64))
    dense = torch.cat([torch.linspace(-k, k, 300_000) for k in (0.01, 1.0, 10.0, 110.0, 160.0)])
    return torch.cat([spread, dense, torch.linspace(0.5, 2.0, 300_000)])


def ulp_error(got: torch.Tensor, exact: torch.Tensor, floor: float) -> float:
    """Largest |got - exact| in units of the float spacing at exact, of those not below floor."""
    rounded = exact.float()
    assert torch.equal(got.isnan(), exact.isnan())
    assert (got[exact.abs() < floor].abs() < floor).all()
    counted = rounded.isfinite() & (exact.abs() >= floor)
    spacing = torch.nextafter(rounded.abs(), torch.tensor(INF)).double() - rounded.abs().double()
    spacing = torch.where(spacing.isfinite(), spacing, 2.0**104)
    # An overflow must give infinity. An infinity beside the largest float counts as the next value, 2^128.
    overflows = rounded.isinf()
    assert torch.equal(got[overflows], rounded[overflows])
    return float(((got.double().clamp(-(2.0**128), 2.0**128) - exact).abs() / spacing)[counted].max())


# Function: reference in float64, largest error allowed in ulp where the result is not below the floor, the floor,
# exact values at special arguments.
Reference = Callable[[torch.Tensor], torch.Tensor]
MATH: dict[str, tuple[Reference, float, float, list[tuple[float, float]]]] = {
    "exp": (
        torch.exp,
        2.0,
        0.0,
        [(INF, INF), (-INF, 0.0), (0.0, 1.0), (-0.0, 1.0), (1e30, INF), (-1e30, 0.0), (1e-45, 1.0)],
    ),
    "exp2": (torch.exp2, 2.0, 0.0, [(INF, INF), (-INF, 0.0), (10.0, 1024.0), (-149.0, 2.0**-149), (128.0, INF)]),
    "log2": (
        torch.log2,
        2.0,
        0.0,
        [(INF, INF), (0.0, -INF), (-0.0, -INF), (-1.0, NAN), (-INF, NAN), (1.0, 0.0), (2.0**-149, -149.0)],
    ),
    "tanh": (torch.tanh, 2.0, 0.0, [(INF, 1.0), (-INF, -1.0), (0.0, 0.0), (-0.0, -0.0), (1e30, 1.0), (1e-45, 1e-45)]),
    "erf": (torch.erf, 2.0, 0.0, [(INF, 1.0), (-INF, -1.0), (0.0, 0.0), (-0.0, -0.0), (1e30, 1.0), (-5.0, -1.0)]),
    "rsqrt": (torch.rsqrt, 2.0, 0.0, [(INF, 0.0), (0.0, INF), (-1.0, NAN), (4.0, 0.5), (2.0**-126, 2.0**63)]),
    "sigmoid": (torch.sigmoid, 2.5, 1e-38, [(INF, 1.0), (-INF, 0.0), (0.0, 0.5), (1e30, 1.0), (-1e30, 0.0)]),
    "silu": (torch.nn.functional.silu, 2.5, 1e-36, [(INF, INF), (-INF, -0.0), (0.0, 0.0), (-0.0, -0.0), (1e30, 1e30)]),
}


@pytest.mark.parametrize("name", MATH)
def test_math_error(library: Library, name: str) -> None:
    reference, limit, floor, _ = MATH[name]
    x = inputs_of_math()
    x = x[x.isfinite()]
    error = ulp_error(library.map(f"apply_{name}", x, torch.float32), reference(x.double()), floor)
    print(f"{name} at {library.path.stem}: largest error {error:.3f} ulp")
    assert error <= limit


@pytest.mark.parametrize("name", MATH)
def test_math_special_values(library: Library, name: str) -> None:
    cases = MATH[name][3]
    # Repeated, so that the vector body and the scalar remainder compute every case.
    x = torch.tensor([*(x for x, _ in cases), NAN]).repeat(19)
    want = torch.tensor([*(y for _, y in cases), NAN]).repeat(19)
    got = library.map(f"apply_{name}", x, torch.float32)
    assert torch.equal(got.isnan(), want.isnan())
    number = ~want.isnan()
    assert torch.equal(got[number].view(torch.int32), want[number].view(torch.int32))


@pytest.mark.parametrize("length", [0, 1, 7, 16, 33])
def test_remainders_do_not_overrun(library: Library, length: int) -> None:
    x = torch.randn(length, generator=torch.Generator().manual_seed(length))
    out = torch.full((length + 8,), 7, dtype=torch.uint8)
    library.dll.encode_e4m3(*pointers(out, x), ctypes.c_int64(length))
    assert torch.equal(out[:length].view(torch.float8_e4m3fn).float(), x.to(torch.float8_e4m3fn).float())
    assert out[length:].eq(7).all()


def ranges(library: Library, n: int, grain: int) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]:
    visits = torch.zeros(max(n, 0), dtype=torch.int32)
    begins, ends = torch.full((2, max(n, 0)), -1, dtype=torch.int64)
    arguments = [ctypes.c_int64(n), ctypes.c_int64(grain)]
    return library.dll.record_ranges(*pointers(visits, begins, ends), *arguments), visits, begins, ends


@pytest.fixture
def two_threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("n", "grain", "calls"),
    [(-3, 1, 0), (0, 1, 0), (1, 1, 1), (8, 8, 1), (8, 100, 1), (9, 8, 2), (2, 0, 2), (101, 1, 2), (1000, -5, 2)],
)
def test_parallel_for_covers_each_item_once(clones: Library, two_threads: None, n: int, grain: int, calls: int) -> None:
    called, visits, begins, ends = ranges(clones, n, grain)
    assert called == calls
    assert visits.eq(1).all()
    item = torch.arange(max(n, 0))
    assert (begins <= item).all() and (item < ends).all()
    sizes = (ends - begins).unique()
    assert sizes.numel() == 0 or sizes.max() - sizes.min() <= 1


def test_parallel_for_follows_the_thread_count_of_torch(clones: Library, two_threads: None) -> None:
    torch.set_num_threads(1)
    assert ranges(clones, 64, 1)[0] == 1
    torch.set_num_threads(3)
    assert ranges(clones, 64, 1)[0] == 3


def test_parallel_for_does_not_nest(clones: Library, two_threads: None) -> None:
    assert clones.dll.nested_calls(ctypes.c_int64(5), ctypes.c_int64(7)) == 5


@pytest.mark.parametrize("columns", [0, 1, 63, 64, 1001])
def test_rows_in_parallel(library: Library, two_threads: None, columns: int) -> None:
    x = torch.randn(37, columns, generator=torch.Generator().manual_seed(1)).bfloat16()
    out = torch.empty(37)
    library.dll.rows_sum_of_squares(*pointers(out, x), *map(ctypes.c_int64, (37, columns, 1)))
    torch.testing.assert_close(out, x.double().square().sum(-1).float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 1001])
def test_maximum(library: Library, n: int) -> None:
    x = -torch.rand(n, generator=torch.Generator().manual_seed(n)) - 1
    for place in sorted({0, n // 2, n - 1} & set(range(n))):
        y = x.clone()
        y[place] = -0.5
        y[place - 1] = NAN if n > 1 else y[place - 1]
        assert library.map("row_maximum", y, torch.float32)[0] == -0.5
    out = torch.empty(1)
    library.dll.row_maximum(*pointers(out, x), ctypes.c_int64(n))
    assert out.item() == max([-INF, *x.tolist()])


def code_of(library: Library) -> dict[str, str]:
    text = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", library.path], check=True, capture_output=True, text=True
    )
    return dict(re.findall(r"^[0-9a-f]+ <([^>]+)>:\n((?:.+\n)*)", text.stdout, re.MULTILINE))


if X86:
    # rsqrt stays scalar without -fno-math-errno; kernels compute it once per row.
    VECTORISED = [f"{way}_{name}" for way in ("decode", "encode") for name in FORMATS]
    VECTORISED += [f"apply_{name}" for name in MATH if name != "rsqrt"]
    VECTORISED += ["row_maximum", r"_Z14sum_of_squares\w+"]

    @pytest.mark.parametrize("worker", VECTORISED)
    def test_every_clone_is_vectorized(clones: Library, worker: str) -> None:
        code = code_of(clones)
        clone = {
            level: code[name]
            for name in code
            for level in ("v4", "v3", "default")
            if re.fullmatch(rf"{worker}\.(?:arch_x86_64_)?{level}(?:\.\d+)?", name)
        }
        assert "%zmm" in clone["v4"]
        assert "%ymm" in clone["v3"] and "%zmm" not in clone["v3"]
        packed = r"\b(?:mulps|addps|subps|maxps|cmpltps|padd[dw]|pslld|punpck\w+)\b.*%xmm"
        assert re.search(packed, clone["default"]) and "%ymm" not in clone["default"]
        assert "call" not in clone["v4"]
