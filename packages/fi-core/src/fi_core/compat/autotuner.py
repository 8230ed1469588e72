"""Chooses (runner, tactic) pairs from tables made offline, behind the interface of FlashInfer's autotuner.

fi measures nothing at run time. Pure functions of the shape choose the configuration of its kernels, so a call inside
`autotune()` gives the same result as outside, and all ranks choose the same. Operators with several runners look up
shapes in a table file; a shape that the table lacks takes runner 0 with its default tactic, -1.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import json
import os
import statistics
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fi_core.compat.begun import load_begun

Shapes = tuple[tuple[int, ...], ...]
Buckets = tuple[int, ...]
METADATA, RECORDS = "_metadata", "_records"


@dataclass(frozen=True)
class DynamicTensorSpec:
    """Dimensions that vary from call to call; a table stores them by bucket.

    Args:
        input_idx: indices of the inputs.
        dim_idx: index of the dimension, one per input.
        gen_tuning_buckets: the buckets, or a function from a size to its buckets.
        map_to_tuning_buckets: function from a size to its bucket.
    """

    input_idx: Sequence[int]
    dim_idx: Sequence[int]
    gen_tuning_buckets: Buckets | Callable[[int], Iterable[int]]
    map_to_tuning_buckets: Callable[[int], int]

    def buckets(self, size: int) -> Buckets:
        """The bucket sizes for a dimension of this size, ascending."""
        made = self.gen_tuning_buckets
        return tuple(sorted(made(size) if callable(made) else made))


@dataclass(frozen=True)
class ConstraintSpec:
    """A dimension that other dimensions determine; tables do not store it.

    Args:
        input_idx: index of the input.
        dim_idx: index of the dimension.
        infer_shape: function from all shapes to the size.
    """

    input_idx: int
    dim_idx: int
    infer_shape: Callable[[Shapes], int]


@dataclass(frozen=True)
class TuningConfig:
    """Describes how the shapes of an operator map to the key of a table.

    Args:
        dynamic_tensor_specs: dimensions that are mapped to buckets.
        constraint_specs: dimensions that tables do not store.
        profiling_repeat: calls that `AutoTuner.profile_tactic` times; None: those of the tuner.
        inputs_pre_hook: function from the inputs to those that are timed, such as one that copies them.
        tensor_initializers, use_cold_l2_cache, use_cuda_graph, cuda_graph_profile_replays, use_cold_l2_graph_replay,
            value_aware_input_indices, profile_arena_input_indices: accepted; they say how FlashInfer times tactics.
    """

    dynamic_tensor_specs: Sequence[DynamicTensorSpec] = ()
    constraint_specs: Sequence[ConstraintSpec] = ()
    tensor_initializers: Sequence[Callable[..., Any]] = ()
    use_cold_l2_cache: bool = False
    use_cuda_graph: bool = False
    cuda_graph_profile_replays: int = 1
    profiling_repeat: int | None = None
    use_cold_l2_graph_replay: bool = False
    value_aware_input_indices: Sequence[int] = ()
    profile_arena_input_indices: Sequence[int] = ()
    inputs_pre_hook: Callable[[list[Any]], Sequence[Any]] | None = None


class TunableRunner(ABC):
    """One implementation of an operator. Tactics are its variants; tactic -1 supports every shape."""

    @abstractmethod
    def get_valid_tactics(self, inputs: Sequence[Any], profile: Shapes) -> list[Any]:
        """Returns the tactics that support inputs of these (bucketed) shapes."""

    @abstractmethod
    def forward(self, inputs: Sequence[Any], tactic: Any = -1, do_preparation: bool = False, **kwargs: Any) -> Any:
        """Computes the operator."""

    def __call__(self, inputs: Sequence[Any], **kwargs: Any) -> Any:
        return self.forward(inputs, **kwargs)

    def get_cache_key_extras(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Returns what determines the best tactic besides the shapes, such as a dtype."""
        return ()

    def precompile_tactics(self, inputs: Sequence[Any], tactics: Sequence[Any], profile: Shapes, **kwargs: Any) -> bool:
        """Whether these tactics are compiled already; the first call of one compiles it here."""
        return False


@dataclass(frozen=True)
class _Scope:
    """The settings of the `autotune` contexts around a call."""

    tune: bool = False
    buckets: Buckets | None = None
    round_up: bool | None = None
    skip_ops: frozenset[str] = frozenset()

    def bucket(self, spec: DynamicTensorSpec, size: int) -> int:
        if self.buckets is None and self.round_up is None:
            return spec.map_to_tuning_buckets(size)
        buckets = self.buckets or spec.buckets(size)
        index = bisect.bisect_left(buckets, size) if self.round_up else bisect.bisect_right(buckets, size) - 1
        return buckets[min(max(index, 0), len(buckets) - 1)]


class _Scopes(threading.local):
    current = _Scope()


@dataclass
class AutoTuner:
    """The tactic table of this process; `AutoTuner.get()` returns it.

    Args:
        warmup: calls of a tactic before it is timed.
        repeat: calls that are timed.
        stream_delay_micro_secs: accepted for compatibility.
    """

    warmup: int = 3
    repeat: int = 10
    stream_delay_micro_secs: int = 5000
    table: dict[str, tuple[str, Any]] = field(default_factory=dict)  # key -> (runner class, tactic)
    stats: Counter[str] = field(default_factory=Counter)  # hits, misses
    records: dict[str, dict[str, Any]] = field(default_factory=dict)  # of callers, by namespace
    _dirty: bool = False  # whether the table has entries that no file has; engines save it then
    _scopes: _Scopes = field(default_factory=_Scopes)

    @classmethod
    @functools.cache
    def get(cls) -> AutoTuner:
        return cls()

    @property
    def is_tuning_mode(self) -> bool:
        """Whether this thread runs inside `autotune(True)`."""
        return self._scopes.current.tune

    def choose_one(
        self,
        custom_op: str,
        runners: Sequence[TunableRunner],
        tuning_config: TuningConfig,
        inputs: Sequence[Any],
        **kwargs: Any,
    ) -> tuple[TunableRunner, Any]:
        """Looks up the runner and tactic for these shapes.

        Args:
            custom_op: name of the operator.
            runners: its implementations; the first is the default.
            tuning_config: how shapes map to the key of the table.
            inputs: tensors (or None) of the call.
            **kwargs: ignored.

        Returns:
            (runner, tactic) of the table; (runners[0], -1) if the table has no valid entry.

        Raises:
            ValueError: runners is empty.
        """
        if not runners:
            raise ValueError(f"runners: at least one is required for {custom_op}")
        if custom_op not in self._scopes.current.skip_ops and self.table:
            _, index, tactic, profile = self._search(custom_op, runners, tuning_config, inputs)
            if index is not None:
                if tactic == -1 or tactic in runners[index].get_valid_tactics(inputs, profile):
                    self.stats["hits"] += 1
                    return runners[index], tactic
                warn_stale(custom_op, type(runners[index]).__name__, repr(tactic))
        self.stats["misses"] += 1
        return runners[0], -1

    def _search(
        self, custom_op: str, runners: Sequence[TunableRunner], config: TuningConfig, inputs: Sequence[Any]
    ) -> tuple[bool, int | None, Any, Shapes]:
        """(hit, index of the runner, tactic, bucketed shapes)."""
        profile = self._profile(config, inputs)
        for index, runner in enumerate(runners):
            found = self.table.get(_key(custom_op, runner, profile, inputs))
            if found is not None and found[0] == type(runner).__name__:
                return True, index, found[1], profile
        return False, None, -1, profile

    def search_cache(
        self,
        custom_op: str,
        runners: Sequence[TunableRunner],
        input_shapes: Sequence[Sequence[int]],
        tuning_config: TuningConfig,
        inputs: Sequence[Any] | None = None,
        *,
        require_profiling_policy: bool = False,
    ) -> tuple[bool, int, Any, Shapes | None]:
        """Looks up the table for `inputs`, or for inputs of these shapes; no entry has a policy of profiling.

        Returns:
            (True, index of the runner, its tactic, the bucketed shapes), or (False, 0, -1, None).
        """
        if require_profiling_policy:
            return False, 0, -1, None
        inputs = [SimpleNamespace(shape=tuple(shape)) for shape in input_shapes] if inputs is None else inputs
        hit, index, tactic, profile = self._search(custom_op, runners, tuning_config, inputs)
        return (True, index or 0, tactic, profile) if hit else (False, 0, -1, None)

    def prepare_tactic_profile(
        self, inputs: Sequence[Any], tuning_config: TuningConfig
    ) -> tuple[TuningConfig, list[list[Any]]]:
        """The configuration, and the inputs of the calls that `profile_tactic` times, which take turns."""
        hook = tuning_config.inputs_pre_hook
        return tuning_config, [list(inputs if hook is None else hook(list(inputs)))]

    def profile_tactic(
        self,
        runner: TunableRunner,
        inputs: Sequence[Any],
        tactic: Any,
        tuning_config: TuningConfig | None = None,
        input_batches: Sequence[Sequence[Any]] | None = None,
        **kwargs: Any,
    ) -> float:
        """Times a tactic: the median of `repeat` calls in milliseconds, after `warmup` calls. It synchronizes.

        Args:
            runner, tactic, inputs, **kwargs: what is called, with `inputs` unless there are input_batches.
            tuning_config: its `profiling_repeat` goes before `repeat`.
            input_batches: of `prepare_tactic_profile`.
        """
        import torch

        batches = itertools.cycle(input_batches or [inputs])
        repeat = (tuning_config and tuning_config.profiling_repeat) or self.repeat

        def call() -> None:
            runner.forward(next(batches), tactic=tactic, **kwargs)

        for _ in range(self.warmup):
            call()
        if not any(getattr(value, "is_cuda", False) for value in inputs):
            seconds = []
            for _ in range(repeat):
                start = time.perf_counter()
                call()
                seconds.append(time.perf_counter() - start)
            return statistics.median(seconds) * 1e3
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeat + 1)]
        marks[0].record()
        for mark in marks[1:]:
            call()
            mark.record()
        marks[-1].synchronize()
        return float(statistics.median(start.elapsed_time(end) for start, end in itertools.pairwise(marks)))

    def rank_tactics(
        self,
        custom_op: str,
        runners: Sequence[TunableRunner],
        tuning_config: TuningConfig,
        inputs: Sequence[Any],
        k: int = 1,
        **kwargs: Any,
    ) -> list[Any]:
        """Times every valid tactic of every runner; nothing is stored.

        Returns:
            The k fastest tactics, the fastest first.
        """
        profile = self._profile(tuning_config, inputs)
        config, batches = self.prepare_tactic_profile(inputs, tuning_config)
        timed = [
            (self.profile_tactic(runner, inputs, tactic, config, batches, **kwargs), tactic)
            for runner in runners
            for tactic in runner.get_valid_tactics(inputs, profile)
        ]
        return [tactic for _, tactic in sorted(timed, key=lambda found: found[0])[:k]]

    def get_effective_map_to_tuning_buckets(
        self, tuning_config: TuningConfig, spec_idx: int = 0
    ) -> Callable[[int], int]:
        """The function from a size to its bucket inside the `autotune` contexts around this call."""
        return functools.partial(self._scopes.current.bucket, tuning_config.dynamic_tensor_specs[spec_idx])

    def get_namespaced_records(self, namespace: str) -> dict[str, Any]:
        """A copy of what a caller published under a name; `save_configs` and `load_configs` keep it."""
        return dict(self.records.get(namespace, {}))

    def publish_namespaced_records(self, namespace: str, records: Mapping[str, Any]) -> None:
        """Replaces what a name holds; the values are what JSON can hold."""
        self.records[namespace] = dict(records)
        self._dirty = True

    def reset_statistics(self) -> None:
        """Clears `stats`."""
        self.stats.clear()

    def _profile(self, config: TuningConfig, inputs: Sequence[Any]) -> Shapes:
        shapes = [list(map(int, getattr(value, "shape", ()))) for value in inputs]
        for spec in config.dynamic_tensor_specs:
            for i, dim in zip(spec.input_idx, spec.dim_idx):
                shapes[i][dim] = self._scopes.current.bucket(spec, shapes[i][dim])
        for constraint in config.constraint_specs:
            shapes[constraint.input_idx][constraint.dim_idx] = -1
        return tuple(map(tuple, shapes))

    def load_configs(self, path: str | Path) -> bool:
        """Replaces the table by the content of a file.

        Returns:
            Whether the file is used. A file made for another GPU or version is not, and a warning tells so.

        Raises:
            ValueError: The file is not a JSON object.
        """
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(raw, dict):
            raise ValueError(f"path: a JSON object is required, got {type(raw).__name__} in {path}")
        hard, _ = _classify_metadata_mismatches(raw.pop(METADATA, {}), _collect_metadata())
        if hard:
            differing = ", ".join(f"{key} {made} (here {now})" for key, (made, now) in hard.items())
            warnings.warn(f"tuned configs {path} are not used: made for {differing}", stacklevel=2)
            return False
        self.records = raw.pop(RECORDS, {})
        self.table = {key: (runner, _hashable(tactic)) for key, (runner, tactic) in raw.items()}
        self._dirty = False
        return True

    def save_configs(self, path: str | Path) -> None:
        """Writes the table and the GPU and versions that it belongs to, atomically."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.{os.getpid()}.part")
        content = {METADATA: _collect_metadata(), **({RECORDS: self.records} if self.records else {}), **self.table}
        part.write_text(json.dumps(content, indent=2), encoding="utf-8")
        part.replace(target)
        self._dirty = False

    def clear_cache(self) -> None:
        """Clears the table and the statistics."""
        self.table, self.records = {}, {}
        self._dirty = False
        self.stats.clear()


def config_key(custom_op: str, runner_name: str, profile: Shapes, extras: tuple[Any, ...] = ()) -> str:
    """Returns the key of a table entry; the entry is [runner class name, tactic]."""
    return repr((custom_op, runner_name, profile, extras))


def _key(custom_op: str, runner: TunableRunner, profile: Shapes, inputs: Sequence[Any]) -> str:
    return config_key(custom_op, type(runner).__name__, profile, runner.get_cache_key_extras(inputs))


def _hashable(tactic: Any) -> Any:
    return tuple(map(_hashable, tactic)) if isinstance(tactic, list) else tactic


@functools.cache
def warn_stale(custom_op: str, runner: str, tactic: str) -> None:
    warnings.warn(
        f"tuned tactic {tactic} of {runner} does not support this {custom_op}; the default is used", stacklevel=3
    )


def _collect_metadata() -> dict[str, str]:
    """Returns what a table belongs to: the GPU and the versions."""
    import torch

    known = {"cuda_version": torch.version.cuda}
    if torch.cuda.is_available():
        known["gpu"] = torch.cuda.get_device_name()
        known["cudnn_version"] = str(torch.backends.cudnn.version())
    import fi_core

    known["fi_core_version"] = getattr(fi_core, "__version__", None)
    return {key: value for key, value in known.items() if value is not None}


Mismatches = dict[str, tuple[Any, Any]]


def _classify_metadata_mismatches(
    saved_meta: Mapping[str, Any], current_meta: Mapping[str, Any]
) -> tuple[Mismatches, Mismatches]:
    """Compares the metadata of a table with those of this process; a key that one of them lacks is ignored.

    Returns:
        (those for which the table is not used, those that do not matter), by key (saved, current). All matter.
    """
    keys = sorted(saved_meta.keys() & current_meta.keys())
    pairs = {key: (saved_meta[key], current_meta[key]) for key in keys}
    return {key: (made, now) for key, (made, now) in pairs.items() if made != now}, {}


def _checked_buckets(tuning_buckets: Iterable[int] | None) -> Buckets | None:
    if tuning_buckets is None:
        return None
    buckets = tuple(sorted(set(tuning_buckets)))
    if not buckets or not all(type(size) is int and size > 0 for size in buckets):
        raise ValueError(f"tuning_buckets: must be positive ints, at least one, got {tuning_buckets!r}")
    return buckets


def _checked_skip_ops(skip_ops: str | Iterable[str] | None) -> frozenset[str]:
    names = frozenset((skip_ops,) if isinstance(skip_ops, str) else skip_ops or ())
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"skip_ops: must be the name of an operator or a set of names, got {skip_ops!r}")
    return names


@contextmanager
def autotune(
    tune_mode: bool = True,
    cache: str | Path | None = None,
    tuning_buckets: Iterable[int] | None = None,
    round_up: bool | None = None,
    skip_ops: str | Iterable[str] | None = None,
    cuda_graph_profile_replays: int | None = None,
) -> Iterator[None]:
    """Context manager in which FlashInfer measures tactics; fi compiles, and controls how tables are looked up.

    An engine calls its model once inside, or before. The first call of a layer begins to compile all kernels that the
    layer reaches, with any number of tokens, and the context ends when they are compiled and loaded: no later call
    waits for a compiler or the driver. Do not leave it while a CUDA graph is captured.

    Contexts nest per thread: the inner one overrides the outer one, and names in skip_ops accumulate. Results do not
    depend on any of the arguments.

    Args:
        tune_mode: whether the exit waits for compilers and loads, and the table is written to `cache`.
        cache: table file. It is loaded at entry if it exists. It is neither used nor written if it belongs to another
            GPU or version.
        tuning_buckets: replaces the buckets of dynamic dimensions.
        round_up: maps a size to the smallest bucket above it (True) or to the largest below it (False).
        skip_ops: an operator, or several, that take their default.
        cuda_graph_profile_replays: accepted and checked, but unused, because nothing is profiled.

    Raises:
        ValueError: tuning_buckets, cuda_graph_profile_replays or the table file does not fit.
        TypeError: round_up or skip_ops has another type.
    """
    if round_up is not None and not isinstance(round_up, bool):
        raise TypeError(f"round_up: must be True, False or None, got {round_up!r}")
    replays = cuda_graph_profile_replays
    if replays is not None and (type(replays) is not int or replays < 1):
        raise ValueError(f"cuda_graph_profile_replays: must be an int >= 1, got {replays!r}")
    buckets, names = _checked_buckets(tuning_buckets), _checked_skip_ops(skip_ops)
    tuner = AutoTuner.get()
    usable = cache is None or not Path(cache).exists() or tuner.load_configs(cache)
    outer = tuner._scopes.current
    tuner._scopes.current = replace(
        outer,
        tune=tune_mode,
        buckets=outer.buckets if buckets is None else buckets,
        round_up=outer.round_up if round_up is None else round_up,
        skip_ops=outer.skip_ops | names,
    )
    try:
        yield
    finally:
        tuner._scopes.current = outer
        if tune_mode:
            load_begun()
        if tune_mode and cache is not None and usable:
            tuner.save_configs(cache)
