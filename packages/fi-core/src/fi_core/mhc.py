"""Manifold-constrained hyper-connections (mHC): four residual streams, mixed before and after each layer."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from fi_core.observe.draw import FLOATS, Draw, nbytes
from fi_core.observe.log import fi_api
from fi_core.observe.trace import Const, Scalar, Tensor, TraceTemplate, Var, Work, samples
from fi_core.runtime.launch.operator import operator
from fi_core.runtime.spec.constraint import ON_CPU, at_least
from fi_core.runtime.spec.dtype import DTYPES
from fi_core.runtime.spec.op import Entry, Implementation, Op, Unit, Values

if TYPE_CHECKING:
    import torch

__all__ = ["mhc_post", "mhc_pre_big_fuse", "mhc_pre_big_fuse_with_prenorm"]

_STREAMS = 4
_LOGITS = _STREAMS * (_STREAMS + 2)  # of a token: pre, post, and the rows of comb


class _PostConfig(NamedTuple):
    vec_size: int  # elements per vector


class _PreConfig(NamedTuple):
    vec_size: int  # elements per vector
    own_squares: bool  # the entry sums the squares of the residual itself


def _post_unit(axes: Values) -> Unit:
    """Kernel entries in order of preference."""
    dtype = DTYPES[str(axes["dtype"])]
    entries = tuple(
        Entry(f"mhc_post_{name}", f"mhc_post<{dtype.device}, {vec}>", 128, _PostConfig(vec))
        for name, vec in (("vector", 16 // dtype.bytes), ("scalar", 1))
    )
    return Unit("fi/mhc/mhc_post.cuh", "MhcPostParams", entries)


def _pre_unit(axes: Values) -> Unit:
    """Kernel entries in order of preference. One CTA reads all of a token where the squares are its own."""
    dtype, entries = DTYPES[str(axes["dtype"])], []
    for own, name, threads in ((False, "mix", 128), (True, "squares", 512)):
        for width, vec in (("vector", 16 // dtype.bytes), ("scalar", 1)):
            body = f"mhc_pre<{dtype.device}, {vec}, {str(own).lower()}>"
            entries.append(Entry(f"mhc_pre_{name}_{width}", body, threads, _PreConfig(vec, own)))
    return Unit("fi/mhc/mhc_pre.cuh", "MhcPreParams", tuple(entries))


_DTYPES = ("f16", "bf16", "f32")
_PREBUILT: tuple[Values, ...] = ({"dtype": "bf16"},)
MHC_POST = Op(
    name="mhc_post",
    family="mhc",
    arguments="Tensor(a!) out, Tensor x, Tensor residual, Tensor post_layer_mix, Tensor comb_res_mix, "
    "bool? enable_pdl=None",
    axes={"dtype": _DTYPES},
    config=_PostConfig,
    implementations=(Implementation("cpu", ON_CPU), Implementation("cuda", at_least(80), _post_unit)),
    prebuilt=_PREBUILT,
)
MHC_PRE = Op(
    name="mhc_pre",
    family="mhc",
    arguments="Tensor(a!) post_mix, Tensor(b!) comb_mix, Tensor(c!) layer_input, Tensor dot_mix, Tensor residual, "
    "Tensor mhc_scale, Tensor mhc_base, int k, Tensor? sqrsum=None, float rms_eps=1e-06, float mhc_pre_eps=1e-06, "
    "float mhc_sinkhorn_eps=1e-06, float mhc_post_mult_value=1.0, int sinkhorn_repeat=20, bool? enable_pdl=None",
    axes={"dtype": _DTYPES},
    config=_PreConfig,
    implementations=(Implementation("cpu", ON_CPU), Implementation("cuda", at_least(80), _pre_unit)),
    prebuilt=_PREBUILT,
)
_mhc_post = operator(MHC_POST)
_mhc_pre = operator(MHC_PRE)


def _mhc_post_reference(x, residual, post_layer_mix, comb_res_mix):  # type: ignore[no-untyped-def]
    new = x.double().unsqueeze(-2) * post_layer_mix.double().reshape(*x.shape[:-1], 4, 1)
    return new + comb_res_mix.double().mT @ residual.double()


def _mhc_post_eager(x, residual, post_layer_mix, comb_res_mix):  # type: ignore[no-untyped-def]
    new = x.float().unsqueeze(-2) * post_layer_mix.unsqueeze(-1)
    return (new + comb_res_mix.mT @ residual.float()).to(x.dtype)


def _mixed(dot_mix, squares, residual, mhc_scale, mhc_base, k, rms_eps, pre_eps, eps, factor, repeat):  # type: ignore[no-untyped-def]
    scale = mhc_scale.double().repeat_interleave(mhc_scale.new_tensor([4, 4, 16]).long())
    logits = dot_mix.double() * (squares.unsqueeze(-1) / k + rms_eps).rsqrt() * scale + mhc_base.double()
    pre, post, comb = logits.split([4, 4, 16], -1)
    comb = comb.unflatten(-1, (4, 4)).softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(repeat - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    layer_input = ((pre.sigmoid() + pre_eps).unsqueeze(-2) @ residual.double()).squeeze(-2)
    return (post.sigmoid() * factor).unsqueeze(-1), comb, layer_input


def _mhc_pre_reference(  # type: ignore[no-untyped-def]
    dot_mix,
    sqrsum,
    residual,
    mhc_scale,
    mhc_base,
    k,
    rms_eps=1e-6,
    mhc_pre_eps=1e-6,
    mhc_sinkhorn_eps=1e-6,
    mhc_post_mult_value=1.0,
    sinkhorn_repeat=20,
):
    return _mixed(
        dot_mix,
        sqrsum.double(),
        residual,
        mhc_scale,
        mhc_base,
        k,
        rms_eps,
        mhc_pre_eps,
        mhc_sinkhorn_eps,
        mhc_post_mult_value,
        sinkhorn_repeat,
    )


def _mhc_prenorm_reference(  # type: ignore[no-untyped-def]
    dot_mix,
    residual,
    mhc_scale,
    mhc_base,
    rms_eps=1e-6,
    mhc_pre_eps=1e-6,
    mhc_sinkhorn_eps=1e-6,
    mhc_post_mult_value=1.0,
    sinkhorn_repeat=20,
):
    squares = residual.double().square().sum((-1, -2))
    return _mixed(
        dot_mix,
        squares,
        residual,
        mhc_scale,
        mhc_base,
        4 * residual.shape[-1],
        rms_eps,
        mhc_pre_eps,
        mhc_sinkhorn_eps,
        mhc_post_mult_value,
        sinkhorn_repeat,
    )


def _pre_eager(dot_mix, residual, mhc_scale, mhc_base, sqrsum=None, k=None, **numbers):  # type: ignore[no-untyped-def]
    import torch

    usual = {"rms_eps": 1e-6, "mhc_pre_eps": 1e-6, "mhc_sinkhorn_eps": 1e-6, "mhc_post_mult_value": 1.0}
    pre_eps, eps, factor, rms_eps = ((usual | numbers)[n] for n in (*list(usual)[1:], "rms_eps"))
    x = residual.float()
    squares = x.square().sum((-1, -2)) if sqrsum is None else sqrsum
    normed = dot_mix * (squares.unsqueeze(-1) / (k or 4 * x.shape[-1]) + rms_eps).rsqrt()
    parts = zip(normed.split([4, 4, 16], -1), mhc_scale, mhc_base.split([4, 4, 16]))
    pre, post, comb = (part * scale + base for part, scale, base in parts)
    comb = comb.unflatten(-1, (4, 4)).softmax(-1) + eps
    for axis in [-2] + [-1, -2] * (numbers.get("sinkhorn_repeat", 20) - 1):
        comb = comb / (comb.sum(axis, keepdim=True) + eps)
    layer_input = torch.einsum("tm,tmh->th", pre.sigmoid() + pre_eps, x).to(residual.dtype)
    return (post.sigmoid() * factor).unsqueeze(-1), comb, layer_input


def _make_post(draw: Draw, *, dtype: str = "bfloat16", num_tokens: int = 5, hidden_size: int = 264) -> dict[str, Any]:
    x = draw.special(draw.normal((num_tokens, hidden_size), dtype), float("inf"), float("nan"))
    return {
        "x": draw.rows(x),
        "residual": draw.rows(draw.normal((num_tokens, _STREAMS, hidden_size), dtype)),
        "post_layer_mix": draw.normal((num_tokens, _STREAMS), "float32"),
        "comb_res_mix": draw.normal((num_tokens, _STREAMS, _STREAMS), "float32"),
    }


def _make_prenorm(
    draw: Draw, *, dtype: str = "bfloat16", num_tokens: int = 5, hidden_size: int = 264, **numbers: float
) -> dict[str, Any]:
    residual = draw.normal((num_tokens, _STREAMS, hidden_size), dtype, 3.0)
    return {
        "dot_mix": draw.normal((num_tokens, _LOGITS), "float32", 6.0),
        "residual": draw.rows(residual),
        "mhc_scale": draw.normal((3,), "float32"),
        "mhc_base": draw.normal((_LOGITS,), "float32"),
        "mhc_post_mult_value": 2.0,
        **numbers,
    }


def _make_pre(draw: Draw, *, num_tokens: int = 5, **sizes: Any) -> dict[str, Any]:
    made = _make_prenorm(draw, num_tokens=num_tokens, **sizes)
    residual = made["residual"]
    squares = residual.float().square().sum((-1, -2))
    return {"dot_mix": made.pop("dot_mix"), "sqrsum": squares, "k": _STREAMS * residual.shape[-1], **made}


def _work(flops: int, arguments: Mapping[str, Any]) -> Work:
    """A vector in 16 bits beside each four streams: the layer's output, or its input."""
    residual = arguments["residual"]
    written = nbytes(residual) if "x" in arguments else nbytes(residual) // _STREAMS
    return Work(flops * residual.numel(), written + nbytes(*arguments.values()))


_AXES: dict[str, Var | Const] = {"num_tokens": Var(), "streams": Const(abbrev="hc"), "hidden_size": Const(abbrev="h")}
_MIX = {
    "mhc_scale": Tensor(["three"], dtype="float32"),
    "mhc_base": Tensor(["logits"], dtype="float32"),
}
_SCALARS = {name: Scalar(optional=True) for name in ("rms_eps", "mhc_pre_eps", "mhc_sinkhorn_eps")} | {
    "mhc_post_mult_value": Scalar(optional=True),
    "sinkhorn_repeat": Scalar("int32", optional=True),
}
_RESIDUAL = Tensor(["num_tokens", "streams", "hidden_size"])
_DOT_MIX = Tensor(["num_tokens", "logits"], dtype="float32")


def _pre_trace(name: str, reference: Any, make: Any, others: tuple[str, ...], **inputs: Tensor | Scalar) -> Any:
    return TraceTemplate(
        name,
        axes={**_AXES, "logits": Const(abbrev=""), "three": Const(abbrev=""), "one": Const(abbrev="", value=1)},
        inputs={"dot_mix": _DOT_MIX, "residual": _RESIDUAL, **_MIX, **inputs, **_SCALARS},
        outputs={
            "post_mix": Tensor(["num_tokens", "streams", "one"], dtype="float32"),
            "comb_mix": Tensor(["num_tokens", "streams", "streams"], dtype="float32"),
            "layer_input": Tensor(["num_tokens", "hidden_size"], dtype_from="residual"),
        },
        reference=(_mixed, reference),
        op="mhc_pre",
        make=make,
        samples=(
            *samples({"dtype": FLOATS, "num_tokens, hidden_size": ((5, 264), (3, 7), (2, 4096), (0, 64))}),
            {"rms_eps": 0.5, "mhc_pre_eps": 0.25, "mhc_sinkhorn_eps": 0.125, "mhc_post_mult_value": 3.0},
            {"sinkhorn_repeat": 1},
        ),
        work=functools.partial(_work, 3),
        eager=_pre_eager,
        # A sum of four streams may cancel; logits of 20 lose digits in the exponential.
        tolerance={"float32": (5e-5, 2e-5)},
        others=others,
        description="Mixing weights of a layer from its projection logits, and the layer's input.",
    )


@fi_api(
    trace=TraceTemplate(
        "mhc_post",
        axes=_AXES,
        inputs={
            "x": Tensor(["num_tokens", "hidden_size"]),
            "residual": _RESIDUAL,
            "post_layer_mix": Tensor(["num_tokens", "streams"], dtype="float32"),
            "comb_res_mix": Tensor(["num_tokens", "streams", "streams"], dtype="float32"),
        },
        outputs={"out": Tensor(["num_tokens", "streams", "hidden_size"], dtype_from="residual")},
        reference=_mhc_post_reference,
        op="mhc_post",
        make=_make_post,
        samples=samples({"dtype": FLOATS, "num_tokens, hidden_size": ((5, 264), (3, 7), (2, 4096), (0, 64))}),
        work=functools.partial(_work, 10),
        eager=_mhc_post_eager,
        description="The residual streams behind a layer: its output, and the mixed streams before it.",
    )
)
def mhc_post(
    x: torch.Tensor, residual: torch.Tensor, post_layer_mix: torch.Tensor, comb_res_mix: torch.Tensor
) -> torch.Tensor:
    """Computes the residual streams behind a layer (mHC, arXiv:2512.24880).

    `out[.., n, i] = x[.., i] post_layer_mix[.., n] + sum over o of residual[.., o, i] comb_res_mix[.., o, n]`, in fp32
    with one rounding.

    Args:
        x: `[..., h]`, fp16, bf16 or fp32: the layer's output.
        residual: `[..., 4, h]`, dtype of x: the streams before the layer.
        post_layer_mix: `[..., 4]` or `[..., 4, 1]`, fp32.
        comb_res_mix: `[..., 4, 4]`, fp32; rows are old streams, columns new ones.

    Returns:
        out: `[..., 4, h]`, dtype of x.

    Raises:
        ValueError: a shape or device is wrong.
        TypeError: a dtype is wrong.
    """
    outer, tokens, h = _outer_shape(residual)
    _expect("x", x, (*outer, h))
    if post_layer_mix.shape != (*outer, _STREAMS):
        _expect("post_layer_mix", post_layer_mix, (*outer, _STREAMS, 1))
    _expect("comb_res_mix", comb_res_mix, (*outer, _STREAMS, _STREAMS))
    out = residual.new_empty((tokens, _STREAMS, h))
    _mhc_post(
        out,
        x.reshape(tokens, h),
        residual.reshape(tokens, _STREAMS, h),
        post_layer_mix=post_layer_mix.reshape(tokens, _STREAMS).contiguous(),
        comb_res_mix=comb_res_mix.reshape(tokens, _STREAMS, _STREAMS).contiguous(),
    )
    return out.view(residual.shape)


@fi_api(
    trace=_pre_trace(
        "mhc_pre_big_fuse",
        _mhc_pre_reference,
        _make_pre,
        ("num_splits", "block_size"),
        sqrsum=Tensor(["num_tokens"], dtype="float32"),
        k=Scalar("int32"),
    )
)
def mhc_pre_big_fuse(
    dot_mix: torch.Tensor,
    sqrsum: torch.Tensor,
    residual: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    k: int,
    rms_eps: float = 1e-6,
    mhc_pre_eps: float = 1e-6,
    mhc_sinkhorn_eps: float = 1e-6,
    mhc_post_mult_value: float = 1.0,
    sinkhorn_repeat: int = 20,
    num_splits: int = 1,
    block_size: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes the mixing weights of a layer and its input from projection logits (mHC, arXiv:2512.24880).

    The 24 logits of a token are those of pre (4), post (4) and comb (4 x 4, row by row). With
    `l = dot_mix / sqrt(sqrsum / k + rms_eps) * scale + mhc_base`, where scale is `mhc_scale[0]` for pre, `[1]` for post
    and `[2]` for comb: `pre = sigmoid(l) + mhc_pre_eps`; `post_mix = mhc_post_mult_value sigmoid(l)`; `comb_mix` is the
    softmax of each row plus mhc_sinkhorn_eps, divided by `sum + mhc_sinkhorn_eps` of its columns, and then
    `sinkhorn_repeat - 1` times of its rows and of its columns (Sinkhorn-Knopp); `layer_input` is the sum of the
    residual streams times pre, in fp32 with one rounding.

    Args:
        dot_mix: `[..., 24]`, or `[num_splits, ..., 24]` if num_splits is above 1, fp32: products of the streams of a
            token and the projection weights; splits are summed.
        sqrsum: `[...]`, or `[num_splits, ...]`, fp32: sums of the squares of those streams; splits are summed.
        residual: `[..., 4, h]`, fp16, bf16 or fp32.
        mhc_scale: `[3]`, fp32.
        mhc_base: `[24]`, fp32.
        k: how many elements sqrsum sums: 4 h for the whole residual.
        rms_eps: above 0.
        mhc_pre_eps: above 0.
        mhc_sinkhorn_eps: above 0.
        mhc_post_mult_value: factor of post_mix.
        sinkhorn_repeat: 1 or more.
        num_splits: how many partial sums there are.
        block_size: a hint of FlashInfer; it has no effect.

    Returns:
        post_mix: `[..., 4, 1]`, fp32.
        comb_mix: `[..., 4, 4]`, fp32; rows are old streams, columns new ones.
        layer_input: `[..., h]`, dtype of residual.

    Raises:
        ValueError: a shape, device or number is wrong.
        TypeError: a dtype is wrong.
    """
    outer, tokens, _ = _outer_shape(residual)
    splits = (num_splits,) if num_splits != 1 else ()
    _expect("dot_mix", dot_mix, (*splits, *outer, _LOGITS))
    _expect("sqrsum", sqrsum, (*splits, *outer))
    return _pre(
        dot_mix.reshape(num_splits, tokens, _LOGITS),
        sqrsum.reshape(num_splits, tokens).contiguous(),
        (residual, mhc_scale, mhc_base),
        k,
        (rms_eps, mhc_pre_eps, mhc_sinkhorn_eps),
        mhc_post_mult_value,
        sinkhorn_repeat,
    )


@fi_api(trace=_pre_trace("mhc_pre_big_fuse_with_prenorm", _mhc_prenorm_reference, _make_prenorm, ("block_size",)))
def mhc_pre_big_fuse_with_prenorm(
    dot_mix: torch.Tensor,
    residual: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    rms_eps: float = 1e-6,
    mhc_pre_eps: float = 1e-6,
    mhc_sinkhorn_eps: float = 1e-6,
    mhc_post_mult_value: float = 1.0,
    sinkhorn_repeat: int = 20,
    block_size: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `mhc_pre_big_fuse`, with the sum of the squares of the residual itself, and k = 4 h.

    Args:
        dot_mix: `[..., 24]` or `[1, ..., 24]`, fp32.
        residual: `[..., 4, h]`, fp16, bf16 or fp32.
        mhc_scale: `[3]`, fp32.
        mhc_base: `[24]`, fp32.
        rms_eps: above 0, as the other numbers: of `mhc_pre_big_fuse`.
        mhc_pre_eps: likewise.
        mhc_sinkhorn_eps: likewise.
        mhc_post_mult_value: likewise.
        sinkhorn_repeat: likewise.
        block_size: likewise.

    Returns:
        post_mix, comb_mix, layer_input: of `mhc_pre_big_fuse`.

    Raises:
        ValueError: a shape, device or number is wrong.
        TypeError: a dtype is wrong.
    """
    outer, tokens, h = _outer_shape(residual)
    if dot_mix.shape != (1, *outer, _LOGITS):
        _expect("dot_mix", dot_mix, (*outer, _LOGITS))
    return _pre(
        dot_mix.reshape(1, tokens, _LOGITS),
        None,
        (residual, mhc_scale, mhc_base),
        max(_STREAMS * h, 1),
        (rms_eps, mhc_pre_eps, mhc_sinkhorn_eps),
        mhc_post_mult_value,
        sinkhorn_repeat,
    )


def _pre(
    dot_mix: torch.Tensor,
    sqrsum: torch.Tensor | None,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    k: int,
    eps: tuple[float, float, float],
    post_factor: float,
    repeat: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """tensors: residual, mhc_scale, mhc_base; eps: of the RMS, of pre, of Sinkhorn."""
    import torch

    for name, value in zip(("rms_eps", "mhc_pre_eps", "mhc_sinkhorn_eps"), eps):
        if not value > 0:
            raise ValueError(f"{name} must be strictly positive; got {value}")
    residual, scale, base = tensors
    outer, tokens, h = _outer_shape(residual)
    post_mix = residual.new_empty((tokens, _STREAMS), dtype=torch.float32)
    comb_mix = residual.new_empty((tokens, _STREAMS, _STREAMS), dtype=torch.float32)
    layer_input = residual.new_empty((tokens, h))
    _mhc_pre(
        post_mix,
        comb_mix,
        layer_input,
        dot_mix=dot_mix.contiguous(),
        residual=residual.reshape(tokens, _STREAMS, h),
        mhc_scale=scale.contiguous(),
        mhc_base=base.contiguous(),
        k=k,
        sqrsum=sqrsum,
        rms_eps=eps[0],
        mhc_pre_eps=eps[1],
        mhc_sinkhorn_eps=eps[2],
        mhc_post_mult_value=post_factor,
        sinkhorn_repeat=repeat,
    )
    mixes = post_mix.view(*outer, _STREAMS, 1), comb_mix.view(*outer, _STREAMS, _STREAMS)
    return *mixes, layer_input.view(*outer, h)


def _outer_shape(residual: torch.Tensor) -> tuple[tuple[int, ...], int, int]:
    """The outer dimensions of `[..., 4, h]`, the product of them, and h."""
    if residual.ndim < 3 or residual.shape[-2] != _STREAMS:
        raise ValueError(f"residual must have shape [..., 4, H]; got {list(residual.shape)}")
    *outer, _, h = residual.shape
    return tuple(outer), math.prod(outer), h


def _expect(name: str, x: torch.Tensor, shape: tuple[int, ...]) -> None:
    if x.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}; got {list(x.shape)}")
