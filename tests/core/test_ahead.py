"""Compiling ahead of the first call: on how many threads, what waits for what, errors, the end of the process."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from core import toy
from core.conftest import Python
from fi_core.ahead import Model, model_of, prepare, specs_of_model
from fi_core.decode import BatchDecodeWithPagedKVCacheWrapper
from fi_core.runtime.build import compiler
from fi_core.runtime.errors import CompileError
from fi_core.runtime.resolve import ahead, build_missing, built
from fi_core.runtime.resolve.pool import Pool, pool
from fi_core.runtime.spec.artifact import Artifact
from fi_core.runtime.spec.target import CPU, Target


@pytest.mark.parametrize(
    ("variables", "most"),
    [({"MAX_JOBS": "3"}, 3), ({"MAX_JOBS": "3", "FI_JIT_PREBUILD_MAX_JOBS": "2"}, 2), ({"MAX_JOBS": "1"}, 1)],
)
def test_so_many_compile_at_once(
    variables: dict[str, str], most: int, monkeypatch: pytest.MonkeyPatch, tree: Path
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    before = threading.enumerate()  # with compilers that other tests have begun
    full = threading.Barrier(most)  # breaks unless so many compilers meet in it, twice
    running, peak = set(), []

    def meet() -> None:
        running.add(threading.get_ident())
        peak.append(len(running))
        full.wait(30)
        running.discard(threading.get_ident())

    monkeypatch.setattr(compiler, "compile_artifact", lambda artifact, directory: (meet(), write(artifact, directory)))
    artifacts = [toy.artifacts(n, arch)[1] for n in (1, 2, 3) for arch in ("80", "90a")]
    assert build_missing(artifacts) == 6
    assert max(peak) <= most
    own = [x for x in threading.enumerate() if x.name == "fi-compile" and x not in before]
    assert all(map(ends, own))


def write(artifact: Artifact, directory: Path) -> None:
    (directory / artifact.file).write_bytes(b"compiled")


def ends(thread: threading.Thread) -> bool:
    thread.join(30)
    return not thread.is_alive()


def test_prepare_in_the_background(monkeypatch: pytest.MonkeyPatch, tree: Path) -> None:
    """It returns at once; a call waits for its own file, and compiles itself what no thread has begun."""
    monkeypatch.setenv("MAX_JOBS", "1")
    go = threading.Event()
    names = toy.counted(monkeypatch, lambda: go.wait(30) and None)
    host, first = toy.artifacts(1)
    assert prepare([toy.spec(1)], wait=False) == 2 and prepare([toy.spec(1)], wait=False) == 2
    go.set()
    assert built(first).origin in ("jit", "store") and built(host).origin in ("jit", "store")
    assert sorted(names) == sorted([host.name, first.name]), "each is compiled once"


def test_errors_of_the_background_surface_where_the_kernel_is_needed(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    header = tree / "include/fi/toy/constant.h"
    sound = header.read_text()
    header.write_text(sound + "error here;\n")
    assert prepare([toy.spec(1)], wait=False) == 2
    pool().drain()
    assert capfd.readouterr().err == ""
    for artifact in toy.artifacts(1):
        with pytest.raises(CompileError, match=r"constant\.h"):
            built(artifact)
    header.write_text(sound)
    assert built(toy.artifacts(1)[1]).origin == "jit"


def test_a_failure_leaves_the_builds_of_other_threads(monkeypatch: pytest.MonkeyPatch, tree: Path) -> None:
    """A failed build drops a unit that another thread waits for, which then compiles it itself."""
    monkeypatch.setenv("MAX_JOBS", "1")
    bad, *good = (toy.artifacts(n)[1] for n in (1, 2, 3))
    begun, fail, dropped, drain = threading.Event(), threading.Event(), threading.Event(), Pool.drain

    def compile_artifact(artifact: Artifact, directory: Path) -> None:
        if artifact == bad:
            begun.set()
            fail.wait(30)
            raise CompileError("unit.cu: error")
        assert dropped.wait(30)  # the first of the good ones runs meanwhile, the second is dropped
        write(artifact, directory)

    monkeypatch.setattr(compiler, "compile_artifact", compile_artifact)
    monkeypatch.setattr(Pool, "drain", lambda self: (dropped.set(), drain(self)))
    counts: list[int] = []

    def build_good() -> None:
        begun.wait(30)
        counts.append(build_missing(good))

    def fail_when_all_wait() -> None:
        while pool().waiting() < 3:
            time.sleep(0.01)
        fail.set()

    threads = [threading.Thread(target=work, daemon=True) for work in (build_good, fail_when_all_wait)]
    for thread in threads:
        thread.start()
    with pytest.raises(CompileError, match=r"unit\.cu"):
        build_missing([bad])
    assert all(map(ends, threads)) and counts == [2]


def test_a_drop_keeps_jobs_that_start_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, go, drain = Pool(1), threading.Event(), Pool.drain

    def drain_and_start(self: Pool) -> None:
        drain(self)
        self.start("runs", lambda: go.wait(30))
        self.start("waits", lambda: 3)

    monkeypatch.setattr(Pool, "drain", drain_and_start)
    jobs.drop()
    waits = jobs.start("waits", lambda: 4)
    go.set()
    assert waits.result(10) == 3


def test_nothing_begins_with_compiling_turned_off(monkeypatch: pytest.MonkeyPatch, tree: Path) -> None:
    monkeypatch.setenv("FI_JIT", "off")
    assert prepare([toy.spec(1)], wait=False) == 0 and pool().waiting() == 0


def test_a_plan_begins_to_compile_the_attention_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    monkeypatch.setattr(ahead, "start", lambda artifacts: begun.extend(a.name for a in artifacts))
    for cached in (ahead.begin, ahead._planned):
        cached.cache_clear()
    one = torch.ones(1, dtype=torch.int32)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 22, dtype=torch.uint8))
    wrapper.plan(torch.tensor([0, 1], dtype=torch.int32), 0 * one, one, 4, 2, 64, 16, q_data_type=torch.float32)
    assert "batch_decode_cpu" in begun


EXIT = """
import sys, threading, time
sys.path.insert(0, sys.argv[1])
from core import toy
from fi_core.ahead import prepare
from fi_core.runtime.build import compiler
toy.use(toy.plant(__import__("pathlib").Path(sys.argv[2])))
begun = threading.Event()
def slow(artifact, directory):
    begun.set()
    threading.main_thread().join()
    time.sleep(0.5)
    print("compiled", artifact.name, flush=True)
    (directory / artifact.file).write_bytes(b"x")
compiler.compile_artifact = slow
prepare([toy.spec(n) for n in (1, 2, 3)], wait=False)
begun.wait()
"""


def test_a_process_ends_with_the_compile_that_runs(
    python: Python, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compilers are not stopped in the middle, and what has not begun is dropped."""
    monkeypatch.setenv("MAX_JOBS", "1")
    assert len(python.run(EXIT, Path(__file__).parents[1], tmp_path / "kernels").splitlines()) == 1


def test_models() -> None:
    """A name, a folder with config.json and a configuration give the same specs; they are those that calls choose."""
    hopper = Target("cuda", "90a")
    names = [spec.name for spec in specs_of_model("llama-8b", hopper)]
    assert len(names) == len(set(names)) == 12
    assert "batch_prefill_q_bf16_kv_bf16_head_dim_128_soft_cap_False_split_tables_False_wgmma_sm90_sm_90a" in names
    assert "batch_decode_q_bf16_kv_bf16_head_dim_128_split_tables_False_tma_sm90_sm_90a" in names
    fa2 = {
        spec.implementation for spec in specs_of_model("llama-8b", hopper, backend="fa2") if spec.op.name[:5] == "batch"
    }
    assert fa2.isdisjoint({"wgmma_sm90", "tma_sm90"})
    assert any("kv_e4m3" in spec.name for spec in specs_of_model("llama-8b", hopper, kv_dtype="float8_e4m3fn"))
    assert {str(spec.target) for spec in specs_of_model("gemma2-9b", CPU)} == {str(CPU)}
    config = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "torch_dtype": "bfloat16"}
    assert model_of(config) == model_of("llama-8b") == model_of({"text_config": config})
    gemma = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "attn_logit_softcapping": 50.0}
    assert model_of({**gemma, "dtype": "float16"}) == Model(8, 4, 256, soft_cap=True, dtype="f16")


def test_a_model_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_attention_heads": 4, "head_dim": 64}')
    assert model_of(tmp_path) == model_of(str(tmp_path)) == Model(4, 4, 64)


def test_unknown_models_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model: .* got 'lama-8b'; did you mean llama-8b"):
        model_of("lama-8b")
    with pytest.raises(ValueError, match="kv_lora_rank"):
        model_of({"kv_lora_rank": 512, "num_attention_heads": 8, "head_dim": 64})
    with pytest.raises(ValueError, match="num_attention_heads"):
        model_of({})
    for what in (None, [None], 5):
        with pytest.raises(TypeError, match="what: a model's name, folder or configuration, or specs are"):
            prepare(what)
    with pytest.raises(ValueError, match=r"kv_dtype: .* got 'fp9'"):
        specs_of_model("llama-8b", CPU, kv_dtype="fp9")
