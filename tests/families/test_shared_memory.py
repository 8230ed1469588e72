"""Memory that arguments share: an op refuses to write over another tensor unless its declaration permits that."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fi_core
from families import wrapper_session
from families.harness import rand
from fi_core.comm import allreduce_fusion
from fi_core.comm.mnnvl import OneRank
from fi_core.comm.ulysses_head_chunk import pack_ulysses_qkv_head_chunk
from fi_core.comm.workspace import TRTLLMAllReduceFusionWorkspace
from fi_core.quantization.kv_cache import nvfp4_kv_dequantize_paged
from fi_core.registry import load, ops
from fi_core.runtime.spec.arguments import Argument

OPS = sorted(name for name, op in ops().items() if not op.is_composite)
NUMBERS: dict[str, Any] = {"int": 1, "int?": 1, "float": 1.0, "bool": False, "bool?": None, "str": "auto"}


def pairs(name: str) -> Iterator[tuple[Argument, Argument]]:
    """Each written argument with each other one; two written ones once."""
    tensors = sorted((a for a in ops()[name].parsed if a.is_tensor), key=lambda a: not a.written)
    return ((a, b) for a, b in itertools.combinations(tensors, 2) if a.written)


def call(name: str, **tensors: torch.Tensor) -> str:
    """The error of a call of an op in which all other tensors have memory of their own; their shapes are wrong."""
    own = {a.name: torch.zeros(2, 8) if a.is_tensor else NUMBERS[a.kind] for a in ops()[name].parsed}
    with pytest.raises((ValueError, TypeError, NotImplementedError, RuntimeError)) as caught:
        load()[name].function(**own | tensors)
    return str(caught.value)


@pytest.mark.parametrize("name", OPS)
def test_no_op_writes_over_another_tensor(name: str) -> None:
    """Neither over a part of it nor, unless it is declared, over all of it."""
    for a, b in pairs(name):
        both = f"{a.name} and {b.name} are written, so they must not share memory"
        one = f"{a.name} is written while {b.name} is read, so"
        memory = torch.zeros(6, 8)
        for x, y in ((memory[:2], memory[1:3]), (memory.view(-1)[:16], memory.view(-1)[15:31])):
            assert (both if b.written else one) in call(name, **{a.name: x, b.name: y})
            assert (both if b.written else one) in call(name, **{a.name: y, b.name: x})
        said = call(name, **{a.name: memory[:2], b.name: memory[:2]})
        assert ((both if b.written else one) in said) is not a.may_be(b), said
        # Columns of one matrix, and the halves of pages.
        assert "share" not in call(name, **{a.name: memory[:, :3], b.name: memory[:, 3:]})
        assert "share" not in call(name, **{a.name: memory.view(3, 2, 8)[:, 1].t(), b.name: memory.view(3, 2, 8)[:, 0]})


def test_permitted_memory() -> None:
    """What declarations permit is what functions document and the tests below hold."""
    permitted = {(name, a.name, b.name) for name in OPS for a, b in pairs(name) if a.may_be(b)}
    assert permitted == {
        ("act_and_mul", "out", "input"),
        ("all_reduce", "out", "input"), ("all_reduce", "out", "residual_in"), ("all_reduce", "norm_out", "input"),
        ("append_paged_kv_cache", "k_cache", "v_cache"),
        ("chunk_gated_delta_rule", "output_state", "initial_state"),
        ("moe_combine", "workspace", "payload"),
        *(("moe_dispatch", "workspace", f"received{i}") for i in range(4)),
        ("rmsnorm", "out", "input"),
        ("rmsnorm_block_quant", "normed_out", "input"),
        ("rope", "q_out", "q"), ("rope", "k_out", "k"),
        ("ssd_combined", "final_states", "initial_states"), ("ssd_combined", "final_states", "checkpoint_states"),
        ("ssd_combined", "checkpoint_states", "initial_states"),
    }  # fmt: skip


def test_a_gated_activation_over_the_gate() -> None:
    for rows in (1, 3, 70):
        x = rand(rows, 2 * 96, dtype=torch.bfloat16, device="cpu")
        want = fi_core.silu_and_mul(x)
        assert torch.equal(fi_core.silu_and_mul(x, out=x[:, :96]), want)
        assert torch.equal(x[:, :96], want)
    with pytest.raises(ValueError, match="out is written while input is read, so it must have the same elements"):
        fi_core.silu_and_mul(x, out=x[:, 96:])


def test_a_quantized_norm_over_its_input() -> None:
    x, residual = (rand(5, 256, dtype=torch.bfloat16, device="cpu", seed=seed) for seed in (1, 2))
    results = []
    for normed in (torch.empty_like(x), x):
        q, scales, sums = torch.empty(5, 256, dtype=torch.float8_e4m3fn), torch.empty(2, 8), residual.clone()
        fi_core.fused_add_rmsnorm_fp8_block_quant(q, scales, normed, x, sums, torch.ones(256, dtype=torch.bfloat16))
        results.append((q.view(torch.uint8), scales[:, :5], normed.clone(), sums))
    assert all(map(torch.equal, *results))


def test_a_sum_of_ranks_in_place() -> None:
    """The residual stream over its input, and the norm over what is summed, as FlashInfer permits."""
    x, residual = (rand(3, 64, dtype=torch.bfloat16, device="cpu", seed=seed) for seed in (1, 2))
    workspace = TRTLLMAllReduceFusionWorkspace(
        1, 0, 8, 64, torch.bfloat16, OneRank(), device=torch.device("cpu"), timeout=20.0
    )
    given = {"rms_gamma": torch.ones(64, dtype=torch.bfloat16), "workspace": workspace, "pattern": 1}
    want = [torch.empty_like(x) for _ in range(2)]
    allreduce_fusion(input=x, residual_in=residual, residual_out=want[0], norm_out=want[1], **given)
    allreduce_fusion(input=x, residual_in=residual, residual_out=residual, norm_out=x, **given)
    assert torch.equal(residual, want[0]) and torch.equal(x, want[1])
    with pytest.raises(ValueError, match="are written, so they must not share memory"):
        allreduce_fusion(input=x, residual_in=residual, residual_out=x, norm_out=x, **given)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("side", [1, 2, 3])
def test_caches_that_alternate_in_one_memory(side: int, kv_layout: str) -> None:
    """K and V of each page, of each token or of each head lie next to each other."""
    shape = [4, 16, 2, 64] if kv_layout == "NHD" else [4, 2, 16, 64]
    k, v = (rand(20, 2, 64, dtype=torch.float16, device="cpu", seed=seed) for seed in (1, 2))
    tables = (torch.tensor([3, 1], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32))
    places = torch.zeros(20, dtype=torch.int32), torch.arange(20, dtype=torch.int32)
    last, results = torch.tensor([4], dtype=torch.int32), []
    apart = torch.zeros(2, *shape).half()
    for cache in (apart.unbind(0), torch.zeros(*shape[:side], 2, *shape[side:]).half().unbind(side)):
        fi_core.append_paged_kv_cache(k, v, *places, cache, *tables, last, kv_layout=kv_layout)
        results.append(torch.stack(cache))
    assert torch.equal(*results)
    one = apart[0]
    with pytest.raises(ValueError, match="are written, so they must not share memory"):
        fi_core.append_paged_kv_cache(k, v, *places, (one[:3], one[1:]), *tables, last, kv_layout=kv_layout)


def _dequantized(k: torch.Tensor, v: torch.Tensor) -> None:
    cache, codes = (torch.zeros(4, 16, 2, n, dtype=torch.uint8) for n in (32, 4))
    tables, lens = torch.zeros(1, 1, dtype=torch.int32), torch.full((1,), 16, dtype=torch.int32)
    nvfp4_kv_dequantize_paged((cache, cache), (codes, codes), tables, lens, 1.0, 1.0, k, v)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: _dequantized(*[torch.zeros(1, 16, 2, 64).half()] * 2), "output_k and output_v are written"),
        (lambda: _dequantized(*torch.zeros(2, 1, 16, 2, 64).half()), None),
        (
            lambda: _dequantized(
                torch.zeros(1, 1, 2, 64).half().expand(1, 16, 2, 64), torch.zeros(1, 16, 2, 64).half()
            ),
            "output_k is written, so no two of its elements may share memory",
        ),
        (lambda: _packed(torch.zeros(192)), "out is written while value is read"),
        (
            lambda: fi_core.gemm.gemm_alpha_beta(A, A, torch.zeros(4).bfloat16().expand(4, 4), beta=1.0),
            "c is written, so no two of its elements may share memory",
        ),
        (lambda: fi_core.gemm.gemm_alpha_beta(A, A, torch.zeros(4, 4, dtype=torch.int8), beta=1.0), "c must be bf16"),
        (
            lambda: fi_core.gemm.gemm_alpha_beta(A, A, torch.zeros(4, 4).bfloat16().requires_grad_(), beta=1.0),
            "there is no backward, and c requires grad",
        ),
    ],
)
def test_functions_that_torch_computes_name_the_argument(call: Callable[[], Any], words: str | None) -> None:
    if words is None:
        call()
        return
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=words):
        call()


A = torch.ones(4, 8).bfloat16()


def _packed(out: torch.Tensor) -> None:
    x = torch.zeros(1, 2, 4, 8)
    value = out[:64].view(1, 2, 4, 8)
    pack_ulysses_qkv_head_chunk(x, x, value, world_size=2, head_offset=0, head_count=2, out=out.view(1, 2, 4, 24))


def test_a_variant_reads_no_result() -> None:
    """A tensor of a variant is none that the op declares."""
    run = next(wrapper_session.ranges())
    q, ranges = run.arguments["q"], run.arguments["bidirectional_ranges"]
    memory = torch.zeros(q.numel(), dtype=q.dtype)
    table = memory.view(torch.int32)[: ranges.numel()].view(ranges.shape).copy_(ranges)
    with pytest.raises(ValueError, match="out is written while an additional argument is read"):
        run.wrapper.run(**run.arguments | {"bidirectional_ranges": table}, out=memory.view(q.shape))
