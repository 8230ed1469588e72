"""Calls with drawn sizes, dtypes, layouts and values, whose numbers are judged by references in fp64.

Two kinds of them: each routine of fi-bench by the reference of its case, and each described function by that of its
description. Both are written without the kernels; tests/bench and tests/families run them with usual sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch

from families.test_descriptions import DESCRIBED, check
from fi_bench import backends, cases, catalog, parsing, refcheck
from fi_bench.case import Case
from fi_bench.errors import SkipError
from fi_bench.runner import fresh
from fi_core.observe.trace import Described
from fi_core.runtime.errors import LibraryError, UnsupportedError

Record = dict[str, Any]
# The flags of each family and what is drawn for them; `options` are drawn as a whole.
SIZES: dict[str, dict[str, tuple[Any, ...]]] = {
    "gemm": {
        "m": (1, 5, 17, 66), "n": (64, 128, 192), "k": (128, 256, 384), "batch_size": (1, 3), "group_size": (1, 4),
    },
    "moe": {
        "num_tokens": (1, 2, 7, 40), "hidden_size": (128, 256), "intermediate_size": (128, 256), "num_experts": (4, 8),
        "top_k": (1, 2, 4),
    },
    "moe_routing": {"num_tokens": (1, 9, 33), "num_experts": (16, 64), "top_k": (1, 3, 8)},
    "norm": {"batch_size": (1, 3, 20), "hidden_size": (64, 128, 1000, 4096)},
    "activation": {"batch_size": (1, 3, 20), "hidden_size": (32, 72, 1024)},
    "rope": {
        "batch_size": (1, 3), "seq_len": (1, 5, 17), "num_qo_heads": (2, 4), "num_kv_heads": (1, 2),
        "head_dim": (16, 64, 128), "page_size": (1, 4),
    },
    "page": {
        "batch_size": (1, 3), "s_qo": (1, 5), "s_kv": (5, 11, 40), "num_kv_heads": (1, 2), "head_dim": (16, 64, 128),
        "page_size": (1, 4, 16),
    },
    "cascade": {"batch_size": (1, 5, 40), "num_qo_heads": (1, 4), "head_dim": (16, 64, 128), "num_states": (1, 3, 8)},
    "quantization": {"m": (1, 5, 40), "k": (32, 64, 160, 1024), "batch_size": (1, 2)},
    "topk_varlen": {"batch_size": (1, 3), "max_seq_len": (200, 2000), "top_k": (1, 70)},
    "topk": {"batch_size": (1, 3, 9), "vocab_size": (300, 5000), "max_len": (200,), "top_k": (1, 70, 256)},
    "attention": {
        "batch_size": (1, 3), "s_qo": (1, 7, 19), "s_kv": (19, 40, 130), "num_qo_heads": (4, 8), "num_kv_heads": (2, 4),
        "head_dim_qk": (16, 64, 128), "page_size": (1, 4, 16),
    },
    "gdn": {
        "batch_size": (1, 2), "seq_len": (1, 2), "s_qo": (1, 70, 130), "num_q_heads": (2,), "num_k_heads": (2,),
        "num_v_heads": (2, 4), "head_size": (16, 64, 128),
    },
    "kda": {"batch_size": (1, 2), "s_qo": (1, 70, 130), "num_q_heads": (2,), "head_size": (16, 128)},
    "mhc": {"num_tokens": (1, 5, 30), "hidden_size": (264, 1024)},
    "mamba": {"batch_size": (1, 3), "nheads": (4, 8), "dim": (16, 64), "dstate": (16, 32, 128), "ngroups": (1, 2)},
    "mamba_prefill": {
        "batch_size": (1, 2), "seq_len": (1, 70, 130), "nheads": (2, 4), "dim": (32, 64), "dstate": (16, 64, 128),
        "ngroups": (1, 2),
    },
    "mamba_ring": {
        "batch_size": (1, 3), "seq_len": (1, 4), "ring": (12, 16), "nheads": (2, 4), "dim": (32, 64),
        "dstate": (64, 128), "ngroups": (1, 2),
    },
    "indexer": {
        "batch_size": (1, 3), "next_n": (1, 2, 3), "kv_len": (1, 70, 300), "page_size": (16, 48, 64),
        "num_rows": (1, 5, 9), "num_keys": (1, 70, 300), "heads": (8, 32, 64), "dim": (32, 64, 128),
        "top_k": (1, 40, 400),
    },
    "flash_mla": {
        "batch_size": (1, 3), "qo_len": (1, 2, 4), "kv_len": (1, 70, 300), "page_size": (1, 16, 48),
        "num_rows": (1, 5, 9), "num_keys": (1, 70, 300), "num_heads": (1, 16, 20), "top_k": (1, 40, 300),
        "num_tokens": (1, 20),
    },
    "lora": {
        "num_tokens": (1, 9, 70), "num_loras": (1, 3), "rank": (8, 24, 64), "in_features": (64, 136),
        "out_features": (8, 72),
    },
    "causal_conv1d": {"batch_size": (1, 3), "seq_len": (1, 7, 40), "dim": (8, 64, 200), "width": (2, 3, 4)},
    "sampling": {"batch_size": (1, 3, 9), "vocab_size": (7, 301, 5000), "top_k": (1, 7)},
    "allreduce_comm": {"num_tokens": (1, 5, 30), "hidden_size": (128, 1024)},
    "moe_comm": {"num_tokens": (1, 9, 30), "hidden_size": (128, 512), "num_experts": (8, 16), "top_k": (1, 3)},
}  # fmt: skip
OPTIONS: dict[str, tuple[str, ...]] = {
    "gemm": ("", "--scale_major_mode K", "--out_dtype float16"),
    "moe": ("", "--routing_skew 1.5"),
    "moe_routing": ("", "--routing_skew 1", "--n_group 4 --topk_group 2"),
    "norm": ("", "--input_dtype float16", "--out_dtype fp8_e5m2 --scale 0.02"),
    "activation": ("", "--input_dtype float16"),
    "rope": ("", "--interleave", "--rotary_dim 8", "--kv_layout HND", "--input_dtype bfloat16"),
    "page": ("", "--kv_layout HND", "--kv_dtype fp8_e4m3"),
    "cascade": ("", "--input_dtype float16"),
    "topk": ("", "--input_dtype bfloat16", "--sorted", "--input_dtype float16"),
    "attention": (
        "", "--causal", "--kv_layout HND", "--causal --window_left 4", "--q_dtype float16 --kv_dtype float16",
        "--random_actual_seq_len", "--kv_dtype fp8_e4m3", "--logits_soft_cap 20",
    ),
    "gdn": ("", "--input_dtype float16"),
    "mamba": ("", "--has_z --dt_softplus --state_dtype float32"),
    "mamba_prefill": ("", "--has_z --dt_softplus", "--input_dtype float16 --state_dtype bfloat16"),
    "mamba_ring": ("", "--input_dtype float16", "--state_dtype bfloat16"),
    "indexer": ("",),
    "flash_mla": ("", "--form rows", "--form packed --extra 9"),
    "lora": ("", "--input_dtype float16"),
    "causal_conv1d": ("", "--input_dtype float16", "--input_dtype float32"),
    "sampling": ("", "--temperature 0.5", "--input_dtype bfloat16", "--filter_apply_order joint"),
    "allreduce_comm": ("", "--pattern ar_residual_rmsnorm"),
    "moe_comm": ("", "--input_dtype float16"),
}  # fmt: skip
CUTLASS = ("base", "fp8", "nvfp4", "fp8_block_scale", "mxfp4")
FORMATS = {  # of weights of experts
    "cutlass_fused_moe": tuple(f"--cutlass_variant {name}" for name in CUTLASS),
    "trtllm_fp4_block_scale_moe": tuple(f"--fp4_mode {mode}" for mode in ("nvfp4", "mxfp4_mxfp8", "mxfp4_bf16")),
}  # fmt: skip


@functools.cache
def routines() -> list[Case]:
    """Those that can be checked: the sizes of every family with a case are above."""
    return [found for family in SIZES for name in catalog.FAMILIES[family].routines if (found := cases.find(name))]


@functools.cache
def descriptions() -> list[Described]:
    return [found for found in DESCRIBED if found.template.reference is not None]


def references() -> set[str]:
    """The ops that a routine or a description judges."""
    by_case = {op for found in routines() for op in (found.op, *found.also)}
    return by_case | {op for found in descriptions() for op in found.template.ops}


def names() -> list[str]:
    """What is drawn from; a description with the axes of its samples counts once."""
    return [*(found.routine for found in routines()), *(f"call {n}" for n in range(len(descriptions())))]


def run(number: int, announce: Callable[[Record], None] = lambda record: None) -> Record:
    """The draw with this number: a record as those of other cases, whose outcome is right, wrong answer or named."""
    every = names()
    return draw(every[number % len(every)], number // len(every), announce=announce)


def draw(name: str, seed: int, kind: str = "cpu", announce: Callable[[Record], None] = lambda record: None) -> Record:
    rng = Random(f"{name}:{seed}")
    source: Callable[[str, Random, int, str], tuple[str, Callable[[], str]]]
    source = _described if name.startswith("call ") else _routine
    change, judge = source(name, rng, seed, kind)
    record = {"scenario": name, "function": name, "change": change}
    announce(record)
    try:
        wrong = judge()
    except (SkipError, UnsupportedError, LibraryError, ValueError) as refusal:  # of sizes that do not go together
        return record | {"outcome": "named", "error": type(refusal).__name__, "text": f"{refusal}"[:300]}
    return record | ({"outcome": "wrong answer", "text": wrong[:300]} if wrong else {"outcome": "right"})


def _flags(found: Case, rng: Random) -> Iterator[str]:
    yield f"--routine {found.routine} --random_seed {rng.randrange(1000)}"
    for flag, choices in SIZES[found.family].items():
        yield f"--{flag} {rng.choice(choices)}"
    yield rng.choice(OPTIONS.get(found.family, ("",)))
    yield rng.choice(FORMATS.get(found.routine, ("",)))


def _routine(name: str, rng: Random, seed: int, kind: str) -> tuple[str, Callable[[], str]]:
    found = cases.find(name)
    assert found is not None
    line = " ".join(" ".join(_flags(found, rng)).split())

    def judge() -> str:
        p = parsing.parse(line.split())
        backend = "cpu" if kind == "cpu" and "cpu" in backends.implementations(found) else "auto"
        if found.unsupported is not None and (reason := found.unsupported(backend, p)):
            raise SkipError(reason)
        x = found.make(p, torch.device(kind), torch.Generator(kind).manual_seed(seed))
        runner = backends.bind(backend, found, kind)
        mine = fresh(x)
        refcheck.poison(mine, found.poison)
        with runner.context():
            outputs = runner.outputs(mine, runner.prepare(mine)(mine))
        judged = refcheck.check(outputs, found.reference(fresh(x)), found.tolerances(x, outputs))
        return "; ".join(str(difference) for difference in judged if not difference.ok)

    return line, judge


def _described(name: str, rng: Random, seed: int, kind: str) -> tuple[str, Callable[[], str]]:
    found = descriptions()[int(name.split()[1])]
    sizes = dict(rng.choice(found.template.samples or ({},)))
    nasty = rng.random() < 0.5

    def judge() -> str:
        arguments = found.template.sample(device=kind, generator=seed, nasty=nasty, **sizes)
        want = found.template.expected(arguments)
        got = found.template.results(arguments, found.call(arguments))
        try:
            check(found.template, got, found.template.where_written(arguments, got, want))
        except AssertionError as error:
            return str(error) or "differs"
        return ""

    return f"call {found.name} {sizes} seed={seed} nasty={nasty}", judge
