"""Time of the first call of each op in a fresh process: with an empty store (compiles), then with a warm one. JSON lines.

python benchmarks/startup.py [--device cuda|cpu] [--only TEXT] [--out FILE]. torch, the CUDA context and tvm-ffi are loaded before the clock starts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def calls(device: str) -> dict[str, Callable[[], Any]]:
    """One small call per op, inputs made on use."""
    import torch

    import fi_core as fi

    half, e4m3 = torch.bfloat16, torch.float8_e4m3fn

    def rand(*shape: int, dtype: torch.dtype = half) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, device=device, dtype=torch.int32)

    scale = torch.ones(1, device=device)
    cache = torch.randn(64, 128, device=device)
    kv = (rand(4, 16, 8, 128), rand(4, 16, 8, 128))
    kv8 = tuple(x.to(e4m3) for x in kv)
    table = (ints(0, 1, 2, 3), ints(0, 4), ints(16))
    return {
        "rmsnorm": lambda: fi.rmsnorm(rand(8, 4096), rand(4096)),
        "fused_add_rmsnorm": lambda: fi.fused_add_rmsnorm(rand(8, 4096), rand(8, 4096), rand(4096)),
        "rmsnorm_quant": lambda: fi.rmsnorm_quant(rand(8, 4096).to(e4m3), rand(8, 4096), rand(4096), scale),
        "layernorm": lambda: fi.layernorm(rand(8, 4096), rand(4096, dtype=torch.float32), rand(4096, dtype=torch.float32)),
        "silu_and_mul": lambda: fi.silu_and_mul(rand(8, 8192)),
        "gelu_and_mul": lambda: fi.gelu_and_mul(rand(8, 8192)),
        "apply_rope_pos_ids": lambda: fi.apply_rope_pos_ids(rand(2, 32, 128), rand(2, 8, 128), ints(0, 1)),
        "apply_rope_with_cos_sin_cache": lambda: fi.apply_rope_with_cos_sin_cache(
            ints(0, 1), rand(2, 4096), rand(2, 1024), 128, cache
        ),
        "rope_quantize_fp8": lambda: fi.rope.rope_quantize_fp8(
            rand(2, 32, 64), rand(2, 64), rand(2, 32, 512), rand(2, 512), cache[:, :64].contiguous(), ints(0, 1)
        ),
        "rope_quantize_fp8_append_paged_kv_cache": lambda: fi.rope.rope_quantize_fp8_append_paged_kv_cache(
            rand(2, 32, 128), rand(2, 8, 128), None, None, rand(2, 8, 128), cache, ints(0, 1), kv8, table[0], table[1], ints(0, 0), ints(0, 1)
        ),
        "append_paged_kv_cache": lambda: fi.append_paged_kv_cache(
            rand(2, 8, 128), rand(2, 8, 128), ints(0, 0), ints(0, 1), kv, *table
        ),
        "append_paged_mla_kv_cache": lambda: fi.append_paged_mla_kv_cache(
            rand(2, 512), rand(2, 64), ints(0, 0), ints(0, 1), rand(4, 16, 512), rand(4, 16, 64), *table
        ),
        "get_batch_indices_positions": lambda: fi.get_batch_indices_positions(ints(0, 2), ints(5), 2),
        "get_seq_lens": lambda: fi.get_seq_lens(table[1], table[2], 16),
        "merge_state": lambda: fi.merge_state(
            rand(4, 8, 128), rand(4, 8, dtype=torch.float32), rand(4, 8, 128), rand(4, 8, dtype=torch.float32)
        ),
        "merge_states": lambda: fi.merge_states(rand(4, 3, 8, 128), rand(4, 3, 8, dtype=torch.float32)),
        "packbits": lambda: fi.packbits(torch.ones(77, device=device, dtype=torch.bool)),
        "segment_packbits": lambda: fi.segment_packbits(torch.ones(77, device=device, dtype=torch.bool), ints(0, 33, 77)),
        "single_decode_with_kv_cache": lambda: fi.single_decode_with_kv_cache(rand(32, 128), rand(99, 8, 128), rand(99, 8, 128)),
        "single_prefill_with_kv_cache": lambda: fi.single_prefill_with_kv_cache(
            rand(33, 32, 128), rand(99, 8, 128), rand(99, 8, 128), causal=True
        ),
    }


def first_call(name: str, device: str) -> None:
    import torch
    import tvm_ffi  # noqa: F401

    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    call = calls(device)[name]
    torch.zeros(1, device=device)
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    print(time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        first_call(args.child, args.device)
        return
    rows = []
    for name in calls("cpu"):
        if args.only not in name:
            continue
        row: dict[str, object] = {"op": name, "device": args.device}
        with tempfile.TemporaryDirectory() as store:
            for state in ("cold", "warm"):
                line = [sys.executable, __file__, "--child", name, "--device", args.device]
                done = subprocess.run(line, env={**os.environ, "FI_CACHE_DIR": store}, capture_output=True, text=True, check=False)
                row[f"{state}_s"] = round(float(done.stdout), 3) if not done.returncode else done.stderr.strip()[-300:]
        rows.append(row)
        print(json.dumps(row), flush=True)
    if args.out:
        args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
