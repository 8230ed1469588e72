"""Descriptions of the products of low-rank adapters, with fp64 references."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from fi_core.observe.draw import Draw, nbytes
from fi_core.observe.trace import Const, Scalar, Tensor, TraceTemplate, Var, Work, samples, sized, tensors, words

_SIZES: dict[str, Any] = {
    "dtype": "bfloat16",
    "num_tokens": 21,
    "num_loras": 3,
    "rank": 16,
    "in_features": 136,
    "out_features": 72,
}


# Trace files hold the source of a reference, so each reference is whole in itself.
def _shrink_reference(inputs, lora_a_weights, output_tensor, lora_indices_tensor, scaling=1.0):  # type: ignore[no-untyped-def]
    out = output_tensor.double() * 0
    for t, adapter in enumerate(lora_indices_tensor.tolist()):
        if adapter >= 0:
            out[t] = lora_a_weights[adapter, 0].double() @ inputs[t].double() * scaling
    return out


def _expand_reference(inputs, lora_b_weights, output_tensor, lora_indices_tensor, add_inputs=True):  # type: ignore[no-untyped-def]
    out = output_tensor.double() * add_inputs
    for t, adapter in enumerate(lora_indices_tensor.tolist()):
        if adapter >= 0:
            out[t] += lora_b_weights[adapter, 0].double() @ inputs[t].to(lora_b_weights.dtype).double()
    return out


def _linear_reference(y, x, a, b, scale, lora_indices):  # type: ignore[no-untyped-def]
    out = y.double()
    for t, adapter in enumerate(lora_indices.tolist()):
        if adapter >= 0:
            out[t] += scale * (b[adapter, 0].double() @ (a[adapter, 0].double() @ x[t].double()))
    return out


def _pairs_reference(x, a, b, sorted_token_ids, expert_ids, lora_indices, topk_weights):  # type: ignore[no-untyped-def]
    out = x.new_zeros(x.shape[0], b.shape[2]).double()
    for t, e, weight in zip(sorted_token_ids.tolist(), expert_ids.tolist(), topk_weights.tolist()):
        adapter = int(lora_indices[t])
        if adapter >= 0:
            out[t] += weight * (b[adapter, e].double() @ (a[adapter, e].double() @ x[t].double()))
    return out


def _indices(draw: Draw, s: Any) -> Any:
    """Adapters of tokens; one of them, and every fifth, has none."""
    found = draw.integers(0, s.num_loras, (s.num_tokens,), "int64")
    if draw.nasty:
        found[::5] = -1
    return found


def _bank(draw: Draw, s: Any, rows: int, k: int) -> Any:
    return draw.normal((s.num_loras, 1, rows, k), s.dtype, k**-0.5)


@sized(**_SIZES)
def _make_shrink(draw: Draw, s: Any) -> dict[str, Any]:
    return {
        "inputs": draw.rows(draw.normal((s.num_tokens, s.in_features), s.dtype)),
        "lora_a_weights": _bank(draw, s, s.rank, s.in_features),
        "output_tensor": draw.rows(draw.normal((s.num_tokens, s.rank), "float32")),
        "lora_indices_tensor": _indices(draw, s),
        "scaling": 0.5,
    }


@sized(**_SIZES)
def _make_expand(draw: Draw, s: Any) -> dict[str, Any]:
    return {
        "inputs": draw.normal((s.num_tokens, s.rank), "float32"),
        "lora_b_weights": _bank(draw, s, s.out_features, s.rank),
        "output_tensor": draw.rows(draw.normal((s.num_tokens, s.out_features), s.dtype)),
        "lora_indices_tensor": _indices(draw, s),
    }


@sized(**_SIZES)
def _make_linear(draw: Draw, s: Any) -> dict[str, Any]:
    return {
        "y": draw.rows(draw.normal((s.num_tokens, s.out_features), s.dtype)),
        "x": draw.rows(draw.normal((s.num_tokens, s.in_features), s.dtype)),
        "lora_a_stacked": (_bank(draw, s, s.rank, s.in_features),),
        "lora_b_stacked": (_bank(draw, s, s.out_features, s.rank),),
        "scale": 0.5,
        "output_slices": (s.out_features,),
        "lora_indices": _indices(draw, s),
    }


@sized(**_SIZES, num_experts=4, top_k=2)
def _make_pairs(draw: Draw, s: Any) -> dict[str, Any]:
    pairs = s.num_tokens * s.top_k
    order = draw.permutation(pairs).long()
    shapes = (s.rank, s.in_features), (s.out_features, s.rank)
    banks = [draw.normal((s.num_loras, s.num_experts, *shape), s.dtype, shape[1] ** -0.5) for shape in shapes]
    return {
        "x": draw.rows(draw.normal((s.num_tokens, s.in_features), s.dtype)),
        "lora_a_weights": [banks[0]],
        "lora_b_weights": [banks[1]],
        "sorted_token_ids": order // s.top_k,
        "expert_ids": draw.integers(0, s.num_experts, (pairs,), "int64"),
        "lora_indices": _indices(draw, s),
        "topk_weights": draw.normal((pairs,), "float32").abs(),
        "num_experts": s.num_experts,
    }


def _linear_eager(y, x, a, b, scale, lora_indices):  # type: ignore[no-untyped-def]
    """The adapters' products for all tokens, of which each takes its own."""
    import torch

    a, b = a[:, 0], b[:, 0]
    index = lora_indices.clamp(min=0)[None, :, None]
    h = torch.matmul(x, a.mT).gather(0, index.expand(1, -1, a.shape[1]))[0]
    found = torch.matmul(h, b.mT).gather(0, index.expand(1, -1, b.shape[1]))[0]
    y += scale * found * (lora_indices >= 0)[:, None]
    return y


def _pairs_eager(x, a, b, sorted_token_ids, expert_ids, lora_indices, topk_weights):  # type: ignore[no-untyped-def]
    """The products of each pair with its own copy of the weights."""
    import torch

    tokens = sorted_token_ids.long()
    adapters = lora_indices[tokens].long()
    own = adapters.clamp(min=0), expert_ids.long()
    found = torch.bmm(b[own], torch.bmm(a[own], x[tokens][:, :, None]))[:, :, 0].float()
    weights = (topk_weights.float() * (adapters >= 0))[:, None]
    return torch.zeros(x.shape[0], b.shape[2], device=x.device).index_add(0, tokens, found * weights).to(x.dtype)


def _pairs_work(found: Mapping[str, Any]) -> Work:
    """The weights of as many adapters and experts as there are pairs, at most all."""
    banks = [*found["lora_a_weights"], *found["lora_b_weights"]]
    pairs, bins = found["expert_ids"].numel(), banks[0].shape[0] * banks[0].shape[1]
    read = sum(min(pairs, bins) * (nbytes(bank) // bins) for bank in banks)
    columns = banks[-1].shape[2]
    return Work(
        2 * pairs * sum(bank[0, 0].numel() for bank in banks), read + nbytes(found["x"]) + 4 * len(found["x"]) * columns
    )


def _work(arguments: Mapping[str, Any]) -> Work:
    """Each adapter that can occur is read once."""
    found = dict(arguments)
    banks = [found[name] for name in ("lora_a_weights", "lora_b_weights") if name in found]
    if isinstance(found.get("lora_a_weights"), list):
        return _pairs_work(found)
    banks += [x for name in ("lora_a_stacked", "lora_b_stacked") for x in found.get(name, ())]
    indices = found["lora_indices" if "lora_indices" in found else "lora_indices_tensor"]
    tokens, flops, read = indices.numel(), 0, 0
    for bank in banks:
        flops += 2 * tokens * bank[0].numel()
        read += min(tokens, bank.shape[0]) * (nbytes(bank) // bank.shape[0])
    values = [found[name] for name in ("x", "inputs") if name in found]
    written = [found[name] for name in ("y", "output_tensor") if name in found]
    return Work(flops, read + nbytes(*values, indices) + 2 * nbytes(*written))


_AXES: dict[str, Var | Const] = {
    "num_tokens": Var(),
    "num_loras": Var(),
    "one": Const(abbrev="", value=1),
    "rank": Const(abbrev="r"),
}
_IN, _OUT = {"in_features": Const(abbrev="k")}, {"out_features": Const(abbrev="n")}
_SAMPLES = samples({"dtype": ("bfloat16", "float16"), "num_tokens, rank": ((1, 8), (21, 16), (70, 64))})
_TOLERANCE = {"bfloat16": (2e-2, 2e-2), "float16": (4e-3, 4e-3), "float32": (2e-2, 1e-2)}
_template = partial(TraceTemplate, "lora", op="lora_delta", samples=_SAMPLES, work=_work, tolerance=_TOLERANCE)

SHRINK = _template(
    name_prefix="bgmv_shrink",
    axes={**_AXES, **_IN},
    inputs={
        **tensors(inputs="num_tokens in_features", lora_a_weights="num_loras one rank in_features"),
        "output_tensor": Tensor(["num_tokens", "rank"], dtype="float32"),
        **tensors(lora_indices_tensor="num_tokens"),
        "scaling": Scalar(optional=True),
    },
    outputs={"output": Tensor(["num_tokens", "rank"], param="output_tensor", dtype="float32")},
    reference=_shrink_reference,
    make=_make_shrink,
    description="The first product of the adapter of each token.",
)

EXPAND = _template(
    name_prefix="bgmv_expand",
    axes={**_AXES, **_OUT},
    inputs={
        **tensors(inputs="num_tokens rank", lora_b_weights="num_loras one out_features rank"),
        **tensors(output_tensor="num_tokens out_features", lora_indices_tensor="num_tokens"),
        "add_inputs": Scalar("bool", optional=True),
    },
    outputs={"output": Tensor(["num_tokens", "out_features"], param="output_tensor", dtype_from="output_tensor")},
    reference=_expand_reference,
    make=_make_expand,
    description="The second product of the adapter of each token, added to the output of a layer.",
)

LINEAR = _template(
    name_prefix="add_lora_linear",
    axes={**_AXES, **_IN, **_OUT},
    inputs={
        **tensors(y="num_tokens out_features", x="num_tokens in_features"),
        "a": Tensor(["num_loras", "one", "rank", "in_features"], param="lora_a_stacked", tuple_idx=0),
        "b": Tensor(["num_loras", "one", "out_features", "rank"], param="lora_b_stacked", tuple_idx=0),
        "scale": Scalar(),
        **tensors(lora_indices="num_tokens"),
    },
    outputs={"output": Tensor(["num_tokens", "out_features"], param="y", dtype_from="y")},
    reference=_linear_reference,
    make=_make_linear,
    eager=_linear_eager,
    others=words("output_slices buffer"),
    description="Both products of the adapter of each token, added to the output of a layer.",
)


PAIRS = TraceTemplate(
    "lora",
    name_prefix="bgmv_moe",
    axes={
        **{n: a for n, a in _AXES.items() if n != "one"},
        "num_pairs": Var(),
        "num_experts": Const(abbrev="e"),
        **_IN,
        **_OUT,
    },
    inputs={
        **tensors(x="num_tokens in_features"),
        "a": Tensor(["num_loras", "num_experts", "rank", "in_features"], param="lora_a_weights", tuple_idx=0),
        "b": Tensor(["num_loras", "num_experts", "out_features", "rank"], param="lora_b_weights", tuple_idx=0),
        **tensors(sorted_token_ids="num_pairs", expert_ids="num_pairs", lora_indices="num_tokens"),
        **tensors(topk_weights="num_pairs"),
    },
    outputs={"output": Tensor(["num_tokens", "out_features"], dtype_from="x")},
    reference=_pairs_reference,
    op=("lora_delta", "lora_sum"),
    make=_make_pairs,
    samples=_SAMPLES,
    work=_work,
    tolerance=_TOLERANCE,
    eager=_pairs_eager,
    others=words("num_experts output_dim"),
    description="Both products of the adapters of pairs of a token and an expert, summed for each token with weights.",
)


def pairs(save_dir: Any = None, name: str | None = None, **arguments: Any) -> TraceTemplate | None:
    """The template of one slice; None for others."""
    return PAIRS if len(arguments["lora_a_weights"]) == 1 else None


pairs.templates = (PAIRS,)  # type: ignore[attr-defined]


def linear(save_dir: Any = None, name: str | None = None, **arguments: Any) -> TraceTemplate | None:
    """The template of one slice; None for others."""
    return LINEAR if len(arguments["lora_a_stacked"]) == 1 else None


linear.templates = (LINEAR,)  # type: ignore[attr-defined]
