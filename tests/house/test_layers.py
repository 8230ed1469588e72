"""Imports run one way, through every module and both trees of folders; there is no circle."""

from __future__ import annotations

import re

from house.tree import CORE, KERNELS, PACKAGES, circles, files_of, imported, imports, module_name, modules, relative

# Lower layers first. A module may import its own layer and those above it in this list; the longest name that fits
# says to which layer a module belongs. "" is the package itself, which finds its names when they are asked for.
# Each folder of host entries is a family of that name; attention is a room of several layers.
FAMILIES = tuple(sorted({path.parent.name for path in files_of(KERNELS / "csrc", ".cc")} - {"attention"}))
LAYERS: tuple[tuple[str, ...], ...] = (
    ("runtime", "runtime.env", "runtime.errors", "errors"),
    ("", "compat.hook", "compat.lacking", "compat.names", "compat.renamed"),
    ("runtime.spec",),
    ("runtime.build",),
    ("runtime.dispatch", "runtime.machine", "runtime.resolve"),
    ("runtime.launch",),
    ("compat", "autotuner", "compilation_context", "tllm_enums", "utils"),
    ("green_ctx",),
    ("observe", "api_logging", "testing", "jit.base", "jit.core", "jit.env", "jit.custom"),
    FAMILIES,
    ("attn_scores", "dsa_indexer", "logits_processor", "topk_varlen"),
    (
        "attention.contract",
        "attention.derived",
        "attention.mask",
        "attention.reference",
        "attention.ops",
        "attention.merge",
    ),
    ("attention.schedule", "attention.custom", "attention.custom_modules", "attention.cudnn"),
    ("attention.wrappers", "attention.forms"),
    (
        "attention",
        "cascade",
        "cudnn",
        "decode",
        "mla",
        "deep_gemm",
        "flash_mla",
        "fp4_quantization",
        "fp8_quantization",
        "gdn_decode",
        "gdn_kernels",
        "gdn_prefill",
        "grouped_mm",
        "mamba",
        "pod",
        "prefill",
        "sparse",
        "triton",
    ),
    ("profiles", "registry"),
    ("trace_apply", "trace_templates"),
    ("ahead", "aot", "integrations", "jit", "verify"),
    ("cli", "__main__", "collect_env"),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
# The launch path never reads the environment.
BARRED = {"runtime.launch": {"fi_core.runtime.env"}}
SOURCES = {module_name(path): path for path in files_of(CORE, ".py")}


def layer(module: str) -> str:
    """The name in LAYERS that a module of fi_core belongs to."""
    name = module.partition(".")[2]
    while name not in RANK:
        name = name.rpartition(".")[0]
    return name


def arrows() -> list[str]:
    """The imports of fi_core that go up in LAYERS, or that are barred."""
    found = []
    for name, path in SOURCES.items():
        here = layer(name)
        for there in sorted(imported(path)):
            if RANK[layer(there)] > RANK[here] or there in BARRED.get(here, ()):
                found.append(f"{relative(path)} ({here}) imports {there}")
    return found


def test_every_module_belongs_to_a_layer() -> None:
    assert [name for name in SOURCES if name != "fi_core" and not layer(name)] == []
    assert [name for name in RANK if f"fi_core.{name}".strip(".") not in SOURCES] == [], "a layer has no module"


def test_a_module_is_in_one_layer() -> None:
    names = [name for names in LAYERS for name in names]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_layers_import_downwards() -> None:
    assert arrows() == []


def import_circles() -> list[list[str]]:
    """The groups of modules of all packages that import each other."""
    return circles({name: imported(path) for name, path in modules().items()})


def test_no_import_circle() -> None:
    assert import_circles() == []


def test_no_include_circle() -> None:
    include = KERNELS / "include"
    headers = {path.relative_to(include).as_posix(): path for path in files_of(include, ".h", ".cuh")}
    pattern = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
    graph = {
        name: {other for other in pattern.findall(path.read_text()) if other in headers}
        for name, path in headers.items()
    }
    assert circles(graph) == []


# Folders of include/fi: what each may include besides itself.
SHARED = {"", "host", "cpu", "cuda"}
HEADERS: dict[str, set[str]] = {
    "": {""},
    "host": {""},
    "cpu": {"", "host"},
    "cuda": {""},
    "attention": SHARED | {"quantization", "rope"},
    "comm": SHARED | {"norm", "quantization"},
    "fused_moe": SHARED | {"gemm", "norm", "quantization"},
    "indexer": SHARED | {"topk"},
    "page": SHARED | {"quantization"},
    "sampling": SHARED | {"topk"},
}


def test_headers_include_downwards() -> None:
    """Families share what lies in host, cpu and cuda; none includes another, but for the ones that HEADERS names.

    The generated header of an op is one of its family.
    """
    from fi_core.registry import ops

    include = KERNELS / "include" / "fi"
    generated = {op.header.removeprefix("fi/"): op.family for op in ops().values()}
    wrong = []
    for path in files_of(include, ".h", ".cuh"):
        family, *rest = path.relative_to(include).parts
        here = family if rest else ""
        for name in re.findall(r'^\s*#\s*include\s*"fi/([^"]+)"', path.read_text(), re.MULTILINE):
            there = generated.get(name) or (name.split("/")[0] if "/" in name else "")
            if there not in HEADERS.get(here, SHARED) | {here}:
                wrong.append(f"{relative(path)} includes fi/{name}")
    assert not wrong, "\n".join(wrong)


def test_packages_import_as_declared() -> None:
    """fi-core stands on fi-kernels alone; the data packages stand on nothing; fi-bench stands on fi-core."""
    allowed = {
        "fi_core": {"fi_kernels"},
        "fi_kernels": set(),
        "fi_jit_cache": set(),
        "fi_cubin": set(),
        "fi_bench": {"fi_core"},
    }
    assert set(allowed) == set(PACKAGES)
    wrong = [
        str(item)
        for name, folder in PACKAGES.items()
        for path in files_of(folder, ".py")
        for item in imports(path)
        if (package := item.module.split(".")[0]) in PACKAGES and package not in allowed[name] | {name}
    ]
    assert not wrong, "\n".join(wrong)


def test_torch_is_not_imported_at_import() -> None:
    """Importing a module never imports torch; functions do when they are called. `collectives` runs as a script."""
    exempt = {PACKAGES["fi_bench"] / "collectives.py"}
    wrong = [
        str(item)
        for path in modules().values()
        if path not in exempt and not path.is_relative_to(CORE / "testing")
        for item in imports(path)
        if item.at_import and item.module.split(".")[0] in ("torch", "numpy", "tvm_ffi")
    ]
    assert not wrong, "\n".join(wrong)


# can_implement_filtered_topk tells what FlashInfer's kernel needs, fp8_blockscale_gemm_sm90 refuses other devices, and
# utils has FlashInfer's questions about devices.
ASK_FOR_THE_DEVICE = {"topk.py", "gemm/groupwise.py"}


def test_only_the_dispatcher_asks_for_the_capability_of_a_device() -> None:
    """Families declare it as a constraint of an implementation: nothing else chooses one."""
    asks = re.compile(r"target_of\([^)]*\)\.capability|\bget_(device|compute)_capability\(")
    families = [
        path for path in files_of(CORE, ".py")
        if path.relative_to(CORE).parts[0] not in ("runtime", "compat", "observe", "cli", "testing", "jit")
    ]  # fmt: skip
    found = {path.relative_to(CORE).as_posix() for path in families if asks.search(path.read_text())}
    assert found == ASK_FOR_THE_DEVICE
