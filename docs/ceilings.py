"""Tables of plain streams beside matrix products, experts and MLA, from h200-ceilings.jsonl; see `results.TABLES`."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable
from typing import NamedTuple

from records import OURS, number, rows, table

PRODUCTS = {  # names of cases by columns
    "bf16": "bf16 gemm",
    "fp8, one scale": "fp8 tensorwise",
    "fp8, scales of rows": "fp8 rowwise",
    "fp8, block scales": "fp8 groupwise",
}
PROJECTION = re.compile(" (llama8b|llama70b|dsv3)$")
_DENSE = re.compile(r"(bf16|fp8) (gemm|tensorwise|rowwise|groupwise) (\d+)x(\d+)x(\d+)( \w+)?$")
_CELL = "stream us (of the best peer; fi / stream)"
_MEANS = ("cases", "stream / peer", "fi / peer", "fi / stream", "peer within 1.1 of the stream")
_SIZES = (0, 20, 70, 140, 300)  # MB


class Ceiling(NamedTuple):
    """Times of the fastest plain stream, of fi and of the fastest peer, in microseconds; None: it did not run."""

    stream: float
    fi: float | None
    best: float | None


def _over(us: float | None, other: float | None) -> str:
    return f"{us / other:.2f}" if us and other else "-"


def _cell(of: Ceiling | None) -> str:
    """The stream's time, over the fastest peer's; fi's over the stream's."""
    return f"{number(of.stream)} ({_over(of.stream, of.best)}; {_over(of.fi, of.stream)})" if of else ""


def _bytes_read(case: str) -> str:
    """Cases whose streams read as many bytes, but for scales (0.2 % at most), have one of these names."""
    dense = _DENSE.match(case)
    return f"{dense[1]} {case.split(' ', 2)[2]}" if dense else case


def ceilings(pattern: str) -> dict[str, Ceiling]:
    """Cases of h200-ceilings.jsonl whose names match."""
    cases: dict[str, dict[str, float]] = {}
    streams: dict[str, float] = {}
    for row in rows("ceilings"):
        if row["peer"].startswith("stream"):
            key = _bytes_read(row["case"])
            streams[key] = min(streams.get(key, row["us"]), row["us"])
        elif re.search(pattern, row["case"]):
            cases.setdefault(row["case"], {})[row["peer"]] = row["us"]
    found = {}
    for case, times in cases.items():
        peers = [us for peer, us in times.items() if peer != "nothing" and not re.match(f"{OURS}($|,)", peer)]
        found[case] = Ceiling(streams[_bytes_read(case)], times.get(OURS), min(peers, default=None))
    return found


def _mean(ratios: Iterable[float]) -> str:
    return f"{math.exp(statistics.fmean(map(math.log, ratios))):.2f}"


def _means(found: Iterable[Ceiling]) -> tuple[object, ...]:
    """Of the cases that fi and a peer ran: their number, geometric means, and how many leave no speedup of 1.1."""
    ran = [(c.stream, c.fi, c.best) for c in found if c.fi and c.best]
    return (
        len(ran),
        _mean(stream / best for stream, _, best in ran),
        _mean(fi / best for _, fi, best in ran),
        _mean(fi / stream for stream, fi, _ in ran),
        sum(1.1 * stream > best for stream, _, best in ran),
    )


def gemm_table() -> str:
    """Single shapes; then means by kind, and by the size of the weights."""
    found = ceilings(_DENSE.pattern)
    shapes = dict.fromkeys(case.split(" ", 2)[2] for case in found)
    shown = ("bf16", "fp8, one scale")
    lines = [
        (shape.split()[0].replace("x", " x "), *(_cell(found.get(f"{PRODUCTS[name]} {shape}")) for name in shown))
        for shape in shapes
        if shape.startswith("16x") or not PROJECTION.search(shape)
    ]
    tables = [table((f"m x n x k: {_CELL}", *shown), lines)]
    projections = {case: c for case, c in found.items() if PROJECTION.search(case)}
    means = [
        (name, *_means(c for case, c in projections.items() if case.startswith(kind)))
        for name, kind in PRODUCTS.items()
    ]
    sizes: dict[int, list[Ceiling]] = {least: [] for least in _SIZES}
    for case, c in projections.items():
        dense = _DENSE.match(case)
        assert dense
        size = int(dense[4]) * int(dense[5]) * (2 if dense[1] == "bf16" else 1) / 1e6
        sizes[max(least for least in _SIZES if least <= size)].append(c)
    for least, most in zip(_SIZES, (*_SIZES[1:], None)):
        means.append((f"weights of {least} to {most} MB" if most else f"from {least} MB on", *_means(sizes[least])))
    return "\n\n".join([*tables, table(("geometric means of projections", *_MEANS), means)])


def moe_table() -> str:
    """Layers by tokens, then means by kind."""
    found = ceilings(r" T\d+$")
    layers: dict[str, dict[str, Ceiling]] = {}
    for case, c in found.items():
        layer, size = case.rsplit(" ", 1)
        layers.setdefault(layer, {})[size] = c
    tables = []
    few = [layer for layer in layers if layer.startswith("e256")]
    for names in ([layer for layer in layers if layer not in few], few):
        sizes = sorted({size for layer in names for size in layers[layer]}, key=lambda size: int(size[1:]))
        lines = [(n, *(_cell(layers[n].get(size)) for size in sizes)) for n in names]
        tables.append(table((_CELL, *sizes), lines))
    groups = {
        kind: [c for case, c in found.items() if f" {kind} " in case and "e256" not in case] for kind in ("bf16", "fp8")
    }
    return "\n\n".join([*tables, table(("geometric means", *_MEANS), [(k, *_means(of)) for k, of in groups.items()])])


def mla_table() -> str:
    rates = {row["case"]: row["tbs"] * row["us"] for row in rows("ceilings")}  # MB
    lines = [
        (case.removeprefix("mla "), f"{c.stream:.1f}", f"{rates[case] / c.stream:.2f}", number(c.fi), number(c.best),
         _over(c.stream, c.best))
        for case, c in ceilings("^mla ").items()
    ]  # fmt: skip
    return table(("", "stream us", "TB/s", "fi us", "FlashInfer us", "stream / FlashInfer"), lines)
