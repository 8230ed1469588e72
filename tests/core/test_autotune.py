"""autotune(): arguments, nesting, threads and table files; and the lookup of choose_one."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fi_core.compat import autotuner
from fi_core.compat.autotuner import (
    AutoTuner,
    ConstraintSpec,
    DynamicTensorSpec,
    TunableRunner,
    TuningConfig,
    _collect_metadata,
    autotune,
    config_key,
)
from fi_core.utils import last_positive_power_of_2


class Generic(TunableRunner):
    def get_valid_tactics(self, inputs: Sequence[Any], profile: Any) -> list[Any]:
        return [0, 1]

    def forward(self, inputs: Sequence[Any], tactic: Any = -1, do_preparation: bool = False, **kwargs: Any) -> Any:
        return inputs[0] * 2


class Hopper(Generic):
    def get_valid_tactics(self, inputs: Sequence[Any], profile: Any) -> list[Any]:
        return [(64, 128), (128, 128)]

    def get_cache_key_extras(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return (str(inputs[0].dtype),)


RUNNERS = [Generic(), Hopper()]
CONFIG = TuningConfig(
    dynamic_tensor_specs=(DynamicTensorSpec((0,), (0,), (16, 64, 256), last_positive_power_of_2),),
    constraint_specs=(ConstraintSpec(2, 0, lambda shapes: shapes[0][0]),),
)
HOPPER_EXTRAS = ("torch.float32",)


@pytest.fixture
def tuner() -> Iterator[AutoTuner]:
    autotuner.warn_stale.cache_clear()
    made = AutoTuner.get()
    made.clear_cache()
    yield made
    made.clear_cache()


def inputs(rows: int) -> list[torch.Tensor]:
    return [torch.ones(rows, 8), torch.ones(8, 4), torch.ones(rows, 4)]


def profile(rows: int) -> Any:
    return ((rows, 8), (8, 4), (-1, 4))


def choose(tuner: AutoTuner, rows: int) -> tuple[str, Any]:
    runner, tactic = tuner.choose_one("gemm", RUNNERS, CONFIG, inputs(rows))
    return type(runner).__name__, tactic


def learn(tuner: AutoTuner, path: Path, entries: dict[int, tuple[str, Any]]) -> None:
    table = {
        config_key("gemm", runner, profile(rows), HOPPER_EXTRAS if runner == "Hopper" else ()): [runner, tactic]
        for rows, (runner, tactic) in entries.items()
    }
    path.write_text(json.dumps(table))
    assert tuner.load_configs(path)


def test_get_is_one_per_process(tuner: AutoTuner) -> None:
    assert AutoTuner.get() is tuner


def test_without_a_table_the_first_runner_computes_by_default(tuner: AutoTuner) -> None:
    assert choose(tuner, 16) == ("Generic", -1)
    assert (tuner.stats["hits"], tuner.stats["misses"]) == (0, 1)
    with pytest.raises(ValueError, match="runners"):
        tuner.choose_one("gemm", [], CONFIG, [])


def test_table_lookup_by_bucket(tuner: AutoTuner, tmp_path: Path) -> None:
    learn(tuner, tmp_path / "t.json", {16: ("Hopper", [64, 128]), 64: ("Generic", 1)})
    assert choose(tuner, 16) == ("Hopper", (64, 128))
    assert choose(tuner, 31) == ("Hopper", (64, 128)), "31 rows fall into the bucket of 16"
    assert choose(tuner, 64) == ("Generic", 1)
    assert choose(tuner, 128) == ("Generic", -1)
    assert tuner.choose_one("other", RUNNERS, CONFIG, inputs(16)) == (RUNNERS[0], -1)
    assert (tuner.stats["hits"], tuner.stats["misses"]) == (3, 2)


def test_extras_are_part_of_the_key(tuner: AutoTuner, tmp_path: Path) -> None:
    learn(tuner, tmp_path / "t.json", {16: ("Hopper", [64, 128])})
    halves = [x.half() for x in inputs(16)]
    assert tuner.choose_one("gemm", RUNNERS, CONFIG, halves) == (RUNNERS[0], -1)


def test_a_stale_tactic_is_not_launched(tuner: AutoTuner, tmp_path: Path) -> None:
    learn(tuner, tmp_path / "t.json", {16: ("Generic", 9), 32: ("Generic", -1)})
    with pytest.warns(UserWarning, match="tactic 9 of Generic"):
        assert choose(tuner, 16) == ("Generic", -1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose(tuner, 16)
        assert choose(tuner, 32) == ("Generic", -1)
    assert tuner.stats["hits"] == 1


@pytest.mark.parametrize(
    ("round_up", "rows", "bucket"),
    [(False, 50, 10), (False, 100, 100), (True, 50, 100), (True, 5, 10), (False, 5, 10), (True, 5000, 1000)],
)
def test_tuning_buckets(tuner: AutoTuner, tmp_path: Path, round_up: bool, rows: int, bucket: int) -> None:
    learn(tuner, tmp_path / "t.json", {10: ("Generic", 0), 100: ("Generic", 1), 1000: ("Hopper", [128, 128])})
    expected = {10: ("Generic", 0), 100: ("Generic", 1), 1000: ("Hopper", (128, 128))}[bucket]
    with autotune(False, tuning_buckets=[100, 1000, 10], round_up=round_up):
        assert choose(tuner, rows) == expected
    assert choose(tuner, 50) == ("Generic", -1), "the override ends with the block"


def test_round_up_alone_uses_the_buckets_of_the_op(tuner: AutoTuner, tmp_path: Path) -> None:
    learn(tuner, tmp_path / "t.json", {64: ("Generic", 1)})
    assert choose(tuner, 17) == ("Generic", -1)
    with autotune(False, round_up=True):
        assert choose(tuner, 17) == ("Generic", 1)
    spec = DynamicTensorSpec((0,), (0,), lambda size: (4, 2), lambda size: size)
    assert spec.buckets(9) == (2, 4)


def test_skip_ops_add_up(tuner: AutoTuner, tmp_path: Path) -> None:
    learn(tuner, tmp_path / "t.json", {16: ("Generic", 1)})
    with autotune(skip_ops={"fp8_gemm"}):
        assert choose(tuner, 16) == ("Generic", 1)
        with autotune(skip_ops="gemm"):
            assert choose(tuner, 16) == ("Generic", -1)
            with autotune(skip_ops=["mm"]):
                assert choose(tuner, 16) == ("Generic", -1)
        assert choose(tuner, 16) == ("Generic", 1)


def test_blocks_nest_and_end_with_exceptions(tuner: AutoTuner) -> None:
    def warm_up() -> None:
        with torch.inference_mode(), autotune():
            assert tuner.is_tuning_mode
            with autotune(False):
                assert not tuner.is_tuning_mode
            assert tuner.is_tuning_mode
            raise RuntimeError("inside")

    assert not tuner.is_tuning_mode
    with pytest.raises(RuntimeError, match="inside"):
        warm_up()
    assert not tuner.is_tuning_mode


def test_blocks_are_per_thread(tuner: AutoTuner) -> None:
    seen: list[bool] = []
    with autotune():
        thread = threading.Thread(target=lambda: seen.append(tuner.is_tuning_mode))
        thread.start()
        thread.join()
    assert seen == [False]


def test_it_decorates_too(tuner: AutoTuner) -> None:
    @autotune(True)
    def dummy_forward() -> bool:
        return tuner.is_tuning_mode

    assert [dummy_forward(), dummy_forward()] == [True, True]


def test_outputs_do_not_depend_on_it(tuner: AutoTuner) -> None:
    def forward() -> Any:
        runner, tactic = tuner.choose_one("gemm", RUNNERS, CONFIG, inputs(16))
        return runner(inputs(16), tactic=tactic)

    outside = forward()
    with autotune():
        assert torch.equal(forward(), outside)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"tuning_buckets": []}, ValueError, "tuning_buckets"),
        ({"tuning_buckets": [0, 4]}, ValueError, "tuning_buckets"),
        ({"tuning_buckets": [1.5]}, ValueError, "tuning_buckets"),
        ({"round_up": 1}, TypeError, "round_up"),
        ({"skip_ops": [3]}, TypeError, "skip_ops"),
        ({"cuda_graph_profile_replays": 0}, ValueError, "cuda_graph_profile_replays"),
        ({"cuda_graph_profile_replays": 2.0}, ValueError, "cuda_graph_profile_replays"),
    ],
)
def test_bad_arguments(tuner: AutoTuner, arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words), autotune(**arguments):
        pass
    assert not tuner.is_tuning_mode


def test_cache_file(tuner: AutoTuner, tmp_path: Path) -> None:
    path = tmp_path / "new" / "tuned.json"
    with autotune(False, cache=path):
        pass
    assert not path.exists(), "only tuning writes"
    with autotune(cache=str(path), cuda_graph_profile_replays=3):
        pass
    assert json.loads(path.read_text()).keys() == {"_metadata"}
    learn(tuner, tmp_path / "t.json", {16: ("Hopper", [64, 128])})
    tuner.save_configs(path)
    assert [entry.name for entry in path.parent.iterdir()] == ["tuned.json"]
    learn(tuner, tmp_path / "t.json", {64: ("Generic", 1)})
    with autotune(False, cache=path):
        assert choose(tuner, 16) == ("Hopper", (64, 128))
        assert choose(tuner, 64) == ("Generic", -1), "loading replaces what was loaded before"
    assert choose(tuner, 16) == ("Hopper", (64, 128)), "and stays after the block"
    before = json.loads(path.read_text())
    with autotune(True, cache=path):
        pass
    assert json.loads(path.read_text()) == before
    tuner.clear_cache()
    assert choose(tuner, 16) == ("Generic", -1)


def test_a_file_of_another_machine_is_ignored_and_kept(
    tuner: AutoTuner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tuned.json"
    key = config_key("gemm", "Generic", profile(16))
    text = json.dumps({"_metadata": {"gpu": "H100", "unknown": "1"}, key: ["Generic", 1]})
    path.write_text(text)
    monkeypatch.setattr(autotuner, "_collect_metadata", lambda: {"gpu": "H200", "cuda_version": "13.0"})
    with pytest.warns(UserWarning, match=r"gpu H100 \(here H200\)"), autotune(cache=path):
        assert choose(tuner, 16) == ("Generic", -1)
    assert path.read_text() == text
    monkeypatch.setattr(autotuner, "_collect_metadata", lambda: {"cuda_version": "13.0"})
    with autotune(False, cache=path):
        assert choose(tuner, 16) == ("Generic", 1), "an unknown property does not make a difference"


def test_metadata_names_the_deciding_facts(tuner: AutoTuner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91000)
    found = _collect_metadata()
    assert {key: found[key] for key in ("cuda_version", "gpu", "cudnn_version")} == {
        "cuda_version": "13.0",
        "gpu": "NVIDIA H200",
        "cudnn_version": "91000",
    }


def test_a_damaged_file_is_an_error(tuner: AutoTuner, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("[]")
    with pytest.raises(ValueError, match="a JSON object is required, got list"):
        tuner.load_configs(path)
