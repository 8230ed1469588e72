"""The command line: what each command prints, as lines and as JSON, and its exit code."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fi_core
from core.console import SMALL, Cli, artifacts
from core.package import pack
from fi_core import collect_env
from fi_core.cli import machine, main
from fi_core.cli.arguments import parser
from fi_core.jit import base
from fi_core.observe import log
from fi_core.observe.dump import Dumper
from fi_core.observe.log import Settings, fi_api
from fi_core.runtime.build import toolchain
from fi_core.runtime.resolve import build_missing, provider, store
from fi_core.runtime.spec.target import CPU, Target

RMSNORM = ("rmsnorm", "dtype=bf16", "out=bf16", "residual=False")
HOPPER = Target("cuda", "90a")
pytestmark = pytest.mark.usefixtures("bare")
Fresh = Callable[[], None]


# The frame


def commands(of: Any = None, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command."""
    for action in (of or parser())._actions:
        for name, sub in action.choices.items() if isinstance(action.choices, dict) else ():
            yield (*before, name)
            yield from commands(sub, (*before, name))


def test_help_and_version(cli: Cli) -> None:
    text = cli()
    assert text.startswith("usage: fi-core") and "doctor" in text
    assert cli("--help") == text
    assert cli("cache").startswith("usage: fi-core cache")
    assert cli("--version") == f"fi-core {fi_core.__version__}\n"
    names = {
        *("show-config", "collect-env", "doctor", "why", "list-modules", "module-status", "prebuild", "cache"),
        *("clear-cache", "export-compile-commands", "exec", "replay", "verify"),
    }
    assert {words[0] for words in commands()} == names
    for words in commands():
        text = cli(*words, "--help")
        assert text.startswith(f"usage: fi-core {' '.join(words)}")
        assert "--json" in text or words == ("cache",)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "there is no 'nothing'; choose from show-config, "),
        (["wyh", "rmsnorm"], "there is no 'wyh'; did you mean why?"),
        (["cache", "cler"], "there is no 'cler'; did you mean clear?"),
        (["prebuild", "--modle", "llama-8b"], "there is no option --modle; did you mean --model"),
        (["prebuild", "--zzzzzzzz"], "unrecognized arguments: --zzzzzzzz"),
        (["why"], "the following arguments are required: NAME"),
        (["why", "rmsnrm"], "no op or public function is named 'rmsnrm'; did you mean rmsnorm"),
        (["why", "norm.mm_bf16_fp5"], "no op or public function is named 'norm.mm_bf16_fp5'; did you mean mm_bf16_fp8"),
        (["why", "trtllm_bf16_moe", "tp=3"], "fused_moe.trtllm_bf16_moe takes the fields of its ops, .*; unknown: tp"),
        (["why", "vllm_meta_size", "n=3"], "vllm_meta_size takes no facts; unknown: n"),
        (["why", "masked_bmm", "--backend", "cute"], "no op that fi_core.gemm.masked_bmm reaches has a backend 'cute'"),
        (["why", "rmsnorm", "bf16"], "expected key=value, such as dtype=bf16; got 'bf16'"),
        (["why", "rmsnorm", "d=8"], "rmsnorm takes dtype=bfloat16, .*; unknown: d"),
        (["why", "BatchDecodeWithPagedKVCacheWrapper", "d=8"], "takes .*batch_size=64, .*page_size=16.*; unknown: d"),
        (["why", "act_and_mul", "d=8"], r"act_and_mul takes dtype=f16|bf16|f32; unknown: d"),
        (["why", "silu_and_mul", "--backend", "cuda"], "--backend: silu_and_mul has no argument backend"),
        (["why", *RMSNORM, "out=f16"], "a fact is given twice"),
        (["why", *RMSNORM, "--target", "sm_9"], "argument --target: target: expected cpu, or an architecture"),
        (["why", *RMSNORM, "--backend", "fast"], "backend: rmsnorm has auto, cpu, cuda; got 'fast'"),
        (["prebuild", "--ops", "rmsnorm,nothing"], "argument --ops: op: no op is named 'nothing'"),
        (
            ["prebuild", "--ops", "moe_gated_gemm", "--target", "8.0"],
            "nothing is built ahead of moe_gated_gemm on sm_80",
        ),
        (
            ["prebuild", "--list", "--target", "7.5", "--target", "sm_90a"],
            "no kernel supports sm_75; sm_80 is the oldest",
        ),
        (["module-status", "--filter", "some"], "argument --filter: there is no 'some'"),
        (["cache", "prune", "--max-bytes", "2T"], "expected bytes, such as 500M or 2G; got '2T'"),
        (["cache", "prune", "--max-age-days", "-1"], "expected a number of days >= 0; got '-1'"),
        (["export-compile-commands", "a.json", "-o", "b.json"], "PATH and --output name the same file"),
        (["replay"], "the following arguments are required: --dir"),
    ],
)
def test_wrong_usage(words: list[str], message: str, cli: Cli) -> None:
    assert cli(*words, code=2) == ""
    assert cli.err.startswith("usage: fi-core")
    assert re.search(message.replace("|", r"\|"), cli.err), cli.err


def test_a_failure_is_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cli("replay", "--dir", tmp_path / "none", code=1) == ""
    assert cli.err.startswith("fi-core: root_dir: a dump (metadata.jsonl) or a session of dumps is required")
    assert "a session of dumps is required" in cli.json("replay", "--dir", tmp_path / "none", code=1)["error"]
    monkeypatch.setitem(sys.modules, "fi_core.cli.cache", None)
    assert cli("cache", "ls", code=1) == "" and cli.err.startswith("fi-core: import of fi_core.cli.cache halted")
    monkeypatch.setenv("FI_JIT", "sometimes")
    assert cli("prebuild", "--ops", SMALL, code=1) == ""
    assert cli.err == "fi-core: FI_JIT: allowed are on | warn | off; got 'sometimes'\n"


def test_started_as_a_module(python: Any, tmp_path: Path) -> None:
    """Commands that need no torch do not import it, also in the program itself; a closed pipe prints no traceback."""
    words = [
        ["--help"],
        ["list-modules"],
        ["why", *RMSNORM],
        ["cache", "ls"],
        ["doctor"],
        ["show-config"],
        ["collect-env"],
    ]
    text = f"""
import contextlib, io, sys, time
start = time.process_time()
from fi_core.cli import main
main(["--help"])
print(time.process_time() - start, file=sys.stderr)
for words in {words!r}:
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(words) == 0, words
print(sorted({{"torch", "numpy", "tvm_ffi"}} & sys.modules.keys()), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, cwd=tmp_path)
    first, second = done.stderr.splitlines()
    assert float(first) < 0.3
    assert second == "[]"
    assert not (tmp_path / "cache").exists(), "looking leaves no trace"

    run = [sys.executable, "-m", "fi_core"]
    done = subprocess.run([*run, "why", *RMSNORM, "--target", "7.5"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert "requires capability >= 80, got 75" in done.stdout
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*run, "list-modules"], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_colours_only_on_a_terminal(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["why", *RMSNORM]
    plain = cli(*words)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(words) == 0
    painted = capsys.readouterr().out
    assert "\x1b[32mchosen\x1b[0m" in painted
    assert re.sub(r"\x1b\[\d+m", "", painted) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(words) == 0
    assert capsys.readouterr().out == plain


# why


def test_why_names_the_choice_and_each_refusal(cli: Cli) -> None:
    text = cli("why", *RMSNORM)
    assert text.startswith(f"rmsnorm(dtype=bf16, out=bf16, residual=False) on {CPU}\n  cpu: chosen\n")
    assert "  cuda: requires device == cuda, got cpu; requires capability >= 80, got 0\n" in text
    on_card = cli("why", "rmsnorm", "dtype=torch.bfloat16", "out=float8_e4m3fn", "residual=1", "--target", "9.0")
    assert on_card.startswith("rmsnorm(dtype=bf16, out=e4m3, residual=True) on sm_90a\n")
    assert "  cpu: requires device == cpu, got cuda\n" in on_card
    data = cli.json("why", *RMSNORM, "--target", "sm_90a")
    assert data["implementations"] == {
        "cpu": {"why_not": ["requires device == cpu, got cuda"]},
        "cuda": {"why_not": []},
    }
    assert (data["op"], data["target"], data["chosen"]) == ("rmsnorm", "sm_90a", "cuda")
    assert data["request"] == "rmsnorm(dtype=bf16, out=bf16, residual=False) on sm_90a"
    assert data["spec"] == "rmsnorm_dtype_bf16_out_bf16_residual_False_cuda_sm_90a"
    assert [file["kind"] for file in data["files"]] == ["cuda", "cubin"]


def test_why_refuses_a_request_that_no_implementation_supports(cli: Cli) -> None:
    text = cli("why", "rmsnorm", "dtype=i32", "out=bf16", "residual=maybe", code=1)
    assert "cpu: requires dtype in f16, bf16, f32, got i32; requires residual in False, True, got maybe" in text
    assert "No implementation supports the request: a call raises UnsupportedError." in text
    assert cli.json("why", *RMSNORM, "--backend", "cuda", "--target", "cpu", code=1)["chosen"] is None


def test_why_names_a_library_that_is_missing(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from fi_core.attention.cudnn import graph

    monkeypatch.setitem(sys.modules, "cudnn", None)
    graph.frontend.cache_clear()
    cli("why", "BatchDecodeWithPagedKVCacheWrapper", "backend=cudnn", "--target", "sm_90a", code=2)
    assert "pip install nvidia-cudnn-frontend" in cli.err
    graph.frontend.cache_clear()


def test_why_on_the_targets_of_this_machine(cli: Cli, gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [data["target"] for data in cli.json("why", SMALL)] == ["sm_89", "sm_90a"]
    monkeypatch.setenv("FI_CUDA_ARCH_LIST", "8.0")
    base.context.cache_clear()
    assert cli.json("why", SMALL)["target"] == "sm_80"
    assert [data["target"] for data in cli.json("why", SMALL, "--target", "cpu", "--target", "10.0")] == [
        str(CPU),
        "sm_100a",
    ]


def test_why_tells_where_each_file_comes_from(
    cli: Cli, fresh: Fresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing, the store, one package, both; and what a package that does not fit says."""
    host, image = artifacts(HOPPER)

    def lines(code: int = 0) -> list[str]:
        return [line.strip() for line in cli("why", SMALL, "--target", "sm_90a", code=code).splitlines()]

    nothing = lines()
    assert f"{host.file}: would compile with {toolchain.cxx()}" in nothing
    assert "prebuilt: no package with host modules is installed (pip install fi-jit-cache)" in nothing
    assert "prebuilt: no package with device binaries is installed (pip install fi-cubin)" in nothing
    assert any(re.fullmatch(rf"{image.file}: would compile with .*(nvrtc|nvcc).*", line) for line in nothing)
    assert sum(line.startswith(f"store: has no {SMALL}") for line in nothing) == 2
    monkeypatch.setenv("FI_JIT", "off")
    assert f"{host.file}: nowhere: FI_JIT=off forbids to compile it" in lines(code=1)
    monkeypatch.delenv("FI_JIT")

    build_missing([host])
    entry = store.entries()[0]
    os.utime(entry.path, (1, 1))
    assert f"{host.file}: store {entry.path / host.file}" in lines()
    assert store.entries()[0].used == 1, "a query does not count as a use"

    folder = pack(tmp_path / "prebuilt", {image: b"image"})
    monkeypatch.setenv("FI_CUBIN_DIR", str(folder))
    fresh()
    only_device = lines()
    assert f"{image.file}: FI_CUBIN_DIR {folder / image.file}" in only_device
    assert f"{host.file}: store {entry.path / host.file}" in only_device

    pack(folder, {host: b"host", image: b"image"})
    (folder / image.file).write_bytes(b"damaged")
    fresh()
    damaged = lines()
    assert f"{host.file}: FI_CUBIN_DIR {folder / host.file}" in damaged
    assert f"FI_CUBIN_DIR: {image.file}: it does not match its digest" in damaged
    assert any(line.startswith(f"{image.file}: would compile") for line in damaged)

    pack(folder, {host: b"host", image: b"image"}, version="0.0.1")
    fresh()
    (file,) = [file for file in cli.json("why", SMALL, "--target", "sm_90a")["files"] if file["kind"] == "cubin"]
    assert file["path"] is None and file["ready"]
    assert file["misses"][0]["from"] == "FI_CUBIN_DIR"
    assert file["misses"][0]["why"].startswith("its version 0.0.1 is not that of fi-core")


def test_why_without_a_compiler(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "nowhere: there is no C++ compiler (see fi-core doctor)" in cli("why", SMALL, code=1)


def test_an_older_target_serves(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sm_86 runs what was built for sm_80, and why says which file it is."""
    _, image = artifacts(Target("cuda", "80"))
    monkeypatch.setenv("FI_CUBIN_DIR", str(pack(tmp_path / "prebuilt", {image: b"image"})))
    (file,) = [file for file in cli.json("why", SMALL, "--target", "8.6")["files"] if file["kind"] == "cubin"]
    assert file["from"] == "FI_CUBIN_DIR" and file["path"].endswith(f"{SMALL}_cuda_sm_80.cubin")


# Modules


def test_a_checkout_is_silent_about_empty_packages(
    fresh: Fresh, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Packages without artifacts are what a checkout has: no line for users, one for those who debug."""
    monkeypatch.setattr(provider, "PACKAGES", ("fi_jit_cache", "fi_cubin"))
    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append  # type: ignore[method-assign]
    monkeypatch.setenv("FI_LOGGING_LEVEL", "info")
    logging.getLogger("fi_core.jit").addHandler(handler)
    try:
        build_missing(artifacts(CPU))
    finally:
        logging.getLogger("fi_core.jit").removeHandler(handler)
    assert "holds no artifacts" not in capfd.readouterr().err
    about = [(record.levelname, record.getMessage()) for record in said if "holds no artifacts" in record.getMessage()]
    assert about == [("DEBUG", f"{name} skipped: {provider.EMPTY}") for name in ("fi-jit-cache", "fi-cubin")]


def test_prebuild_and_status(cli: Cli, tmp_path: Path) -> None:
    before = cli.json("module-status")
    assert before["summary"]["compiled"] == 0
    assert {m["name"] for m in before["modules"]} >= {f"{SMALL}_cpu", "rmsnorm_cpu"}
    done = cli.json("prebuild", "--ops", SMALL, "--progress")
    assert (done["built"], done["files"], done["targets"]) == (1, 1, [str(CPU)])
    assert f"[1/1] {SMALL}_cpu" in cli.err
    assert cli("prebuild", "--ops", SMALL) == f"All 1 files for {CPU} are there.\n"
    assert cli("prebuild", "--ops", SMALL, "--rebuild").startswith("1 of 1 files built")
    after = cli.json("module-status")["summary"]
    assert after == {"total": len(before["modules"]), "compiled": 1, "not_compiled": len(before["modules"]) - 1}
    assert [m["name"] for m in cli.json("module-status", "--filter", "compiled")["modules"]] == [f"{SMALL}_cpu"]
    assert len(cli.json("module-status", "--filter", "not-compiled")["modules"]) == after["not_compiled"]
    assert len(cli.json("module-status", "--filter", "jit")["modules"]) == after["total"]
    assert cli.json("module-status", "--filter", "aot")["modules"] == []

    table = cli("module-status")
    assert re.search(r"^\| Module Name +\| Type +\| Status +\| Files +\| From +\|$", table, re.MULTILINE)
    assert re.search(rf"^\| {SMALL}_cpu +\| JIT +\| Compiled +\| 1 +\| store +\|$", table, re.MULTILINE)
    total, rest = after["total"], after["not_compiled"]
    assert f"=== Summary ===\nTotal modules: {total}\ncompiled: 1\nNot compiled: {rest}\n" in table
    detail = cli("module-status", "--detailed", "--filter", "compiled")
    assert f"Module: {SMALL}_cpu\nStatus: Compiled\nType: JIT\nLibrary Path: {tmp_path / 'cache'}" in detail


def test_prebuilt_modules_are_aot(cli: Cli, fresh: Fresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (host,) = artifacts(CPU)
    monkeypatch.setenv("FI_CUBIN_DIR", str(pack(tmp_path / "prebuilt", {host: b"host"})))
    fresh()
    (module,) = cli.json("module-status", "--filter", "aot")["modules"]
    assert (module["name"], module["type"], module["compiled"]) == (f"{SMALL}_cpu", "AOT", True)
    assert module["files"][0]["origin"] == "FI_CUBIN_DIR"
    assert "skipped" not in cli.err


def test_a_failed_prebuild(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FI_EXTRA_CFLAGS", "-DTVMFFIAny=3")
    assert cli("prebuild", "--ops", SMALL, code=1) == ""
    assert re.match(rf"fi-core: building {SMALL}_cpu failed: .*error", cli.err)
    monkeypatch.setenv("FI_JIT", "off")
    assert f"kernel '{SMALL}_cpu' is not prebuilt" in cli.json("prebuild", "--ops", SMALL, code=1)["error"]


def test_list_modules(cli: Cli) -> None:
    text = cli("list-modules")
    assert text.startswith("Available compilation modules:\n")
    assert f"  {SMALL}_cpu - Not Compiled\n" in text
    on_card = {m["name"] for m in cli.json("list-modules", "--target", "sm_90a")}
    assert f"{SMALL}_cuda_sm_90a" in on_card and not any(name.endswith("_cpu") for name in on_card)
    build_missing(artifacts(CPU))
    assert f"  {SMALL}_cpu - Compiled\n" in cli("list-modules")
    one = cli("list-modules", f"{SMALL}_cpu")
    path = store.entries()[0].path / f"{SMALL}_cpu.so"
    for line in (f"Module: {SMALL}_cpu", "Status: Compiled", f"Library Path: {path}", "Source Files:"):
        assert f"{line}\n" in one
    assert re.search(rf"^  1\. .*csrc/page/{SMALL}\.cc$", one, re.MULTILINE)
    assert f"Created: {time.strftime('%Y-')}" in one
    paths = cli.json("list-modules", f"{SMALL}_cpu")
    assert f"Build File: {paths['ninja']} (JitSpec.write_ninja() writes it)\nBuild Log: {paths['log']}\n" in one
    assert Path(paths["log"]).is_file() and paths["ninja"].endswith(f"/generated/{SMALL}_cpu/build.ninja")
    other = cli.json("list-modules", f"{SMALL}_cuda_sm_100a")  # a target of the binary packages
    assert (other["compiled"], other["target"]) == (False, "sm_100a")
    text = cli("list-modules", "rmsnorm_cp", code=1)
    assert text.startswith("Module 'rmsnorm_cp' not found.\nClose names: rmsnorm_cpu")
    of_op = cli("list-modules", SMALL, "--target", "cpu", "--target", "9.0a", code=1).splitlines()
    assert of_op == [f"Module '{SMALL}' not found.", f"Modules of that op: {SMALL}_cpu, {SMALL}_cuda_sm_90a"]


def test_export_compile_commands(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli("export-compile-commands", "--target", "cpu", "--target", "9.0").endswith("compile_commands.json\n")
    entries = json.loads(Path("compile_commands.json").read_text())
    assert all(set(entry) == {"directory", "command", "file"} for entry in entries)
    assert all(Path(entry["file"]).is_file() and Path(entry["directory"]).is_dir() for entry in entries)
    names = {Path(entry["file"]).name for entry in entries}
    assert {f"{SMALL}.cc", f"{SMALL}_cuda_sm_90a.cu"} <= names
    assert cli.json("export-compile-commands", "-o", "other.json", "--target", "cpu")["path"] == "other.json"
    assert len(json.loads(Path("other.json").read_text())) < len(entries)


# The cache


def test_cache(cli: Cli, tmp_path: Path) -> None:
    root = tmp_path / "cache" / "cached_ops"
    assert cli("cache", "ls").endswith(f"0 entries, 0 B in {root}\n")
    for key, content in (("one-1", b"x" * 2000), ("two-2", b"y" * 5)):
        store.get_or_build(key, lambda folder, content=content: (folder / "file").write_bytes(content))  # type: ignore[misc]
    os.utime(root / "one-1", (0, 0))
    listed = cli.json("cache", "ls")
    assert [entry["key"] for entry in listed] == ["one-1", "two-2"]
    assert listed[0]["used"] == 0 and listed[0]["bytes"] > 2000
    assert re.search(r"^\| one-1 +\| 2\.\d kB +\| 1970-01-0", cli("cache", "ls"), re.MULTILINE)
    assert cli("cache", "verify") == "2 entries checked, 0 damaged\n"
    (root / "two-2" / "file").write_bytes(b"z" * 5)
    assert f"damaged {root / 'two-2'}: file does not match its manifest\n" in cli("cache", "verify", code=1)
    assert cli.json("cache", "verify", code=1)["damaged"][0]["key"] == "two-2"
    assert "1 damaged entries" in cli("doctor")
    assert cli.json("cache", "prune") == []
    assert cli("cache", "prune", "--max-age-days", "1") == f"removed {root / 'one-1'}\n1 removed\n"
    assert cli.json("cache", "prune", "--max-bytes", "1K") == []
    assert cli.json("cache", "prune", "--max-bytes", "0") == [str(root / "two-2")]
    for words in (("cache", "clear"), ("clear-cache",)):
        store.get_or_build("one-1", lambda folder: (folder / "file").write_bytes(b""))
        assert cli(*words) == "Cache cleared: 1 entries removed.\n"
        assert store.entries() == []
    assert cli.json("clear-cache") == {"removed": 0}


# Reports


def test_show_config(cli: Cli, monkeypatch: pytest.MonkeyPatch, gpus: None) -> None:
    text = cli("show-config")
    titles = re.findall(r"^=== (.*) ===$", text, re.MULTILINE)
    assert titles[:2] == ["Version Info", "Torch Version Info"] and titles[-1] == "Module Status"
    for line in (f"fi-core version: {fi_core.__version__}", f"fi-cubin version: {fi_core.__version__}"):
        assert f"{line}\n" in text
    assert "CUDA targets: sm_89, sm_90a\n" in text
    assert f"FI_CACHE_DIR: {os.environ['FI_CACHE_DIR']}\n" in text
    assert "GPU 0: Mock GPU (compute capability 9.0)\n" in text
    data = cli.json("show-config")
    assert data["Module Status"]["Total modules"] == data["Module Status"]["Not compiled"] > 0
    monkeypatch.setattr(machine, "version", lambda name: None)
    assert "fi-cubin version: Not installed\n" in cli("show-config")


def test_torch_is_read_from_its_files() -> None:
    import torch

    assert machine.torch_build() == machine.Torch(torch.__version__, torch.version.cuda)
    assert machine.version("no-such-package") is None


def test_collect_env_hides_secrets(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FI_HUB_TOKEN", "hunter2")
    monkeypatch.setenv("FLASHINFER_JIT", "warn")
    text = cli("collect-env")
    assert text.startswith("### fi environment report\n\n==== System ====\n")
    assert "hunter2" not in text
    assert re.search(r"^FI_HUB_TOKEN +: \(hidden\)$", text, re.MULTILINE)
    assert re.search(r"^FLASHINFER_JIT +: warn$", text, re.MULTILINE)
    data = cli.json("collect-env")
    assert data["Environment"]["FI_HUB_TOKEN"] == "(hidden)"
    assert data["Packages"]["fi-kernels"] == fi_core.__version__
    assert set(re.findall(r"^==== (.*) ====$", text, re.MULTILINE)) == set(data)
    info = collect_env.collect_env_info()
    assert info["Environment"] == data["Environment"] and set(info) == set(data)
    assert collect_env.format_report(info).splitlines() == text.rstrip().splitlines()


# replay

FACTOR = 2.0  # changed so that a replay differs


def scaled(x: Any) -> Any:
    if FACTOR == 0:
        raise RuntimeError("no factor")
    return x * FACTOR


def test_replay(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(log, "settings", Settings(10))
    monkeypatch.setattr(log.logger, "handlers", [logging.NullHandler()])
    monkeypatch.setattr(log, "dumper", Dumper(tmp_path / "dumps", 1e9, 10, log.logger))
    monkeypatch.setitem(globals(), "scaled", fi_api(scaled))
    scaled(torch.ones(3))
    monkeypatch.setattr(log, "settings", Settings(0))
    (call,) = (path for path in (tmp_path / "dumps").iterdir() if path.is_dir())
    end = "Summary: {} passed, {} failed/mismatch\n"
    for folder in (call, tmp_path / "dumps"):
        assert cli("replay", "--dir", folder) == f"{call}: Passed\n{end.format(1, 0)}"
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert cli("replay", "--dir", call, "--device", "cpu", code=1) == f"{call}: Mismatch\n{end.format(0, 1)}"
    monkeypatch.setitem(globals(), "FACTOR", 0.0)
    assert cli("replay", "--dir", call, code=1) == f"{call}: Error: RuntimeError: no factor\n{end.format(0, 1)}"
    data = cli.json("replay", "--dir", call, code=1)
    assert data["summary"] == {"passed": 0, "failed": 1}
    assert data["calls"][0]["verdict"] == "error"
