"""A plan that fails leaves no plan: the next run of any wrapper says so, and the next good plan works."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from families.engine import engine
from families.harness import assert_close
from families.prefill_batch import Batch, batch, workspace
from fi_core.attention.wrappers.planners import fast_decode_plan
from fi_core.attention.wrappers.sinks import BatchAttentionWithAttentionSinkWrapper
from fi_core.cascade import MultiLevelCascadeAttentionWrapper
from fi_core.decode import BatchDecodeWithPagedKVCacheWrapper, CUDAGraphBatchDecodeWithPagedKVCacheWrapper
from fi_core.prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper

LENS = ((1, 40), (1, 17), (1, 3))  # of every request one row, so that decode and prefill compute the same


class Subject(NamedTuple):
    """A wrapper with the arguments of a good plan, and the arguments of run."""

    wrapper: Any
    plan: dict[str, Any]
    keys: tuple[Any, ...]

    def planned(self, **change: Any) -> None:
        self.wrapper.plan(**self.plan | change)


def _decode(b: Batch, make: Callable[[Any], Any], **more: Any) -> Subject:
    names = ("indptr", "indices", "last_page_len", "num_qo_heads", "num_kv_heads", "head_dim", "page_size")
    p = b.pool
    values = (p.indptr, p.indices, p.last_page_len, *b.heads, b.dims[0], p.page_size)
    return Subject(make(workspace("cpu", 64 << 20)), dict(zip(names, values)) | p.dtypes | more, (b.cache,))


def _graph_decode(b: Batch) -> Subject:
    p = b.pool
    return _decode(b, lambda room: CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
        room, p.indptr.clone(), p.indices.clone(), p.last_page_len.clone()))  # fmt: skip


_PAGED = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "num_qo_heads", "num_kv_heads",
          "head_dim_qk", "page_size")  # fmt: skip


def _paged(b: Batch, wrapper: type = BatchPrefillWithPagedKVCacheWrapper, **buffers: Any) -> Subject:
    given = dict(zip(_PAGED, b.paged_plan())) | b.types()
    return Subject(wrapper(workspace("cpu"), **buffers), given, (b.cache,))


def _graph_paged(b: Batch) -> Subject:
    tables = {f"{name}_buf": table.clone() for name, table in zip(_PAGED[:4], b.paged_plan())}
    return _paged(b, use_cuda_graph=True, **tables)


def _ragged(b: Batch) -> Subject:
    names = ("qo_indptr", "kv_indptr", "num_qo_heads", "num_kv_heads", "head_dim_qk")
    given = dict(zip(names, b.ragged_plan())) | b.types()
    return Subject(BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu")), given, b.ragged())


def _cascade(b: Batch) -> Subject:
    p = b.pool
    given = {
        "qo_indptr_arr": [b.qo_indptr], "paged_kv_indptr_arr": [p.indptr], "paged_kv_indices_arr": [p.indices],
        "paged_kv_last_page_len": [p.last_page_len], "num_qo_heads": b.heads[0], "num_kv_heads": b.heads[1],
        "head_dim": b.dims[0], "page_size": p.page_size, "q_data_type": b.q.dtype,
    }  # fmt: skip
    return Subject(MultiLevelCascadeAttentionWrapper(1, workspace("cpu")), given, (b.cache,))


SUBJECTS: dict[str, Callable[[Batch], Subject]] = {
    "decode": lambda b: _decode(b, BatchDecodeWithPagedKVCacheWrapper),
    "decode_tensor_cores": lambda b: _decode(b, lambda r: BatchDecodeWithPagedKVCacheWrapper(r, use_tensor_cores=True)),
    "decode_graph": _graph_decode,
    "paged": _paged,
    "paged_graph": _graph_paged,
    "sinks": lambda b: _paged(b, BatchAttentionWithAttentionSinkWrapper),
    "ragged": _ragged,
    "cascade": _cascade,
}

_SHORT = torch.zeros(2, dtype=torch.int32)
# A bad value of each argument that a plan has, by name; a table also in the list that cascade takes.
BAD: dict[str, Any] = {
    "num_qo_heads": 5, "num_kv_heads": 3, "head_dim": 65, "head_dim_qk": 65, "head_dim_vo": 520, "page_size": 0,
    "pos_encoding_mode": "ROPE", "q_data_type": 16, "kv_data_type": "float3", "o_data_type": torch.int8,
    "indptr": _SHORT, "indices": _SHORT, "last_page_len": _SHORT, "seq_lens": _SHORT, "q_len_per_req": 0,
    "window_right": -2, "fixed_split_size": 0, "qo_indptr": _SHORT, "kv_indptr": _SHORT,
    "paged_kv_indptr": _SHORT, "paged_kv_indices": _SHORT, "paged_kv_last_page_len": _SHORT, "v_indptr": _SHORT,
    "custom_mask": torch.ones(7, dtype=torch.bool), "packed_custom_mask": torch.ones(2, dtype=torch.uint8),
    "prefix_len_ptr": _SHORT, "qo_indptr_arr": [_SHORT], "paged_kv_indptr_arr": [_SHORT],
    "paged_kv_indices_arr": [_SHORT],
}  # fmt: skip


def _cases() -> Iterator[tuple[str, str]]:
    b = batch(LENS)

    for name, make in SUBJECTS.items():
        subject = make(b)
        taken = inspect.signature(type(subject.wrapper).plan).parameters
        for argument in BAD:
            harmless = (argument == "fixed_split_size" and not name.startswith("decode")) or (
                argument == "seq_lens" and name == "ragged")  # fmt: skip
            if argument in taken and not harmless:
                yield name, argument


@pytest.mark.parametrize(("subject", "argument"), list(_cases()))
def test_run_after_a_failed_plan(subject: str, argument: str) -> None:
    """Neither the old plan nor a mixture of both runs; the batch of the next plan is computed as if nothing was."""
    b = batch(LENS)
    w, want = SUBJECTS[subject](b), b.expected()[0]
    bad = BAD[argument]
    if argument == "paged_kv_last_page_len" and subject == "cascade":
        bad = [bad]
    with pytest.raises(RuntimeError, match="run: call plan first"):
        w.wrapper.run(b.q, *w.keys)
    w.planned()
    assert_close(w.wrapper.run(b.q, *w.keys), want)
    with pytest.raises((ValueError, TypeError, KeyError, NotImplementedError)):
        w.planned(**{argument: bad})
    with pytest.raises(RuntimeError, match="run: the last plan failed: call plan again"):
        w.wrapper.run(b.q, *w.keys)
    w.planned()
    assert_close(w.wrapper.run(b.q, *w.keys), want)


@pytest.mark.parametrize("subject", [name for name in SUBJECTS if name != "ragged"])
def test_the_last_page_holds_a_token_to_a_whole_page(subject: str) -> None:
    """0 is for requests without pages."""
    b = batch(((1, 40), (1, 0), (1, 3)))
    w = SUBJECTS[subject](b)
    name = next(own for own in w.plan if own.endswith("last_page_len"))
    w.planned()
    for at, length in ((0, 0), (2, -1), (2, b.pool.page_size + 1)):
        bad = b.pool.last_page_len.clone()
        bad[at] = length
        with pytest.raises(ValueError, match=rf"last_page_len.* must be in 1\.\.16, the page.*got {length} at {at}"):
            w.planned(**{name: [bad] if subject == "cascade" else bad})


@pytest.mark.parametrize("subject", ["decode", "decode_tensor_cores", "paged", "ragged"])
def test_run_after_a_failed_plan_of_an_engine(subject: str) -> None:
    """Planners behind the wrapper leave no plan either."""
    b = batch(LENS)
    w = SUBJECTS[subject](b)
    w.planned()
    own = engine(w.wrapper).float_workspace_buffer, engine(w.wrapper).int_workspace_buffer, None
    p, heads = b.pool, (5, 2, b.pool.page_size)
    if subject == "decode":
        tables: tuple[Any, ...] = (p.indptr, 3, *heads, False, -1, 0.0, 64, 64)
    else:
        indptr = b.kv_indptr if subject == "ragged" else p.indptr
        tables = (b.qo_indptr, indptr, p.seq_lens(), 3, 3, *heads, False, 64, 64, False, -1)
    with pytest.raises(ValueError, match="num_qo_heads"):
        engine(w.wrapper).cached_module.plan(*own, *tables)
    with pytest.raises(RuntimeError, match="run: the last plan failed: call plan again"):
        w.wrapper.run(b.q, *w.keys)


def test_run_after_a_failed_fast_plan() -> None:
    b = batch(LENS)
    w = SUBJECTS["decode"](b)
    w.planned()
    tables = (b.pool.indptr, b.pool.indices, b.pool.last_page_len)
    with pytest.raises(RuntimeError, match="num_qo_heads"):
        fast_decode_plan(w.wrapper, *tables, 5, 2, 64, 16, **b.pool.dtypes)
    with pytest.raises(RuntimeError, match="run: the last plan failed: call plan again"):
        w.wrapper.run(b.q, *w.keys)


def test_a_failed_plan_keeps_the_limits_of_a_graph() -> None:
    """A captured graph may exist, so the rows and q_len_per_req of the first good plan stay the limit."""
    b = batch(LENS)
    w = _graph_paged(b)
    w.planned()
    with pytest.raises(ValueError, match="num_qo_heads"):
        w.planned(num_qo_heads=5)
    with pytest.raises(ValueError, match="at most 3 rows, those of the first plan"):
        w.planned(qo_indptr=torch.tensor([0, 1, 2, 9], dtype=torch.int32))


def test_a_bad_shape_writes_no_buffer_of_a_graph() -> None:
    b = batch(LENS)
    w = _graph_paged(b)
    w.planned()
    before = engine(w.wrapper).paged_kv_indices_buf.clone()
    with pytest.raises(ValueError, match="num_qo_heads"):
        w.planned(paged_kv_indices=b.pool.indices.flip(0), num_qo_heads=5)
    assert torch.equal(engine(w.wrapper).paged_kv_indices_buf, before)
