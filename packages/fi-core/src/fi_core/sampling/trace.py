"""What the sampling functions are, as data: axes, inputs, outputs, and a reference in fp64."""

from __future__ import annotations

from fi_core.observe.trace import Const, Scalar, Tensor, TraceTemplate, Var


def _thresholds(probs, top_k=None, top_p=None, min_p=None, joint=False):  # type: ignore[no-untyped-def]
    """Which elements pass: ties at a threshold all do."""
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
        t = temperature.double().unsqueeze(1) if isinstance(temperature, torch.Tensor) else temperature
        x = x / t
    return x.softmax(-1)


def _top_k_renorm_reference(probs, top_k):  # type: ignore[no-untyped-def]
    kept = probs.double().where(_thresholds(probs, top_k=top_k), 0.0)
    return kept / kept.sum(-1, keepdim=True)


def _top_p_renorm_reference(probs, top_p):  # type: ignore[no-untyped-def]
    kept = probs.double().where(_thresholds(probs, top_p=top_p), 0.0)
    return kept / kept.sum(-1, keepdim=True)


def _top_k_mask_reference(logits, top_k):  # type: ignore[no-untyped-def]
    values = logits.double()
    kth = values.sort(-1, descending=True).values[:, top_k - 1 : top_k]
    return values.where(values >= kth, float("-inf"))


_AXES: dict[str, Var | Const] = {"rows": Var(), "vocab_size": Const(abbrev="v")}
_ROWS = ["rows", "vocab_size"]


def _draw(name: str, input: str, **parameters: Scalar) -> TraceTemplate:
    return TraceTemplate(
        name,
        axes={**_AXES, "batch_size": Var()},
        inputs={input: Tensor(_ROWS), **parameters, "indices": Tensor(["batch_size"], optional=True)},
        outputs={"samples": Tensor(["batch_size"], dtype="int32")},
        description=f"Draws a token from each row of {input}.",
    )


_K, _P, _M = Scalar("int32"), Scalar("float32"), Scalar("float32")

SOFTMAX = TraceTemplate(
    "softmax",
    axes=_AXES,
    inputs={"logits": Tensor(_ROWS), "temperature": Scalar("float32", optional=True)},
    outputs={"probs": Tensor(_ROWS, dtype="float32")},
    reference=_softmax_reference,
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
    description="Penalties, bias, mask, temperature, filters and draw in one kernel.",
)
TOP_P_RENORM = TraceTemplate(
    "top_p_renorm_probs",
    axes=_AXES,
    inputs={"probs": Tensor(_ROWS), "top_p": _P},
    outputs={"renorm_probs": Tensor(_ROWS, dtype="float32")},
    reference=_top_p_renorm_reference,
    description="Keeps the smallest set of largest probabilities with this share of the mass, and renormalises.",
)
TOP_K_RENORM = TraceTemplate(
    "top_k_renorm_probs",
    axes=_AXES,
    inputs={"probs": Tensor(_ROWS), "top_k": _K},
    outputs={"renorm_probs": Tensor(_ROWS, dtype_from="probs")},
    reference=_top_k_renorm_reference,
    description="Keeps the k largest probabilities, ties included, and renormalises.",
)
TOP_K_MASK = TraceTemplate(
    "top_k_mask_logits",
    axes=_AXES,
    inputs={"logits": Tensor(_ROWS), "top_k": _K},
    outputs={"masked_logits": Tensor(_ROWS, dtype_from="logits")},
    reference=_top_k_mask_reference,
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
    description="Accepts draft tokens against the target's probabilities, and draws the token that follows.",
)
