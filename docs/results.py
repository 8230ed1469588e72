"""Makes the tables of the README and of docs from benchmarks/results/*.jsonl; that of promises needs fi-core."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import attention
import ceilings
import costs
import floors
import layers
import products
import support
from records import ROOT, Result, beside, by_case, comparison, geometric, number, rows, table

SAME = 0.02  # times closer than this are called equal: one kernel differs by as much between two machines


class Family(NamedTuple):
    """One row of the README's table."""

    name: str
    peers: str
    results: list[Result]


FA2, XQA, FA3 = "FlashInfer fa2", "FlashInfer xqa", "FlashAttention-3"
_DECODE_PEERS = {"flashinfer fa2_tc": FA2, "flashinfer xqa": XQA, "fa3": FA3, "FA3": FA3}
DECODE_CASES = {
    "b1kv1k": "b1 kv1k 32/8",
    "b1kv1k_mqa": "b1 kv1k 8/1",
    "b1kv1k_fp8": "b1 kv1k 32/8 fp8",
    "D3": "b1 kv8k 32/8",
    "b1kv32k_fp8": "b1 kv32k 32/8 fp8",
    "D8": "b2 kv128k 32/8",
    "b4": "b4 kv4k 32/8",
    "D1": "b16 kv1k 32/8",
    "D4": "b16 kv8k 32/8",
    "page1": "b16 kv8k 32/8, page 1",
    "D2": "b64 kv1k 32/8",
    "D7": "b64 kv 1..8k 32/8",
    "mqa": "b64 kv8k 8/1",
    "D6": "b64 kv8k 32/32",
    "D9": "b64 kv8k 32/8 fp8",
    "D5": "b128 kv8k 64/8",
    "b256kv512": "b256 kv512 32/8",
}


def _named(found: list[Result], names: dict[str, str]) -> list[Result]:
    by_case = {result.case: result for result in found}
    assert set(by_case) == set(names), sorted(set(by_case) ^ set(names))
    return [by_case[case]._replace(case=label) for case, label in names.items()]


def decode() -> list[Result]:
    return _named(by_case(rows("decode"), "auto", _DECODE_PEERS), DECODE_CASES)


def decode_drawn() -> list[Result]:
    """Cases drawn at random: caches up to 2.2 GB, then those of 2.2 to 18 GB."""
    return by_case(rows("decode-grid"), "auto", _DECODE_PEERS) + by_case(rows("decode-large"), "auto", _DECODE_PEERS)


PREFILL_CASES = {
    "P1": "paged, 16 x 1k",
    "P2": "paged, 4 x 4k",
    "P3": "paged, 1 x 16k",
    "P4": "paged, 1 x 512",
    "P5": "paged, chunks 8 x 512 of 8k",
    "R1": "ragged, 1 x 16k",
    "R2": "ragged, 4 x 4k, 128 heads 192/128",
    "short": "ragged, 128 lengths up to 1k",
}
FP8_CASES = {"F1": "e4m3 paged, 1 x 8k", "F2": "e4m3 paged, 1 x 16k", "F3": "e4m3 ragged, 1 x 16k"}
MMA_CASES = {
    **{case: PREFILL_CASES[case] for case in ("P1", "P3", "P4", "P5", "R1", "R2", "short")},
    "P1 pages of 1": "paged, 16 x 1k, page 1",
    "8k 32/32": "paged, 1 x 8k, 32/32 heads",
}


def prefill() -> list[Result]:
    found = [row for row in rows("prefill") if "run" not in row]
    peers = {"flashinfer fa3": "FlashInfer fa3", "flash_attention_3": FA3}
    return _named(by_case(found, "fa3", peers), PREFILL_CASES)


def prefill_fp8() -> list[Result]:
    found = [row for row in rows("prefill-fp8") if "who" in row and "form" not in row]
    return _named(by_case(found, "fa3", {"flash_attention_3": FA3}), FP8_CASES)


def prefill_mma() -> list[Result]:
    found = [row for row in rows("prefill-fa2") if row.get("form") == "now"]
    return _named(by_case(found, "fa2", {"flashinfer fa2": FA2}), MMA_CASES)


def _beside(name: str, peer: str) -> list[Result]:
    """Files whose rows hold all sides of a case."""
    found = []
    for row in rows(name):
        fi, other = row.get("fi_core"), row.get("flashinfer")
        fi, other = (side["us"] if isinstance(side, dict) and "us" in side else side for side in (fi, other))
        if isinstance(fi, float) and isinstance(other, float):
            found.append(Result(row["case"], fi, {peer: other}))
    return found


def sampling() -> list[Result]:
    return _beside("sampling", "FlashInfer")


def elementwise() -> list[Result]:
    return _beside("elementwise-1", "FlashInfer")


def topk() -> list[Result]:
    return [Result(row["case"], row["fi_core"], {"torch.topk": row["torch"]}) for row in rows("topk")]


def custom_attention() -> list[Result]:
    """Each variant; its "peer" is the built-in kernel of the same case."""
    found = [row for row in rows("custom-attention") if row["step"] == "three" and row["tree"] == "after"]
    built_in = {row["case"]: row["us"] for row in found if row["variant"] == "built in"}
    return [
        Result(f"{row['case']}, {row['variant']}", row["us"], {"built in": built_in[row["case"]]})
        for row in found
        if row["variant"] != "built in"
    ]


def families() -> list[Family]:
    small = elementwise()

    def of(pattern: str) -> list[Result]:
        return [result for result in small if re.match(pattern, result.case)]

    return [
        Family("decode attention", "FlashInfer, FlashAttention-3", decode_drawn()),
        Family("prefill attention", "FlashInfer, FlashAttention-3", prefill() + prefill_fp8()),
        Family("prefill, `mma.sync` kernels", "FlashInfer", prefill_mma()),
        Family("sampling", "FlashInfer", sampling()),
        Family("top-k", "torch", topk()),
        Family("norm", "FlashInfer", of(".*norm")),
        Family("activation", "FlashInfer", of("(silu|gelu)")),
        Family("rope", "FlashInfer", of(".*rope")),
        Family("KV append, merge", "FlashInfer", of("append|merge")),
        Family("MLA", "FlashInfer, FlashMLA", beside("mla")),
        Family("gemm", "cuBLAS, CUTLASS, DeepGEMM, FlashInfer", beside("gemm")),
        Family("mixture of experts", "vLLM Triton, DeepGEMM, FlashInfer", beside("moe")),
        Family("linear attention, prefill", "FlashInfer, fla, vLLM", beside("linear-attention", "gdn prefill")),
        Family("linear attention, decode", "fla, vLLM, FlashInfer", beside("linear-attention", "gdn decode|ssu")),
        Family("communication, 2 GPUs", "NCCL, torch symmetric memory", beside("comm")),
        Family("communication, 4 GPUs", "NCCL, torch symmetric memory", beside("comm-4")),
    ]


def cpu() -> list[Family]:
    """All ops that torch has, too, on one core and on two."""
    found: dict[int, list[Result]] = {1: [], 2: []}
    for row in rows("beside-torch", "zen5"):
        found[row["threads"]].append(Result(f"{row['routine']} {row['case']}", row["fi"], {"torch": row["torch"]}))
    return [Family(f"CPU, every op, {words}", "torch", found[n]) for n, words in ((1, "one core"), (2, "two cores"))]


def summary() -> str:
    """The README's table: one row a family."""
    lines = []
    for family in (*families(), *cpu()):
        found = family.results
        slower = sum(result.speedup < 1 / (1 + SAME) for result in found)
        lowest, highest = min(r.speedup for r in found), max(r.speedup for r in found)
        lines.append(
            (
                family.name,
                family.peers,
                len(found),
                f"**{geometric(found):.2f}x**",
                f"{lowest:.2f}x .. {highest:.2f}x",
                slower,
            )
        )
    return table(("family", "measured beside", "cases", "speedup", "worst .. best case", "slower by > 2 %"), lines, 2)


def drawn() -> str:
    """The cases drawn at random, by data type and page size."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in decode_drawn():
        _, _, _, dtype, _, page = result.case.split()
        groups.setdefault((dtype, page), []).append(result)
    lines = [
        (
            f"{dtype}, page {page}",
            len(found),
            f"**{geometric(found):.2f}x**",
            f"{min(r.speedup for r in found):.2f}x .. {max(r.speedup for r in found):.2f}x",
            sum(r.speedup < 1 / (1 + SAME) for r in found),
        )
        for (dtype, page), found in sorted(groups.items(), key=lambda item: (item[0][0], int(item[0][1])))
    ]
    return table(("KV cache", "cases", "speedup", "worst .. best case", "slower by > 2 %"), lines)


def topk_table() -> str:
    """Of the 72 shapes those with k 256 and 2048 over 131072 elements."""
    lines = []
    for row in rows("topk"):
        if re.search(r"x131072 k(256|2048)$", row["case"]):
            plain, ordered = row["torch"] / row["fi_core"], row["torch_sorted"] / row["fi_core_sorted"]
            times = (number(row[side]) for side in ("fi_core", "torch", "fi_core_sorted", "torch_sorted", "read"))
            fi, torch, fi_sorted, torch_sorted, read = times
            lines.append(
                (row["case"], fi, torch, f"**{plain:.2f}x**", fi_sorted, torch_sorted, f"**{ordered:.2f}x**", read)
            )
    head = ("case", "fi us", "torch us", "speedup", "fi sorted us", "torch sorted us", "speedup", "one read us")
    return table(head, lines)


def elementwise_table() -> str:
    """With the copy of the same bytes, which is the ceiling, and the host time of a call."""
    lines = []
    for row in rows("elementwise-1")[1:]:
        fi, peer, copy = row["fi_core"], row["flashinfer"], row["copy"]
        ran = isinstance(peer, dict) and "us" in peer
        lines.append(
            (
                row["case"],
                number(fi["us"]),
                number(peer["us"]) if ran else "not prebuilt",
                f"**{peer['us'] / fi['us']:.2f}x**" if ran else "-",
                f"{copy['us'] / fi['us']:.0%}".replace("%", " %"),
                number(fi["host_us"]),
                number(peer["host_us"]) if ran else "-",
            )
        )
    head = ("case", "fi us", "FlashInfer us", "speedup", "of copy speed", "fi host us", "FlashInfer host us")
    return table(head, lines)


def moe_table() -> str:
    """One table a data type: rows are models, columns numbers of tokens."""
    found = {tuple(result.case.split()): result for result in beside("moe")}
    tables = []
    for dtype in ("bf16", "fp8"):
        models = dict.fromkeys(model for model, kind, _ in found if kind == dtype)
        sizes = list(dict.fromkeys(size for _, kind, size in found if kind == dtype))
        lines = [
            (model, *(f"{number(r.fi)} ({r.fi / r.best:.2f})" for r in (found[model, dtype, size] for size in sizes)))
            for model in models
        ]
        tables.append(table((f"{dtype}: us (of the best peer)", *sizes), lines))
    return "\n\n".join(tables)


def timers_table() -> str:
    lines = [
        (row["case"], *(f"{row[k]:.2f}" for k in ("cupti", "graph_events", "events")), f"{over:.2f}")
        for row in rows("timers")
        for over in [row["events"] - row["cupti"]]
    ]
    return table(("kernel", "cupti us", "graph_events us", "events us", "events - cupti us"), lines)


TABLES: dict[str, Callable[[], str]] = {  # by the name that a page gives in its marker
    "summary": summary,
    "decode": lambda: comparison(decode()),
    "decode-drawn": drawn,
    "prefill": lambda: comparison(prefill()),
    "prefill-fp8": lambda: comparison(prefill_fp8()),
    "prefill-mma": lambda: comparison(prefill_mma()),
    "sampling": lambda: comparison(sampling()),
    "topk": topk_table,
    "elementwise": elementwise_table,
    "custom-attention": lambda: (
        comparison(custom_attention()).replace("fi us", "variant us").replace("speedup", "built in / variant")
    ),
    "gemm": products.gemm_table,
    "gemm-few-tokens": products.few_tokens_table,
    "gemm-drawn": products.drawn_table,
    "gemm-fresh": products.fresh_table,
    "decode-nvfp4": attention.nvfp4_table,
    "decode-kv-dtypes": lambda: attention.kv_dtypes_table("decode"),
    "prefill-kv-dtypes": lambda: attention.kv_dtypes_table("prefill"),
    "decode-cudnn": lambda: attention.cudnn_table(prefill=False),
    "prefill-cudnn": lambda: attention.cudnn_table(prefill=True),
    "prefill-small-pages": attention.small_pages_table,
    "attention-peers": attention.peers_table,
    "mla": lambda: comparison(beside("mla")),
    "gemm-floors": floors.gemm_table,
    "mla-floors": floors.mla_table,
    "quantization-floors": floors.quantization_table,
    "comm": lambda: layers.comm_table("comm"),
    "comm-4": lambda: layers.comm_table("comm-4"),
    "moe-experts": layers.experts_table,
    "moe-few-tokens": layers.few_tokens_table,
    "linear-attention-prefill": layers.linear_prefill_table,
    "linear-attention-decode": layers.linear_decode_table,
    "linear-attention-channels": layers.channels_table,
    "host-time": layers.host_time_table,
    "launch-layer": layers.launch_layer_table,
    "vllm": layers.engines_table,
    "stages": layers.stages_table,
    "gemm-ceilings": ceilings.gemm_table,
    "moe-ceilings": ceilings.moe_table,
    "mla-ceilings": ceilings.mla_table,
    "moe": moe_table,
    "batch-invariance": costs.invariance_table,
    "batch-invariance-steps": lambda: costs.invariance_table(steps=True),
    "batch-invariance-peers": costs.invariance_peers_table,
    "promises": support.promises_table,
    "indexer": costs.indexer_table,
    "adapters": costs.adapters_table,
    "adapters-dense": costs.dense_adapters_table,
    "decode-step": costs.decode_step_table,
    "cpu": costs.cpu_table,
    "hybrid": costs.hybrid_table,
    "fp8-weights": costs.fp8_weights_table,
    "timers": timers_table,
}
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def filled(text: str) -> str:
    """The text of a page with each marked table generated again."""
    return MARKED.sub(lambda m: f"{m[1]}\n{TABLES[m[2]]()}\n\n{m[4]}", text)


def pages() -> list[Path]:
    """The pages that hold a marked table."""
    known = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in known if MARKED.search(page.read_text())]
