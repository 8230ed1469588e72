"""Traces of the wrappers' run: the reference, run alone from the JSON, gives what the wrapper gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from families.harness import assert_close
from families.paged import paged
from families.prefill_batch import LSE, workspace
from families.wrapper_session import SESSIONS, WRAPPERS, Run, decode, prefill_paged, prefill_ragged
from fi_core.attention import BatchAttention
from fi_core.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    single_decode_with_kv_cache,
    trtllm_batch_decode_with_kv_cache,
)
from fi_core.observe import log, trace
from fi_core.observe.log import Settings, fi_api
from fi_core.observe.trace import call_arguments, fi_trace, select_template
from fi_core.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
    trtllm_batch_context_with_kv_cache,
)

NAMES = {
    "decode": "gqa_paged_decode_h4_kv2_d64_ps16",
    "decode HND": "gqa_paged_decode_h4_kv2_d64_ps16",
    "decode several": "gqa_paged_decode_h4_kv2_d64_ps16",
    "decode graph": "gqa_paged_decode_h4_kv2_d64_ps16",
    "paged": "gqa_paged_prefill_h4_kv2_d64_ps16",
    "paged HND": "gqa_paged_prefill_h4_kv2_d64_ps16",
    "ragged": "gqa_ragged_prefill_h4_kv2_d64",
    "ragged HND": "gqa_ragged_prefill_h4_kv2_d64",
    "sinks": "gqa_paged_prefill_h4_kv2_d64_ps16",
    "cascade": "gqa_paged_cascade_3_levels_h4_kv2_d64_ps16",
    "mla": "mla_paged_h16_ckv512_kpe64_ps16",
}
ONE_LEVEL = "gqa_paged_cascade_1_levels_h4_kv2_d64_ps16"


def alone(definition: dict[str, Any]) -> Any:
    """The reference of a definition as it is in the file, which needs nothing but torch."""
    names: dict[str, Any] = {}
    exec(json.loads(json.dumps(definition))["reference"], names)
    return next(value for name, value in reversed(names.items()) if callable(value))


def template_and_planned(run: Run) -> tuple[Any, dict[str, Any]]:
    """The template of a run and all of its arguments, as the trace sees them."""
    method = type(run.wrapper).run
    arguments = call_arguments(run.arguments, method.fi_trace.planned, run.wrapper)
    return select_template(method, method.fi_trace.trace, arguments), arguments


@pytest.mark.parametrize("name", [name for name in SESSIONS if name != "sinks"])
def test_the_reference_in_the_file_equals_run(name: str) -> None:
    for run in SESSIONS[name]():
        definition = fi_trace(run.wrapper.run, **run.arguments)
        expected_name = (
            NAMES[name] if run.name != "cascade of one level" else "gqa_paged_cascade_1_levels_h4_kv2_d64_ps16"
        )
        assert definition["name"] == expected_name
        entries = [*definition["inputs"].values(), *definition["outputs"].values()]
        assert all(entry["dtype"] != "unknown" for entry in entries)
        assert all(axis["value"] for axis in definition["axes"].values() if axis["type"] == "const")
        template, arguments = template_and_planned(run)
        want = alone(definition)(**template.values(arguments))
        want_out, want_lse = want if isinstance(want, tuple) else (want, None)
        got = run()
        out, lse = got if isinstance(got, tuple) else (got, None)
        assert str(out.dtype) == f"torch.{definition['outputs']['output']['dtype']}"
        assert_close(out, want_out)
        assert ("lse" in definition["outputs"]) is (lse is not None)
        if lse is not None:
            assert_close(lse, want_lse, tolerance=LSE)


def test_traces_are_written_as_runs_pass_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FI_TRACE_DUMP_DIR", str(tmp_path))
    monkeypatch.setattr(log, "settings", Settings(trace_dump=True))
    monkeypatch.setattr(trace, "_dumped", set())
    monkeypatch.setattr(trace, "_TRACE_REGISTRY", [])
    for cls in WRAPPERS:
        if "run" in vars(cls) and hasattr(cls.run, "fi_trace"):
            select = cls.run.fi_trace
            traced = fi_api(trace=select.trace, planned=select.planned)(cls.run)
            monkeypatch.setattr(cls, "run", traced)
    for session in SESSIONS.values():
        for run in session():
            run()
    written = {path.stem for path in tmp_path.iterdir()}
    assert written == {*NAMES.values(), ONE_LEVEL}


def test_an_unbound_run_takes_the_arguments_of_plan(tmp_path: Path) -> None:
    p = paged([37, 16])
    given = {"kv_indptr": p.indptr, "kv_indices": p.indices, "kv_last_page_len": p.last_page_len}
    run: Any = BatchDecodeWithPagedKVCacheWrapper.run
    definition = run.fi_trace(save_dir=tmp_path, q=p.q, paged_kv_cache=p.cache, sm_scale=0.5, return_lse=True, **given)
    assert json.loads((tmp_path / f"{definition['name']}.json").read_text()) == definition
    assert definition["outputs"]["lse"]["dtype"] == "float32"
    assert definition["inputs"]["kv_indptr"]["dtype"] == "int32"
    less = run.fi_trace(q=p.q, paged_kv_cache=p.cache)
    assert less["inputs"] == definition["inputs"], "tables that are not given are declared"


def test_options_without_a_reference_have_no_trace() -> None:
    p = paged([37, 16])
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace("cpu", 1 << 16))
    wrapper.plan(*p.plan_arguments(), **p.dtypes, pos_encoding_mode="ROPE_LLAMA")
    with pytest.raises(ValueError, match="no trace template"):
        fi_trace(wrapper.run, q=p.q, paged_kv_cache=p.cache)
    (run, *_) = prefill_paged()
    with pytest.raises(ValueError, match="no trace template"):
        fi_trace(run.wrapper.run, **run.arguments, lse_base="ln")
    k, v = (x[:, 0] for x in run.arguments["paged_kv_cache"])
    with pytest.raises(ValueError, match="no trace template"):
        fi_trace(run.wrapper.run, q=run.arguments["q"], paged_kv_cache=(k, v))


def test_planned_options_without_a_reference_have_no_trace() -> None:
    p = paged([37, 16], q_len=3, heads=(8, 2))
    behind = BatchDecodeWithPagedKVCacheWrapper(workspace("cpu", 1 << 16), use_tensor_cores=True)
    behind.plan(*p.plan_arguments(), **p.dtypes, q_len_per_req=3, window_right=1)
    with pytest.raises(ValueError, match="no trace template"):
        fi_trace(behind.run, q=p.q, paged_kv_cache=p.cache)
    capped = BatchAttention(device="cpu")
    rows = torch.tensor([0, 3, 6], dtype=torch.int32)
    plan = rows, p.indptr, p.indices, p.seq_lens(), 8, 2, 64, 64, p.page_size, True
    capped.plan(*plan, logits_soft_cap=2.0, q_data_type=p.q.dtype, kv_data_type=p.q.dtype)
    with pytest.raises(ValueError, match="no trace template"):
        fi_trace(capped.run, q=p.q, kv_cache=p.cache)
    capped.plan(*plan, q_data_type=p.q.dtype, kv_data_type=p.q.dtype)
    assert fi_trace(capped.run, q=p.q, kv_cache=p.cache)


def test_functions_have_no_trace_for_options_without_a_reference() -> None:
    q, k = torch.zeros(3, 4, 64), torch.zeros(9, 2, 64)
    tables = {"block_tables": torch.zeros(3, 2, dtype=torch.int32), "seq_lens": torch.full((3,), 9)}
    cache = torch.zeros(4, 2, 2, 16, 64)
    offsets = torch.arange(4, dtype=torch.int32)
    for function, arguments, options in (
        (single_decode_with_kv_cache, {"q": q[0], "k": k, "v": k}, {"pos_encoding_mode": "ALIBI", "v_scale": 2.0}),
        (single_prefill_with_kv_cache, {"q": q, "k": k, "v": k}, {"scale_q": q[0, :, 0], "k_scale": 0.5}),
        (trtllm_batch_decode_with_kv_cache, {"query": q, "kv_cache": cache, **tables},
         {"q_len_per_req": 3, "sinks": q[0, :, 0], "cum_seq_lens_q": offsets, "return_lse": True, "cp_world": 2,
          "logits_soft_cap": 5.0}),
        (trtllm_batch_context_with_kv_cache, {"query": q, "kv_cache": cache, "cum_seq_lens_q": offsets, **tables},
         {"sinks": q[0, :, 0], "return_lse": True, "uses_shared_paged_kv_idx": False, "logits_soft_cap": 5.0}),
    ):  # fmt: skip
        assert fi_trace(function, **arguments)
        for name, value in options.items():
            with pytest.raises(ValueError, match="no trace template"):
                fi_trace(function, **arguments, **{name: value})


def test_run_is_the_function_itself_while_nothing_is_logged() -> None:
    for cls in (
        BatchDecodeWithPagedKVCacheWrapper,
        BatchPrefillWithPagedKVCacheWrapper,
        BatchPrefillWithRaggedKVCacheWrapper,
    ):
        for method in (cls.run, cls.plan, cls.__init__, cls.forward):
            assert not method.__code__.co_filename.endswith(("log.py", "trace.py"))
            assert not hasattr(method, "__fi_op__")


def test_a_trace_does_not_change_a_plan() -> None:
    for session in (decode, prefill_ragged):
        for run in session():
            before = {name: id(value) for name, value in vars(run.wrapper).items()}
            fi_trace(run.wrapper.run, **run.arguments)
            assert {name: id(value) for name, value in vars(run.wrapper).items()} == before
