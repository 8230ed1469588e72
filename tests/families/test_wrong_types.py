"""Every public function names the argument where something else than a tensor is passed for one."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import _neg_view

import fi_core
from families.prefill_batch import batch
from families.test_descriptions import DESCRIBED
from fi_core.comm import Mapping, MoeAlltoAll
from fi_core.comm.mnnvl import MnnvlConfig, OneRank
from fi_core.observe import api
from fi_core.registry import described


def functions() -> dict[str, Any]:
    """The described public functions."""
    for family in fi_core._MODULES:
        importlib.import_module(f"fi_core.{family}")
    names = (name.split(":") for name in api.functions if name.startswith("fi_core."))
    found = {name: getattr(importlib.import_module(module), name) for module, name in names if "." not in name}
    return {name: function for name, function in found.items() if described(name) is not None}


@pytest.mark.parametrize("wrong", [[1.0], None, numpy.ones(3), 1.5, "x"], ids=lambda wrong: type(wrong).__name__)
@pytest.mark.parametrize("name", functions())
def test_it_is_named(name: str, wrong: Any) -> None:
    function, found = functions()[name], described(name)
    assert found is not None
    arguments = found.template.sample(**(found.template.samples[0] if found.template.samples else {}))
    parameters = inspect.signature(function).parameters
    tensors = [key for key, value in arguments.items() if isinstance(value, torch.Tensor)]
    assert tensors
    for key in tensors:
        if wrong is None and "None" in parameters[key].annotation:
            continue
        if isinstance(wrong, float) and "float" in parameters[key].annotation:
            continue
        with pytest.raises((TypeError, ValueError), match=rf"\b{key}\b") as caught:
            function(**{**arguments, key: wrong})
        assert "_cpu" not in str(caught.value), "no name of a module"


@pytest.mark.parametrize("method", ["__init__", "plan"])
def test_a_wrong_keyword_names_a_class_that_users_know(method: str) -> None:
    assert functions()  # loads every family
    wrappers = {cls.__name__: cls for cls in api.classes.values() if hasattr(cls, "plan") and hasattr(cls, "run")}
    assert {"BatchDecodeWithPagedKVCacheWrapper", "BatchMLAPagedAttentionWrapper", "BatchAttention"} <= {*wrappers}
    for name, wrapper in wrappers.items():
        with pytest.raises(TypeError, match="unexpected keyword argument 'wrong'") as caught:
            wrapper(wrong=1) if method == "__init__" else wrapper.__new__(wrapper).plan(wrong=1)
        assert str(caught.value).partition(".")[0] in ({name} if method == "__init__" else wrappers), caught.value


def test_an_error_of_a_kernel_names_the_function_that_was_called() -> None:
    """Not the operator inside it, which users do not know."""
    said = {}
    for name, function in functions().items():
        found = described(name)
        assert found is not None
        arguments = found.template.sample(**(found.template.samples[0] if found.template.samples else {}))
        for x in arguments.values():
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                x.requires_grad_()
        try:
            function(**arguments)
        except NotImplementedError as error:
            said[name] = str(error)
    assert len(said) >= 80
    assert [f"{name}: {text}" for name, text in said.items() if not text.startswith(f"{name}: there is no back")] == []


def test_a_number_of_a_wrong_type_is_named() -> None:
    with pytest.raises(TypeError, match=r"top_k: k must be an integer; got a float"):
        fi_core.top_k(torch.ones(2, 8), 1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "arguments", "named"),
    [
        ("min_p_sampling_from_probs", {"probs": torch.ones(2, 8).to_sparse(), "min_p": 0.1}, "probs must be a dense"),
        ("gelu_tanh_and_mul", {"input": torch.ones(())}, "input: .* is required; got shape"),
        ("top_k_renorm_probs", {"probs": torch.ones(2, 8), "top_k": torch.ones(2).cfloat()}, "top_k: an integer dtype"),
        (
            "top_k_mask_logits",
            {"logits": torch.ones(2, 8).to(torch.float8_e4m3fn), "top_k": 1},
            "logits: a float dtype",
        ),
    ],
)
def test_a_tensor_of_a_wrong_kind_is_named(name: str, arguments: dict[str, Any], named: str) -> None:
    with pytest.raises((TypeError, ValueError), match=named):
        getattr(fi_core, name)(**arguments)


LAYERS = ("fi_core.fused_moe", "fi_core.lora")  # their kernels read what others have computed


def test_a_kernel_names_the_argument_of_its_caller() -> None:
    """Not that of the operator: `paged_kv_cache[0]` is k there, and k_scale bmm1_scale."""
    refused, wrong = 0, []
    for found in DESCRIBED:
        given = found.template.sample(**(found.template.samples[0] if found.template.samples else {}))
        own, bound = found.own(given), found.bind(given)
        if found.function.__module__.startswith(LAYERS):
            continue
        call = getattr(sys.modules[bound.__module__], bound.__name__, bound)
        for name, value in own.items():
            for i, x in enumerate(value if isinstance(value, tuple) else [value]):
                if not isinstance(x, torch.Tensor) or not x.ndim or x.shape[-1] < 2:
                    continue
                gaps = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)[..., ::2]
                changed = (*value[:i], gaps, *value[i + 1 :]) if isinstance(value, tuple) else gaps
                try:
                    call(**{**own, name: changed})
                except (TypeError, ValueError) as error:
                    refused += 1
                    said = str(error).partition("; got tensors of")[0]
                    wrong += [] if re.search(rf"\b{name}\b", said) else [f"{found.name} {name}: {said}"]
    assert refused > 300 and wrong == []


@pytest.mark.parametrize(("scale", "words"), [(torch.ones(2), "one element"), (torch.ones(1).half(), "float32"),
                                              ("big", "a dense tensor")])  # fmt: skip
@pytest.mark.parametrize("name", ["q_scale", "k_scale", "v_scale"])
def test_a_scale_of_a_run_is_named(name: str, scale: Any, words: str) -> None:
    b = batch([(1, 20), (1, 3)])
    decode = fi_core.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    decode.plan(*b.pool.plan_arguments(), **b.pool.dtypes)
    prefill = fi_core.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    prefill.plan(*b.paged_plan(), **b.types())
    for wrapper in (decode, prefill):
        with pytest.raises((TypeError, ValueError), match=rf"{name} must .*{words}"):
            wrapper.run(b.q, b.cache, **{name: scale})


def test_names_of_callers_in_turn() -> None:
    """A wrapper around a wrapper has names of its own, also for what it converts."""
    b = batch([(1, 20), (1, 3)])
    p = b.pool
    given = {"qo_indptr": b.qo_indptr, "kv_indptr": p.indptr, "kv_indices": p.indices, "kv_len_arr": p.seq_lens()}
    sizes = (*b.heads, *b.dims, p.page_size)
    types = dict.fromkeys(("q_data_type", "kv_data_type"), b.q.dtype)
    mixed = fi_core.BatchAttention(device="cpu")
    for dtype in (torch.int32, torch.int64):
        with pytest.raises(ValueError, match="plan: kv_len_arr must be in"):
            mixed.plan(*{**given, "kv_len_arr": torch.tensor([20, 99]).to(dtype)}.values(), *sizes, **types)
    mixed.plan(*given.values(), *sizes, **types)
    for cache, words in ((tuple(x.bfloat16() for x in b.cache), "kv_cache: kv_data_type torch.float16 was planned"),
                         ((b.cache[0], b.cache[1][:1]), r"kv_cache\[1\] must have shape")):  # fmt: skip
        with pytest.raises(ValueError, match=rf"\b{words}"):
            mixed.run(b.q, cache)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x, i: fi_core.get_batch_indices_positions(i, i[:2], 3, i.clone(), i.clone()), None),
        (lambda x, i: fi_core.get_batch_indices_positions(i.clone(), i[:2].clone(), 3, i, i),
         "batch_indices and positions"),
        (lambda x, i: fi_core.append_paged_kv_cache(x, x + 1, i[:1], i[:1], (x[None] * 2,) * 2, i[:1], i[:2], i[1:2]),
         r"paged_kv_cache\[0\] and paged_kv_cache\[1\]"),
        (lambda x, i: fi_core.rope.rope_quantize_fp8(x, x, x, x, torch.ones(4, 8), i[:1], q_rope_out=x.to(FP8),
                                                     q_nope_out=x.to(FP8)), None),
        (lambda x, i: fi_core.rope.rope_quantize_fp8(x, x, x, x, torch.ones(4, 8), i[:1], **dict.fromkeys(
            ("q_rope_out", "q_nope_out"), x.to(FP8))), "q_rope_out and q_nope_out"),
    ],
)  # fmt: skip
def test_results_are_apart(call: Callable[..., Any], words: str | None) -> None:
    """One of two different results in one memory would be lost."""
    x, i = torch.ones(1, 1, 8).half(), torch.tensor([0, 1, 2], dtype=torch.int32)
    if words is None:
        call(x, i)
        return
    with pytest.raises(ValueError, match=f"{words} are written, so they must not share memory"):
        call(x, i)


def test_q_and_k_rotated_in_place_are_two_tensors() -> None:
    """One tensor would be rotated twice."""
    q = torch.ones(2, 1, 64)
    with pytest.raises(ValueError, match="q and k are written, so they must not share memory"):
        fi_core.apply_rope_pos_ids_inplace(q, q, torch.zeros(2, dtype=torch.int32))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (
            {"block_tables": torch.zeros(1, 3, dtype=torch.int32)},
            "block_tables: 2 rows are required, batch_size; got 1",
        ),
        ({"qkv": [torch.ones(2, 1, 64)]}, r"qkv: a tuple \(q, kv_cache\) is required; got 1 members"),
    ],
)
def test_tables_and_members_of_one_call_are_counted(wrong: dict[str, Any], named: str) -> None:
    """A table of fewer rows would be read behind its end."""
    indptr, lens = torch.arange(3, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    given: dict[str, Any] = {
        "qkv": (torch.ones(2, 1, 64), torch.ones(3, 2, 1, 1, 64)), "input_layout": "Q_PAGED_KV_NHD",
        "workspace_buffer": WORKSPACE, "seq_lens": lens, "max_q_len": 1, "max_kv_len": 1, "bmm1_scale": 1.0,
        "bmm2_scale": 1.0, "batch_size": 2, "cum_seq_lens_q": indptr, "cum_seq_lens_kv": indptr,
        "block_tables": torch.zeros(2, 3, dtype=torch.int32),
    }  # fmt: skip
    fi_core.trtllm_fmha_v2_prefill(**given)
    with pytest.raises(ValueError, match=named):
        fi_core.trtllm_fmha_v2_prefill(**{**given, **wrong})


def test_a_cache_in_one_tensor_is_not_blamed_for_another_argument() -> None:
    """Descriptions have the shape of K and of V, which one tensor of both does not have."""
    q, cache = torch.ones(2, 1, 64, dtype=torch.float16), torch.ones(2, 2, 1, 16, 64, dtype=torch.float16)
    tables, lengths = torch.zeros(2, 1, dtype=torch.int32), torch.ones(4, dtype=torch.int32)[::2]
    with pytest.raises(ValueError, match=r"seq_lens must be contiguous; got shape \[2\] with stride 2"):
        fi_core.decode.trtllm_batch_decode_with_kv_cache(
            q, cache, torch.zeros(8 << 20, dtype=torch.uint8), tables, lengths, 1
        )


WORKSPACE, FP8 = torch.empty(1 << 16, dtype=torch.uint8), torch.float8_e4m3fn
INDPTR, LAST = torch.tensor([0, 1], dtype=torch.int32), torch.ones(1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"float_workspace_buffer": 3}, "float_workspace_buffer must be a torch.Tensor; got an int"),
        ({"jit_args": 3}, "jit_args: a tuple is required"),
        ({"paged_kv_indptr_buffer": torch.zeros(1, dtype=torch.int32).expand(2)}, "paged_kv_indptr_buffer: a contig"),
        ({"paged_kv_indices_buffer": INDPTR[None]}, "paged_kv_indices_buffer: a contig"),
        ({"float_workspace_buffer": _neg_view(WORKSPACE)}, "float_workspace_buffer: .*got negated"),
        ({"jit_kwargs": torch.ones(2)}, "WithPagedKVCacheWrapper: jit_kwargs must be a dict or None; got a Tensor"),
    ],
)
def test_an_argument_of_a_wrapper_is_named(wrong: dict[str, Any], named: str) -> None:
    buffers = {
        "paged_kv_indptr_buffer": INDPTR,
        "paged_kv_indices_buffer": INDPTR,
        "paged_kv_last_page_len_buffer": LAST,
    }
    given = {"float_workspace_buffer": WORKSPACE, "use_cuda_graph": True, **buffers, **wrong}
    with pytest.raises((TypeError, ValueError), match=named):
        fi_core.BatchDecodeWithPagedKVCacheWrapper(**given)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"rope_scale": torch.ones(2)}, "rope_scale: a number is required"),
        ({"fixed_split_size": torch.ones(2)}, "plan: fixed_split_size must be an integer or None; got a Tensor"),
        ({"indptr": INDPTR[None]}, "indptr: .*integers are required"),
        ({"indices": [0]}, "indices must be a torch.Tensor; got a list"),
        ({"is_causal": torch.ones(2)}, "plan: is_causal must be a bool or None; got a Tensor"),
        (
            {"seq_lens": LAST.to_sparse(), "q_len_per_req": 2},
            "plan: seq_lens must be a dense tensor with data; got layout torch.sparse_coo",
        ),
    ],
)
def test_an_argument_of_plan_is_named(wrong: dict[str, Any], named: str) -> None:
    given = {"indptr": INDPTR, "indices": INDPTR, "last_page_len": LAST, "num_qo_heads": 1, "num_kv_heads": 1}
    wrapper = fi_core.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, use_tensor_cores=True)
    with pytest.raises((TypeError, ValueError), match=named):
        wrapper.plan(**{**given, "head_dim": 64, "page_size": 1, **wrong})


def test_integers_have_64_bits() -> None:
    with pytest.raises(
        ValueError, match=r"mxfp8_quantize: alignment must be an integer of 64 bits; got 9223372036854775808"
    ):
        fi_core.mxfp8_quantize(torch.ones(2, 32), alignment=2**63)


def test_values_that_shape_a_result_need_data() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    offsets = FakeTensorMode().from_tensor(INDPTR)
    with pytest.raises(NotImplementedError, match="segment_packbits: values of indptr shape the result"):
        fi_core.segment_packbits(torch.ones(1, dtype=torch.bool), offsets)


def test_other_errors_stay() -> None:
    with pytest.raises(ValueError, match=r"input must have shape \[n, d\]"):
        fi_core.rmsnorm(torch.ones(()), torch.ones(1))
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'weight'"):
        fi_core.rmsnorm(torch.ones(2, 8))  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "call",
    [
        lambda: fi_core.silu_and_mul(torch.empty(4, 8, device="meta")),
        lambda: fi_core.rmsnorm(torch.ones(4, 8), torch.ones(9)),
        lambda: fi_core.rmsnorm([1.0], torch.ones(9)),  # type: ignore[arg-type]
    ],
)
def test_no_frames_of_ours_in_a_traceback(call: Callable[[], Any]) -> None:
    """Words of our own need no frames: those of the caller, the function and its check remain; none of C++."""
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    files = [Path(entry.filename).name for entry in traceback.extract_tb(caught.value.__traceback__)]
    assert len(files) <= 4 and "<unknown>" not in files, files


@pytest.mark.parametrize("graph", [False, True])
def test_tables_of_64_bits(graph: bool, device: str) -> None:
    """`plan` converts them, for decode and prefill alike, and copies them into the buffers of a CUDA graph."""
    q, cache = torch.randn(2, 4, 64, device=device).half(), torch.randn(3, 2, 16, 2, 64, device=device).half()
    workspace = torch.empty(1 << 24, dtype=torch.uint8, device=device)
    indptr, indices, last = torch.tensor([0, 1, 3]), torch.tensor([2, 0, 1]), torch.tensor([7, 16])
    rows = torch.tensor([0, 1, 2])
    results = []
    for dtype in (torch.int32, torch.int64):
        tables = [table.to(device, dtype) for table in (indptr, indices, last)]
        buffers = [table.to(torch.int32) for table in tables]
        decode = (
            fi_core.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace, *buffers)
            if graph
            else fi_core.BatchDecodeWithPagedKVCacheWrapper(workspace)
        )
        decode.plan(*tables, 4, 2, 64, 16)
        results.append(decode.run(q, cache))
        prefill = fi_core.BatchPrefillWithPagedKVCacheWrapper(workspace)
        prefill.plan(rows.to(device, dtype), *tables, 4, 2, 64, 16, causal=True)
        results.append(prefill.run(q, cache))
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])
    with pytest.raises(TypeError, match="int32"):
        fi_core.BatchDecodeWithPagedKVCacheWrapper(workspace).plan(indptr.float(), indices, last, 4, 2, 64, 16)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"max_num_tokens": -(2**31)}, "workspace_size_per_rank, or the sizes that it follows from: "),
        ({"top_k": 2**62}, "workspace_size_per_rank, or the sizes that it follows from: "),
        ({"timeout": float("inf")}, "timeout: 0 to 2147483648 seconds are required; got inf"),
        ({"device": 2**62}, "device: a device of torch is required; got 4611686018427387904"),
    ],
)
def test_the_sizes_of_an_exchange_are_named(wrong: dict[str, Any], named: str) -> None:
    sizes = {"max_num_tokens": 8, "top_k": 2, "num_experts": 4, "hidden_size": 64, "device": torch.device("cpu")}
    config = MnnvlConfig(comm_backend=OneRank())
    with pytest.raises(ValueError, match=named):
        MoeAlltoAll(Mapping(1, 0, tp_size=1, moe_ep_size=1), mnnvl_config=config, **{**sizes, **wrong})
