"""The size of the workspace of a layer."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING

from fi_core.fused_moe.activations import kind_of
from fi_core.fused_moe.expert_lora import adapter_bytes
from fi_core.fused_moe.formats import check_backend, check_ranks
from fi_core.fused_moe.moe_experts import COUNTERS
from fi_core.observe.log import fi_api
from fi_core.runtime.errors import refuse
from fi_core.runtime.launch.plan import ALIGNMENT, aligned
from fi_core.tllm_enums import ActivationType, is_gated_activation

if TYPE_CHECKING:
    import torch

_BLOCK = 128  # columns that share a scale


def table_words(experts: int, slots: int) -> tuple[int, int, int, int, int]:
    """Words of the tables of a layer: offsets, active, counters, rows, positions."""
    return experts + 1, experts + 1, COUNTERS, slots, slots


@fi_api
def cutlass_fused_moe_workspace_size(
    max_num_tokens: int,
    hidden_size: int,
    intermediate_size: int,
    num_experts_total: int,
    top_k: int,
    *,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    output_dtype: torch.dtype | None = None,
    activation_type: int = ActivationType.Swiglu,
    tp_size: int = 1,
    tp_rank: int = 0,
    ep_size: int = 1,
    ep_rank: int = 0,
    min_latency_mode: bool = False,
    use_deepseek_fp8_block_scale: bool = False,
    use_w4_group_scaling: bool = False,
    use_mxfp8_act_scaling: bool = False,
    use_fused_finalize: bool = True,
    use_packed_weights: bool = False,
    use_wfp4afp8_humming: bool = False,
    device: torch.device | None = None,
    backend: str = "cutlass",
    lora: bool = False,
) -> int:
    """Returns the bytes of a `workspace_buffer` with which `cutlass_fused_moe` allocates nothing between its kernels.

    They suffice for any number of tokens up to max_num_tokens and for any routing. What torch multiplies before a
    kernel (the input scales of int4, the scales of NVFP4 and of e4m3 tokens) stays in memory of torch.

    Args:
        max_num_tokens: most tokens of a call.
        hidden_size, intermediate_size: of the weights of this rank, in values: the columns of fc1 and of fc2.
        num_experts_total: of all ranks.
        top_k: experts of a token.
        x_dtype: of input.
        weight_dtype: of the weights; activations of float8_e4m3fn are quantised, but for use_mxfp8_act_scaling.
        output_dtype: of the result; None means bfloat16. Sums have 16 bits in any case.
        activation_type: an `ActivationType`.
        tp_size, tp_rank, ep_size, ep_rank: as for `cutlass_fused_moe`.
        min_latency_mode: False.
        use_deepseek_fp8_block_scale: whether activations have scales of 128 values.
        use_w4_group_scaling, use_mxfp8_act_scaling, use_packed_weights: the formats whose weights become 16-bit floats.
        use_fused_finalize, device: accepted.
        backend: as for `cutlass_fused_moe`.
        use_wfp4afp8_humming: whether activations of mxfp4 weights become e4m3.
        lora: whether calls have adapters.

    Raises:
        ValueError: a number does not fit; the text names the argument.
        TypeError: a dtype is none.
        NotImplementedError: min_latency_mode is asked for.
        BackendSupportedError: backend is another.
    """
    import torch

    check_backend(backend)

    for name, dtype in (("x_dtype", x_dtype), ("weight_dtype", weight_dtype), ("output_dtype", output_dtype)):
        if not isinstance(dtype, torch.dtype) and (dtype is not None or name != "output_dtype"):
            raise TypeError(f"{name} must be a torch.dtype; got {dtype!r}")
    refuse("leave it out: kernels are chosen by the number of tokens", min_latency_mode=min_latency_mode)
    _check_least(0, max_num_tokens=max_num_tokens)
    _check_least(1, hidden_size=hidden_size, intermediate_size=intermediate_size, num_experts_total=num_experts_total)
    _check_least(1, top_k=top_k, tp_size=tp_size, ep_size=ep_size)
    check_ranks(tp=(tp_size, tp_rank), ep=(ep_size, ep_rank))
    if num_experts_total % ep_size:
        raise ValueError(f"num_experts_total must be a multiple of ep_size {ep_size}; got {num_experts_total}")
    slots, width = max_num_tokens * top_k, intermediate_size
    mixed = use_w4_group_scaling or use_mxfp8_act_scaling or weight_dtype in (torch.uint8, torch.int64)
    narrow = 1 if weight_dtype is torch.float8_e4m3fn and not mixed else 2
    columns = width * (2 if is_gated_activation(kind_of(activation_type)) else 1)
    scales = [4 * slots * (n // _BLOCK) for n in (hidden_size, width) if use_deepseek_fp8_block_scale]
    sizes = [
        4 * sum(table_words(num_experts_total // ep_size, slots)),
        0 if mixed else narrow * slots * hidden_size,  # gathered tokens
        2 * slots * columns,  # the first product
        narrow * slots * width,  # activated
        2 * slots * hidden_size,  # the second product
        *scales,
        2 * max_num_tokens * hidden_size if mixed and x_dtype.itemsize == 1 else 0,  # tokens of 4 or 8 bits, as bf16
    ]
    if use_wfp4afp8_humming and use_mxfp8_act_scaling:  # operands in e4m3 and its scales, and in bf16
        sizes += [size for n in (max_num_tokens * hidden_size, slots * width) for size in (n, n // 32, 2 * n)]
    if lora:
        sizes += adapter_bytes(slots, columns, width, hidden_size, num_experts_total // ep_size)
    return ALIGNMENT + sum(map(aligned, sizes))


def _check_least(least: int, **sizes: int) -> None:
    for name, value in sizes.items():
        if index(value) < least:
            raise ValueError(f"{name} must be at least {least}; got {value}")
