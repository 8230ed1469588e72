"""Steps of SGLang in CUDA graphs: captured once, run again for other requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def captured(backend: Any, fixed: Any, body: Callable[[], None], device: str) -> Callable[[], None]:
    """What runs a step again, whose tensors are those of the batch `fixed`: a graph, or on a CPU the step itself."""
    backend.init_forward_metadata_out_graph(fixed, in_capture=True)
    if device == "cpu":
        return body
    body()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph.replay


def refill(fixed: Any, step: Any) -> None:
    """Writes the requests of a step to the batch of a graph, and padding behind them."""
    for name, fill in (("seq_lens", 1), ("req_pool_indices", 0), ("out_cache_loc", 0)):
        changed = getattr(step, name)
        getattr(fixed, name)[: len(changed)] = changed
        getattr(fixed, name)[len(changed) :] = fill
