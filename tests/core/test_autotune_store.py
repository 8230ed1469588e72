"""autotune_v2 and its tables, the group of tuning, and what engines ask AutoTuner."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fi_core
from fi_core.autotuner import (
    AutoTuner,
    DynamicTensorSpec,
    MeasurementPolicy,
    TunableRunner,
    TuningConfig,
    autotune_v2,
    autotune_v2_reload,
    config_key,
    get_autotune_process_group,
    set_autotune_process_group,
)


class Sleeper(TunableRunner):
    """Tactic n computes n matrix products."""

    def get_valid_tactics(self, inputs: Sequence[Any], profile: Any) -> list[Any]:
        return [64, 1]

    def forward(self, inputs: Sequence[Any], tactic: Any = -1, do_preparation: bool = False, **kwargs: Any) -> Any:
        for _ in range(tactic):
            inputs[0] @ inputs[0]


KEY = config_key("gemm", "Sleeper", ((16, 16),))
X = torch.zeros(16, 16)


@pytest.fixture
def tuner() -> Iterator[AutoTuner]:
    made = AutoTuner.get()
    made.clear_cache()
    yield made
    made.clear_cache()


def test_tables_lie_in_a_folder_of_their_own(tuner: AutoTuner, tmp_path: Path) -> None:
    with fi_core.autotune_v2(mode="tune", cache_root=tmp_path / "v2"):
        assert tuner.is_tuning_mode
    assert not (tmp_path / "v2").exists(), "there is nothing to keep"
    with autotune_v2(cache_root=tmp_path / "v2"):
        tuner.table[KEY] = ("Sleeper", 1)
        tuner._dirty = True
    [path] = (tmp_path / "v2").iterdir()
    assert json.loads(path.read_text())[KEY] == ["Sleeper", 1] and not tuner._dirty
    tuner.clear_cache()
    with autotune_v2("replay", cache_root=tmp_path / "v2"):
        assert not tuner.is_tuning_mode
        assert tuner.choose_one("gemm", [Sleeper()], TuningConfig(), [X])[1] == 1
    path.write_text(path.read_text().replace('"Sleeper",\n    1', '"Sleeper",\n    64'))
    fi_core.autotune_v2_reload()
    assert tuner.table[KEY] == ("Sleeper", 64), "what another rank wrote"
    with autotune_v2(persistent_cache=False):
        pass
    assert autotune_v2_reload() is None and tuner.table


def test_the_folder_follows_the_environment(tuner: AutoTuner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_AUTOTUNE_CACHE_DIR", str(tmp_path / "mine"))
    with autotune_v2():
        tuner.table[KEY] = ("Sleeper", 1)
        tuner._dirty = True
    assert len(list((tmp_path / "mine").iterdir())) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: autotune_v2("measure").__enter__(), "mode: must be tune or replay; got 'measure'"),
        (
            lambda: MeasurementPolicy("eager", _timer="cupti"),
            "_timer: must be one of auto, events, events_no_delay; got",
        ),
        (lambda: MeasurementPolicy("fast"), "execution_mode: must be auto, cuda_graph or eager; got 'fast'"),  # type: ignore[arg-type]
        (lambda: autotune_v2(tuning_buckets=()).__enter__(), "tuning_buckets: must be positive ints"),
    ],
)
def test_wrong_arguments(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_the_group_is_kept(tuner: AutoTuner) -> None:
    assert get_autotune_process_group() is None
    group: Any = object()
    set_autotune_process_group(group)
    assert get_autotune_process_group() is group
    set_autotune_process_group(None)
    assert get_autotune_process_group() is None


def test_search_and_rank(tuner: AutoTuner) -> None:
    runners, config = [Sleeper()], TuningConfig()
    assert tuner.search_cache("gemm", runners, [(16, 16)], config) == (False, 0, -1, None)
    tuner.table[KEY] = ("Sleeper", 1)
    assert tuner.search_cache("gemm", runners, [(16, 16)], config) == (True, 0, 1, ((16, 16),))
    assert tuner.search_cache("gemm", runners, [], config, [X]) == (True, 0, 1, ((16, 16),))
    assert not tuner.search_cache("gemm", runners, [(16, 16)], config, require_profiling_policy=True)[0]
    big = [torch.zeros(64, 64)]
    assert tuner.rank_tactics("gemm", runners, config, big) == [1]
    assert tuner.rank_tactics("gemm", runners, config, big, 2) == [1, 64]
    tuner.choose_one("gemm", runners, config, [X])
    assert tuner.stats["hits"] == 1
    tuner.reset_statistics()
    assert not tuner.stats and tuner.table
    assert (AutoTuner().stream_delay_micro_secs, config.tensor_initializers) == (5000, ())
    assert (AutoTuner(5, 20).warmup, AutoTuner(5, 20).repeat) == (5, 20)


def test_a_profile_times_the_batches_in_turn(tuner: AutoTuner) -> None:
    seen = []

    class Recorder(Sleeper):
        def forward(self, inputs: Sequence[Any], tactic: Any = -1, do_preparation: bool = False, **kwargs: Any) -> Any:
            seen.append((inputs[0].shape[0], tactic, kwargs))

    config = TuningConfig(profiling_repeat=3, inputs_pre_hook=lambda inputs: [inputs[0][:4]])
    prepared, batches = tuner.prepare_tactic_profile([X], config)
    assert prepared is config and [batch[0].shape[0] for batch in batches] == [4]
    assert tuner.profile_tactic(Recorder(), [X], 7, prepared, [*batches, [X]], stage=1) >= 0
    assert seen == [(4 if i % 2 == 0 else 16, 7, {"stage": 1}) for i in range(tuner.warmup + 3)]
    assert not Recorder().precompile_tactics([X], [1, 64], ((16, 16),))


def test_buckets_of_the_contexts_around_a_call(tuner: AutoTuner) -> None:
    spec = DynamicTensorSpec((0,), (0,), (1, 2, 4), lambda size: size // 2)
    config = TuningConfig((spec,))
    assert tuner.get_effective_map_to_tuning_buckets(config)(7) == 3
    with fi_core.autotune(False, tuning_buckets=(8, 16), round_up=True):
        assert tuner.get_effective_map_to_tuning_buckets(config, 0)(9) == 16


def test_records_of_callers_go_with_the_table(tuner: AutoTuner, tmp_path: Path) -> None:
    assert tuner.get_namespaced_records("experts") == {}
    tuner.publish_namespaced_records("experts", {"a": [1, 2]})
    tuner.get_namespaced_records("experts")["b"] = 1
    assert tuner.get_namespaced_records("experts") == {"a": [1, 2]}, "a copy"
    tuner.table[KEY] = ("Sleeper", 1)
    tuner.save_configs(tmp_path / "table.json")
    tuner.clear_cache()
    assert tuner.get_namespaced_records("experts") == {}
    assert tuner.load_configs(tmp_path / "table.json")
    assert tuner.get_namespaced_records("experts") == {"a": [1, 2]} and tuner.table == {KEY: ("Sleeper", 1)}


def test_a_measurement_policy_says_what_it_derives() -> None:
    usual, graph, eager = MeasurementPolicy(), MeasurementPolicy("cuda_graph", False), MeasurementPolicy("eager")
    assert [policy.use_cuda_graph for policy in (usual, graph, eager)] == [None, True, False]
    assert [policy.timer for policy in (usual, graph, eager)] == ["events", "events", "events_no_delay"]
    assert MeasurementPolicy(_timer="cupti").timer == "cupti"
    assert usual.manifest_fields() == {}
    assert graph.manifest_fields() == {"measure_execution_mode": "cuda_graph", "measure_cold_l2": "False"}
