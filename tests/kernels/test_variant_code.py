"""Device code with attention variants, without a GPU: it compiles by NVRTC and nvcc, and registers suffice."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from families.variants import EXAMPLES, Example
from fi_core.attention.custom import VariantModule
from fi_core.attention.ops.decode import BATCH_DECODE
from fi_core.attention.ops.prefill import BATCH_PREFILL
from fi_core.jit import attention as jit
from fi_core.runtime.build import compiler, sources, toolchain
from fi_core.runtime.dispatch import Request, choose
from fi_core.runtime.errors import CompileError
from fi_core.runtime.resolve import built
from fi_core.runtime.spec.op import Op
from fi_core.runtime.spec.target import Target
from kernels.test_device_code import said_of

pytestmark = pytest.mark.slow
F16, BF16, E4M3 = torch.float16, torch.bfloat16, torch.float8_e4m3fn


def module(form: str, example: Example, dim: int = 128, kv: torch.dtype = BF16, text: str = "") -> VariantModule:
    types = (BF16, kv, BF16)
    *lists, name, written = example.declared()
    declared = (*lists, name, text or written)
    if form in ("batch_prefill", "batch_prefill auto"):
        backend = "auto" if form.endswith("auto") else "fa2"  # auto: wgmma on Hopper
        return jit.gen_customize_batch_prefill_module(backend, "code", *types, torch.int32, dim, dim, *declared)
    if form == "batch_decode":
        return jit.gen_customize_batch_decode_module("code", *types, torch.int32, dim, dim, *declared)
    if form == "single_prefill":
        return jit.gen_customize_single_prefill_module("fa2", "code", *types, dim, dim, *declared)
    return jit.gen_customize_single_decode_module("code", *types, dim, dim, *declared)


FORMS = ("batch_prefill", "batch_decode", "single_prefill", "single_decode")
# Each example in some form, each form with some example, 8-bit keys and wide heads.
CASES = [
    *((form, example, 128, BF16) for form, example in zip(FORMS * 2, EXAMPLES)),
    ("batch_prefill", EXAMPLES[-1], 128, E4M3),
    ("batch_decode", EXAMPLES[0], 512, BF16),
    *(("batch_prefill auto", EXAMPLES[i], dim, BF16) for i, dim in ((0, 64), (4, 128), (2, 256))),
]


@pytest.mark.parametrize("arch", ["80", "90a"])
@pytest.mark.parametrize(("form", "example", "dim", "kv"), CASES, ids=[f"{f}-{e.name}-{d}-{k}" for f, e, d, k in CASES])
def test_registers_suffice(form: str, example: Example, dim: int, kv: torch.dtype, arch: str) -> None:
    _, unit = module(form, example, dim, kv).made.artifacts(Target("cuda", arch))
    binary = built(unit).path
    assert not binary.with_suffix(".log").exists(), "the compiler is content"
    usage = said_of(binary, "cuobjdump", "-res-usage")
    found = re.findall(r"Function (\S+):\s+REG:\d+ STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert found
    # A word or two may not fit beside a hook that is inlined 32 times; three blocks a multiprocessor are worth more.
    assert [name for name, stack, local in found if int(stack) > 16 or int(local)] == []


@pytest.mark.parametrize(
    ("op", "implementation", "given"),
    [
        (BATCH_PREFILL, "wgmma_sm90", {}),
        (BATCH_PREFILL, "wgmma_sm90", {"q": "e4m3", "kv": "e4m3"}),
        (BATCH_PREFILL, "mma_sm80", {}),
        (BATCH_DECODE, "tma_sm90", {}),
        (BATCH_DECODE, "mma_sm80", {"kv": "e4m3"}),
        (BATCH_DECODE, "cuda_core", {"q": "f32", "kv": "f32", "out": "f32"}),
    ],
)
def test_kernels_with_two_page_tables_have_registers(op: Op, implementation: str, given: dict[str, str]) -> None:
    request = Request.of(op, Target("cuda", "90a"), {**given, "split_tables": True}, implementation)
    _, unit = sources.artifacts(choose(request).spec)
    binary = built(unit).path
    assert not binary.with_suffix(".log").exists(), "the compiler is content"
    stacks = re.findall(r"STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", said_of(binary, "cuobjdump", "-res-usage"))
    assert stacks and all(stack == local == "0" for stack, local in stacks)


@pytest.mark.skipif(toolchain.nvcc() is None or shutil.which("c++") is None, reason="needs nvcc and a C++ compiler")
def test_nvcc_takes_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "device_compiler", lambda: "nvcc")
    _, unit = module("single_decode", EXAMPLES[4]).made.artifacts(Target("cuda", "80"))
    binary = built(unit).path
    assert binary.read_bytes()[:4] == b"\x7fELF"
    assert not binary.with_suffix(".log").exists()


WRONG = "struct Sink : AttentionVariantBase {\n  static constexpr bool use_softmax = false;\n  floot scale;\n};\n"


def test_errors_are_those_of_the_users_text(tmp_path: Path) -> None:
    """The file is called variant_decl, and its lines are counted from the beginning of the text."""
    _, unit = module("single_decode", EXAMPLES[4], text=WRONG).made.artifacts(Target("cuda", "90a"))
    with pytest.raises(CompileError, match=r"failed: variant_decl[(]3[)]: error: .*floot"):
        compiler.compile_artifact(unit, tmp_path)


def test_what_has_no_hook_says_what_to_do(tmp_path: Path) -> None:
    text = EXAMPLES[4].text.replace("};\n", "  REGISTER_QUERY_TRANSFORM(params, q, { return q; })\n};\n")
    _, unit = module("single_decode", EXAMPLES[4], text=text).made.artifacts(Target("cuda", "90a"))
    with pytest.raises(CompileError, match=r"variant_decl.*transform q before the call"):
        compiler.compile_artifact(unit, tmp_path)
