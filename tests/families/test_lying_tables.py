"""Tables that lie: offsets, page ids, positions and masks of any content end in a named error or in a result."""

from __future__ import annotations

import contextlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fi_core
from families.paged import paged
from families.prefill_batch import batch, workspace
from families.test_descriptions import DESCRIBED
from families.test_failed_plan import SUBJECTS
from fi_core.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    trtllm_batch_decode_with_kv_cache,
    xqa_batch_decode_with_kv_cache,
)
from fi_core.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    trtllm_batch_context_with_kv_cache,
    trtllm_ragged_attention_deepseek,
)
from fi_core.runtime.errors import MissingKernelError

Lie = Callable[[torch.Tensor], torch.Tensor]
INDICES = (torch.int32, torch.int64, torch.uint16, torch.uint32)
ERRORS = (ValueError, TypeError, KeyError, NotImplementedError)


def _filled(value: int) -> Lie:
    return lambda x: torch.full_like(x, value)


def _alternating(x: torch.Tensor) -> torch.Tensor:
    """Differences of neighbours wrap."""
    found = torch.full_like(x, -(1 << 63)).flatten()
    found[1::2] = (1 << 63) - 1
    return found.view(x.shape)


# One list for every table of every function: of its values as int64, which then become the nearest of its dtype.
LIES: dict[str, Lie] = {
    "-1": _filled(-1),
    "400": _filled(400),
    "2^31": _filled(1 << 31),
    "-2^31": _filled(-(1 << 31)),
    "largest": _filled((1 << 63) - 1),
    "smallest": _filled(-(1 << 63)),
    "alternating": _alternating,
    "reversed": lambda x: x.flip(0) if x.ndim else x,
    "doubled": lambda x: x * 2,
    "one less": lambda x: x - 1,
    "one more": lambda x: x + 1,
    "last huge": lambda x: torch.cat((x[:-1], torch.full_like(x[-1:], 1 << 30))) if x.ndim else x,
    "short": lambda x: x[:-1] if x.ndim else x,
    "empty": lambda x: x[:0] if x.ndim else x,
    "long": lambda x: torch.cat((x, x[-1:])) if x.ndim else x,
}


def lies(given: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The arguments with each of their tables replaced by each lie."""
    for name, value in given.items():
        if not isinstance(value, torch.Tensor) or value.dtype not in INDICES or not value.numel():
            continue
        limits = torch.iinfo(value.dtype)
        for words, lie in LIES.items():
            yield f"{name}: {words}", {**given, name: lie(value.long()).clamp(limits.min, limits.max).to(value.dtype)}
        if value.ndim:
            yield f"{name}: expanded", {**given, name: value[:1].expand(value.shape)}


def _described() -> Iterator[tuple[str, Callable[[], Any]]]:
    for found in DESCRIBED:
        for words, given in lies(
            found.template.sample(**(found.template.samples[0] if found.template.samples else {}))
        ):
            yield f"{found.name} {words}", lambda f=found, g=given: f.call(g)


LENS = ((1, 40), (1, 17), (1, 3))


def _planned() -> Iterator[tuple[str, Callable[[], Any]]]:
    b = batch(LENS)
    for name, make in SUBJECTS.items():
        w = make(b)
        lists = {k: v[0] for k, v in w.plan.items() if isinstance(v, list)}
        for words, given in lies({**w.plan, **lists}):
            given.update({k: [given[k]] for k in lists})

            def call(w: Any = w, given: dict[str, Any] = given) -> None:
                w.wrapper.plan(**given)
                w.wrapper.run(b.q, *w.keys)

            yield f"{name} {words}", call


def _items() -> Iterator[tuple[str, Callable[[], Any]]]:
    b = batch(((8, 40), (8, 17)))
    good = {
        "prefix_len_ptr": torch.tensor([20, 9], dtype=torch.int32),
        "token_pos_in_items_ptr": torch.arange(40).remainder(5).to(torch.uint16), "token_pos_in_items_len": 20,
    }  # fmt: skip
    for wrapper, plan, keys in (
        (BatchPrefillWithPagedKVCacheWrapper, b.paged_plan(), (b.cache,)),
        (BatchPrefillWithRaggedKVCacheWrapper, b.ragged_plan(), b.ragged()),
    ):
        w = wrapper(workspace("cpu"))
        short = {"token_pos_in_items_ptr": torch.zeros(4, dtype=torch.uint16), "token_pos_in_items_len": 2}
        for words, given in (*lies(good), ("2 positions", good | short)):

            def call(w: Any = w, plan: Any = plan, given: Any = given, keys: Any = keys) -> None:
                w.plan(*plan, **b.types(), causal=True, **given)
                w.run(b.q, *keys)

            yield f"{wrapper.__name__} items, {words}", call


def _tables() -> Iterator[tuple[str, Callable[[], Any]]]:
    """The functions over block tables."""
    b, room = batch(LENS, kv_layout="NHD"), workspace("cpu", 8 << 20)
    p = b.pool
    common = {"query": b.q, "kv_cache": b.cache, "workspace_buffer": room, "block_tables": p.block_tables(),
              "seq_lens": p.seq_lens(), "bmm1_scale": 0.1, "bmm2_scale": 1.0, "kv_layout": "NHD"}  # fmt: skip
    indptr, keys = b.qo_indptr, b.kv_indptr
    k, v = b.ragged()
    fmha = {
        "workspace_buffer": room, "seq_lens": p.seq_lens(), "max_q_len": 1, "max_kv_len": 40, "bmm1_scale": 0.1,
        "bmm2_scale": 1.0, "batch_size": 3, "cum_seq_lens_q": indptr, "cum_seq_lens_kv": keys,
    }  # fmt: skip
    calls: tuple[tuple[Callable[..., Any], dict[str, Any]], ...] = (
        (trtllm_batch_decode_with_kv_cache, common | {"max_seq_len": 40}),
        (trtllm_batch_decode_with_kv_cache, common | {"max_seq_len": 40, "cum_seq_lens_q": indptr, "max_q_len": 2}),
        (trtllm_batch_decode_with_kv_cache, common | {"max_seq_len": 40, "cum_seq_lens_q": indptr}),
        (xqa_batch_decode_with_kv_cache, common | {"max_seq_len": 40, "q_cu_seq_lens": indptr, "q_len_per_req": 2}),
        (trtllm_batch_context_with_kv_cache, common | {"max_q_len": 1, "max_kv_len": 40, "batch_size": 3,
                                                       "cum_seq_lens_q": indptr, "cum_seq_lens_kv": keys}),
        (trtllm_ragged_attention_deepseek, {
            "query": b.q, "key": k, "value": v, "workspace_buffer": room, "seq_lens": p.seq_lens(), "max_q_len": 1,
            "max_kv_len": 40, "bmm1_scale": 0.1, "bmm2_scale": 1.0, "o_sf_scale": 1.0, "batch_size": 3,
            "window_left": -1, "cum_seq_lens_q": indptr, "cum_seq_lens_kv": keys, "enable_pdl": None,
            "is_causal": True, "return_lse": False}),
        (fi_core.trtllm_fmha_v2_prefill, fmha | {"qkv": (b.q, b.cache), "input_layout": "Q_PAGED_KV_NHD",
                                                 "block_tables": p.block_tables()}),
        (fi_core.trtllm_fmha_v2_prefill, fmha | {"qkv": (b.q, b.cache), "input_layout": "Q_PAGED_KV_NHD",
                                                 "block_tables": p.block_tables(), "mask_mode": "chunked",
                                                 "chunked_attention_size": 16}),
        (fi_core.trtllm_fmha_v2_prefill, fmha | {"qkv": (b.q, k, v), "input_layout": "SEPARATE_Q_K_V"}),
    )  # fmt: skip
    for function, given in calls:
        function(**given)  # the truth is taken
        for words, changed in lies(given):
            yield f"{function.__name__} {words}", lambda f=function, g=changed: f(**g)


# Attention variants, which compile at the first plan: without a compiler they say so.
COMPILED = ("BatchPrefillWithCausalBidirectionalRangesWrapper",)
GROUPS = {"described": _described, "planned": _planned, "items": _items, "tables": _tables}


def attack(group: str) -> int:
    """Calls everything in a group, and says what it calls, so that a crash names its cause. Returns the number."""
    count = 0
    for name, call in GROUPS[group]():
        print(name, flush=True)
        try:
            call()
        except ERRORS:
            pass
        except MissingKernelError:
            assert name.startswith(COMPILED), name
        except RuntimeError as error:
            raise AssertionError(f"{name}: an error without a name: {error}") from error
        count += 1
    return count


def in_a_process(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    places = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-X", "faulthandler", "-c", code]
    return subprocess.run(command, env={**os.environ, **places, **variables}, capture_output=True, text=True)


def test_no_table_crashes() -> None:
    """In a process of its own: each call returns, or raises an error of fi."""
    code = "from families.test_lying_tables import *; print('done', [attack(group) > 30 for group in GROUPS])"
    done = in_a_process(code)
    last = "\n".join(done.stdout.splitlines()[-3:])
    assert done.returncode == 0, f"after {last}:\n{done.stderr[-3000:]}"
    assert f"done {[True] * len(GROUPS)}" in done.stdout, last


def test_zero_turns_the_checks_off() -> None:
    """FI_CHECK=0: a position that is out of its pages, but not out of memory, is written."""
    code = """
import torch, fi_core
i = lambda *x: torch.tensor(x, dtype=torch.int32)
cache = torch.zeros(2, 2, 4, 1, 8)
fi_core.append_paged_kv_cache(torch.ones(1, 1, 8), torch.ones(1, 1, 8), i(0), i(4), cache, i(0, 1), i(0, 1), i(1))
print(cache.sum().item())
"""
    assert "16.0" in in_a_process(code, FI_CHECK="0").stdout
    with pytest.raises(ValueError, match="positions must be in the 1 pages"):
        exec(code, {})


@pytest.mark.parametrize("length", [0, 8, 10, 100])
@pytest.mark.parametrize("is_paged", [True, False])
def test_a_packed_mask_has_the_length_of_all_masks(length: int, is_paged: bool) -> None:
    b = batch(LENS)
    masks = torch.zeros(length, dtype=torch.uint8)
    wrapper = BatchPrefillWithPagedKVCacheWrapper if is_paged else BatchPrefillWithRaggedKVCacheWrapper
    with pytest.raises(ValueError, match=f"packed_custom_mask: 9 bytes are required, .*; got {length}"):
        wrapper(workspace("cpu")).plan(
            *(b.paged_plan() if is_paged else b.ragged_plan()), **b.types(), packed_custom_mask=masks
        )


def test_positions_within_items_reach_the_end_of_the_keys() -> None:
    b = batch(((8, 40), (8, 17)))
    w = BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"))
    w.plan(
        *b.paged_plan(), **b.types(), prefix_len_ptr=torch.tensor([20, 9], dtype=torch.int32),
        token_pos_in_items_ptr=torch.zeros(38, dtype=torch.uint16), token_pos_in_items_len=19,
    )  # fmt: skip
    with pytest.raises(ValueError, match="must have 20 elements for request 0, its kv_len less its prefix_len 20; got"):
        w.run(b.q, b.cache)


def test_a_segment_of_wrapping_offsets() -> None:
    largest = (1 << 63) - 1
    for offsets in ([0, largest, -2, 8], [0, -largest, largest, 8], [0, 1 << 33, 8]):
        with pytest.raises(ValueError, match="indptr: must not decrease"):
            fi_core.segment_packbits(torch.ones(8, dtype=torch.bool), torch.tensor(offsets))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"row_to_batch": [0, 2]}, r"row_to_batch must be in 0\.\.1, the rows of src_page_table; got 2 at 1"),
        ({"row_to_batch": [-1, 0]}, "row_to_batch must be .*; got -1 at 0"),
        ({"page_table_row_starts": [0, -1]}, "src_page_table must have columns -1 to 3 for row 1"),
        ({"page_table_row_starts": [0, 9]}, "src_page_table must have columns 9 to 13 for row 1 of input; got 4"),
        ({"row_starts": [0, 1]}, None),
    ],
)
def test_top_k_checks_its_page_table(change: dict[str, list[int]], words: str | None) -> None:
    given: dict[str, Any] = {name: torch.tensor(x, dtype=torch.int32) for name, x in change.items()}
    table, lengths = torch.arange(8, dtype=torch.int32).view(2, 4), torch.tensor([4, 4], dtype=torch.int32)
    x = torch.randn(2, 4)
    if words is None:  # the segment is clamped to the row
        assert fi_core.top_k_page_table_transform(x, table, lengths, 4, **given).shape == (2, 4)
        return
    with pytest.raises(ValueError, match=words):
        fi_core.top_k_page_table_transform(x, table, lengths, 4, **given)
    with pytest.raises(ValueError, match="src_page_table must have columns 0 to 4 for row 0 of input; got 3"):
        fi_core.top_k_page_table_transform(x, table[:, :3], lengths, 4)


@pytest.mark.parametrize(("begin", "refused"), [(8, True), (11, True), (3, True), (12, False), (2, False)])
def test_results_share_no_memory_with_a_table(begin: int, refused: bool) -> None:
    """Its contents are checked before, and become addresses then."""
    memory = torch.zeros(24, dtype=torch.int32)
    table = memory[8:12].copy_(torch.tensor([0, 2, 4, 6]))
    given = table, torch.full((3,), 5, dtype=torch.int32), 6
    want = fi_core.get_batch_indices_positions(*given)
    with pytest.raises(ValueError, match=r"positions .* append_indptr") if refused else contextlib.nullcontext():
        got = fi_core.get_batch_indices_positions(*given, positions=memory[begin : begin + 6])
        assert all(map(torch.equal, got, want))
    assert table.tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize(("begin", "refused"), [(0, True), (63, True), (64, False), (70, False)])
def test_a_table_may_lie_between_pages(begin: int, refused: bool) -> None:
    memory = torch.zeros(2, 72)
    cache, table = memory[:, :64].unflatten(1, (2, 4, 1, 8)), memory[0, begin : begin + 2].view(torch.int32)
    table.copy_(torch.tensor([1, 0]))
    zero, two = torch.zeros(1, dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
    rows = torch.ones(1, 1, 8), torch.ones(1, 1, 8)
    with pytest.raises(ValueError, match=r"cache .* kv_indices") if refused else contextlib.nullcontext():
        fi_core.append_paged_kv_cache(*rows, zero, zero, cache, table, two, zero + 1)
    assert bool(cache[1, :, 0].all()) == (not refused)


def test_an_index_beyond_int32_does_not_wrap() -> None:
    x, weights = torch.ones(4, 8), torch.ones(2, 8, 8)
    wrapper = fi_core.SegmentGEMMWrapper(torch.empty(0, dtype=torch.uint8))
    for name, values in (("seg_indptr", [0, 2, 4 + (1 << 32)]), ("weight_indices", [0, 1 + (1 << 32)])):
        given = {"seg_indptr": torch.tensor([0, 2, 4]), "weight_indices": torch.tensor([0, 1])}
        wrapper.run(x.half(), weights.half(), 2, True, **given)
        with pytest.raises(ValueError, match="m_indptr" if name == "seg_indptr" else "b_indices"):
            wrapper.run(x.half(), weights.half(), 2, True, **{**given, name: torch.tensor(values)})


def test_lengths_saturate() -> None:
    """The sum of pages and tokens is exact, or the largest integer."""
    largest = (1 << 31) - 1
    for dtype, page_size, indptr, last, want in (
        (torch.int32, 16, [0, 3], 5, 37),
        (torch.int32, largest, [0, 3], 5, largest),
        (torch.int32, 16, [-largest, largest], 5, largest),
        (torch.int32, 1, [0, largest], largest, largest),
        (torch.int64, largest, [0, 3], 5, 2 * largest + 5),
        (torch.int64, largest, [-(1 << 62), 1 << 62], 5, (1 << 63) - 1),
    ):
        given = torch.tensor(indptr, dtype=dtype), torch.tensor([last], dtype=dtype)
        assert fi_core.get_seq_lens(*given, page_size).tolist() == [want]
    with pytest.raises(ValueError, match=r"page_size must be in 1\.\.2\^31 - 1; got 2147483648"):
        fi_core.get_seq_lens(torch.tensor([0, 1]), torch.tensor([1]), 1 << 31)


def test_shared_rows_of_a_block_table() -> None:
    """An expanded table names the same pages for every request."""
    p = paged([40, 40])
    table = p.block_tables()[:1]
    given = {"workspace_buffer": workspace("cpu", 8 << 20), "max_seq_len": 40, "seq_lens": p.seq_lens(),
             "kv_layout": "NHD"}  # fmt: skip
    got = trtllm_batch_decode_with_kv_cache(p.q, p.cache, block_tables=table.expand(2, -1), **given)
    assert torch.equal(got, trtllm_batch_decode_with_kv_cache(p.q, p.cache, block_tables=table.repeat(2, 1), **given))


def _of_kind(kind: str) -> list[Any]:
    """(function, arguments, name) of each described function with a parameter that is annotated so."""
    found = {}
    for function, template in (found for found in DESCRIBED if not found.wrapper):
        for name, parameter in inspect.signature(function).parameters.items():
            if kind in str(parameter.annotation) and "Tensor" not in str(parameter.annotation):
                found[f"{function.__name__}-{name}"] = (function, template, name)
    return [pytest.param(*value, id=key) for key, value in found.items()]


@pytest.mark.parametrize(("function", "template", "name"), _of_kind("float"))
def test_a_number_is_not_nan(function: Any, template: Any, name: str) -> None:
    given = template.sample(**(template.samples[0] if template.samples else {}))
    with pytest.raises(ValueError, match=r"NaN|nan"):
        function(**{**given, name: float("nan")})


@pytest.mark.parametrize("found", [pytest.param(found, id=f"{found.name}-{i}") for i, found in enumerate(DESCRIBED)
                                   if "out" in inspect.signature(found.function).parameters])  # fmt: skip
def test_the_elements_of_an_output_share_no_memory(found: Any) -> None:
    """What is returned would depend on the order of writes."""
    sizes = found.template.samples[0] if found.template.samples else {}
    good = found.call(found.template.sample(**sizes))
    good = good[0] if isinstance(good, tuple) else good
    shape = good.shape if good is not None else found.template.sample(**sizes)["out"].shape
    dtype = found.template.sample(**sizes).get("out", good).dtype
    one = torch.empty(shape.numel(), dtype=dtype)
    overlapping = [one.as_strided(shape, [1] * len(shape))] if len(shape) > 1 else []
    several = next(i for i, size in enumerate(shape) if size > 1)
    repeated = torch.empty([1 if i == several else size for i, size in enumerate(shape)], dtype=dtype).expand(shape)
    for out in (repeated, *overlapping):
        with pytest.raises(ValueError, match="is written, so no two of its elements may share memory; got shape"):
            found.call({**found.template.sample(**sizes), "out": out})


def test_caches_and_packed_qkv_have_the_axis_that_is_unbound() -> None:
    b = batch(LENS)
    w = BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"))
    w.plan(*b.paged_plan(), **b.types())
    cache = torch.zeros(1, dtype=torch.float16).expand(9, 1 << 40, 16, 2, 64)
    with pytest.raises(ValueError, match="paged_kv_cache: dim 1 must be 2, for K and V; got shape"):
        w.run(b.q, cache)
    with pytest.raises(KeyError, match="paged_kv_cache"):
        w.run(b.q, (*b.cache, b.cache[0]))
    room, i = workspace("cpu"), torch.zeros(4, dtype=torch.int32)
    for layout, qkv in (("PACKED_QKV", cache[:, :, 0]), ("CONTIGUOUS_Q_KV", (b.q, cache[:, :, 0]))):
        with pytest.raises(ValueError, match="qkv: "):
            fi_core.trtllm_fmha_v2_prefill(qkv, layout, room, i, 1, 40, 0.1, 1.0, 3, i, i)


def test_a_large_top_k_is_no_filter() -> None:
    """int64 values do not wrap at 2^32: 2^32 + 1 is not 1."""
    logits = torch.randn(3, 50)
    for k in ((1 << 32) + 1, (1 << 63) - 1, -(1 << 32) - 5):
        kept = fi_core.sampling.top_k_mask_logits(logits, torch.full((3,), k))
        assert torch.equal(kept, logits)
    assert torch.equal(fi_core.sampling.top_k_mask_logits(logits, (1 << 63) - 1), logits)
    with pytest.raises(ValueError, match="top_k must be an integer of 64 bits"):
        fi_core.sampling.top_k_mask_logits(logits, 1 << 63)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["quantised", "sparse"])
def test_a_workspace_is_plain_memory(kind: str) -> None:
    plain = torch.zeros(1 << 12, 8)
    room = torch.quantize_per_tensor(plain, 1.0, 0, torch.quint8) if kind == "quantised" else plain.to_sparse()
    for wrapper in (BatchPrefillWithPagedKVCacheWrapper, BatchDecodeWithPagedKVCacheWrapper):
        with pytest.raises(ValueError, match="float_workspace_buffer: a dense tensor of plain numbers is required"):
            wrapper(room)
        with pytest.raises(ValueError, match="int_workspace_buffer: a dense tensor of plain numbers is required"):
            wrapper(workspace("cpu")).reset_workspace_buffer(workspace("cpu"), room)
    p = paged([40, 9])
    with pytest.raises(ValueError, match="workspace_buffer: a dense tensor of plain numbers is required"):
        trtllm_batch_decode_with_kv_cache(p.q, p.cache, room, p.block_tables(), p.seq_lens(), 40, kv_layout="NHD")
