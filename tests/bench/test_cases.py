"""Every case: its torch peer and our implementations against its own reference, its work, its inputs."""

from __future__ import annotations

import math
from argparse import Namespace

import pytest
import torch

from fi_bench import backends, case, cases, catalog, parsing, refcheck
from fi_bench.case import Inputs
from fi_bench.cases import common
from fi_bench.errors import SkipError
from fi_bench.runner import fresh

SMALL = {
    "gemm": "--m 5 --n 128 --k 256 --batch_size 2 --group_size 3",
    "moe": "--num_tokens 9 --hidden_size 256 --intermediate_size 128 --num_experts 8 --top_k 2",
    "moe_routing": "--num_tokens 9 --num_experts 16 --top_k 3",
    "norm": "--batch_size 3 --hidden_size 128",
    "activation": "--batch_size 3 --hidden_size 32",
    "rope": "--batch_size 2 --seq_len 5 --num_qo_heads 4 --num_kv_heads 2 --head_dim 16 --page_size 4",
    "page": "--batch_size 3 --s_qo 5 --s_kv 11 --num_kv_heads 2 --head_dim 16 --page_size 4",
    "cascade": "--batch_size 5 --num_qo_heads 4 --head_dim 16 --num_states 3",
    "quantization": "--m 5 --k 64 --batch_size 2",
    "topk": "--batch_size 3 --vocab_size 300 --max_len 200 --top_k 70",
    "topk_varlen": "--batch_size 3 --max_seq_len 200 --top_k 70",
    "attention": "--s_qo 7 --s_kv 19 --num_qo_heads 4 --num_kv_heads 2 --head_dim_qk 16",
    "gdn": "--batch_size 2 --seq_len 2 --s_qo 70 --num_q_heads 2 --num_k_heads 2 --num_v_heads 4 --head_size 16",
    "kda": "--batch_size 2 --s_qo 70 --num_q_heads 2 --head_size 16",
    "mhc": "--num_tokens 5 --hidden_size 264",
    "mamba": "--batch_size 2 --nheads 4 --dim 16 --dstate 32 --ngroups 2",
    "mamba_prefill": "--batch_size 2 --seq_len 5 --nheads 4 --dim 16 --dstate 32 --ngroups 2",
    "mamba_ring": "--batch_size 2 --nheads 4 --dim 16 --dstate 32 --ngroups 2",
    "indexer": "--batch_size 2 --next_n 2 --kv_len 150 --num_rows 5 --num_keys 150 --heads 8 --dim 32 --top_k 40",
    "flash_mla": "--batch_size 2 --kv_len 90 --num_rows 5 --num_keys 90 --num_heads 3 --top_k 40 --page_size 16",
    "lora": "--num_tokens 5 --num_loras 3 --rank 8 --in_features 72 --out_features 40",
    "causal_conv1d": "--batch_size 2 --seq_len 5 --dim 24",
    "sampling": "--batch_size 3 --vocab_size 301 --top_k 7",
    "allreduce_comm": "--num_tokens 5 --hidden_size 128",
    "moe_comm": "--num_tokens 9 --hidden_size 128 --num_experts 8 --top_k 3",
}
VARIANTS = {
    "moe": [
        "--input_dtype float16 --routing_skew 1.5",
        "--cutlass_variant fp8_block_scale",
        "--cutlass_variant mxfp4",
        "--cutlass_variant nvfp4",
        "--cutlass_variant fp8",
        "--ep_size 2 --ep_rank 1 --n_group 4 --topk_group 2",
    ],
    "allreduce_comm": [
        "--pattern ar_residual_rmsnorm --input_dtype float16",
        "--pattern ar_residual_rmsnorm_dynamic_fp8",
    ],
    "moe_comm": ["--max_num_tokens 20 --input_dtype float16"],
    "moe_routing": ["--n_group 4 --topk_group 2 --routing_skew 1"],
    "gemm": ["--scale_major_mode K", "--out_dtype float16"],
    "norm": ["--input_dtype float16", "--out_dtype fp8_e5m2 --scale 0.02"],
    "rope": ["--interleave", "--rotary_dim 8", "--input_dtype bfloat16", "--no_rope_dim 8 --kv_layout HND"],
    "page": ["--kv_layout HND", "--kv_dtype fp8_e4m3", "--s_qo 1"],
    "quantization": ["--bitorder little", "--k 32 --sf_layout linear --no_sf_swizzled_layout", "--global_scale 20"],
    "attention": [
        "--causal",
        "--kv_layout HND",
        "--window_left 4",
        "--causal --window_left 3 --s_qo 19",
        "--head_dim_vo 8",
        "--page_size 4 --batch_size 3 --random_actual_seq_len --s_qo 1",
        "--kv_dtype fp8_e4m3 --sparse_mla_top_k 13",
    ],
    "cascade": ["--input_dtype float16"],
    "topk": ["--input_dtype bfloat16 --sorted", "--num_rows 7 --page_size 8"],
    "gdn": ["--input_dtype float16"],
    "kda": ["--input_dtype float16 --state_dtype float32"],
    "mamba": ["--has_z --dt_softplus --state_dtype float32"],
    "sampling": ["--temperature 0.5 --filter_apply_order joint", "--input_dtype bfloat16", "--num_speculate_tokens 2"],
}
CASES = [
    found
    for family in SMALL
    for routine in catalog.FAMILIES[family].routines
    if (found := cases.find(routine)) is not None
]


EXPERTS = [
    *(f"fp8_block_scale --routing_method {method}" for method in ("renormalize", "renormalize_naive", "topk")),
    "fp8_block_scale --routing_method llama4 --top_k 1",
    "fp8_block_scale --use_routing_bias --n_group 4 --topk_group 2",
    "fp8_block_scale --weight_layout 2 --use_shuffled_weight",
    "fp8_block_scale --use_shuffled_weight --local_expert_offset 4 --local_num_experts 4",
    "fp8_block_scale --weight_layout 2",
    "fp8_per_tensor_scale",
    "fp8_per_tensor_scale --routing_method llama4 --top_k 1 --use_routing_scales_on_input",
    *(f"fp4_block_scale --fp4_mode {mode}" for mode in ("nvfp4", "mxfp4_mxfp8", "mxfp4_bf16")),
    "fp4_block_scale --routing_method topk --fp4_mode mxfp4_bf16",
]


@pytest.mark.parametrize("line", EXPERTS)
def test_layers_that_route_agree_with_the_reference(line: str) -> None:
    """Every routing method, layout and format, of torch and of fi_core."""
    name, _, more = line.partition(" ")
    found = cases.find(f"trtllm_{name}_moe")
    assert found is not None and found.unsupported is not None
    p = params(found, more)
    assert found.unsupported("cpu", p) is None
    for backend in ("torch", "cpu"):
        for d in differences(found, p, backend):
            assert d.ok, (backend, d)


@pytest.mark.parametrize("variant", ["nvfp4", "fp8"])
def test_chosen_experts_in_the_formats_of_cutlass(variant: str) -> None:
    found = cases.find("cutlass_fused_moe")
    assert found is not None
    for d in differences(found, params(found, f"--cutlass_variant {variant}"), "cpu"):
        assert d.ok, d


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("fp8_block_scale --weight_layout 1", "--weight_layout must be 0 (MajorK) or 2 (BlockMajorK), got 1"),
        ("fp8_block_scale --routing_method llama4", "--routing_method llama4 takes --top_k 1, got 2"),
        ("fp8_block_scale --quantized_input", "the case has no --quantized_input"),
        ("fp8_block_scale --use_routing_scales_on_input", "is for trtllm_fp8_per_tensor_scale_moe"),
        ("fp4_block_scale --weight_layout 2", "takes shuffled weights in --weight_layout 0 only"),
        ("fp8_per_tensor_scale --routing_method topk --use_routing_bias", "is for --routing_method deepseek_v3"),
        ("fp8_per_tensor_scale --local_expert_offset 7 --local_num_experts 4", "must be at most --num_experts"),
    ],
)
def test_what_a_layer_does_not_take_is_said(line: str, words: str) -> None:
    name, _, more = line.partition(" ")
    found = cases.find(f"trtllm_{name}_moe")
    assert found is not None and found.unsupported is not None
    assert words in str(found.unsupported("cpu", params(found, more)))


def params(found: case.Case, more: str = "") -> Namespace:
    return parsing.parse(f"--routine {found.routine} {SMALL[found.family]} {more}".split())


def inputs_of(found: case.Case, p: Namespace) -> Inputs:
    return found.make(p, torch.device("cpu"), torch.Generator().manual_seed(1))


def differences(found: case.Case, p: Namespace, backend: str) -> list[refcheck.Difference]:
    x = inputs_of(found, p)
    runner = backends.bind(backend, found, "cpu")
    mine = fresh(x)
    refcheck.poison(mine, found.poison)
    with runner.context():
        outputs = runner.outputs(mine, runner.prepare(mine)(mine))
    return refcheck.check(outputs, found.reference(fresh(x)), found.tolerances(x, outputs), backend == "torch")


VARIED = [
    (found, more)
    for found in CASES
    for more in ("", *VARIANTS.get(found.family, ()))
    if "--cutlass" not in more or found.routine.startswith("cutlass")
]


@pytest.mark.parametrize(("found", "more"), VARIED, ids=[f"{c.routine} {m}".strip() for c, m in VARIED])
def test_torch_agrees_with_the_reference(found: case.Case, more: str) -> None:
    for d in differences(found, params(found, more), "torch"):
        assert d.ok, d


@pytest.mark.parametrize("found", CASES, ids=[c.routine for c in CASES])
def test_our_cpu_implementation_agrees_with_the_reference(found: case.Case) -> None:
    if not backends.exists(found):
        with pytest.raises(SkipError, match="does not exist yet"):
            backends.bind("cpu", found, "cpu")
        return
    name = "cpu" if "cpu" in backends.implementations(found) else "auto"
    for d in differences(found, params(found), name):
        assert d.ok, d


@pytest.mark.parametrize("found", CASES, ids=[c.routine for c in CASES])
def test_inputs_are_random_and_work_is_counted(found: case.Case) -> None:
    p = params(found)
    x = inputs_of(found, p)
    work = found.work(p, x)
    assert work.bytes > 0
    assert work.flops >= 0
    for name, value in x.items():
        written = name in found.poison
        if isinstance(value, torch.Tensor) and value.is_floating_point() and not written and value.numel() > 1:
            assert float(value.float().abs().sum()) > 0, f"{name} is zero"
    again = inputs_of(found, p)
    for name, value in x.items():
        if isinstance(value, torch.Tensor) and name not in found.poison:
            assert torch.equal(value.view(torch.uint8) if value.dtype.itemsize == 1 else value,
                               again[name].view(torch.uint8) if value.dtype.itemsize == 1 else again[name])  # fmt: skip


def test_every_op_of_fi_core_has_a_case_and_every_case_its_op() -> None:
    from fi_bench import collectives
    from fi_core.runtime.launch.operator import operators

    ready = [found for found in CASES if backends.exists(found)]  # this imports the families
    covered = {op for found in ready for op in (found.op, *found.also)} | set(collectives.OPS)
    assert operators().keys() <= covered, f"ops without a benchmark: {operators().keys() - covered}"
    assert covered <= operators().keys(), f"cases of unknown ops: {covered - operators().keys()}"


def test_the_implementation_that_runs_is_noted() -> None:
    """In the call alone: afterwards the operator keeps its choices as before, with those that the call has added."""
    import fi_core
    from fi_core.runtime.launch.operator import operators

    found, x = cases.find("rmsnorm"), torch.ones(4, 64)
    assert found is not None
    kept = operators()["rmsnorm"].choices
    returned, name = backends.noted(found, lambda: fi_core.rmsnorm(x, x[0]))
    assert returned.shape == x.shape and name == "cpu"
    assert operators()["rmsnorm"].choices is kept and kept


def parse(line: str) -> Namespace:
    return parsing.parse(line.split())


def test_a_wrapper_needs_only_its_description() -> None:
    """The cascade wrapper has no module in `cases`: flags, inputs, plan, reference and work come from its trace."""
    found = cases.find("MultiLevelCascadeAttentionWrapper")
    assert found is not None
    sizes = "--batch_size 3 --shared_kv_len 33 --kv_len 20 --num_qo_heads 4 --num_kv_heads 2 --head_dim 64"
    p = parse(f"--routine {found.routine} {sizes} --dtype float16")
    assert all(d.ok for d in differences(found, p, "auto"))
    work = found.work(p, inputs_of(found, p))
    pairs, token = 3 * (33 + 20), 2 * 2 * 64 * 2
    assert work.flops == 4 * pairs * 4 * 64
    assert work.bytes == (33 + 3 * 20) * token + 2 * 3 * 4 * 64 * 2


def test_known_work_of_known_shapes() -> None:
    rms = cases.find("rmsnorm")
    assert rms is not None
    p = parse("--routine rmsnorm --batch_size 16 --hidden_size 256")
    assert rms.work(p, inputs_of(rms, p)).bytes == 2 * 16 * 256 * 2 + 256 * 2
    decode = cases.find("single_decode_with_kv_cache")
    assert decode is not None
    shape = "--s_kv 100 --num_qo_heads 8 --num_kv_heads 2 --head_dim_qk 64"
    p = parse(f"--routine single_decode_with_kv_cache {shape}")
    work = decode.work(p, inputs_of(decode, p))
    assert work.flops == 4 * 100 * 8 * 64
    assert work.bytes == 2 * (8 * 64 * 2 + 2 * 100 * 2 * 64)


def test_llama31_frequencies_scale_only_the_slow_ones() -> None:
    found = cases.find("apply_llama31_rope_pos_ids")
    assert found is not None
    line = "--batch_size 1 --seq_len 2 --num_qo_heads 1 --num_kv_heads 1 --head_dim 128 --rope_theta 5e5 --rope_scale 8"
    x = inputs_of(found, parsing.parse(f"--routine {found.routine} {line}".split()))
    plain = 5e5 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    ratio = x.frequencies / plain
    assert ratio[0] == 1.0
    assert math.isclose(float(ratio[-1]), 1 / 8)
    assert ((ratio <= 1) & (ratio >= 1 / 8)).all()


def test_a_row_that_sees_no_key_gives_zero_and_minus_infinity() -> None:
    found = cases.find("single_prefill_with_kv_cache_return_lse")
    assert found is not None
    line = "--s_qo 3 --s_kv 1 --num_qo_heads 1 --num_kv_heads 1 --head_dim_qk 8 --window_left 0"
    p = parsing.parse(f"--routine {found.routine} {line}".split())
    reference = found.reference(Inputs(inputs_of(found, p) | {"causal": True}))
    assert not bool(reference["output"][0].any())
    assert float(reference["lse"][0, 0]) == -math.inf


def test_a_block_table_is_the_page_table_as_a_rectangle() -> None:
    found = common.page_table([5, 0, 33, 16], 16, torch.device("cpu"), torch.Generator().manual_seed(3))
    table = common.block_table(found["kv_indptr"], found["kv_indices"])
    pages = found["kv_indices"].tolist()
    assert table.tolist() == [[pages[0], 0, 0], [0, 0, 0], pages[1:4], [pages[4], 0, 0]]
    assert found["kv_last_page_len"].tolist() == [5, 0, 1, 16]
