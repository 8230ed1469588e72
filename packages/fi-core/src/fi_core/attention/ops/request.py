"""The request of an attention op: the fields by which all attention ops are dispatched, and reading them from a
call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fi_core.runtime.spec.constraint import Constraint, Rule
from fi_core.runtime.spec.dtype import DTYPES
from fi_core.runtime.spec.op import Field, Unit, Values
from fi_core.utils import PosEncodingMode

if TYPE_CHECKING:
    import torch

TYPES = ("f16", "bf16", "f32", "e4m3", "e5m2")
KV_TYPES = (*TYPES, "e2m1")  # e2m1: NVFP4, two elements in a byte and a scale for 16
ENCODINGS = tuple(PosEncodingMode.__members__)
LOAD_BYTES = 16  # of one load or bulk copy: tensor-core kernels need rows at multiples of it

# page_size: tokens of a page, 0 for ragged keys. mask: causal ones and windows are plain; "custom" has a bit for each
# element, "items" is multi-item scoring. scaled: by head, or by a scale that lies on the device. split_tables: V has a
# page table of its own. alignment: the largest power of 2, up to 16, that divides the addresses of all rows, in bytes;
# 16 unless a kernel that needs it finds less.
FIELDS = {
    "q": Field(TYPES, "bf16"),
    "kv": Field(KV_TYPES, "bf16"),
    "out": Field(None, "bf16"),  # the host entry checks it
    "head_dim_qk": Field(None, 128),
    "head_dim_vo": Field(None, 128),
    "group_size": Field(None, 4),
    "page_size": Field(None, 16),
    "pos_encoding": Field(ENCODINGS, "NONE"),
    "mask": Field(("plain", "custom", "items"), "plain"),
    "soft_cap": Field((False, True), False),
    "scaled": Field((False, True), False),
    "split_tables": Field((False, True), False),
    "alignment": Field((1, 2, 4, 8, 16), LOAD_BYTES),
}

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
    Constraint("device", "==", "cuda"),
    Constraint("q", "in", ("f16", "bf16")),
    Rule(("q", "kv", "out"), "kv and output of q's dtype", lambda q, kv, out: q == kv == out),
    Constraint("pos_encoding", "==", "NONE"),
    Constraint("soft_cap", "==", False),
    Constraint("mask", "==", "plain"),
    Constraint("scaled", "==", False),
    Constraint("split_tables", "==", False),
)


def request(
    q: torch.dtype,
    kv: torch.dtype,
    out: torch.dtype,
    query: tuple[int, ...],
    key: tuple[int, ...],
    head_dim_vo: int,
    paged: bool,
    kv_layout: int,
    pos_encoding_mode: int,
    mask: str,
    soft_cap: bool,
    scaled: bool,
    split_tables: bool,
    alignment: int = LOAD_BYTES,
) -> tuple[Any, ...]:
    """The values of FIELDS, from the facts that an operator reads of a call.

    kv: uint8 is NVFP4, and head_dim_vo then in bytes. query, key: shapes of q and k without the axis of tokens or
    pages.
    """
    # The host entry refuses shapes of other ranks, with the required ones.
    heads, head_dim_qk = query[-2:] if len(query) > 1 else (0, 0)
    kv_heads = 0 if len(key) < 2 else key[-2] if not paged or kv_layout == 0 else key[0]
    page_size = key[kv_layout] if paged and len(key) > 1 else 0
    if str(kv) == "torch.uint8":
        kv, head_dim_vo = "e2m1", 2 * head_dim_vo  # type: ignore[assignment]
    encoding = PosEncodingMode(pos_encoding_mode).name
    group_size = heads // kv_heads if kv_heads else 0
    return (
        q, kv, out, head_dim_qk, head_dim_vo, group_size, page_size, encoding, mask, soft_cap, scaled, split_tables,
        alignment,
    )  # fmt: skip
