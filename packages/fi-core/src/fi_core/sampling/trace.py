"""Trace templates of the sampling functions, with references in fp64, inputs and work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fi_core.observe.draw import Draw, nbytes, without
from fi_core.observe.trace import Const, Scalar, Tensor, TraceTemplate, Var, Work, sized, words


def _thresholds(probs, top_k=None, top_p=None, min_p=None, joint=False):  # type: ignore[no-untyped-def]
    """Mask of the elements that pass the filters. All ties at a threshold pass."""
    import torch

    p = probs.double()
    kept = p > 0

    def column(value):  # type: ignore[no-untyped-def]
        return value.double().unsqueeze(1) if isinstance(value, torch.Tensor) else torch.full_like(p[:, :1], value)

    order = p.sort(dim=-1, descending=True)
    if top_k is not None:
        k = column(top_k).long()
        k = torch.where((k <= 0) | (k > p.shape[1]), p.shape[1], k)
        kept &= p >= order.values.gather(1, k - 1)
    if top_p is not None:
        base = p if joint else p.where(kept, 0.0)
        values = base.sort(dim=-1, descending=True).values
        cumulative = values.cumsum(-1)
        share = column(top_p)
        first = (cumulative < share * cumulative[:, -1:]).sum(-1, keepdim=True).clamp(max=p.shape[1] - 1)
        kept &= (p >= values.gather(1, first)) | (share >= 1)
    if min_p is not None:
        kept &= p >= column(min_p) * order.values[:, :1]
    return kept


def _softmax_reference(logits, temperature=None):  # type: ignore[no-untyped-def]
    import torch

    x = logits.double()
    if temperature is not None:
        t = torch.as_tensor(temperature, device=x.device).double().reshape(-1, 1)
        x = x.where(x.isinf(), x / t.where(t > 0, float("inf")))
    counted = x.where(~x.isnan(), -float("inf"))
    largest = counted.amax(-1, keepdim=True)
    mass = (counted - largest).exp().where(counted < largest, (counted > -float("inf")).double())
    return (mass / mass.sum(-1, keepdim=True).clamp(min=1.0)).where(~x.isnan(), x)


def _top_k_renorm_reference(probs, top_k):  # type: ignore[no-untyped-def]
    kept = probs.double().where(_thresholds(probs, top_k=top_k), 0.0)
    total = kept.sum(-1, keepdim=True)
    return kept / total.where(total > 0, 1.0)


def _top_p_renorm_reference(probs, top_p):  # type: ignore[no-untyped-def]
    kept = probs.double().where(_thresholds(probs, top_p=top_p), 0.0)
    total = kept.sum(-1, keepdim=True)
    return kept / total.where(total > 0, 1.0)


def _top_k_mask_reference(logits, top_k):  # type: ignore[no-untyped-def]
    values = logits.double()
    k = top_k if 0 < top_k < values.shape[1] else values.shape[1]
    kth = values.sort(-1, descending=True).values[:, k - 1 : k]
    return values.where(values >= kth, float("-inf"))


def _make_rows(name: str, *parameters: str) -> Callable[..., dict[str, Any]]:
    """Strided rows of logits or probabilities, with ties; the parameters that are named, as a number or one a row."""

    @sized(
        dtype="float32",
        rows=5,
        vocab_size=1003,
        top_k=17,
        top_p=0.7,
        min_p=0.1,
        temperature=0.8,
        logits_std=2.0,
        per_row=False,
    )
    def make(draw: Draw, s: Any) -> dict[str, Any]:
        x = draw.normal((s.rows, s.vocab_size), s.dtype, s.logits_std)
        if draw.nasty:
            x[:, s.vocab_size // 2] = x[:, 0]
            x[:, -1] = float("-inf")
        x = x if name == "logits" else x.float().softmax(-1).to(x.dtype)
        values = {**s.named("top_p", "min_p", "temperature"), "top_k": min(s.top_k, s.vocab_size)}
        if s.per_row:
            ones = draw.normal((s.rows,), "float32").sigmoid()
            ks = draw.integers(1, values["top_k"] + 1, (s.rows,))
            values = {"top_k": ks, "top_p": ones, "min_p": ones / 2, "temperature": ones + 0.5}
        return {name: draw.rows(x), **{parameter: values[parameter] for parameter in parameters}}

    return without(make, {"top_k", "top_p", "min_p", "temperature"}.difference(parameters))


def _samples(per_row: bool = True) -> tuple[dict[str, Any], ...]:
    sizes: list[dict[str, Any]] = [{}, {"rows": 1, "vocab_size": 8}, {"rows": 1, "vocab_size": 30000}]
    sizes += [{"per_row": True}] * per_row
    return tuple({"dtype": dtype, **size} for dtype in ("float32", "float16", "bfloat16") for size in sizes)


def _work(written: int | None) -> Callable[[Mapping[str, Any]], Work]:
    """Each row is read once and written once, in so many bytes an element (None: as it is read)."""

    def work(arguments: Mapping[str, Any]) -> Work:
        x = arguments["logits"] if "logits" in arguments else arguments["probs"]
        return Work(x.numel(), x.numel() * (x.element_size() + (written or x.element_size())))

    return work


def _reading(arguments: Mapping[str, Any]) -> Work:
    """Each row is read once and a token is written."""
    x = arguments["logits"] if "logits" in arguments else arguments["probs"]
    return Work(x.numel(), nbytes(x) + 4 * x.shape[0])


_AXES: dict[str, Var | Const] = {"rows": Var(), "vocab_size": Const(abbrev="v")}
_ROWS = ["rows", "vocab_size"]


def _draw(name: str, input: str, **parameters: Scalar) -> TraceTemplate:
    return TraceTemplate(
        name,
        axes={**_AXES, "batch_size": Var()},
        inputs={input: Tensor(_ROWS), **parameters, "indices": Tensor(["batch_size"], optional=True)},
        outputs={"samples": Tensor(["batch_size"], dtype="int32")},
        op="sample",
        make=_make_rows(input, *parameters),
        samples=_samples(),
        work=_reading,
        others=("filter_apply_order", "return_valid"),
        description=f"Draws a token from each row of {input}.",
    )


_K, _P, _M = Scalar("int32"), Scalar("float32"), Scalar("float32")

SOFTMAX = TraceTemplate(
    "softmax",
    axes=_AXES,
    inputs={"logits": Tensor(_ROWS), "temperature": Scalar("float32", optional=True)},
    outputs={"probs": Tensor(_ROWS, dtype="float32")},
    reference=_softmax_reference,
    op="sample",
    make=_make_rows("logits", "temperature"),
    samples=_samples(),
    work=_work(4),
    tolerance={"float32": (2e-6, 1e-9)},
    description="Softmax of each row over its temperature.",
)
SAMPLING_FROM_LOGITS = _draw("sampling_from_logits", "logits")
SAMPLING_FROM_PROBS = _draw("sampling_from_probs", "probs")
TOP_P_SAMPLING = _draw("top_p_sampling_from_probs", "probs", top_p=_P)
TOP_K_SAMPLING = _draw("top_k_sampling_from_probs", "probs", top_k=_K)
MIN_P_SAMPLING = _draw("min_p_sampling_from_probs", "probs", min_p=_M)
TOP_K_TOP_P_LOGITS = _draw("top_k_top_p_sampling_from_logits", "logits", top_k=_K, top_p=_P)
TOP_K_TOP_P_PROBS = _draw("top_k_top_p_sampling_from_probs", "probs", top_k=_K, top_p=_P)
SAMPLE_FROM_LOGITS = TraceTemplate(
    "sample_from_logits",
    axes=_AXES,
    inputs={"logits": Tensor(_ROWS)},
    outputs={"samples": Tensor(["rows"], dtype="int32"), "valid": Tensor(["rows"], dtype="bool")},
    others=words(
        "temperature top_k top_p min_p bias bitmask seen_token_ids seen_token_counts repetition_penalty",
        "frequency_penalty presence_penalty filter_apply_order",
    ),
    description="Applies penalties, bias, bitmask, temperature and filters, and draws a token, in one kernel.",
)
TOP_P_RENORM = TraceTemplate(
    "top_p_renorm_probs",
    axes=_AXES,
    inputs={"probs": Tensor(_ROWS), "top_p": _P},
    outputs={"renorm_probs": Tensor(_ROWS, dtype="float32")},
    reference=(_thresholds, _top_p_renorm_reference),
    op="sample",
    make=_make_rows("probs", "top_p"),
    samples=_samples(),
    work=_work(4),
    description="Keeps the smallest set of largest probabilities with this share of the mass, and renormalises.",
)
TOP_K_RENORM = TraceTemplate(
    "top_k_renorm_probs",
    axes=_AXES,
    inputs={"probs": Tensor(_ROWS), "top_k": _K},
    outputs={"renorm_probs": Tensor(_ROWS, dtype_from="probs")},
    reference=(_thresholds, _top_k_renorm_reference),
    op="sample",
    make=_make_rows("probs", "top_k"),
    samples=_samples(),
    work=_work(None),
    description="Keeps the k largest probabilities, ties included, and renormalises.",
)
TOP_K_MASK = TraceTemplate(
    "top_k_mask_logits",
    axes=_AXES,
    inputs={"logits": Tensor(_ROWS), "top_k": _K},
    outputs={"masked_logits": Tensor(_ROWS, dtype_from="logits")},
    reference=_top_k_mask_reference,
    op="sample",
    make=_make_rows("logits", "top_k"),
    samples=_samples(per_row=False),
    work=_work(None),
    tolerance=dict.fromkeys(("float32", "float16", "bfloat16"), (0.0, 0.0)),
    description="Keeps the k largest logits, ties included; the others become -inf.",
)
CHAIN_SPECULATIVE = TraceTemplate(
    "chain_speculative_sampling",
    axes={
        "batch_size": Var(),
        "num_speculative_tokens": Var(),
        "num_positions": Var(),
        "vocab_size": Const(abbrev="v"),
    },
    inputs={
        "draft_probs": Tensor(["batch_size", "num_speculative_tokens", "vocab_size"]),
        "draft_token_ids": Tensor(["batch_size", "num_speculative_tokens"]),
        "target_probs": Tensor(["batch_size", "num_positions", "vocab_size"]),
    },
    outputs={"output_token_ids": Tensor(["batch_size", "num_positions"], dtype="int32")},
    description="Accepts draft tokens by the target's probabilities, and draws the token that follows.",
)
