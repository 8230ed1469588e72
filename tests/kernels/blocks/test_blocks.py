"""Device building blocks: unit kernels on the card against exact references, and their machine code without one."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fi_kernels
from fi_core.jit import gen_jit_spec
from fi_core.runtime.resolve import built
from fi_core.runtime.spec.op import Entry
from kernels.test_device_code import complaints

HERE = Path(__file__).parent
# Threads, bytes of dynamic shared memory, and rows of the boxes of a and b that the kernel loads.
KERNELS = {
    "copy_cp_async": (256, 0, 64, 64),
    "wgmma_bf16": (128, 64 * 256 + 128 * 256 + 1024 + 1024, 64, 128),
    "wgmma_e4m3": (128, 64 * 256 + 128 * 256 + 1024 + 1024, 64, 128),
    "wgmma_registers": (128, 64 * 256 + 1024 + 1024, 64, 64),
    "visit_dynamic": (32, 0, 64, 64),
}
NAMES = list(KERNELS)


def spec() -> Any:
    entries = [Entry(name, "", threads, (), shared) for name, (threads, shared, *_) in KERNELS.items()]
    flags = ["-gencode=arch=compute_90a,code=sm_90a"]
    return gen_jit_spec("blocks", [HERE / "blocks.cc", HERE / "blocks.cu"], extra_cuda_cflags=flags, entries=entries)


def run(name: str, out: Any, a: Any, b: Any, grid: int, group_m: int = 1, counters: Any = None) -> Any:
    import torch

    _, _, rows_a, rows_b = KERNELS[name]
    counters = torch.zeros(2, dtype=torch.int32, device="cuda") if counters is None else counters
    call: Callable[..., Any] = spec().bind()
    call(out, a, b, counters, NAMES.index(name), grid, rows_a, rows_b, group_m)
    torch.cuda.synchronize()
    return out


def integers(rows: int, columns: int, dtype: Any, largest: int = 4) -> Any:
    """Small integers: products and sums are exact in fp32."""
    import torch

    generator = torch.Generator("cuda").manual_seed(rows * 1000 + columns)
    x = torch.randint(-largest, largest + 1, (rows, columns), generator=generator, device="cuda")
    return x.float().to(dtype)


def test_swizzle_is_the_xor_of_address_bits(tmp_path: Path) -> None:
    """TMA and wgmma XOR address bits 7 to 9 into bits 4 to 6 of the unswizzled offset."""
    program = tmp_path / "offsets"
    include = fi_kernels.ROOT / "include"
    subprocess.run(
        ["c++", f"-I{include}", "-x", "c++", str(HERE / "swizzle_offsets.cc"), "-o", str(program)], check=True
    )
    found = [int(line) for line in subprocess.run([program], capture_output=True, check=True, text=True).stdout.split()]
    plain = [c // 64 * 16 * 128 + r * 128 + c % 64 * 2 for r in range(16) for c in range(128)]
    assert found == [x ^ (x >> 7 & 7) << 4 for x in plain]


@pytest.mark.jit
def test_unit_kernels_compile_without_spills() -> None:
    (image,) = [artifact for artifact in spec().artifacts if artifact.kind == "cubin"]
    assert complaints(built(image).path) == []


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.jit
def test_pipeline_takes_cp_async_producers() -> None:
    """Sixteen iterations of a ring of two stages; each tile of 512 floats comes out rotated by four."""
    import torch

    a = torch.randn(64, 128, device="cuda")
    room = torch.empty(64, 128, dtype=torch.float32, device="cuda")
    maps = torch.zeros(64, 128, dtype=torch.bfloat16, device="cuda")  # what the launcher describes for TMA
    out = run("copy_cp_async", room, a.view(torch.bfloat16).view(64, 256), maps, 1)
    assert torch.equal(out.view(-1, 512), a.view(-1, 512).roll(-4, 1))


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.jit
@pytest.mark.parametrize(
    ("name", "dtype", "k"), [("wgmma_bf16", "bfloat16", 128), ("wgmma_e4m3", "float8_e4m3fn", 256)]
)
def test_wgmma_tile_of_shared_operands(name: str, dtype: str, k: int) -> None:
    import torch

    kind = getattr(torch, dtype)
    a, b = integers(64, k, kind), integers(128, k, kind)
    out = run(name, torch.empty(64, 128, device="cuda"), a, b, 1)
    assert torch.equal(out.double(), a.double() @ b.double().T)


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.jit
def test_wgmma_tile_with_a_in_registers() -> None:
    import torch

    a, b = integers(64, 64, torch.bfloat16), integers(64, 128, torch.bfloat16)
    out = run("wgmma_registers", torch.empty(64, 128, device="cuda"), a, b, 1)
    assert torch.equal(out.double(), a.double() @ b.double())


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.jit
@pytest.mark.parametrize(("m", "n", "group_m", "grid"), [(7, 5, 3, 4), (1, 13, 8, 132), (17, 1, 4, 3), (9, 9, 9, 81)])
def test_dynamic_tiles_are_taken_once(m: int, n: int, group_m: int, grid: int) -> None:
    """Twice with the same counters: the last CTA makes them ready for the next launch."""
    import torch

    counters = torch.zeros(2 + m * n, dtype=torch.int32, device="cuda")
    a = torch.zeros(64, 64, dtype=torch.bfloat16, device="cuda")
    for launches in (1, 2):
        run("visit_dynamic", torch.empty(m, n, device="cuda"), a, a, grid, group_m, counters)
        assert counters[2:].unique().tolist() == [launches]
        assert counters[:2].tolist() == [0, 0]
