"""Tables of pages against the code: a table that lists all of something holds what the code has, and what stands in
backticks in any table exists. A new table fails until it is in one of the two lists below.

Tables that a program writes are compared by test_benchmark_page, test_charts and test_reference; those of docs/notes
are records of measurements.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fi_core
import fi_kernels
from docs.pages import PAGES, ROOT, Table, tables
from docs.test_commands import sessions
from fi_core.attention.wrappers import arguments
from fi_core.integrations import sglang, vllm
from fi_core.registry import ops
from fi_core.runtime.spec.target import PREBUILT_ARCHS

SRC = ROOT / "packages"
TABLES = [table for page in PAGES if "notes" not in page.parts for table in tables(page)]
BY_PLACE = {(table.page, table.head[0]): table for table in TABLES}


def quoted(cells: Iterable[str]) -> set[str]:
    """What stands in backticks, without quotes."""
    return {span.strip('"') for cell in cells for span in re.findall(r"`([^`]+)`", cell)}


def constants(files: Iterable[Path], of: Callable[[ast.AST], ast.AST | None]) -> set[Any]:
    """The constants that `of` finds in nodes of Python files."""
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    return {found.value for node in nodes if isinstance(found := of(node), ast.Constant)}


def _problem(node: ast.AST) -> ast.AST | None:
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "Problem":
        return node.args[2]
    return node.value.elts[0] if isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple) else None


def _timer(node: ast.AST) -> ast.AST | None:
    is_made = isinstance(node, ast.Call) and ast.unparse(node.func) in ("Measurement", "self.measurement")
    return node.args[1] if is_made else None  # type: ignore[attr-defined]


def _level(node: ast.AST) -> ast.AST | None:
    is_level = isinstance(node, ast.Compare) and ast.unparse(node.left) == "settings.level"
    return node.comparators[0] if is_level else None  # type: ignore[attr-defined]


def extras(table: Table) -> tuple[set[str], set[str]]:
    """Of `pip install "fi-core[x]"`."""
    project = (SRC / "fi-core/pyproject.toml").read_text().split("custom.extras]\n")[1].split("\n\n")[0]
    return set(re.findall(r"fi-core\[(\w+)\]", str(table.column("install")))), set(re.findall(r"^\w+", project, re.M))


def packages(table: Table) -> tuple[set[str], set[str]]:
    return set(re.findall(r"fi-[\w-]+", str(table.column("package")))), {path.name for path in SRC.iterdir()}


FAMILIES = {  # of ops, by the rows of the README
    "activation": "activation",
    "attention": "decode attention, prefill attention, cascade attention, mixed and sparse attention, attention forms, "
    "MLA",
    "comm": "communication",
    "concat_ops": "MLA",
    "fused_moe": "mixture of experts",
    "gemm": "gemm",
    "indexer": "sparse attention indexer",
    "linear_attention": "linear attention",
    "lora": "low-rank adapters",
    "mhc": "hyper-connections",
    "norm": "norm",
    "page": "page",
    "quantization": "quantization",
    "rope": "rope",
    "sampling": "sampling",
    "topk": "top-k",
}


def families(table: Table) -> tuple[set[str], set[str]]:
    assert set(FAMILIES) == {op.family for op in ops().values()}
    return set(table.column("family")), {row for rows in FAMILIES.values() for row in rows.split(", ")}


def hooks(table: Table) -> tuple[set[str], set[str]]:
    header = fi_kernels.ROOT / "include/fi/attention/variant_names.h"
    shown = {name for name in quoted(table.column("hook")) if name.isupper()}
    return shown, set(re.findall(r"#define (REGISTER_\w+).*\n(?!  static_assert)", header.read_text()))  # or refuse


def headers(table: Table) -> tuple[set[str], set[str]]:
    """Every header that FlashInfer's guides to its kernels print has a row."""
    printed = "attention/prefill.cuh attention/hopper/prefill_sm90.cuh attention/variants.cuh attention/mask.cuh "
    printed += "attention/decode.cuh attention/cascade.cuh norm.cuh vec_dtypes.cuh pos_enc.cuh mma.cuh utils.cuh "
    known = set(f"{printed} gemm/ comm/".split())
    return quoted(table.column("`flashinfer/`")) & known, known


def files_beside(table: Table) -> tuple[set[str], set[str]]:
    others = {path.name for path in (ROOT / "benchmarks").iterdir()} - {"README.md", "flashinfer_benchmark.py"}
    shown = {re.sub(r"/.*", "", name) for name in quoted(table.column("file"))}
    return shown, {name for name in others if name[0] not in "_."}


# Tables that list all of something: what a table shows, and what the code has.
COMPLETE: dict[tuple[str, str], Callable[[Table], tuple[set[Any], set[Any]]]] = {
    ("README.md", "family"): families,
    ("README.md", "install"): extras,
    ("README.md", "package"): packages,
    ("docs/guides/install.md", "package"): packages,
    ("docs/guides/install.md", "goal"): extras,
    ("CONTRIBUTING.md", "session"): lambda table: (quoted(table.column("session")), set(sessions())),
    ("benchmarks/README.md", "file"): files_beside,
    ("docs/concepts/batch-invariance.md", "op"): lambda table: (quoted(table.column("op")), set(ops())),
    ("docs/concepts/security.md", "problem"): lambda table: (
        quoted(table.column("problem")),
        constants([SRC / "fi-core/src/fi_core/verify.py"], _problem),
    ),
    ("docs/guides/attention.md", "`backend=`"): lambda table: (
        quoted(table.column("`backend=`")),
        set(arguments.DECODE_BACKENDS),
    ),
    ("docs/guides/prefill.md", "`backend=`"): lambda table: (
        quoted(table.column("`backend=`")),
        set(arguments.PREFILL_BACKENDS),
    ),
    ("docs/guides/benchmark.md", "timer"): lambda table: (
        quoted(table.column("timer")),
        constants((SRC / "fi-bench/src/fi_bench/measure").glob("*.py"), _timer),
    ),
    ("docs/guides/custom-attention.md", "hook"): hooks,
    ("docs/guides/custom-attention.md", "`flashinfer/`"): headers,
    ("docs/guides/gemm.md", "name"): lambda table: (
        quoted(table.column("name")),
        {implementation.name for implementation in ops()["gemm"].implementations},
    ),
    ("docs/guides/observability.md", "level"): lambda table: (
        set(map(int, table.column("level"))),
        constants([SRC / "fi-core/src/fi_core/observe/log.py"], _level),
    ),
    ("docs/guides/sglang.md", "SGLang"): lambda table: (set(table.column("SGLang")) - {"others"}, set(sglang.VERSIONS)),
    ("docs/guides/vllm.md", "vLLM"): lambda table: (set(table.column("vLLM")) - {"others"}, set(vllm.VERSIONS)),
}
# Tables that explain: what they name exists, and more exists than they name.
EXPLAINING = {
    ("README.md", "engine"),
    ("SECURITY.md", "question"),
    ("benchmarks/README.md", "FlashInfer's script"),
    ("docs/concepts/security.md", "what"),
    ("docs/concepts/support.md", "what"),  # its numbers: test_release
    ("docs/concepts/way-of-a-call.md", "step"),
    ("docs/guides/adding-an-op.md", "command"),
    ("docs/guides/adding-an-op.md", "file"),
    ("docs/guides/adding-an-op.md", "step"),  # each is taken by test_adding_an_op
    ("docs/guides/benchmark.md", "goal"),
    ("docs/guides/block-scales.md", "format"),
    ("docs/guides/caching.md", "FlashInfer"),
    ("docs/guides/caching.md", "op"),
    ("docs/guides/fp8.md", "function"),
    ("docs/guides/gemm.md", "function"),
    ("docs/guides/migration.md", "use"),
    ("docs/guides/observability.md", "question"),
    ("docs/guides/rope-and-norms.md", "function"),
    ("docs/guides/sampling.md", "filter"),
    ("docs/guides/troubleshooting.md", "message"),  # messages: test_snippets
    ("docs/guides/troubleshooting.md", "question"),
    ("docs/guides/vllm.md", "model"),
    ("docs/index.md", ""),
}
# Columns that show other things than names of fi.
THEIRS = ("FlashInfer", "FlashInfer's script", "`flashinfer/`", "message", "what stays vLLM's")


def test_every_table_is_in_a_list() -> None:
    assert set(BY_PLACE) == {*COMPLETE, *EXPLAINING}


@pytest.mark.parametrize("place", COMPLETE, ids="-".join)
def test_a_list_is_that_of_the_code(place: tuple[str, str]) -> None:
    shown, known = COMPLETE[place](BY_PLACE[place])
    assert known
    assert shown == known


@functools.cache
def vocabulary() -> set[str]:
    """Every word of the sources, and of the names of files."""
    suffixes = (".py", ".pyi", ".h", ".cuh", ".cu", ".cc", ".toml", ".jinja", ".txt")
    folders = (SRC, ROOT / "tools", ROOT / "examples", ROOT / "tests", ROOT / "benchmarks" / "samples")
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in suffixes]
    text = "\n".join(
        path.read_text(errors="replace") for path in [*files, ROOT / "noxfile.py", ROOT / "pyproject.toml"]
    )
    text = text.replace(Path(__file__).read_text(), "")
    names = " ".join(path.as_posix() for path in [*files, *(ROOT / "benchmarks").iterdir()])
    return set(re.findall(r"[A-Za-z_]\w*", f"{text} {names}"))


def is_file(word: str) -> bool:
    core, kernels = SRC / "fi-core/src", fi_kernels.ROOT
    places = (ROOT, ROOT / "benchmarks", kernels, kernels / "include", core, core / "fi_core/runtime")
    return any((place / word).exists() for place in places)


def unknown(span: str) -> Iterator[str]:
    """Words of a span that no source has, and paths of the tree that are not there."""
    span = re.sub(r"\S*<\w+>\S*|~/\S*|\bREASON\b", "", span)  # stand-ins, and places in a home directory
    if re.fullmatch(
        r"[\w./-]+/[\w.-]*\.(py|h|cuh|cc|txt|md|toml)|(?:fi|docs|tests|benchmarks|packages)/[\w/.-]+", span
    ):
        if not is_file(span):
            yield span
        return
    for word in re.findall(r"[A-Za-z_]\w*", span):
        if word not in vocabulary() and not (word[-1] == "_" and any(known.startswith(word) for known in vocabulary())):
            yield word


def resolves(name: str) -> bool:
    found: Any = fi_core
    try:
        for part in name.removeprefix("fi_core.").split("."):
            found = getattr(found, part)
    except AttributeError:
        return False
    return callable(found)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"{table.page} {table.head[0]}")
def test_what_a_table_names_exists(table: Table) -> None:
    missing = []
    for title, *column in zip(table.head, *table.rows, strict=True):
        text = re.sub(r"{\w+}`[^`]+`", "", " ".join(column))  # links to pages, which Sphinx checks
        shown = re.findall(r"`([^`]+)`", text)
        for span in shown if title not in THEIRS else ():
            if re.fullmatch(r"\.\.\.\w+", span):
                missing += [] if any(name.endswith(span[3:]) for name in fi_core.__all__) else [span]
            elif title in ("function", "functions"):
                missing += [] if resolves(span) else [span]
            else:
                missing += [f"{word} of `{span}`" for word in unknown(span)]
    assert missing == []


def test_architectures_of_the_packages() -> None:
    """Wherever a page lists the prebuilt architectures."""
    listed = {}
    for page in PAGES:
        for found in re.findall(r"((?:sm_\w+,? (?:and )?){3,}sm_\w+)", page.read_text()):
            listed[page.name, found] = re.findall(r"sm_(\w+)", found)
    assert len(listed) >= 3
    assert {place: archs for place, archs in listed.items() if archs != list(PREBUILT_ARCHS)} == {}
