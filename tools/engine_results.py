"""Adds a run of an engine to benchmarks/results and fills the tables: python tools/engine_results.py summary.jsonl...

summary.jsonl has a line for each latency, each batch of requests that an engine was timed with, and each window of
steps whose kernels were traced, by tags such as pl-deep (fi's plugin), fl-deep (FlashInfer) and fa-deep (the engine's
own kernels); the median of several batches of one kind. Rows of the same model and stage are replaced.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs"))
results: Any = importlib.import_module("results")
RESULTS = results.ROOT / "benchmarks/results/h200-vllm.jsonl"
MODELS = {
    "deep": "16 layers of Qwen3-8B, bf16",
    "moebench": "8 layers of Qwen3-30B-A3B, bf16",
    "mlabench": "6 layers of DeepSeek-V2-Lite, bf16",
    "gdnbench": "4 layers like Qwen3-Next, 64 experts, bf16",
    "gptossbench": "8 layers of gpt-oss-20b, mxfp4 experts",
}
KERNELS = {"pl": "plugin", "fl": "FlashInfer"}  # others are the engine's own
SAMPLING = ("greedy", "top-k and top-p")  # of even and odd seeds


def build_us(host_us: dict[str, list[float]], kind: str) -> float:
    """The host's time in all builders of metadata in a step that decodes, or that also has prompts ("mixed")."""
    found = [values for name, values in host_us.items() if name.endswith(f"build {kind}")]
    steps = min(count for _, count in found)
    return round(sum(median * count for median, count in found) / steps, 1)


def rows(lines: Iterable[dict[str, Any]], version: str = "0.24.0") -> Iterator[dict[str, Any]]:
    """The rows of the lines that are times of models in MODELS."""
    batches: dict[tuple[Any, ...], list[float]] = defaultdict(list)  # tokens/s of one kind, by the items of their row
    for line in lines:
        kernels, _, stage = line["tag"].partition("-")
        row = {"model": MODELS.get(stage), "kernels": KERNELS.get(kernels, "own"), "vllm": version}
        if row["model"] is None:
            continue
        if line.get("kind") == "latency":
            times = {name: line[f"{name}_median"] for name in ("graph_ms", "gap_ms", "step_ms")}
            build = {f"build_{kind}_us": build_us(line["host_us"], kind) for kind in ("decode", "mixed")}
            yield row | {"batch": line["batch"]} | times | build
        elif line.get("kind") == "bench":
            kind = *row.items(), ("sampling", SAMPLING[line["seed"] % 2])
            batches[kind].append(line["tok_s"])
        elif line.get("steps") and line["window"].startswith("mixed"):
            yield row | {"traced": "prompts", "busy_ms": round(line["busy_ms"] / line["steps"], 3)}
    for items, tok_s in batches.items():
        yield dict(items) | {"tok_s": round(statistics.median(tok_s))}


def place(row: dict[str, Any]) -> tuple[Any, ...]:
    """Where a row stands in the file: those of no model as they stood, then by models, kernels and stages."""
    if "model" not in row:
        return (-1,)
    model = list(MODELS.values()).index(row["model"])
    stage = "sampling" not in row, "traced" not in row, row.get("batch", 0)
    return model, ("own", *KERNELS.values()).index(row["kernels"]), *stage


def main(paths: list[str]) -> None:
    found = [*rows(json.loads(line) for path in paths for line in Path(path).read_text().splitlines())]
    replaced = {results.layers.stage_of(row) for row in found}
    before = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    kept = [row for row in before if "model" not in row or results.layers.stage_of(row) not in replaced]
    both = sorted([*kept, *found], key=place)
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in both))
    for page in results.pages():
        page.write_text(results.filled(page.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
