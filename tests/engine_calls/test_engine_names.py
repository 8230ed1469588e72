"""How tools/engine_names.py reads an engine: what its names stand for, what it asks for, and how it calls."""

from __future__ import annotations

import importlib.util
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "engine_names.py"


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("engine_names", TOOL)
    assert spec and spec.loader
    module = sys.modules["engine_names"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["engine_names"]


def read(tool: ModuleType, text: str) -> tuple[list[str], list[str], list[str]]:
    """The imports, look-ups and calls of a file, without the places of the latter two."""
    file = tool.File("engine.py", textwrap.dedent(text), {})
    calls = [f"{name} {line.partition(' ')[2]}".strip() for name, line in file.calls()]
    return [f"{name} {line}" for name, line in file.imports], [name for name, _ in file.asks()], calls


def test_an_alias_stands_for_its_module(tool: ModuleType) -> None:
    """vLLM binds the module to a second name; a keyword of such a call was missed once."""
    text = """
        comm = None
        try:
            import flashinfer.comm as _comm
            comm = _comm
        except ImportError:
            pass
        def fuse(x):
            comm.allreduce_fusion(x, weight_bias=1.0)
    """
    imports, _, calls = read(tool, text)
    assert imports == ["flashinfer.comm engine.py:4 optional"]
    assert calls == ["flashinfer.comm.allreduce_fusion 1 weight_bias="]


def test_a_dict_of_keywords(tool: ModuleType) -> None:
    """What is in it in every case is a keyword of the call."""
    text = """
        from flashinfer.comm import allreduce_fusion
        def fuse(x, fast, **more):
            kwargs = dict(input=x)
            kwargs["rms_eps"] = 1e-5
            if fast:
                kwargs["use_oneshot"] = True
            allreduce_fusion(**kwargs)
    """
    assert read(tool, text)[2] == ["flashinfer.comm.allreduce_fusion 0 input= rms_eps= **"]


def test_an_attribute_of_an_object_is_no_name(tool: ModuleType) -> None:
    text = """
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper
        wrapper = BatchDecodeWithPagedKVCacheWrapper(None)
        wrapper.plan(1)
        wrapper._indptr_buf.copy_(2)
    """
    wrapper = "flashinfer.BatchDecodeWithPagedKVCacheWrapper"
    assert read(tool, text)[2] == [f"{wrapper} 1", f"{wrapper}.plan 1"]


def test_another_library_in_the_same_function(tool: ModuleType) -> None:
    text = """
        def mix(x, hip):
            from flashinfer.mhc import mhc_post
            mhc_post(x)
            if hip:
                from aiter.ops.mhc import mhc_post
                mhc_post(x, x)
    """
    assert read(tool, text)[2] == ["flashinfer.mhc.mhc_post 1"]


def test_look_ups(tool: ModuleType) -> None:
    text = """
        import flashinfer.comm
        def has_one():
            mod = _get_submodule("flashinfer.gemm")
            return all(hasattr(mod, name) for name in ("mm_fp4", "mm_bf16_fp4"))
        def has_pairs():
            for module, name in [("flashinfer.fused_moe", "b12x_fused_moe")]:
                if not hasattr(_get_submodule(module), name):
                    return False
        def fallback(backend):
            from flashinfer import rmsnorm
            mod = 3
            choices = ("flashinfer", "auto")
            return getattr(flashinfer.comm, "Mapping", None), hasattr(mod, "other")
    """
    imports, asks, _ = read(tool, text)
    assert imports == ["flashinfer.comm engine.py:2", "flashinfer.rmsnorm engine.py:11 lazy"]
    names = ["gemm.mm_fp4", "gemm.mm_bf16_fp4", "fused_moe.b12x_fused_moe", "comm.Mapping"]
    assert asks == [f"flashinfer.{name}" for name in names]
