"""Low-rank adapters on the experts of a layer: what is added before the activation, and behind the second product."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from fi_core.fused_moe.layer import Tables
from fi_core.lora.ops import LORA_DELTA, LORA_SUM, MOST_RANK, sums_shape
from fi_core.tllm_enums import is_gated_activation

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from fi_core.fused_moe.layer import Activation, Layer, TokenExperts
    from fi_core.runtime.launch.plan import Launches


class ExpertLora(tuple["torch.Tensor", ...]):
    """Adapters on the experts of `cutlass_fused_moe(lora=...)`: `fc_e(x) + scale[l] B[l, e] A[l, e] x`.

    l is the adapter of the token. Ranks are 8 to 256, multiples of 8: pad with zeros. A tuple of the tensors, whose
    contents may change between the replays of a CUDA graph.

    Args:
        fc1_a: `[up, gate]`, each `[loras, experts here, rank, hidden]`, bf16 or fp16 as the input; of an activation
            without a gate one tensor.
        fc1_b: `[up, gate]`, each `[loras, experts here, inter, rank]`.
        fc2_a: `[loras, experts here, rank, inter]`; its rank may differ from that of fc1.
        fc2_b: `[loras, experts here, hidden, rank]`.
        lora_indices: `[tokens]`, int32 or int64, the adapter of each token; -1: none.
        scale: `[loras]`, fp32, alpha / rank of each adapter; None: ones.

    Raises:
        ValueError: fc1_a and fc1_b have different lengths, or others than 1 and 2.
    """

    __slots__ = ()

    def __new__(
        cls,
        fc1_a: Sequence[torch.Tensor],
        fc1_b: Sequence[torch.Tensor],
        fc2_a: torch.Tensor,
        fc2_b: torch.Tensor,
        lora_indices: torch.Tensor,
        scale: torch.Tensor | None = None,
    ) -> ExpertLora:
        if len(fc1_a) != len(fc1_b) or len(fc1_a) not in (1, 2):
            raise ValueError(
                "fc1_a and fc1_b must both have [up, gate], or one tensor without a gate; got "
                f"{len(fc1_a)} and {len(fc1_b)} tensors"
            )
        return super().__new__(cls, (*fc1_a, *fc1_b, fc2_a, fc2_b, lora_indices, *(() if scale is None else (scale,))))


Banks = dict[str, "torch.Tensor"]  # arguments of a lora_delta


class Adapters(NamedTuple):
    """The same by name, the gate first, as a delta has it."""

    up: Banks
    down: Banks
    lora_indices: torch.Tensor
    scale: torch.Tensor | None


def adapters_of(lora: Sequence[torch.Tensor], layer: Layer, activation: Activation) -> Adapters:
    """The adapters of a layer. Raises ValueError, TypeError or NotImplementedError for what does not fit it."""
    halves = 2 if is_gated_activation(activation.kind) else 1
    fixed = 2 * halves + 3
    if len(lora) not in (fixed, fixed + 1):
        raise ValueError(
            f"lora must be an ExpertLora with {'[up, gate]' if halves == 2 else 'one tensor'} for fc1_a and fc1_b, as "
            f"the activation has it; got {len(lora)} tensors, {fixed} or {fixed + 1} are needed"
        )
    if layer.x.element_size() != 2 or layer.activations or layer.up.columns is not None:
        raise NotImplementedError(
            "lora is not supported for e4m3 inputs and activations: use 16-bit input with 16-bit, mxfp4 or "
            "e4m3 weights with use_deepseek_fp8_block_scale"
        )
    a, b, (fc2_a, fc2_b, indices, *scale) = lora[:halves], lora[halves : 2 * halves], lora[2 * halves :]
    experts, width, hidden = len(layer.up.weight), activation.width(layer.up.rows), layer.x.shape[1]
    for name, w, last in (
        *((f"fc1_a[{i}]", w, (None, hidden)) for i, w in enumerate(a)),
        *((f"fc1_b[{i}]", w, (width, None)) for i, w in enumerate(b)),
        ("fc2_a", fc2_a, (None, width)),
        ("fc2_b", fc2_b, (hidden, None)),
    ):
        wanted = (len(fc2_a), experts, *last)
        if w.ndim != 4 or any(n is not None and n != own for n, own in zip(wanted, w.shape)):
            text = ", ".join("rank" if n is None else str(n) for n in wanted)
            raise ValueError(f"{name} of lora must have shape [{text}]; got {list(w.shape)}")
        if w.dtype is not layer.x.dtype:
            raise TypeError(f"{name} of lora must have the dtype of input, {layer.x.dtype}; got {w.dtype}")
    if indices.shape != layer.x.shape[:1]:
        raise ValueError(f"lora_indices must have shape [{layer.x.shape[0]}]; got {list(indices.shape)}")
    named: dict[str, torch.Tensor] = dict(zip(("a", "a1"), reversed(a)))
    named.update(zip(("b", "b1"), reversed(b)))
    return Adapters(named, {"a": fc2_a, "b": fc2_b}, indices, scale[0] if scale else None)


def adapter_bytes(slots: int, columns: int, width: int, hidden: int, experts: int) -> list[int]:
    """Of scratch of a layer with adapters of any rank: what is added, and sums between the products."""
    sums = ((columns // width * MOST_RANK, hidden), (MOST_RANK, width))
    of_sums = (4 * math.prod(sums_shape(slots, ranks, k, experts)) for ranks, k in sums)
    return [2 * slots * columns, 2 * slots * hidden, *of_sums]


def up_delta(p: Launches, lora: Adapters, layer: Layer, width: int, pairs: Tables | TokenExperts) -> torch.Tensor:
    """What is added before the activation: `[slots, width]`, of sorted rows or, without tables, of slots in order."""
    slots = pairs.rows.shape[0] if isinstance(pairs, Tables) else pairs.ids.numel()
    out = p.scratch((slots, width), layer.dtype)
    _add(p, lora, out, layer.x, lora.up, fill=True, **_pairs(pairs))
    return out


def add_down(p: Launches, lora: Adapters, rows: torch.Tensor, activated: torch.Tensor, tables: Tables) -> None:
    """Adds to the outputs of the second product, of sorted rows; those of tokens without an adapter keep their bits."""
    _add(p, lora, rows, activated, lora.down, per_pair=True, ready=True, add=True, **_pairs(tables))


def add_to_sums(p: Launches, lora: Adapters, out: torch.Tensor, activated: torch.Tensor, routed: TokenExperts) -> None:
    """Adds to the weighted sums of the experts, from activated values of slots in order."""
    rows = p.scratch((routed.ids.numel(), out.shape[1]), activated.dtype)
    _add(p, lora, rows, activated, lora.down, per_pair=True, ready=True, fill=True, **_pairs(routed))
    p.add(LORA_SUM, out, rows, lora.lora_indices, weights=routed.weights)


def _add(p: Launches, lora: Adapters, out: torch.Tensor, x: torch.Tensor, banks: Banks, **how: object) -> None:
    """The launches of a delta. ready: those of another are ahead in the stream, with the same pairs."""
    import torch

    loras, experts, rank, k = banks["a"].shape
    ranks = rank * sum(name.startswith("a") for name in banks)
    sums = p.scratch(sums_shape(out.shape[0], ranks, k, loras * experts), torch.float32)
    p.add(LORA_DELTA, out, x, lora.lora_indices, **banks, sums=sums, scales=lora.scale, **how)


def _pairs(pairs: Tables | TokenExperts) -> dict[str, object]:
    if isinstance(pairs, Tables):
        return {"tokens": pairs.rows, "offsets": pairs.offsets}
    return {"experts": pairs.ids, "first_expert": pairs.first_expert}
