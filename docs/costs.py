"""Tables of what a mode or a part of a layer costs; see `results.TABLES`."""

from __future__ import annotations

import math
import statistics

from records import number, rows, table


def invariance_table(steps: bool = False) -> str:
    """One row a call, or a step of a model, one column a batch: time inside of batch_invariant() over time outside."""
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for row in rows("batch-invariance"):
        if row.get("step", False) == steps and "peer" not in row:
            found.setdefault(row["case"], {})[row["batch"]] = row["off_us"], row["on_us"] / row["off_us"]
    batches = sorted({batch for cells in found.values() for batch in cells})

    def cell(of: tuple[float, float] | None) -> str:
        return "-" if of is None else f"{of[1]:.2f} of {number(of[0])}" if steps else f"{of[1]:.2f}"

    lines = [(case, *(cell(cells.get(batch)) for batch in batches)) for case, cells in found.items()]
    every = [ratio for cells in found.values() for _, ratio in cells.values()]
    mean = math.exp(statistics.fmean(map(math.log, every)))
    what = "on / off, of us" if steps else "on / off"
    head = what, *(f"batch {b}" for b in batches)
    return f"{table(head, lines)}\n\nGeometric mean {mean:.3f}, worst {max(every):.2f}."


def invariance_peers_table() -> str:
    """One row a call and a peer's mode: time with the mode over time without, and beside that of batch_invariant()."""
    every = rows("batch-invariance")
    own = {(row["case"], row["batch"]): row for row in every if "peer" not in row}
    found: dict[tuple[str, str], dict[int, str]] = {}
    for row in every:
        if "peer" in row:
            ratio, here = row["on_us"] / row["off_us"], own[row["case"], row["batch"]]["on_us"]
            found.setdefault((row["case"], row["peer"]), {})[row["batch"]] = f"{ratio:.2f}, {row['on_us'] / here:.2f}"
    batches = sorted({batch for cells in found.values() for batch in cells})
    lines = [(*of, *(cells.get(batch, "-") for batch in batches)) for of, cells in found.items()]
    return table(("on / off, peer / fi", "mode", *(f"batch {b}" for b in batches)), lines)


def indexer_table() -> str:
    """Times of logits and of logits with top-k beside the larger floor."""
    lines = []
    for row in rows("indexer"):
        floor = max(row.get("bytes_us", 0.0), row["mma_us"])
        logits, both = row["logits_us"], row["topk_us"]
        share = f"{floor / logits:.0%}".replace("%", " %")
        before = row["before_topk_us"]
        lines.append(
            (row["case"], number(floor), number(logits), share, number(both), number(before), f"{both / before:.2f}")
        )
    head = ("case", "floor us", "logits us", "floor / time", "logits and top-k us", "two kernels before us", "ratio")
    return table(head, lines)


def fp8_weights_table() -> str:
    """Products of fp8 weights beside the kernel before and a stream of their bytes: ratios by tokens."""
    found = rows("gemm-w8a16")
    lines = []
    for m in sorted({row["m"] for row in found}):
        some = [row for row in found if row["m"] == m]
        ratios = [row["us"] / row["before_us"] for row in some]
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        streams = [row["stream_us"] / row["us"] for row in some if "stream_us" in row]
        rates = [row["n"] * row["k"] / row["us"] / 1e6 / 4.57 for row in some]
        share = f"{min(streams):.0%} .. {max(streams):.0%}" if streams else "-"
        read = f"{min(rates):.0%} .. {max(rates):.0%}"
        lines.append(
            (str(m), f"{mean:.2f}", f"{max(ratios):.2f}", *(text.replace("%", " %") for text in (share, read)))
        )
    return table(("tokens", "over the kernel before", "worst", "rate of a stream of the bytes", "of 4.57 TB/s"), lines)


def decode_step_table() -> str:
    """A decode step beside a kernel that only reads its bytes, and the kinds of kernels that take its time."""
    kinds = ("products", "experts", "attention", "others")
    lines = [
        (
            row["model"],
            str(row["batch"]),
            str(row["length"]),
            f"{row['bytes'] / 1e9:.2f}",
            number(row["stream_us"]),
            number(row["step_us"]),
            f"{row['step_us'] / row['stream_us']:.2f}",
            str(row["kernels"]),
            *(number(row["by_kind_us"][kind]) if kind in row["by_kind_us"] else "-" for kind in kinds),
        )
        for row in rows("decode-step")
    ]
    head = ("model", "batch", "tokens", "GB", "stream us", "step us", "step / stream", "kernels")
    return table((*head, *(f"{kind} us" for kind in kinds)), lines)


def adapters_table() -> str:
    """A layer of experts with adapters over the layer alone."""
    lines = [
        (
            row["case"],
            *(number(row[name]) for name in ("base_us", "before_us", "lora_us")),
            f"{row['lora_us'] / row['base_us']:.2f}",
        )
        for row in rows("lora")
        if "base_us" in row
    ]
    return table(("layer", "alone us", "before us", "with adapters us", "ratio"), lines)


def cpu_table() -> str:
    """One row an op: its time over torch's on one core and on two."""
    found: dict[str, dict[int, list[float]]] = {}
    for row in rows("beside-torch", "zen5"):
        for name in (row["routine"], "all"):
            found.setdefault(name, {1: [], 2: []})[row["threads"]].append(row["fi"] / row["torch"])

    def cells(ratios: list[float]) -> tuple[str, str]:
        return f"{math.exp(statistics.fmean(map(math.log, ratios))):.2f}", f"{max(ratios):.2f}"

    every = found.pop("all")
    lines = [(f"`{name}`", len(of[1]), *cells(of[1]), *cells(of[2])) for name, of in found.items()]
    head = ("op", "shapes", "one core, mean", "worst", "two cores, mean", "worst")
    return table(head, [*lines, ("all", len(every[1]), *cells(every[1]), *cells(every[2]))])


def dense_adapters_table() -> str:
    """Adapters of a linear layer beside vLLM's shrink and expand."""
    lines = [
        (
            row["case"],
            *(number(row[name]) for name in ("before_us", "lora_us", "vllm_us")),
            f"{row['lora_us'] / row['vllm_us']:.2f}",
        )
        for row in rows("lora")
        if "vllm_us" in row
    ]
    return table(("linear layer", "before us", "fi us", "vLLM us", "ratio"), lines)


def hybrid_table() -> str:
    """Calls of Mamba-2 layers."""
    lines = [
        (row["case"], number(row["us"]), number(row["host_us"]) if "host_us" in row else "-") for row in rows("hybrid")
    ]
    return table(("call", "us", "host us"), lines)
