"""Other libraries: how to find and install them, and one calling convention for their builds."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Library:
    """Import names of its builds, of which the first that exists is used, and the majors of the compute capabilities
    that it has kernels for; None means all of them and the CPU.
    """

    modules: tuple[str, ...]
    install: str
    majors: tuple[int, ...] | None = None

    def module(self) -> str | None:
        """The installed module. Only its top package is looked up; nothing is imported."""
        return next((name for name in self.modules if _exists(name)), None)

    def places(self, every: Sequence[str]) -> tuple[str, ...]:
        """Those of "CPU" and compute capabilities that it runs on."""
        majors = self.majors
        return tuple(p for p in every if majors is None or p.partition(".")[0] in map(str, majors))

    def load(self) -> Any:
        name = self.module()
        if name is None:
            raise ModuleNotFoundError(f"none of {', '.join(self.modules)} is installed: {self.install}")
        return importlib.import_module(name)


def _exists(module: str) -> bool:
    """Whether a module exists, by the folders of its top package; importing it may be slow."""
    top, *below = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not below:
        return spec is not None
    places = [Path(folder).joinpath(*below) for folder in spec.submodule_search_locations or ()]
    return any(place.is_dir() or place.with_suffix(".py").is_file() for place in places)


_TORCH = Library(("torch",), "pip install torch")
_TORCH_GPU = Library(("torch",), "pip install torch", (8, 9, 10, 11, 12))
FLASHINFER = Library(("flashinfer",), "pip install flashinfer-python", (7, 8, 9, 10, 11, 12))
FLASH_ATTENTION_3 = Library(
    ("flash_attn_interface", "vllm.vllm_flash_attn.flash_attn_interface"),
    'pip install "git+https://github.com/Dao-AILab/flash-attention.git#subdirectory=hopper", or pip install vllm',
    (9,),
)
FLASH_MLA = Library(
    ("flash_mla", "vllm.third_party.flashmla.flash_mla_interface"),
    "pip install git+https://github.com/deepseek-ai/FlashMLA.git, or pip install vllm",
    (9, 10),
)
DEEP_GEMM = Library(
    ("deep_gemm", "vllm.third_party.deep_gemm"),
    "pip install git+https://github.com/deepseek-ai/DeepGEMM.git, or pip install vllm",
    (9, 10),
)

LIBRARIES = {
    "torch": _TORCH,
    "torch_math": _TORCH,
    "torch_flash": _TORCH,
    "torch_efficient": _TORCH_GPU,
    "cublas": _TORCH_GPU,
    "cudnn": _TORCH_GPU,
    "flashinfer": FLASHINFER,
    "flash_attention3": FLASH_ATTENTION_3,
    "flashmla": FLASH_MLA,
    "deepgemm": DEEP_GEMM,
}


def flash_attention3() -> Callable[..., Any]:
    """FlashAttention-3's varlen function of the installed build: (q, k, v, *, cu_q, cu_k, max_q, max_k, ...)."""
    library = FLASH_ATTENTION_3.load()
    function = library.flash_attn_varlen_func
    more = {"fa_version": 3} if library.__name__.startswith("vllm") else {}

    def call(q: Any, k: Any, v: Any, *, cu_q: Any, cu_k: Any, max_q: int, max_k: int, **options: Any) -> Any:
        found = function(
            q=q,
            k=k,
            v=v,
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k,
            max_seqlen_q=max_q,
            max_seqlen_k=max_k,
            **options,
            **more,
        )
        return found[0] if isinstance(found, tuple) else found

    return call
