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


# What orders shared memory for another proxy or thread: a proxy fence, an arrival at a raw barrier, and a stage that
# one thread gives back for others. Pipelines and wrappers of include/fi/cuda own them; elsewhere a comment says why:
# "// order: <rule>: <reason>", on the line or up to three lines above (docs/notes/synchronisation-order).
RAW_ORDER = re.compile(
    r"\bfence_async\w*\(|\b__threadfence\w*\(|\.arrive(_at|_copies)?\("
    r"|\bif \([^;{}]*(== 0|leads\(\))[^;{}]*\)[^;{}]*\.release\("
    r"|\bif \([^;{}]*(== 0|leads\(\))[^;{}]*\) \{[^{}]*\.release\("
)
RULES = {"writer", "waiter", "refill", "group", "lane", "thread", "cluster"}
# Their instructions themselves, as text of inline assembly.
ORDERING_PTX = re.compile(r"fence|membar|mbarrier|\bbar\.|barrier\.|\.(release|acquire|acq_rel)\b")


def outside_of_the_blocks() -> list[Path]:
    return [path for path in NATIVE if not path.is_relative_to(INCLUDE / "fi" / "cuda")]


def unordered(text: str) -> list[str]:
    """The lines of a source that order memory and give no reason of a known rule."""
    lines, found = text.splitlines(), []
    code = "\n".join(line.partition("//")[0] for line in lines)
    for match in RAW_ORDER.finditer(code):
        first, last = (code.count("\n", 0, at) for at in match.span())
        words = re.findall(r"// order: (\w+): \S", "\n".join(lines[max(0, first - 3) : last + 1]))
        if not RULES.intersection(words):
            found.append(f"{first + 1}: {lines[first].strip()}")
    return found


def test_raw_ordering_outside_of_the_blocks_has_a_reason() -> None:
    found = [f"{relative(path)}:{line}" for path in outside_of_the_blocks() for line in unordered(path.read_text())]
    assert not found, "\n".join(found)


def test_what_orders_without_a_reason_is_found() -> None:
    for text in (
        "fence_async_shared();",
        "full.arrive_copies();  // a comment",
        "if (lane == 0) ring.release(1);",
        "if (c.thread == 0 && last) {\n  x = 1;\n  ring.release(1);\n}",
        "if (leads()) ring.release(1);",
        "fence_async_shared();  // order: because: I say so",
    ):
        assert len(unordered(text)) == 1, text
        assert unordered(f"// order: group: all have met\n{text}") == []
    for text in ("ring.release_warp(1, lane);", "if (lane == 0) x = 1;\nring.release(1);", "// full.arrive();"):
        assert unordered(text) == [], text


def test_no_ordering_instruction_outside_of_the_blocks() -> None:
    wrong = []
    for path in outside_of_the_blocks():
        for assembly in re.findall(r"\basm\b[^;]*?\(((?:\s*\"[^\"]*\")+)", path.read_text()):
            wrong += [f"{relative(path)}: {assembly}"] if ORDERING_PTX.search(assembly) else []
    assert not wrong, "\n".join(wrong)
