"""Dumps of calls (level 10), and running them again."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from core import dumping as toys
from core.dumping import calls, records
from fi_core.observe import api, log
from fi_core.observe.dump import Dumper
from fi_core.observe.log import Settings
from fi_core.observe.replay import _Session, replay_from_dump, replay_sequence
from fi_core.utils import MaskMode


def test_files_of_a_call(dumper: Dumper) -> None:
    x = torch.arange(6.0).view(2, 3)
    toys.scale(x, 3.0, pair={"a": x, "b": (1, torch.ones(3))}, act=MaskMode.CAUSAL, dtype=torch.bfloat16)
    (directory,) = calls(dumper)
    assert re.fullmatch(r"\d{8}_\d{6}_\d{3}_pid\d+_scale_call0001", directory.name)
    inputs = torch.load(directory / "inputs.pt", weights_only=True)
    assert inputs.keys() == {"arg_0", "kwarg_pair__b__1"}, "a tensor that is given twice is saved once"
    assert records(directory)[0]["input_metadata"]["kwarg_pair"]["items"]["a"] == {"type": "tensor", "key": "arg_0"}
    assert torch.equal(inputs["arg_0"], x)
    outputs = torch.load(directory / "outputs.pt", weights_only=True)
    assert outputs["result"].dtype is torch.bfloat16
    first, last = records(directory)
    assert [first["execution_status"], last["execution_status"]] == ["inputs_saved", "completed"]
    assert last["function_name"] == "scale"
    assert last["module"] == toys.__name__
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
    toys.scale(x)
    assert len(list(dumper.root.glob("*_scale_call0002"))) == 1


def test_inputs_are_saved_before_the_call(dumper: Dumper) -> None:
    x = torch.ones(3)
    toys.zero_(x)
    with pytest.raises(RuntimeError, match="of the op"):
        toys.fails(torch.ones(2))
    by_name = {records(path)[-1]["function_name"]: path for path in calls(dumper)}
    assert torch.load(by_name["zero_"] / "inputs.pt", weights_only=True)["arg_0"].tolist() == [1, 1, 1]
    assert not (by_name["fails"] / "outputs.pt").exists()
    assert [record["execution_status"] for record in records(by_name["fails"])] == ["inputs_saved"]


def test_a_view_is_saved_alone(dumper: Dumper) -> None:
    toys.split(torch.zeros(1 << 20)[:4])
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
    expected = toys.scale(x, 3.0, pair={"a": x, "b": (1, x)}, act=MaskMode.CAUSAL, dtype=torch.float16)
    (directory,) = calls(dumper)
    result = replay_from_dump(directory, compare_outputs=True, device="cpu", run=True)
    (again, factor) = result["args"]
    torch.testing.assert_close(again, x, rtol=0, atol=0, equal_nan=True)
    assert again.stride() == x.stride()
    assert factor == 3.0
    assert result["kwargs"]["act"] is MaskMode.CAUSAL
    assert result["kwargs"]["dtype"] is torch.float16
    assert result["kwargs"]["pair"]["b"][0] == 1
    torch.testing.assert_close(result["execution_result"], expected, equal_nan=True)
    assert result["comparison_match"] is True
    assert result["expected_tensors"].keys() == {"result"}


def test_replay_only_loads_unless_told(dumper: Dumper) -> None:
    toys.split(torch.ones(2))
    (directory,) = calls(dumper)
    assert replay_from_dump(directory, device="cpu").keys() == {"args", "kwargs", "metadata"}
    assert len(calls(dumper)) == 1
    with pytest.raises(FileNotFoundError, match="dump_dir"):
        replay_from_dump(dumper.root)


def test_a_changed_result_is_a_mismatch(dumper: Dumper, monkeypatch: pytest.MonkeyPatch) -> None:
    toys.split(torch.ones(2))
    (directory,) = calls(dumper)
    assert replay_from_dump(directory, True, "cpu", True)["comparison_match"]
    monkeypatch.setattr(toys, "SCALE", 2.0005)
    assert replay_from_dump(directory, True, "cpu", True)["comparison_match"], "within 1e-3"
    monkeypatch.setattr(toys, "SCALE", 2.1)
    assert not replay_from_dump(directory, True, "cpu", True)["comparison_match"]
    monkeypatch.setattr(toys, "SCALE", 2.0)
    monkeypatch.setattr(toys, "EXTRA_ROWS", 5)
    assert not replay_from_dump(directory, True, "cpu", True)["comparison_match"], "a number differs"
    monkeypatch.setitem(api.functions, f"{toys.__name__}:split", lambda x: (x + 2, x, 2))
    assert not replay_from_dump(directory, True, "cpu", True)["comparison_match"], "a tensor more"


def test_sequence_with_objects_and_errors(dumper: Dumper, monkeypatch: pytest.MonkeyPatch) -> None:
    one, child = toys.ScaleWrapper(3.0), toys.ChildWrapper()
    one.plan(2.0)
    assert one.run(torch.ones(2)).tolist() == [6.0, 6.0]
    assert child.run(torch.ones(1)).tolist() == [5.0]
    toys.scale(torch.ones(2), act=object())
    with pytest.raises(RuntimeError):
        toys.fails(torch.ones(2))
    monkeypatch.setattr(log, "dumper", None)
    results = replay_sequence(dumper.root, device="cpu")
    names = [Path(result["dump_dir"]).name.split("_", 4)[4].rsplit("_call")[0] for result in results]
    owner = ["ScaleWrapper.__init__", "ChildWrapper.__init__", "ScaleWrapper.plan", "ScaleWrapper.run"]
    assert names == [*owner, "ChildWrapper.run", "scale", "fails"], "super().__init__ is part of its caller"
    assert [result.get("comparison_match") for result in results] == [True] * 5 + [False, False]
    assert results[3]["execution_result"].tolist() == [6.0, 6.0]
    assert type(results[3]["metadata"]["self_id"]) is int
    assert "kwarg_act: an object of builtins:object cannot be made" in results[5]["execution_error"]
    assert results[6]["execution_error"] == "RuntimeError: of the op"


def test_a_method_alone_needs_its_object(dumper: Dumper) -> None:
    toys.ScaleWrapper(3.0).run(torch.ones(2))
    (directory,) = (path for path in calls(dumper) if "run" in path.name)
    result = replay_from_dump(directory, True, "cpu", True)
    assert "object_registry" in result["execution_error"]
    assert result["comparison_match"] is False
    registry = {result["metadata"]["self_id"]: toys.ScaleWrapper(3.0)}
    assert replay_from_dump(directory, True, "cpu", True, registry)["comparison_match"]


def test_a_session_may_move_and_a_single_dump_is_a_sequence(dumper: Dumper, tmp_path: Path) -> None:
    toys.split(torch.ones(2))
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
        toys.split(torch.ones(40))  # 160 bytes in, 160 bytes out
    assert len(calls(dumper)) == kept
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "FI_DUMP_MAX_COUNT" in warning.getMessage()


def test_excluded_functions_are_not_dumped(dumper: Dumper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "settings", Settings(10, exclude=("sc*",)))
    toys.scale(torch.ones(1))
    toys.split(torch.ones(1))
    assert [records(path)[0]["function_name"] for path in calls(dumper)] == ["split"]


def test_graph_capture_defers_to_a_flush(dumper: Dumper, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies stand for nodes of the graph: a flush writes what they hold after a replay."""
    monkeypatch.setattr(log, "log_system_once", lambda: None)
    with monkeypatch.context() as capture:
        capture.setattr(torch.cuda, "is_available", lambda: True)
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        toys.split(torch.ones(3))
    assert not dumper.root.exists()
    for value in (4.0, 6.0):
        for _, kind, tensors, _ in dumper.captured:
            for tensor in tensors.values():
                tensor.fill_(value if kind == "inputs" else value + toys.SCALE)
        flushed = dumper.flush_graph_dumps()
        assert flushed is not None
        (result,) = replay_sequence(flushed, device="cpu")
        assert result["args"][0].tolist() == [value] * 3
        assert result["comparison_match"]
    assert sorted(path.name for path in (dumper.root / "graph_flushes").iterdir()) == ["flush_0001", "flush_0002"]
    dumper.clear_graph_dumps()
    assert dumper.flush_graph_dumps() is None


def test_tensors_go_to_the_device_they_were_on_or_the_one_asked_for(dumper: Dumper) -> None:
    toys.split(torch.ones(2))
    (directory,) = calls(dumper)
    (host,) = replay_from_dump(directory, device="meta")["args"]
    assert host.device.type == "cpu", "host tensors stay on the host"
    lines = (directory / "metadata.jsonl").read_text().replace('"device": "cpu"', '"device": "cuda:3"')
    (directory / "metadata.jsonl").write_text(lines)
    (moved,) = replay_from_dump(directory, device="meta")["args"]
    assert moved.device.type == "meta"


def test_arguments_that_are_written_are_compared(dumper: Dumper, monkeypatch: pytest.MonkeyPatch) -> None:
    toys.double_into(torch.full((3,), float("nan")), x=torch.ones(3), workspace_buffer=torch.zeros(1000))
    toys.zero_(torch.ones(4))
    into, zeroed = calls(dumper)
    assert torch.load(into / "outputs.pt", weights_only=True).keys() == {"result", "arg_0"} - {"result"}
    assert torch.load(into / "inputs.pt", weights_only=True).keys() == {"arg_0", "kwarg_x"}, "no content of workspaces"
    result = replay_from_dump(into, True, "cpu", True)
    assert result["comparison_match"]
    assert result["expected_tensors"]["arg_0"].tolist() == [2.0] * 3
    assert result["kwargs"]["workspace_buffer"].shape == (1000,)
    assert replay_from_dump(zeroed, True, "cpu", True)["comparison_match"]
    monkeypatch.setattr(toys, "SCALE", 3.0)
    assert replay_from_dump(into, True, "cpu", True)["comparison_match"] is False
    monkeypatch.setitem(api.functions, f"{toys.__name__}:zero_", lambda x: None)
    assert replay_from_dump(zeroed, True, "cpu", True)["comparison_match"] is False, "nothing was written"


def test_memory_that_calls_share_is_shared_again(dumper: Dumper, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object keeps a buffer that its caller fills between calls; a replay fills it where it is an argument again."""
    buffer = torch.ones(2)
    one = toys.ScaleWrapper(1.0, buffer)
    buffer.fill_(5.0)
    toys.describe_only(buffer)
    assert one.run(torch.ones(2)).tolist() == [5.0, 5.0]
    monkeypatch.setattr(log, "dumper", None)
    results = replay_sequence(dumper.root, "cpu")
    assert [result["comparison_match"] for result in results] == [True] * 3
    assert results[2]["execution_result"].tolist() == [5.0, 5.0]


def test_calls_inside_a_dumped_call_are_not_dumped(dumper: Dumper, monkeypatch: pytest.MonkeyPatch) -> None:
    one = toys.ScaleWrapper(3.0)
    one.run_twice(torch.ones(1))
    with pytest.raises(TypeError):
        one.run_twice(None)
    one.run(torch.ones(1))
    names = [records(path)[0]["qualname"] for path in calls(dumper)]
    assert sorted(names) == ["ScaleWrapper.__init__", "ScaleWrapper.run", *["ScaleWrapper.run_twice"] * 2]
    monkeypatch.setattr(log, "dumper", None)
    matches = [result["comparison_match"] for result in replay_sequence(dumper.root, "cpu")]
    assert matches == [True, True, False, True], "the one that failed changed the object too"


def test_an_unmarked_subclass_is_replayed_as_its_marked_base(dumper: Dumper, monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(toys.ScaleWrapper):
        pass

    Own(7.0).run(torch.ones(1))
    monkeypatch.setattr(log, "dumper", None)
    made, ran = replay_sequence(dumper.root, "cpu")
    assert (made["comparison_match"], ran["comparison_match"]) == (True, True)


def test_random_numbers_come_again(dumper: Dumper, monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.Generator().manual_seed(3)
    toys.draw(torch.zeros(4))
    toys.draw(torch.zeros(4), None)
    toys.draw(torch.zeros(4), generator=own)
    monkeypatch.setattr(log, "dumper", None)
    torch.rand(10)
    assert [result["comparison_match"] for result in replay_sequence(dumper.root, "cpu")] == [True] * 3


class Silent:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def test_any_argument_is_dumped(dumper: Dumper) -> None:
    deep: Any = torch.ones(1)
    for _ in range(50):
        deep = [deep]
    endless: list[Any] = []
    endless.append(endless)
    odd = [
        Silent(), object(), deep, endless, {1: 2}, {1, 2}, 1j, b"\0", float("nan"), 10**30, "\ud800", range(3), len,
        torch.Size([1, 2]), torch.empty(2, device="meta"), torch.eye(3).to_sparse(),
        torch.ones(3, dtype=torch.complex64).conj(), torch.nn.Parameter(torch.ones(2)),
        torch.tensor(3.0), torch.empty(0), torch.ones(3).expand(2, 3), torch.Generator(), torch.strided,
        torch.ones(3, dtype=torch.complex64).conj().imag,
    ]  # fmt: skip
    toys.describe_only(*odd, a__0=torch.ones(1), a=[torch.zeros(1)])
    (directory,) = calls(dumper)
    assert records(directory)[-1]["execution_status"] == "completed"
    described = records(directory)[-1]["input_metadata"]
    assert described["arg_0"]["repr"] == "<repr failed: RuntimeError>"
    saved = torch.load(directory / "inputs.pt", weights_only=True)
    assert saved["kwarg_a__0"].item() == 1.0
    assert saved["kwarg_a__0_"].item() == 0.0, "another tensor with the same path has a key of its own"


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_dumps_are_private_whatever_the_umask(dumper: Dumper, umask: int) -> None:
    before = os.umask(umask)
    try:
        toys.split(torch.ones(2))
    finally:
        os.umask(before)
    found = [dumper.root, *dumper.root.rglob("*")]
    assert len(found) == 6
    assert {stat.S_IMODE(path.stat().st_mode) for path in found} == {0o700, 0o600}
    assert all(stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600) for path in found)


def test_no_dump_goes_through_a_planted_link(dumper: Dumper, tmp_path: Path, capsys: Any) -> None:
    dumper.root.mkdir()
    (tmp_path / "precious").write_text("mine")
    (dumper.root / "session.jsonl").symlink_to(tmp_path / "precious")
    toys.split(torch.ones(2))
    assert (tmp_path / "precious").read_text() == "mine"


def test_the_size_limit_counts_outputs(dumper: Dumper, monkeypatch: pytest.MonkeyPatch) -> None:
    dumper.max_bytes = 300
    toys.split(torch.ones(40))  # 160 bytes in, 160 bytes out
    (directory,) = calls(dumper)
    assert dumper.written_bytes == 160
    assert records(directory)[-1]["outputs_saved"] is False
    monkeypatch.setattr(log, "dumper", None)
    (result,) = replay_sequence(dumper.root, "cpu")
    assert "outputs of the call were not saved" in result["execution_error"]
    assert result["comparison_match"] is False


def test_host_memory_is_not_shared_once_device_memory_is_on_the_host() -> None:
    """A plan on a GPU copies its host tables; on the CPU it keeps them, and a later table may reuse the address."""
    session = _Session("cpu")
    host = {"shape": [2], "stride": [1], "dtype": "torch.int32", "device": "cpu", "address": 4096}
    first = session.allocate(host)
    assert session.allocate(host) is first
    device = {**host, "device": "cuda:0", "address": 8192}
    moved = session.allocate(device)
    assert session.allocate(device) is moved
    assert session.allocate(host) is not first
