"""The request of an attention op: the fields by which all attention ops are dispatched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fi_core.attention.contract import kv_type, row_elements
from fi_core.runtime.lazy import torch
from fi_core.runtime.spec.constraint import ON_CPU, VARIES, Constraint, Rule, at_least
from fi_core.runtime.spec.dtype import DTYPES
from fi_core.runtime.spec.op import Entry, Field, Implementation, Op, Unit, Values
from fi_core.utils import PosEncodingMode

TYPES = ("f16", "bf16", "f32", "e4m3", "e5m2")
KV_TYPES = (*TYPES, "e2m1")  # e2m1: NVFP4, two elements in a byte and a scale for 16
BOTH = (False, True)
ENCODINGS = tuple(PosEncodingMode.__members__)
LOAD_BYTES = 16  # of one load or bulk copy: tensor-core kernels need rows at multiples of it

# page_size: tokens of a page, 0 for ragged keys. mask: causal ones and windows are plain; "custom" has a bit for each
# element, "items" is multi-item scoring. scaled: by head, or by a scale that lies on the device. split_tables: V has a
# page table of its own. alignment: the largest power of 2, up to 16, that divides the addresses of all rows, in bytes.
FIELDS = {
    "q": Field(TYPES, "bf16"),
    "kv": Field(KV_TYPES, "bf16"),
    "out": Field(None, "bf16"),  # the host entry checks it
    "head_dim_qk": Field(None, 128),
    "head_dim_vo": Field(None, 128),
    "group_size": Field(None, 4),
    "page_size": Field(None, 16),
    "pos_encoding": Field(ENCODINGS, "NONE", PosEncodingMode),
    "mask": Field(("plain", "custom", "items"), "plain"),
    "soft_cap": Field(BOTH, False),
    "scaled": Field(BOTH, False),
    "split_tables": Field(BOTH, False),
    "alignment": Field((1, 2, 4, 8, 16), LOAD_BYTES),
}


class Facts(NamedTuple):
    """What a plan knows of the request of its runs: the values of FIELDS."""

    q: Any
    kv: Any
    out: Any
    head_dim_qk: int
    head_dim_vo: int
    group_size: int
    page_size: int
    pos_encoding: str = "NONE"
    mask: str = "plain"
    soft_cap: bool = False
    scaled: bool = False
    split_tables: bool = False
    alignment: int = LOAD_BYTES


def facts_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: Any, kv_heads: int, page_size: int, **more: Any
) -> Facts:
    """The facts of a call with these tensors. out: dtype of the output; page_size: 0 for ragged keys; more: others."""
    dims, group_size = (q.shape[-1], row_elements(v)), q.shape[-2] // kv_heads
    return Facts(q.dtype, kv_type(k.dtype), out, *dims, group_size, page_size, **more)


def plan_implementations(kind: str, *bodies: str) -> tuple[Implementation, Implementation]:
    """The implementations of the op that plans: on CUDA a kernel of one CTA. kind: "decode", "prefill" or "mla"."""
    name, header = f"{kind}_plan", f"fi/attention/{kind}/{kind}_plan.cuh"
    entries = (Entry(f"{name}_{i}" if i else name, x, 1024, ctas_per_sm=1) for i, x in enumerate(bodies or [name]))
    unit = Unit(header, f"{kind.title()}PlanParams", tuple(entries))
    return Implementation("cpu", ON_CPU), Implementation("cuda", at_least(80), lambda axes: unit)


def by_variant(function: Callable[..., Any], op: Op, plan: Any, variant: Any) -> Callable[..., Any]:
    """The op with the fields of a plan and a user's variant, which takes what a planned call takes."""
    rest = [a.name for a in op.parsed if a.name not in op.planned]
    fixed = {name: getattr(plan, name) for name in op.planned}
    return lambda *values: function(**fixed, **dict(zip(rest, values)), variant=variant)


ALIGNED = Constraint("alignment", ">=", LOAD_BYTES)


def alignment(*tensors: torch.Tensor) -> int:
    """The field of this name: the largest power of 2, up to LOAD_BYTES, that divides the addresses of all rows."""
    low = 0
    for x in tensors:
        low |= x.data_ptr()
        for step in x.stride()[:-1]:
            low |= step * x.itemsize
    return min(LOAD_BYTES, low & -low) if low else LOAD_BYTES


# Compiled into kernels for `split_tables`; the others keep their registers.
SPLIT_TABLES_FLAG = "-DFI_SPLIT_TABLES"


def with_tables(unit: Unit, axes: Values) -> Unit:
    """The unit for the axis split_tables."""
    return unit._replace(flags=(*unit.flags, SPLIT_TABLES_FLAG)) if axes["split_tables"] else unit


def element_bytes(dtype: str) -> int:
    """Bytes of an element; 0 for a dtype that no kernel supports, which the host entry refuses."""
    return DTYPES[dtype].bytes if dtype in DTYPES else 0


# Constraints of cuDNN's kernels; cuDNN itself refuses further requests, with its own error.
CUDNN = (
    *VARIES,
    Constraint("device", "==", "cuda"),
    Constraint("q", "in", ("f16", "bf16")),
    Rule(("q", "kv", "out"), "kv and output of q's dtype", lambda q, kv, out: q == kv == out),
    Constraint("pos_encoding", "==", "NONE"),
    Constraint("soft_cap", "==", False),
    Constraint("mask", "==", "plain"),
    Constraint("scaled", "==", False),
    Constraint("split_tables", "==", False),
)
