"""Declares the operator of an indexer's logits and its kernel entries."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fi_core.runtime.launch.operator import operator
from fi_core.runtime.resolve.ahead import composition
from fi_core.runtime.spec.constraint import ON_CPU, Constraint, at_least, exactly
from fi_core.runtime.spec.op import Entry, Field, Implementation, Op, Unit, Values

if TYPE_CHECKING:
    import torch

_HEADS, _DIMS = (64, 32, 16, 8), (128, 64, 32)
STATE_WORDS = 8324  # int32 of a row that is selected from: MqaSelectRow of mqa_logits.h


class _Config(NamedTuple):
    rows: int  # of queries, of a warpgroup; by mma.sync of a CTA
    row_groups: int  # warpgroups with rows of their own; 0: mma.sync
    paged: bool
    is_last: bool  # serves any number of rows


def _mma_unit(axes: Values) -> Unit:
    heads, dim = axes["heads"], axes["dim"]
    entries = tuple(
        Entry(f"mqa_logits_{name}", f"mqa_logits<{heads}, {dim}, {flag}>", 128, _Config(64 // heads, 0, paged, True))
        for name, flag, paged in (("ragged", "false", False), ("paged", "true", True))
    )
    return Unit("fi/indexer/mqa_logits.cuh", "MqaLogitsParams", entries)


def _entry(kind: str, heads: int, rows: int, row_groups: int, paged: bool, is_last: bool, size: int) -> Entry:
    """size: bytes of shared memory."""
    body = f"{kind}_wgmma<{heads}, {rows}, {row_groups}, {'true' if paged else 'false'}, {size}>"
    name = f"{kind}_{'paged' if paged else 'ragged'}_{rows}_{row_groups}"
    return Entry(name, body, 384, _Config(rows, row_groups, paged, is_last), size, 1)


def _wgmma_entry(heads: int, rows: int, row_groups: int, paged: bool, is_last: bool) -> Entry:
    keys = 128 // row_groups
    stages = 6 if row_groups == 1 else 8
    size = stages * keys * (128 + 4) + 2 * row_groups * heads * rows * 128 + 16 * (stages + 2) + 2048
    return _entry("mqa_logits", heads, rows, row_groups, paged, is_last, size)


def _wgmma_unit(axes: Values) -> Unit:
    """The fewest rows that hold those of a request, or else many, whose warpgroups share each tile of keys."""
    heads = axes["heads"]
    most = min(4, 128 // heads)
    few = [rows for rows in (1, 2, 4) if rows <= most] if axes["paged"] else [1]
    forms = [*((rows, 1) for rows in few), (most, 2)]
    entries = tuple(_wgmma_entry(heads, *form, axes["paged"], form == forms[-1]) for form in forms)
    return Unit("fi/indexer/mqa_logits_sm90.cuh", "MqaLogitsParams", entries)


_SELECT_ROWS = (1, 2, 4)  # of a CTA that selects; bins of more leave no room for stages


def _select_unit(axes: Values) -> Unit:
    """One entry, as each takes 1.3 to 1.9 s to compile. The memory holds lists of keys, or stages of keys and bins of
    logits.
    """
    heads, rows = axes["heads"], axes["rows"]
    groups = 2 if rows * heads > 128 else 1
    entry = _entry("mqa_select", heads, rows // groups, groups, True, rows == _SELECT_ROWS[-1], 199 << 10)
    return Unit("fi/indexer/mqa_select_sm90.cuh", "MqaLogitsParams", (entry,))


def _select_axes(values: Values) -> Values:
    """With the fewest rows of a CTA that hold those of a request, or the most."""
    rows = next((rows for rows in _SELECT_ROWS if rows >= values["rows"]), _SELECT_ROWS[-1])
    return {**values, "paged": True, "rows": rows}


def _any_form(values: Values) -> Values:
    """The axes of a kernel for keys in one array and in pages, and for any number of rows."""
    return {**values, "paged": False, "rows": 0}


_FORMS = Constraint("heads", "in", _HEADS), Constraint("dim", "in", _DIMS)
_ALONE = (Constraint("selects", "==", False),)
_WGMMA = (*exactly(90), _FORMS[0], Constraint("dim", "==", 128), Constraint("aligned", "==", True))
MQA_LOGITS = Op(
    name="mqa_logits",
    family="indexer",
    arguments="Tensor(a!) logits, Tensor q, Tensor keys, Tensor weights, Tensor ends, Tensor? starts=None, "
    "Tensor? key_scales=None, Tensor? block_table=None, bool clean=False, bool relative=False, "
    "bool orders_nan=False, Tensor(b!)? indices=None, Tensor(c!)? scores=None, Tensor(d!)? state=None, "
    "bool mapped=False, bool prefer_last=False, bool? enable_pdl=None",
    # indices: the largest logits of each row of a request are chosen too; state: of rows, for that.
    fields={
        "heads": Field(None, 64),
        "dim": Field(None, 128),
        "aligned": Field((True, False), True),
        "selects": Field((True, False), False),  # keys; the op `indexer` asks for it on Hopper alone
        "paged": Field((False, True), False),
        "rows": Field(None, 1),  # of a request whose keys are selected
    },
    axes={"heads": _HEADS, "dim": _DIMS, "paged": (False, True), "rows": (0, *_SELECT_ROWS)},
    varies={
        "paged": lambda given: (True,) if given["selects"] else (False, True),
        "rows": lambda given: _SELECT_ROWS if given["selects"] else (1,),
    },
    config=_Config,
    implementations=(
        Implementation("cpu", (*ON_CPU, *_ALONE), axes=_any_form),
        Implementation("wgmma_sm90", (*_WGMMA, *_ALONE), _wgmma_unit, axes=lambda v: {**v, "rows": 0}),
        Implementation("wgmma_select_sm90", (*_WGMMA, Constraint("selects", "==", True)), _select_unit, _select_axes),
        Implementation("mma_sm80", (*at_least(80), *_FORMS, *_ALONE), _mma_unit, axes=_any_form),
    ),
    prebuilt=(
        *({"heads": heads, "paged": paged} for heads in (64, 32) for paged in (False, True)),
        *({"heads": heads, "selects": True, "rows": rows} for heads in (64, 32) for rows in _SELECT_ROWS),
    ),
)

mqa_logits = operator(MQA_LOGITS)

# Which op chooses keys of pages: mqa_logits itself where all logits fit L2, else top_k behind it.
INDEXER = Op(
    name="indexer",
    family="indexer",
    fields={
        "heads": Field(None, 64),
        "dim": Field(None, 128),
        "aligned": Field((True, False), True),
        "contiguous": Field((True, False), True),  # results
        "top_k": Field(None, 2048),
        "megabytes": Field(None, 1),  # of logits
    },
    implementations=(
        Implementation(
            "mqa_logits",
            (
                *_WGMMA,
                Constraint("contiguous", "==", True),
                Constraint("top_k", "<=", 2048),
                Constraint("megabytes", "<=", 64),
            ),
        ),
        Implementation("top_k", ()),
    ),
)


def selects(
    q: torch.Tensor, keys: torch.Tensor, logits: int, indices: torch.Tensor, scores: torch.Tensor | None
) -> bool:
    """Whether mqa_logits chooses among keys of pages, of which there are so many logits."""
    aligned = (q.data_ptr() | keys.data_ptr() | keys.stride(0)) % 16 == 0
    contiguous = indices.is_contiguous() and (scores is None or scores.is_contiguous())
    megabytes = min(4 * logits >> 20, 65)
    numbers = q.shape[-2], q.shape[-1], aligned, contiguous, indices.shape[1], megabytes
    return composition(INDEXER, q.device, *numbers) == "mqa_logits"
