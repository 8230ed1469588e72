"""Flags, sweeps, presets, test lists and what is said about bad ones."""

from __future__ import annotations

import argparse
import itertools
import shlex
from collections import Counter
from pathlib import Path

import pytest

from fi_bench import catalog, parsing, presets, schedule, sweep
from fi_bench.cases.common import requests
from fi_bench.errors import UsageError
from fi_bench.runner import repro_command

NORM = "--routine rmsnorm --batch_size 4 --hidden_size 64"
COMMANDS = [line for line in Path(__file__).with_name("commands.txt").read_text().splitlines() if line[0] != "#"]
WORDS = [line.partition(".py ")[2] or line for line in COMMANDS]
SEED_LINES = [line for line in WORDS if line.startswith("--routine")]
LISTS = [line for line in WORDS if not line.startswith("--routine")]


@pytest.mark.parametrize("line", SEED_LINES)
def test_the_lines_of_flashinfer_parse(line: str) -> None:
    args = parsing.parse(shlex.split(line))
    said = shlex.split(line)
    assert args.routine == said[1]
    for i, word in enumerate(said):
        if not word.startswith("--"):
            continue
        given = list(itertools.takewhile(lambda w: not w.startswith("-"), said[i + 1 :]))
        value = getattr(args, word[2:])
        if word == "--backends":
            assert value == given
        elif word == "--verbose":
            assert value == 1
        else:
            assert str(value) == (given[0] if given else "True")
    assert args.verbose == (2 if "-vv" in said else int("--verbose" in said))


@pytest.mark.parametrize("line", LISTS)
def test_the_test_lists_of_flashinfer_parse(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line)
    listed = Path(words[1])
    listed.parent.mkdir(exist_ok=True)
    listed.write_text("\n".join(["# all of them", "", *SEED_LINES]))
    lines = parsing.read_lines(words)
    assert [found.error for found in lines] == [None] * len(SEED_LINES)
    assert {point.output_path for found in lines for point in found.points} == {words[words.index("--output_path") + 1]}


# Flags of FlashInfer's benchmark by a routine of each family.
CONTRACT = {
    "BatchPrefillWithPagedKVCacheWrapper": "backends page_size batch_size s_qo s_kv num_qo_heads num_kv_heads "
    "head_dim_qk head_dim_vo head_dim_ckv head_dim_kpe q_dtype kv_dtype out_dtype causal spec_dec_mask "
    "random_actual_seq_len autotune mla_is_var_seq mla_cute_dsl_impl",
    "bmm_fp8": "m n k batch_size group_size tile_size scale_major_mode input_dtype mat2_dtype out_dtype mma_sm "
    "use_128x4_sf_layout use_nvfp4 autotune bias",
    "cutlass_fused_moe": "num_tokens hidden_size intermediate_size num_experts top_k input_dtype weight_dtype n_group "
    "topk_group routed_scaling_factor local_expert_offset local_num_experts routing_method use_shuffled_weight "
    "weight_layout use_routing_bias use_routing_scales_on_input activation-type fp4_mode cutlass_variant "
    "quantized_input tp_size tp_rank ep_size ep_rank autotune use_functional_api b12x_quant_mode rank num_loras "
    "num_slices",
    "rmsnorm": "batch_size hidden_size num_heads input_dtype eps scale out_dtype use_global_scale "
    "is_sf_swizzled_layout output_both_sf_layouts dit_mode ppf pph ppw",
    "nvfp4_quantize": "m k input_dtype is_sf_swizzled_layout no_sf_swizzled_layout alignment batch_size global_scale "
    "sf_layout do_shuffle sf_vec_size per_token_activation",
    "top_k_top_p_sampling_from_probs": "batch_size vocab_size input_dtype top_k top_p min_p temperature "
    "filter_apply_order num_speculate_tokens",
    "top_k_page_table_transform": "batch_size input_dtype top_k max_len num_rows",
    "apply_rope": "batch_size seq_len num_qo_heads num_kv_heads head_dim rotary_dim no_rope_dim input_dtype "
    "quant_dtype rope_scale rope_theta interleave page_size kv_layout low_freq_factor high_freq_factor old_context_len",
    "gated_delta_rule_mtp": "batch_size num_q_heads num_k_heads num_v_heads head_size input_dtype state_dtype "
    "state_layout pool_mode seq_len s_qo update_state cache_intermediate_states no_qk_l2norm",
    "selective_state_update": "batch_size nheads dim dstate ngroups cache_steps state_dtype weight_dtype has_z "
    "dt_softplus varlen algorithm",
    "allreduce_fusion": "num_tokens hidden_size input_dtype ar_backend pattern validate",
    "moe_a2a_dispatch_combine": "num_tokens num_experts top_k quant_dtype real_math intermediate_size max_num_tokens "
    "validate nvtx per_phase_timing use_lora",
    "recurrent_kda_prefill": "batch_size s_qo num_q_heads head_size input_dtype state_dtype packed offsets_dtype "
    "has_initial_state lower_bound",
    "MSAPipeline": "batch_size s_qo s_kv num_qo_heads num_kv_heads head_dim topk max_k_tiles causal no-causal q_dtype "
    "kv_dtype kv_layout",
    "mixed_comm": "local_bs_list hidden_size dtype local_tp_size local_dp_size inter_tp_size inter_dp_size node_id "
    "dist_init_method",
    "top_k_varlen": "batch_size max_seq_len top_k",
}
EVERYWHERE = (
    "routine num_iters dry_run_iters no_cuda_graph use_cuda_events use_cupti refcheck allow_output_mismatch "
    "random_seed verbose output_path testlist case_tag generate_repro_command repro_command autotune_cache enable_pdl"
)


@pytest.mark.parametrize("routine", CONTRACT)
def test_every_flag_of_the_contract_is_there(routine: str) -> None:
    known = parsing.family_parser(catalog.family_of(routine), routine)._option_string_actions
    asked = f"{CONTRACT[routine]} {EVERYWHERE}".replace("-", "_").split()
    assert [name for name in asked if f"--{name}" not in known] == []
    assert {"-R", "-n", "-d", "-v"} <= known.keys()


def test_defaults_are_those_of_flashinfer() -> None:
    args = parsing.parse(NORM.split())
    assert (args.num_iters, args.dry_run_iters, args.random_seed) == (30, 5, 42)
    assert list(vars(args))[:2] == ["routine", "backends"]


def test_hyphens_and_underscores_are_the_same() -> None:
    hyphens = parsing.parse(["--routine", "rmsnorm", "--batch-size=4", "--hidden-size", "64", "--case-tag", "a-b_c"])
    assert vars(hyphens) == {**vars(parsing.parse(NORM.split())), "case_tag": "a-b_c"}
    assert parsing.underscored(["--activation-type", "Swi-glu", "-v"]) == ["--activation_type", "Swi-glu", "-v"]


@pytest.mark.parametrize(
    ("text", "values"),
    [("8", 8), ("1,8,64", (1, 8, 64)), ("1:64:*2", (1, 2, 4, 8, 16, 32, 64)), ("256:1024:256", (256, 512, 768, 1024)),
     ("2^4:2^7", (16, 32, 64, 128)), ("1:3", (1, 2, 3)), ("1,10:30:10", (1, 10, 20, 30)), ("-1", -1), ("2^10", 1024),
     ("3:20:*3", (3, 9))],
)  # fmt: skip
def test_sweep_syntax(text: str, values: object) -> None:
    found = sweep.integers(text)
    assert found == values
    assert isinstance(found, sweep.Axis) == isinstance(values, tuple)


@pytest.mark.parametrize("text", ["", "x", "1:", "8:1", "1:8:*1", "1:8:0", "0:8:*2", "1:2:3:4", "1,,2", "1:9999999"])
def test_bad_sweeps_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--batch_size"):
        parsing.parse(["--routine", "rmsnorm", "--batch_size", text, "--hidden_size", "64"])


@pytest.mark.parametrize(("text", "values"), [("0.5", [0.5]), ("0,1", [0.0, 1.0]), ("0.25,0.5,1e0", [0.25, 0.5, 1.0])])
def test_real_numbers_are_swept(text: str, values: list[float]) -> None:
    args = parsing.parse(["--routine", "BlockSparseAttentionWrapper", "--density", text])
    assert [p.density for p in sweep.points(args)] == values


ATTENTION = "--routine BatchPrefillWithPagedKVCacheWrapper --num_qo_heads 8 --num_kv_heads 2"


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("mix=8192,32*1@8192", [(8192, 8192)] + [(1, 8192)] * 32),
        ("2*3@2^4,5", [(3, 16), (3, 16), (5, 5)]),
        ("7@7", [(7, 7)]),
    ],
)
def test_a_batch_of_unlike_requests(text: str, lengths: list[tuple[int, int]]) -> None:
    args = parsing.parse([*ATTENTION.split(), "--case", text])
    assert requests(args) == lengths
    again = parsing.parse(shlex.split(repro_command(args))[1:])
    assert vars(again) == vars(args)


def test_several_batches_are_a_sweep() -> None:
    args = parsing.parse([*ATTENTION.split(), "--case", "a=4,4", "b=16*1@64", "--page_size", "16,32"])
    found = [(p.case, p.page_size) for p in sweep.points(args)]
    assert sorted(found) == [("a=4,4", 16), ("a=4,4", 32), ("b=16*1@64", 16), ("b=16*1@64", 32)]


def test_lengths_without_a_case() -> None:
    args = parsing.parse(f"{ATTENTION} --batch_size 3 --s_qo 4 --s_kv 9".split())
    assert requests(args) == [(4, 9)] * 3
    args.random_actual_seq_len, args.batch_size = True, 500
    found = requests(args)
    assert found == requests(args), "the seed decides"
    assert {r.qo_len for r in found} == set(range(1, 5))
    assert all(r.qo_len <= r.kv_len <= 9 for r in found)
    assert {r.kv_len for r in found} == set(range(1, 10))
    args.s_kv = 4
    assert all(r.qo_len == r.kv_len for r in requests(args))


def test_points_are_the_product_or_in_step() -> None:
    line = "--routine rmsnorm --batch_size 1,2,3 --hidden_size 64,128,256 --input_dtype float16,bfloat16"
    assert len(list(sweep.points(parsing.parse(line.split())))) == 18
    step = parsing.parse(["--routine", "rmsnorm", "--batch_size", "1,2,3", "--hidden_size", "64,128,256", "--zip"])
    assert [(p.batch_size, p.hidden_size) for p in sweep.points(step)] == [(1, 64), (2, 128), (3, 256)]
    with pytest.raises(UsageError, match="--zip needs as many values"):
        list(sweep.points(parsing.parse((line + " --zip").split())))


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("--routine rmsnom", "did you mean 'rmsnorm'?"),
        ("--routine zzz", "`fi-bench list routines` shows all"),
        ("--batch_size 1", "--routine is required"),
        (f"{NORM} --s_kv 3", "--s_kv is a flag of attention"),
        (f"{NORM} --hiden_size 3", "did you mean 'hidden_size'?"),
        (f"{NORM} stray", "unknown argument 'stray'"),
        ("--routine rmsnorm --batch_size 1", "required: --hidden_size"),
        (f"{NORM} --input_dtype bf16", "'bf16' is not one of bfloat16"),
        (ATTENTION, "required: --s_kv (or --case)"),
        (f"{ATTENTION} --case 8@4", "must be a batch such as mix=8192,32*1@8192"),
        (f"{ATTENTION} --case 0*1@4", "must be a batch such as"),
        (f"{ATTENTION} --case a=", "must be a batch such as"),
        (f"{ATTENTION} --case 4 --s_kv 4 --batch_size 2", "leave out --batch_size, --s_kv"),
        (f"{NORM} --num_iters 0", "--num_iters must be `auto` or at least 1, got 0"),
        (f"{NORM} --num_iters many", "--num_iters"),
        (f"{NORM} --trials 0", "--trials must be at least 1"),
        (f"{NORM} --resume", "--resume needs --output_path"),
        (f"{NORM} --batch", "unknown argument"),
        ("--routine rmsnorm --batch_sise 8 --hidden_size 64", "'--batch_sise' for rmsnorm; did you mean 'batch_size'?"),
        ("--routine rmsnorm --batch-sise=8 --hidden_size 64", "did you mean 'batch_size'?"),
        ("--routine rmsnorm --batch_size 0 --hidden_size 64", "--batch_size must be at least 1, got 0"),
        ("--routine rmsnorm --batch_size 4,-3 --hidden_size 64", "--batch_size must be at least 1, got -3"),
        (f"{NORM} --eps nan", "--eps: 'nan' must be a finite number or a list"),
        (f"{NORM} --eps 1e-6,", "--eps: '1e-6,' must be a finite number or a list"),
        (f"{NORM} --timeout nan", "--timeout"),
        (f"{NORM} --timeout 0", "--timeout must be above 0"),
        (f"{NORM} --draw 0", "--draw must be at least 1"),
        ("--preset llama3-8b-decod", "did you mean 'llama3-8b-decode'?"),
        ("--preset llama3-8b-decode --routine bmm_fp8", "has no line for routine"),
        ("--testlist no_such_file.txt", "cannot be read"),
    ],
)
def test_bad_input_is_one_line(line: str, word: str) -> None:
    with pytest.raises(UsageError) as caught:
        parsing.read_lines(line.split())
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_parses(name: str) -> None:
    lines = parsing.read_lines(["--preset", name, "--num_iters", "3"])
    assert lines
    assert all(point.num_iters == 3 for line in lines for point in line.points)
    points = [point for line in lines for point in line.points]
    heads = [
        p.num_qo_heads / p.num_kv_heads for p in points if hasattr(p, "num_qo_heads") and hasattr(p, "num_kv_heads")
    ]
    assert all(ratio >= 1 and ratio.is_integer() for ratio in heads)


def test_a_preset_can_be_narrowed() -> None:
    (line,) = parsing.read_lines(["--preset", "llama3-70b-tp8-decode", "--routine", "silu_and_mul"])
    assert {point.hidden_size for point in line.points} == {28672 // 8}


def test_testlist_keeps_bad_lines_with_their_place(tmp_path: Path) -> None:
    file = tmp_path / "list.txt"
    file.write_text(
        f'# comment\n\n{NORM} --case_tag "A B"\n--routine nope\n{NORM} --case_tag \'open\n  {NORM} --num_iters 7\n'
    )
    lines = parsing.read_lines(["--testlist", str(file), "--output_path", "out.csv", "--num_iters", "3"])
    assert [line.where for line in lines] == [f"list.txt:{n}" for n in (3, 4, 5, 6)]
    good = [line.points[0] for line in lines if not line.error]
    assert [(p.case_tag, p.num_iters, p.output_path) for p in good] == [("A B", 3, "out.csv"), (None, 7, "out.csv")]
    assert "unknown routine 'nope'" in str(lines[1].error)
    assert "quotation" in str(lines[2].error)


@pytest.mark.parametrize("line", SEED_LINES)
def test_the_repro_command_repeats_the_case(line: str) -> None:
    args = parsing.parse(shlex.split(line))
    args.case_tag = "it's, a tag"
    again = parsing.parse(shlex.split(repro_command(args))[1:])
    silent = {"verbose", "generate_repro_command"}
    assert {k: v for k, v in vars(again).items() if k not in silent} == {
        k: v for k, v in vars(args).items() if k not in silent
    }


def test_every_routine_has_one_family_and_a_parser() -> None:
    assert sum(len(f.routines) for f in catalog.FAMILIES.values()) == len(catalog.FAMILY_OF)
    for family in catalog.FAMILIES.values():
        text = parsing.family_parser(family, family.routines[0]).format_help()
        for flag in family.flags:
            assert f"--{flag.name}" in text


def test_measured_cases_have_their_shapes() -> None:
    """The names that performance notes use, with the shapes that they mean."""
    cases = {
        point.case_tag: point
        for name in ("decode", "prefill")
        for line in parsing.read_lines(["--preset", name])
        for point in line.points
    }
    assert list(cases) == [*(f"D{i}" for i in range(1, 10)), *(f"P{i}" for i in range(1, 6)), "R1", "R2"]
    heavy = cases["D5"]
    assert (heavy.batch_size, heavy.s_kv, heavy.num_qo_heads, heavy.num_kv_heads) == (128, 8192, 64, 8)
    varied = sweep.requests(cases["D7"].case)
    assert len(varied) == 64
    assert all(qo == 1 and 1 <= kv <= 8192 for qo, kv in varied)
    latent = cases["R2"]
    assert (latent.head_dim_qk, latent.head_dim_vo, latent.num_kv_heads) == (192, 128, 128)
    assert latent.routine == "BatchPrefillWithRaggedKVCacheWrapper"


def test_products_are_drawn_from_projections_of_models() -> None:
    """The seed decides; rows are as often between 2 and 4 as between 2048 and 4096."""
    lines = parsing.read_lines(["--preset", "gemm-grid", "--draw", "300"])
    shapes = {(p.n, p.k) for line in lines for p in line.points}
    assert {(576, 5120), (5120, 1024), (5120, 288), (1792, 5120), (25600, 6144), (4096, 1280)} <= shapes
    assert {(6144, 4096), (8192, 28672), (1280, 8192)} <= shapes, "of llama3, whole and on eight ranks"

    def drawn(seed: int) -> list[argparse.Namespace]:
        args = argparse.Namespace(draw=300, random_seed=seed)
        return [p for line in schedule.drawn_lines(lines, args) for p in line.points]

    first, words = drawn(7), [vars(p) for p in drawn(7)]
    assert [vars(p) for p in first] == words != [vars(p) for p in drawn(8)]
    dense = ("bf16", "fp8_weights", "one_scale", "rows", "blocks")
    groups = {f"{kind}_groups_{sizes}" for kind in ("bf16", "blocks") for sizes in ("equal", "random")}
    assert Counter(p.case_tag for p in first) == dict.fromkeys((*dense, *groups), 300)
    assert all(p.random_groups == p.case_tag.endswith("random") and p.rowwise == (p.case_tag == "rows") for p in first)
    rows = [p.m for p in first if p.case_tag in dense]
    assert 0.1 < sum(512 <= m < 2048 for m in rows) / len(rows) < 0.3


def test_the_decode_grid_keeps_to_its_bytes() -> None:
    points = [point for line in parsing.read_lines(["--preset", "decode-grid-large"]) for point in line.points]
    for p in points:
        width = 1 if p.kv_dtype == "fp8_e4m3" else 2
        assert 8e9 < p.batch_size * p.s_kv * p.num_kv_heads * 2 * 128 * width <= 60e9
    assert {p.page_size for p in points} == {1, 16, 64}
