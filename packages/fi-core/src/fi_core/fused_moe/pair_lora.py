"""Adapters of experts for pairs of a token and an expert, with the names of FlashInfer's kernels for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fi_core.lora.ops import EXPAND, SHRINK, lora_delta, lora_sum
from fi_core.lora.trace import pairs
from fi_core.observe.log import fi_api
from fi_core.runtime.tensors import check_writable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = [
    "bgmv_moe",
    "bgmv_moe_expand",
    "bgmv_moe_shrink",
    "fill_w_ptr",
    "has_bgmv_moe",
    "prepare_bgmv_moe",
]


def has_bgmv_moe() -> bool:
    """Whether `bgmv_moe` works: True."""
    return True


@fi_api
def fill_w_ptr(w_ptr: torch.Tensor, weights: torch.Tensor, num_experts: int, slice_id: int) -> int:
    """Writes the addresses of the weights of each expert to `w_ptr[slice_id]`.

    The tensor must live, and stay where it is, as long as the table is used.

    Args:
        w_ptr: `[slices, num_experts]`, int64; or `[num_experts]`, a table of one slice.
        weights: `[loras, num_experts, rows, k]`, rows contiguous one behind the other.
        num_experts: experts of the table.
        slice_id: the row of the table.

    Returns:
        `weights.stride(0)`, the elements between adapters.

    Raises:
        ValueError: a shape or stride does not fit; the text names the argument.
        TypeError: w_ptr is not int64.
    """
    import torch

    if w_ptr.dtype is not torch.int64:
        raise TypeError(f"w_ptr must be int64; got {w_ptr.dtype}")
    if num_experts < 0:
        raise ValueError(f"num_experts must be 0 or more; got {num_experts}")
    check_writable("w_ptr", w_ptr)
    table = w_ptr.unsqueeze(0) if w_ptr.ndim == 1 else w_ptr
    if table.ndim != 2 or table.shape[1] < num_experts or not 0 <= slice_id < len(table):
        raise ValueError(
            f"w_ptr must have shape [slices, {num_experts}], with slice_id {slice_id}; got {list(w_ptr.shape)}"
        )
    if weights.ndim != 4 or weights.shape[1] < num_experts:
        raise ValueError(f"weights must have shape [loras, {num_experts}, rows, k]; got {list(weights.shape)}")
    if weights.stride(3) != 1 or weights.stride(2) != weights.shape[3]:
        raise ValueError(f"weights must have rows one behind the other; got strides {list(weights.stride())}")
    row = table[slice_id, :num_experts]
    torch.arange(num_experts, out=row)
    row.mul_(weights.stride(1) * weights.element_size()).add_(weights.data_ptr())
    return int(weights.stride(0))


def _table(w_ptr: torch.Tensor) -> torch.Tensor:
    import torch

    table = w_ptr.unsqueeze(0) if w_ptr.ndim == 1 else w_ptr
    if table.dtype is not torch.int64 or table.ndim != 2:
        raise ValueError(
            f"w_ptr must be int64 of shape [slices, experts], of fill_w_ptr; got {w_ptr.dtype} {list(w_ptr.shape)}"
        )
    return table


def _check_pairs(sorted_token_ids: torch.Tensor, expert_ids: torch.Tensor) -> None:
    if sorted_token_ids.ndim != 1 or expert_ids.shape != sorted_token_ids.shape:
        raise ValueError(
            f"sorted_token_ids and expert_ids must have shape [pairs]; got {list(sorted_token_ids.shape)} and "
            f"{list(expert_ids.shape)}"
        )


def _check_weights(topk_weights: torch.Tensor | None, pairs: int) -> None:
    if topk_weights is None:
        raise TypeError(f"topk_weights must be a tensor of shape [{pairs}]; got None")
    if str(topk_weights.dtype) != "torch.float32":
        raise TypeError(f"topk_weights must be torch.float32; got {topk_weights.dtype}")


@fi_api
def bgmv_moe_shrink(
    y: torch.Tensor,
    x: torch.Tensor,
    w_ptr: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    lora_indices: torch.Tensor,
    lora_stride: int,
    *,
    per_pair_input: bool = False,
) -> None:
    """Adds `A[s, expert, adapter] x` to `y[s, pair]`, for the token, the expert and the adapter of each pair.

    Args:
        y: `[slices, pairs, rank]`, bf16, fp16 or fp32, at most 3 slices; rank is 8 to 256, a multiple of 8.
        x: `[tokens, in]`, or of each pair `[pairs, in]` with per_pair_input; bf16 or fp16, the dtype of the weights.
        w_ptr: `[slices, experts]`, int64, of `fill_w_ptr`: addresses of `[rank, in]`, for the caller to keep valid; or
            `[experts]`, one slice.
        sorted_token_ids: `[pairs]`, int32 or int64, in any order.
        expert_ids: `[pairs]`, int32 or int64; pairs of others than the experts of w_ptr are left out.
        lora_indices: `[tokens]`, int32 or int64, the adapter of each token. Pairs of -1 are not touched.
        lora_stride: elements between adapters.
        per_pair_input: x has a row for each pair.

    Raises:
        ValueError: a shape, stride, device or index does not fit; the text names the argument.
        TypeError: a dtype does not fit.
    """
    _check_pairs(sorted_token_ids, expert_ids)
    lora_delta(
        y,
        x,
        lora_indices,
        a=_table(w_ptr),
        tokens=sorted_token_ids,
        experts=expert_ids,
        stage=SHRINK,
        a_stride=lora_stride,
        per_pair=per_pair_input,
        add=True,
    )


@fi_api
def bgmv_moe_expand(
    y: torch.Tensor,
    x: torch.Tensor,
    w_ptr: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    lora_indices: torch.Tensor,
    slice_start_loc: torch.Tensor,
    output_slices: Sequence[int],
    lora_stride: int,
    *,
    finalize: bool = True,
) -> None:
    """Computes `B[s, expert, adapter] x[s, pair]`, summed for each token with topk_weights or stored for each pair.

    The sum of a token is in the order of its pairs, without atomics: the same bits in every run.

    Args:
        y: fp32. With finalize `[tokens, out]`, to which is added; else `[pairs, out]`, which is written, and pairs
            without an adapter are not touched.
        x: `[slices, pairs, rank]`, bf16 or fp16, the dtype of the weights; of `bgmv_moe_shrink`.
        w_ptr: `[slices, experts]`, int64, of `fill_w_ptr`: addresses of `[output_slices[s], rank]`; or `[experts]`.
        sorted_token_ids, expert_ids, lora_indices, lora_stride: as for `bgmv_moe_shrink`.
        topk_weights: `[pairs]`, fp32; used with finalize.
        slice_start_loc: `[slices]`, int64, the first column of each slice in y.
        output_slices: the columns of each slice, multiples of 8.
        finalize: whether pairs are summed.

    Raises:
        ValueError: a shape, stride, device or index does not fit; the text names the argument.
        TypeError: a dtype does not fit.
    """
    pairs = (sorted_token_ids, expert_ids, topk_weights, lora_indices)
    strides = [lora_stride] * len(output_slices)
    _expand(y, x, _table(w_ptr), *pairs, slice_start_loc, output_slices, strides, finalize)


def _expand(
    y: torch.Tensor,
    x: torch.Tensor,
    table: torch.Tensor,
    tokens: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    lora_indices: torch.Tensor,
    begins: torch.Tensor,
    widths: Sequence[int],
    strides: Sequence[int],
    finalize: bool,
    loras: int = -1,
) -> None:
    """`bgmv_moe_expand` with a stride between adapters for each slice. loras: adapters, if it is known."""
    import torch

    _check_pairs(tokens, experts)
    pairs, slices = tokens.numel(), table.shape[0]
    if finalize:
        _check_weights(weights, pairs)
    if y.dtype is not torch.float32 or y.ndim != 2 or (y.shape[0] != pairs and not finalize):
        raise ValueError(
            f"y must be float32 of shape [{'tokens' if finalize else pairs}, out]; got {y.dtype} {list(y.shape)}"
        )
    if x.ndim != 3 or x.shape[:2] != (slices, pairs) or len(widths) != slices:
        raise ValueError(
            f"x and output_slices must be of {slices} slices, those of w_ptr, and {pairs} pairs; got "
            f"{list(x.shape)} and {list(widths)}"
        )
    found = torch.zeros(pairs, y.shape[1], dtype=torch.float32, device=y.device) if finalize else y
    alike = len({*zip(widths, strides)}) == 1  # the kernel takes slices of one width
    for own in [slice(0, slices)] if alike else [slice(s, s + 1) for s in range(slices)]:
        of: dict[str, Any] = {"columns": widths[own.start], "begins": begins[own], "b_stride": strides[own.start]}
        of |= {"tokens": tokens, "experts": experts, "loras": loras}
        lora_delta(found, x[own], lora_indices, b=table[own], stage=EXPAND, **of)
    if finalize:
        lora_sum(y, found, lora_indices, tokens=tokens, weights=weights)


class BGMVMoEPlan:
    """Adapters of pairs that are computed again and again on the same tensors; `prepare_bgmv_moe` makes it.

    Each `run` reads what the tensors hold then. It launches the same kernels each time and can be captured in a graph.
    """

    backend_used = "cake"
    variant = "generic"

    def __init__(self, shrink_out: torch.Tensor, y_accum: torch.Tensor, tables: Any, pairs: Any, widths: Any) -> None:
        self.shrink_out, self.y_accum = shrink_out, y_accum
        self._tables, self._pairs, self._widths = tables, pairs, widths
        self._loras = len(tables[3][0][0])

    def run(self) -> torch.Tensor:
        """`[tokens, sum of out]`, fp32: y_accum, overwritten."""
        (w_a, strides_a), (w_b, strides_b), starts, _ = self._tables
        x, tokens, experts, indices, weights = self._pairs
        self.y_accum.zero_()
        of: dict[str, Any] = {"tokens": tokens, "experts": experts, "loras": self._loras, "fill": True}
        lora_delta(self.shrink_out, x, indices, a=w_a, a_stride=strides_a[0], stage=SHRINK, **of)
        pairs = (tokens, experts, weights, indices, starts, self._widths)
        _expand(self.y_accum, self.shrink_out, w_b, *pairs, strides_b, True, self._loras)
        return self.y_accum

    def close(self) -> None:
        """Nothing is left to release."""


@fi_api
def prepare_bgmv_moe(
    x: torch.Tensor,
    lora_a_weights: Sequence[torch.Tensor],
    lora_b_weights: Sequence[torch.Tensor],
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    lora_indices: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    *,
    backend: str = "cake",
    fallback: bool = True,
    shrink_out: torch.Tensor | None = None,
    y_accum: torch.Tensor | None = None,
    grouped: bool | None = None,
    order_remap: bool | None = None,
) -> BGMVMoEPlan:
    """Makes the tables of addresses and the memory of `bgmv_moe` once, for calls on the same tensors.

    Args:
        x: `[tokens, in]`, bf16 or fp16.
        lora_a_weights: at most 3 slices, each `[loras, num_experts, rank, in]`, dtype of x, of one stride of adapters.
        lora_b_weights: of each slice `[loras, num_experts, out, rank]`.
        sorted_token_ids, expert_ids, lora_indices, topk_weights: as for `bgmv_moe_expand`.
        num_experts: experts of the weights.
        backend: "cake", or "blackwell"; both are the same here, on every GPU and on the CPU.
        fallback, grouped, order_remap: accepted; there is one way to compute it.
        shrink_out: `[slices, pairs, rank]`, dtype of x; None: made here.
        y_accum: `[tokens, sum of out]`, fp32; None: made here.

    Returns:
        An object whose `run()` returns y_accum.

    Raises:
        ValueError: a shape, stride or device does not fit; the text names the argument.
        TypeError: a dtype does not fit.
    """
    if backend not in ("cake", "blackwell"):
        raise ValueError(f"backend must be 'cake' or 'blackwell'; got {backend!r}")
    _check_slices(x, lora_a_weights, lora_b_weights, num_experts)
    _check_pairs(sorted_token_ids, expert_ids)
    _check_weights(topk_weights, sorted_token_ids.numel())
    slices = {"lora_a_weights": lora_a_weights, "lora_b_weights": lora_b_weights}
    tables = [_addresses(name, weights, x, num_experts) for name, weights in slices.items()]
    if len({*tables[0][1]}) != 1:
        raise ValueError(f"lora_a_weights must have one stride between adapters in all slices; got {tables[0][1]}")
    import torch

    count, rank, widths = len(lora_a_weights), lora_a_weights[0].shape[2], [w.shape[2] for w in lora_b_weights]
    starts = torch.zeros(count, dtype=torch.int64, device=x.device)
    for s in range(1, count):
        starts[s].fill_(sum(widths[:s]))  # a copy from the host would wait for the device
    shapes = (count, sorted_token_ids.numel(), rank), (len(x), sum(widths))
    memory = []
    for name, given, shape, dtype in (
        ("shrink_out", shrink_out, shapes[0], x.dtype),
        ("y_accum", y_accum, shapes[1], torch.float32),
    ):
        buffer = torch.empty(shape, dtype=dtype, device=x.device) if given is None else given
        if tuple(buffer.shape) != shape or buffer.dtype is not dtype:
            raise ValueError(f"{name} must be {dtype} of shape {list(shape)}; got {buffer.dtype} {list(buffer.shape)}")
        memory.append(buffer)
    kept = (*tables, starts, (list(lora_a_weights), list(lora_b_weights)))  # the addresses stay valid
    own = x, sorted_token_ids, expert_ids, lora_indices, topk_weights
    return BGMVMoEPlan(memory[0], memory[1], kept, own, widths)


def _check_slices(x: torch.Tensor, a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], num_experts: int) -> None:
    """Raises TypeError and ValueError unless a and b hold the slices of adapters for the experts, which take x."""
    import torch

    if not len(a) or len(b) != len(a):
        raise ValueError(
            f"lora_a_weights and lora_b_weights must have as many tensors, at least 1; got {len(a)} and {len(b)}"
        )
    for name, tensors in (("x", [x]), ("lora_a_weights", a), ("lora_b_weights", b)):
        for t in tensors:
            if not isinstance(t, torch.Tensor):
                raise TypeError(f"{name}: tensors are required; got {type(t).__name__}")
    if x.ndim != 2 or any(w.ndim != 4 for w in (*a, *b)):
        raise ValueError(
            "x must have shape [tokens, in], lora_a_weights and lora_b_weights [loras, num_experts, rows, k]; got "
            f"{[list(t.shape) for t in (x, *a, *b)]}"
        )
    loras, rank = a[0].shape[0], a[0].shape[2]
    for name, weights, rows, k in (("lora_a_weights", a, rank, x.shape[1]), ("lora_b_weights", b, None, rank)):
        for w in weights:
            wanted = [loras, num_experts, w.shape[2] if rows is None else rows, k]
            if list(w.shape) != wanted:
                raise ValueError(f"{name} must have shape {wanted}; got {list(w.shape)}")


def _addresses(
    name: str, weights: Sequence[torch.Tensor], x: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, list[int]]:
    """The table of the addresses of slices, and the stride of adapters in each. Raises TypeError and ValueError."""
    import torch

    table = torch.empty(len(weights), num_experts, dtype=torch.int64, device=x.device)
    for w in weights:
        if w.dtype is not x.dtype:
            raise TypeError(f"{name} must have the dtype of x, {x.dtype}; got {w.dtype}")
        if w.device != x.device:
            raise ValueError(f"{name} must be on {x.device}; got {w.device}")
    return table, [fill_w_ptr(table, w, num_experts, s) for s, w in enumerate(weights)]


@fi_api(trace=pairs)
def bgmv_moe(
    x: torch.Tensor,
    lora_a_weights: Sequence[torch.Tensor],
    lora_b_weights: Sequence[torch.Tensor],
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    lora_indices: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    output_dim: int | None = None,
) -> torch.Tensor:
    """Computes `sum over the pairs of a token of topk_weights B[adapter, expert] (A[adapter, expert] x[token])`.

    It makes tables and memory in each call; `prepare_bgmv_moe` keeps them.

    Args:
        x, lora_a_weights, lora_b_weights, sorted_token_ids, expert_ids, lora_indices, topk_weights, num_experts: as for
            `prepare_bgmv_moe`.
        output_dim: columns of the result, the sum of the outputs of all slices or more; None: the sum.

    Returns:
        `[tokens, output_dim]`, dtype of x; zeros for tokens without an adapter.

    Raises:
        ValueError: a shape, stride or device does not fit; the text names the argument.
        TypeError: a dtype does not fit.
    """
    import torch

    arguments = (sorted_token_ids, expert_ids, lora_indices, topk_weights, num_experts)
    found = prepare_bgmv_moe(x, lora_a_weights, lora_b_weights, *arguments).run()
    width = found.shape[1] if output_dim is None else output_dim
    if width < found.shape[1]:
        raise ValueError(f"output_dim must be at least {found.shape[1]}, the outputs of all slices; got {width}")
    out = found.to(x.dtype)
    return out if width == found.shape[1] else torch.nn.functional.pad(out, (0, width - found.shape[1]))
