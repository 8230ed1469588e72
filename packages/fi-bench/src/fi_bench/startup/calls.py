"""One small call per public function of fi_core; as a script, the time of the first such call in a fresh process.

The file imports nothing of fi_bench, so that the import of fi_core is timed as well.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Calls = dict[str, Callable[[], tuple[Any, ...]]]


class _Inputs:
    """Makes inputs on a device."""

    def __init__(self, device: str) -> None:
        self.device = device

    def rand(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """bfloat16 unless a dtype is given."""
        import torch

        return torch.randn(*shape, device=self.device).to(dtype or torch.bfloat16)

    def ints(self, *values: int) -> torch.Tensor:
        import torch

        return torch.tensor(values, device=self.device, dtype=torch.int32)

    def bytes(self, *shape: int, fill: int = 0) -> torch.Tensor:
        import torch

        return torch.full(shape, fill, device=self.device, dtype=torch.uint8)

    def pages(self) -> tuple[Any, ...]:
        return self.ints(0, 1, 2, 3), self.ints(0, 4), self.ints(16)

    def cache(self, dtype: torch.dtype | None = None) -> tuple[Any, ...]:
        return self.rand(4, 16, 8, 128, dtype=dtype), self.rand(4, 16, 8, 128, dtype=dtype)


def arguments(device: str) -> Calls:
    """Makes the arguments of one small call, by the function's name below fi_core."""
    x = _Inputs(device)
    return {**_exchanges(x), **_layers(x), **_caches(x), **_attention(x), **_states(x), **_sampling(x)}


def _exchanges(x: _Inputs) -> Calls:
    import torch

    def reduction() -> tuple[Any, ...]:
        from fi_core.comm import create_allreduce_fusion_workspace
        from fi_core.comm.mnnvl import OneRank

        workspace = create_allreduce_fusion_workspace(
            max_token_num=8, hidden_dim=256, dtype=torch.bfloat16, comm_backend=OneRank(), device=torch.device(x.device)
        )
        return x.rand(8, 256), workspace, 0

    def one_rank() -> Any:
        from fi_core.comm import AllToAllWorkspace
        from fi_core.comm.mnnvl import OneRank

        return AllToAllWorkspace(torch.device(x.device), OneRank())

    return {
        "comm.allreduce_fusion": reduction,
        "comm.AllToAllWorkspace.all_to_all": lambda: (one_rank(), x.rand(1, 2, 128), x.rand(1, 2, 128)),
    }


def _layers(x: _Inputs) -> Calls:
    import torch

    half, single, e4m3, rand, ints = torch.bfloat16, torch.float32, torch.float8_e4m3fn, x.rand, x.ints

    def fp4(rows: int) -> tuple[Any, ...]:
        codes = torch.arange(4 * rows * 64, device=x.device) % 255
        return codes.to(torch.uint8).view(4, rows, 64), x.bytes(4, rows * 4, fill=120)

    return {
        "rmsnorm": lambda: (rand(8, 4096), rand(4096)),
        "fused_add_rmsnorm": lambda: (rand(8, 4096), rand(8, 4096), rand(4096)),
        "rmsnorm_quant": lambda: (rand(8, 4096, dtype=e4m3), rand(8, 4096), rand(4096), rand(1, dtype=single)),
        "layernorm": lambda: (rand(8, 4096), rand(4096, dtype=single), rand(4096, dtype=single)),
        "mm_bf16": lambda: (rand(4, 256), rand(512, 256).t()),
        "cutlass_fused_moe": lambda: (
            rand(3, 128),
            ints(0, 1, 2, 3, 1, 0).view(3, 2),
            rand(3, 2, dtype=single),
            rand(4, 256, 128),
            rand(4, 128, 128),
            half,
        ),
        "trtllm_fp4_block_scale_moe": lambda: (
            rand(3, 4),
            None,
            rand(3, 128),
            None,
            *fp4(256),
            None,
            None,
            None,
            None,
            *fp4(128),
            None,
            None,
            None,
            None,
            4,
            2,
            None,
            None,
            128,
            0,
            4,
            None,
        ),
        "mm_bf16_fp4": lambda: (
            rand(4, 128),
            ints(*range(128)).to(torch.uint8).view(2, 64),
            x.bytes(128, 8, fill=56),
        ),
        "gemm.mm_bf16_fp8": lambda: (rand(4, 128), rand(64, 128).to(torch.float8_e4m3fn), rand(1, dtype=single).abs()),
        "gemm.mm_bf16_fp32": lambda: (rand(4, 128), rand(64, 128, dtype=single)),
        "fp4_quantize": lambda: (rand(4, 256), rand(1, dtype=single).abs()),
        "block_scale_interleave": lambda: (ints(*range(512)).to(torch.uint8).view(128, 4),),
        "mxfp4_dequantize": lambda: (ints(*range(128)).to(torch.uint8).view(2, 64), x.bytes(128, 4, fill=127)),
        "silu_and_mul": lambda: (rand(8, 8192),),
        "gelu_and_mul": lambda: (rand(8, 8192),),
    }


def _caches(x: _Inputs) -> Calls:
    import torch

    single, e4m3, rand, ints = torch.float32, torch.float8_e4m3fn, x.rand, x.ints

    def states(*shape: int) -> tuple[Any, ...]:
        return rand(*shape, 128), rand(*shape, dtype=single)

    def table() -> tuple[Any, ...]:
        return ints(0, 0), ints(0, 1)

    return {
        "apply_rope_pos_ids": lambda: (rand(2, 32, 128), rand(2, 8, 128), ints(0, 1)),
        "apply_rope_with_cos_sin_cache": lambda: (
            ints(0, 1), rand(2, 4096), rand(2, 1024), 128, rand(64, 128, dtype=single)
        ),
        "rope.rope_quantize_fp8": lambda: (
            rand(2, 32, 64), rand(2, 64), rand(2, 32, 512), rand(2, 512), rand(64, 64, dtype=single), ints(0, 1)
        ),
        "rope.rope_quantize_fp8_append_paged_kv_cache": lambda: (
            rand(2, 32, 128), rand(2, 8, 128), None, None, rand(2, 8, 128), rand(64, 128, dtype=single), ints(0, 1),
            x.cache(e4m3), *x.pages()[:2], *table(),
        ),
        "append_paged_kv_cache": lambda: (rand(2, 8, 128), rand(2, 8, 128), *table(), x.cache(), *x.pages()),
        "append_paged_mla_kv_cache": lambda: (
            rand(2, 512), rand(2, 64), *table(), rand(4, 16, 512), rand(4, 16, 64), *x.pages()
        ),
        "page.append_sparse_mla_kv_cache": lambda: (rand(2, 576), x.bytes(4, 16, 1, 656), ints(0, 17)),
        "nvfp4_quantize_append_paged_kv_cache": lambda: (
            rand(2, 8, 128), rand(2, 8, 128), *table(), *(
                x.bytes(4, 2, 16, 8, n) for n in (64, 8)
            ), *x.pages(), 0.01, 0.01,
        ),
        "mhc.mhc_post": lambda: (rand(2, 64), rand(2, 4, 64), rand(2, 4, dtype=single), rand(2, 4, 4, dtype=single)),
        "mhc.mhc_pre_big_fuse": lambda: (
            rand(2, 24, dtype=single), rand(2, dtype=single).abs(), rand(2, 4, 64), rand(3, dtype=single),
            rand(24, dtype=single), 256,
        ),
        "concat_mla_k": lambda: (rand(2, 8, 192), rand(2, 8, 128), rand(2, 1, 64)),
        "get_batch_indices_positions": lambda: (ints(0, 2), ints(5), 2),
        "get_seq_lens": lambda: (*x.pages()[1:], 16),
        "merge_state": lambda: (*states(4, 8), *states(4, 8)),
        "merge_states": lambda: states(4, 3, 8),
        "packbits": lambda: (x.bytes(77, fill=1).bool(),),
        "segment_packbits": lambda: (x.bytes(77, fill=1).bool(), ints(0, 33, 77)),
    }  # fmt: skip


def _attention(x: _Inputs) -> Calls:
    import torch

    single, rand, ints = torch.float32, x.rand, x.ints
    return {
        "mla.trtllm_batch_decode_with_kv_cache_mla": lambda: (
            rand(2, 1, 16, 576), rand(4, 64, 576), x.bytes(16 << 20), 128, 512,
            64, ints(0, 1, 2, 3).view(2, 2), ints(20, 100), 100,
        ),
        "chunk_gated_delta_rule": lambda: (
            rand(70, 2, 128), rand(70, 2, 128), rand(70, 4, 128), None, None, None, None, False, ints(0, 5, 70), True,
        ),
        "gdn_decode.gated_delta_rule_decode_pretranspose": lambda: (
            rand(2, 1, 2, 128), rand(2, 1, 2, 128), rand(2, 1, 4, 128), rand(2, 4, 128, 128, dtype=single),
            rand(4, dtype=single), rand(2, 1, 4), rand(4, dtype=single), rand(2, 1, 4),
        ),
        "mamba.selective_state_update": lambda: (
            rand(2, 4, 64, 128, dtype=single), rand(2, 4, 64), rand(2, 4, 1).expand(2, 4, 64),
            rand(4, 1, 1, dtype=single).expand(4, 64, 128), rand(2, 2, 128), rand(2, 2, 128), None,
        ),
        "single_decode_with_kv_cache": lambda: (rand(32, 128), rand(99, 8, 128), rand(99, 8, 128)),
        "decode.trtllm_batch_decode_with_kv_cache": lambda: (
            rand(2, 32, 128), (rand(4, 8, 16, 128), rand(4, 8, 16, 128)),
            x.bytes(8 << 20), ints(0, 1, 2, 3).view(2, 2), ints(20, 32), 32, 0.1,
        ),
        "single_prefill_with_kv_cache": lambda: (rand(33, 32, 128), rand(99, 8, 128), rand(99, 8, 128)),
        "prefill.trtllm_batch_context_with_kv_cache": lambda: (
            rand(33, 32, 128), (rand(8, 8, 16, 128), rand(8, 8, 16, 128)), rand(1), ints(0, 3, 1, 5, 6, 2).view(2, 3),
            ints(40, 20), 20, 40, 0.1, 1.0, 2, ints(0, 20, 33), ints(0, 40, 60),
        ),
    }  # fmt: skip


def _states(x: _Inputs) -> Calls:
    """Of Mamba-2 beside `selective_state_update`, of adapters, and of an indexer."""
    import torch

    rand = x.rand
    return {
        "mamba.causal_conv1d_update": lambda: (
            rand(2, 64),
            rand(3, 64, 3),
            rand(64, 4),
            rand(64),
            "silu",
            x.ints(0, 2),
        ),
        "lora.bgmv_shrink": lambda: (
            rand(2, 128),
            rand(3, 1, 16, 128),
            rand(2, 16, dtype=torch.float32),
            x.ints(0, 2),
        ),
        "fused_moe.bgmv_moe": lambda: (
            rand(2, 128),
            [rand(3, 4, 16, 128)],
            [rand(3, 4, 64, 16)],
            x.ints(0, 0, 1, 1),
            x.ints(3, 1, 0, 3),
            x.ints(0, 2),
            rand(4, dtype=torch.float32).sigmoid(),
            4,
        ),
        "deep_gemm.fp8_mqa_logits": lambda: (
            rand(3, 32, 64).to(torch.float8_e4m3fn),
            (rand(70, 64).to(torch.float8_e4m3fn), rand(70, dtype=torch.float32).abs()),
            rand(3, 32, dtype=torch.float32),
            x.ints(0, 0, 5),
            x.ints(68, 69, 70),
        ),
        "mamba.ssd_combined_fwd": lambda: (
            rand(1, 70, 4, 64),
            rand(1, 70, 4),
            -rand(4, dtype=torch.float32).abs(),
            rand(1, 70, 2, 128),
            rand(1, 70, 2, 128),
        ),
    }


def _sampling(x: _Inputs) -> Calls:
    import torch

    single, rand, ints = torch.float32, x.rand, x.ints

    def probs() -> torch.Tensor:
        return rand(3, 5000, dtype=single).softmax(-1)

    return {
        "top_k": lambda: (rand(2, 5000), 50, True),
        "top_k_page_table_transform": lambda: (
            rand(2, 5000, dtype=single),
            ints(*range(10000)).view(2, 5000),
            ints(5000, 9),
            64,
        ),
        "top_k_ragged_transform": lambda: (rand(2, 40000, dtype=single), ints(0, 7), ints(40000, 30000), 64),
        "softmax": lambda: (rand(3, 5000, dtype=single),),
        "sampling_from_logits": lambda: (rand(3, 5000),),
        "sampling_from_probs": lambda: (probs(),),
        "top_k_sampling_from_probs": lambda: (probs(), 50),
        "top_p_sampling_from_probs": lambda: (probs(), 0.9),
        "min_p_sampling_from_probs": lambda: (probs(), 0.1),
        "top_k_top_p_sampling_from_probs": lambda: (probs(), ints(1, 50, 5000), rand(3, dtype=single).sigmoid()),
        "top_k_top_p_sampling_from_logits": lambda: (rand(3, 5000), 50, 0.9),
        "top_k_renorm_probs": lambda: (probs(), 50),
        "top_p_renorm_probs": lambda: (probs(), 0.9),
        "top_k_mask_logits": lambda: (rand(3, 5000), 50),
        "sample_from_logits": lambda: (rand(3, 5000),),
        "chain_speculative_sampling": lambda: (
            rand(2, 3, 5000, dtype=single).softmax(-1),
            ints(1, 2, 3, 4, 5, 6).view(2, 3),
            rand(2, 4, 5000, dtype=single).softmax(-1),
        ),
    }


def first_call(name: str, device: str) -> None:
    """Prints the seconds of importing the function and of its first call; torch and the inputs come before."""
    import torch
    import tvm_ffi  # noqa: F401

    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    values = arguments(device)[name]()
    synchronize()
    start = time.perf_counter()
    function = __import__("fi_core")
    for word in name.split("."):
        function = getattr(function, word)
    imported = time.perf_counter()
    function(*values)  # type: ignore[operator]
    synchronize()
    print(imported - start, time.perf_counter() - imported)


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this script
    first_call(*sys.argv[1:])
