"""The sessions of the repository: `nox -s demo` to see it work, `nox -s tests` to check it, `nox -l` for the rest.

FI_TORCH chooses the torch of a session: a requirement such as "torch==2.12.0", or "system" for the torch of the Python
that runs nox. On a machine with an NVIDIA GPU that torch is taken by itself if it is a CUDA build. `nox --no-venv -s …`
installs nothing and runs the checkout in the current Python, for machines without a network.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nox
from nox.virtualenv import PassthroughEnv

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["tests"]
nox.options.error_on_external_run = False

ROOT = Path(__file__).resolve().parent
PACKAGES = ["fi-kernels", "fi-core", "fi-jit-cache", "fi-cubin", "fi-bench"]
TORCH = "torch==2.13.0"  # has a CPU build; the packages accept torch >= 2.10
PINS = nox.project.load_toml("pyproject.toml")
CORE, BENCH = (
    nox.project.load_toml(f"packages/{name}/pyproject.toml")["tool"]["hatch"]["metadata"]["hooks"]["custom"]
    for name in ("fi-core", "fi-bench")
)
HAS_GPU = shutil.which("nvidia-smi") is not None
AARCH64_COMPILER = "aarch64-linux-gnu-g++"  # by Debian's name

PROBE = """
import json, sys
try:
    import torch
except ImportError:
    print(json.dumps(None))
else:
    print(json.dumps({"cuda": torch.version.cuda, "folders": [p for p in sys.path if p.endswith("-packages")]}))
"""


def install_tools(session: nox.Session, *groups: str) -> None:
    """Tools as pinned in pyproject.toml."""
    session.install(*nox.project.dependency_groups(PINS, *groups))


def install_torch(session: nox.Session, *, gpu: bool = False) -> None:
    """The pinned torch, installed once for all sessions, or the one that the user has."""
    wanted = os.environ.get("FI_TORCH", "")
    # A .pth file shows the session a folder of packages: that of nox's Python, also where that is a virtual environment
    # itself, or the one that holds torch.
    parent = next(Path(session.virtualenv.location).glob("lib/python*/site-packages")) / "parent.pth"
    parent.unlink(missing_ok=True)
    if wanted == "system" or (gpu and HAS_GPU and not wanted):
        probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
        found = json.loads(probe.stdout)
        if found and (wanted or found["cuda"]):
            parent.write_text("\n".join(found["folders"]) + "\n")
            return
        if wanted:
            session.error(f"FI_TORCH=system: {sys.executable} has no torch; install it there, or unset FI_TORCH")
    requirement = wanted or TORCH
    folder = ROOT / ".nox" / "shared" / re.sub(r"[^\w.]+", "-", requirement)
    done = folder / "complete"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        session.install("--target", str(folder), requirement)
        if folder.is_dir():  # nox may have been told to install nothing
            done.touch()
    parent.write_text(f"{folder}\n")


def develop(session: nox.Session, *groups: str, gpu: bool = False) -> None:
    """Torch, tools and the five packages in editable form; with --no-venv only the search path."""
    if isinstance(session.virtualenv, PassthroughEnv):
        session.env["PYTHONPATH"] = os.pathsep.join(str(ROOT / "packages" / name / "src") for name in PACKAGES)
        return
    install_torch(session, gpu=gpu)  # first, so that no other requirement pulls another build
    install_tools(session, "build", *groups)
    session.install("--no-build-isolation", *(part for name in PACKAGES for part in ("-e", f"packages/{name}")))


def install_nvcc(session: nox.Session) -> None:
    """nvcc from pip, where the machine has none."""
    if not shutil.which("nvcc") and not isinstance(session.virtualenv, PassthroughEnv):
        session.install(*CORE["extras"]["nvcc"])


def install_builders(session: nox.Session) -> None:
    """What builds the five packages, and what their tests need."""
    install_tools(session, "test", "build", "device")
    needed = dict.fromkeys([*CORE["dependencies"], *BENCH["dependencies"]])
    session.install(*(name for name in needed if not name.startswith(("fi-", "torch"))))


def python(session: nox.Session) -> str:
    """The session's Python; with --no-venv the one that runs nox."""
    return sys.executable if isinstance(session.virtualenv, PassthroughEnv) else "python"


def pytest(session: nox.Session, *arguments: str, workers: int = 0) -> None:
    # Without a virtual environment pytest may have no xdist.
    parallel = workers and not isinstance(session.virtualenv, PassthroughEnv)
    options = ["-n", str(workers), "--dist", "worksteal"] if parallel else []
    if parallel:  # a thread that spins at a barrier, or a second one of a worker, keeps another worker from its core
        session.env.setdefault("OMP_WAIT_POLICY", "passive")
        session.env.setdefault("OMP_NUM_THREADS", "1")
    session.run(python(session), "-m", "pytest", *options, *arguments, *session.posargs)


@nox.session
def demo(session: nox.Session) -> None:
    """Serve texts with a Llama model and compare its tokens with transformers: on the GPU if there is one."""
    develop(session, "demo", *(["device"] if HAS_GPU else []), gpu=True)
    session.run(python(session), "examples/generate.py", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """All tests that need neither a GPU nor a build of the whole library."""
    develop(session, "test", "device", "demo")
    pytest(session, "-m", "not gpu and not slow", workers=2)


@nox.session
def gpu(session: nox.Session) -> None:
    """The tests that need a GPU; an error where torch sees none."""
    develop(session, "test", "device", "demo", gpu=True)
    session.run(python(session), "-c", "import torch; torch.cuda.init(); print(torch.cuda.get_device_name())")
    pytest(session, "-m", "gpu")


@nox.session
def multigpu(session: nox.Session) -> None:
    """The tests that need several GPUs, on all that there are; an error where torch sees fewer than two."""
    develop(session, "test", "device", "demo", gpu=True)
    count = "import torch; n = torch.cuda.device_count(); assert n >= 2, f'two GPUs are required; got {n}'"
    session.run(python(session), "-c", count)
    pytest(session, "-m", "multigpu")


@nox.session
def lint(session: nox.Session) -> None:
    """ruff and clang-format; `nox -s lint -- fix` applies their fixes."""
    install_tools(session, "lint")
    fix = "fix" in session.posargs
    session.run("ruff", "check", *(["--fix"] if fix else []), ".")
    session.run("ruff", "format", *([] if fix else ["--check"]), ".")
    files = [path for folder in ("packages", "tests") for path in sorted((ROOT / folder).rglob("*"))]
    sources = [str(path) for path in files if path.suffix in (".h", ".cuh", ".cc", ".cu")]
    session.run("clang-format", *(["-i"] if fix else ["--dry-run", "-Werror"]), *sources)


@nox.session
def types(session: nox.Session) -> None:
    """mypy and pyright over the packages."""
    develop(session, "types")
    session.run("mypy")
    session.run("basedpyright")


@nox.session
def headers(session: nox.Session) -> None:
    """Each header compiles alone; `kernels` does this too."""
    develop(session, "test", "device")
    pytest(session, "tests/kernels/test_headers.py", workers=2)


@nox.session
def kernels(session: nox.Session) -> None:
    """Device code, by both compilers; registers, spills and machine code asserted; headers and host modules."""
    develop(session, "test", "device")
    install_nvcc(session)
    pytest(session, "-m", "slow and not gpu", "tests/kernels", workers=2)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Hostile calls of every public function under sanitizers; `-- --hours 2` for long, `-- --help` for options."""
    develop(session, "test")
    folders = [str(ROOT / "tests"), session.env.get("PYTHONPATH") or ""]
    session.run(python(session), "-m", "fuzz", *session.posargs, env={"PYTHONPATH": os.pathsep.join(folders)})


def build_aarch64(session: nox.Session, dist: Path, **environment: str) -> None:
    """Host modules for Grace machines, by the cross compiler; in a folder of their own, since pip cannot install them
    here.
    """
    if shutil.which(AARCH64_COMPILER):
        command = ("-m", "build", "--wheel", "--no-isolation", "--outdir", str(dist / "aarch64"))
        session.run("python", *command, "packages/fi-jit-cache", env={**environment, "FI_AOT_MACHINE": "aarch64"})


def test_wheels(session: nox.Session, dist: Path, command: str, *options: str) -> None:
    """Writes the provenance, installs the wheels and tests the packages as a user gets them."""
    session.run("python", "tools/provenance.py", str(dist), command)
    for wheel in sorted(dist.rglob("*.whl")):
        session.log(f"{wheel.stat().st_size / 1e6:6.2f} MB  {wheel.name}")
    wheels = [str(path) for path in sorted(dist.glob("*.whl"))]
    if wheels:  # not with --install-only
        session.install("--no-deps", "--force-reinstall", *wheels)
        session.install("--find-links", str(dist), *PACKAGES)  # what the wheels ask for and is not here yet
    session.run("python", "-m", "pip", "check")
    pytest(session, "-o", "pythonpath=tests tests/packaging", "tests/packaging", *options, workers=2)


@nox.session
def wheels(session: nox.Session) -> None:
    """Build the five wheels into dist/, install them, and test the packages as a user gets them."""
    install_torch(session)
    install_builders(session)
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    # What the sessions before have compiled is not compiled again; tests compare it with what compilers make.
    store = {"FI_AOT_STORE": "1"}
    for name in PACKAGES:
        command = ("-m", "build", "--wheel", "--no-isolation", "--outdir", str(dist), f"packages/{name}")
        session.run("python", *command, env=store)
    build_aarch64(session, dist, **store)
    if shutil.which(AARCH64_COMPILER):
        test_wheels(session, dist, "nox -s wheels")
    else:
        test_wheels(session, dist, "nox -s wheels", "--ignore=tests/packaging/test_aarch64.py")
        session.warn(f"no wheel for aarch64: {AARCH64_COMPILER} is missing; apt-get install g++-aarch64-linux-gnu")


# Two ops for two architectures: each step of a release in minutes.
TRIAL = {"FI_AOT_OPS": "get_seq_lens,rmsnorm", "FI_CUDA_ARCH_LIST": "8.0 9.0a"}


def take_trial(session: nox.Session) -> bool:
    """Whether `trial` is among the arguments after --, from which it goes: the binary packages then hold two ops."""
    if "trial" not in session.posargs:
        return False
    session.posargs.remove("trial")
    session.env.update(TRIAL)
    return True


@nox.session
def changelog(session: nox.Session) -> None:
    """The section of VERSION in CHANGELOG.md: the files of changes/, and the speed beside the last release's."""
    install_tools(session, "release")
    version = (ROOT / "VERSION").read_text().strip()
    if f"\n## {version} - " in (ROOT / "CHANGELOG.md").read_text() and "--draft" not in session.posargs:
        session.error(f"CHANGELOG.md has a section of {version}; write a new version into VERSION first")
    session.run("towncrier", "build", "--yes", "--version", version, *session.posargs)
    if "--draft" not in session.posargs:
        session.run("python", "docs/speeds.py")


@nox.session
def release(session: nox.Session) -> None:
    """Build, check and test what a release uploads, without the store; after `--install-only` without a network.

    `-- trial` takes the same steps with two ops, whose packages nobody uploads, also in a tree that cannot be released.
    """
    trial = take_trial(session)
    options = ["-m", "not index and not whole" if trial else "not index"]
    install_torch(session)
    session.install("torch")  # it is there; what it asks for may not be
    install_builders(session)
    install_tools(session, "release")
    dist = ROOT / "dist"
    for check in ("tools/release.py", "docs/speeds.py"):
        session.run("python", check, "check", success_codes=[0, 1] if trial else [0])
    shutil.rmtree(dist, ignore_errors=True)
    session.run("python", "tools/rebuild.py", "--out", str(dist))
    build_aarch64(session, dist)
    files = [str(path) for pattern in ("*.whl", "*.tar.gz") for path in sorted(dist.rglob(pattern))]
    session.run("twine", "check", "--strict", *files)
    # W002: the metadata of FlashInfer's distributions in fi-core holds equal files; SECURITY.md explains them.
    session.run("check-wheel-contents", "--ignore", "W002", *(file for file in files if file.endswith(".whl")))
    for wheel in sorted(dist.rglob("fi_jit_cache-*.whl")):
        session.run("auditwheel", "show", str(wheel))
    session.run("python", "tools/release.py", "bills", str(dist))
    if not shutil.which(AARCH64_COMPILER):
        options.append("--ignore=tests/packaging/test_aarch64.py")
        session.warn(f"no wheel for aarch64: {AARCH64_COMPILER} is missing; apt-get install g++-aarch64-linux-gnu")
    # Warnings lie beside modules in the store, which a release does not use.
    options.append("--deselect=tests/packaging/test_aarch64.py::test_its_compiler_has_no_complaint")
    test_wheels(session, dist, "nox -s release", *options)
    session.run("fi-core", "verify", "--deep")
    session.run("fi-core", "doctor")
    session.run("python", "tools/release.py", "uploads", str(dist))


@nox.session
def rebuild(session: nox.Session) -> None:
    """Build in two places, without the store, and compare bytes; `-- --against FOLDER` compares wheels by content.

    `-- trial` builds two ops.
    """
    take_trial(session)
    install_builders(session)
    session.run("python", "tools/rebuild.py", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation, with warnings as errors, into docs/_build/html."""
    install_tools(session, "docs")  # the reference is read from the tree, whose import needs no torch
    session.run("sphinx-build", "-W", "--keep-going", "-b", "html", "docs", "docs/_build/html", *session.posargs)


@nox.session
def charts(session: nox.Session) -> None:
    """Draw the charts and fill the tables of README and docs/performance from benchmarks/results."""
    install_tools(session, "docs")
    session.run("python", "docs/charts.py")
