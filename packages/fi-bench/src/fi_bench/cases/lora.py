"""Cases of low-rank adapters of linear layers."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from fi_bench.case import Inputs
from fi_bench.described import described, eager, sizes_of


def _sizes(*names: str) -> Any:
    def sizes(p: Namespace) -> dict[str, Any]:
        return sizes_of(p, "num_tokens", "num_loras", "rank", *names, dtype="input_dtype")

    return sizes


def _torch_shrink(x: Inputs) -> Any:
    """The products of all adapters, of which each token takes its own."""
    import torch

    index = x.lora_indices_tensor.clamp(min=0)[None, :, None]
    found = torch.matmul(x.inputs, x.lora_a_weights[:, 0].mT)
    own = found.gather(0, index.expand(1, -1, found.shape[2]))[0].float()
    return own * (x.lora_indices_tensor >= 0)[:, None] * x.scaling


def _torch_expand(x: Inputs) -> Any:
    import torch

    index = x.lora_indices_tensor.clamp(min=0)[None, :, None]
    found = torch.matmul(x.inputs.to(x.lora_b_weights.dtype), x.lora_b_weights[:, 0].mT)
    own = found.gather(0, index.expand(1, -1, found.shape[2]))[0]
    return x.output_tensor + own * (x.lora_indices_tensor >= 0)[:, None]


CASES = (
    described(
        "lora.add_lora_linear",
        _sizes("in_features", "out_features"),
        None,
        lambda x: eager("lora.add_lora_linear", x),
        op="lora_delta",
    ),
    described("lora.bgmv_shrink", _sizes("in_features"), None, _torch_shrink, op="lora_delta"),
    described("lora.bgmv_expand", _sizes("out_features"), None, _torch_expand, op="lora_delta"),
)
