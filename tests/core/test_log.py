"""fi_api: what each level prints, in which order, and that level 0 leaves nothing behind."""

from __future__ import annotations

import enum
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fi_core.observe import log
from fi_core.observe.format import describe
from fi_core.observe.log import RULE, THIN_RULE, Settings, fi_api

STAMP = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\]"


class Mode(enum.Enum):
    FAST = 7


@pytest.fixture
def at_level(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Callable[[], str]]]:
    """Set the level as an import would have, and read the log without its head."""
    logger = log.logger
    before = logger.handlers[:], logger.level, logger.propagate

    def close() -> None:
        for handler in set(logger.handlers) - set(before[0]):
            handler.close()

    def start(level: int, **options: Any) -> Callable[[], str]:
        monkeypatch.setattr(log, "settings", Settings(level, **options))
        close()
        log.configure(str(tmp_path / "log_%i.txt"))
        path = tmp_path / f"log_{os.getpid()}.txt"

        def read() -> str:
            text = path.read_text() if path.exists() else ""
            _, _, rest = text.partition("PyTorch version: ")
            return rest.partition(f"{RULE}\n\n")[2] if rest else text

        return read

    log.log_system_once.cache_clear()
    yield start
    close()
    logger.handlers[:], logger.level, logger.propagate = before


def test_level_0_returns_the_function_itself() -> None:
    def op(x: int) -> int:
        return x

    assert fi_api(op) is op
    assert fi_api()(op) is op
    assert vars(op) == {}


@pytest.mark.parametrize("level", [1, 2])
def test_levels_1_and_2_print_names(at_level: Callable[..., Callable[[], str]], level: int) -> None:
    read = at_level(level)

    @fi_api
    def op(x: Any, eps: float = 1e-6) -> Any:
        """Doc."""
        assert re.fullmatch(rf"{STAMP} FlashInfer API Call: op\n", read()), "printed before the call"
        return x

    assert op(3) == 3
    assert op.__doc__ == "Doc."
    assert len(read().splitlines()) == 1


@pytest.mark.parametrize("level", [3, 4])
def test_level_3_prints_inputs_defaults_and_output(at_level: Callable[..., Callable[[], str]], level: int) -> None:
    read = at_level(level)

    @fi_api
    def op(x: torch.Tensor, eps: float = 1e-6, *, mode: Mode = Mode.FAST, out: Any = None) -> Any:
        assert "Default parameters" in read()
        assert "Output value" not in read()
        return x, [1, "a"]

    x = torch.zeros(2, 6)[:, ::2]
    op(x, mode=Mode.FAST)
    lines = read().splitlines()
    assert re.fullmatch(rf"{STAMP} FlashInfer API Call: op", lines.pop(1))
    tensor = ["shape=(2, 3)", "stride=(6, 2)", "dtype=torch.float32", "device=cpu"]
    tensor += ["requires_grad=False", "is_contiguous=False"]
    assert lines == [
        RULE,
        THIN_RULE,
        "Positional input arguments:",
        "  arg[0]:",
        "    Tensor(",
        *(f"      {line}" for line in tensor),
        "    )",
        "Keyword input arguments:",
        "  mode=",
        "    Mode.FAST (value=7)",
        "Default parameters (not explicitly provided):",
        "  eps= [DEFAULT]",
        "    1e-06",
        "  out= [DEFAULT]",
        "    None",
        "Output value:",
        "  (",
        "    [0]: Tensor(",
        *(f"      {line}" for line in tensor),
        "    )",
        "    [1]: [",
        "      [0]: 1",
        "      [1]: 'a'",
        "    ]",
        "  )",
        RULE,
        "",
    ]


def test_no_arguments(at_level: Callable[..., Callable[[], str]]) -> None:
    read = at_level(3)
    fi_api(lambda: None)()
    assert f"{THIN_RULE}\n(No explicit arguments)\nOutput value:\n  None\n{RULE}\n" in read()


STATISTICS = [
    (torch.tensor([1.0, 2.0, 4.5]), ["min=1.000000", "max=4.500000", "mean=2.500000", "nan_count=0", "inf_count=0"]),
    (torch.tensor([1.0, 3.0]).to(torch.float8_e4m3fn), ["max=3.000000", "mean=2.000000", "nan_count=0"]),
    (torch.tensor([1.0, float("nan"), float("inf"), -float("inf")]).bfloat16(), ["nan_count=1", "inf_count=2"]),
    (torch.tensor([3, -4, 2], dtype=torch.int32), ["min=-4", "max=3", "mean=0.333333"]),
    (torch.tensor([True, False]), ["min=0", "max=1", "mean=0.500000"]),
    (torch.zeros(0, 4), ["[statistics skipped: no elements]"]),
    (torch.zeros(2, device="meta"), ["[statistics failed: "]),
]


@pytest.mark.parametrize(("tensor", "expected"), STATISTICS)
def test_level_5_adds_statistics(
    at_level: Callable[..., Callable[[], str]], tensor: torch.Tensor, expected: list[str]
) -> None:
    read = at_level(5)
    fi_api(lambda x: None)(tensor)
    for part in expected:
        assert f"      {part}" in read()
    assert ("nan_count" in read()) is any("nan_count" in part for part in expected)


def test_no_statistics_under_graph_capture(
    at_level: Callable[..., Callable[[], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = at_level(5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    log.log_system_once.cache_clear()
    monkeypatch.setattr(log, "log_system_once", lambda: None)
    fi_api(lambda x: None)(torch.ones(2))
    assert "      [statistics skipped: CUDA graph capture in progress]" in read()
    assert "min=" not in read()


class PagedWrapper:
    def run(self, x: int) -> int:
        return x


class Plain:
    def run(self, x: int) -> int:
        return x


def test_label_of_methods(at_level: Callable[..., Callable[[], str]]) -> None:
    read = at_level(1)
    fi_api(PagedWrapper.run)(PagedWrapper(), 1)
    fi_api(Plain.run)(Plain(), 1)
    assert [line.split(": ")[1] for line in read().splitlines()] == ["PagedWrapper.run", "Plain.run"]


def test_exceptions_pass_and_print_no_output_block(at_level: Callable[..., Callable[[], str]]) -> None:
    read = at_level(3)

    @fi_api
    def op(x: int) -> None:
        raise ZeroDivisionError("of the op")

    with pytest.raises(ZeroDivisionError, match="of the op"):
        op(1)
    assert "API Call: op" in read()
    assert "Output value" not in read()


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def test_logging_errors_do_not_break_the_call(at_level: Callable[..., Callable[[], str]]) -> None:
    read = at_level(3)
    value = Unprintable()
    assert fi_api(lambda x: x)(value) is value
    assert "logging of <lambda> failed: RuntimeError: no repr" in read()


@pytest.mark.parametrize(
    ("include", "exclude", "logged"),
    [
        ((), (), ["rmsnorm", "silu"]),
        (("rms*",), (), ["rmsnorm"]),
        (("RMS*",), (), []),  # case matters
        ((), ("*norm",), ["silu"]),
        (("*",), ("silu",), ["rmsnorm"]),
    ],
)
def test_include_and_exclude(
    at_level: Callable[..., Callable[[], str]], include: tuple[str, ...], exclude: tuple[str, ...], logged: list[str]
) -> None:
    for level, expected in ((3, logged), (1, ["rmsnorm", "silu"])):  # level 1 prints all
        read = at_level(level, include=include, exclude=exclude)
        seen = len(read())

        @fi_api
        def rmsnorm() -> int:
            return 1

        @fi_api
        def silu() -> int:
            return 2

        assert (rmsnorm(), silu()) == (1, 2)
        assert re.findall(r"API Call: (\w+)", read()[seen:]) == expected


@pytest.mark.parametrize(
    ("value", "lines"),
    [
        ([], ["  []"]),
        ((), ["  ()"]),
        ({}, ["  {}"]),
        (None, ["  None"]),
        ("a\nb", ["  'a\\nb'"]),
        ({"k": [None]}, ["  {", "    k: [", "      [0]: None", "    ]", "  }"]),
        (torch.float16, ["  torch.float16"]),
    ],
)
def test_describe(value: Any, lines: list[str]) -> None:
    assert describe(value, 1, False) == lines


SCRIPT = """
import sys
import fi_core.observe.log as log
print(len(log.logger.handlers), "torch" in sys.modules, flush=True)
@log.fi_api
def op(x): return x
op(1)
"""


def run_script(tmp_path: Path, code: str = SCRIPT, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("FI_", "FLASHINFER_"))}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )


def test_environment_default_is_silent(tmp_path: Path) -> None:
    done = run_script(tmp_path)
    assert (done.stdout, done.stderr) == ("0 False\n", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("target", ["stdout", "stderr"])
def test_environment_level_1(tmp_path: Path, target: str) -> None:
    done = run_script(tmp_path, SCRIPT + "print('torch' in sys.modules)", FLASHINFER_LOGLEVEL="1", FI_LOGDEST=target)
    assert "1 False\n" in done.stdout
    assert done.stdout.endswith("False\n"), "level 1 needs no torch"
    first, *rest = getattr(done, target).replace("1 False\n", "").splitlines()
    assert re.fullmatch(r"fi-core \S+ \(commit \S{1,8}\)", first)
    assert rest[0] == rest[2] == RULE
    assert re.fullmatch(rf"{STAMP} FlashInfer API Logging - System Information", rest[1])
    heads = [line.split(":")[0] for line in rest[3:8]]
    assert heads == ["fi-core version", "CUDA toolkit version", "cuDNN version", "Number of GPUs", "PyTorch version"]
    assert rest[8:10] == [RULE, ""]
    assert re.fullmatch(rf"{STAMP} FlashInfer API Call: op", rest[10])
    assert getattr(done, {"stdout": "stderr", "stderr": "stdout"}[target]).replace("1 False\n", "") in ("", "False\n")


def test_environment_file_is_appended_to(tmp_path: Path) -> None:
    (tmp_path / "api.log").write_text("before\n")
    run_script(tmp_path, FI_LOGLEVEL="3", FI_LOGDEST="api.log")
    text = (tmp_path / "api.log").read_text()
    assert text.startswith("before\nfi-core ")
    assert "  arg[0]:\n    1\n" in text
    assert f"PyTorch version: {torch.__version__}" not in text.partition("API Call")[0], "asked before torch came"


def test_log_does_not_reach_other_handlers(at_level: Callable[..., Callable[[], str]]) -> None:
    at_level(1)
    assert log.logger.name == "fi_core.api"
    assert not log.logger.propagate
    record = logging.makeLogRecord({"msg": "as it is", "levelname": "INFO"})
    assert [handler.format(record) for handler in log.logger.handlers] == ["as it is"]
    assert isinstance(log.logger.handlers[0], logging.FileHandler)


def test_environment_level_10_dumps_and_replays(tmp_path: Path) -> None:
    code = """
import sys
import torch
from fi_core.observe.log import fi_api
from fi_core.observe.replay import replay_sequence
def double(x): return x * 2
def other(x): return x
module = sys.modules["__main__"]
for name in ("double", "other"): setattr(module, name, fi_api(getattr(module, name)))
double(torch.ones(2)); double(torch.ones(3)); other(torch.ones(1))
print(len(replay_sequence("dumps", "cpu")), file=sys.stderr)
"""
    limits = {"FLASHINFER_DUMP_DIR": "dumps", "FI_DUMP_MAX_COUNT": "1", "FI_DUMP_EXCLUDE": "other"}
    done = run_script(tmp_path, code, FI_LOGLEVEL="10", **limits)
    assert done.stderr == "1\n"
    assert "2 calls" not in done.stdout
    assert f"calls are no longer dumped: 1 calls, 16 bytes in {tmp_path}/dumps" in done.stdout
    assert "min=1.000000" in done.stdout, "level 10 prints what level 5 prints"


def test_environment_trace_dump(tmp_path: Path) -> None:
    code = """
from types import SimpleNamespace as Meta
from fi_core.observe.log import fi_api
from fi_core.observe.trace import Const, Tensor, TraceTemplate
template = TraceTemplate("op", {"d": Const()}, {"x": Tensor(["d"])}, {})
def op(x): return x
fi_api(trace=template)(op)(Meta(shape=(4,), dtype="float32"))
"""
    run_script(tmp_path, code, FI_TRACE_DUMP="0", FI_TRACE_DUMP_DIR="off")
    run_script(tmp_path, code, FLASHINFER_TRACE_DUMP="1", FLASHINFER_TRACE_DUMP_DIR="traces")
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.json")] == ["traces/op_d4.json"]


@pytest.mark.parametrize("dest", ["missing/api.log", "."])
def test_a_log_that_cannot_be_written_goes_to_stderr(tmp_path: Path, dest: str) -> None:
    done = run_script(tmp_path, FI_LOGLEVEL="1", FI_LOGDEST=dest)
    first, second, *_ = done.stderr.splitlines()
    assert re.match(r"FI_LOGDEST: \[Errno \d+\] .*; the log goes to stderr", first)
    assert second.startswith("fi-core ")
    assert "API Call: op" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_classes_log_their_constructors(at_level: Callable[..., Callable[[], str]]) -> None:
    class BaseWrapper:
        def __init__(self, size: int = 1) -> None:
            self.size = size

    class PlainWrapper(BaseWrapper): ...

    class OwnWrapper(BaseWrapper):
        def __init__(self) -> None:
            super().__init__(2)

    before = [cls.__dict__.get("__init__") for cls in (BaseWrapper, PlainWrapper, OwnWrapper)]
    for cls in (BaseWrapper, PlainWrapper, OwnWrapper):
        assert fi_api(cls) is cls
    assert [cls.__dict__.get("__init__") for cls in (BaseWrapper, PlainWrapper, OwnWrapper)] == before, "level 0"
    read = at_level(1)
    for cls in (BaseWrapper, PlainWrapper, OwnWrapper):
        fi_api(cls)
    assert [BaseWrapper(3).size, PlainWrapper(4).size, OwnWrapper().size] == [3, 4, 2]
    labels = [line.split(": ")[1] for line in read().splitlines()]
    assert labels == ["BaseWrapper.__init__", "PlainWrapper.__init__", *["OwnWrapper.__init__"] * 2]
