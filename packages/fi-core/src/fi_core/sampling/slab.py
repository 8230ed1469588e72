"""Top-k and top-p sampling that also gives the selected tokens in the order of their probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.observe.log import fi_api
from fi_core.runtime.tensors import check_apart, check_writable
from fi_core.sampling.draw import top_k_top_p_sampling_from_probs
from fi_core.sampling.renorm import top_p_renorm_probs
from fi_core.topk import TopKTieBreak
from fi_core.topk import top_k as select_top_k
from fi_core.utils import check_shape_dtype_device

if TYPE_CHECKING:
    import torch

__all__ = ["cake_top_k_top_p_sampling_from_probs"]

_SLAB = 1024  # tokens of a row of the slab


def _check_top_k(top_k: torch.Tensor | int, top_k_max: int | None) -> int:
    """The most tokens of a row, without a look at a tensor on a GPU."""
    bound = top_k if isinstance(top_k, int) else _SLAB if top_k_max is None else top_k_max
    if not 1 <= bound <= _SLAB:
        name = "top_k" if isinstance(top_k, int) else "top_k_max"
        raise ValueError(f"{name} must be 1 to {_SLAB}; got {bound}: top_k_top_p_sampling_from_probs takes any top_k")
    return bound


@fi_api
def cake_top_k_top_p_sampling_from_probs(
    probs: torch.Tensor,
    top_k: torch.Tensor | int,
    top_p: torch.Tensor | float,
    *,
    top_k_max: int | None = None,
    generator: torch.Generator | None = None,
    philox_seed: int | None = None,
    philox_offset: int | None = None,
    out: torch.Tensor | None = None,
    renorm_out: torch.Tensor | None = None,
    workspace: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    enable_pdl: bool = True,
) -> torch.Tensor:
    """`top_k_top_p_sampling_from_probs` with top-k first, and the selected tokens on request.

    The slab of a row holds its top-k tokens by falling probability, equal ones by rising index. All tokens equal to the
    k-th may be drawn, as everywhere in `sampling`; the slab has k of them.

    Args:
        probs: `[rows, vocab]`, fp32, contiguous.
        top_k: 1 to 1024, or int32 `[rows]` of such numbers.
        top_p: above 0, at most 1, or fp32 `[rows]`: the share of the sum of the top-k tokens.
        top_k_max: the largest number of a tensor top_k; None: 1024. A row with a larger one has a slab of top_k_max.
        generator: as for `top_k_top_p_sampling_from_probs`.
        philox_seed, philox_offset: its seed and offset; both or neither.
        out: int32 `[rows]`; allocated if None.
        renorm_out: fp32 `[rows, 1024]`: receives the probabilities of the slab divided by the sum of those that top_p
            keeps, 0 for others; elements after the slab stay.
        workspace: fp32 `[rows, 1024]`, int32 `[rows, 1024]` and int32 `[rows]`, which receive the probabilities and the
            tokens of the slab, and its length; elements after the slab stay.
        enable_pdl: accepted; programmatic dependent launch is on where the hardware has it.

    Returns:
        out.

    Raises:
        ValueError: a shape, stride, device or number does not fit, or one of philox_seed and philox_offset is missing.
        TypeError: a dtype does not fit.
    """
    import torch

    if probs.ndim != 2 or not probs.is_contiguous():
        raise ValueError(f"probs must be contiguous [rows, vocab]; got {list(probs.shape)}, strides {probs.stride()}")
    if probs.dtype is not torch.float32:
        raise TypeError(f"probs must be torch.float32; got {probs.dtype}")
    if (philox_seed is None) != (philox_offset is None):
        raise ValueError(
            f"philox_seed and philox_offset must be given together; got {philox_seed!r} and {philox_offset!r}"
        )
    (rows, vocab), bound = probs.shape, _check_top_k(top_k, top_k_max)
    slab = (rows, _SLAB)
    values, tokens, counts = workspace or (None, None, None)
    written = (
        ("out", out, (rows,), torch.int32),
        ("renorm_out", renorm_out, slab, torch.float32),
        ("workspace[0]", values, slab, torch.float32),
        ("workspace[1]", tokens, slab, torch.int32),
        ("workspace[2]", counts, (rows,), torch.int32),
    )
    for name, x, shape, dtype in written:
        if x is not None:
            check_shape_dtype_device(x, shape, dtype, probs.device, name)
            check_writable(name, x)
    check_apart({name: x for name, x, *_ in written}, {"probs": probs, "top_k": top_k, "top_p": top_p})
    drawn = top_k_top_p_sampling_from_probs(
        probs, top_k, top_p, generator=generator, seed=philox_seed, offset=philox_offset
    )
    assert isinstance(drawn, torch.Tensor)
    if renorm_out is not None or values is not None:
        width = min(bound, vocab)
        kept, index = select_top_k(probs, width, sorted=True, tie_break=TopKTieBreak.SMALL)
        lengths = torch.full((rows,), width, dtype=torch.int32, device=probs.device)
        if isinstance(top_k, torch.Tensor):
            lengths = lengths.minimum(top_k)
        inside = torch.arange(width, device=probs.device) < lengths[:, None]
        found = [] if values is None else [(values, kept), (tokens, index.int())]
        if renorm_out is not None:
            found.append((renorm_out, top_p_renorm_probs(kept.masked_fill(~inside, 0.0), top_p)))
        for to, new in found:
            assert to is not None
            to[:, :width] = torch.where(inside, new, to[:, :width])
        if counts is not None:
            counts.copy_(lengths)
    return drawn if out is None else out.copy_(drawn)
