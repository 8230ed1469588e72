"""autotune_v2: tables of tactics that lie in a folder of their own, and the process group of tuning."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fi_core.compat.autotuner import AutoTuner, _collect_metadata, autotune
from fi_core.runtime.env import env

if TYPE_CHECKING:
    import torch.distributed

_group: torch.distributed.ProcessGroup | None = None
_last: Path | None = None  # the table of the last autotune_v2 that had one


def set_autotune_process_group(group: torch.distributed.ProcessGroup | None) -> None:
    """Keeps the group of ranks that choose alike. Nothing is exchanged: pure functions choose, on all ranks alike."""
    global _group
    _group = group


def get_autotune_process_group() -> torch.distributed.ProcessGroup | None:
    """Returns the group that was set; None if there is none."""
    return _group


@dataclass(frozen=True)
class MeasurementPolicy:
    """How FlashInfer measures tactics; accepted and checked, but fi measures nothing.

    Args:
        execution_mode: "auto", "cuda_graph" or "eager".
        cold_l2: whether the L2 cache is cold; None: as each operator says.
        _timer: "auto", "events", "events_no_delay" or "cupti", of which the last leaves out host time.

    Raises:
        ValueError: execution_mode or _timer is another word; or "cupti" with "eager", where host time counts.
    """

    execution_mode: Literal["auto", "cuda_graph", "eager"] = "auto"
    cold_l2: bool | None = None
    _timer: Literal["auto", "cupti", "events", "events_no_delay"] = "auto"

    def __post_init__(self) -> None:
        if self.execution_mode not in ("auto", "cuda_graph", "eager"):
            raise ValueError(f"execution_mode: must be auto, cuda_graph or eager; got {self.execution_mode!r}")
        timers = ("auto", "events", "events_no_delay") + (("cupti",) if self.execution_mode != "eager" else ())
        if self._timer not in timers:
            raise ValueError(f"_timer: must be one of {', '.join(timers)}; got {self._timer!r}")

    @property
    def use_cuda_graph(self) -> bool | None:
        """Whether calls are measured in a CUDA graph; None: as each operator says."""
        return None if self.execution_mode == "auto" else self.execution_mode == "cuda_graph"

    @property
    def timer(self) -> str:
        """What measures: CUDA events, before which a delay hides host time unless execution_mode is "eager"."""
        usual = "events_no_delay" if self.execution_mode == "eager" else "events"
        return usual if self._timer == "auto" else self._timer

    def manifest_fields(self) -> dict[str, str]:
        """The fields that differ from their defaults, by the names that FlashInfer stores them under."""
        fields = {"execution_mode": self.execution_mode, "cold_l2": str(self.cold_l2), "timer": self._timer}
        return {f"measure_{name}": value for name, value in fields.items() if value not in ("auto", "None")}


def _table(cache_root: str | Path | None) -> Path:
    """The table of this GPU and these versions."""
    root = Path(cache_root) if cache_root is not None else env.autotune_cache_dir or env.cache_dir / "autotune"
    made_for = hashlib.sha256(json.dumps(_collect_metadata(), sort_keys=True).encode()).hexdigest()
    return root / f"{made_for[:16]}.json"


@contextmanager
def autotune_v2(
    mode: Literal["tune", "replay"] = "tune",
    persistent_cache: bool = True,
    cache_root: str | Path | None = None,
    measurement_policy: MeasurementPolicy | None = None,
    *,
    tuning_buckets: Iterable[int] | None = None,
    round_up: bool | None = None,
    skip_ops: str | Iterable[str] | None = None,
) -> Iterator[None]:
    """`autotune` with a table that the library keeps, one for each GPU and set of versions.

    Args:
        mode: "tune" also writes the table at exit if it has new entries; "replay" only reads it.
        persistent_cache: whether there is such a table; if not, the table of the process is used.
        cache_root: its folder; FI_AUTOTUNE_CACHE_DIR, or `autotune` in the cache folder, if None.
        measurement_policy: checked, but unused, because nothing is measured.
        tuning_buckets, round_up, skip_ops: as for `autotune`.

    Raises:
        ValueError: mode is another word; or as for `autotune`.
        TypeError: As for `autotune`.
    """
    global _last
    if mode not in ("tune", "replay"):
        raise ValueError(f"mode: must be tune or replay; got {mode!r}")
    tuner = AutoTuner.get()
    table = _table(cache_root) if persistent_cache else None
    if table is not None:
        _last = table
        if table.exists():
            tuner.load_configs(table)
    with autotune(mode == "tune", None, tuning_buckets, round_up, skip_ops):
        yield
    if table is not None and mode == "tune" and tuner._dirty:
        tuner.save_configs(table)


def autotune_v2_reload() -> None:
    """Drops the table of the process and reads the one of the last `autotune_v2` again, which another rank may have
    written."""
    tuner = AutoTuner.get()
    tuner.clear_cache()
    if _last is not None and _last.exists():
        tuner.load_configs(_last)
