"""What the binary packages would ship: the grid of every op, once, and a build that the resolver can use."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from fi_core import prebuilt
from fi_core.registry import ops
from fi_core.resolve import provider
from fi_core.spec.target import CPU, PREBUILT_ARCHS, Target

LARGEST = 120  # device binaries of one architecture: the wheels must stay small


def test_every_op_is_shipped_for_every_target() -> None:
    for op in ops().values():
        for target in (CPU, *(Target("cuda", arch) for arch in PREBUILT_ARCHS)):
            taken = {impl.name for impl in op.impls if any(not op.explain(target, a)[impl.name] for a in op.grid())}
            found = list(prebuilt.specs(op, target))
            assert {spec.impl for spec in found} == taken, f"{op.name} on {target}"
            assert taken, f"{op.name}: nothing is built ahead for {target}"
            assert all(spec.target == target for spec in found)


def test_artifacts_are_listed_once_and_are_few() -> None:
    found = prebuilt.artifacts()
    assert len({artifact.id for artifact in found}) == len(found)
    count = Counter((artifact.kind, str(artifact.target)) for artifact in found)
    assert count["cpu", str(CPU)] == count["cuda", str(CPU)] == len(ops())
    device = {target: n for (kind, target), n in count.items() if kind == "cubin"}
    assert set(device) == {f"sm_{arch}" for arch in PREBUILT_ARCHS}
    assert max(device.values()) <= LARGEST


def test_the_architectures_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FI_CUDA_ARCH_LIST", "8.6 9.0 12.0a")
    assert [str(target) for target in prebuilt.targets()] == [str(CPU), "sm_86", "sm_90a", "sm_120a"]


def test_what_is_built_is_what_the_resolver_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One small op, both kinds of file: the index fits, and each artifact is found."""
    op = ops()["get_seq_lens"]
    monkeypatch.setattr(prebuilt, "ops", lambda: {op.name: op})
    monkeypatch.setenv("FI_CUDA_ARCH_LIST", "9.0a")
    wanted = prebuilt.artifacts(("cuda", "cubin"))
    files = prebuilt.build(tmp_path, ("cuda", "cubin"))
    assert sorted(path.relative_to(tmp_path).as_posix() for path in files) == [
        "sm_90a/get_seq_lens_cuda_sm_90a.cubin",
        f"{CPU}/get_seq_lens_cuda.so",
    ]
    loaded = provider._load("here", tmp_path)
    assert loaded.refusal is None
    assert {loaded.find(artifact) for artifact in wanted} == {(path, "") for path in files}
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["compiler"]["cubin"].startswith("libnvrtc-builtins.so.13")
    assert str(tmp_path) not in (tmp_path / "index.json").read_text()
