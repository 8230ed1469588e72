"""Tables of attention beside its peers, cuDNN among them, and over NVFP4 caches; see `results.TABLES`."""

from __future__ import annotations

import statistics

from records import beside, geometric, number, rows, table

PAGE_1 = ", page 1"
SLOWER = 1.005  # the ratio from which a case is named


def peers_table() -> str:
    """Geometric means of the time over the fastest peer's, and the cases that are slower than it."""
    found = beside("attention-peers")
    decode = [r for r in found if r.case.startswith("decode ")]
    groups = {
        "decode": [r for r in decode if not r.case.endswith(PAGE_1)],
        "decode, page size 1, bf16": [r for r in decode if r.case.endswith(PAGE_1)],
        "prefill": [r for r in found if r not in decode],
        "all": found,
    }
    lines = []
    for name, group in groups.items():
        slower = [f"`{r.case}` {r.fi / r.best:.2f}" for r in group if r.fi / r.best > SLOWER and name != "all"]
        shown = ", ".join(slower) if slower else "" if name == "all" else "none"
        lines.append((name, len(group), f"**{geometric(group):.2f}x**", shown))
    return table(("cases", "number", "speedup", "slower than the fastest peer, time over its"), lines)


def small_pages_table() -> str:
    """Prefill of page size 1 beside pages of 16 and the fastest peer with page size 1."""
    found = {result.case: result for result in beside("attention-peers", "paged ")}
    lines = []
    for case, result in found.items():
        if case.endswith(PAGE_1):
            name, best = case.removesuffix(PAGE_1), min(result.peers, key=lambda peer: result.peers[peer])
            speedup = f"**{result.speedup:.2f}x**"
            lines.append((name, number(result.fi), number(found[name].fi), number(result.best), best, speedup))
    head = ("prefill, page size 1", "fi us", "fi us, page 16", "fastest peer us", "fastest peer", "speedup")
    return table(head, lines)


def nvfp4_table() -> str:
    """Decode over fp8 and NVFP4 caches in both layouts, medians of the runs."""
    times: dict[str, dict[str, float]] = {}
    for row in rows("decode-nvfp4"):
        dtype, _, case = row["case"].partition(" ")
        layout = case[-3:]
        if row["who"] == "new" and dtype in ("e4m3", "e2m1") and layout in ("NHD", "HND"):
            times.setdefault(case[:-4], {})[f"{dtype} {layout}"] = statistics.median(row["us"])
    lines = []
    for case, of in times.items():
        cells = []
        for layout in ("NHD", "HND"):
            fp8, fp4 = of.get(f"e4m3 {layout}"), of.get(f"e2m1 {layout}")
            cells += [number(fp8), f"{number(fp4)} ({fp4 / fp8:.2f})" if fp8 and fp4 else number(fp4)]
        lines.append((case, *cells))
    head = ("case", "fp8 NHD us", "NVFP4 NHD us (of fp8)", "fp8 HND us", "NVFP4 HND us (of fp8)")
    return table(head, lines)


def kv_dtypes_table(kind: str) -> str:
    """Drawn shapes over fp8 caches, as a share of the time over bf16 caches."""
    found: dict[int, list[float]] = {}
    for row in rows("kv-dtypes"):
        if row["kind"] == kind:
            found.setdefault(row["head_dim"], []).append(row["fp8_us"] / row["bf16_us"])
    lines = [
        (dim, len(of), f"**{statistics.geometric_mean(of):.2f}**", f"{min(of):.2f} .. {max(of):.2f}")
        for dim, of in sorted(found.items())
    ]
    return table(("head dim", "cases", "fp8 time / bf16 time", "least .. most"), lines)


CUDNN = {  # of decode, then of prefill
    "D4": "16 requests of 8192, page 16",
    "D4 NHD": "16 requests of 8192, page 16, NHD",
    "D4 page 64": "16 requests of 8192, page 64",
    "b1 kv512": "1 request of 512",
    "P2": "4 prompts of 4096, page 16",
    "P2 page 64": "4 prompts of 4096, page 64",
    "R 4x4k": "4 prompts of 4096, ragged",
    "host prefill": "1 prompt of 64",
}


def cudnn_table(prefill: bool) -> str:
    """Times on the device and on the host, and that of the first call, which builds a graph of cuDNN."""
    found = {row.get("name"): row for row in rows("cudnn")}
    head = ("case", "fi us", "cuDNN us", "speedup", "fi host us", "cuDNN host us", "first call of cuDNN, ms")
    lines = []
    for name, label in CUDNN.items():
        row = found[name]
        if ("tflops" in row) == prefill:
            fi, other = row["ours_graph_us"], row["graph_us"]
            host = (number(row.get("ours_host_us")), number(row.get("host_us")))
            lines.append((label, number(fi), number(other), f"**{other / fi:.2f}x**", *host, f"{row['first_ms']:.0f}"))
    return table(head, lines)
