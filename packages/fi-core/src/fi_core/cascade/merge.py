"""Merging of attention states: outputs over disjoint sets of keys, with their log-sum-exp, become one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_core.launch.op import Launcher
from fi_core.observe.log import fi_api
from fi_core.observe.trace import Const, Tensor, TraceTemplate, Var
from fi_core.spec.constraint import ON_CPU, at_least
from fi_core.spec.dtype import DTYPES
from fi_core.spec.op import Axes, Entry, Impl, Op, Unit

if TYPE_CHECKING:
    import torch


def _merge_state_unit(axes: Axes) -> Unit:
    """Entries in order of preference; config = (vector elements, rows a thread)."""
    dtype = DTYPES[str(axes["dtype"])]
    return Unit(
        "fi/cascade/merge_state.cuh",
        "MergeStateParams",
        tuple(
            Entry(f"merge_state_{vec}_wide", f"merge_state<{dtype.device}, {vec}, {rows}>", 256, (vec, rows))
            for vec, rows in ((16 // dtype.bytes, 2), (1, 1))
        ),
    )


def _merge_states_unit(axes: Axes) -> Unit:
    """Entries in order of preference; config = (vector elements, states in flight)."""
    dtype = DTYPES[str(axes["dtype"])]
    return Unit(
        "fi/cascade/merge_states.cuh",
        "MergeStatesParams",
        tuple(
            Entry(f"merge_states_{vec}_wide", f"merge_states<{dtype.device}, {vec}>", 256, (vec, 4))
            for vec in (16 // dtype.bytes, 1)
        ),
    )


MERGE_STATE = Op(
    name="merge_state",
    family="cascade",
    schema="(Tensor(a!) v, Tensor(b!) s, Tensor? v_a, Tensor? s_a, Tensor v_b, Tensor s_b, Tensor? mask) -> ()",
    axes={"dtype": ("f16", "bf16", "f32")},
    impls=(Impl("cpu", ON_CPU), Impl("cuda", at_least(80), _merge_state_unit)),
)

MERGE_STATES = Op(
    name="merge_states",
    family="cascade",
    schema="(Tensor(a!) out, Tensor(b!) out_s, Tensor v, Tensor s) -> ()",
    axes={"dtype": ("f16", "bf16", "f32")},
    impls=(Impl("cpu", ON_CPU), Impl("cuda", at_least(80), _merge_states_unit)),
)

_merge_state = Launcher(MERGE_STATE, lambda v, *_: (v.get_device(), v.dtype))
_merge_states = Launcher(MERGE_STATES, lambda out, *_: (out.get_device(), out.dtype))


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


_MERGE_AXES: dict[str, Var | Const] = {"n": Var(), "num_heads": Const(abbrev="h"), "head_dim": Const(abbrev="d")}


@fi_api(
    trace=TraceTemplate(
        "merge_state",
        axes=_MERGE_AXES,
        inputs={
            "v_a": Tensor(["n", "num_heads", "head_dim"]),
            "s_a": Tensor(["n", "num_heads"]),
            "v_b": Tensor(["n", "num_heads", "head_dim"]),
            "s_b": Tensor(["n", "num_heads"]),
        },
        outputs={
            "v": Tensor(["n", "num_heads", "head_dim"], dtype_from="v_a"),
            "s": Tensor(["n", "num_heads"], dtype="float32"),
        },
        reference=_merge_state_reference,
        description="Merges two attention states, each over its own keys; log-sum-exp in base 2.",
    )
)
def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention state over the keys of two states: `s = log2(2^s_a + 2^s_b)`, `v = 2^(s_a-s) v_a + 2^(s_b-s) v_b`.

    v_a, v_b: `[n, num_heads, head_dim]` attention outputs, fp16, bf16 or fp32, any head_dim; strides are free but for
    the last dimension. s_a, s_b: `[n, num_heads]`, log-sum-exp of the scaled logits in base 2, any strides; other float
    types than fp32 are copied to fp32. Arithmetic in fp32 (arXiv:2402.05099; arXiv:2501.01005, section 2.2).

    A state with s = -inf (no keys) leaves the other unchanged, whatever its v is; two of them give v = 0, s = -inf. NaN
    or +inf in s gives NaN in that row and head only.

    Returns (v, s), v of the dtype of v_a, s fp32. Raises ValueError (shape, stride, device) or TypeError (dtype).
    """
    s_a = _float32(s_a)
    v, s = v_a.new_empty(v_a.shape), s_a.new_empty(s_a.shape)
    _merge_state(v, s, v_a, s_a, v_b, _float32(s_b), None)
    return v, s


def _merge_state_in_place_reference(v, s, v_other, s_other, mask=None):  # type: ignore[no-untyped-def]
    v, s, v_other, s_other = v.double(), s.double(), v_other.double(), s_other.double()
    if mask is not None:
        s_other = s_other.where(mask.bool().unsqueeze(-1), float("-inf"))
    top = s.maximum(s_other)
    top = top.where(top.isfinite(), 0.0)
    weight, other = (s - top).exp2().unsqueeze(-1), (s_other - top).exp2().unsqueeze(-1)
    total = weight + other
    return (weight * v + other * v_other) / total.where(total != 0, 1.0), top + total.squeeze(-1).log2()


@fi_api(
    trace=TraceTemplate(
        "merge_state_in_place",
        axes=_MERGE_AXES,
        inputs={
            "v": Tensor(["n", "num_heads", "head_dim"]),
            "s": Tensor(["n", "num_heads"]),
            "v_other": Tensor(["n", "num_heads", "head_dim"]),
            "s_other": Tensor(["n", "num_heads"]),
            "mask": Tensor(["n"], dtype="bool", optional=True),
        },
        outputs={
            "v": Tensor(["n", "num_heads", "head_dim"], param="v", dtype_from="v"),
            "s": Tensor(["n", "num_heads"], param="s", dtype_from="s"),
        },
        reference=_merge_state_in_place_reference,
        description="Merges an attention state into another; log-sum-exp in base 2.",
    )
)
def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    """`merge_state` into v and s. mask: `[n]`, bool or uint8; rows where it is 0 are left as they are.

    s must be fp32, since it is written; s_other may be another float type. Errors are those of `merge_state`.
    """
    _merge_state(v, s, None, None, v_other, _float32(s_other), mask)


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
    trace=TraceTemplate(
        "merge_states",
        axes={"n": Var(), "num_states": Var(), "num_heads": Const(abbrev="h"), "head_dim": Const(abbrev="d")},
        inputs={
            "v": Tensor(["n", "num_states", "num_heads", "head_dim"]),
            "s": Tensor(["n", "num_states", "num_heads"]),
        },
        outputs={
            "merged": Tensor(["n", "num_heads", "head_dim"], dtype_from="v"),
            "merged_s": Tensor(["n", "num_heads"], dtype="float32"),
        },
        reference=_merge_states_reference,
        description="Merges attention states along dim 1, each over its own keys; log-sum-exp in base 2.",
    )
)
def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_state` of any number of states: v `[n, num_states, num_heads, head_dim]`, s `[n, num_states, num_heads]`.

    Types, strides, special values and errors are those of `merge_state`. One state is copied; none give v = 0 and
    s = -inf. The order of summation depends on num_states and head_dim, not on n.

    Returns (v `[n, num_heads, head_dim]`, s `[n, num_heads]` fp32).
    """
    s = _float32(s)
    if v.ndim != 4:
        raise ValueError(f"v: shape [n, num_states, num_heads, head_dim] is required; got {list(v.shape)}")
    n, _, heads, _ = v.shape
    out, out_s = v.new_empty((n, heads, v.shape[3])), s.new_empty((n, heads))
    _merge_states(out, out_s, v, s)
    return out, out_s
