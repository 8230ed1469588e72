"""`python -m fi_core.aot` with FlashInfer's options: taken, or refused with what replaces them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fi_core import aot
from fi_core.runtime.spec.op import Spec
from fi_core.runtime.spec.target import Target

Kept = Callable[[list[str]], set[Spec]]


@pytest.fixture
def kept(fresh: Any, monkeypatch: pytest.MonkeyPatch) -> Kept:
    """The specs that options keep; nothing is compiled."""
    monkeypatch.setenv("FI_CUDA_ARCH_LIST", "9.0a")

    def run(options: list[str]) -> set[Spec]:
        found: set[Spec] = set()

        def build(out: Path, kinds: Any, progress: bool, origin: Any, keep: Callable[[Spec], bool]) -> list[Path]:
            found.update(aot.grid(kinds, keep).values())
            return []

        monkeypatch.setattr(aot, "build", build)
        aot.main(["--out-dir", "unused", *options])
        return found

    return run


def test_what_is_left_out(kept: Kept) -> None:
    every = kept([])
    families = {spec.op.family for spec in every}
    assert {"comm", "fused_moe", "activation", "norm"} <= families
    options = ["--add-comm", "false", "--add-moe", "0", "--add-act", "False", "--add-misc", "true"]
    assert {spec.op.family for spec in kept(options)} == families - {"comm", "fused_moe", "activation"}
    bf16 = kept(["--f16-dtype", "bfloat16", "--f8-dtype", "float8_e4m3fn"])
    dtypes = {value for spec in bf16 for value in dict(spec.axes).values()}
    assert {"bf16", "e4m3", "f32"} <= dtypes and not {"f16", "e5m2"} & dtypes
    assert 0 < len(bf16) < len(every)


def test_an_architecture_without_kernels_is_named(
    fresh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FI_CUDA_ARCH_LIST", "7.5")
    aot.main([str(tmp_path / "out"), "cubin"])
    said = capsys.readouterr()
    assert said.err == "sm_75: nothing is built for it: no kernel supports it; sm_80 is the oldest\n"
    assert json.loads((tmp_path / "out" / "index.json").read_text())["artifacts"] == {}
    monkeypatch.setenv("FI_CUDA_ARCH_LIST", "11.0a 12.0f")
    assert aot.targets()[1:] == (Target("cuda", "110a"), Target("cuda", "120f"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["out", "--fa2-head-dim", "64,64", "128,128"], "--fa2-head-dim: fi-core prebuild --model NAME --output DIR"),
        (["out", "--build-dir", "b"], "--build-dir: set FI_CACHE_DIR and FI_AOT_STORE=1"),
        (["out", "--use-sliding-window", "true"], "--use-sliding-window: every kernel takes any window"),
        (["out", "--add-gemma", "false"], "--add-gemma: there are no kernels of its own to leave out"),
        (["out", "--add-moe", "maybe"], "--add-moe: true or false is required; got 'maybe'"),
        (["out", "--f16-dtype", "half"], "--f16-dtype: invalid choice: 'half'"),
        ([], "out: a folder is required, once: OUT or --out-dir OUT"),
        (["out", "--out-dir", "out"], "out: a folder is required, once"),
        (["out", "cubins"], "kinds: cpu, cuda, cubin are known; got cubins"),
    ],
)
def test_what_is_refused(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        aot.main(options)
    assert error.value.code == 2 and message in capsys.readouterr().err
