"""A kernel tree of one small op, so that tests of finding, building and storing are quick and stand on no family."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import fi_kernels
from fi_core.runtime.build import compiler
from fi_core.runtime.dispatch import AUTO, Request, choose
from fi_core.runtime.spec.artifact import Artifact
from fi_core.runtime.spec.constraint import ON_CPU, at_least
from fi_core.runtime.spec.op import Entry, Implementation, Op, Spec, Unit, Values
from fi_core.runtime.spec.target import CPU, Target

KERNELS = fi_kernels.ROOT
# Ops without a kernel before Hopper: other ops take their place.
HOPPER_ALONE = {"gemm_few_bits", "moe_experts", "moe_few_tokens", "moe_gated_gemm"}
FILES = {
    "csrc/toy/scale.cc": """// The host module of the toy op.
#include "fi/toy/scale.h"
extern "C" int scale(int x) { return fi::kScale * x; }
""",
    "include/fi/toy/scale.h": """// Shared by both sides.
#pragma once
#include "fi/toy/constant.h"
namespace fi {
struct ScaleParams {
  float* x;
};
}  // namespace fi
""",
    "include/fi/toy/constant.h": """// Reached through another header.
#pragma once
namespace fi {
constexpr int kScale = 2;
}
""",
    "include/fi/toy/unrelated.h": "// Reached by nobody.\n#pragma once\n",
    "include/fi/toy/scale.cuh": """// The device template.
#pragma once
#include "fi/toy/scale.h"
namespace fi {
template <int n>
__device__ void scale(const ScaleParams& p) {
  p.x[threadIdx.x] *= n * kScale;
}
}  // namespace fi
""",
}


def unit(axes: Values) -> Unit:
    return Unit("fi/toy/scale.cuh", "ScaleParams", (Entry("scale", f"scale<{axes['n']}>", 32),))


SCALE = Op(
    name="scale",
    family="toy",
    arguments="Tensor(a!) x",
    axes={"n": (1, 2, 3, 4)},
    implementations=(Implementation("cpu", ON_CPU), Implementation("cuda", at_least(80), unit)),
)


def plant(root: Path) -> Path:
    """Writes the tree below root, with the templates of fi-kernels, and makes it the sources of this process."""
    shutil.copytree(KERNELS / "templates", root / "templates")
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    use(root)
    return root


def use(root: Path | str) -> None:
    """Makes a tree the sources of this process."""
    fi_kernels.ROOT = Path(root)


def chosen(op: Op, target: Target, values: Values | None = None, backend: str = AUTO) -> Spec:
    """The spec by which an op computes a request on a target."""
    return choose(Request.of(op, target, values, backend)).spec


def spec(n: int = 1, arch: str = "80") -> Spec:
    return chosen(SCALE, Target("cuda", arch), {"n": n})


def artifacts(n: int = 1, arch: str = "80") -> tuple[Artifact, Artifact]:
    """The host module and the device binary of one configuration."""
    from fi_core.runtime.build import sources

    host, image = sources.artifacts(spec(n, arch))
    assert (host.kind, image.kind, host.target) == ("cuda", "cubin", CPU)
    return host, image


def counted(monkeypatch: pytest.MonkeyPatch, before: Callable[[], None] = lambda: None) -> list[str]:
    """The names that are compiled from now on; `before` runs in each compile."""
    names: list[str] = []
    compile_artifact = compiler.compile_artifact

    def compile_counted(artifact: Artifact, directory: Path) -> None:
        names.append(artifact.name)
        before()
        compile_artifact(artifact, directory)

    monkeypatch.setattr(compiler, "compile_artifact", compile_counted)
    return names
