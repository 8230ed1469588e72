"""Hostile dumps: none of their content runs, and each raises an error that names the reason."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from core import dumping as toys
from core.dumping import calls, records
from fi_core.cli import main
from fi_core.observe.dump import Dumper
from fi_core.observe.replay import replay_from_dump, replay_sequence
from fi_core.utils import MaskMode


def rewrite(directory: Path, **changes: Any) -> None:
    """Changes keys of the last record of a dump."""
    *rest, last = records(directory)
    (directory / "metadata.jsonl").write_text("\n".join(json.dumps(r) for r in (*rest, {**last, **changes})) + "\n")


NAMES = [
    ("os", "system"),
    ("posix", "system"),
    ("subprocess", "Popen"),
    ("builtins", "exec"),
    ("never_imported_by_a_dump", "f"),
    ("fi_core.observe.log", "os.system"),
    ("fi_core.topk", "top_k.__globals__"),
    ("fi_core.topk", "__builtins__"),
    ("fi_core.topk", "__class__.__init__.__globals__"),
    ("fi_core.runtime.build.compiler", "compile_artifact"),
    ("fi_core.topk:top_k", "__call__"),
    ("", ""),
]


@pytest.mark.parametrize(("module", "qualname"), NAMES)
def test_only_marked_functions_are_called(
    dumper: Dumper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, qualname: str
) -> None:
    (tmp_path / "never_imported_by_a_dump.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef f(x): f.x\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(os, "system", lambda *_: pytest.fail("run by a dump"))
    toys.describe_only(f"touch {tmp_path / 'ran'}")
    (directory,) = calls(dumper)
    for more in ({}, {"self_id": 1}):
        rewrite(directory, module=module, qualname=qualname, **more)
        (result,) = replay_sequence(dumper.root, "cpu")
        assert result["execution_error"].startswith("LookupError: ")
        assert "is not a function of the API" in result["execution_error"]
        rewrite(directory, module=module, qualname=f"{qualname}.__init__", **more)
        (result,) = replay_sequence(dumper.root, "cpu")
        assert "is not a class of the API" in result["execution_error"]
    assert not (tmp_path / "ran").exists()
    assert "never_imported_by_a_dump" not in sys.modules


VALUES: list[tuple[dict[str, Any], str]] = [
    ({"type": "enum", "class": "os:environ", "name": "HOME"}, "LookupError: 'os:environ' is not an enum of fi_core"),
    ({"type": "enum", "class": "http:HTTPStatus", "name": "OK"}, "LookupError: 'http:HTTPStatus' is not an enum"),
    ({"type": "enum", "class": "fi_core.utils:MaskMode.__class__", "name": "mro"}, "LookupError: 'fi_core.utils:M"),
    ({"type": "enum", "class": "fi_core.utils:MaskMode", "name": "__class__"}, "LookupError: .* has no member"),
    ({"type": "dtype", "value": "ops"}, "ValueError: dtype: a dtype of torch is required; got 'ops'"),
    ({"type": "dtype", "value": "hub.load"}, "ValueError: dtype"),
    ({"type": "device", "value": "cuda:0; import os"}, "ValueError: device"),
    ({"type": "device", "value": "privateuseone"}, "ValueError: device"),
    ({"type": "generator", "key": "arg_0", "device": "xla:0"}, "ValueError: device"),
    ({"type": "object", "class": "os:system", "repr": "system"}, "ValueError: arg_0: an object of os:system cannot"),
    ({"type": "partial", "class": "functools:partial"}, "ValueError: arg_0: an object of functools:partial cannot"),
    ({"type": "tensor", "key": "../../x"}, "KeyError"),
    (
        {"type": "scratch", "details": {"shape": [2], "stride": [1], "dtype": "torch.ops", "device": "cpu"}},
        "ValueError",
    ),
    ({"no": "type"}, "KeyError: 'type'"),
]


@pytest.mark.parametrize(("value", "words"), VALUES)
def test_values_are_data(dumper: Dumper, value: dict[str, Any], words: str) -> None:
    toys.split(torch.ones(2))
    (directory,) = calls(dumper)
    rewrite(directory, input_metadata={"arg_0": value})
    (result,) = replay_sequence(dumper.root, "cpu")
    assert re.match(words, result["execution_error"])
    assert result["comparison_match"] is False


def test_tensor_files_hold_no_code(dumper: Dumper, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    toys.split(torch.ones(2))
    (directory,) = calls(dumper)
    torch.save({"arg_0": Evil()}, directory / "inputs.pt")
    (result,) = replay_sequence(dumper.root, "cpu")
    assert result["execution_error"].startswith("UnpicklingError")
    assert not (tmp_path / "ran").exists()


def test_tensors_of_a_wrong_device_or_dtype_are_refused(dumper: Dumper) -> None:
    toys.split(torch.ones(2))
    (directory,) = calls(dumper)
    details = records(directory)[-1]["tensor_details"]
    for change, words in (({"device": "os"}, "device: "), ({"dtype": "torch.load"}, "dtype: ")):
        rewrite(directory, tensor_details={key: {**about, **change} for key, about in details.items()})
        (result,) = replay_sequence(dumper.root, "cpu")
        assert result["execution_error"].startswith(f"ValueError: {words}")


@pytest.mark.parametrize("place", ["../../x", "..", ".", "", "/", "a/..", "linked", 7, None])
def test_a_session_stays_in_its_folder(dumper: Dumper, tmp_path: Path, place: Any) -> None:
    toys.split(torch.ones(2))
    (directory,) = calls(dumper)
    for outside in (tmp_path / "x", tmp_path / "other"):
        shutil.copytree(directory, outside)
    (dumper.root / "linked").symlink_to(tmp_path / "other")
    (dumper.root / "session.jsonl").write_text(json.dumps({"dump_dir": place}) + "\nno json\n")
    first, second = replay_sequence(dumper.root, "cpu")
    assert first["execution_error"].startswith("ValueError: session.jsonl, line 1: ")
    assert "execution_result" not in first
    assert second["execution_error"].startswith("ValueError: session.jsonl, line 2: JSONDecodeError")


def test_files_of_a_dump_are_its_own(dumper: Dumper, tmp_path: Path) -> None:
    toys.split(torch.ones(2))
    (directory,) = calls(dumper)
    (directory / "inputs.pt").rename(tmp_path / "inputs.pt")
    (directory / "inputs.pt").symlink_to(tmp_path / "inputs.pt")
    (result,) = replay_sequence(dumper.root, "cpu")
    assert result["execution_error"].startswith("ValueError: dump_dir: a path below")


def test_methods_need_an_object_of_their_class(dumper: Dumper) -> None:
    toys.ScaleWrapper(2.0).run(torch.ones(2))
    directory = next(path for path in calls(dumper) if "run" in path.name)
    identity = records(directory)[-1]["self_id"]
    result = replay_from_dump(directory, True, "cpu", True, {identity: MaskMode.CAUSAL})
    assert f"an object of {toys.__name__}:ScaleWrapper is required" in result["execution_error"]


def test_source_code_is_not_compiled(dumper: Dumper) -> None:
    toys.ScaleWrapper(2.0, jit_args=["name", "struct Variant { /* code */ };"])
    toys.ScaleWrapper(2.0, None, ["name", "struct Variant { /* code */ };"])
    for result in replay_sequence(dumper.root, "cpu")[:2]:
        assert "jit_args: source code from a dump is not compiled" in result["execution_error"]


@pytest.mark.parametrize("name", ["inputs.pt", "outputs.pt", "metadata.jsonl"])
@pytest.mark.timeout(30)
def test_a_pipe_among_the_files_stops_nothing(dumper: Dumper, name: str) -> None:
    toys.split(torch.ones(2))
    (directory,) = calls(dumper)
    (directory / name).unlink()
    os.mkfifo(directory / name)
    (result,) = replay_sequence(dumper.root, "cpu")
    assert result["execution_error"] == f"ValueError: dump_dir: files are required; {name!r} is another kind"


def test_a_method_takes_no_data_in_place_of_its_object(dumper: Dumper) -> None:
    toys.ScaleWrapper(2.0).run(torch.ones(2))
    directory = next(path for path in calls(dumper) if "run" in path.name)
    data = {"arg_0": {"type": "dict", "items": {}}, "arg_1": {"type": "tensor"}}
    rewrite(directory, self_id=None, input_metadata=data)
    result = replay_sequence(dumper.root, "cpu")[-1]
    assert "is required; replay the whole session" in result["execution_error"]


def test_a_dump_does_not_steer_the_terminal(dumper: Dumper, capsys: pytest.CaptureFixture[str]) -> None:
    toys.split(torch.ones(2))
    (directory,) = calls(dumper)
    rewrite(
        directory, input_metadata={"arg_0": {"type": "object", "class": "a:b", "repr": "\x1b]0;title\x07\n: Passed"}}
    )
    directory.rename(directory.parent / "call\x1b[2J")
    text = (dumper.root / "session.jsonl").read_text().replace(directory.name, "call\\u001b[2J")
    (dumper.root / "session.jsonl").write_text(text)
    assert main(["replay", "--dir", str(dumper.root), "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "\x1b]" not in out and "\x1b[2J" not in out and "\n: Passed" not in out
    assert "\\x1b]0;title\\x07\\n: Passed" in out
