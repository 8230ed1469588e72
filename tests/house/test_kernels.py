"""Rules of the kernel sources: which headers they may include, and one stem for an op in every tree."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from house.tree import CORE, KERNELS, files_of, parse, relative

INCLUDE = KERNELS / "include"
NATIVE = files_of(KERNELS, ".h", ".cuh", ".cc", ".cu")
# NVRTC brings no standard library, and torch's wheels bring no cccl: a unit for the device may use only these.
DEVICE_SYSTEM_HEADERS = {"cuda_bf16.h", "cuda_fp16.h", "cuda_fp8.h"}
TYPES = INCLUDE / "fi" / "types.h"  # names the fixed-width types for both sides, so it alone asks which compiler it is
FOREIGN = re.compile(r"^(torch|ATen|c10|pybind11|cutlass|cute|cub|thrust|cooperative_groups|nvrtc|cudnn|cublas)\b")


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE)


def test_no_foreign_header() -> None:
    assert NATIVE
    wrong = [f"{relative(path)}: {name}" for path in NATIVE for name in includes(path) if FOREIGN.match(name)]
    assert not wrong, "\n".join(wrong)


def test_own_headers_exist() -> None:
    """In the tree, or among those that are generated from the declarations of ops."""
    from fi_core.registry import ops

    generated = {op.header for op in ops().values()}
    wrong = [
        f"{relative(path)}: {name}"
        for path in NATIVE
        for name in includes(path)
        if name.startswith("fi/") and name not in generated and not (INCLUDE / name).is_file()
    ]
    assert not wrong, "\n".join(wrong)
    assert not (INCLUDE / "fi" / "generated").exists(), "generated headers are written where a unit is compiled"


def test_an_op_is_four_short_files() -> None:
    """silu_and_mul with its two relatives, the CPU and CUDA kernels, the description and the reference."""
    own = [CORE / "activation.py", *(path for path in NATIVE if path.stem == "act_and_mul")]
    lengths = {relative(path): len(path.read_text().splitlines()) for path in own}
    assert len(lengths) == 4 and sum(lengths.values()) <= 280, lengths


def test_device_units_reach_only_device_headers() -> None:
    """Follows the includes of each .cuh: nothing of the host or of the C++ library is reached."""
    wrong = []
    for start in files_of(INCLUDE, ".cuh"):
        todo, seen = [start], {start}
        while todo:
            path = todo.pop()
            for name in includes(path) if path != TYPES else []:
                target = INCLUDE / name
                host = name.startswith(("fi/host/", "fi/cpu/"))
                if host or not (name.startswith("fi/") or name in DEVICE_SYSTEM_HEADERS):
                    wrong.append(f"{relative(start)} reaches {name} through {relative(path)}")
                elif name.startswith("fi/") and target not in seen:
                    seen.add(target)
                    todo.append(target)
    assert not wrong, "\n".join(wrong)


def test_every_op_is_four_files() -> None:
    """The declaration in the family, the contract, the kernel, which may name an architecture, and the host entry."""
    from fi_core.registry import ops

    declared = [
        (path.relative_to(CORE).with_suffix("").parts[0], word.value.value)
        for path in files_of(CORE, ".py")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Op"
        for word in node.keywords
        if word.arg == "name" and isinstance(word.value, ast.Constant)
    ]
    wrong = []
    for op in ops().values():
        names = [path.name for path in files_of(INCLUDE / "fi" / op.family, ".h", ".cuh")]
        kernel = re.compile(rf"{op.name}(_sm\d+)?\.cuh")
        fits = (
            declared.count((op.family, op.name)) == 1,
            names.count(f"{op.name}.h") == 1,
            any(map(kernel.fullmatch, names)),
            (KERNELS / op.source).is_file(),
        )
        wrong += [] if all(fits) else [f"{op.name}: {fits}"]
    assert len(ops()) >= 40
    assert not wrong, "\n".join(wrong)


def test_every_op_is_benchmarked() -> None:
    """In a case of fi-bench, by a description that makes one, or in `collectives` if it needs several processes."""
    from fi_bench import cases, collectives
    from fi_core.observe.trace import every_described
    from fi_core.registry import ops

    names = ops().keys()  # loads the descriptions
    listed = {op for case in cases.every() for op in (case.op, *case.also)}
    described = {op for found in every_described() if found.template.work for op in found.template.ops}
    assert names - listed - described == set(collectives.OPS)


def test_no_source_without_an_op() -> None:
    from fi_core.registry import ops

    used = {KERNELS / op.source for op in ops().values()}
    assert sorted(relative(p) for p in files_of(KERNELS / "csrc", ".cc") if p not in used) == []


# Instructions that order shared memory for another proxy or thread: a proxy fence, an arrival at a raw barrier, and a
# stage that one lane gives back for its warp. Pipelines and wrappers of include/fi/cuda own them; a line elsewhere says
# why in a comment "// order: <rule>: <reason>", on it or within three lines above.
RAW_ORDER = re.compile(
    r"\bfence_async\w*\(|\.arrive(_at|_copies)?\("
    r"|if \((\w+\.)?(lane|thread|threadIdx\.x % (32|128)) == 0[^;]*\.release\("
)
ORDERED = re.compile(r"// order: \w+: \S")
WITHOUT_A_REASON = 62  # lines; the number only falls


def test_raw_ordering_outside_of_the_blocks_has_a_reason() -> None:
    found = []
    for path in files_of(INCLUDE, ".h", ".cuh"):
        if path.is_relative_to(INCLUDE / "fi" / "cuda"):
            continue
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            code = line.partition("//")[0]
            if RAW_ORDER.search(code) and not ORDERED.search("\n".join(lines[max(0, number - 3) : number + 1])):
                found.append(f"{relative(path)}:{number + 1}: {code.strip()}")
    assert len(found) <= WITHOUT_A_REASON, "\n".join(
        [f"{len(found)} lines, of which a new one needs a reason:", *found]
    )
