"""Dumps of calls (level 10), and running them again."""

from __future__ import annotations

import enum
import json
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fi_core.observe import log
from fi_core.observe.dump import Dumper
from fi_core.observe.log import Settings, fi_api
from fi_core.observe.replay import replay_from_dump, replay_sequence


class Act(enum.Enum):
    SILU = 1


SCALE = 2.0  # changed by tests so that a replay differs


def scale(x: Any, factor: float = 1.0, *, pair: Any = None, act: Any = None, dtype: Any = None) -> Any:
    out = x * factor * SCALE
    if pair is not None:
        out = out + pair["a"] * pair["b"][1]
    return out.to(dtype) if dtype else out


def split(x: Any) -> Any:
    return x + SCALE, None, x.shape[0]


def fails(x: Any) -> Any:
    raise RuntimeError("of the op")


def zero_(x: Any) -> None:
    x.zero_()


class ScaleWrapper:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def plan(self, by: float) -> None:
        self.factor *= by

    def run(self, x: Any) -> Any:
        return x * self.factor


class ChildWrapper(ScaleWrapper):
    def __init__(self) -> None:
        super().__init__(5.0)


@pytest.fixture
def dumper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Dumper]:
    """Level 10, with the ops of this file decorated."""
    handlers = log.logger.handlers[:], log.logger.propagate
    log.logger.handlers[:] = [logging.NullHandler()]
    made = Dumper(tmp_path / "dumps", 1e9, 1000, log.logger)
    monkeypatch.setattr(log, "settings", Settings(10))
    monkeypatch.setattr(log, "dumper", made)
    here = globals()
    for name in ("scale", "split", "fails", "zero_"):
        monkeypatch.setitem(here, name, fi_api(here[name]))
    for owner, name in ((ScaleWrapper, "__init__"), (ScaleWrapper, "plan"), (ScaleWrapper, "run")):
        monkeypatch.setattr(owner, name, fi_api(getattr(owner, name)))
    monkeypatch.setitem(here, "SCALE", 2.0)
    yield made
    log.logger.handlers[:], log.logger.propagate = handlers


def calls(dumper: Dumper) -> list[Path]:
    return sorted(path for path in dumper.root.iterdir() if path.is_dir())


def records(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metadata.jsonl").read_text().splitlines()]


def test_files_of_a_call(dumper: Dumper) -> None:
    x = torch.arange(6.0).view(2, 3)
    scale(x, 3.0, pair={"a": x, "b": (1, torch.ones(3))}, act=Act.SILU, dtype=torch.bfloat16)
    (directory,) = calls(dumper)
    assert re.fullmatch(r"\d{8}_\d{6}_\d{3}_pid\d+_scale_call0001", directory.name)
    inputs = torch.load(directory / "inputs.pt", weights_only=True)
    assert inputs.keys() == {"arg_0", "kwarg_pair__a", "kwarg_pair__b__1"}
    assert torch.equal(inputs["arg_0"], x)
    outputs = torch.load(directory / "outputs.pt", weights_only=True)
    assert outputs["result"].dtype is torch.bfloat16
    first, last = records(directory)
    assert [first["execution_status"], last["execution_status"]] == ["inputs_saved", "completed"]
    assert last["function_name"] == "scale"
    assert last["module"] == __name__
    assert last["call_sequence"] == 1
    assert last["input_metadata"]["arg_1"] == {"type": "float", "value": 3.0}
    assert last["tensor_info"] == {"input_tensors": list(inputs), "output_tensors": ["result"]}
    assert last["tensor_details"]["arg_0"]["shape"] == [2, 3]
    assert last["tensor_format"] == "torch"
    assert last["versions"]["torch"] == torch.__version__
    assert last["dump_dir"] == str(directory)
    keys = {"timestamp", "process_id", "output_metadata", "function_signature"}
    assert keys <= last.keys()
    assert "self_id" not in last
    session = [json.loads(line) for line in (dumper.root / "session.jsonl").read_text().splitlines()]
    assert session == [first, last]
    scale(x)
    assert len(list(dumper.root.glob("*_scale_call0002"))) == 1


def test_inputs_are_saved_before_the_call(dumper: Dumper) -> None:
    x = torch.ones(3)
    zero_(x)
    with pytest.raises(RuntimeError, match="of the op"):
        fails(torch.ones(2))
    by_name = {records(path)[-1]["function_name"]: path for path in calls(dumper)}
    assert torch.load(by_name["zero_"] / "inputs.pt", weights_only=True)["arg_0"].tolist() == [1, 1, 1]
    assert not (by_name["fails"] / "outputs.pt").exists()
    assert [record["execution_status"] for record in records(by_name["fails"])] == ["inputs_saved"]


def test_a_view_is_saved_alone(dumper: Dumper) -> None:
    split(torch.zeros(1 << 20)[:4])
    (directory,) = calls(dumper)
    assert (directory / "inputs.pt").stat().st_size < 10_000


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(24.0).view(4, 6)[:, ::2],
        torch.arange(3.0).view(3, 1).expand(3, 5),
        torch.zeros(0, 3),
        torch.tensor(2.5),
        torch.tensor([1.0, float("nan"), float("inf")]),
    ],
)
def test_replay_gives_shape_strides_and_result(dumper: Dumper, x: torch.Tensor) -> None:
    expected = scale(x, 3.0, pair={"a": x, "b": (1, x)}, act=Act.SILU, dtype=torch.float16)
    (directory,) = calls(dumper)
    result = replay_from_dump(directory, compare_outputs=True, device="cpu", run=True)
    (again, factor) = result["args"]
    torch.testing.assert_close(again, x, rtol=0, atol=0, equal_nan=True)
    assert again.stride() == x.stride()
    assert factor == 3.0
    assert result["kwargs"]["act"] is Act.SILU
    assert result["kwargs"]["dtype"] is torch.float16
    assert result["kwargs"]["pair"]["b"][0] == 1
    torch.testing.assert_close(result["execution_result"], expected, equal_nan=True)
    assert result["comparison_match"] is True
    assert result["expected_tensors"].keys() == {"result"}


def test_replay_only_loads_unless_told(dumper: Dumper) -> None:
    split(torch.ones(2))
    (directory,) = calls(dumper)
    assert replay_from_dump(directory, device="cpu").keys() == {"args", "kwargs", "metadata"}
    assert len(calls(dumper)) == 1
    with pytest.raises(FileNotFoundError, match="dump_dir"):
        replay_from_dump(dumper.root)


def test_a_changed_result_is_a_mismatch(dumper: Dumper, monkeypatch: pytest.MonkeyPatch) -> None:
    split(torch.ones(2))
    (directory,) = calls(dumper)
    assert replay_from_dump(directory, True, "cpu", True)["comparison_match"]
    monkeypatch.setitem(globals(), "SCALE", 2.0005)
    assert replay_from_dump(directory, True, "cpu", True)["comparison_match"], "within 1e-3"
    monkeypatch.setitem(globals(), "SCALE", 2.1)
    assert not replay_from_dump(directory, True, "cpu", True)["comparison_match"]
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    monkeypatch.setitem(globals(), "split", lambda x: (x + 2, None, 7))
    assert not replay_from_dump(directory, True, "cpu", True)["comparison_match"], "a number differs"
    monkeypatch.setitem(globals(), "split", lambda x: (x + 2, x, 2))
    assert not replay_from_dump(directory, True, "cpu", True)["comparison_match"], "a tensor more"


def test_sequence_with_objects_and_errors(dumper: Dumper, monkeypatch: pytest.MonkeyPatch) -> None:
    one, child = ScaleWrapper(3.0), ChildWrapper()
    one.plan(2.0)
    assert one.run(torch.ones(2)).tolist() == [6.0, 6.0]
    assert child.run(torch.ones(1)).tolist() == [5.0]
    scale(torch.ones(2), act=object())
    with pytest.raises(RuntimeError):
        fails(torch.ones(2))
    monkeypatch.setattr(log, "dumper", None)
    results = replay_sequence(dumper.root, device="cpu")
    names = [Path(result["dump_dir"]).name.split("_", 4)[4].rsplit("_call")[0] for result in results]
    owner = ["ScaleWrapper.__init__", "ChildWrapper.__init__", "ScaleWrapper.plan", "ScaleWrapper.run"]
    assert names == [*owner, "ChildWrapper.run", "scale", "fails"]
    assert [result.get("comparison_match") for result in results] == [True] * 5 + [False, False]
    assert results[3]["execution_result"].tolist() == [6.0, 6.0]
    assert type(results[3]["metadata"]["self_id"]) is int
    assert "kwarg_act: an object of builtins:object cannot be made" in results[5]["execution_error"]
    assert results[6]["execution_error"] == "RuntimeError: of the op"


def test_a_method_alone_needs_its_object(dumper: Dumper) -> None:
    ScaleWrapper(3.0).run(torch.ones(2))
    (directory,) = (path for path in calls(dumper) if "run" in path.name)
    result = replay_from_dump(directory, True, "cpu", True)
    assert "object_registry" in result["execution_error"]
    assert result["comparison_match"] is False
    registry = {result["metadata"]["self_id"]: ScaleWrapper(3.0)}
    assert replay_from_dump(directory, True, "cpu", True, registry)["comparison_match"]


def test_a_session_may_move_and_a_single_dump_is_a_sequence(dumper: Dumper, tmp_path: Path) -> None:
    split(torch.ones(2))
    moved = tmp_path / "elsewhere"
    shutil.move(dumper.root, moved)
    (result,) = replay_sequence(moved, device="cpu")
    assert result["comparison_match"]
    (result,) = replay_sequence(result["dump_dir"], device="cpu")
    assert result["comparison_match"]
    (moved / Path(result["dump_dir"]).name / "inputs.pt").write_bytes(b"damaged")
    (result,) = replay_sequence(moved, device="cpu")
    assert result["execution_error"]
    with pytest.raises(FileNotFoundError, match="root_dir"):
        replay_sequence(tmp_path / "nothing")


@pytest.mark.parametrize(("limits", "kept"), [((1e9, 2), 2), ((1000, 100), 3)])
def test_limits_warn_once_and_skip(
    dumper: Dumper, caplog: pytest.LogCaptureFixture, limits: tuple[float, int], kept: int
) -> None:
    dumper.max_bytes, dumper.max_count = limits
    log.logger.propagate = True
    for _ in range(5):
        split(torch.ones(40))  # 160 bytes in, 160 bytes out
    assert len(calls(dumper)) == kept
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "FI_DUMP_MAX_COUNT" in warning.getMessage()


def test_excluded_functions_are_not_dumped(dumper: Dumper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "settings", Settings(10, exclude=("sc*",)))
    scale(torch.ones(1))
    split(torch.ones(1))
    assert [records(path)[0]["function_name"] for path in calls(dumper)] == ["split"]


def test_graph_capture_defers_to_a_flush(dumper: Dumper, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies stand for nodes of the graph: a flush writes what they hold after a replay."""
    monkeypatch.setattr(log, "_log_system_once", lambda: None)
    with monkeypatch.context() as capture:
        capture.setattr(torch.cuda, "is_available", lambda: True)
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        split(torch.ones(3))
    assert not dumper.root.exists()
    for value in (4.0, 6.0):
        for _, kind, tensors, _ in dumper.captured:
            for tensor in tensors.values():
                tensor.fill_(value if kind == "inputs" else value + SCALE)
        flushed = dumper.flush_graph_dumps()
        assert flushed is not None
        (result,) = replay_sequence(flushed, device="cpu")
        assert result["args"][0].tolist() == [value] * 3
        assert result["comparison_match"]
    assert sorted(path.name for path in (dumper.root / "graph_flushes").iterdir()) == ["flush_0001", "flush_0002"]
    dumper.clear_graph_dumps()
    assert dumper.flush_graph_dumps() is None


def test_tensors_go_to_the_device_they_were_on_or_the_one_asked_for(dumper: Dumper) -> None:
    split(torch.ones(2))
    (directory,) = calls(dumper)
    (host,) = replay_from_dump(directory, device="meta")["args"]
    assert host.device.type == "cpu", "host tensors stay on the host"
    lines = (directory / "metadata.jsonl").read_text().replace('"device": "cpu"', '"device": "cuda:3"')
    (directory / "metadata.jsonl").write_text(lines)
    (moved,) = replay_from_dump(directory, device="meta")["args"]
    assert moved.device.type == "meta"
