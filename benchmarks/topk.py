"""Top-k beside torch.topk and a plain read, in one run: GPU and host time of every shape, as JSON lines.

python benchmarks/topk.py [--only TEXT] [--out FILE] [--iters N]; needs a CUDA device. `read` is torch.amax over all
elements: what reading them once costs here. Time: median of CUDA-graph replays between two events, the L2 flushed by a
256 MB memset before each, sides interleaved; an empty kernel costs about 4 us that way. Host time: of the first shape.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch
from elementwise import Case
from sides import gpu_us, host_us

import fi_core


def cases() -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (1, 16, 64, 256):
            for width in (32768, 131072, 262144):
                x = torch.randn(rows, width, device="cuda").to(dtype)
                lengths = torch.full((rows,), width, device="cuda", dtype=torch.int32)
                for k in (64, 256, 2048):
                    yield (
                        f"{str(dtype)[6:]} {rows}x{width} k{k}",
                        x.numel() * x.element_size(),
                        {
                            "fi_core": lambda x=x, k=k: fi_core.top_k(x, k),
                            "fi_core_sorted": lambda x=x, k=k: fi_core.top_k(x, k, sorted=True),
                            "fi_core_ragged": lambda x=x, k=k, n=lengths: fi_core.top_k_ragged_transform(x, n, n, k),
                            "torch": lambda x=x, k=k: torch.topk(x, k, sorted=False),
                            "torch_sorted": lambda x=x, k=k: torch.topk(x, k),
                            "read": lambda x=x: torch.amax(x),
                        },
                    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run cases whose name contains this")
    parser.add_argument("--out", type=Path, help="write JSON lines here too")
    parser.add_argument("--iters", type=int, default=15)
    args = parser.parse_args()
    first = True
    for name, moved, sides in cases():
        if args.only not in name:
            continue
        row: dict[str, object] = {"case": name, "bytes": moved}
        row |= {side: round(statistics.median(us), 2) for side, us in gpu_us(sides, args.iters).items()}
        if first:
            row["host_us"] = {side: round(host_us(call), 2) for side, call in sides.items()}
            first = False
        line = json.dumps(row)
        print(line, flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
