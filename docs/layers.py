"""Tables of experts, linear attention, communication, host time and engines; see `results.TABLES`."""

from __future__ import annotations

import re
from typing import Any

from records import Result, beside, comparison, number, rows, table

COLLECTIVES = {  # by the name of the operation in the files of comm
    "all_reduce": "all-reduce",
    "all_reduce + add + rmsnorm": "all-reduce, residual, RMSNorm",
    "finalize of 8 experts + all_reduce + add + rmsnorm": "sum of 8 experts and a shared one, all-reduce, RMSNorm",
    "reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "reduce_scatter + add + rmsnorm + all_gather": "reduce-scatter, add, RMSNorm, all-gather",
    "all_to_all": "all-to-all",
    "moe dispatch + combine": "MoE dispatch and combine, tokens of each rank",
}
SYMMETRIC = "torch symmetric memory"


def comm_table(name: str) -> str:
    """One table an operation; of symmetric memory the better one of its one-shot and two-shot kernels."""
    groups: dict[str, list[Result]] = {}
    for result in beside(name):
        operation, _, shape = result.case.rpartition(" ")
        peers = {name: us for name, us in result.peers.items() if not name.startswith("symmetric")}
        shots = [us for name, us in result.peers.items() if name not in peers]
        if shots:
            peers[SYMMETRIC] = min(shots)
        groups.setdefault(operation, []).append(Result(shape.replace("x", " x "), result.fi, peers))
    return "\n\n".join(comparison(groups[operation], f"{name}, bf16") for operation, name in COLLECTIVES.items())


def experts_table() -> str:
    """`moe_experts` alone, with the best tile of each case, and how much of the time the bytes of weights need."""
    found: dict[str, dict[int, str]] = {}
    for row in rows("moe-experts"):
        best = min(us for us in row["us"].values() if us)
        cells = found.setdefault(f"{row['model']} {row['dtype']}", {})
        cells[row["tokens"]] = f"{number(best)} ({row['floor_us'] / best:.0%})".replace("%", " %")
    sizes = sorted({tokens for cells in found.values() for tokens in cells})
    lines = [(name, *(cells.get(tokens, "") for tokens in sizes)) for name, cells in found.items()]
    return table(("us (floor / time)", *(f"T{tokens}" for tokens in sizes)), lines)


def few_tokens_table() -> str:
    """A layer in one launch, and in two."""
    lines = []
    for row in rows("moe-few-tokens"):
        one, two = row["us"]["moe_few_tokens"], row["us"]["moe_sort and moe_experts"]
        ranks = f", one of {row['ranks']} ranks, {row['slots_here']} slots" if row["ranks"] > 1 else ""
        lines.append(
            (f"{row['model']} {row['dtype']}{ranks}", row["tokens"], number(one), number(two), f"{one / two:.2f}")
        )
    return table(("layer", "tokens", "one launch us", "two launches us", "one / two"), lines)


def linear_prefill_table() -> str:
    names = {
        "b1 T4096": "4096 tokens",
        "b1 T16384": "16384 tokens",
        "varlen 12 seqs T16384": "12 sequences of 16384 tokens together",
        "b8 T2048": "8 x 2048 tokens",
    }
    found = [
        r._replace(case=names[r.case.removeprefix("gdn prefill ")]) for r in beside("linear-attention", "gdn prefill")
    ]
    return comparison(found, "16/32 key / value heads")


def linear_decode_table() -> str:
    found = []
    for result in beside("linear-attention", "gdn decode|ssu"):
        kind, rest = ("GDN", result.case[11:]) if result.case.startswith("gdn") else ("Mamba-2", result.case[4:])
        heads = re.search(r" nh(\d+)", rest)
        name = f"{kind}, {heads[1] if heads else 32} heads, batch {rest.split()[0][1:]}"
        found.append(result._replace(case=name + (", bf16 states" if "bf16" in rest else "")))
    return comparison(found, "decode")


def channels_table() -> str:
    """Prefill with a gate for each head and for each channel, the fastest of the runs."""
    found = rows("linear-attention-channels")
    heads = {row["tokens"]: row["us"]["heads 16/32"] for row in found if "tokens" in row}
    best = {row["case"]: min(row["new_us"]) for row in found if "case" in row}
    lines = []
    for tokens in heads:
        one, each = min(heads[tokens], best.get(f"{tokens} heads", heads[tokens])), best[f"{tokens} channels"]
        lines.append((f"{tokens.replace('x', ' x ')} tokens", number(one), number(each), f"{each / one:.2f}"))
    return table(("16/32 key / value heads", "a gate for each head us", "for each channel us", "ratio"), lines)


CALLS = {  # of h200-host-time.jsonl
    "rmsnorm out": "`rmsnorm` with `out`",
    "mm_bf16 out m8": "`mm_bf16` with `out`, 8 rows",
    "mm_bf16 m8": "`mm_bf16`, 8 rows",
    "mm_fp8 out m8": "`mm_fp8` with `out`, 8 rows",
    "gemm_fp8_nt_groupwise out m8": "`gemm_fp8_nt_groupwise` with `out`, 8 rows",
    "gemm_fp8_nt_groupwise MN m8": '`gemm_fp8_nt_groupwise`, scales "MN", 8 rows',
    "chunk_gated_delta_rule out": "`chunk_gated_delta_rule` with `output` and `output_state`",
    "chunk_gated_delta_rule": "`chunk_gated_delta_rule`",
    "mla run out": "MLA `run` with `out`",
    "mla run": "MLA `run`",
    "mla run lse": "MLA `run` with `return_lse`",
    "decode run": "decode `run`",
    "decode run out": "decode `run` with `out`",
    "decode run pair out": "decode `run`, K and V apart, with `out`",
    "prefill run": "prefill `run`",
    "prefill run out": "prefill `run` with `out`",
    "prefill run pair out": "prefill `run`, K and V apart, with `out`",
}


def host_time_table() -> str:
    """The best of the rounds of loops, with and without autograd's record."""
    best = {(row["call"], row["mode"]): min(row["loop_new_us"]) for row in rows("host-time") if "call" in row}
    lines = [(name, f"{best[call, 'infer']:.1f}", f"{best[call, 'grad']:.1f}") for call, name in CALLS.items()]
    return table(("call", "`torch.inference_mode()` us", "autograd records us"), lines)


def launch_layer_table() -> str:
    """Host and GPU time of calls before and after requests were made in C++; the best of the rounds."""
    lines = []
    for row in (*rows("launch-layer"), *rows("launch-layer", "h100")):
        before, now = min(row["before_us"]), min(row["us"])
        lines.append((row["call"], row["time"], number(before), number(now), f"{now / before:.2f}"))
    return table(("call", "time", "before us", "us", "ratio"), lines)


def engines_table() -> str:
    """vLLM with each attention: tokens/s of 64 requests, and the median time from one decode step to the next."""
    lines: dict[str, dict[object, str]] = {}
    for row in rows("vllm"):
        if "engine" in row:
            name = row["engine"].replace("FI_VLLM_LAYERS=1", "`FI_VLLM_LAYERS=1`")
            cells = lines.setdefault(name, {})
            cells[row["batch"]], cells["graph"] = f"{row['step_ms']:.2f}", f"{row['graph_ms']:.2f}"
            cells["tokens"] = f"{row.get('tok_s', 0):,}"
    head = ("attention", "tokens/s", "step ms, batch 1", "batch 16", "batch 64", "its CUDA graph ms")
    return table(head, [(name, *(x[key] for key in ("tokens", 1, 16, 64, "graph"))) for name, x in lines.items()])


def stage_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a row of an engine was timed with, whatever its kernels."""
    return tuple(map(row.get, ("model", "sampling", "traced", "batch")))


PEERS = {"own": "over vLLM's own kernels", "FlashInfer": "over FlashInfer"}


def stages_table() -> str:
    """Models in an engine: fi's plugin over the engine's own kernels, FlashAttention-3 and Triton's experts, and over
    FlashInfer where a run had it.
    """
    found = [row for row in rows("vllm") if "model" in row]
    by = {(row["kernels"], stage_of(row)): row for row in found}
    peers = [name for name in PEERS if any(row["kernels"] == name for row in found)]

    def cells(row: dict[str, Any], name: str, peers: list[str]) -> list[str]:
        """The plugin's number, and what it gains over each peer."""
        if name not in row:
            return [""] * (1 + len(peers))
        faster = 1 if name == "tok_s" else -1
        theirs = [by.get((peer, stage_of(row)), {}).get(name) for peer in peers]
        text = f"{row[name]:,}" if name == "tok_s" else f"{row[name]:.2f} ms"
        return [text, *("" if x is None else f"{(row[name] / x) ** faster:.2f}x" for x in theirs)]

    lines = []
    for row in (row for row in found if row["kernels"] == "plugin"):
        if "batch" in row:
            stage, name = f"a decode step, batch {row['batch']}", "step_ms"
        elif "busy_ms" in row:
            stage, name = "a step of 8,192 tokens with prompts, busy", "busy_ms"
        else:
            stage, name = f"tokens/s, {row['sampling']}", "tok_s"
        first = f"vLLM {row['vllm']}", row["model"], stage
        lines.append((*first, *cells(row, name, peers), *cells(row, "graph_ms", ["own"])))
    gains = [PEERS[name] for name in peers]
    head = ("engine", "model", "stage", "plugin with `FI_VLLM_LAYERS=1`", *gains, "its CUDA graph", PEERS["own"])
    return table(head, lines, left=3)
