"""Every description that makes inputs: the public function against the reference, and what the description promises."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import pytest
import torch

import fi_core
from families.harness import assert_close, assert_guards, guarded
from fi_core.attention.reference import attend_request
from fi_core.observe.trace import _TRACE_REGISTRY, Described, Tensor, TraceTemplate, every_described
from fi_core.registry import load, ops

load()
for _name in fi_core.__all__:
    getattr(fi_core, _name)  # loads the family


class Sample(NamedTuple):
    """A description and the sizes of one sample of it."""

    described: Described
    sizes: Mapping[str, Any]

    @property
    def name(self) -> str:
        words = [f"{key}={value}" for key, value in self.sizes.items()]
        tags = [tag.partition(":")[2] for tag in self.described.template.tags]
        return "-".join([self.described.name, *tags, *self.described.template.outputs, *words])


DESCRIBED = [found for found in every_described() if found.function.__module__.startswith("fi_core.")]
# A drawn token has no reference.
SAMPLES = [
    Sample(found, sizes)
    for found in DESCRIBED
    if found.template.reference is not None
    for sizes in (found.template.samples or ({},))
]
by_name = pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)


def alone(template: TraceTemplate, arguments: Mapping[str, Any]) -> Callable[..., Any]:
    """The reference as a file of the definition has it, in a namespace of its own."""
    definition = json.loads(json.dumps(template.definition("fi_core.f", arguments)))
    assert all(
        entry["dtype"] != "unknown" for entry in (*definition["inputs"].values(), *definition["outputs"].values())
    )
    names: dict[str, Any] = {}
    exec(definition["reference"], names)
    return next(value for value in reversed(names.values()) if callable(value))  # type: ignore[no-any-return]


def check(template: TraceTemplate, got: Mapping[str, Any], want: Mapping[str, Any]) -> None:
    assert got.keys() == want.keys() == template.outputs.keys()
    for name, actual in got.items():
        if actual.is_floating_point():
            assert_close(actual, want[name], tolerance=template.tolerance_of(name, actual.dtype))
        else:
            assert torch.equal(actual.long(), want[name].long()), name


@by_name
def test_the_function_gives_what_the_reference_gives(sample: Sample) -> None:
    described, sizes = sample
    template = described.template
    arguments = template.sample(**sizes)
    want = template.expected(arguments, alone(template, arguments))
    got = template.results(arguments, described.call(arguments))
    check(template, got, template.where_written(arguments, got, want))
    for name, entry in template.outputs.items():
        declared = template.definition("fi_core.f", arguments)["outputs"][name]["dtype"]
        assert str(got[name].dtype) == f"torch.{declared}"
        assert got[name].ndim == len(entry.dim_names)  # type: ignore[union-attr]
    if "out" in inspect.signature(described.function).parameters and "out" not in arguments:
        again = template.sample(**sizes)
        first = next(iter(got.values()))
        padding = 3 if first.is_floating_point() else 0  # index tensors are contiguous
        out = guarded(first.shape, first.dtype, "cpu", row_padding=padding)
        returned = described.call({**again, "out": out})
        assert (returned[0] if isinstance(returned, tuple) else returned) is out
        got = {**got, next(iter(got)): out}
        check(template, got, template.where_written(arguments, got, want))
        assert_guards(out)


WRITTEN_IN_PARTS = [found for found in DESCRIBED if found.template.written]


@pytest.mark.parametrize("found", WRITTEN_IN_PARTS, ids=lambda found: found.name)
def test_what_is_written_is_told_where_the_inputs_are(found: Described) -> None:
    """What it makes without a device lies elsewhere here, as it does for inputs on a GPU."""
    arguments = found.template.sample(**(found.template.samples or ({},))[0])
    with torch.device("meta"):
        written = found.template.written(**found.template.values(arguments))  # type: ignore[misc]
    assert {mask.device.type for mask in written.values()} == {"cpu"}


PLAIN = {
    (found.name, found.template.tags, found.template.op_type, tuple(found.template.outputs), len(found.template.axes)):
    found.template for found in DESCRIBED
}  # fmt: skip
SIZES = ("num_rows", "num_tokens", "batch_size", "nnz", "kv_len", "rows")


def made_of(template: TraceTemplate) -> Collection[str]:
    """The sizes that its sample takes."""
    return inspect.signature(template.make).parameters if template.make else ()


def small(template: TraceTemplate) -> dict[str, Any]:
    """Sizes of a batch of one length: the usual ones of a wrapper are those of a served model."""
    usual = {"head_dim": 64, "kv_len": 20, "shared_kv_len": 40, "qo_len": 6}
    return {k: v for k, v in usual.items() if k in made_of(template)} if template.plan else {}


by_template = pytest.mark.parametrize(
    "key", PLAIN, ids=lambda key: "-".join((key[0], *key[1], str(len(key[3])), str(key[4])))
)


@by_template
def test_work_is_of_every_byte(key: Any) -> None:
    """Bytes are at least those of the results, and grow with the call."""
    template = PLAIN[key]
    assert template.work is not None
    sizes = small(template)
    if template.plan and "batch_size" in made_of(template):
        sizes["batch_size"] = 2
    arguments = template.sample(nasty=False, **sizes)
    work = template.work_of(arguments)
    outputs = template.expected(arguments) if template.reference is not None else {}
    entries = template.definition("fi_core.f", arguments)["outputs"]
    appended = "append" in template.op_type  # of the cache only the new rows are written
    written = (
        0
        if appended
        else sum(x.numel() * getattr(torch, entries[name]["dtype"]).itemsize for name, x in outputs.items())
    )
    assert work.bytes >= written - len(outputs)
    assert work.flops >= 0
    assert isinstance(work.bytes, int)
    assert isinstance(work.flops, int)
    grown = "n" if "n" in template.axes else next(size for size in SIZES if size in made_of(template))
    larger = template.work_of(template.sample(nasty=False, **{**sizes, grown: 2000 if grown == "n" else 64}))
    assert larger.bytes > work.bytes


@by_template
def test_samples_are_seeded_nasty_and_in_the_layout(key: Any) -> None:
    template = PLAIN[key]
    assert set(template.ops) <= set(ops())
    assert template.ops
    sizes = small(template)
    one, same, other = (template.values(template.sample(generator=seed, **sizes)) for seed in (1, 1, 2))
    plain = template.values(template.sample(generator=torch.Generator().manual_seed(1), nasty=False, **sizes))
    tensors = [name for name, value in one.items() if isinstance(value, torch.Tensor)]
    assert tensors
    for name in tensors:
        a, b = one[name], same[name]
        assert a.shape == b.shape == plain[name].shape
        assert a.stride() == b.stride()
        assert torch.equal(bits(a), bits(b)), "the same seed gives the same bits"
        dense = plain[name].is_contiguous() or plain[name].mT.is_contiguous() or 0 in plain[name].stride()
        assert dense, "a benchmark gets plain tensors"
    drawn = [name for name in tensors if one[name].is_floating_point()]
    if drawn:
        assert any(not torch.equal(bits(one[name]), bits(other[name])) for name in tensors)
        assert any(not one[name].is_contiguous() for name in drawn), "nasty inputs are strided"


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


COVERED = {
    "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "rmsnorm", "gemma_rmsnorm", "fused_add_rmsnorm",
    "gemma_fused_add_rmsnorm", "rmsnorm_quant", "fused_add_rmsnorm_quant", "fused_add_rmsnorm_fp8_block_quant",
    "layernorm", "layernorm_quant", "apply_rope", "apply_rope_inplace", "apply_rope_pos_ids",
    "apply_rope_pos_ids_inplace", "apply_llama31_rope", "apply_llama31_rope_inplace", "apply_llama31_rope_pos_ids",
    "apply_llama31_rope_pos_ids_inplace", "apply_rope_with_cos_sin_cache", "apply_rope_with_cos_sin_cache_inplace",
    "append_paged_kv_cache", "append_paged_mla_kv_cache", "get_batch_indices_positions", "get_seq_lens",
    "merge_state", "merge_state_in_place", "merge_states", "softmax", "top_p_renorm_probs", "top_k_renorm_probs",
    "top_k_mask_logits", "top_k", "top_k_page_table_transform", "top_k_ragged_transform", "packbits",
    "segment_packbits", "single_decode_with_kv_cache", "single_prefill_with_kv_cache",
    "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper", "MultiLevelCascadeAttentionWrapper",
}  # fmt: skip


def test_these_functions_are_described() -> None:
    assert {found.name for found in DESCRIBED} >= COVERED


REFERENCES = {
    (f.__qualname__, t.name_prefix or t.op_type, t.tags): t
    for f, t, _ in _TRACE_REGISTRY
    if f.__module__.startswith("fi_core.") and t.reference is not None
}


@pytest.mark.parametrize("key", REFERENCES, ids=lambda key: f"{key[0]}-{key[1]}")
def test_every_reference_is_whole_in_itself(key: Any) -> None:
    """Its functions name nothing global but each other and builtins."""
    from fi_core.observe.template import _source_text

    text = _source_text(REFERENCES[key].reference)
    assert text is not None
    names: dict[str, Any] = {}
    exec(text, names)
    for value in [value for value in names.values() if inspect.isfunction(value)]:
        assert inspect.getclosurevars(value).unbound <= _attributes(value), inspect.getclosurevars(value).unbound


def _attributes(function: Any) -> set[str]:
    """The names that code looks up in objects, which inspect does not tell from globals."""
    import dis

    found, todo = set(), [function.__code__]
    while todo:
        code = todo.pop()
        for step in dis.get_instructions(code):
            if step.opname not in ("LOAD_GLOBAL", "LOAD_NAME"):
                found.add(str(step.argval))
        todo += [value for value in code.co_consts if inspect.iscode(value)]
    return found


@pytest.mark.parametrize("template", [found.template for found in DESCRIBED if found.name == "silu_and_mul"])
def test_a_benchmark_case_needs_only_its_description(template: TraceTemplate) -> None:
    """How make, reference and work of a case come from a description: no more than this."""
    arguments = template.sample("cpu", torch.Generator().manual_seed(0), nasty=False, batch_size=4, hidden_size=64)
    expected = template.expected(arguments)
    returned = fi_core.silu_and_mul(**arguments)
    check(template, template.results(arguments, returned), expected)
    assert template.layouts(arguments) == {"output": ((4, 64), "bfloat16")}
    assert template.work_of(arguments) == (5 * 4 * 64, 2 * (4 * 128 + 4 * 64), "matmul")
    assert template.eager is not None
    check(template, {"output": template.eager(**arguments)}, expected)


def test_the_reference_of_attention_shows_nan_keys() -> None:
    """A key that is NaN makes rows that see it NaN; a row that sees no key gives 0."""
    q, k, v = (torch.ones(rows, 1, 8) for rows in (3, 4, 4))
    k[2] = float("nan")
    out, _ = attend_request(q, k, v, 1.0, custom_mask=torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]]).bool())
    assert out.isnan().any(-1).flatten().tolist() == [False, True, False]
    assert bool((out[2] == 0).all())


# What a call may set without another result: where it is written, who computes it, what is drawn, sizes told twice;
# what only other options use.
NEUTRAL = (
    "out output lse backend enable_pdl launch_with_pdl use_pdl pdl skip_check check_nan tactic algorithm mma_sm "
    "workspace_buffer profiler_buffer multi_ctas_kv_counter_buffer num_ctas tune_max_num_tokens use_fused_finalize "
    "generator seed offset philox_rounds deterministic is_deterministic dsa_graph_safe use_tensor_cores "
    "use_fp16_qk_reduction use_fp16_softmax bf16q_fp8kv_transform_mode request_order request_order_plan "
    "disable_split_kv tp_size tp_rank ep_rank cluster_size cluster_rank enable_alltoall profile_ids norm_topk_prob "
    "num_experts local_num_experts intermediate_size valid_hidden_size valid_intermediate_size max_seq_len max_q_len "
    "max_kv_len max_seqlen batch_size expected_m scale_granularity_mnk use_nvfp4 scale_tma_aligned cum_seq_lens_kv "
    "rope_scale rope_theta use_cp _cp_chunk_len segment_alignment routing_replay_out swizzled_input_sf "
    "maybe_output_accepted_token_num maybe_output_emitted_draft_token_num out_raw_indices "
    "skip_softmax_threshold_scale_factor uses_spcompress causal_d workspace "
    "rope_scale_p rope_theta_p rope_scale_d rope_theta_d "
    "output_final_state output_state"
)
CALLED = {
    f"{function.__qualname__}-{label}-{place}": (function, template)
    for place, (function, template, label) in enumerate(_TRACE_REGISTRY)
    if function.__module__.startswith("fi_core.") and (template.make or function.fi_trace.trace is template)  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("name", CALLED)
def test_a_parameter_is_known_to_the_reference_or_prevents_the_description(name: str) -> None:
    function, template = CALLED[name]
    trace, planned = function.fi_trace.trace, function.fi_trace.planned  # type: ignore[attr-defined]
    entries = {**template.inputs, **template.outputs}
    known = {entry.param or key for key, entry in entries.items()} | {
        *(planned or ()),
        *template.others,
        *NEUTRAL.split(),
    }
    known |= {entry.dtype_from_scalar for entry in entries.values() if isinstance(entry, Tensor)}
    left = [
        p.name for p in inspect.signature(function).parameters.values()
        if p.name not in {"self", *known} and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]  # fmt: skip
    if not isinstance(trace, TraceTemplate):  # which is also chosen by parameters
        given = template.sample(**small(template)) if left else {}
        templates = [{value: trace(**{**given, key: value}) for value in (False, True, "HND", 2)} for key in left]
        left = [key for key, found in zip(left, templates) if all(chosen is template for chosen in found.values())]
    assert not left, "these belong to `others` of the description"
