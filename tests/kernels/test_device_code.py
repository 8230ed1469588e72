"""Device binaries as compilers make them: no spills, no complaint, 128-bit accesses, small files.

All implementations and prebuilt axes of all ops are compiled by NVRTC for sm_80 and sm_90a, and one configuration of
each implementation for sm_89, sm_100a and sm_120a, with registers, stack and compiler output checked. nvcc compiles a
sample. Machine code is read for sm_90a only: it costs half a second a file. Binaries go to the store (FI_CACHE_DIR),
what the tools say of them beside it, so that workers, sessions and later runs share them.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fi_core.aot import specs
from fi_core.registry import ops
from fi_core.runtime.build import compiler, nvrtc, sources, toolchain
from fi_core.runtime.dispatch import Request, choose
from fi_core.runtime.resolve import built
from fi_core.runtime.spec.op import Spec
from fi_core.runtime.spec.target import Target
from kernels.kept import kept

pytestmark = pytest.mark.slow
TUNED = "90a"
LARGEST_FILE = 440_000  # bytes
# all_reduce in two shots has a kernel for each number of ranks and of vectors; the loops of causal_conv1d are longer on
# Blackwell; GEMM has up to 16 tiles, of which ten store a transpose.
LARGEST_FILES = {"all_reduce": 660_000, "causal_conv1d": 450_000, "gemm": 580_000}
LARGEST_SET = 40_800_000  # of one architecture; fi-cubin packs it to a fifth

# Entries that may do without 128-bit accesses: those for unaligned tensors, and ops that move only a few integers.
NARROW = {
    "act_and_mul": r"_[12]_\d+",
    "append_nvfp4_kv_cache": r"_elements",
    "append_paged_kv_cache": r"_[124]_bytes_\d+_rows",
    "block_dequantize": r"block_dequantize",
    "block_quantize": r"_elements",
    "block_scale_interleave": r"_4",
    "causal_conv1d": r"_\d_1",
    "chunk_gated_delta_rule": r"carry_states",
    "concat_mla_k": r"_[1248]",
    "decode_plan": r"",
    "get_batch_indices_positions": r"",
    "gemm": r"_elements",
    "gemm_fp32_weights": r"_1",
    "get_seq_lens": r"_int\d+",
    "merge_state": r"_1_wide",
    "moe_activation": r"_elements",
    "moe_finalize": r"_1",
    "moe_gather": r"_[12]x1",
    "moe_route": r"",
    "moe_sort": r"",
    "mqa_logits": r"",
    "merge_states": r"_1_wide_4",
    "packbits": r"_bytes",
    "rope": r"_1",
    "rope_quantize": r"_1",
    "prefill_plan": r"prefill_plan",
    "selective_state_update": r"_elements",
    "single_attention": r"combine_chunks",
}
# Bytes of stack that kernels of an op may have, on one architecture or on all. MLA has two to twenty registers too few,
# of 168 or 255; prepare_chunks has two too few but on sm_90 and sm_120, of the 96 that let an SM have five CTAs;
# batch_prefill_mma for any head dim has two too few, of 255, on sm_89, and on sm_90 where it reads fp8; warpgroups of
# batch_prefill_wgmma_gathered have two to four too few, of 24 and 144, outside of their steps, and converting warps of
# batch_prefill_wgmma_mixed two, of 32;
# recurrent_gated_delta_rule with a bf16 state has four too few on sm_80, of 128; causal_conv1d of four taps has up to
# 26 too few on Blackwell, of 128; all_reduce in two shots with a norm has four too few, of 64 or 128.
STACK = {
    "all_reduce": 16,
    "batch_mla": 80,
    "batch_prefill on sm_89": 8,
    "batch_prefill by mma_sm80 on sm_90a": 8,
    "batch_prefill over e4m3": 16,
    "batch_prefill over e5m2": 16,
    "causal_conv1d on sm_100a": 104,
    "causal_conv1d on sm_120a": 72,
    "chunk_gated_delta_rule": 8,
    "concat_mla_k": 8,
    "moe_gather": 8,
    "recurrent_gated_delta_rule on sm_80": 16,
}
# Bits of the widest load where it is not 128: attention takes eight elements at a time (head dims are such), sums of
# pairs four.
LOADS = {"lora_sum": {"None": 64}, "single_attention": {"e4m3": 64, "e5m2": 64}}
# Bits of the widest store of an op or an entry where it is not 128: outputs that are smaller than inputs, and one
# result for many loads.
STORES = {
    "append_nvfp4_kv_cache": 64,
    "batch_mla": 64,
    "chain_speculative": 32,
    "chunk_gated_delta_rule": 64,
    "gemm": 32,
    "gemm_few_bits": 32,
    "gemm_fp32_weights": 32,
    "lora_delta": 32,
    "lora_sum": 64,
    "moe_mixed_gemm": 16,
    "moe_experts": 32,
    "moe_few_tokens": 16,
    "packbits": 16,
    "prepare_chunks": 32,
    "sample_cluster_512": 64,
    "sample_cta_512": 64,
    "sample_single_pass_512": 64,
    "single_attention": 32,
    "ssd_combined": 32,
    "top_k": 64,
}


def of_arch(arch: str) -> list[Spec]:
    return [spec for op in ops().values() for spec in specs(op, Target("cuda", arch))]


def one_of_each(arch: str) -> list[Spec]:
    """The first configuration of each implementation."""
    found: dict[tuple[str, str], Spec] = {}
    for spec in of_arch(arch):
        found.setdefault((spec.op.name, spec.implementation), spec)
    return list(found.values())


def for_nvcc() -> list[Spec]:
    """Of one_of_each: the implementations that only Hopper has, and the unit with most entries of each family."""
    everywhere = {(spec.op.name, spec.implementation) for spec in of_arch("80")}
    specs = one_of_each(TUNED)
    largest = {spec.op.family: spec for spec in sorted(specs, key=lambda spec: len(entries_of(spec)))}
    return [s for s in specs if (s.op.name, s.implementation) not in everywhere or s is largest[s.op.family]]


def entries_of(spec: Spec) -> list[str]:
    unit = spec.unit()
    assert unit
    return [entry.name for entry in unit.entries]


def states_of_few_bits(arch: str) -> list[Spec]:
    """selective_state_update of states that no package has: fp16 ones are rounded at random, others are integers."""
    op, target = ops()["selective_state_update"], Target("cuda", arch)
    return [choose(Request.of(op, target, {"state": state})).spec for state in ("f16", "i16", "i8")]


def packed_pages(arch: str) -> Spec:
    """batch_mla over packed pages, which no package has."""
    op, target = ops()["batch_mla"], Target("cuda", arch)
    return choose(Request.of(op, target, {"kv": "u8", "sparse": True, "has_rope": False})).spec


CHECKED = [*of_arch("80"), *of_arch(TUNED), *(spec for arch in ("89", "100a", "120a") for spec in one_of_each(arch))]
CHECKED += [spec for arch in ("80", TUNED) for spec in (*states_of_few_bits(arch), packed_pages(arch))]


def image(spec: Spec) -> Path:
    """The binary of a spec, compiled now unless the store has it."""
    _, artifact = sources.artifacts(spec)
    return built(artifact).path


@functools.cache
def tool(name: str) -> str:
    """cuobjdump and nvdisasm: on PATH, in a toolkit, or in the folder of the pip packages."""
    home = toolchain.cuda_home()
    places = [*(Path(p) / "nvidia/cu13/bin" for p in sys.path), *([home / "bin"] if home else [])]
    found = shutil.which(name) or next((str(p / name) for p in places if (p / name).is_file()), None)
    assert found, f"{name} is missing: pip install nvidia-cuda-{name}"
    return found


def run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def said_of(binary: Path, name: str, *options: str, pick: Callable[[str], str] = str) -> str:
    """What a tool says of a binary; `pick` takes from it what is kept."""
    program = Path(tool(name))
    version = f"{name} {' '.join(options)} {program.stat().st_size}"
    return kept(name, version, binary.read_bytes(), ask=lambda: pick(run(program, *options, binary)))


def functions(binary: Path) -> list[str]:
    return sorted(re.findall(r"Function (\S+):", said_of(binary, "cuobjdump", "-res-usage")))


def complaints(binary: Path, most: int = 0) -> list[str]:
    """What is wrong with a binary: a stack above `most` bytes, local memory, or anything that its compiler said."""
    found = []
    usage = said_of(binary, "cuobjdump", "-res-usage")
    usages = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    if not usages:
        found.append("no function")
    for name, registers, stack, _, local in usages:
        if int(stack) > most or int(local):
            found.append(f"{name}: {stack} bytes of stack, {local} of local memory with {registers} registers")
    log = binary.with_suffix(".log")
    if log.exists():
        found.append(log.read_text())
    return found


def opcodes(text: str) -> str:
    """JSON of the instructions that each function in a disassembly has, each once, without operands: "LDG.E.128"."""
    found: dict[str, list[str]] = {}
    for name, body in re.findall(r"^\.text\.(\S+):\n(.*?)(?=^//--|\Z)", text, re.MULTILINE | re.DOTALL):
        code = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ +)?([A-Z][\w.]+)", body, re.MULTILINE)
        found[name] = sorted(set(code))
    return json.dumps(found)


def machine_code(binary: Path) -> dict[str, list[str]]:
    """The instructions that each function of a binary has."""
    return json.loads(said_of(binary, "nvdisasm", "-c", "-ndf", pick=opcodes))  # type: ignore[no-any-return]


def width(instruction: str) -> int:
    """Bits a thread moves by a load or store; a bulk copy moves more than any register holds."""
    if instruction.startswith(("UTMA", "UBLKCP")):
        return 1024
    found = re.search(r"\.(?:[US])?(8|16|64|128|256)(?![\w])", instruction)
    return int(found[1]) if found else 32


def widest(code: list[str], *prefixes: str) -> int:
    return max((width(i) for i in code if i.split(".")[0] in prefixes), default=0)


def store_bits(spec: Spec, entry: str) -> int:
    """The widest store that vectors of 16 bytes on the input side give."""
    axes, bits = dict(spec.axes), {"f32": 32, "f16": 16, "bf16": 16, "e4m3": 8, "e5m2": 8, "e2m1": 4}
    narrowing = bits[str(axes["dtype"])] // bits[str(axes["out"])] if {"dtype", "out"} <= set(axes) else 1
    return STORES.get(entry, STORES.get(spec.op.name, 128 // max(narrowing, 1)))


def stack_of(spec: Spec) -> int:
    """Bytes of stack that the kernels of a spec may have."""
    op, target, kv = spec.op.name, spec.target, dict(spec.axes).get("kv")
    keys = op, f"{op} on {target}", f"{op} by {spec.implementation} on {target}", f"{op} over {kv}"
    return max(STACK.get(key, 0) for key in keys)


def by_name(spec: Spec) -> str:
    return spec.name


@pytest.mark.parametrize("spec", CHECKED, ids=by_name)
def test_registers_suffice_and_the_compiler_is_content(spec: Spec) -> None:
    binary = image(spec)
    found = complaints(binary, stack_of(spec))
    assert not found, "\n".join(found)
    assert binary.stat().st_size <= LARGEST_FILES.get(spec.op.name, LARGEST_FILE)


@pytest.mark.parametrize("spec", of_arch(TUNED), ids=by_name)
def test_memory_is_accessed_by_128_bits(spec: Spec) -> None:
    code = machine_code(image(spec))
    assert sorted(code) == sorted(entries_of(spec))
    narrow = re.compile(rf"\w*?(?:{NARROW.get(spec.op.name, '_scalar')})")
    loads, stores = {}, {}
    for name, instructions in code.items():
        assert "EXIT" in instructions
        local = [i for i in instructions if i.split(".")[0] in ("LDL", "STL")]
        assert local == [] or stack_of(spec), f"{name} uses local memory"
        if not narrow.fullmatch(name):
            loads[name] = widest(instructions, "LDG", "LD", "LDGSTS", "UTMALDG", "UBLKCP")
            stores[name] = widest(instructions, "STG", "UTMASTG", "UBLKCP")
    least = LOADS.get(spec.op.name, {}).get(str(dict(spec.axes).get("kv")), 128)
    assert {name: bits for name, bits in loads.items() if bits < least} == {}
    assert {name: bits for name, bits in stores.items() if bits < store_bits(spec, name)} == {}


@pytest.mark.parametrize("spec", for_nvcc(), ids=by_name)
def test_nvcc_makes_it_too(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    assert toolchain.nvcc(), "nvcc is missing: pip install 'cuda-toolkit[nvcc,crt,nvvm,cccl]==13.0.*'"
    before = image(spec)
    monkeypatch.setenv("FI_CUDA_COMPILER", "nvcc")
    binary = image(spec)
    assert binary != before
    found = complaints(binary, stack_of(spec))
    assert not found, "\n".join(found)
    assert functions(binary) == functions(before)


def test_all_binaries_of_an_architecture_are_small() -> None:
    sizes = {spec.name: image(spec).stat().st_size for spec in of_arch(TUNED)}
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:10]
    assert sum(sizes.values()) <= LARGEST_SET, f"{sum(sizes.values())} bytes; the largest are {largest}"


def test_every_narrow_entry_exists() -> None:
    """A row of NARROW or STORES that no entry needs would excuse a later one."""
    names = {name: [e for s in specs(op, Target("cuda", TUNED)) for e in entries_of(s)] for name, op in ops().items()}
    for op, pattern in NARROW.items():
        assert any(re.fullmatch(rf"\w*?(?:{pattern})", name) for name in names[op]), op
    assert set(STORES) <= {*names, *(entry for entries in names.values() for entry in entries)}


SPILL = """
extern "C" __global__ void spill(const int* i, float* x) {
  float values[64];
  for (int k = 0; k < 64; ++k) values[k] = x[k];
  values[i[0]] += 1.f;
  x[0] = values[i[1]];
}
extern "C" __global__ void fine(float* x) { x[threadIdx.x] *= 2.f; }
"""
# Touches accumulators between the start of wgmma and its wait, so ptxas must serialise: note C7514 or a neighbour.
SERIALISED = """
extern "C" __global__ void serialised(float* out, unsigned long long a, unsigned long long b, int n) {
  float d[4] = {};
  for (int i = 0; i < n; ++i) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, 1, 0;"
        " wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, p, 1, 1, 0, 0; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    d[0] *= 2.f;
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  }
  for (int k = 0; k < 4; ++k) out[threadIdx.x * 4 + k] = d[k];
}
"""


def compiled(source: str, folder: Path) -> Path:
    binary = folder / "control.cubin"
    image, log = nvrtc.compile_cubin(source, "control", [f"-arch=sm_{TUNED}", *compiler.DEVICE_FLAGS])
    binary.write_bytes(image)
    if log:
        binary.with_suffix(".log").write_text(log)
    return binary


def test_the_checks_notice(tmp_path: Path) -> None:
    spills = compiled(SPILL, tmp_path)
    (complaint,) = complaints(spills)
    assert re.match(r"spill: \d+ bytes of stack", complaint)
    code = machine_code(spills)
    assert widest(code["spill"], "LDL", "STL") and not widest(code["fine"], "LDL", "STL")
    assert widest(code["fine"], "LDG") == widest(code["fine"], "STG") == 32
    serialised = compiled(SERIALISED, tmp_path)
    assert any("C75" in complaint for complaint in complaints(serialised))


@pytest.mark.parametrize(
    ("instruction", "bits"),
    [
        ("LDG.E.128", 128),
        ("LDG.E.128.CONSTANT", 128),
        ("LDG.E.ENL2.256", 256),
        ("STG.E.64", 64),
        ("LDG.E", 32),
        ("LDG.E.U16.CONSTANT", 16),
        ("STG.E.U8", 8),
        ("LDGSTS.E.BYPASS.128", 128),
        ("UTMALDG.2D", 1024),
    ],
)
def test_widths_of_instructions(instruction: str, bits: int) -> None:
    assert width(instruction) == bits
