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
        for folder in ("packages", "tests"):
            shutil.copytree(ROOT / folder, root / folder, symlinks=True, ignore=ignored)
        (root / "tools").symlink_to(ROOT / "tools")
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
    asked = ("fi_core.elementwise.squared_relu", "n=64", "d=4096", "--target", "sm_90a")
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
