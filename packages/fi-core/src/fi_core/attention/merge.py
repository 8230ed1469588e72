"""Merging of attention states: outputs over disjoint sets of keys, with their log-sum-exp, become one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fi_core.observe.draw import FLOATS, Draw, nbytes
from fi_core.observe.log import fi_api
from fi_core.observe.trace import Tensor, TraceTemplate, Work, axes_of, samples, sized, tensors
from fi_core.runtime.launch.operator import operator
from fi_core.runtime.lazy import torch
from fi_core.runtime.spec.constraint import ON_CPU, at_least
from fi_core.runtime.spec.dtype import DTYPES
from fi_core.runtime.spec.op import Entry, Implementation, Op, Unit, Values


class _MergeStateConfig(NamedTuple):
    vector: int  # elements
    compact: int  # 1: rows without gaps, of at most 32 vectors and a power of 2 of them


class _MergeStatesConfig(NamedTuple):
    vector: int  # elements
    states_in_flight: int
    few: int  # 1: states_in_flight are the most, and rows are a power of 2 of vectors


_THREADS = 256  # of a CTA


def _merge_state_unit(axes: Values) -> Unit:
    """Kernel entries in order of preference."""
    dtype, entries = DTYPES[str(axes["dtype"])], []
    for vec, compact in ((16 // dtype.bytes, 1), (16 // dtype.bytes, 0), (1, 0)):
        form = "_compact" * compact
        body = f"merge_state{form}<{dtype.device}, {vec}{f', {_THREADS}' * compact}>"
        entries.append(Entry(f"merge_state_{vec}_wide{form}", body, _THREADS, _MergeStateConfig(vec, compact)))
    return Unit("fi/attention/merge/merge_state.cuh", "MergeStateParams", tuple(entries))


def _merge_states_unit(axes: Values) -> Unit:
    """Kernel entries in order of preference."""
    dtype, entries = DTYPES[str(axes["dtype"])], []
    wide = 16 // dtype.bytes
    for vec, count, few in ((wide, 4, 1), (wide, 8, 1), (wide, 16, 1), (wide, 4, 0), (1, 4, 0)):
        body = f"{'merge_few_states' if few else 'merge_states'}<{dtype.device}, {vec}, {count}>"
        name, config = f"merge_states_{vec}_wide_{'few_' * few}{count}", _MergeStatesConfig(vec, count, few)
        entries.append(Entry(name, body, _THREADS, config))
    return Unit("fi/attention/merge/merge_states.cuh", "MergeStatesParams", tuple(entries))


MERGE_STATE = Op(
    name="merge_state",
    family="attention",
    arguments="Tensor(a!) v, Tensor(b!) s, Tensor v_b, Tensor s_b, Tensor? v_a=None, Tensor? s_a=None, "
    "Tensor? mask=None",
    axes={"dtype": ("f16", "bf16", "f32")},
    config=_MergeStateConfig,
    implementations=(Implementation("cpu", ON_CPU), Implementation("cuda", at_least(80), _merge_state_unit)),
)

MERGE_STATES = Op(
    name="merge_states",
    family="attention",
    arguments="Tensor(a!) out, Tensor(b!) out_s, Tensor v, Tensor s",
    axes={"dtype": ("f16", "bf16", "f32")},
    config=_MergeStatesConfig,
    implementations=(Implementation("cpu", ON_CPU), Implementation("cuda", at_least(80), _merge_states_unit)),
)

_merge_state = operator(MERGE_STATE)
_merge_states = operator(MERGE_STATES)


def _float32(s: torch.Tensor) -> torch.Tensor:
    """A log-sum-exp of another float type as fp32; anything else is left for the op to check."""
    return s.float() if s.is_floating_point() else s


def _merge_state_reference(v_a, s_a, v_b, s_b):  # type: ignore[no-untyped-def]
    v_a, s_a, v_b, s_b = v_a.double(), s_a.double(), v_b.double(), s_b.double()
    top = s_a.maximum(s_b)
    top = top.where(top.isfinite(), 0.0)
    weight_a, weight_b = (s_a - top).exp2().unsqueeze(-1), (s_b - top).exp2().unsqueeze(-1)
    total = weight_a + weight_b
    v = (weight_a * v_a + weight_b * v_b) / total.where(total != 0, 1.0)
    return v, top + total.squeeze(-1).log2()


def _make(*names: tuple[str, str], **more: Any) -> Callable[..., dict[str, Any]]:
    """Attention states (v, s): strided v, transposed s; some without keys (s = -inf), and one NaN. more: sizes."""

    @sized(dtype="bfloat16", n=5, num_heads=3, head_dim=18, **more)
    def make(draw: Draw, size: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for i, (v, s) in enumerate(names):
            rows = (size.n, size.num_states) if "num_states" in more else (size.n,)
            lse = draw.normal((*rows, size.num_heads), "float32", 10.0 if draw.nasty else 4.0)
            draw.special(lse, *((float("-inf"), -3.0, float("nan")) if i else (float("-inf"), float("-inf"), 1.0)))
            found |= {v: draw.rows(draw.normal((*rows, size.num_heads, size.head_dim), size.dtype)), s: draw.rows(lse)}
        masked = getattr(size, "masked", False)
        return {**found, "mask": draw.integers(0, 2, (size.n,), "bool")} if masked else found

    return make


_SAMPLES = samples({"dtype": FLOATS, "num_heads, head_dim": ((3, 18), (4, 128))})


def _work(arguments: Mapping[str, Any]) -> Work:
    """Every state once, and the merged one; three operations an element of every v."""
    values = [arguments[name] for name in ("v_a", "v_b", "v", "v_other") if name in arguments]
    v = values[0]
    merged = v.shape[0] * v.shape[-2] * v.shape[-1]
    written = merged * v.element_size() + 4 * merged // max(v.shape[-1], 1)
    return Work(3 * sum(x.numel() for x in values), nbytes(*arguments.values()) + written)


def _template(op_type: str, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], **more: Any) -> TraceTemplate:
    return TraceTemplate(
        op_type,
        axes=axes_of(inputs, num_heads="h", head_dim="d"),
        inputs=inputs,
        outputs=outputs,
        work=_work,
        tolerance={"float32": (2e-5, 2e-5)},
        **{"op": "merge_state", "samples": _SAMPLES, **more},
    )


_VALUES = "n num_heads head_dim"


def _state(v: str, s: str, rows: str = "n") -> dict[str, Tensor]:
    """A state of these names. rows: the axes before the heads."""
    return tensors(None, **{v: f"{rows} num_heads head_dim", s: f"{rows} num_heads"})


def _merged(v: str, s: str, like: str) -> dict[str, Tensor]:
    return {**tensors({"dtype_from": like}, **{v: _VALUES}), **tensors({"dtype": "float32"}, **{s: "n num_heads"})}


@fi_api(
    trace=_template(
        "merge_state",
        {**_state("v_a", "s_a"), **_state("v_b", "s_b")},
        _merged("v", "s", "v_a"),
        reference=_merge_state_reference,
        make=_make(("v_a", "s_a"), ("v_b", "s_b")),
        description="Merges two attention states, each over its own keys; log-sum-exp in base 2.",
    )
)
def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention state over the keys of two states: `s = log2(2^s_a + 2^s_b)`, `v = 2^(s_a-s) v_a + 2^(s_b-s) v_b`.

    Arithmetic is fp32 (arXiv:2402.05099; arXiv:2501.01005, section 2.2). A state with s = -inf (no keys) leaves the
    other unchanged, whatever its v is; two such states give v = 0, s = -inf. NaN or +inf in s gives NaN in that row and
    head only.

    Args:
        v_a, v_b: `[n, num_heads, head_dim]` attention outputs, fp16, bf16 or fp32, any head_dim; any strides with a
            contiguous last dimension.
        s_a, s_b: `[n, num_heads]`, lse of the scaled scores in base 2, any strides; other float dtypes than fp32 are
            copied to fp32.

    Returns:
        (v, s): v in the dtype of v_a, s fp32.

    Raises:
        ValueError: shape, stride or device.
        TypeError: dtype.
    """
    s_a = _float32(s_a)
    v, s = torch.empty_like(v_a), torch.empty_like(s_a)
    _merge_state(v, s, v_b, _float32(s_b), v_a=v_a, s_a=s_a)
    return v, s


def _merge_state_in_place_reference(v, s, v_other, s_other, mask=None):  # type: ignore[no-untyped-def]
    out, out_s = _merge_state_reference(v, s, v_other, s_other)
    if mask is None:
        return out, out_s
    merged = mask.bool().unsqueeze(-1)  # the other rows stay as they are
    return out.where(merged.unsqueeze(-1), v.double()), out_s.where(merged, s.double())


@fi_api(
    trace=_template(
        "merge_state_in_place",
        {**_state("v", "s"), **_state("v_other", "s_other"), "mask": Tensor(["n"], dtype="bool", optional=True)},
        {
            "v": Tensor(_VALUES.split(), param="v", dtype_from="v"),
            "s": Tensor(["n", "num_heads"], param="s", dtype_from="s"),
        },
        reference=(_merge_state_reference, _merge_state_in_place_reference),
        make=_make(("v", "s"), ("v_other", "s_other"), masked=False),
        samples=tuple({**sample, "masked": masked} for sample in _SAMPLES for masked in (False, True)),
        description="Merges an attention state into another; log-sum-exp in base 2.",
    )
)
def merge_state_in_place(
    v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor, mask: torch.Tensor | None = None
) -> None:
    """`merge_state` into v and s; its formula, special values and errors apply.

    Args:
        v: `[n, num_heads, head_dim]`, read and written.
        s: fp32 `[n, num_heads]`, read and written.
        v_other: `[n, num_heads, head_dim]`.
        s_other: `[n, num_heads]`, any float dtype.
        mask: bool or uint8 `[n]`; rows where it is 0 are not changed.
    """
    _merge_state(v, s, v_other, _float32(s_other), mask=mask)


def _merge_states_reference(v, s):  # type: ignore[no-untyped-def]
    v, s = v.double(), s.double()
    if s.shape[1] == 0:
        return v.sum(1), s.sum(1) - float("inf")
    top = s.amax(1, keepdim=True)
    top = top.where(top.isfinite(), 0.0)
    weight = (s - top).exp2()
    total = weight.sum(1)
    merged = (weight.unsqueeze(-1) * v).sum(1) / total.where(total != 0, 1.0).unsqueeze(-1)
    return merged, top.squeeze(1) + total.log2()


@fi_api(
    trace=_template(
        "merge_states",
        _state("v", "s", "n num_states"),
        _merged("merged", "merged_s", "v"),
        reference=_merge_states_reference,
        op="merge_states",
        make=_make(("v", "s"), num_states=4),
        samples=(*_SAMPLES, {"num_states": 1}),
        description="Merges attention states along dim 1, each over its own keys; log-sum-exp in base 2.",
    )
)
def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_state` of any number of states; its dtypes, strides, special values and errors apply.

    One state is copied; none give v = 0 and s = -inf. The order of summation depends on num_states and head_dim, not on
    n.

    Args:
        v: `[n, num_states, num_heads, head_dim]`.
        s: `[n, num_states, num_heads]`.

    Returns:
        (v `[n, num_heads, head_dim]`, s `[n, num_heads]` fp32).
    """
    s = _float32(s)
    if v.ndim != 4:
        raise ValueError(f"v: shape [n, num_states, num_heads, head_dim] is required; got {list(v.shape)}")
    n, _, heads, _ = v.shape
    out, out_s = v.new_empty(n, heads, v.shape[3]), s.new_empty(n, heads)
    _merge_states(out, out_s, v, s)
    return out, out_s
