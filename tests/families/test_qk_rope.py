"""fused_qk_rmsnorm_rope: what its description does not express."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fi_core
from families.harness import assert_close, rand
from fi_core.runtime.errors import UnsupportedError

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
GRID = {"ppf": 2, "pph": 3, "ppw": 4}


def arguments(device: str, heads: tuple[int, int, int] = (3, 2, 1), d: int = 64, channels: int = 16) -> dict[str, Any]:
    """Two videos of 24 patches; each axis turns `channels` channels."""
    names = ("frame", "height", "width")
    return {
        "qkv": rand(2, 24, sum(heads) * d, dtype=BF16, device=device),
        "q_weight": rand(heads[0] * d, dtype=BF16, device=device, seed=1),
        "k_weight": rand(heads[1] * d, dtype=BF16, device=device, seed=2),
        **GRID, **{f"num_{name}_channels": channels for name in names},
        **dict(zip(("num_heads_q", "num_heads_k", "num_heads_v"), heads)), "head_dim": d,
    }  # fmt: skip


@pytest.mark.parametrize("interleave", [True, False])
def test_channels_beyond_the_three_axes_stay(interleave: bool, device: str) -> None:
    """48 of 64 channels turn; a pair of the second axis by the row alone."""
    x = arguments(device)
    got = fi_core.fused_qk_rmsnorm_rope(**x, interleave=interleave)
    assert [tuple(part.shape) for part in got] == [(2, 24, 3, 64), (2, 24, 2, 64), (2, 24, 1, 64)]
    q = x["qkv"].double()[..., :192]
    want = (q * (q.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * x["q_weight"].double()).unflatten(-1, (3, 64))
    assert_close(got[0][..., 48:], want[..., 48:])
    assert torch.equal(got[2].flatten(2), x["qkv"][..., 320:])
    one, other = (16 + 2 * 3, 16 + 2 * 3 + 1) if interleave else (11, 24 + 11)  # pair 3 of the second axis
    angle = (torch.arange(24) // 4 % 3).double() * 10000.0 ** (-2 * 3 / 16)
    a, b = (want[..., i].cpu() for i in (one, other))
    cosine, sine = angle.cos()[:, None], angle.sin()[:, None]
    assert_close(got[0][..., one], a * cosine - b * sine)
    assert_close(got[0][..., other], b * cosine + a * sine)


def test_fp8_results_are_scaled_and_saturate(device: str) -> None:
    x = arguments(device)
    wide = fi_core.fused_qk_rmsnorm_rope(**x)
    outs = {
        f"{name}_out": torch.empty_like(part, dtype=E4M3) for name, part in zip(("q", "k", "v"), wide)
    }  # fmt: skip
    got = fi_core.fused_qk_rmsnorm_rope(**x, output_fp8=True, output_quant_scale=3.0, v_quant_scale=400.0, **outs)
    assert all(part is out for part, out in zip(got, outs.values()))
    for part, other, scale in zip(got, wide, (3.0, 3.0, 400.0)):
        assert_close(part, other.double() * scale, tolerance=(0.08, 4e-3 * scale))
    assert got[2].float().abs().max() == 448


def test_wrong_arguments_are_named() -> None:
    x = arguments("cpu")
    for change, words in (
        ({"qkv": x["qkv"][..., :-1]}, r"qkv must have shape \[batch, seq_len, 384\]"),
        (
            {"qkv": x["qkv"][:, :-1]},
            r"qkv must have ppf \* pph \* ppw = 24 tokens, .*; got 23",
        ),
        ({"num_frame_channels": 15}, "must be even"),
        ({"num_frame_channels": 48}, "must be a multiple of 16 and at most head_dim, 64; got 80"),
        ({"attention_factor": 1.5}, "attention_factor must be 1 where factor is 1; got 1.5"),
        ({"q_weight": x["k_weight"]}, r"q_weight must have shape \[num_heads_q \* head_dim\]"),
        ({"q_out": torch.empty(2, 24, 3, 64)}, "q_out must be a contiguous tensor of torch.bfloat16"),
    ):
        with pytest.raises(ValueError, match=words):
            fi_core.fused_qk_rmsnorm_rope(**{**x, **change})
    with pytest.raises(UnsupportedError, match="requires dtype in f16, bf16, got f32"):
        fi_core.fused_qk_rmsnorm_rope(**{**x, "qkv": x["qkv"].float()})
