"""The formats of expert weights that `cutlass_fused_moe` takes, as layers of the kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.fused_moe.layer import E4M3_BLOCKS, E4M3_TOKENS, Layer, Mixed, Projection
from fi_core.fused_moe.ops import INT4, MXFP4, MXFP8, NVFP4
from fi_core.gemm import block_scaled
from fi_core.quantization.layout import SfLayout, check_scales, layout_of
from fi_core.quantization.ops import BLOCK_DEQUANTIZE
from fi_core.runtime.errors import BackendSupportedError
from fi_core.tllm_enums import is_gated_activation

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from fi_core.fused_moe.layer import Activation
    from fi_core.runtime.launch.plan import Launches

_BLOCK = 128
_RESIDUAL_FACTOR = 64  # callers pass residuals times 2^6, as FlashInfer's kernel wants them


def _scale_count(scales: Sequence[torch.Tensor], count: int, text: str) -> None:
    if len(scales) != count:
        raise ValueError(f"quant_scales must have {count} tensors for {text}; got {len(scales)}")


def _per_expert(name: str, scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`[experts]`, or one element, as the scale of all rows of each expert's weight."""
    experts, rows, _ = weight.shape
    if scale.numel() not in (1, experts):
        raise ValueError(f"{name} must have one element or {experts}, one for each expert; got {list(scale.shape)}")
    return scale.reshape(-1, 1).expand(experts, rows)


def _plain(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> Layer:
    import torch

    if x.dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(f"input must be float16 or bfloat16 for 16-bit weights; got {x.dtype}")
    for name, weight in (("fc1_expert_weights", up), ("fc2_expert_weights", down)):
        if weight.dtype is not x.dtype:
            raise TypeError(f"{name} must have the dtype of input, {x.dtype}; got {weight.dtype}")
    return Layer(x, Projection(up), Projection(down), x.dtype)


def _fp8_tensor(
    x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, scales: Sequence[torch.Tensor], dtype: torch.dtype
) -> Layer:
    _scale_count(scales, 4, "e4m3 weights with scales of tensors")
    import torch

    if x.dtype is not torch.float8_e4m3fn:
        raise TypeError(f"input must be float8_e4m3fn for e4m3 weights with scales of tensors; got {x.dtype}")
    up_scale, down_scale = (_per_expert(f"quant_scales[{i}]", scales[i], w) for i, w in ((0, up), (2, down)))
    return Layer(x, Projection(up, up_scale), Projection(down, down_scale), dtype, quant=scales[1].reshape(-1))


def fp8_blocks(
    x: torch.Tensor,
    up: Projection,
    down: Projection,
    dtype: torch.dtype,
    x_scale: torch.Tensor | None = None,
    names: tuple[str, str] = ("quant_scales[0]", "quant_scales[1]"),
) -> Layer:
    """e4m3 weights with scales of 128 x 128."""
    for name, p in zip(names, (up, down)):
        if p.rows % _BLOCK or p.columns_of_k % _BLOCK:
            raise ValueError(f"weights must have multiples of {_BLOCK} rows and columns; got {list(p.weight.shape)}")
        expected = (len(p.weight), p.rows // _BLOCK, p.columns_of_k // _BLOCK)
        if p.scale is None or tuple(p.scale.shape) != expected:
            got = None if p.scale is None else list(p.scale.shape)
            raise ValueError(f"{name} must have shape {list(expected)}; got {got}")
    return Layer(x, up, down, dtype, x_scale, blocks=True)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor that callers view as wider integers."""
    import torch

    return x if x.dtype is torch.uint8 else x.contiguous().view(torch.uint8)


def block_scales(
    name: str, scales: torch.Tensor, shape: tuple[int, ...], swizzled: bool = False, size: int = 1
) -> torch.Tensor:
    """Scales of blocks as bytes; raises unless they are those of `[.., rows, blocks]`, see `check_scales`."""
    check_scales(name, scales, shape, layout_of(swizzled), size)
    return _bytes(scales)


def _scale_shape(weight: torch.Tensor, block: int, values: int = 2) -> tuple[int, int, int]:
    """`[experts, rows, blocks]` of bytes that hold so many values each."""
    experts, rows, columns = weight.shape
    return experts, rows, columns * values // block


def _of_16_bits(x: torch.Tensor) -> torch.Tensor:
    import torch

    if x.dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(f"input must be float16 or bfloat16 for 4-bit weights; got {x.dtype}")
    return x


def dequantized(
    p: Launches, x: torch.Tensor, name: str, scales: torch.Tensor, format: block_scaled.Format, swizzled: bool
) -> torch.Tensor:
    """Input with block scales, an argument of this name, as bf16, without its global scale."""
    import torch

    values = x if x.dtype is getattr(torch, format.dtype) else _bytes(x)
    rows, columns = x.shape[0], x.shape[1] * format.values
    codes = block_scales(name, scales, (rows, columns // format.block), swizzled).reshape(-1)
    out = p.scratch((rows, columns), torch.bfloat16)
    p.add(
        BLOCK_DEQUANTIZE,
        out,
        values,
        codes,
        block_size=format.block,
        scale_format=format.scale,
        layout=layout_of(swizzled).value,
    )
    return out


def _mxfp4(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, scales: Sequence[torch.Tensor]) -> Layer:
    _scale_count(scales, 2, "mxfp4 weights")
    first, second = (
        _mxfp4_projection(f"quant_scales[{i}]", w, scales[i], Mixed(MXFP4)) for i, w in enumerate((up, down))
    )
    return Layer(_of_16_bits(x), first, second, x.dtype)


def _mxfp4_projection(name: str, weight: torch.Tensor, scales: torch.Tensor, mixed: Mixed) -> Projection:
    weight = _bytes(weight)
    return Projection(weight, block_scales(name, scales, _scale_shape(weight, 32)), mixed=mixed)


def _mxfp4_with_e4m3(
    x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, scales: Sequence[torch.Tensor], activations: str
) -> Layer:
    """The residuals are factors of the outputs; all operands are exact in bf16."""
    import torch

    _scale_count(scales, 5, "use_wfp4afp8_humming")

    def projection(weight: torch.Tensor, place: int) -> Projection:
        residual = scales[place]
        if residual.dtype is not torch.float32:
            raise TypeError(f"quant_scales[{place}] must be float32; got {residual.dtype}")
        if residual.shape != (len(weight),):
            raise ValueError(
                f"quant_scales[{place}], residuals times 64, must have shape [{len(weight)}]; got "
                f"{list(residual.shape)}"
            )
        mixed = Mixed(MXFP4, alpha=residual / _RESIDUAL_FACTOR)
        return _mxfp4_projection(f"quant_scales[{place - 1}]", weight, scales[place - 1], mixed)

    first, second = projection(up, 1), projection(down, 4)
    return Layer(_of_16_bits(x), first, second, torch.bfloat16, activations=activations)


def _int4(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, scales: Sequence[torch.Tensor]) -> Layer:
    import torch

    _scale_count(scales, 8, "int4 weights")
    if scales[4].numel() or scales[5].numel():
        raise ValueError("quant_scales[4] and [5], zero points, must be empty: int4 weights are signed")

    def projection(i: int, weight: torch.Tensor) -> Projection:
        of_input, alpha, weight = scales[2 + i], scales[6 + i], _bytes(weight)
        factors = of_input.reshape(-1).to(x.dtype) if of_input.numel() else None
        mixed = Mixed(INT4, alpha=alpha.reshape(-1) if alpha.numel() else None, input_scale=factors)
        own = block_scales(f"quant_scales[{i}]", scales[i], _scale_shape(weight, 128), size=2)
        return Projection(weight, own.view(torch.bfloat16), mixed=mixed)

    first, second = projection(0, up), projection(1, down)
    return Layer(_of_16_bits(x), first, second, x.dtype)


def _nvfp4(
    p: Launches,
    x: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    scales: Sequence[torch.Tensor],
    input_sf: torch.Tensor | None,
    swizzled: bool,
) -> Layer:
    """The factors of outputs, 1 / (a_scale w_scale), are for activations times a_scale; here only fp4 input has it."""
    import torch

    _scale_count(scales, 6, "NVFP4 weights")
    a1, s1, alpha1, a2, s2, alpha2 = scales
    alphas = [(alpha * a).reshape(-1).float() for alpha, a in ((alpha1, a1), (alpha2, a2))]
    if x.dtype not in (torch.float16, torch.bfloat16):
        alphas[0] = alpha1.reshape(-1).float()
        if input_sf is None:
            raise ValueError("input_sf must be given with fp4 input; got None")
        x = dequantized(p, x, "input_sf", input_sf, block_scaled.NVFP4, swizzled)
    swizzled_by, found = SfLayout.layout_128x4.value, []
    for place, w, s, alpha in ((1, up, s1, alphas[0]), (4, down, s2, alphas[1])):
        w = _bytes(w)
        own = block_scales(f"quant_scales[{place}]", s, _scale_shape(w, 16), swizzled=True)
        found.append(Projection(w, own, mixed=Mixed(NVFP4, swizzled_by, alpha)))
    first, second = found
    return Layer(x, first, second, x.dtype)


def _mxfp8(
    p: Launches,
    x: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    scales: Sequence[torch.Tensor],
    input_sf: torch.Tensor | None,
    swizzled: bool,
) -> Layer:
    import torch

    _scale_count(scales, 4, "MXFP8 activations")
    if x.dtype is torch.float8_e4m3fn:
        if input_sf is None:
            raise ValueError("input_sf must be given with float8_e4m3fn input; got None")
        x = dequantized(p, x, "input_sf", input_sf, block_scaled.MXFP8, swizzled)
    found = []
    for place, w in ((0, up), (2, down)):
        fp8 = w.dtype is torch.float8_e4m3fn
        w = w if fp8 else _bytes(w)
        own = block_scales(f"quant_scales[{place}]", scales[place], _scale_shape(w, 32, 1 if fp8 else 2), swizzled=True)
        factor = scales[place + 1].reshape(-1)
        found.append(Projection(w, own, mixed=Mixed(MXFP8 if fp8 else MXFP4, SfLayout.layout_128x4.value, factor)))
    first, second = found
    return Layer(_of_16_bits(x), first, second, x.dtype)


def _check_flags(fp8_blocks: bool, w4: bool, mxfp8: bool, packed: bool, humming: bool) -> None:
    """Raises ValueError for flags of different formats."""
    if humming and (not w4 or packed):
        raise ValueError(
            "use_wfp4afp8_humming must come with use_w4_group_scaling=True and use_packed_weights=False; got "
            f"{w4} and {packed}"
        )
    if packed and (not w4 or mxfp8):
        raise ValueError(
            "use_packed_weights (int4) must come with use_w4_group_scaling=True and use_mxfp8_act_scaling=False; got "
            f"{w4} and {mxfp8}"
        )
    if fp8_blocks and (w4 or mxfp8):
        raise ValueError(
            "use_deepseek_fp8_block_scale must come without use_w4_group_scaling and use_mxfp8_act_scaling; got "
            f"{w4} and {mxfp8}"
        )


def layer_of(
    p: Launches,
    x: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    scales: Sequence[torch.Tensor],
    out_dtype: torch.dtype,
    input_sf: torch.Tensor | None,
    swizzled: bool,
    fp8_block_scale: bool,
    w4_group_scaling: bool,
    mxfp8_activations: bool,
    packed_weights: bool,
    e4m3_activations: bool,
) -> Layer:
    """The layer of a call of `cutlass_fused_moe`; biases are not in it yet.

    Raises:
        ValueError: a shape or the number of scales does not fit.
        TypeError: a dtype does not fit.
    """
    import torch

    for i, scale in enumerate(scales):
        if not isinstance(scale, torch.Tensor):
            raise TypeError(f"quant_scales[{i}] must be a torch.Tensor; got {type(scale).__name__}")
        if scale.is_nested:
            raise TypeError(f"quant_scales[{i}] must be a strided tensor; got a nested one")
    if x.ndim != 2:
        raise ValueError(f"input must have shape [tokens, hidden]; got {list(x.shape)}")
    for name, weight in (("fc1_expert_weights", up), ("fc2_expert_weights", down)):
        if weight.ndim != 3:
            raise ValueError(f"{name} must have shape [experts, rows, columns]; got {list(weight.shape)}")
    if out_dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise TypeError(f"output_dtype must be float16, bfloat16 or float32; got {out_dtype}")
    dtype = torch.float16 if out_dtype is torch.float16 else torch.bfloat16
    _check_flags(fp8_block_scale, w4_group_scaling, mxfp8_activations, packed_weights, e4m3_activations)
    if input_sf is not None and x.dtype in (torch.float16, torch.bfloat16):
        raise ValueError(f"input_sf must be None for {x.dtype} input, which has no scales; got {list(input_sf.shape)}")
    if e4m3_activations:
        return _mxfp4_with_e4m3(x, up, down, scales, E4M3_BLOCKS if mxfp8_activations else E4M3_TOKENS)
    if fp8_block_scale:
        _scale_count(scales, 2, "use_deepseek_fp8_block_scale")
        for name, weight in (("fc1_expert_weights", up), ("fc2_expert_weights", down)):
            if weight.dtype is not torch.float8_e4m3fn:
                raise TypeError(f"{name} must be float8_e4m3fn with use_deepseek_fp8_block_scale; got {weight.dtype}")
        return fp8_blocks(x, Projection(up, scales[0]), Projection(down, scales[1]), dtype)
    if up.dtype is torch.float8_e4m3fn and not mxfp8_activations:
        return _fp8_tensor(x, up, down, scales, dtype)
    if mxfp8_activations:
        return _mxfp8(p, x, up, down, scales, input_sf, swizzled)
    if w4_group_scaling:
        return (_int4 if packed_weights else _mxfp4)(x, up, down, scales)
    if up.dtype is torch.int64 or (up.dtype is torch.uint8 and len(scales) == 6):
        return _nvfp4(p, x, up, down, scales, input_sf, swizzled)
    if scales:
        raise ValueError(
            f"quant_scales must be None or empty for {up.dtype} weights without use_deepseek_fp8_block_scale, "
            f"use_w4_group_scaling or use_mxfp8_act_scaling; got {len(scales)} tensors"
        )
    return _plain(x, up, down)


def check_experts(
    layer: Layer,
    activation: Activation,
    ids: torch.Tensor,
    scales: torch.Tensor | None,
    tp_size: int,
    tp_rank: int,
    ep_size: int,
    ep_rank: int,
) -> None:
    """Raises ValueError unless shapes and ranks fit together."""
    (tokens, hidden), (experts, rows, _) = layer.x.shape, layer.up.weight.shape
    width = activation.width(rows)
    if is_gated_activation(activation.kind) and rows % 2:
        raise ValueError(f"fc1_expert_weights must have an even number of rows; got {list(layer.up.weight.shape)}")
    if layer.up.columns_of_k != hidden:
        raise ValueError(
            f"fc1_expert_weights must have {hidden} columns, those of input; got {list(layer.up.weight.shape)}"
        )
    if tuple(layer.down.weight.shape[:2]) != (experts, hidden) or layer.down.columns_of_k != width:
        raise ValueError(
            f"fc2_expert_weights must be of {experts} experts, {hidden} rows and {width} columns; got "
            f"{list(layer.down.weight.shape)}"
        )
    if ids.ndim != 2 or ids.shape[0] != tokens or not ids.shape[1]:
        raise ValueError(
            f"token_selected_experts must have shape [{tokens}, top_k], top_k at least 1; got {list(ids.shape)}"
        )
    if scales is not None and scales.shape != ids.shape:
        raise ValueError(
            f"token_final_scales must have the shape of token_selected_experts, {list(ids.shape)}; got "
            f"{list(scales.shape)}"
        )
    check_ranks(tp=(tp_size, tp_rank), ep=(ep_size, ep_rank))


def check_backend(backend: str) -> None:
    """Raises BackendSupportedError for another than "cutlass"."""
    if backend != "cutlass":
        raise BackendSupportedError(f"backend: 'cutlass' is required, which selects fi's kernels; got {backend!r}")


def check_ranks(**ranks: tuple[int, int]) -> None:
    """Raises ValueError unless each is (size, rank) with a rank below the size."""
    for name, (size, rank) in ranks.items():
        if not 0 <= rank < size:
            raise ValueError(f"{name}_rank must be in 0..{name}_size - 1 = {size - 1}; got {rank}")
