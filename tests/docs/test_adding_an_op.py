"""The four files of the guide for adding an op, in a copy of the repository, are all that the op needs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "guides" / "adding-an-op.md"
BLOCK = re.compile(r"^```\{code-block\} \w+\n:caption: (\S+)\n\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILES = dict(BLOCK.findall(GUIDE.read_text()))


class Copy:
    """A copy of the repository with the op of the guide, and commands that run in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        ignored = shutil.ignore_patterns("__pycache__", "*.pyc", ".*_cache")
        for folder in ("packages", "tests", "tools"):
            shutil.copytree(ROOT / folder, root / folder, symlinks=True, ignore=ignored)
        for name in ("pyproject.toml", "VERSION", "LICENSE"):
            shutil.copy(ROOT / name, root / name)
        before = self.files()
        for name, text in FILES.items():
            path = root / name
            assert not path.exists()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.added = self.files() - before

    def files(self) -> set[str]:
        return {path.relative_to(self.root).as_posix() for path in self.root.rglob("*") if path.is_file()}

    def run(self, *words: str, expected: int = 0) -> str:
        """Runs Python with these words; returns what it prints."""
        path = os.pathsep.join(str(folder) for folder in sorted(self.root.glob("packages/*/src")))
        settings = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "FI_LOGLEVEL": "0"}
        done = subprocess.run(
            [sys.executable, *words], cwd=self.root, capture_output=True, text=True, env=os.environ | settings
        )
        assert done.returncode == expected, done.stdout + done.stderr
        return done.stdout

    def json(self, *words: str) -> object:
        return json.loads(self.run("-m", "fi_core", *words, "--json"))


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    return Copy(tmp_path_factory.mktemp("repository"))


def test_an_op_is_four_files(copy: Copy) -> None:
    assert copy.added == set(FILES)
    assert len(FILES) == 4
    assert [Path(name).suffix for name in sorted(FILES, key=lambda name: Path(name).suffix)] == [
        ".cc", ".cuh", ".h", ".py"
    ]  # fmt: skip


def test_the_tests_of_descriptions_cover_it(copy: Copy) -> None:
    said = copy.run(
        "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "tests/families/test_descriptions.py", "-k",
        "squared_relu",
    )  # fmt: skip
    assert re.search(r"\b16 passed", said), said  # 12 samples; its work, its samples, its reference, its parameters


def test_house_rules_hold(copy: Copy) -> None:
    subprocess.run(["git", "init", "-q", "."], cwd=copy.root, check=True)  # the rules ask git for the files
    said = copy.run(
        "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "tests/house/test_kernels.py",
        "tests/house/test_layers.py", "tests/house/test_arguments.py",
    )  # fmt: skip
    assert " passed" in said and "failed" not in said


def test_why_names_its_kernel(copy: Copy) -> None:
    op = copy.json("why", "squared_relu", "dtype=bf16", "--target", "sm_90a")
    assert isinstance(op, dict) and op["chosen"] == "cuda_core"
    asked = ("fi_core.elementwise.squared_relu", "n=64", "d=4096", "--target", "sm_90a", "--compile")
    call = copy.json("why", *asked)
    assert isinstance(call, dict)
    ((launch,),) = [one["launches"] for one in call["calls"]]
    assert launch["entry"] == "squared_relu_8" and launch["grid"] == [64, 1, 1] and launch["pdl"]
    narrow = copy.json("why", *asked[:2], "d=7", *asked[3:])
    assert isinstance(narrow, dict) and narrow["calls"][0]["launches"][0]["entry"] == "squared_relu_1"


def test_its_definition_is_written(copy: Copy) -> None:
    program = (
        "import json, torch; from fi_core.elementwise import squared_relu;"
        "print(json.dumps(squared_relu.fi_trace(input=torch.empty(3, 8, dtype=torch.bfloat16))))"
    )
    definition = json.loads(copy.run("-c", program))
    assert definition["name"] == "squared_relu_d8"
    assert definition["inputs"]["input"] == {"shape": ["n", "d"], "dtype": "bfloat16"}
    assert "relu().square()" in definition["reference"]


def test_it_is_listed_and_compiles(copy: Copy) -> None:
    listed = copy.json("list-modules", "--target", "sm_90a")
    assert isinstance(listed, list)
    names = {module["name"] for module in listed if module["name"].startswith("squared_relu")}
    assert len(names) == 3, names
    copy.run("-m", "fi_core", "prebuild", "--ops", "squared_relu", "--target", "sm_90a")
    status = copy.json("module-status", "--target", "sm_90a", "--filter", "compiled")
    assert names <= {module["name"] for module in _modules(status)}


def _modules(status: object) -> list[dict[str, str]]:
    assert isinstance(status, dict)
    found: list[dict[str, str]] = status["modules"]
    return found


def test_its_benchmark_case_runs(copy: Copy) -> None:
    said = copy.run(
        "-m", "fi_bench", "--routine", "squared_relu", "--backends", "cpu", "torch", "--n", "16", "--d", "64",
        "--refcheck", "--num_iters", "3", "--dry_run_iters", "1",
    )  # fmt: skip
    assert "[PERF] cpu" in said and "[PERF] torch" in said and "ERROR" not in said and "skipped" not in said


def test_the_steps_of_flashinfer_have_a_place() -> None:
    section = GUIDE.read_text().split("## FlashInfer's steps")[1].split("\n## ")[0]
    steps = [int(step) for step in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)]
    assert steps == [*range(1, 12), *range(1, 6)]


def test_it_is_exported_logged_and_traced(copy: Copy) -> None:
    """Steps 5 to 11: beside the four files there are one line to write, and files that commands write."""
    init = copy.root / "packages" / "fi-core" / "src" / "fi_core" / "__init__.py"
    before, after = '    "comm": (),\n', '    "comm": (),\n    "elementwise": ("squared_relu",),\n'
    init.write_text(init.read_text().replace(before, after))
    assert "fi_core/__init__.pyi" in copy.run("tools/stubs.py")
    assert "from fi_core.elementwise import squared_relu" in init.with_suffix(".pyi").read_text()
    program = """
import os
os.environ |= {"FI_LOGLEVEL": "3", "FI_LOGDEST": "stdout"}
import fi_core, torch
print(fi_core.squared_relu(torch.tensor([[-2.0, 3.0]])).tolist())
print(fi_core.jit.gen_squared_relu_module(targets=[fi_core.jit.base.CPU]).name)
print(fi_core.trace.templates.squared_relu_trace.op_type)
"""
    said = copy.run("-c", program)
    assert "FlashInfer API Call: squared_relu\n" in said and "[[0.0, 9.0]]\nsquared_relu\nsquared_relu\n" in said
    copy.run("tests/trace/example.py", "definitions", "--keep")
    assert json.loads((copy.root / "definitions" / "squared_relu_d260.json").read_text())["op_type"] == "squared_relu"
    assert "\nsquared_relu_d260: input [n, d] " in (copy.root / "tests" / "trace" / "definitions.txt").read_text()
    shipped = "from fi_core import aot; print(sum('squared_relu' in a.id for a in aot.artifacts(('cubin',))))"
    assert int(copy.run("-c", shipped)) >= 3


VARIANT = """
import torch
from fi_core.jit import env
from fi_core.jit.attention import gen_customize_single_decode_module
struct = '''
struct Half : AttentionVariantBase {
  float sm_scale_log2;
  template <typename Params>
  __device__ __host__ Half(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    sm_scale_log2 = params.sm_scale * math::log2e;
  }
  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    return logits * 0.5f;
  })
};
'''
half = torch.float16
spec = gen_customize_single_decode_module(
    "half", half, half, half, 64, 64, [], [], ["sm_scale"], ["double"], "Half", struct
)
spec.build()
for path in sorted(env.FLASHINFER_JIT_DIR.glob("*half*/*")):
    print(path.name, path.suffix == ".cu" and "struct Half" in path.read_text())
"""


def test_a_variant_compiles_for_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    path = os.pathsep.join(str(folder) for folder in sorted(ROOT.glob("packages/*/src")))
    settings = {"FI_CACHE_DIR": str(tmp_path / "cache"), "FI_CUDA_ARCH_LIST": "9.0a", "PYTHONPATH": path}
    command = [sys.executable, "-c", VARIANT]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings)
    assert done.returncode == 0, done.stderr
    written = dict(line.split() for line in done.stdout.splitlines())
    assert "True" in written.values(), "the unit with the struct"
    assert any(name.endswith("sm_90a.cubin") for name in written)
