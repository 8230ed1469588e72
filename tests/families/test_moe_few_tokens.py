"""A layer of few tokens in one launch: all formats, ranks without experts, hostile values, graphs, public forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from families.harness import rand
from families.moe_reference import block_quantized, chosen, error, experts
from fi_core.fused_moe import (
    cutlass_fused_moe,
    cutlass_fused_moe_workspace_size,
    trtllm_bf16_routed_moe,
)
from fi_core.fused_moe.moe_few_tokens import moe_few_tokens
from fi_core.tllm_enums import ActivationType as Act
from fi_core.tllm_enums import WeightLayout

BF16, F16 = torch.bfloat16, torch.float16


class Weights:
    """Of e experts of width i on a hidden size h; e4m3 with scales of 128 x 128 for a dtype None."""

    def __init__(self, e: int, h: int, i: int, dtype: torch.dtype | None, device: str) -> None:
        self.x_dtype = dtype or BF16
        up = rand(e, 2 * i, h, dtype=self.x_dtype, device=device, seed=1, scale=h**-0.5)
        down = rand(e, h, i, dtype=self.x_dtype, device=device, seed=2, scale=i**-0.5)
        self.up, self.down, self.values, self.scales = up, down, (up.double(), down.double()), dict[str, Any]()
        self.most_error = 8e-3
        if dtype is None:
            (self.up, s1, d1), (self.down, s2, d2) = block_quantized(up), block_quantized(down)
            self.values, self.scales, self.most_error = (d1, d2), {"up_scale": s1, "down_scale": s2}, 6e-2

    def run(self, x: torch.Tensor, ids: torch.Tensor, first: int = 0, last: int | None = None, **options: Any) -> Any:
        """The op with the experts `first` to `last`."""
        own = slice(first, last)
        out = torch.full_like(x, float("nan"))
        activated = torch.full((ids.numel(), self.down.shape[2]), float("nan"), dtype=x.dtype, device=x.device)
        moe_few_tokens(out, activated, x, self.up[own], self.down[own], ids, first_expert=first,
                       **{name: scale[own] for name, scale in self.scales.items()}, **options)  # fmt: skip
        return out

    def want(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None = None, **options: Any) -> Any:
        ones = torch.ones(ids.shape, device=ids.device)
        return experts(x, ids, ones if weights is None else weights, *self.values, **options)


FORMATS = pytest.mark.parametrize("dtype", [BF16, F16, None], ids=["bf16", "f16", "fp8"])


@FORMATS
@pytest.mark.parametrize(("e", "k", "h", "i"), [(16, 8, 384, 256), (8, 2, 640, 128), (3, 1, 128, 1024)])
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 5, 8])
def test_layers(tokens: int, e: int, k: int, h: int, i: int, dtype: torch.dtype | None, device: str) -> None:
    w = Weights(e, h, i, dtype, device)
    x, (ids, weights) = rand(tokens, h, dtype=w.x_dtype, device=device), chosen(tokens, e, k, device)
    assert error(w.run(x, ids, weights=weights), w.want(x, ids, weights)) < w.most_error


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize("kind", [Act.Swiglu, Act.SwigluBias])
@pytest.mark.parametrize("tokens", [1, 4])
def test_biases_and_ragged_sizes(tokens: int, kind: Act, dtype: torch.dtype, device: str) -> None:
    """Sizes that are multiples of 8 only, rows apart, constants of each expert."""
    e, k, h, i = 6, 3, 136, 104
    w = Weights(e, h, i, dtype, device)
    x, (ids, weights) = rand(tokens, 2 * h, dtype=dtype, device=device)[:, :h], chosen(tokens, e, k, device)
    bias, down_bias = (rand(e, n, dtype=dtype, device=device, seed=n) for n in (2 * i, h))
    per_expert = torch.linspace(0.5, 2.0, e, device=device)
    constants: dict[str, Any] = (
        {"alpha": per_expert, "beta": per_expert - 1, "limit": per_expert} if kind is Act.SwigluBias else {}
    )
    out = w.run(x, ids, weights=weights, bias=bias, down_bias=down_bias, activation=kind, **constants)
    want = w.want(x, ids, weights, b1=bias, b2=down_bias, kind=kind, constants=constants)
    assert error(out, want) < w.most_error


@FORMATS
@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_experts_of_a_rank(tokens: int, dtype: torch.dtype | None, device: str) -> None:
    """Ranks sum to the whole; a rank without experts of these tokens gives zeros."""
    e, k, h, i = 16, 4, 256, 128
    w = Weights(e, h, i, dtype, device)
    x, (ids, weights) = rand(tokens, h, dtype=w.x_dtype, device=device), chosen(tokens, 12, k, device)
    parts = [w.run(x, ids, f, f + 4, weights=weights).float() for f in range(0, e, 4)]
    assert error(torch.stack(parts).sum(0), w.want(x, ids, weights)) < w.most_error
    assert parts[3].eq(0).all()


@FORMATS
@pytest.mark.parametrize("tokens", [1, 6])
def test_hostile_slots(tokens: int, dtype: torch.dtype | None, device: str) -> None:
    """A token names an expert twice, slots name no expert, weights of such slots are NaN, a token is zeros."""
    e, k, h, i = 5, 4, 256, 128
    w = Weights(e, h, i, dtype, device)
    x, (ids, weights) = rand(tokens, h, dtype=w.x_dtype, device=device), chosen(tokens, e, k, device)
    ids[:, 1] = ids[:, 0]
    ids[:, 2] = torch.tensor([-1, e, 2**31 - 1, -(2**31), -7, 99], device=device, dtype=torch.int32)[:tokens]
    weights[:, 2] = float("nan")
    x[-1] = 0
    assert error(w.run(x, ids, weights=weights), w.want(x, ids, weights)) < w.most_error


@FORMATS
def test_nan_stays_in_its_token(dtype: torch.dtype | None, device: str) -> None:
    """Of an input and of a weight; all tokens share their experts."""
    w, k = Weights(4, 256, 128, dtype, device), 3
    x = rand(5, 256, dtype=w.x_dtype, device=device)
    ids, weights = torch.arange(k, dtype=torch.int32, device=device).repeat(5, 1), torch.ones(5, k, device=device)
    want = w.want(x, ids, weights)
    x[1, 7], weights[3, 2] = float("nan"), float("nan")
    out = w.run(x, ids, weights=weights)
    assert out[[1, 3]].isnan().all()
    assert error(out[[0, 2, 4]], want[[0, 2, 4]]) < w.most_error


def test_too_many_slots_are_refused() -> None:
    w = Weights(4, 128, 128, BF16, "cpu")
    for tokens, k in ((9, 1), (2, 33), (1, 33), (8, 9)):
        with pytest.raises(ValueError, match="ids must be of at most 8 tokens with at most 32 experts, 64 in all"):
            w.run(rand(tokens, 128, dtype=BF16, device="cpu"), torch.zeros((tokens, k), dtype=torch.int32))


@FORMATS
@pytest.mark.parametrize("tokens", [1, 2])
def test_public_forms(tokens: int, dtype: torch.dtype | None, device: str) -> None:
    e, k, h, i = 16, 4, 256, 256
    w = Weights(e, h, i, dtype, device)
    x, (ids, weights) = rand(tokens, h, dtype=w.x_dtype, device=device), chosen(tokens, e, k, device)
    want, fp8 = w.want(x, ids, weights), dtype is None
    size = cutlass_fused_moe_workspace_size(
        tokens, h, i, e, k, x_dtype=x.dtype, weight_dtype=w.up.dtype, use_deepseek_fp8_block_scale=fp8
    )
    workspace = torch.full((size,), 255, dtype=torch.uint8, device=device)
    for _ in range(3):  # the first call makes the plan of the later ones
        out = cutlass_fused_moe(
            x, ids, weights, w.up, w.down, x.dtype, list(w.scales.values()), use_deepseek_fp8_block_scale=fp8,
            workspace_buffer=workspace,
        )  # fmt: skip
        assert error(out, want) < w.most_error
    options: dict[str, Any] = {
        "num_experts": e, "top_k": k, "n_group": None, "topk_group": None, "intermediate_size": i,
        "local_expert_offset": 0, "local_num_experts": e, "use_shuffled_weight": False,
        "weight_layout": WeightLayout.MajorK,
    }  # fmt: skip
    for _ in range(0 if fp8 else 2):
        routed = trtllm_bf16_routed_moe((ids, weights), x, w.up, w.down, **options)
        assert isinstance(routed, torch.Tensor) and error(routed, want) < w.most_error


@pytest.mark.gpu
@FORMATS
@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_graph_replay_with_changing_routing(tokens: int, dtype: torch.dtype | None) -> None:
    """200 replays, with other launches of the kernel on a second stream: each equals a call by itself to the bit."""
    e, k, h, i = 64, 8, 512, 256
    w = Weights(e, h, i, dtype, "cuda")
    x, (ids, weights) = rand(tokens, h, dtype=w.x_dtype, device="cuda"), chosen(tokens, e, k, "cuda")
    w.run(x, ids, weights=weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = w.run(x, ids, weights=weights)
    other, beside = torch.cuda.Stream(), chosen(tokens, e, k, "cuda", seed=1)
    other.wait_stream(torch.cuda.current_stream())
    expected = w.run(x, beside[0], weights=beside[1])
    for n in range(200):
        ids.copy_(chosen(tokens, e, k, "cuda", seed=n)[0])
        with torch.cuda.stream(other):
            own = w.run(x, beside[0], weights=beside[1])
        graph.replay()
        again = w.run(x, ids, weights=weights)
        torch.cuda.synchronize()
        assert torch.equal(out, again) and torch.equal(own, expected)
        if n % 20 == 0:
            assert error(out, w.want(x, ids, weights)) < w.most_error
