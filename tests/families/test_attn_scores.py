"""fi_core.attn_scores: the logits of an indexer by FlashInfer's other names, and what sizes their buffers."""

from __future__ import annotations

import pytest
import torch

from fi_core import attn_scores, indexer
from fi_core.observe.draw import Draw
from fi_core.registry import described


@pytest.mark.parametrize("buffer", [False, True])
@pytest.mark.parametrize("next_n", [1, 2])
def test_they_are_those_of_the_indexer(next_n: int, buffer: bool, device: str) -> None:
    template = described("fp8_paged_mqa_logits").template
    given = template.make(Draw(device), next_n=next_n)
    want = indexer.fp8_paged_mqa_logits(**given)
    most, rows = given["max_context_len"], len(given["weights"])
    lengths, tables, page_size = given["context_lens"], given["block_table"], given["kv_cache"].shape[1]
    assert tables.shape[1] >= attn_scores.min_block_table_width(int(lengths.max()), page_size)
    out = torch.full((rows, attn_scores.padded_seq_len(most)), 7.0, device=device) if buffer else None
    got = attn_scores.fp8_paged_mqa_logits(
        given["q"], given["kv_cache"], given["weights"], tables, lengths, most, output_dtype=torch.float32, out=out
    )
    assert got.shape == (rows, most) and got.stride(0) % 256 == 0
    assert out is None or (got.data_ptr() == out.data_ptr() and bool((out[:, most:] == 7).all()))
    for row in range(rows):
        keys = max(0, int(lengths[row // next_n]) - next_n + row % next_n + 1)
        assert torch.equal(got[row, :keys], want[row, :keys])


@pytest.mark.parametrize("name", ["output_dtype", "epi_dtype", "acc_dtype"])
def test_another_dtype_is_refused(name: str) -> None:
    given = described("fp8_paged_mqa_logits").template.make(Draw())
    call = given["q"], given["kv_cache"], given["weights"], given["block_table"], given["context_lens"]
    with pytest.raises(ValueError, match=f"{name} must be None or torch.float32; got torch.bfloat16"):
        attn_scores.fp8_paged_mqa_logits(*call, given["max_context_len"], **{name: torch.bfloat16})
    with pytest.raises(ValueError, match="out"):
        attn_scores.fp8_paged_mqa_logits(*call, given["max_context_len"], out=torch.empty(1, 1))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_schedule_is_int32(dtype: torch.dtype) -> None:
    lengths = torch.tensor([5, 9], dtype=dtype)
    schedule = attn_scores.compute_paged_mqa_logits_schedule(lengths, next_n=2, variant="fp4", use_gpu_kernel=False)
    assert schedule.dtype == torch.int32 and schedule.tolist() == [[0, 0], [0, 0]]
    assert attn_scores.compute_paged_mqa_logits_schedule(lengths, out=schedule) is schedule
