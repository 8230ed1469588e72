"""Each public name of FlashInfer works, or its error says what to use: the decisions of fi_core/compat/names.txt."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fi_core.compat import alias, install, lacking, names
from fi_core.runtime.errors import BackendSupportedError
from house.tree import PYTHONPATH

KNOWN = names.read()
RECORDS = sorted(Path(__file__).parent.glob("*.txt"))


def decided(*kinds: str) -> list[names.Name]:
    """The entries of these kinds, without members of classes and rests of modules."""
    entries = [entry for entry in KNOWN.values() if entry.kind in kinds and entry.name != names.WHOLE]
    return [entry for entry in entries if entry.path.rpartition(".")[0] not in KNOWN]


@pytest.fixture(params=["fi_core", "flashinfer"])
def top(request: pytest.FixtureRequest) -> Iterator[str]:
    """The import name."""
    path, finders, modules = list(sys.path), list(sys.meta_path), set(sys.modules)
    install()
    yield request.param
    sys.path[:], sys.meta_path[:] = path, finders
    for name in [name for name in sys.modules if name.split(".")[0] == "flashinfer" and name not in modules]:
        del sys.modules[name]


def owner(top: str, entry: names.Name) -> Any:
    """The module of a name; an error where there is none."""
    module = entry.path.rpartition(".")[0]
    return importlib.import_module(f"{top}.{module}" if module else top)


def test_every_name_of_the_release_has_a_decision() -> None:
    """A release that adds a name leaves it undecided."""
    assert [entry.path for entry in KNOWN.values() if entry.kind == "undecided"] == []
    assert len(decided("here", "absent", "refuses", "false")) > 1900
    assert names.FILE.read_text().startswith(f"FlashInfer {alias.VERSION}: ")


def test_every_name_that_engines_take_is_listed() -> None:
    lines = [line for record in RECORDS for line in record.read_text().splitlines()[1:]]
    taken = [line.partition(".")[2] for line in lines if line.startswith("flashinfer.")]
    modules = {path.rsplit(".", up)[0] for path in KNOWN for up in range(1, path.count(".") + 1)} | {"jit.env"}
    of_others = {"gemm.Sm120BlockScaledDenseGemmKernel", "decode._grouped_size_compiled_for_decode_kernels"}
    assert len(taken) > 300
    listed = {name for name in taken if name in KNOWN or name.rpartition(".")[0] in KNOWN}  # members of classes too
    rest = {name for name in taken if not name.startswith("__")} - listed - modules - of_others
    assert [name for name in rest if names.find(*name.rpartition(".")[::2]) is None] == []


def test_what_is_here_exists() -> None:
    missing = []
    for entry in decided("here"):
        try:  # by its own name; second names are below
            lacking.resolve(entry.same or entry.path)
        except AttributeError as error:
            missing.append(str(error))
    assert missing == []


def test_a_second_name_is_the_same_object(top: str) -> None:
    seconds = [entry for entry in decided("here") if entry.same]
    assert len(seconds) > 50
    different = [e.path for e in seconds if getattr(owner(top, e), e.name) is not lacking.resolve(e.same)]
    assert different == []


def test_what_is_absent_says_what_to_use(top: str) -> None:
    """A probe finds nothing, and the error of a plain use has the advice."""
    silent = []
    for entry in decided("absent"):
        try:
            getattr(owner(top, entry), entry.name)
            silent.append(f"{entry.path} exists")
        except (AttributeError, ModuleNotFoundError) as error:
            if not re.match(r"flashinfer\.\S+ is not in fi.*; \w+", str(error)) and "is not a package" not in str(
                error
            ):
                silent.append(f"{entry.path}: {error}")
    assert silent == []


WALK = """
import functools, sys
from fi_core.compat import install, names
install()
import flashinfer
# Modules behind functions of their name, there as here.
hidden = (
    "comm.all_gather_matmul.", "fi_trace.", "mamba.checkpointing_ssu.", "mamba.replayssm_materialize.",
    "quantization.packbits.", "xqa.",
)
for path, entry in names.read().items():
    if entry.name != names.WHOLE and not path.startswith(hidden):
        try:
            functools.reduce(getattr, path.split("."), flashinfer)
        except AttributeError as error:
            if "is not in fi" not in str(error):
                print(path, error)
"""


def test_a_walk_by_attributes_finds_names_or_advice() -> None:
    """`import flashinfer` is enough for `flashinfer.comm.allreduce.X`, and no error is without advice."""
    done = subprocess.run(
        [sys.executable, "-c", WALK], env={"PYTHONPATH": PYTHONPATH}, capture_output=True, text=True, check=True
    )
    assert done.stdout == ""


@pytest.mark.parametrize("path", ["gemm.mm_bf16_sm100", "jit.gemm.gen_tgv_gemm_sm10x_module", "mla.cute_dsl_mla"])
def test_a_name_of_blackwell_that_is_not_listed_says_so(top: str, path: str) -> None:
    module, _, name = path.rpartition(".")
    with pytest.raises(
        AttributeError, match=rf"{name} is not in fi: its kernels are for Blackwell \(sm_100 and later\)"
    ):
        getattr(importlib.import_module(f"{top}.{module}"), name)


def test_a_listed_name_of_a_renamed_module_has_its_own_advice(top: str) -> None:
    module = importlib.import_module(f"{top}.jit.fused_moe")
    with pytest.raises(
        AttributeError, match=r"flashinfer\.jit\.fused_moe\.gen_alphamoe_sm100_module is not in fi.*jit_specs"
    ):
        module.gen_alphamoe_sm100_module  # noqa: B018


def test_what_stands_in_refuses(top: str) -> None:
    for entry in decided("refuses", "false"):
        found = getattr(owner(top, entry), entry.name)
        if callable(found):
            assert found.__doc__ == entry.reason


ASKING = """
import importlib.util, flashinfer, flashinfer.decode
try:
    from flashinfer.decode import trtllm_batch_decode_sparse_mla_dsv4
except ImportError as error:
    assert "use BatchMLAPagedAttentionWrapper" in str(error), error
else:
    raise AssertionError
try:
    from flashinfer import tgv_gemm_sm100
except ImportError as error:
    assert "flashinfer.tgv_gemm_sm100 is not in fi: its kernels are for Blackwell" in str(error), error
else:
    raise AssertionError
try:
    import flashinfer.msa_ops
except ModuleNotFoundError as error:
    assert "flashinfer.msa_ops is not in fi" in str(error) and error.name == "flashinfer.msa_ops", error
else:
    raise AssertionError
assert importlib.util.find_spec("flashinfer.msa_ops") is None and importlib.util.find_spec("fi_core.msa_ops") is None
assert not hasattr(flashinfer, "msa_ops") and not hasattr(flashinfer.decode, "trtllm_batch_decode_sparse_mla_dsv4")
from flashinfer.dsv3_ops import concat_mla_k
assert concat_mla_k is flashinfer.concat_mla_k
assert not isinstance(getattr(flashinfer.mamba, "checkpointing_ssu", None), type(flashinfer))
"""


def test_import_statements_and_probes() -> None:
    """Engines guard imports, and ask with hasattr and find_spec; people read the message of the error."""
    text = f"import fi_core.compat; fi_core.compat.install()\n{ASKING}"
    done = subprocess.run([sys.executable, "-c", text], env={"PYTHONPATH": PYTHONPATH}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


SECOND_NAMES = """
import importlib, types, flashinfer, fi_core
from fi_core.compat import names

owners = {path.rpartition(".")[0] for path, entry in names.read().items() if entry.kind == "here"} - {"", "fi_trace"}
modules = sorted(name for name in owners if not name.rpartition(".")[2][0].isupper())  # the others are classes
loaded = [importlib.import_module(f"fi_core.{name}") for name in modules]
before = [(module, name, value) for module in loaded for name, value in vars(module).items() if name[0] != "_"]
functions = [(module, name, value) for module, name, value in before if not isinstance(value, types.ModuleType)]
for name in modules:
    importlib.import_module(f"flashinfer.{name}")
assert len(functions) > 1000
lost = [f"{module.__name__}.{name}" for module, name, value in functions if getattr(module, name) is not value]
assert lost == [], lost
"""


def test_an_import_of_a_module_leaves_the_function_of_its_name() -> None:
    """As flashinfer.quantization.packbits and flashinfer.mamba.checkpointing_ssu are both."""
    text = f"import fi_core.compat; fi_core.compat.install()\n{SECOND_NAMES}"
    done = subprocess.run([sys.executable, "-c", text], env={"PYTHONPATH": PYTHONPATH}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_stand_in_refuses() -> None:
    preset = lacking.find("comm.mnnvl_cutedsl.kernel_ll", "LL_ALL_REDUCE_GB300_TP8_H8192")
    uses = [
        lacking.find("prims_ts.gemm", "PrimsTsGemmConfig").tune,
        lacking.find("moe_ep", "MegaConfig").tune,
        lambda: preset.stages,
    ]
    for use in uses:
        with pytest.raises(BackendSupportedError, match=r"is not in fi: its kernels are for Blackwell \(sm_100 and"):
            use()
    assert lacking.find("cute_dsl.utils", "is_cute_dsl_available")() is False
