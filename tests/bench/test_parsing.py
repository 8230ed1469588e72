"""Flags, sweeps, presets, test lists and what is said about bad ones."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from fi_bench import catalog, parsing, shapes, sweep
from fi_bench.errors import UsageError
from fi_bench.runner import repro_command

NORM = "--routine rmsnorm --batch_size 4 --hidden_size 64"
SEED_LINES = [
    "--routine BatchDecodeWithPagedKVCacheWrapper --backends fa2 fa2_tc cudnn --page_size 16 --batch_size 32 --s_qo 1 "
    "--s_kv 2048 --num_qo_heads 32 --num_kv_heads 8 --head_dim_qk 128 --head_dim_vo 128 --q_dtype bfloat16 "
    "--kv_dtype bfloat16 --num_iters 30 --dry_run_iters 5 --refcheck -vv",
    "--routine bmm_fp8 --backends cudnn cublas cutlass --batch_size 256 --m 1 --n 1024 --k 7168 --input_dtype fp8_e4m3 "
    "--mat2_dtype fp8_e4m3 --out_dtype bfloat16 --refcheck -vv --generate_repro_command",
    "--routine BatchPrefillWithRaggedKVCacheWrapper --backends fa2 fa3 cudnn cutlass --batch_size 16 --s_qo 1024 "
    "--s_kv 1024 --num_qo_heads 128 --num_kv_heads 128 --head_dim_qk 192 --head_dim_vo 128 --causal "
    "--random_actual_seq_len --q_dtype bfloat16 --kv_dtype bfloat16 --refcheck -vv",
    "--routine trtllm_fp8_block_scale_moe --backends trtllm --num_tokens 1024 --hidden_size 5120 "
    "--intermediate_size 13824 --num_experts 256 --top_k 8 --n_group 8 --topk_group 1 --routing_method deepseek_v3 "
    "--routed_scaling_factor 2.5 --use_routing_bias -vv",
    "--routine group_gemm_fp8_nt_groupwise --m 8192 --n 4096 --k 16384 --mma_sm 2 --group_size 2 --no_cuda_graph "
    "--scale_major_mode K --refcheck -vv",
    "--routine BatchMLAPagedAttentionWrapper --backends fa2 fa3 --page_size 32 --batch_size 16 --s_qo 1 --s_kv 1024 "
    "--num_qo_heads 128 --num_kv_heads 128 --head_dim_ckv 512 --head_dim_kpe 64 --refcheck",
]


@pytest.mark.parametrize("line", SEED_LINES)
def test_the_seeds_lines_parse(line: str) -> None:
    args = parsing.parse(shlex.split(line))
    said = shlex.split(line)
    assert args.routine == said[1]
    for i, word in enumerate(said):
        if word.startswith("--") and word != "--backends" and i + 1 < len(said) and not said[i + 1].startswith("-"):
            assert str(getattr(args, word[2:])) == said[i + 1]
    assert args.verbose == (2 if "-vv" in said else 0)


def test_defaults_are_those_of_the_seeds() -> None:
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
        (f"{NORM} --num_iters 0", "--num_iters must be `auto` or at least 1, got 0"),
        (f"{NORM} --num_iters many", "--num_iters"),
        (f"{NORM} --trials 0", "--trials must be at least 1"),
        (f"{NORM} --resume", "--resume needs --output_path"),
        (f"{NORM} --batch", "unknown argument"),
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


@pytest.mark.parametrize("name", shapes.names())
def test_every_preset_parses(name: str) -> None:
    lines = parsing.read_lines(["--preset", name, "--num_iters", "3"])
    assert lines
    assert all(point.num_iters == 3 for line in lines for point in line.points)
    heads = [
        point.num_qo_heads / point.num_kv_heads for line in lines for point in line.points if "num_qo" in str(point)
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
