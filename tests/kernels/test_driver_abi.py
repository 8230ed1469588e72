"""fi/host/driver.h against the real cuda.h: every name, function type, struct layout and number it declares."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import fi_kernels
from fi_core.runtime.build import toolchain

INCLUDE = fi_kernels.ROOT / "include"
TEXT = (INCLUDE / "fi/host/driver.h").read_text()

# Our enumerators and those of cuda.h; one that is missing here fails test_every_number_is_known.
NUMBERS = {
    "kSuccess": "CUDA_SUCCESS",
    "kInvalidValue": "CUDA_ERROR_INVALID_VALUE",
    "kCooperativeLaunchTooLarge": "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE",
    "kMemoryType": "CU_POINTER_ATTRIBUTE_MEMORY_TYPE",
    "kCooperative": "CU_LAUNCH_ATTRIBUTE_COOPERATIVE",
    "kClusterDimension": "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION",
    "kProgrammaticStreamSerialization": "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION",
    "kMaxDynamicSharedBytes": "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES",
    "kNonPortableClusterSize": "CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED",
    "kMultiprocessorCount": "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT",
    "kMajor": "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR",
    "kMinor": "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR",
    "kTensorU8": "CU_TENSOR_MAP_DATA_TYPE_UINT8",
    "kTensorU16": "CU_TENSOR_MAP_DATA_TYPE_UINT16",
    "kSwizzle32B": "CU_TENSOR_MAP_SWIZZLE_32B",
    "kSwizzle64B": "CU_TENSOR_MAP_SWIZZLE_64B",
    "kSwizzle128B": "CU_TENSOR_MAP_SWIZZLE_128B",
    "kPromoteL2To128B": "CU_TENSOR_MAP_L2_PROMOTION_L2_128B",
    "kSharedBytesOfBlock": "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN",
}
# Structs, and members of unions, by path.
LAYOUTS = {
    ("LaunchConfig", "CUlaunchConfig"): {
        "grid_x": "gridDimX",
        "grid_y": "gridDimY",
        "grid_z": "gridDimZ",
        "block_x": "blockDimX",
        "block_y": "blockDimY",
        "block_z": "blockDimZ",
        "shared_bytes": "sharedMemBytes",
        "stream": "hStream",
        "attributes": "attrs",
        "attribute_count": "numAttrs",
    },
    ("LaunchAttribute", "CUlaunchAttribute"): {"id": "id", "pad": "pad", "value": "value"},
    ("LaunchAttributeValue", "CUlaunchAttributeValue"): {
        "pad": "pad",
        "cluster": "clusterDim",
        "cluster.x": "clusterDim.x",
        "cluster.y": "clusterDim.y",
        "cluster.z": "clusterDim.z",
        "programmatic": "programmaticStreamSerializationAllowed",
        "cooperative": "cooperative",
    },
}
FUNCTIONS = dict(re.findall(r"\{&d\.(\w+), \"(cu\w+)\"\}", TEXT))
PRELUDE = """
#include <cuda.h>

#include <type_traits>
#include <utility>

#include "fi/host/driver.h"

#define NAME_OF(x) #x
#define NAME(x) NAME_OF(x)
constexpr bool same(const char* a, const char* b) { return *a == *b && (!*a || same(a + 1, b + 1)); }

// Passed alike: both pointers, or both integers or enums, of one size.
template <class A, class B>
constexpr bool kAlike = sizeof(A) == sizeof(B) && std::is_pointer<A>::value == std::is_pointer<B>::value &&
                        std::is_floating_point<A>::value == std::is_floating_point<B>::value;
template <class A, class B>
struct Same : std::false_type {};
template <class R, class... A, class S, class... B>
struct Same<R (*)(A...), S (*)(B...)> {
  static constexpr bool check() {
    if constexpr (sizeof...(A) == sizeof...(B)) return kAlike<R, S> && (kAlike<A, B> && ...);
    return false;
  }
  static constexpr bool value = check();
};
"""


def compile_unit(lines: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    found = toolchain.nvrtc()
    assert found, "cuda.h comes with nvidia-cuda-runtime"
    unit = folder / "abi.cc"
    unit.write_text(PRELUDE + "\n".join(lines) + "\n")
    command = ["c++", "-std=c++17", "-fsyntax-only", f"-I{INCLUDE}", f"-isystem{found.include}", str(unit)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def functions() -> list[str]:
    """The table of driver.h: a symbol is what cuda.h's macros make of the plain name, and the types are alike."""
    lines = []
    for slot, symbol in FUNCTIONS.items():
        plain = re.sub(r"_v\d+$", "", symbol)
        lines.append(f'static_assert(same(NAME({plain}), "{symbol}"), "the name of {plain}");')
        lines.append(
            f'static_assert(Same<decltype(fi::cu::Driver::{slot}), decltype(&{plain})>::value, "the type of {plain}");'
        )
    return lines


def numbers() -> list[str]:
    return [f'static_assert(int(fi::cu::{ours}) == int({theirs}), "{theirs}");' for ours, theirs in NUMBERS.items()]


def layouts() -> list[str]:
    lines = []
    for (ours, theirs), members in LAYOUTS.items():
        lines.append(f'static_assert(sizeof(fi::cu::{ours}) == sizeof({theirs}), "the size of {theirs}");')
        lines.append(f'static_assert(alignof(fi::cu::{ours}) == alignof({theirs}), "the alignment of {theirs}");')
        for a, b in members.items():
            lines.append(f'static_assert(offsetof(fi::cu::{ours}, {a}) == offsetof({theirs}, {b}), "{theirs}.{b}");')
            sizes = f"sizeof(std::declval<fi::cu::{ours}&>().{a}) == sizeof(std::declval<{theirs}&>().{b})"
            lines.append(f'static_assert({sizes}, "{theirs}.{b}");')
    return lines


@pytest.mark.parametrize("check", [functions, numbers, layouts])
def test_it_is_what_cuda_h_says(check: object, tmp_path: Path) -> None:
    lines = check()  # type: ignore[operator]
    assert len(lines) >= 9
    done = compile_unit(lines, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "wrong",
    [
        'static_assert(same(NAME(cuCtxPushCurrent), "cuCtxPushCurrent"), "");',
        "static_assert(Same<int (*)(void*), decltype(&cuInit)>::value);",
        "static_assert(Same<int (*)(unsigned, int), decltype(&cuInit)>::value);",
        "static_assert(fi::cu::kMajor == int(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR));",
        "static_assert(offsetof(fi::cu::LaunchConfig, stream) == offsetof(CUlaunchConfig, attrs));",
    ],
)
def test_the_check_notices(wrong: str, tmp_path: Path) -> None:
    assert "static assertion failed" in compile_unit([wrong], tmp_path).stderr


def test_every_number_is_known() -> None:
    enums = re.findall(r"^enum(?: \w+)? : \w+ \{([^}]+)\}", TEXT, re.MULTILINE)
    assert enums
    assert {word.split("=")[0].strip() for body in enums for word in body.split(",")} == set(NUMBERS)


def test_every_struct_and_function_is_checked() -> None:
    assert set(re.findall(r"^(?:struct|union)(?: alignas\(\d+\))? (\w+) \{", TEXT, re.MULTILINE)) == {
        "Driver",
        *(ours for ours, _ in LAYOUTS),
    }
    slots = re.findall(r"^  Result \(\*(\w+)\)\(", TEXT, re.MULTILINE)
    assert slots and set(slots) == set(FUNCTIONS)
