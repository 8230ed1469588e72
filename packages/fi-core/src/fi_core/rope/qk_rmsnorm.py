"""The norm and the rotation of q and k behind the projection of a video transformer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from fi_core.observe.draw import Draw, nbytes
from fi_core.observe.log import fi_api
from fi_core.observe.trace import Const, Scalar, Tensor, TraceTemplate, Var, Work, samples
from fi_core.runtime.launch.operator import operator
from fi_core.runtime.spec.constraint import ON_CPU, at_least
from fi_core.runtime.spec.dtype import DTYPES
from fi_core.runtime.spec.op import Entry, Implementation, Op, Unit, Values

if TYPE_CHECKING:
    import torch


class _Config(NamedTuple):
    heads_per_thread: int
    interleave: bool


def _unit(axes: Values) -> Unit:
    """Kernel entries in order of preference: a CTA holds all heads of a token in registers."""
    types = f"{DTYPES[str(axes['dtype'])].device}, {DTYPES[str(axes['out'])].device}"
    entries = tuple(
        Entry(
            f"qk_rmsnorm_rope_{'pairs' if interleave else 'halves'}_{threads}",
            f"qk_rmsnorm_rope<{types}, {heads}, {str(interleave).lower()}>",
            threads,
            _Config(heads, interleave),
        )
        for interleave in (True, False)
        for heads, threads in ((2, 256), (2, 512), (2, 1024))
    )
    return Unit("fi/rope/qk_rmsnorm_rope.cuh", "QkRmsnormRopeParams", entries)


QK_RMSNORM_ROPE = Op(
    name="qk_rmsnorm_rope",
    family="rope",
    arguments="Tensor(a!) q_out, Tensor(b!) k_out, Tensor(c!) v_out, Tensor qkv, Tensor q_weight, Tensor k_weight, "
    "int ppf, int pph, int ppw, int frame_channels, int height_channels, int width_channels, float eps=1e-06, "
    "float base=10000.0, bool interleave=True, float factor=1.0, float low=0.0, float high=0.0, "
    "float attention_factor=1.0, bool is_qk_norm=True, float qk_scale=1.0, float v_scale=1.0",
    axes={"dtype": ("f16", "bf16"), "out": ("f16", "bf16", "e4m3")},
    config=_Config,
    implementations=(Implementation("cpu", ON_CPU), Implementation("cuda", at_least(80), _unit)),
    prebuilt=({"dtype": "bf16", "out": "bf16"},),
)
_qk_rmsnorm_rope = operator(QK_RMSNORM_ROPE)


def _frequencies(channels, base, factor, low, high):  # type: ignore[no-untyped-def]
    import torch

    pair = torch.arange(channels // 2, dtype=torch.float64)
    frequency = base ** (-2 * pair / max(channels, 1))
    if factor == 1.0:
        return frequency
    ramp = ((pair - low) / ((high + 0.001 if abs(low - high) <= 1e-6 else high) - low)).clamp(0, 1)
    return frequency / factor * ramp + frequency * (1 - ramp)


def _computed(  # type: ignore[no-untyped-def]
    kind,
    qkv,
    q_weight,
    k_weight,
    ppf,
    pph,
    ppw,
    num_frame_channels,
    num_height_channels,
    num_width_channels,
    num_heads_q,
    num_heads_k,
    num_heads_v,
    head_dim,
    eps=1e-6,
    base=10000.0,
    interleave=True,
    factor=1.0,
    low=0.0,
    high=0.0,
    attention_factor=1.0,
    is_qk_norm=True,
):
    import torch

    at = torch.arange(qkv.shape[0]) % (ppf * pph * ppw)
    axes = at // (pph * ppw), at // ppw % pph, at % ppw
    channels = num_frame_channels, num_height_channels, num_width_channels
    angles = torch.cat([x[:, None] * _frequencies(n, base, factor, low, high) for x, n in zip(axes, channels)], -1)
    angles = angles.unsqueeze(1).to(qkv.device)
    cosine, sine = (angles.cos() * attention_factor).to(kind), (angles.sin() * attention_factor).to(kind)
    q, k, v = qkv.to(kind).unflatten(-1, (-1, head_dim)).split([num_heads_q, num_heads_k, num_heads_v], 1)
    found = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        flat = x.flatten(1)
        if is_qk_norm:
            flat = flat * (flat.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.to(kind)
        x, rest = flat.view(x.shape).split([sum(channels), head_dim - sum(channels)], -1)
        a, b = (x[..., 0::2], x[..., 1::2]) if interleave else x.chunk(2, -1)
        parts = a * cosine - b * sine, b * cosine + a * sine
        turned = torch.stack(parts, -1).flatten(-2) if interleave else torch.cat(parts, -1)
        found.append(torch.cat([turned, rest], -1))
    return *found, v


def _reference(qkv, **others):  # type: ignore[no-untyped-def]
    import torch

    return _computed(torch.float64, qkv, **others)


def _eager(qkv, **others):  # type: ignore[no-untyped-def]
    import torch

    return tuple(x.to(qkv.dtype) for x in _computed(torch.float32, qkv, **others))


def _make(
    draw: Draw,
    *,
    dtype: str = "bfloat16",
    batch_size: int = 2,
    ppf: int = 2,
    pph: int = 3,
    ppw: int = 2,
    num_heads: int = 3,
    head_dim: int = 64,
    interleave: bool = True,
    factor: float = 1.0,
    is_qk_norm: bool = True,
) -> dict[str, Any]:
    heads = {"num_heads_q": num_heads, "num_heads_k": num_heads, "num_heads_v": num_heads + 1}
    height = head_dim // 6 * 2
    yarn = {"factor": factor, "low": 2.0, "high": 9.0, "attention_factor": 1.1} if factor != 1 else {}
    return {
        "qkv": draw.rows(draw.normal((batch_size * ppf * pph * ppw, sum(heads.values()) * head_dim), dtype)),
        **{f"{name}_weight": draw.normal((num_heads * head_dim,), dtype) for name in ("q", "k")},
        "ppf": ppf,
        "pph": pph,
        "ppw": ppw,
        "num_frame_channels": head_dim - 2 * height,
        "num_height_channels": height,
        "num_width_channels": height,
        **heads,
        "head_dim": head_dim,
        "interleave": interleave,
        "is_qk_norm": is_qk_norm,
        **yarn,
    }


def _work(arguments: Mapping[str, Any]) -> Work:
    """Reads and writes q, k and v once."""
    qkv = arguments["qkv"]
    return Work(9 * qkv.numel(), 2 * nbytes(qkv) + nbytes(arguments["q_weight"], arguments["k_weight"]))


_COUNTS = (
    "ppf",
    "pph",
    "ppw",
    "num_frame_channels",
    "num_height_channels",
    "num_width_channels",
    "num_heads_q",
    "num_heads_k",
    "num_heads_v",
    "head_dim",
)
_NUMBERS = ("eps", "base", "interleave", "factor", "low", "high", "attention_factor", "is_qk_norm")


@fi_api(
    trace=TraceTemplate(
        "fused_qk_rmsnorm_rope",
        axes={
            "num_tokens": Var(),
            "width": Const(abbrev=""),
            "q_width": Const(abbrev=""),
            "k_width": Const(abbrev=""),
            **{name: Const() for name in ("num_heads_q", "num_heads_k", "num_heads_v", "head_dim")},
        },
        inputs={
            "qkv": Tensor(["num_tokens", "width"]),
            "q_weight": Tensor(["q_width"]),
            "k_weight": Tensor(["k_width"]),
            **{name: Scalar("int32") for name in _COUNTS},
            **{name: Scalar("float32", optional=True) for name in _NUMBERS},
        },
        outputs={f"{x}_out": Tensor(["num_tokens", f"num_heads_{x}", "head_dim"], dtype_from="qkv") for x in "qkv"},
        reference=(_frequencies, _computed, _reference),
        op="qk_rmsnorm_rope",
        make=_make,
        samples=samples(
            {
                "dtype": ("bfloat16", "float16"),
                "interleave, factor, is_qk_norm": ((True, 1.0, True), (False, 4.0, True), (True, 4.0, False)),
                "num_heads, head_dim": ((3, 64), (24, 128), (9, 256)),
            }
        ),
        work=_work,
        eager=_eager,
        others=("output_fp8", "output_quant_scale", "v_quant_scale"),
        description="RMSNorm over all heads of q and of k, and rotation by the place in a grid of patches.",
    )
)
def fused_qk_rmsnorm_rope(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    *,
    ppf: int,
    pph: int,
    ppw: int,
    num_frame_channels: int,
    num_height_channels: int,
    num_width_channels: int,
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int,
    head_dim: int,
    eps: float = 1e-6,
    base: float = 10000.0,
    interleave: bool = True,
    factor: float = 1.0,
    low: float = 0.0,
    high: float = 0.0,
    attention_factor: float = 1.0,
    is_qk_norm: bool = True,
    output_fp8: bool = False,
    output_quant_scale: float = 1.0,
    v_quant_scale: float = 1.0,
    q_out: torch.Tensor | None = None,
    k_out: torch.Tensor | None = None,
    v_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalizes q and k over all their heads, rotates them by the place of the token in a video, and copies v.

    Token t of a sequence lies in frame `t // (pph ppw)`, row `t // ppw % pph` and column `t % ppw`. The pairs of a head
    rotate by the frame (num_frame_channels / 2 of them), then by the row, then by the column: pair i of an axis with c
    channels by `position base^(-2 i / c)` (RoPE, arXiv:2104.09864). Channels beyond the three counts stay as they are.
    Arithmetic is in fp32 with one rounding.

    Args:
        qkv: `[batch, ppf pph ppw, (num_heads_q + num_heads_k + num_heads_v) head_dim]` or `[num_tokens, ...]`, a
            multiple of `ppf pph ppw` tokens; bf16 or fp16. In 2-D, rows may be strided.
        q_weight: `[num_heads_q head_dim]`, dtype of qkv: weight of the RMSNorm of q.
        k_weight: `[num_heads_k head_dim]`, likewise of k.
        ppf: patches along the frames.
        pph: patches along the height.
        ppw: patches along the width.
        num_frame_channels: channels of a head that rotate by the frame; even.
        num_height_channels: likewise by the row.
        num_width_channels: likewise by the column. The sum of the three is a multiple of 16, at most head_dim.
        num_heads_q: heads of q.
        num_heads_k: heads of k.
        num_heads_v: heads of v.
        head_dim: a multiple of 8, at most 256.
        eps: of the RMSNorm.
        base: of the frequencies.
        interleave: pairs are neighbours (True), or half the rotated channels apart (False).
        factor: divides frequencies (YaRN, arXiv:2309.00071): pairs above high by all of it, below low not.
        low: pair from which frequencies are divided in part.
        high: pair from which they are divided whole.
        attention_factor: of cosines and sines; 1 if factor is 1.
        is_qk_norm: False: no norm.
        output_fp8: results in e4m3, saturated.
        output_quant_scale: q and k are multiplied by it before they become e4m3.
        v_quant_scale: likewise v.
        q_out: receives the result; allocated if None. Likewise k_out and v_out.

    Returns:
        q_out: `[batch, ppf pph ppw, num_heads_q, head_dim]` or `[num_tokens, num_heads_q, head_dim]`.
        k_out: likewise.
        v_out: likewise.

    Raises:
        ValueError: a shape, stride, device or number does not fit.
        TypeError: a dtype does not fit.
    """
    import torch

    heads = (num_heads_q, num_heads_k, num_heads_v)
    if qkv.ndim not in (2, 3) or qkv.shape[-1] != sum(heads) * head_dim:
        raise ValueError(
            f"qkv must have shape [batch, seq_len, {sum(heads) * head_dim}] or [num_tokens, {sum(heads) * head_dim}], "
            f"(num_heads_q + num_heads_k + num_heads_v) * head_dim columns; got {list(qkv.shape)}"
        )
    length, found = ppf * pph * ppw, qkv.shape[-2]
    if length <= 0 or (found != length if qkv.ndim == 3 else found % length):
        raise ValueError(f"qkv must have ppf * pph * ppw = {length} tokens, or in 2-D a multiple of that; got {found}")
    if factor == 1.0 and attention_factor != 1.0:
        raise ValueError(f"attention_factor must be 1 where factor is 1; got {attention_factor}")
    outer, tokens = qkv.shape[:-1], math.prod(qkv.shape[:-1])
    dtype = torch.float8_e4m3fn if output_fp8 else qkv.dtype
    shapes = ((*outer, count, head_dim) for count in heads)
    outs = [_output(*part, qkv, dtype) for part in zip(("q_out", "k_out", "v_out"), (q_out, k_out, v_out), shapes)]
    q, k, v = (out.view(tokens, count, head_dim) for out, count in zip(outs, heads))
    parts = qkv.reshape(tokens, sum(heads), head_dim)
    _qk_rmsnorm_rope(
        q, k, v, parts, q_weight=q_weight, k_weight=k_weight, ppf=ppf, pph=pph, ppw=ppw,
        frame_channels=num_frame_channels, height_channels=num_height_channels, width_channels=num_width_channels,
        eps=eps, base=base, interleave=interleave, factor=factor, low=low, high=high,
        attention_factor=attention_factor, is_qk_norm=is_qk_norm, qk_scale=output_quant_scale, v_scale=v_quant_scale,
    )  # fmt: skip
    return outs[0], outs[1], outs[2]


def _output(
    name: str, out: torch.Tensor | None, shape: tuple[int, ...], qkv: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The result that the caller gave, which must fit, or a new one."""
    if out is None:
        return qkv.new_empty(shape, dtype=dtype)
    if out.shape != shape or out.dtype != dtype or not out.is_contiguous():
        raise ValueError(
            f"{name} must be a contiguous tensor of {dtype} and shape {list(shape)}; got one of {out.dtype}, shape "
            f"{list(out.shape)} and strides {out.stride()}"
        )
    return out
