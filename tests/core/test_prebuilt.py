"""The content of the binary packages: the grid of every op, without duplicates, built for the resolver."""

from __future__ import annotations

import json
import lzma
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from core import toy
from fi_core import aot
from fi_core.registry import ops
from fi_core.runtime.build import compiler
from fi_core.runtime.dispatch import Request
from fi_core.runtime.files import packed
from fi_core.runtime.resolve import built, prebuilt, provider, store
from fi_core.runtime.spec.target import CPU, PREBUILT_ARCHS, Target

LARGEST = 326  # device binaries of one architecture: the wheels must stay small


def test_every_op_is_shipped_for_every_target() -> None:
    for op in ops().values():
        for target in (CPU, *(Target("cuda", arch) for arch in PREBUILT_ARCHS)):
            asked = [Request.of(op, target, values).facts() for values in op.grid()]
            ours = [i for i in op.implementations if i.unit or (target == CPU and i.name == "cpu")]
            taken = {i.name for i in ours if not all(i.refusals(facts) for facts in asked)}
            found = list(aot.specs(op, target))
            assert {spec.implementation for spec in found} == taken, f"{op.name} on {target}"
            held = op.name not in toy.HOPPER_ALONE or target in (CPU, Target("cuda", "90a"))
            assert bool(taken) == held, f"{op.name}: nothing is built ahead for {target}"
            assert all(spec.target == target for spec in found)


def test_artifacts_are_listed_once_and_are_few() -> None:
    found = aot.artifacts()
    assert len({artifact.id for artifact in found}) == len(found)
    count = Counter((artifact.kind, str(artifact.target)) for artifact in found)
    assert count["cpu", str(CPU)] == count["cuda", str(CPU)] == len(ops())
    device = {target: n for (kind, target), n in count.items() if kind == "cubin"}
    assert set(device) == {f"sm_{arch}" for arch in PREBUILT_ARCHS}
    assert max(device.values()) <= LARGEST


def test_the_architectures_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FI_CUDA_ARCH_LIST", "8.6 9.0 12.0a")
    assert [str(target) for target in aot.targets()] == [str(CPU), "sm_86", "sm_90a", "sm_120a"]


def test_the_resolver_uses_the_built_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One small op, both kinds of file: the index fits, and each artifact is found."""
    op = ops()["get_seq_lens"]
    monkeypatch.setattr(aot, "ops", lambda: {op.name: op})
    monkeypatch.setenv("FI_CUDA_ARCH_LIST", "9.0a")
    wanted = aot.artifacts(("cuda", "cubin"))
    files = aot.build(tmp_path, ("cuda", "cubin"))
    assert sorted(path.relative_to(tmp_path).as_posix() for path in files) == [
        "sm_90a/get_seq_lens-0.xz",
        f"{CPU}/get_seq_lens_cuda.so",
    ]
    loaded = provider.load_provider("here", tmp_path)
    assert loaded.refusal is None
    found = [loaded.find(artifact) for artifact in wanted]
    assert {(file.path, why) for file, why in found if file} == {(path, "") for path in files}
    monkeypatch.setattr("fi_core.runtime.resolve.providers", lambda: (loaded,))
    for artifact in wanted:
        assert next(prebuilt(artifact)).content() == built(artifact).content()
    index = json.loads((tmp_path / "index.json").read_text())
    entry = index["artifacts"]["cubin/sm_90a/get_seq_lens_cuda_sm_90a"]
    assert entry["flags"] == ["-arch=sm_90a", "-std=c++17"]
    made_by = index["compilers"][entry["compiler"]]
    assert made_by["name"] == "nvrtc" and re.fullmatch(r"13\.0\.\d+", made_by["version"])
    assert {"libnvrtc.so.13", "cuda_bf16.h", "cuda_bf16.hpp"} <= set(made_by["files"])
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in made_by["files"].values())
    host = index["compilers"][index["artifacts"][f"cuda/{CPU}/get_seq_lens_cuda"]["compiler"]]
    assert host["name"] == "c++" and {"cc1plus", "tvm-ffi include"} <= set(host["files"])
    assert {name: aot.declared(name, entry) for name, entry in index["artifacts"].items()} == {a.id: a for a in wanted}
    assert str(tmp_path) not in (tmp_path / "index.json").read_text()


def test_the_store_serves_a_build_that_asks_for_it(
    fresh: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With FI_AOT_STORE files come from the store, which gets missing ones; without it all are compiled."""
    op = ops()["get_seq_lens"]
    monkeypatch.setattr(aot, "ops", lambda: {op.name: op})
    monkeypatch.setenv("FI_CUDA_ARCH_LIST", "9.0a")
    (image,) = aot.artifacts(("cubin",))
    (module,) = aot.artifacts(("cuda",))

    def fill(folder: Path) -> None:
        (folder / image.file).write_bytes(b"from the store")

    store.in_first_root(lambda root: store.publish(root, compiler.key(image), fill))
    compiled = {path.name: path.read_bytes() for path in aot.build(tmp_path / "compiled", ("cuda", "cubin"))}
    assert lzma.decompress(compiled["get_seq_lens-0.xz"]).startswith(b"\x7fELF")
    assert store.peek(compiler.key(module)) is None
    monkeypatch.setenv("FI_AOT_STORE", "1")
    taken = {path.name: path.read_bytes() for path in aot.build(tmp_path / "taken", ("cuda", "cubin"))}
    assert taken == {"get_seq_lens-0.xz": packed(b"from the store"), module.file: compiled[module.file]}
    folder = store.peek(compiler.key(module))
    assert folder and (folder / module.file).read_bytes() == compiled[module.file]


def test_binaries_of_an_op_share_archives(
    fresh: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of at most so many bytes, unless one is larger; each is found in its part, and damage keeps back a whole file."""
    op = ops()["rmsnorm"]
    monkeypatch.setattr(aot, "ops", lambda: {op.name: op})
    monkeypatch.setattr(aot, "ARCHIVE", 100)
    monkeypatch.setenv("FI_CUDA_ARCH_LIST", "9.0a")
    monkeypatch.setenv("FI_AOT_STORE", "1")
    few = dict([*aot.grid(("cubin",)).items()][:4])
    monkeypatch.setattr(aot, "grid", lambda kinds, keep: few)
    images = [*few]
    contents = {image: bytes([n]) * size for n, (image, size) in enumerate(zip(images, (40, 60, 1, 200)))}
    for image in images:
        store.in_first_root(
            lambda root, of=image: store.publish(  # type: ignore[misc]
                root, compiler.key(of), lambda folder: (folder / of.file).write_bytes(contents[of])
            )
        )
    files = aot.build(tmp_path, ("cubin",))
    assert [lzma.decompress(path.read_bytes()) for path in files] == [
        contents[images[0]] + contents[images[1]], contents[images[2]], contents[images[3]]
    ]  # fmt: skip
    monkeypatch.setattr("fi_core.runtime.resolve.providers", lambda: (provider.load_provider("here", tmp_path),))
    assert [next(prebuilt(image)).content() for image in images] == [*contents.values()]
    damaged = bytearray(files[0].read_bytes())
    damaged[len(damaged) // 2] ^= 1
    files[0].write_bytes(damaged)
    assert [len(list(prebuilt(image))) for image in images] == [0, 0, 1, 1]


@pytest.mark.parametrize("span", [[0, 999], [-1, 5], [5, 2], [0], "0:5", [0, 1.0], [False, True]])
def test_a_span_is_data(span: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies outside of the file, or is no span, is a miss with its reason."""
    op = ops()["get_seq_lens"]
    monkeypatch.setattr(aot, "ops", lambda: {op.name: op})
    monkeypatch.setenv("FI_CUDA_ARCH_LIST", "9.0a")
    monkeypatch.setenv("FI_AOT_STORE", "1")
    aot.build(tmp_path, ("cubin",))
    index = json.loads((tmp_path / "index.json").read_text())
    (entry,) = index["artifacts"].values()
    entry["span"] = [0, 1 << 30] if span == [0, 999] else span
    (tmp_path / "index.json").write_text(json.dumps(index))
    (image,) = aot.artifacts(("cubin",))
    found, why = provider.load_provider("here", tmp_path).find(image)
    if found is None:
        assert why == f"its index says nothing usable of {image.id}"
        return
    monkeypatch.setattr("fi_core.runtime.resolve.providers", lambda: (provider.load_provider("here", tmp_path),))
    with pytest.raises(OSError, match=r"it holds \d+ bytes, not 1073741824"):
        next(prebuilt(image)).content()


def test_sanitized_and_shipped_modules_stay_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FI_SANITIZE loads no module of a package, and no package ships a sanitized one."""
    op = ops()["get_seq_lens"]
    monkeypatch.setattr(aot, "ops", lambda: {op.name: op})
    monkeypatch.setenv("FI_CUDA_ARCH_LIST", "9.0a")
    monkeypatch.setenv("FI_AOT_STORE", "1")
    aot.build(tmp_path, ("cpu", "cubin"))
    monkeypatch.setattr("fi_core.runtime.resolve.providers", lambda: (provider.load_provider("here", tmp_path),))
    (module,), (image,) = aot.artifacts(("cpu",)), aot.artifacts(("cubin",))
    assert len(list(prebuilt(module))) == len(list(prebuilt(image))) == 1
    monkeypatch.setenv("FI_SANITIZE", "undefined")
    assert list(prebuilt(module)) == []
    assert len(list(prebuilt(image))) == 1
    with pytest.raises(ValueError, match="FI_SANITIZE: a package ships modules without sanitizers"):
        aot.build(tmp_path, ("cpu",))


def test_delayed_and_shipped_binaries_stay_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FI_DELAYS loads no device binary of a package; its own have another name in the store for each group."""
    op = ops()["get_seq_lens"]
    monkeypatch.setattr(aot, "ops", lambda: {op.name: op})
    monkeypatch.setenv("FI_CUDA_ARCH_LIST", "9.0a")
    monkeypatch.setenv("FI_AOT_STORE", "1")
    aot.build(tmp_path, ("cpu", "cubin"))
    monkeypatch.setattr("fi_core.runtime.resolve.providers", lambda: (provider.load_provider("here", tmp_path),))
    (module,), (image,) = aot.artifacts(("cpu",)), aot.artifacts(("cubin",))
    keys = {compiler.key(image)}
    for group in compiler.DELAYS:
        monkeypatch.setenv("FI_DELAYS", group)
        assert list(prebuilt(image)) == []
        assert len(list(prebuilt(module))) == 1
        keys.add(compiler.key(image))
    assert len(keys) == 1 + len(compiler.DELAYS)


@pytest.mark.parametrize(
    ("variable", "value", "flag"),
    [
        ("FI_EXTRA_CUDAFLAGS", "-DX", "-DX"),
        ("FI_JIT_LINEINFO", "1", "-lineinfo"),
        ("FI_DELAYS", "waits", "-DFI_DELAYS=2"),
    ],
)
def test_a_package_has_no_flags_of_the_environment(
    variable: str, value: str, flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = ops()["get_seq_lens"]
    monkeypatch.setattr(aot, "ops", lambda: {op.name: op})
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"a package ships binaries without {flag}: unset FI_EXTRA_CFLAGS"):
        aot.build(tmp_path, ("cubin",))
