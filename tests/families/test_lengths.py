"""Lengths that callers give beside pages and offsets: honoured, or refused by the name of the argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fi_core
from families import test_mla as mla
from families.attention_reference import attention
from families.harness import assert_close
from families.prefill_batch import Batch, batch, workspace

LENS = ((1, 40), (1, 17), (1, 3))  # pages of 16 tokens: 3, 2 and 1
Attend = Callable[[torch.Tensor], Any]


def _i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _room() -> torch.Tensor:
    return workspace("cpu", 8 << 20)


def _wrapper(kind: type, b: Batch) -> Attend:
    wrapper = kind(workspace("cpu"))

    def attend(lengths: torch.Tensor) -> Any:
        if kind is fi_core.BatchDecodeWithPagedKVCacheWrapper:
            wrapper.plan(*b.pool.plan_arguments(), **b.pool.dtypes, seq_lens=lengths)
        else:
            wrapper.plan(*b.paged_plan(), **b.types(), seq_lens=lengths)
        return wrapper.run(b.q, b.cache)

    return attend


def _mixed(b: Batch) -> Attend:
    wrapper = fi_core.BatchAttention(device="cpu")

    def attend(lengths: torch.Tensor) -> Any:
        sizes = (*b.heads, *b.dims, b.pool.page_size)
        types = dict.fromkeys(("q_data_type", "kv_data_type"), b.q.dtype)
        wrapper.plan(b.qo_indptr, b.pool.indptr, b.pool.indices, lengths, *sizes, **types)
        return wrapper.run(b.q, b.cache)

    return attend


def _tables(function: Callable[..., Any], b: Batch, **more: Any) -> Attend:
    common = {"query": b.q, "kv_cache": b.cache, "workspace_buffer": _room(), "block_tables": b.pool.block_tables(),
              "bmm1_scale": 0.1, "bmm2_scale": 1.0, "kv_layout": "NHD"}  # fmt: skip
    return lambda lengths: function(**common, seq_lens=lengths, **more)


def _ragged(b: Batch, **more: Any) -> Attend:
    k, v = b.ragged()
    return lambda lengths: fi_core.prefill.trtllm_ragged_attention_deepseek(
        b.q, k, v, _room(), lengths, 1, 40, 0.125, 1.0, 1.0, 3, -1, b.qo_indptr, b.kv_indptr, None, False, False, **more
    )


def _latent() -> dict[str, tuple[Attend, str]]:
    b = mla.batch([kv for _, kv in LENS], page_size=16)
    wrapper = mla.Wrapper(mla.workspace("cpu"))
    plan = list(b.plan_arguments())
    table = mla.block_tables(b)
    sizes = (512, 64, table[:, :3].contiguous())

    def attend(lengths: torch.Tensor) -> Any:
        wrapper.plan(*plan[:3], lengths, *plan[4:])
        return wrapper.run(*b.run_arguments())

    def by_tables(lengths: torch.Tensor) -> Any:
        q = b.q[:, None]
        return mla.trtllm_batch_decode_with_kv_cache_mla(
            q, b.cache, mla.workspace("cpu"), 128, *sizes, lengths, 48, bmm1_scale=0.1
        )

    return {"mla": (attend, "kv_len_arr"), "mla tables": (by_tables, "seq_lens")}


def _entries() -> dict[str, tuple[Attend, str]]:
    b = batch(LENS, kv_layout="NHD")
    decode, prefill = fi_core.decode, fi_core.prefill
    of_context = {"max_q_len": 1, "max_kv_len": 40, "batch_size": 3, "cum_seq_lens_q": b.qo_indptr,
                  "cum_seq_lens_kv": b.kv_indptr}  # fmt: skip
    return {
        "decode": (_wrapper(fi_core.BatchDecodeWithPagedKVCacheWrapper, b), "seq_lens"),
        "prefill": (_wrapper(fi_core.BatchPrefillWithPagedKVCacheWrapper, b), "seq_lens"),
        "mixed": (_mixed(b), "kv_len_arr"),
        "decode tables": (_tables(decode.trtllm_batch_decode_with_kv_cache, b, max_seq_len=40), "seq_lens"),
        "xqa tables": (_tables(decode.xqa_batch_decode_with_kv_cache, b, max_seq_len=40), "seq_lens"),
        "context tables": (_tables(prefill.trtllm_batch_context_with_kv_cache, b, **of_context), "seq_lens"),
        "ragged": (_ragged(b), "seq_lens"),
        **_latent(),
    }


ENTRIES = _entries()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", [(65, 17, 3), (40, -1, 3), (40, 17, 100)], ids=str)
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_length_beyond_its_pages_is_refused(entry: str, lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    """What does not exist would be left out, and the rest taken for the whole."""
    attend, name = ENTRIES[entry]
    attend(_i32(40, 17, 3).to(dtype))
    with pytest.raises(ValueError, match=rf"\b{name}\b.* in 0\.\.\d+, the tokens of its pages, of request"):
        attend(torch.tensor(lengths, dtype=dtype))


@pytest.mark.parametrize("lengths", [(40, 17), (40, 17, 3, 3)], ids=str)
@pytest.mark.parametrize("entry", ENTRIES)
def test_each_request_has_a_length(entry: str, lengths: tuple[int, ...]) -> None:
    attend, _ = ENTRIES[entry]
    with pytest.raises(ValueError, match=r"seq_lens|kv_len_arr|query|block_tables|kv_indptr"):
        attend(_i32(*lengths))


def test_ragged_keys_may_have_gaps() -> None:
    """A request attends to seq_lens keys from its offset on, as in TensorRT-LLM; None: to all up to the next offset."""
    b = batch(LENS)
    k, v = b.ragged()
    for given, lengths in ((_i32(10, 17, 0), (10, 17, 0)), (None, (40, 17, 3))):
        out = _ragged(b)(given)  # type: ignore[arg-type]
        for i, (begin, length) in enumerate(zip((0, 40, 57), lengths)):
            rows = slice(begin, begin + length)
            want, _ = attention(b.q[i : i + 1], k[rows], v[rows])
            assert_close(out[i : i + 1], want)


@pytest.mark.parametrize(("most", "refused"), [(2, True), (3, False), (7, False), (None, False)])
def test_no_request_has_more_query_tokens_than_the_maximum(most: int | None, refused: bool) -> None:
    """Rows beyond it would not be written."""
    b = batch([(3, 40), (1, 17)])
    lengths, indptr = b.pool.seq_lens(), b.qo_indptr
    common = (b.q, b.cache, _room(), b.pool.block_tables(), lengths, 40, 0.125)
    for function, of_most, starts in (
        (fi_core.decode.trtllm_batch_decode_with_kv_cache, "max_q_len", "cum_seq_lens_q"),
        (fi_core.decode.xqa_batch_decode_with_kv_cache, "q_len_per_req", "q_cu_seq_lens"),
    ):
        given = {starts: indptr, of_most: most, "kv_layout": "NHD"}
        if refused:
            with pytest.raises(ValueError, match=f"{starts} must give each request at most 2 rows.*; got 3 of request"):
                function(*common, **given)
        else:
            assert_close(function(*common, **given), b.expected(causal=True)[0])
