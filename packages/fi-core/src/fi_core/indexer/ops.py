"""Declares the operator of an indexer's logits and its kernel entries."""

from __future__ import annotations

from typing import NamedTuple

from fi_core.runtime.launch.operator import operator
from fi_core.runtime.spec.constraint import ON_CPU, Constraint, at_least, exactly
from fi_core.runtime.spec.op import Entry, Field, Implementation, Op, Unit, Values

_HEADS, _DIMS = (64, 32, 16, 8), (128, 64, 32)
_WARPGROUPS = 3  # that compute


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


def _wgmma_entry(heads: int, rows: int, row_groups: int, paged: bool, is_last: bool) -> Entry:
    keys = 64 * (_WARPGROUPS // row_groups)
    stages, queries = 4 if row_groups == 1 else 8, 2 if paged else 1
    size = stages * keys * (128 + 4) + queries * row_groups * heads * rows * 128 + 16 * (stages + queries) + 2048
    body = f"mqa_logits_wgmma<{heads}, {rows}, {row_groups}, {'true' if paged else 'false'}, {size}>"
    name = f"mqa_logits_{'paged' if paged else 'ragged'}_{rows}_{row_groups}"
    return Entry(name, body, _WARPGROUPS * 128 + 32, _Config(rows, row_groups, paged, is_last), size, 1)


def _wgmma_unit(axes: Values) -> Unit:
    """Many ragged rows share each tile of keys; few rows, as those of a request are, split it."""
    heads = axes["heads"]
    entries = (
        _wgmma_entry(heads, min(4, 128 // heads), _WARPGROUPS, False, False),
        _wgmma_entry(heads, 1, 1, False, True),
        _wgmma_entry(heads, 2, 1, True, False),
        _wgmma_entry(heads, 1, 1, True, True),
    )
    return Unit("fi/indexer/mqa_logits_sm90.cuh", "MqaLogitsParams", entries)


_FORMS = Constraint("heads", "in", _HEADS), Constraint("dim", "in", _DIMS)
MQA_LOGITS = Op(
    name="mqa_logits",
    family="indexer",
    arguments="Tensor(a!) logits, Tensor q, Tensor keys, Tensor weights, Tensor ends, Tensor? starts=None, "
    "Tensor? key_scales=None, Tensor? block_table=None, bool clean=False, bool relative=False, "
    "bool orders_nan=False, bool? enable_pdl=None",
    fields={"heads": Field(None, 64), "dim": Field(None, 128), "aligned": Field((True, False), True)},
    axes={"heads": _HEADS, "dim": _DIMS},
    config=_Config,
    implementations=(
        Implementation("cpu", ON_CPU),
        Implementation(
            "wgmma_sm90",
            (*exactly(90), _FORMS[0], Constraint("dim", "==", 128), Constraint("aligned", "==", True)),
            _wgmma_unit,
        ),
        Implementation("mma_sm80", (*at_least(80), *_FORMS), _mma_unit),
    ),
    prebuilt=({"heads": 64}, {"heads": 32}),
)

mqa_logits = operator(MQA_LOGITS)
