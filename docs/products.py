"""Tables of h200-gemm.jsonl and h200-gemm-drawn.jsonl; see `results.TABLES`."""

from __future__ import annotations

import re
import statistics

from ceilings import PROJECTION
from records import OURS, Result, beside, geometric, number, rows, table

_KINDS = {  # of cases, by column: plain products first, then groups and batches
    "bf16": ("bf16 gemm", "bf16 grouped", "bf16 bmm"),
    "fp8, one scale": ("fp8 tensorwise", "fp8 bmm"),
    "fp8, scales of rows": ("fp8 rowwise", "fp8 rowwise grouped"),
    "fp8, block scales": ("fp8 groupwise", "fp8 grouped"),
}


def _products() -> dict[str, dict[str, tuple[Result, float]]]:
    """Results and TFLOP/s of h200-gemm.jsonl by shape and column."""
    columns = {kind: column for column, kinds in _KINDS.items() for kind in kinds}
    rates = {row["case"]: row["tflops"] for row in rows("gemm") if row["peer"] == OURS}
    found: dict[str, dict[str, tuple[Result, float]]] = {}
    for result in beside("gemm"):
        kind = max((k for k in columns if result.case.startswith(k + " ")), key=len)
        shape = result.case.removeprefix(kind + " ")
        if grouped := re.match(r"g(\d+) m(\d+) n(\d+) k(\d+)", shape):
            shape = "{} groups of {} x {} x {}".format(*grouped.groups())
        elif kind.endswith("bmm"):
            shape = "{} products {} x {} x {}".format(*shape.split("x"))
        else:
            shape = shape.replace("x", " x ", 2)
        found.setdefault(shape, {})[columns[kind]] = result, rates[result.case]
    return found


def _of_best(result: Result, rate: float = 0) -> str:
    return f"{number(result.fi)}{f', {rate:.0f}' if rate > 600 else ''} ({result.fi / result.best:.2f})"


def gemm_table() -> str:
    """One row a shape; those of models' projections are in `few_tokens_table`."""
    shapes = {shape: found for shape, found in _products().items() if not PROJECTION.search(shape)}
    order = sorted(shapes, key=lambda shape: " of " in shape or " products " in shape or int(shape.split()[0]) < 512)
    lines = [(shape, *(_of_best(*shapes[shape][c]) if c in shapes[shape] else "" for c in _KINDS)) for shape in order]
    return table(("us, TFLOP/s (of the best peer)", *_KINDS), lines)


def few_tokens_table() -> str:
    """The projections of three models: one row each, then the means over all numbers of tokens."""
    found = _products()
    kinds = {"bf16": "bf16", "fp8": "fp8, one scale", "fp8 blocks": "fp8, block scales"}
    columns = [(short, kind, m) for short, kind in kinds.items() for m in (1, 16, 32)]
    named = [shape for shape in found if PROJECTION.search(shape)]
    weights = dict.fromkeys(shape.split(" x ", 1)[1] for shape in named)
    lines = [
        (w.rsplit(" ", 1)[0], *(_of_best(found[f"{m} x {w}"][kind][0]) for _, kind, m in columns)) for w in weights
    ]
    head = ("n x k", *(f"{short} m {m}" if m == 1 else f"m {m}" for short, _, m in columns))
    means = []
    for kind in _KINDS:
        results = [found[shape][kind][0] for shape in named]
        ratios = [r.fi / r.best for r in results]
        means.append(
            (kind, len(results), f"{1 / geometric(results):.2f}", sum(r > 1 for r in ratios), f"{max(ratios):.2f}")
        )
    summary = ("all numbers of tokens", "cases", "geometric mean of the best peer", "slower than it", "slowest")
    return f"{table(head, lines)}\n\n{table(summary, means)}"


def drawn_table() -> str:
    """Products of 65 to 1024 tokens whose shapes are drawn: the launcher's choice against cuBLAS and the best tile."""
    drawn = [row for row in rows("gemm-drawn") if row["set"] == "drawn"]
    lines = []
    for kind in ("bf16", "fp8, one scale", "fp8, block scales"):
        for least, most in ((65, 128), (129, 256), (257, 512), (513, 1024)):
            band = [row for row in drawn if row["kind"] == kind and least <= row["m"] <= most]
            of_peer = [row["fi"] / row["cuBLAS"] for row in band if "cuBLAS" in row]
            of_best = [row["fi"] / min(row["tiles"].values()) for row in band]
            peer = f"{statistics.geometric_mean(of_peer):.2f}" if of_peer else ""
            means = f"{statistics.geometric_mean(of_best):.3f}", f"{max(of_best):.2f}"
            lines.append((f"{kind}, {least} to {most}", len(band), peer, *means))
    head = ("kind, tokens", "cases", "fi / cuBLAS", "fi / best tile", "worst")
    return table(head, lines)


def fresh_table() -> str:
    """Products of shapes that nothing was fitted to: the launcher's own choice before and now, over cuBLAS."""
    fresh = [row for row in rows("gemm-drawn") if row["set"] == "fresh"]
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in fresh):
        for least, most in ((65, 128), (129, 256), (257, 512), (513, 1024), (1025, 8192)):
            band = [row for row in fresh if row["kind"] == kind and least <= row["m"] <= most]
            means = [
                f"{statistics.geometric_mean(found):.2f}" if found else ""
                for found in (
                    [row[ours] / row[peer] for row in band if peer in row]
                    for ours, peer in (("before", "cuBLAS"), ("fi", "cuBLAS"), ("fi", "cuBLAS, fp32 promotion"))
                )
            ]
            worst = max(row["fi"] / row["cuBLAS"] for row in band)
            lines.append((f"{kind}, {least} to {most}", len(band), *means, f"{worst:.2f}"))
    return table(("kind, tokens", "cases", "before / cuBLAS", "fi / cuBLAS", "fi / cuBLAS, promotion", "worst"), lines)
