"""A custom op in three small files: compiled on first use, cached by content, on the GPU if there is one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from fi_core.jit import gen_jit_spec
from fi_core.runtime.spec.op import Entry

HERE = Path(__file__).parent


def make(device: str) -> Callable[..., None]:
    """The function `scale(out, x, a)` for tensors on a device."""
    if device == "cpu":
        return gen_jit_spec("scale_on_cpu", [HERE / "scale.cc"]).bind()
    sources = [HERE / "scale.cc", HERE / "scale.cu"]
    return gen_jit_spec("scale", sources, entries=[Entry("scale", body="", threads=256)]).bind()


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scale = make(device)
    x = torch.arange(8, dtype=torch.float32, device=device)
    out = torch.empty_like(x)
    scale(out, x, 0.5)
    print(out.tolist())
    try:
        scale(out[:4], x, 0.5)
    except ValueError as error:
        print(error)


if __name__ == "__main__":
    main()
