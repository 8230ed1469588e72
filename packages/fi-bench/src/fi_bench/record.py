"""Records: one JSON object per case, backend and trial, appended to a file and flushed at once; and their CSV view."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import os
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fi_bench.errors import UsageError
from fi_bench.files import append, text_of
from fi_bench.flags import GENERAL

SCHEMA_VERSION = 1
Record = dict[str, Any]

# Order and repetitions are FlashInfer's: readers by position and by name both work.
_CONTRACT = """
routine median_time std_time tflops tb_per_sec backend resolved_backend
s_qo s_kv head_dim_qk head_dim_vo head_dim_ckv head_dim_kpe causal q_dtype kv_dtype avg_actual_seq_len
random_actual_seq_len is_var_seq cute_dsl_impl
n group_size tile_size scale_major_mode mma_sm use_128x4_sf_layout use_nvfp4 bias
num_tokens intermediate_size num_experts top_k n_group topk_group routed_scaling_factor local_expert_offset
local_num_experts routing_method use_shuffled_weight weight_layout use_routing_bias use_routing_scales_on_input
weight_dtype activation_type fp4_mode cold_l2_cache cutlass_variant quantized_input tp_size tp_rank ep_size ep_rank
num_tokens num_experts top_k ep_size max_num_tokens num_tokens ar_backend pattern layout_code
local_bs op_name mode_name local_tp_size local_dp_size inter_tp_size inter_dp_size
num_heads scale eps use_global_scale dit_mode ppf pph ppw alignment global_scale sf_layout do_shuffle sf_vec_size
vocab_size top_k top_p min_p temperature num_speculate_tokens filter_apply_order max_len num_rows max_seq_len
seq_len head_dim rotary_dim no_rope_dim rope_theta rope_scale interleave kv_layout
nheads dim dstate ngroups cache_steps state_dtype weight_dtype has_z dt_softplus
num_q_heads num_k_heads num_v_heads head_size state_layout pool_mode update_state use_qk_l2norm
kda_variant kda_variant_policy sm_count packed has_initial_state topk max_k_tiles total_q total_kv
batch_size hidden_size input_dtype out_dtype quant_dtype m k num_qo_heads num_kv_heads page_size enable_pdl
is_sf_swizzled_layout refcheck no_cuda_graph use_cupti allow_output_mismatch random_seed case_tag
generate_repro_command repro_command
""".split()  # noqa: SIM905
_OURS = """
record_id run_id trial timestamp device library median_us ci_low_us ci_high_us std1_us n_samples host_us
timer timer_reason regime cache_state cache_how cache_copies sm_mhz warnings refcheck_status
refcheck_max_abs refcheck_max_rel refcheck_mismatch_pct gpu driver cuda torch fi_core commit bitorder num_states
window_left logits_soft_cap case
""".split()  # noqa: SIM905
COLUMNS = (*_CONTRACT, *_OURS)

_RUN_FLAGS = {flag.name for flag in GENERAL} - {"enable_pdl"}  # they do not change the computation
_ALSO_KEY = ("random_seed",)


def parameters(args: Namespace) -> dict[str, Any]:
    """The flags that define the computation."""
    return {name: value for name, value in sorted(vars(args).items()) if name not in _RUN_FLAGS or name in _ALSO_KEY}


def case_key(routine: str, args: Namespace) -> str:
    """The identity of a case across runs: a hash of routine and parameters."""
    text = json.dumps([routine, parameters(args)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def record_id(run_id: str, key: str, backend: str, trial: int) -> str:
    return hashlib.sha256(f"{run_id}/{key}/{backend}/{trial}".encode()).hexdigest()[:8]


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def dumps(record: Mapping[str, Any]) -> str:
    return json.dumps(_plain(record), default=str, allow_nan=False)


class Sink:
    """Appends records to X.jsonl, and to X.csv if that was named. Nothing is truncated."""

    def __init__(self, output_path: str | None) -> None:
        self.jsonl: Path | None = None
        self.csv: Path | None = None
        if output_path is None:
            return
        path = Path(output_path)
        if path.suffix not in (".csv", ".jsonl"):
            raise UsageError(f"--output_path {output_path!r}: give a name that ends in .csv or .jsonl")
        self.csv = None if path.suffix == ".jsonl" else path
        self.jsonl = path.with_suffix(".jsonl")
        for file in (path, self.jsonl):
            if file.exists() and not file.is_file():  # a device may have no end
                raise UsageError(f"--output_path {path}: {file} is not a regular file")
        try:
            _end_last_line(self.jsonl)
            if self.csv is not None:
                self._start_csv(self.csv)
        except OSError as error:
            raise UsageError(f"--output_path {path}: cannot be written ({error.strerror})") from None

    @staticmethod
    def _start_csv(path: Path) -> None:
        _end_last_line(path)
        with path.open(newline="", encoding="utf-8") as file:
            header = next(csv.reader(file), None)
        if header is None:
            append(path, csv_line(COLUMNS))
        elif header != list(COLUMNS):
            raise UsageError(f"--output_path {path}: it has other columns than these rows; give a new file")

    def write(self, record: Record) -> None:
        if self.jsonl is not None:
            append(self.jsonl, dumps(record) + "\n")
        if self.csv is not None and record["status"] in ("ok", "mismatch") and record.get("stats"):
            append(self.csv, csv_line(csv_row(record)))


def _end_last_line(path: Path) -> None:
    """Ends the half line of a run that died in a write."""
    with path.open("ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")


def csv_line(cells: Iterable[Any]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(cells)
    return buffer.getvalue()


def flat(record: Record) -> dict[str, Any]:
    """A record as a flat mapping with the column names of the CSV."""
    stats, derived, environment = record.get("stats") or {}, record.get("derived") or {}, record.get("env") or {}
    cache, check, clocks = record.get("cache") or {}, record.get("refcheck") or {}, record.get("clocks") or {}
    row = {
        **record.get("args", {}),
        **record.get("params", {}),
        **record.get("lengths", {}),
        **{
            name: record.get(name)
            for name in (
                "routine",
                "backend",
                "resolved_backend",
                "record_id",
                "run_id",
                "trial",
                "timestamp",
                "device",
                "library",
                "timer",
                "timer_reason",
                "regime",
            )
        },
        "refcheck": bool(record.get("args", {}).get("refcheck")),
        "use_cupti": not record.get("args", {}).get("use_cuda_events"),
        "repro_command": record.get("repro", "") if record.get("args", {}).get("generate_repro_command") else "",
        "tflops": derived.get("tflops"),
        "tb_per_sec": derived.get("tb_per_sec"),
        "cold_l2_cache": cache.get("asked") == "cold",
        "cache_state": record.get("cache_state"),
        "cache_how": cache.get("how"),
        "cache_copies": cache.get("copies"),
        "sm_mhz": clocks.get("sm_mhz_mean"),
        "warnings": "; ".join(record.get("warnings", [])),
        "refcheck_status": check.get("status"),
        "refcheck_max_abs": check.get("max_abs"),
        "refcheck_max_rel": check.get("max_rel"),
        "refcheck_mismatch_pct": check.get("mismatch_pct"),
        "torch": environment.get("packages", {}).get("torch"),
    }
    row |= {name: environment.get(name) for name in ("gpu", "driver", "cuda", "fi_core", "commit")}
    if stats:
        row |= {
            "median_time": stats["median"] / 1e6,
            "std_time": stats["std"] / 1e6,
            "median_us": stats["median"] / 1e3,
            "ci_low_us": stats["ci_low"] / 1e3,
            "ci_high_us": stats["ci_high"] / 1e3,
            "std1_us": stats["std1"] / 1e3,
            "n_samples": stats["n"],
        }
    if record.get("host_ns") is not None:
        row["host_us"] = record["host_ns"] / 1e3
    return row


def csv_row(record: Record) -> list[Any]:
    row = flat(record)
    return ["" if row.get(name) is None else row[name] for name in COLUMNS]


def read(path: str | Path) -> list[Record]:
    """Records of a JSONL file, or of the one beside a CSV; incomplete lines of a run that died are skipped."""
    file = Path(path)
    if file.suffix == ".csv":
        file = file.with_suffix(".jsonl")
    try:
        text = text_of(file)
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: cannot be read ({error})") from None
    return list(_records(text, file))


def _records(text: str, file: Path) -> Iterator[Record]:
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            if line.lstrip().startswith("{"):
                continue
            raise UsageError(f"{file}:{number}: not a record of fi-bench") from None
        if not isinstance(record, dict) or record.get("schema_version") != SCHEMA_VERSION:
            raise UsageError(f"{file}:{number}: not a record of schema {SCHEMA_VERSION}")
        lacking = incomplete(record)
        if lacking:
            raise UsageError(
                f"{file}:{number}: an incomplete record, perhaps of an older fi-bench: no valid {lacking!r}"
            )
        yield record


_ALWAYS: dict[str, type] = {
    "record_id": str,
    "run_id": str,
    "trial": int,
    "timestamp": str,
    "case_key": str,
    "routine": str,
    "backend": str,
    "status": str,
    "params": dict,
    "args": dict,
    "repro": str,
}
_MEASURED: dict[str, type] = {
    "device": str,
    "env": dict,
    "timer": str,
    "regime": str,
    "cache": dict,
    "cache_state": str,
    "clocks": dict,
    "warnings": list,
    "samples_ns": list,
    "stats": dict,
    "work": dict,
    "derived": dict,
}


def incomplete(record: Record) -> str | None:
    """The first field that a record must have and has not; a row without a time needs fewer."""
    kinds = {**_ALWAYS, **(_MEASURED if record.get("stats") else {})}
    found = next((name for name, kind in kinds.items() if not isinstance(record.get(name), kind)), None)
    if found or not record.get("stats"):
        return found
    numbers = {
        "stats": ("median", "std", "std1", "ci_low", "ci_high", "n"),
        "work": ("flops", "bytes"),
        "derived": ("tflops", "tb_per_sec"),
    }
    for field, names in numbers.items():
        if not all(isinstance(record[field].get(name), int | float) for name in names):
            return field
    samples = record["samples_ns"]
    return None if samples and all(isinstance(x, int | float) and x > 0 for x in samples) else "samples_ns"


def finished(records: Iterable[Record]) -> set[tuple[str, str, int]]:
    """(case, backend, trial) that need not run again."""
    return {(r["case_key"], r["backend"], r["trial"]) for r in records if r["status"] == "ok"}
